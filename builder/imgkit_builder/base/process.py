"""The only module that starts programs: argv lists, both streams drained, output kept for the error."""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from imgkit_entrypoints.errors import ToolFailed, ToolMissing

TAIL_LINES = 20
PIPE_BYTES = 1 << 20
GIT = ("git", "--no-optional-locks", "-c", "core.fsmonitor=false")
"""Words before a question to git, which would run a program that a folder of another person names."""

# Arguments: the pid of imgkit, then the program. The kernel remembers the request through exec. Python
# ignores the two signals, and the program would inherit that.
_BOUND = """
import os, sys
from _signal import SIG_DFL, SIGKILL, SIGPIPE, SIGXFSZ, signal
try:
    import ctypes
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
except (ImportError, OSError, AttributeError):
    pass
if os.getppid() != int(sys.argv[1]):
    sys.exit("imgkit has ended")
signal(SIGPIPE, SIG_DFL)
signal(SIGXFSZ, SIG_DFL)
os.execv(sys.argv[2], sys.argv[2:])
"""


class Exited(ToolFailed):
    """A program of `through` failed."""

    def __init__(self, program: str, code: int, said: str, hint: str) -> None:
        super().__init__(f"{program} failed with exit code {code}: {said}", hint=hint or None)
        self.code = code
        self.said = said
        """Its standard error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A program that has ended."""

    argv: tuple[str, ...]
    returncode: int
    output: str
    """Standard output and standard error, merged and complete."""

    def tail(self) -> str:
        """The last lines, as quoted in errors."""
        return "\n".join(self.output.splitlines()[-TAIL_LINES:])


def need(program: str, hint: str = "", env: Mapping[str, str] | None = None) -> None:
    """Raise ToolMissing where `program` is not on PATH."""
    if shutil.which(program, path=env.get("PATH") if env else None) is None:
        raise ToolMissing(f"the program {program!r} is not on PATH", hint=hint or None)


def own_words() -> tuple[str, ...]:
    """The words that start this imgkit: its name, or this Python and the path of the one-file tool."""
    file = getattr(__spec__.loader, "archive", "")
    return (sys.executable, str(Path(file).absolute())) if file else ("imgkit",)


def attached(argv: Sequence[str]) -> int:
    """Run `argv` on this terminal and return its exit code.

    Raises
    ------
    ToolMissing : there is no such program.
    """
    need(argv[0])
    try:
        return subprocess.run(list(argv), check=False).returncode
    except KeyboardInterrupt:
        return 130  # the program got the same Ctrl-C


def become(argv: Sequence[str], *, cwd: Path) -> NoReturn:
    """Replace this process by `argv`, which inherits the terminal, signals and exit code.

    Raises
    ------
    ToolMissing : there is no such program.
    """
    need(argv[0])
    os.chdir(cwd)
    sys.stdout.flush()
    sys.stderr.flush()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and children inherit that
        signal.signal(number, signal.SIG_DFL)
    os.execvp(argv[0], list(argv))  # noqa: S606 - an argv list, no shell


def bound(argv: Sequence[str]) -> list[str]:
    """The words that start `argv`, a program with its path, so that it ends when imgkit is killed with -9.

    Notes
    -----
    Only Linux can do that, and a process that has become another user may be unable to start its Python:
    then the words are `argv` itself. The program ends with the thread that starts it, which has to
    wait.
    """
    if sys.platform != "linux" or not os.access(sys.executable, os.X_OK):
        return list(argv)
    return [sys.executable, "-I", "-S", "-c", _BOUND, str(os.getpid()), *argv]


def run(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    on_line: Callable[[str], None] | None = None,
    check: bool = True,
    hint: str = "",
) -> Finished:
    """Run `argv` to its end; `on_line` receives each line of output as it comes.

    Raises
    ------
    ToolMissing : the program is not on PATH; `hint` explains how to install it.
    ToolFailed : `check` and the exit code is not 0; quotes the last lines.
    """
    words = tuple(str(word) for word in argv)
    need(words[0], hint, env)
    lines: collections.deque[str] = collections.deque()
    with subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=None if env is None else dict(env),
        cwd=cwd,
    ) as process:
        assert process.stdout is not None  # noqa: S101 - for the type checker: stdout=PIPE
        try:
            for line in process.stdout:
                lines.append(line)
                if on_line:
                    on_line(line.rstrip("\n"))
        except BaseException:
            process.kill()
            raise
    finished = Finished(argv=words, returncode=process.returncode, output="".join(lines))
    if check and finished.returncode != 0:
        raise ToolFailed(
            f"{words[0]} failed with exit code {finished.returncode}: {' '.join(words)}",
            hint=f"its last lines:\n{finished.tail()}" + (f"\n{hint}" if hint else ""),
        )
    return finished


def through(
    argv: Sequence[str],
    chunks: Iterable[bytes],
    *,
    cwd: Path | None = None,
    hint: str = "",
    hold: bool = False,
) -> Generator[bytes, None, None]:
    """Feed `chunks` to a program and yield its output, with bounded memory and no thread.

    Parameters
    ----------
    hold : leave its standard input open behind the last chunk, until it ends by itself.

    Raises
    ------
    ToolMissing : the program is not on PATH.
    Exited : it failed; quotes its standard error.
    """
    need(argv[0], hint)
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, bufsize=0, cwd=cwd
        ) as program,
    ):
        try:
            yield from pumped(program, iter(chunks), hold=hold)
        finally:
            # Reached on errors and when the reader stops early; harmless once the program has ended.
            if program.poll() is None and program.stdout is not None and not program.stdout.closed:
                program.kill()
        if program.wait() != 0:
            said.seek(0)
            raise Exited(argv[0], program.returncode, said.read().decode(errors="replace").strip(), hint)


def pumped(
    program: subprocess.Popen[bytes], chunks: Iterator[bytes], *, hold: bool = False
) -> Iterator[bytes]:
    """Feed `chunks` to the running `program` and yield its output until that ends.

    `hold` leaves its standard input open behind the last chunk.
    """
    assert program.stdin is not None  # noqa: S101 - for the type checker: both are pipes
    assert program.stdout is not None  # noqa: S101
    sink, source = program.stdin, program.stdout
    os.set_blocking(sink.fileno(), False)
    for end in (sink, source):
        # Fewer, larger writes; beyond a user's pipe quota this is refused, and the default stays.
        with contextlib.suppress(OSError, AttributeError):
            fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    waiting, fed = memoryview(b""), False
    while True:
        while not waiting and not fed:
            chunk = next(chunks, None)
            if chunk is None:
                fed = True
                if not hold:
                    sink.close()
            else:
                waiting = memoryview(chunk)
        readable, writable, _ = select.select([source], [sink] if waiting else [], [])
        if writable:
            try:
                waiting = waiting[os.write(sink.fileno(), waiting) :]
            except BrokenPipeError:
                waiting, fed = memoryview(b""), True
                sink.close()
        if readable:
            data = os.read(source.fileno(), PIPE_BYTES)
            if not data:
                source.close()
                return
            yield data

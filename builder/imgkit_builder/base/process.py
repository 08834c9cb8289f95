"""The only module that starts programs: argv lists, both streams drained, output kept for the error."""

from __future__ import annotations

import collections
import contextlib
import fcntl
import itertools
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from imgkit_entrypoints import terminal
from imgkit_entrypoints.errors import ImgkitError, ToolFailed, ToolMissing

TAIL_LINES = 20
PIPE_BYTES = 1 << 20
MOST_BYTES = 8 << 20
"""What is kept of a program's output. Answers have some KB, and long lists some MB."""
_ERROR_BYTES = 1 << 16
"""What is kept of the standard error of a program of `through`: its end."""
_PIECE = 1 << 16
_SHOWN = 200
"""Characters of a line that an error quotes."""
_POLL_S = 0.02
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


class _Flood(ToolFailed):
    """A program printed more than `MOST_BYTES`."""

    excess = ""

    def __init__(self, program: str, start: bytes) -> None:
        limit = f"{MOST_BYTES >> 20} MB"
        super().__init__(f"{program} printed more than {limit} {self.excess} first line: {first_line(start)}")
        self.start = start
        """What it printed before imgkit ended it, or the first of its errors."""


class TooLong(_Flood):
    """A program printed more than `MOST_BYTES` of output."""

    excess = "instead of a short answer; its"


class ErrorsTooLong(_Flood):
    """A program printed more than `MOST_BYTES` of error messages, and nothing else meanwhile."""

    excess = "of error messages; their"


class Exited(ToolFailed):
    """A program of `through` failed."""

    def __init__(self, program: str, code: int, errors: str, hint: str) -> None:
        message, hint = quoted(f"{program} failed with exit code {code}", errors, hint)
        super().__init__(message, hint=hint or None)
        self.code = code
        self.errors = errors
        """The end of its standard error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A program that has ended."""

    argv: tuple[str, ...]
    returncode: int
    output: str
    """Standard output and standard error, merged; of more than `MOST_BYTES` characters the end."""

    def tail(self) -> str:
        """Return the last lines, as quoted in errors."""
        return "\n".join(self.output.splitlines()[-TAIL_LINES:])


def first_line(output: bytes) -> str:
    """Return the first line with text in what a program printed, as quoted in errors."""
    text = output[:_PIECE].decode(errors="replace").strip()
    return text.split("\n", 1)[0].strip()[:_SHOWN] or "(nothing)"


def quoted(message: str, output: str, hint: str = "") -> tuple[str, str]:
    """Return message and hint of an error: one line of output joins the message, more lines the hint."""
    lines = output.splitlines()[-TAIL_LINES:]
    if len(lines) < 2:
        return f"{message}: {output}" if output else message, hint
    return message, "\n".join(filter(None, ("its last lines:", *lines, hint)))


def need(program: str, hint: str = "", env: Mapping[str, str] | None = None) -> None:
    """Raise ToolMissing where `program` is not on PATH."""
    if shutil.which(program, path=env.get("PATH") if env else None) is None:
        raise ToolMissing(f"the program {program!r} is not on PATH", hint=hint or None)


def processors() -> int:
    """Return the number of processors that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


def attached(argv: Sequence[str], *, until: Callable[[], bool] | None = None) -> int:
    """Run `argv` with our streams and return its exit code; what it prints cannot steer the terminal.

    Parameters
    ----------
    until : asked from time to time; when it is true, the program is ended, and the result is 0.

    Raises
    ------
    ToolMissing : there is no such program.
    """
    need(argv[0])
    out, err = sys.stdout.isatty(), sys.stderr.isatty()
    with subprocess.Popen(
        list(argv),
        stdout=subprocess.PIPE if out else None,
        stderr=subprocess.STDOUT if out and err else subprocess.PIPE if err else None,
    ) as program:
        if until is not None:
            threading.Thread(target=_end_when, args=(program, until), daemon=True).start()
        try:
            if source := program.stdout or program.stderr:
                pass_on = terminal.passing(to_err=not out)
                while chunk := os.read(source.fileno(), PIPE_BYTES):
                    pass_on(chunk)
            code = program.wait()
            return 0 if until is not None and code == -signal.SIGTERM else code
        except KeyboardInterrupt:
            return 130  # the program got the same Ctrl-C


def _end_when(program: subprocess.Popen[bytes], is_over: Callable[[], bool]) -> None:
    """End `program` a moment after `is_over` is true; it is asked soon at first, then every 10 seconds."""
    for wait_s in itertools.chain((1.0, 1.0, 2.0, 3.0, 5.0), itertools.repeat(10.0)):
        try:
            program.wait(wait_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ImgkitError):  # no answer this time
                if is_over():
                    break
        else:
            return
    with contextlib.suppress(subprocess.TimeoutExpired):
        program.wait(2.0)  # for what tail, which looks once a second, has not shown
    program.terminate()


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
    """Return the argv that starts `argv`, a path first, so that it ends when imgkit is killed with -9.

    Notes
    -----
    Only Linux can do that, and a process that has become another user may be unable to start its Python:
    then the result is `argv` itself. The program ends with the thread that starts it, which has to wait.
    """
    if sys.platform != "linux" or not os.access(sys.executable, os.X_OK):
        return list(argv)
    return [sys.executable, "-I", "-S", "-c", _BOUND, str(os.getpid()), *argv]


def run(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    check: bool = True,
    hint: str = "",
) -> Finished:
    """Run `argv` to its end.

    Raises
    ------
    ToolMissing : the program is not on PATH; `hint` explains how to install it.
    ToolFailed : `check` and the exit code is not 0; quotes the last lines.
    """
    command = tuple(map(str, argv))
    need(command[0], hint, env)
    pieces: collections.deque[str] = collections.deque()
    length = 0
    with subprocess.Popen(
        command,
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
            while piece := process.stdout.read(_PIECE):
                pieces.append(piece)
                length += len(piece)
                while length > MOST_BYTES:
                    length -= len(pieces.popleft())
        except BaseException:
            process.kill()
            raise
    finished = Finished(argv=command, returncode=process.returncode, output="".join(pieces))
    if check and finished.returncode != 0:
        raise ToolFailed(
            f"{command[0]} failed with exit code {finished.returncode}: {' '.join(command)}",
            hint=f"its last lines:\n{finished.tail()}" + (f"\n{hint}" if hint else ""),
        )
    return finished


def answer(output: Generator[bytes, None, None], program: str) -> bytes:
    """Return all of `output`, which `through` yields from `program`.

    Raises
    ------
    TooLong : it is more than `MOST_BYTES`; the program has been ended.
    """
    data = bytearray()
    with contextlib.closing(output):
        for chunk in output:
            data += chunk
            if len(data) > MOST_BYTES:
                raise TooLong(program, bytes(data))
    return bytes(data)


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
    ErrorsTooLong : it prints errors without end; it has been ended.
    """
    need(argv[0], hint)
    errors = _Errors(argv[0])
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, cwd=cwd
    ) as program:
        try:
            yield from pumped(program, iter(chunks), hold=hold, errors=errors)
            _wait_for_end(program, errors)
        finally:
            # Reached on errors and when the reader stops early; harmless once the program has ended.
            program.kill()
    if program.returncode != 0:
        raise Exited(argv[0], program.returncode, errors.end.decode(errors="replace").strip(), hint)


class _Errors:
    """What a program prints to its standard error: the first piece, the end, and how much."""

    def __init__(self, program: str) -> None:
        self.end = bytearray()
        self._program, self._start, self._count = program, b"", 0

    def add(self, data: bytes) -> None:
        """Take a piece.

        Raises
        ------
        ErrorsTooLong : they are more than `MOST_BYTES` since the last progress.
        """
        self._start = self._start or data
        self.end += data
        del self.end[:-_ERROR_BYTES]
        self._count += len(data)
        if self._count > MOST_BYTES:
            raise ErrorsTooLong(self._program, self._start)

    def note_progress(self) -> None:
        """Count anew: a program that reads or answers may have a warning for each of many files."""
        self._count = 0


def pumped(
    program: subprocess.Popen[bytes],
    chunks: Iterator[bytes],
    *,
    hold: bool = False,
    errors: _Errors | None = None,
) -> Iterator[bytes]:
    """Feed `chunks` to the running `program` and yield its output until that ends.

    `hold` leaves its standard input open behind the last chunk. `errors` receives its standard error, if that
    is a pipe.

    Raises
    ------
    ErrorsTooLong : as `_Errors.add`.
    """
    errors = errors or _Errors(str(program.args))
    assert program.stdin is not None  # noqa: S101 - for the type checker: both are pipes
    assert program.stdout is not None  # noqa: S101
    sink, source = program.stdin, program.stdout
    os.set_blocking(sink.fileno(), False)
    for end in (sink, source):
        # Fewer, larger writes; beyond a user's pipe quota this is refused, and the default stays.
        with contextlib.suppress(OSError, AttributeError):
            fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    pending, is_fed = memoryview(b""), False
    sources = [source, program.stderr] if program.stderr else [source]
    while True:
        while not pending and not is_fed:
            chunk = next(chunks, None)
            if chunk is None:
                is_fed = True
                if not hold:
                    sink.close()
            else:
                pending = memoryview(chunk)
        readable, writable, _ = select.select(sources, [sink] if pending else [], [])
        if writable:
            try:
                pending = pending[os.write(sink.fileno(), pending) :]
            except BrokenPipeError:
                pending, is_fed = memoryview(b""), True
                sink.close()
        if writable or source in readable:
            errors.note_progress()
        if program.stderr in readable and not _read_errors(program, errors):
            sources = [source]
        if source in readable:
            data = os.read(source.fileno(), PIPE_BYTES)
            if not data:
                source.close()
                return
            yield data


def _read_errors(program: subprocess.Popen[bytes], errors: _Errors) -> bool:
    """Add what `program` has printed to its standard error to `errors`; False at the end of that."""
    assert program.stderr is not None  # noqa: S101 - for the type checker: stderr=PIPE
    data = os.read(program.stderr.fileno(), PIPE_BYTES)
    errors.add(data)
    return bool(data)


def _wait_for_end(program: subprocess.Popen[bytes], errors: _Errors) -> None:
    """Wait for the end of `program`, whose output has ended, and hear what it prints until then.

    What it leaves behind, such as a shared connection of ssh, may hold its standard error open.
    """
    streams = [program.stderr] if program.stderr else []
    while program.poll() is None:
        if select.select(streams, [], [], _POLL_S)[0] and not _read_errors(program, errors):
            program.wait()
    if select.select(streams, [], [], 0)[0]:
        _read_errors(program, errors)

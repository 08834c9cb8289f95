"""The only module that starts programs: argv lists, both streams drained, output kept for the error."""

from __future__ import annotations

import collections
import contextlib
import fcntl
import itertools
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from imgkit_entrypoints import terminal
from imgkit_entrypoints.errors import ImgkitError, ToolFailed, ToolMissing

TAIL_LINES = 20
"""Lines of a failed program that an error quotes."""
KEPT_LINES = 1000
"""Lines of a step of a build in which its errors are looked for."""
INTERRUPTED = 130
"""Exit code of what Ctrl-C has ended, as a shell reports SIGINT."""
PIPE_BYTES = 1 << 20
MOST_BYTES = 8 << 20
"""What is kept of a program's output. Answers have some KB, and long lists some MB."""
_ERROR_BYTES = 1 << 16
"""What is kept of the standard error of a program of `filter_through`: its end."""
_PIECE = 1 << 16
_ERROR = re.compile(r"\b(ERROR|FATAL)\b")
_PROGRESS = re.compile(
    r"[^A-Za-z]*\d ?%(?!.*[A-Za-z]{5}).*"  # "32,768  16%  31.25MB/s", " 45%|##  | 45/100 [00:03<00:04]"
    r"|.*[=#]{3}.*\d ?%.*|.*\d ?%.*[=#]{3}.*"  # "blob 3a5f [====>---] 31 % 5s"
    r"|.*[━█▓]{3}.*"  # pip's, without a percentage
)
_SHOWN = 200
"""Characters of a line that an error quotes."""
_POLL_S = 0.02
GIT = ("git", "--no-optional-locks", "-c", "core.fsmonitor=false")
"""The start of a read-only git command: git would run a monitor that a folder of another user names."""

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


class _TooMuch(ToolFailed):
    """A program printed more than `MOST_BYTES`."""

    kind = ""

    def __init__(self, program: str, start: bytes) -> None:
        super().__init__(
            f"{program} printed more than {MOST_BYTES >> 20} MB {self.kind} first line: {first_line(start)}"
        )
        self.start = start
        """What it printed first."""


class TooLong(_TooMuch):
    """A program printed more than `MOST_BYTES` of output."""

    kind = "instead of a short answer; its"


class ErrorsTooLong(_TooMuch):
    """A program printed more than `MOST_BYTES` of error messages, and nothing else meanwhile."""

    kind = "of error messages; their"


class Exited(ToolFailed):
    """A program of `filter_through` failed."""

    def __init__(self, program: str, code: int, errors: bytes, hint: str) -> None:
        self.errors = errors.decode(errors="replace").strip()
        """The end of its standard error."""
        message, hint = quote_output(f"{program} failed with exit code {code}", self.errors, hint)
        super().__init__(message, hint=hint or None)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A program that has ended."""

    argv: tuple[str, ...]
    returncode: int
    output: str
    """Standard output and standard error, merged; of more than `MOST_BYTES` the end."""

    def tail(self) -> str:
        """Return the last lines, as quoted in errors."""
        return "\n".join(last_lines(self.output))


def first_line(output: bytes) -> str:
    """Return the first line with text in a program's output, as quoted in errors."""
    text = output[:_PIECE].decode(errors="replace").strip()
    return text.split("\n", 1)[0].strip()[:_SHOWN] or "(nothing)"


def last_lines(output: str, most: int = TAIL_LINES) -> list[str]:
    """Return what an error quotes of a failed program's output: its end, and its last errors before that.

    Progress bars and empty lines are left out. Of a line that was rewritten, the last text counts.
    """
    texts = (line.rstrip().rpartition("\r")[2] for line in output.split("\n"))
    lines = [text for text in texts if text and not _is_progress(text)]
    errors = [number for number, line in enumerate(lines) if _ERROR.search(line)][-(most // 2) :]
    remaining = [number for number in range(len(lines)) if number not in errors]
    end = remaining[len(errors) - most :]
    return [lines[number] for number in sorted((*errors, *end))]


def _is_progress(line: str) -> bool:
    # A longer line is no bar, and could take long to match.
    return len(line) <= _SHOWN and not _ERROR.search(line) and _PROGRESS.fullmatch(line) is not None


def quote_output(message: str, output: str, hint: str = "") -> tuple[str, str]:
    """Return the message and hint of an error about a program, with the end of its `output`.

    One line of output goes into the message, more lines into the hint.
    """
    lines = last_lines(output)
    if len(lines) < 2:
        return ": ".join((message, *lines)), hint
    return message, "\n".join(filter(None, ("its last lines:", *lines, hint)))


_KILL_CODES = (-signal.SIGKILL, -signal.SIGXCPU, 128 + signal.SIGKILL, 128 + signal.SIGXCPU)
"""Exit codes, of Python and of a shell, of a program that used more memory or CPU time than it may."""
_KILL_MESSAGE = re.compile(r"signal: (killed|CPU time limit exceeded)")  # Go's, of a runtime whose child died


def kill_hint(code: int, output: str = "") -> str:
    """Return a further line for the hint about a conversion whose program has failed.

    The line is empty unless the exit code or the output says that the system ended the program.
    """
    if code not in _KILL_CODES and _KILL_MESSAGE.search(output) is None:
        return ""
    return (
        "\nthe system ended it, perhaps for its memory or CPU time; on a login node, let a job do this: the "
        "same command with --submit --time 1h"
    )


def require_program(program: str, hint: str = "", env: Mapping[str, str] | None = None) -> None:
    """Raise ToolMissing where `program` is not on PATH."""
    if shutil.which(program, path=env.get("PATH") if env else None) is None:
        raise ToolMissing(f"the program {program!r} is not on PATH", hint=hint or None)


def count_processors() -> int:
    """Return the number of processors that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


def run_attached(argv: Sequence[str], *, until: Callable[[], bool] | None = None) -> int:
    """Run `argv` with our streams and return its exit code; what it prints cannot steer the terminal.

    Parameters
    ----------
    until : called from time to time; when it returns true, the program is ended, and the result is 0.

    Raises
    ------
    ToolMissing : there is no such program.
    """
    require_program(argv[0])
    out, err = sys.stdout.isatty(), sys.stderr.isatty()
    with subprocess.Popen(
        list(argv),
        stdout=subprocess.PIPE if out else None,
        stderr=subprocess.STDOUT if out and err else subprocess.PIPE if err else None,
    ) as program:
        if until is not None:
            threading.Thread(target=_end_when, args=(program, until), daemon=True).start()
        try:
            # A stream that is no terminal is inherited: a file takes what is printed as it is.
            if source := program.stdout or program.stderr:
                pass_on = terminal.output_copier(to_err=not out)
                while chunk := os.read(source.fileno(), PIPE_BYTES):
                    pass_on(chunk)
            code = program.wait()
            return 0 if until is not None and code == -signal.SIGTERM else code
        except KeyboardInterrupt:
            # The program got the same Ctrl-C, and ends by itself.
            return INTERRUPTED


def _end_when(program: subprocess.Popen[bytes], is_over: Callable[[], bool]) -> None:
    """End `program` a moment after `is_over`, which is called soon at first, then every 10 seconds."""
    for wait_s in itertools.chain((1.0, 1.0, 2.0, 3.0, 5.0), itertools.repeat(10.0)):
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(wait_s)
            return
        # A scheduler that does not answer this time may answer the next.
        with contextlib.suppress(ImgkitError):
            if is_over():
                break
    with contextlib.suppress(subprocess.TimeoutExpired):
        program.wait(2.0)  # for what tail, which looks once a second, has not shown
    program.terminate()


def replace_process(argv: Sequence[str], *, cwd: Path) -> NoReturn:
    """Replace this process by `argv`, which inherits the terminal, signals and exit code.

    Raises
    ------
    ToolMissing : there is no such program.
    """
    require_program(argv[0])
    os.chdir(cwd)
    sys.stdout.flush()
    sys.stderr.flush()
    # Python ignores these two, and the program would inherit that.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.execvp(argv[0], list(argv))  # noqa: S606 - an argv list, no shell


def bound_to_parent(argv: Sequence[str]) -> list[str]:
    """Return the argv that starts `argv`, a program's path and arguments, and ends it if imgkit is killed.

    The program ends with the thread that starts it, which has to wait.
    """
    # Only Linux can do that, and a process that has become another user may be unable to start its Python:
    # then the program starts without it.
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
    require_program(command[0], hint, env)
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=None if env is None else dict(env),
        cwd=cwd,
    ) as process:
        assert process.stdout is not None  # noqa: S101 - for the type checker: stdout=PIPE
        try:
            # Every piece but the last is full, so that this keeps the last `MOST_BYTES`.
            pieces = collections.deque(
                iter(partial(process.stdout.read, _PIECE), b""), maxlen=MOST_BYTES // _PIECE
            )
        except BaseException:
            # Ctrl-C ends us while the program may ignore it.
            process.kill()
            raise
    # Not text=True: a carriage return, by which a progress bar rewrites its line, would become a line break.
    output = b"".join(pieces).decode(errors="replace").replace("\r\n", "\n")
    finished = Finished(argv=command, returncode=process.returncode, output=output)
    if check and finished.returncode != 0:
        raise ToolFailed(
            f"{command[0]} failed with exit code {finished.returncode}: {' '.join(command)}",
            hint=f"its last lines:\n{finished.tail()}" + (f"\n{hint}" if hint else ""),
        )
    return finished


def read_answer(output: Generator[bytes, None, None], program: str) -> bytes:
    """Return all of `output`, which `filter_through` yields from `program`.

    Raises
    ------
    TooLong : it is more than `MOST_BYTES`; the program has been ended.
    """
    text = bytearray()
    with contextlib.closing(output):
        for chunk in output:
            text += chunk
            if len(text) > MOST_BYTES:
                raise TooLong(program, bytes(text))
    return bytes(text)


def filter_through(
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
    require_program(argv[0], hint)
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, cwd=cwd
    ) as program:
        try:
            errors = yield from pump_pipes(program, iter(chunks), hold=hold, name=argv[0])
        finally:
            # Reached on errors and when the reader stops early; harmless once the program has ended.
            program.kill()
    if program.returncode != 0:
        raise Exited(argv[0], program.returncode, errors, hint)


def pump_pipes(
    program: subprocess.Popen[bytes], chunks: Iterator[bytes], *, hold: bool = False, name: str = ""
) -> Generator[bytes, None, bytes]:
    """Feed `chunks` to the running `program`, yield its output, and return the end of its errors.

    Parameters
    ----------
    program : its standard input and output are pipes without buffers; its standard error may be one.
    hold : leave its standard input open behind the last chunk.
    name : the program's name in errors.

    Raises
    ------
    ErrorsTooLong : it prints errors without end, and neither reads nor answers meanwhile.
    """
    assert program.stdin is not None  # noqa: S101 - for the type checker: both are pipes
    assert program.stdout is not None  # noqa: S101
    sink, source, errors = program.stdin, program.stdout, program.stderr
    # A blocking write could wait for a program that waits for us to read its output.
    os.set_blocking(sink.fileno(), False)
    for pipe in (sink, source):
        # Fewer, larger writes; beyond a user's pipe quota this is refused, and the default stays.
        with contextlib.suppress(OSError, AttributeError):
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    waiting, is_fed = memoryview(b""), False
    pipes = [source, errors] if errors else [source]
    first_errors, last_errors, error_bytes = b"", b"", 0
    has_ended = False
    while not has_ended:
        while not waiting and not is_fed:
            chunk = next(chunks, None)
            waiting, is_fed = memoryview(chunk or b""), chunk is None
            if is_fed and not hold:
                sink.close()
        # What a program leaves behind, such as a shared connection of ssh, may hold its standard error open:
        # after its output, only its own end counts. What it printed until then is read once more.
        has_ended = source.closed and program.poll() is not None
        timeout_s = None if not source.closed else 0.0 if has_ended else _POLL_S
        readable, writable, _ = select.select(pipes, [sink] if waiting else [], [], timeout_s)
        if writable:
            try:
                waiting = waiting[os.write(sink.fileno(), waiting) :]
            except BrokenPipeError:
                # It has read enough; whether that is an error, its exit code says.
                waiting, is_fed = memoryview(b""), True
                sink.close()
        if writable or source in readable:
            error_bytes = 0  # a program that reads or answers may have a warning for each of many files
        if errors and errors in readable:
            data = os.read(errors.fileno(), PIPE_BYTES)
            if not data:
                pipes.remove(errors)
            first_errors, last_errors = first_errors or data, (last_errors + data)[-_ERROR_BYTES:]
            error_bytes += len(data)
            if error_bytes > MOST_BYTES:
                raise ErrorsTooLong(name, first_errors)
        if source in readable:
            data = os.read(source.fileno(), PIPE_BYTES)
            if data:
                yield data
            else:
                pipes.remove(source)
                source.close()
                waiting, is_fed = memoryview(b""), True
    return last_errors

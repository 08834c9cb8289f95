"""Functions that run other programs: git, ssh, squashfs tools, container engines and schedulers.

A program and its arguments are always passed as a list, without a shell. The functions that capture output
read both streams all the time, because a program blocks as soon as a pipe is full. They keep the end of the
output for the error message.
"""

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
from typing import IO, NoReturn

from imgkit_entrypoints import terminal
from imgkit_entrypoints.errors import ImgkitError, ToolFailed, ToolMissing

TAIL_LINES = 20
"""The number of lines that an error quotes from the output of a failed program."""
KEPT_LINES = 1000
"""The number of output lines that are kept of a build step. Its errors are quoted from them."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, 128 + SIGINT, as a shell reports it."""
# 1 MB: the size of pipes, and of reads from them. An unprivileged user may not set more, unless an
# administrator has raised /proc/sys/fs/pipe-max-size.
PIPE_BYTES = 1 << 20
MOST_BYTES = 8 << 20
"""8 MB: the largest output of a program that is kept. Short answers have a few KB, long lists a few MB."""
_ERROR_BYTES = 1 << 16
"""64 KB: `filter_through` keeps this much from the end of standard error."""
# 64 KB: the size of the chunks that `run` reads.
_CHUNK_BYTES = 1 << 16
# Lines that explain a failed build, even if many other lines follow them: "ERROR: No matching distribution
# found".
_ERROR = re.compile(r"\b(ERROR|FATAL)\b")
# Progress bars and percentages, which an error message does not quote.
_PROGRESS_LINE = re.compile(
    r"[^A-Za-z]*\d ?%(?!.*[A-Za-z]{5}).*"  # "32,768  16%  31.25MB/s", " 45%|##  | 45/100 [00:03<00:04]"
    r"|.*[=#]{3}.*\d ?%.*|.*\d ?%.*[=#]{3}.*"  # "blob 3a5f [====>---] 31 % 5s"
    r"|.*[━█▓]{3}.*"  # pip's, without a percentage
)
_SHOWN_CHARACTERS = 200
"""The number of characters that an error quotes from a program's first line. Longer lines are never taken for
progress.
"""
# Seconds between two checks of whether a program has ended. It is polled after it has closed its output.
_POLL_S = 0.02
GIT = ("git", "--no-optional-locks", "-c", "core.fsmonitor=false")
"""The first arguments of a read-only git command.

Without these options, git could lock the index to refresh it. It would also run the program in the setting
``core.fsmonitor`` of the repository, which may belong to another user.
"""

# A Python program that asks the kernel to kill it (SIGKILL) when its parent ends, and then replaces itself by
# another program. Its arguments are the pid of imgkit, and the other program with its arguments. The kernel
# keeps the request across exec. If imgkit ended before the request was made, getppid returns another pid, and
# the program exits. Python ignores SIGPIPE and SIGXFSZ. The other program would inherit this, so both are
# reset.
_BINDING_PROGRAM = """
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
    """A program printed more than `MOST_BYTES`. Each subclass stands for one of its two output streams."""

    message = ""
    """The error message, with the fields ``program``, ``limit_MB`` and ``line``, the first line of the
    output.
    """

    def __init__(self, program: str, start: bytes) -> None:
        line = first_line(start)
        super().__init__(self.message.format(program=program, limit_MB=MOST_BYTES >> 20, line=line))
        self.start = start
        """The beginning of what the program printed."""


class TooLong(_TooMuch):
    """A program printed more than `MOST_BYTES` of output."""

    message = "{program} printed more than {limit_MB} MB instead of a short answer; its first line: {line}"


class ErrorsTooLong(_TooMuch):
    """A program printed more than `MOST_BYTES` of error messages without reading input or writing output."""

    message = "{program} printed more than {limit_MB} MB of error messages; their first line: {line}"


class Exited(ToolFailed):
    """A program that `filter_through` had started ended with an exit code other than 0."""

    def __init__(self, program: str, code: int, errors: bytes, hint: str) -> None:
        self.errors = errors.decode(errors="replace").strip()
        """The end of the program's standard error."""
        message, hint = quote_output(f"{program} failed with exit code {code}", self.errors, hint)
        super().__init__(message, hint=hint or None)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The exit code and the output of a program that has ended."""

    argv: tuple[str, ...]
    returncode: int
    output: str
    """Standard output and standard error, merged into one text.

    Of a longer output than `MOST_BYTES`, only the end is kept.
    """

    def tail(self) -> str:
        """Return the part of the output that an error quotes, as `last_lines` selects it."""
        return "\n".join(last_lines(self.output))


def first_line(output: bytes) -> str:
    """Return the first line of `output` that is not blank, or ``(nothing)``.

    Long lines are cut so that they fit into an error message.
    """
    beginning = output[:_CHUNK_BYTES].decode(errors="replace").strip()
    line = beginning.partition("\n")[0].strip()
    return line[:_SHOWN_CHARACTERS] or "(nothing)"


def last_lines(output: str, limit: int = TAIL_LINES) -> list[str]:
    """Return the lines of a failed program's output that an error message quotes, at most `limit` of them.

    Up to half of them are the last lines with ERROR or FATAL, because a program may print much more after its
    error. The remaining lines come from the end of the output. Progress bars and empty lines are left out. If
    a program rewrote a line with carriage returns, only its last version is used.
    """
    lines: list[str] = []
    error_indices = []  # indices in `lines`
    for line in output.split("\n"):
        _, _, visible_text = line.rstrip().rpartition("\r")
        is_error = _ERROR.search(visible_text) is not None
        if is_error:
            error_indices.append(len(lines))
        if is_error or (visible_text and not _is_progress(visible_text)):
            lines.append(visible_text)
    quoted_indices = set(error_indices[-(limit // 2) :])
    # Fill up with lines from the end. A line that is quoted already does not count twice, as this is a set.
    for index in reversed(range(len(lines))):
        if len(quoted_indices) == limit:
            break
        quoted_indices.add(index)
    return [lines[index] for index in sorted(quoted_indices)]


def _is_progress(line: str) -> bool:
    """Return whether `line` is a progress bar or a percentage."""
    # A longer line is never a progress bar, and the regular expression could take very long on it.
    return len(line) <= _SHOWN_CHARACTERS and _PROGRESS_LINE.fullmatch(line) is not None


def quote_output(message: str, output: str, hint: str = "") -> tuple[str, str]:
    """Return the message and hint of an error about a program, extended by the last lines of its `output`.

    A single line of output is appended to the message: ``"sbatch failed: Invalid account"``. Several lines
    are put before the hint.
    """
    quoted_lines = last_lines(output)
    if not quoted_lines:
        return message, hint
    if len(quoted_lines) == 1:
        return f"{message}: {quoted_lines[0]}", hint
    quoted_lines.insert(0, "its last lines:")
    if hint:
        quoted_lines.append(hint)
    return message, "\n".join(quoted_lines)


_KILL_CODES = (-signal.SIGKILL, -signal.SIGXCPU, 128 + signal.SIGKILL, 128 + signal.SIGXCPU)
"""Exit codes of a program that was killed by SIGKILL or SIGXCPU.

The kernel sends SIGKILL when memory runs out, and SIGXCPU at a limit of CPU time. Python reports a signal as
a negative number, and a shell as 128 plus its number.
"""
# What a program in Go, such as Apptainer, prints when a child process has died of a signal.
_KILL_MESSAGE = re.compile(r"signal: (killed|CPU time limit exceeded)")


def kill_hint(code: int, output: str = "") -> str:
    """Return an extra line for the hint of a failed conversion if the system killed its program.

    The system kills a program that uses too much memory or CPU time, usually on a login node. The exit code
    or the output shows this. For all other failures, the result is empty.
    """
    if code not in _KILL_CODES and _KILL_MESSAGE.search(output) is None:
        return ""
    return (
        "\nthe system ended it, perhaps for its memory or CPU time; on a login node, let a job do this: the "
        "same command with --submit --time 1h"
    )


def require_program(program: str, hint: str = "", env: Mapping[str, str] | None = None) -> None:
    """Raise ToolMissing if `program` is not on PATH. If `env` is given, its PATH is searched instead."""
    if shutil.which(program, path=env.get("PATH") if env else None) is None:
        raise ToolMissing(f"the program {program!r} is not on PATH", hint=hint or None)


def count_processors() -> int:
    """Return the number of processors that this process may use. The machine may have more."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


def run_attached(argv: Sequence[str], *, until: Callable[[], bool] | None = None) -> int:
    """Run `argv` with the standard streams of this process, and return its exit code.

    Output to a terminal passes through `terminal.output_copier`. It replaces control characters, so that the
    program cannot change the state of the terminal. After Ctrl-C, the exit code is `INTERRUPTED`.

    Parameters
    ----------
    until : a function that is called every few seconds at first, and later every 10 seconds. When it returns
        True, the program gets SIGTERM, and the result is 0. Programs such as ``tail -F``, which never end by
        themselves, need it.

    Raises
    ------
    ToolMissing : the program is not on PATH.
    """
    require_program(argv[0])
    # The program inherits a stream that is not a terminal. So a file receives its output unchanged.
    stdout = stderr = None
    if sys.stdout.isatty():
        stdout = subprocess.PIPE
    if sys.stderr.isatty():
        stderr = subprocess.STDOUT if stdout else subprocess.PIPE  # one pipe keeps the order of both
    with subprocess.Popen(list(argv), stdout=stdout, stderr=stderr) as program:
        if until is not None:
            # This thread waits for `program` at the same time as the main thread, which copies its output.
            threading.Thread(target=_terminate_when, args=(program, until), daemon=True).start()
        try:
            pipe = program.stdout or program.stderr
            if pipe is not None:
                _copy_output(pipe.fileno(), terminal.output_copier(to_err=stdout is None))
            code = program.wait()
        except KeyboardInterrupt:
            # The terminal sends Ctrl-C to the program as well, so the program ends by itself.
            return INTERRUPTED
    if until is not None and code == -signal.SIGTERM:
        return 0  # `_terminate_when` has sent this signal, so the end was expected
    return code


def _copy_output(descriptor: int, on_chunk: Callable[[bytes], None]) -> None:
    """Call `on_chunk` with each piece of output that arrives in a pipe, until the pipe is closed."""
    # os.read returns what has arrived. Reading from a file object would wait until its buffer is full.
    for chunk in iter(partial(os.read, descriptor, PIPE_BYTES), b""):
        on_chunk(chunk)


def _terminate_when(program: subprocess.Popen[bytes], is_over: Callable[[], bool]) -> None:
    """Terminate `program` once `is_over` returns True. Do nothing if the program ends before that.

    `is_over` usually asks a scheduler whether a job has ended. It is called after 1, 2, 4, 7 and 12 seconds,
    and then every 10 seconds, so that the scheduler is not asked too often. `run_attached` calls this in a
    thread of its own.
    """
    for pause_s in itertools.chain((1.0, 1.0, 2.0, 3.0, 5.0), itertools.repeat(10.0)):
        if _ends_within(program, pause_s):
            return
        # If the scheduler does not answer now, it may answer the next time.
        with contextlib.suppress(ImgkitError):
            if is_over():
                break
    # `program` may be tail, which looks for new lines once a second. It gets time to print the last ones.
    if not _ends_within(program, 2.0):
        program.terminate()


def _ends_within(program: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Wait at most `timeout_s` seconds for `program` to end. Return whether it has ended."""
    try:
        program.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def replace_process(argv: Sequence[str], *, cwd: Path) -> NoReturn:
    """Replace this process by the program `argv`, which starts in the folder `cwd`. Never return.

    The program takes over the terminal, Ctrl-C and the process id of imgkit, as if the user had started it.

    Raises
    ------
    ToolMissing : the program is not on PATH.
    """
    require_program(argv[0])
    os.chdir(cwd)
    # Whatever is still in these buffers would be lost when the process is replaced.
    sys.stdout.flush()
    sys.stderr.flush()
    # Python ignores these two signals. The program would inherit this, so both are reset.
    for signal_number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signal_number, signal.SIG_DFL)
    os.execvp(argv[0], list(argv))  # noqa: S606 - an argv list, no shell


def bound_to_parent(argv: Sequence[str]) -> list[str]:
    """Return a command that runs `argv`, and that the kernel kills when imgkit ends.

    `argv` must begin with the path of the program. The command starts a short Python program first. It asks
    the kernel for a SIGKILL when its parent ends (PR_SET_PDEATHSIG of prctl), and then replaces itself by
    `argv`. The kernel also sends the signal when the thread that started the command ends. That thread
    therefore has to wait for it.
    """
    # Only Linux has this request. And if imgkit has changed its user, it may not be allowed to run its own
    # Python again. In both cases the program is started directly.
    can_bind = sys.platform == "linux" and os.access(sys.executable, os.X_OK)
    if not can_bind:
        return list(argv)
    # The program compares the pid with that of its parent, because imgkit may end before the request is made.
    # -I and -S make Python start faster, and without code from the environment or from site-packages.
    return [sys.executable, "-I", "-S", "-c", _BINDING_PROGRAM, str(os.getpid()), *argv]


def run(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    check: bool = True,
    hint: str = "",
) -> Finished:
    """Run `argv` to its end, without standard input, and return its exit code and output.

    Parameters
    ----------
    env : all environment variables of the program. None means the variables of this process.
    check : whether an exit code other than 0 raises an error.
    hint : a text for the error. If the program is missing, it should explain how to install it.

    Raises
    ------
    ToolMissing : the program is not on PATH.
    ToolFailed : `check` is True and the exit code is not 0. The error quotes the last lines of the output.
    """
    command = tuple(map(str, argv))
    require_program(command[0], hint, env)
    finished = _capture_output(command, env, cwd)
    if check and finished.returncode != 0:
        message = f"{command[0]} failed with exit code {finished.returncode}: {' '.join(command)}"
        full_hint = f"its last lines:\n{finished.tail()}"
        if hint:
            full_hint += f"\n{hint}"
        raise ToolFailed(message, hint=full_hint)
    return finished


def _capture_output(command: tuple[str, ...], env: Mapping[str, str] | None, cwd: Path | None) -> Finished:
    """Run `command` to its end, without standard input, and return its exit code and output.

    `env` and `cwd` are its environment and its working directory. None means those of this process.
    """
    # When the deque is full, it drops the oldest chunk. All chunks but the last are full, so about the last
    # `MOST_BYTES` remain.
    chunks: collections.deque[bytes] = collections.deque(maxlen=MOST_BYTES // _CHUNK_BYTES)
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
            for chunk in iter(partial(process.stdout.read, _CHUNK_BYTES), b""):
                chunks.append(chunk)
        except BaseException:
            # Ctrl-C ends imgkit, but the program may ignore Ctrl-C and would keep running.
            process.kill()
            raise
    # text=True is not used: it would turn the carriage return by which a progress bar rewrites its line into
    # a line break.
    output = b"".join(chunks).decode(errors="replace").replace("\r\n", "\n")
    return Finished(argv=command, returncode=process.returncode, output=output)


def read_answer(output: Generator[bytes, None, None], program: str) -> bytes:
    """Return the complete output of a program as bytes.

    Parameters
    ----------
    output : the generator that `filter_through` returns.
    program : the name of the program for the error, such as ``sbatch``.

    Raises
    ------
    TooLong : the output is longer than `MOST_BYTES`. The generator is closed, which kills the program.
    """
    answer = bytearray()
    with contextlib.closing(output):
        for chunk in output:
            answer += chunk
            if len(answer) > MOST_BYTES:
                raise TooLong(program, bytes(answer))
    return bytes(answer)


def split_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of an output that arrives in chunks. Each line is yielded as soon as it is complete."""
    incomplete_line = b""
    for chunk in chunks:
        *lines, incomplete_line = (incomplete_line + chunk).split(b"\n")
        yield from lines
    if incomplete_line:
        yield incomplete_line


def filter_through(
    argv: Sequence[str],
    chunks: Iterable[bytes],
    *,
    cwd: Path | None = None,
    hint: str = "",
    hold: bool = False,
) -> Generator[bytes, None, None]:
    """Start the program `argv`, feed `chunks` to its standard input, and yield its output as it arrives.

    Neither the input nor the output is collected in memory, so gigabytes can pass through a program such as
    zstd. If the caller stops reading, the program is killed.

    Parameters
    ----------
    hold : leave the program's standard input open after the last chunk, until the program ends by itself.
        Then a script on a remote machine sees the end of its input only when imgkit has ended.

    Raises
    ------
    ToolMissing : the program is not on PATH.
    Exited : the program failed. The error quotes the end of its standard error.
    ErrorsTooLong : the program printed error messages without end, and was killed.
    """
    require_program(argv[0], hint)
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, cwd=cwd
    ) as program:
        try:
            # The value of `pump_pipes` is the end of the program's standard error.
            errors = yield from pump_pipes(program, iter(chunks), hold=hold, name=argv[0])
        finally:
            # This also runs after an error and when the caller stops reading. It does nothing to a program
            # that has ended.
            program.kill()
    if program.returncode != 0:
        raise Exited(argv[0], program.returncode, errors, hint)


def pump_pipes(
    program: subprocess.Popen[bytes], chunks: Iterator[bytes], *, hold: bool = False, name: str = ""
) -> Generator[bytes, None, bytes]:
    """Feed `chunks` to the running `program`, and yield its output as it arrives.

    The loop waits for all pipes at once (`select`) and serves those that are ready. To write everything first
    and read afterwards could block forever: a program that waits until its output is read does not read its
    input. The generator's return value is the end of the program's standard error.

    Parameters
    ----------
    program : a process whose standard input and output are unbuffered pipes. Its standard error may be a
        pipe, too.
    hold : leave the program's standard input open after the last chunk.
    name : the name of the program in errors.

    Raises
    ------
    ErrorsTooLong : the program printed error messages without end, and neither read input nor wrote output
        meanwhile.
    """
    assert program.stdin is not None  # noqa: S101 - for the type checker: both are pipes
    assert program.stdout is not None  # noqa: S101
    sink, source, errors = program.stdin, program.stdout, program.stderr
    feeder = _InputFeeder(sink, chunks, hold=hold)
    for pipe in (sink, source):
        # Larger pipes need fewer writes. Linux refuses this once the user's pipes exceed a quota. The pipe
        # then keeps its default size.
        with contextlib.suppress(OSError, AttributeError):
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    pipes = [source, errors] if errors else [source]
    first_errors = last_errors = b""
    error_bytes = 0  # of standard error, since the program last read input or wrote output
    has_ended = False
    while not has_ended:
        feeder.fetch_chunk()
        # A process that the program leaves running, such as a shared connection of ssh, may keep standard
        # error open. So the loop does not wait for the end of standard error. Once the output is closed, the
        # loop polls until the program has ended. Then it reads once more what standard error still holds.
        has_ended = source.closed and program.poll() is not None
        timeout_s = None  # wait until a pipe is ready
        if source.closed:
            timeout_s = 0.0 if has_ended else _POLL_S
        readable, writable, _ = select.select(pipes, [sink] if feeder.unsent else [], [], timeout_s)
        if writable:
            feeder.write_unsent()
        if writable or source in readable:
            # A program that makes progress may print a warning for each of many files, so it gets the full
            # limit again.
            error_bytes = 0
        if errors and errors in readable:
            data = os.read(errors.fileno(), PIPE_BYTES)
            if not data:
                pipes.remove(errors)
            first_errors = first_errors or data
            last_errors = (last_errors + data)[-_ERROR_BYTES:]
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
                feeder.stop()
    return last_errors


class _InputFeeder:
    """Writes chunks to the standard input of a program, as far as the program reads them."""

    def __init__(self, pipe: IO[bytes], chunks: Iterator[bytes], *, hold: bool) -> None:
        """Make `pipe`, the program's input, non-blocking. With `hold`, it stays open after the last chunk."""
        # A blocking write could wait for a program that waits for us to read its output.
        os.set_blocking(pipe.fileno(), False)
        self._pipe = pipe
        self._chunks = chunks
        self._hold = hold
        self._is_over = False
        """True if no further chunk is needed."""
        self.unsent = memoryview(b"")
        """The part of the current chunk that still has to be written."""

    def fetch_chunk(self) -> None:
        """Fetch the next chunk if the current one is written.

        If there is none, close the pipe, so that the program sees the end of its input. With `hold`, the pipe
        stays open.
        """
        while not self.unsent and not self._is_over:
            chunk = next(self._chunks, None)
            if chunk is not None:
                self.unsent = memoryview(chunk)
                continue
            self._is_over = True
            if not self._hold:
                self._pipe.close()

    def write_unsent(self) -> None:
        """Write as much of the current chunk as the pipe takes now."""
        try:
            written_bytes = os.write(self._pipe.fileno(), self.unsent)
            self.unsent = self.unsent[written_bytes:]
        except BrokenPipeError:
            # The program has closed its input. Its exit code tells whether that is an error.
            self.stop()
            self._pipe.close()

    def stop(self) -> None:
        """Drop what has not been written, and fetch no further chunk. The pipe is not closed."""
        self.unsent = memoryview(b"")
        self._is_over = True

"""Run the user program in a worker: prepare its signals and arguments, and report the error that ends it.

The node agent starts torchrun and its workers with the stop signals blocked. This module unblocks them for
the user program and gives them a handler that does nothing. The program may set its own handlers, and the
commands that it starts have the default ones. A process that it forks, such as torch's data workers, must
survive the signals that a scheduler sends to every process. But ``Process.terminate()`` must still end it,
since multiprocessing waits for it at exit. So in a forked process, TERM counts only if it comes from its
parent.

If an exception ends the program, the node agent prints it as the last thing of the run (failures.py). So
`report` writes the traceback into the node's stop folder. It also writes it to standard error with a mark,
which keeps it in the log and off the terminal. A program that sets its own excepthook prints its errors
itself.

torchrun runs this file by path and with the standard library alone: ``python3 user_program.py
[--pass-local-rank] [-m] PROGRAM ARGS``. An import of imgkit would leave its modules in the user program, or
take modules of the same names from the user's PYTHONPATH.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import signal
import struct
import sys
import threading
import time
import traceback
from types import FrameType, TracebackType
from typing import Any, BinaryIO

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that request a stop. guard.py needs no such list, since it inherits the mask of blocked signals."""

STACK_SIGNAL = 40
"""Signal that asks a worker for its stacks.

No scheduler sends real-time signals, and glibc uses only 32 and 33.
"""
MARK = "\x1f"
"""First character of a line of standard error that the node agent keeps for its log, but does not print."""
HALF = 200_000
"""Number of characters that are kept at each end of a text that is longer than both together."""
RECORD = "failed-"
"""Prefix of a record's name in the stop folder. The rank follows, as in ``failed-3``."""


def main(argv: list[str]) -> None:
    """Run the program as ``python3 PROGRAM ARGS`` would, and report the error that ends it."""
    sys.excepthook = excepthook
    os.register_at_fork(after_in_child=_name_bad_samples)
    open_watchdog_files()
    blocked_signals = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    if signal.SIGTERM in blocked_signals:  # only if a node agent has started torchrun
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        os.register_at_fork(after_in_child=_obey_parent_only)
    options = []
    while argv[0] in ("--pass-local-rank", "-m"):
        options.append(argv.pop(0))
    program = argv[0]
    if "--pass-local-rank" in options:  # torch.distributed.launch put the option first as well
        argv.insert(1, f"--local_rank={os.environ['LOCAL_RANK']}")
    sys.argv = argv
    # Python sets the first entry of sys.path to the folder of the script that it runs, or with -m to the
    # current folder. Here it is the folder of this file, except with -P (safe_path), which leaves the entry
    # out.
    if not getattr(sys.flags, "safe_path", False) or sys.path[:1] == [""]:
        sys.path[0] = os.getcwd() if "-m" in options else os.path.dirname(os.path.realpath(program))  # noqa: PTH109, PTH120
    try:
        if "-m" in options:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program, run_name="__main__")
    except SystemExit as error:
        # sys.exit("a message") prints the message and exits with 1.
        if error.code is not None and not isinstance(error.code, int) and report(str(error.code)):
            error.code = 1
        raise


def open_watchdog_files() -> None:
    """Make the files by which the node agent's watchdog sees this process and its stacks (watchdog.py).

    Do nothing without a node agent.
    """
    folder, rank = os.environ.get("IMGKIT_STOP_DIR"), os.environ.get("RANK", "")
    if not folder or not rank.isdigit():
        return
    try:
        stacks = _create(os.path.join(folder, f"stacks-{rank}"))  # noqa: PTH118
        faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=False)
        _open_files.append(stacks)
        notes = struct.pack("qqq", os.getpid(), -1, -1)  # before the first step, and without signs of life
        with _create(os.path.join(folder, f"pulse-{rank}")) as file:  # noqa: PTH118
            file.write(notes)
    except OSError:  # on a full disk, the program runs without stacks
        return


# Files that must stay open as long as this process runs: faulthandler writes to the descriptor.
_open_files: list[object] = []


def _create(path: str) -> BinaryIO:
    """Make a new file that only this user can read, and remove an old one of this name."""
    if os.path.lexists(path):
        os.unlink(path)  # noqa: PTH108
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    return open(path, "xb", opener=lambda name, _: os.open(name, flags, 0o600))


def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Report the exception that ends this worker. Without a node agent, print it as Python does."""
    try:
        text = described(error, trace)
        reported = report(text, sample=find_sample(trace), unreachable=find_unreachable(error))
    except Exception:  # the exception cannot be printed, or the program has changed these modules
        reported = False
    if not reported:
        sys.__excepthook__(kind, error, trace)


def described(error: BaseException, trace: TracebackType | None) -> str:
    """Return the traceback of `error` from the user's first frame on.

    The frames before it start the program: those of runpy, of this package and of torch. If there are no
    other frames, return the whole traceback. But if the program was not found or is not valid Python, the
    frames say nothing, so return the error alone.
    """
    frames = own_frames(trace)
    is_missing = frames is None and _failed_to_start(trace)
    if frames is None and not is_missing:
        frames = trace
    return "".join(traceback.format_exception(type(error), error, frames, chain=not is_missing)).rstrip("\n")


def _failed_to_start(trace: TracebackType | None) -> bool:
    """Return whether the error came up while the program was started.

    The innermost frame outside of runpy and Python's import system is then one of this module.
    """
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace)]
    for file in reversed(files):
        if not _is_pythons(file):
            return file == __file__
    return False


def own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return `trace` from the user's first frame on, or None if it has no frame of the user."""
    while trace is not None and _is_runner(trace.tb_frame):
        trace = trace.tb_next
    return trace


def _is_runner(frame: FrameType) -> bool:
    """Return whether `frame` is of Python's start of programs, of this package or of torch."""
    file = frame.f_code.co_filename
    folders = [os.path.dirname(os.path.dirname(__file__))]  # noqa: PTH120
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    if torch:
        folders.append(os.path.dirname(torch))  # noqa: PTH120
    return _is_pythons(file) or any(file.startswith(f"{folder}{os.sep}") for folder in folders)


def _is_pythons(file: str) -> bool:
    """Return whether `file` is a part of Python that starts programs, such as ``<frozen runpy>``."""
    return file.startswith("<frozen ") or file == runpy.__file__


def find_sample(trace: TracebackType | None) -> Any:
    """Return the index of the sample that torch's DataLoader was reading, or None if it was reading none."""
    index = None
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code.co_filename.endswith(os.path.join("torch", "utils", "data", "_utils", "fetch.py")):  # noqa: PTH118
            index = frame.f_locals.get("idx", index)
        trace = trace.tb_next
    return index


def find_unreachable(error: BaseException | None) -> str:
    """Return the ``HOST:PORT`` to which `error`, or an error that led to it, could not connect, if any.

    The messages of many libraries do not name the host. But all of these libraries connect by functions of
    the socket module, whose frames have it.
    """
    host, errors = "", list[BaseException]()
    while error is not None and error not in errors and not host:
        errors.append(error)
        frames = error.__traceback__ if isinstance(error, OSError) else None
        for frame, _ in traceback.walk_tb(frames):
            name, values = frame.f_code.co_name, frame.f_locals
            if name in ("create_connection", "getaddrinfo") and "host" in values and "port" in values:
                host = f"{values['host']}:{values['port']}"
        error = error.__cause__ or error.__context__
    return host


def report(text: str, *, sample: object = None, unreachable: str = "") -> bool:
    """Write the error text with which this worker ends into the stop folder, for the node agent.

    Return False if there is no node agent, or if the record cannot be written.

    Parameters
    ----------
    sample : index of the sample of the data set that could not be read, or None.
    unreachable : ``HOST:PORT`` to which the worker could not connect.
    """
    folder, rank = os.environ.get("IMGKIT_STOP_DIR"), os.environ.get("RANK", "")
    if not folder or not rank.isdigit() or "IMGKIT_ATTEMPT" not in os.environ:
        return False
    if len(text) > 2 * HALF:
        text = f"{text[:HALF]}\n...\n{text[-HALF:]}"
    if sample is not None:
        text = f"sample {str(sample)[:100]} of the data set\n{text}"
    if unreachable:
        text = f"this node cannot reach {unreachable[:200]} (is there a route to the internet?)\n{text}"
    # The record is renamed into place, so that the node agent never reads half of one.
    part = os.path.join(folder, f".imgkit-{os.getpid()}.part")  # noqa: PTH118
    try:
        with _create(part) as file:
            file.write(f"{time.time()}\n{text}".encode(errors="backslashreplace"))
        os.replace(part, os.path.join(folder, RECORD + rank))  # noqa: PTH105, PTH118
    except OSError:
        return False
    mark(text)
    return True


def mark(text: str) -> None:
    """Write `text` to standard error with a mark on each line, so that only the node agent's log gets it."""
    data = "".join(f"{MARK}{line}\n" for line in text.split("\n")).encode(errors="backslashreplace")
    try:
        while data:
            data = data[os.write(2, data) :]
    except OSError:
        return


def _name_bad_samples() -> None:
    """Change torch so that the error of a data worker names the sample that could not be read.

    torch sends the error to the parent process as a text, from which the sample cannot be found any more.
    """
    wrapper = getattr(sys.modules.get("torch._utils"), "ExceptionWrapper", None)
    if wrapper is None:
        return
    by_torch = wrapper.__init__

    def named(self: object, exc_info: Any = None, where: str = "in background") -> None:
        sample = find_sample((exc_info or sys.exc_info())[2])
        by_torch(self, exc_info, where if sample is None else f"{where}, at sample {sample} of the data set")

    wrapper.__init__ = named


def _obey_parent_only() -> None:
    """In a forked process, end by TERM only if the parent has sent it.

    A thread waits for TERM, since a signal handler in Python does not see the sender.
    """
    parent = os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def wait() -> None:
        while signal.sigwaitinfo([signal.SIGTERM]).si_pid != parent:
            pass
        os._exit(0)  # torch's data workers do the same, since another code would look like a crash

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1:])

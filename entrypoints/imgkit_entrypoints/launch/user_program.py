"""A worker's first steps before the user program, and its last: signals, ``--local_rank``, its traceback.

The node agent starts torchrun and its workers with the stop signals blocked. This module unblocks them
for the user program and gives them a handler that does nothing. So the program may set handlers of its
own, and the commands that it starts have the usual ones. A process that it forks, such as torch's data
workers, must survive what a scheduler sends to every process. It must still end by
``Process.terminate()``, since multiprocessing waits for it at exit. So in a forked process TERM counts
only if it comes from its parent.

An exception that ends the program is printed by the node agent, as the last thing of the run
(failures.py). So `report` leaves the traceback in the node's stop folder, and marks it on standard error,
which keeps it in the log and off the terminal. A program with an excepthook of its own prints it itself.

Run by path with the standard library alone, since an import would leave modules of imgkit in the user
program, or take them from its PYTHONPATH: ``python3 user_program.py [--pass-local-rank] [-m] PROGRAM
ARGS``.
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
"""Signals that request a stop. guard.py needs no list: it inherits the mask of blocked signals."""

STACK_SIGNAL = 40
"""Asks a worker for its stacks. No scheduler sends a real-time signal, and glibc uses only 32 and 33."""
MARK = "\x1f"
"""Begins a line of standard error that the node agent keeps for its log, and does not print."""
HALF = 200_000
"""Characters of a longer text that are kept at each end."""
RECORD = "failed-"
"""Begins the name of a file in the stop folder; the rank follows."""


def main(argv: list[str]) -> None:
    """Run the program as ``python3 PROGRAM ARGS`` would."""
    sys.excepthook = excepthook
    os.register_at_fork(after_in_child=_name_bad_samples)
    show_stacks()
    if signal.SIGTERM in signal.pthread_sigmask(
        signal.SIG_BLOCK, ()
    ):  # torchrun is above, and the node agent
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        os.register_at_fork(after_in_child=_heed_the_parent)
    options = []
    while argv[0] in ("--pass-local-rank", "-m"):
        options.append(argv.pop(0))
    program = argv[0]
    if "--pass-local-rank" in options:  # where torch.distributed.launch put it
        argv.insert(1, f"--local_rank={os.environ['LOCAL_RANK']}")
    sys.argv = argv
    if not getattr(sys.flags, "safe_path", False) or sys.path[:1] == [""]:  # Python sets it by what it runs
        sys.path[0] = os.getcwd() if "-m" in options else os.path.dirname(os.path.realpath(program))  # noqa: PTH109, PTH120
    try:
        if "-m" in options:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program, run_name="__main__")
    except SystemExit as error:
        if error.code is not None and not isinstance(error.code, int) and report(str(error.code)):
            error.code = 1
        raise


def show_stacks() -> None:
    """Let the watchdog of the node agent see this process and its stacks (watchdog.py has the format)."""
    folder, rank = os.environ.get("IMGKIT_STOP_DIR"), os.environ.get("RANK", "")
    if not folder or not rank.isdigit():
        return
    try:
        stacks = _create(os.path.join(folder, f"stacks-{rank}"))  # noqa: PTH118
        faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=False)
        _open_files.append(stacks)
        notes = struct.pack("qqq", os.getpid(), -1, -1)
        with _create(os.path.join(folder, f"pulse-{rank}")) as file:  # noqa: PTH118
            file.write(notes)
    except OSError:  # a full disk costs the stacks alone
        return


_open_files: list[object] = []
"""Files for as long as this process runs."""


def _create(path: str) -> BinaryIO:
    """Make a new file in place of an old one."""
    if os.path.lexists(path):
        os.unlink(path)  # noqa: PTH108
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    return open(path, "xb", opener=lambda name, _: os.open(name, flags, 0o600))


def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Report the exception that ends this worker; without a node agent, print it as Python does."""
    try:
        reported = report(described(error, trace), sample=sample_of(trace), unreachable=unreachable_of(error))
    except Exception:  # a program whose exceptions cannot be printed, or that has changed these modules
        reported = False
    if not reported:
        sys.__excepthook__(kind, error, trace)


def described(error: BaseException, trace: TracebackType | None) -> str:
    """Return the traceback of `error` from the user's first frame on.

    Left out before it are the frames that start the program: of runpy, of this package and of torch. If
    there are no others, the whole traceback is what the user needs; but not where the program was not found,
    or is no Python.
    """
    frames = own_frames(trace)
    is_missing = frames is None and _starts_only(trace)
    if frames is None and not is_missing:
        frames = trace
    return "".join(traceback.format_exception(type(error), error, frames, chain=not is_missing)).rstrip("\n")


def _starts_only(trace: TracebackType | None) -> bool:
    """Whether the innermost frame outside of Python's own start of programs is one of this module."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace)]
    return next((file == __file__ for file in reversed(files) if not _is_pythons(file)), False)


def own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return `trace` from the user's first frame on; None: it has no frame of the user."""
    while trace is not None and _is_runner(trace.tb_frame):
        trace = trace.tb_next
    return trace


def _is_runner(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    folders = [os.path.dirname(os.path.dirname(__file__)), *([os.path.dirname(torch)] if torch else ())]  # noqa: PTH120
    return _is_pythons(file) or any(file.startswith(f"{folder}{os.sep}") for folder in folders)


def _is_pythons(file: str) -> bool:
    return file.startswith("<frozen ") or file == runpy.__file__


def sample_of(trace: TracebackType | None) -> Any:
    """Return the index of the sample that torch's DataLoader was reading; None: no sample has failed."""
    index = None
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code.co_filename.endswith(os.path.join("torch", "utils", "data", "_utils", "fetch.py")):  # noqa: PTH118
            index = frame.f_locals.get("idx", index)
        trace = trace.tb_next
    return index


def unreachable_of(error: BaseException | None) -> str:
    """Return HOST:PORT to which `error`, or one that led to it, could not connect; empty: none.

    The text of many libraries does not name it, and all of them connect by these functions.
    """
    host, errors = "", list[BaseException]()
    while error is not None and error not in errors and not host:
        errors.append(error)
        for frame, _ in traceback.walk_tb(error.__traceback__ if isinstance(error, OSError) else None):
            name, values = frame.f_code.co_name, frame.f_locals
            if name in ("create_connection", "getaddrinfo") and "host" in values and "port" in values:
                host = f"{values['host']}:{values['port']}"
        error = error.__cause__ or error.__context__
    return host


def report(text: str, *, sample: object = None, unreachable: str = "") -> bool:
    """Leave `text`, by which this worker ends, for the node agent; False: there is none."""
    folder, rank = os.environ.get("IMGKIT_STOP_DIR"), os.environ.get("RANK", "")
    if not folder or not rank.isdigit() or "IMGKIT_ATTEMPT" not in os.environ:
        return False
    if len(text) > 2 * HALF:
        text = f"{text[:HALF]}\n...\n{text[-HALF:]}"
    if sample is not None:
        text = f"sample {str(sample)[:100]} of the data set\n{text}"
    if unreachable:
        text = f"this node cannot reach {unreachable[:200]} (is there a route to the internet?)\n{text}"
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
    """Write `text` to the standard error of this process for the log of the node agent alone."""
    data = "".join(f"{MARK}{line}\n" for line in text.split("\n")).encode(errors="backslashreplace")
    try:
        while data:
            data = data[os.write(2, data) :]
    except OSError:
        return


def _name_bad_samples() -> None:
    """Have the error of a data worker of torch name the sample: torch sends a text without variables."""
    wrapper = getattr(sys.modules.get("torch._utils"), "ExceptionWrapper", None)
    if wrapper is None:
        return
    by_torch = wrapper.__init__

    def named(self: object, exc_info: Any = None, where: str = "in background") -> None:
        sample = sample_of((exc_info or sys.exc_info())[2])
        by_torch(self, exc_info, where if sample is None else f"{where}, at sample {sample} of the data set")

    wrapper.__init__ = named


def _heed_the_parent() -> None:
    parent = os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def wait() -> None:
        while signal.sigwaitinfo([signal.SIGTERM]).si_pid != parent:
            pass
        os._exit(0)  # as torch's data workers do: another code would be taken for a crash

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1:])

"""Run the user program in a worker: prepare its signals and arguments, and report the error that ends it.

The node agent starts torchrun and its workers with the stop signals blocked. This module unblocks the signals
for the user program, and sets a handler for them that does nothing. The program may set its own handlers. The
commands that it starts have the default handlers.

Processes that the program forks, such as torch's data workers, must survive the signals that a scheduler
sends to every process. But ``Process.terminate()`` must still end them, because multiprocessing waits for
them at exit. So a forked process only obeys a TERM signal from its parent.

If an exception ends the program, the node agent prints it at the very end of the run (failures.py). For that,
`record_error` writes the traceback into the node's stop folder. It also writes the traceback to standard
error, with a mark that keeps it in the log and off the terminal. A program that sets its own excepthook
prints its errors itself.

torchrun runs this file by its path, and only with the standard library: ``python3 user_program.py
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
    """Run the program as ``python3 PROGRAM ARGS`` would, and report the error that ends it.

    `argv` is the command line of this module: its options, and then the program with its arguments.
    """
    # All of this must be done before the program runs, because the program may fork, fail or hang at once.
    sys.excepthook = excepthook
    os.register_at_fork(after_in_child=_name_bad_samples)
    open_watchdog_files()
    _unblock_stop_signals()
    passes_local_rank = is_module = False
    # The options come before the program. The program's own arguments are not read.
    while argv[0] in ("--pass-local-rank", "-m"):
        option = argv.pop(0)
        passes_local_rank |= option == "--pass-local-rank"
        is_module |= option == "-m"
    program = argv[0]
    if passes_local_rank:  # as torch.distributed.launch does, before the program's own arguments
        argv.insert(1, f"--local_rank={os.environ['LOCAL_RANK']}")
    sys.argv = argv
    _set_import_path(program, is_module=is_module)
    # Not in a function of its own, which would be one more frame in each traceback of a program.
    try:
        if is_module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program, run_name="__main__")
    except SystemExit as error:
        # For sys.exit("a message"), Python prints the message and exits with 1. If the message was recorded,
        # the node agent prints it later, so Python must not.
        is_message = error.code is not None and not isinstance(error.code, int)
        if is_message and record_error(str(error.code)):
            error.code = 1
        raise


def _unblock_stop_signals() -> None:
    """Unblock the stop signals for the program, with a handler that does nothing.

    The node agent acts on these signals, not the program. Processes that the program forks must survive them
    as well, so there, only the parent's TERM has an effect. The signals are blocked only if a node agent has
    started torchrun. If they are not blocked, change nothing.
    """
    blocked_signals = signal.pthread_sigmask(signal.SIG_BLOCK, ())  # blocks nothing more
    if signal.SIGTERM not in blocked_signals:
        return
    for stop_signal in STOP_SIGNALS:
        signal.signal(stop_signal, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    os.register_at_fork(after_in_child=_end_on_term_of_parent)


def _set_import_path(program: str, *, is_module: bool) -> None:
    """Set the first entry of sys.path to the folder in which Python looks for the program's modules.

    That is the folder of the script or, with -m, the current folder. Python was started with this file, so
    until now the entry is the folder of this file. With -P (safe_path), Python adds no such entry, and this
    function adds none either.
    """
    has_safe_path = getattr(sys.flags, "safe_path", False)  # older versions of Python have no option -P
    # A fork of torchrun runs with safe_path, but apps/torchrun.py has added "" for the user's program.
    if has_safe_path and sys.path[:1] != [""]:
        return
    if is_module:
        sys.path[0] = os.getcwd()  # noqa: PTH109
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(program))  # noqa: PTH120


def open_watchdog_files() -> None:
    """Create the files by which the node agent's watchdog watches this process (watchdog.py).

    If there is no node agent, nobody reads these files, so do nothing.
    """
    folder, rank = os.environ.get("IMGKIT_STOP_DIR"), os.environ.get("RANK", "")
    if not folder or not rank.isdigit():
        return
    # The format is watchdog.LAYOUT. The first -1 is the position before the first step. The second -1, as the
    # number of signs of life, tells the watchdog that this program writes no positions.
    position = signs = -1
    try:
        stacks_file = _create_private_file(os.path.join(folder, f"stacks-{rank}"))  # noqa: PTH118
        # Only the main thread: other threads go on running, so their frames cannot be read safely.
        faulthandler.register(STACK_SIGNAL, file=stacks_file, all_threads=False)
        _open_files.append(stacks_file)  # the file must stay open, since the handler writes to its descriptor
        # This file comes last: once it exists, the node agent may ask for a stack.
        with _create_private_file(os.path.join(folder, f"pulse-{rank}")) as pulse_file:  # noqa: PTH118
            pulse_file.write(struct.pack("qqq", os.getpid(), position, signs))
    except OSError:  # for example on a full disk: the program runs, but the watchdog cannot watch it
        return


# Files that must stay open as long as this process runs: faulthandler writes to the descriptor.
_open_files: list[object] = []


def _create_private_file(path: str) -> BinaryIO:
    """Create a new file that only this user can read, in place of an old file of the same name."""
    if os.path.lexists(path):
        os.unlink(path)  # noqa: PTH108
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    return open(path, "xb", opener=lambda name, _: os.open(name, flags, 0o600))


def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Report the exception that ends this worker to the node agent, or print it if there is none.

    Python calls this function for an exception that the program has not caught (sys.excepthook).
    """
    try:
        error_text = format_error(error, trace)
        is_recorded = record_error(error_text, sample=find_sample(trace), address=find_unreachable(error))
    # Anything can fail here: the exception may have no text, or the program may have changed these modules.
    # The error must be printed in any case.
    except Exception:
        is_recorded = False
    if not is_recorded:
        sys.__excepthook__(kind, error, trace)


def format_error(error: BaseException, trace: TracebackType | None) -> str:
    """Return the traceback of `error`, beginning with the first frame of the user's code.

    The frames before it only start the program. They belong to runpy, this package or torch. If no frame
    belongs to the user's code, return the whole traceback. If the program was not found or is not valid
    Python, return only the error, because the frames say nothing about it.
    """
    frames = user_frames(trace)
    if frames is None and _failed_to_start(trace):
        # The errors that have led to this one (`chain`) say nothing about the program either.
        lines = traceback.format_exception(type(error), error, None, chain=False)
    else:
        lines = traceback.format_exception(type(error), error, frames or trace)
    return "".join(lines).rstrip("\n")


def _failed_to_start(trace: TracebackType | None) -> bool:
    """Return whether the error occurred while the program was being started.

    For example, the program's file may be missing. In this case, the innermost frame outside of runpy and
    Python's import system belongs to this module.
    """
    file_names = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace)]
    outer_file_names = [name for name in file_names if not _is_python_start(name)]
    return outer_file_names[-1:] == [__file__]  # the innermost frame comes last


def user_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of `trace` from the first frame of the user's code on, or None if there is none."""
    while trace is not None and _starts_programs(trace.tb_frame):
        trace = trace.tb_next
    return trace


def _starts_programs(frame: FrameType) -> bool:
    """Return whether `frame` belongs to code that starts programs, in Python, this package or torch.

    Such frames are left out of tracebacks, since the user has not written that code.
    """
    file = frame.f_code.co_filename
    if _is_python_start(file):
        return True
    # This file is in a folder of the package, so its grandparent is the folder of the package.
    package = os.path.dirname(os.path.dirname(__file__))  # noqa: PTH120
    if file.startswith(f"{package}{os.sep}"):
        return True
    torch_file = getattr(sys.modules.get("torch"), "__file__", None) or ""
    folder = os.path.dirname(torch_file)  # noqa: PTH120
    return folder != "" and file.startswith(f"{folder}{os.sep}")


def _is_python_start(file: str) -> bool:
    """Return whether `file` is part of Python's code that starts programs, such as ``<frozen runpy>``."""
    return file.startswith("<frozen ") or file == runpy.__file__


def find_sample(trace: TracebackType | None) -> Any:
    """Return the index of the sample that torch's DataLoader was reading, or None if it was not reading.

    A sample is one item of the data set.
    """
    index = None
    fetch_file = os.path.join("torch", "utils", "data", "_utils", "fetch.py")  # noqa: PTH118
    for frame, _ in traceback.walk_tb(trace):
        if frame.f_code.co_filename.endswith(fetch_file):
            index = frame.f_locals.get("idx", index)  # the parameter of torch's fetch functions
    return index


def find_unreachable(error: BaseException | None) -> str:
    """Return the ``HOST:PORT`` to which a connection failed, if that has led to `error`. Otherwise return "".

    Many libraries do not name the host in their messages. But all of them connect through Python's socket
    module, so the host can be found in its frames in the traceback.
    """
    visited_errors = list[BaseException]()
    while error is not None and error not in visited_errors:  # errors can refer to each other in a circle
        address = _find_connect_address(error)
        if address:
            return address
        visited_errors.append(error)
        error = error.__cause__ or error.__context__
    return ""


def _find_connect_address(error: BaseException) -> str:
    """Return the ``HOST:PORT`` to which the innermost frames of `error` tried to connect, or "".

    Only errors of the operating system count. Python's functions `create_connection` and `getaddrinfo` have
    the local variables ``host`` and ``port``.
    """
    address = ""
    if not isinstance(error, OSError):
        return address
    for frame, _ in traceback.walk_tb(error.__traceback__):
        frame_variables = frame.f_locals
        is_connecting = frame.f_code.co_name in ("create_connection", "getaddrinfo")
        if is_connecting and "host" in frame_variables and "port" in frame_variables:
            # The innermost frame comes last, and replaces the others.
            address = f"{frame_variables['host']}:{frame_variables['port']}"
    return address


def record_error(text: str, *, sample: object = None, address: str = "") -> bool:
    """Write the text of the error that ends this worker into the stop folder, for the node agent.

    The node agent prints the text at the end of the run. Return False if there is no node agent, or if the
    text cannot be written.

    Parameters
    ----------
    sample : index of the sample of the data set that could not be read, or None.
    address : ``HOST:PORT`` to which the worker could not connect, or "".
    """
    # The stop folder, in which the node agent and its workers exchange files.
    folder, rank = os.environ.get("IMGKIT_STOP_DIR"), os.environ.get("RANK", "")
    # The node agent sets this variable. Without one, nobody would print the text later.
    has_agent = "IMGKIT_ATTEMPT" in os.environ
    if not has_agent or not folder or not rank.isdigit():
        return False
    if len(text) > 2 * HALF:
        text = f"{text[:HALF]}\n...\n{text[-HALF:]}"
    if sample is not None:
        text = f"sample {str(sample)[:100]} of the data set\n{text}"
    if address:
        text = f"this node cannot reach {address[:200]} (is there a route to the internet?)\n{text}"
    try:
        _write_record(folder, rank, text)
    except OSError:
        return False  # the caller then prints the error itself
    print_to_log(text)
    return True


def _write_record(folder: str, rank: str, text: str) -> None:
    """Write the time and `text` into the file ``failed-RANK`` in `folder`. Raise OSError if that fails."""
    # Write to a temporary file and rename it, so that the node agent never reads an incomplete record.
    temporary = os.path.join(folder, f".imgkit-{os.getpid()}.part")  # noqa: PTH118
    with _create_private_file(temporary) as file:
        file.write(f"{time.time()}\n{text}".encode(errors="backslashreplace"))
    os.replace(temporary, os.path.join(folder, RECORD + rank))  # noqa: PTH105, PTH118


def print_to_log(text: str) -> None:
    """Write `text` to standard error in a form that the node agent puts into its log, but does not print.

    Each line begins with `MARK`.
    """
    marked_lines = "".join(f"{MARK}{line}\n" for line in text.split("\n")).encode(errors="backslashreplace")
    try:
        while marked_lines:
            marked_lines = marked_lines[os.write(2, marked_lines) :]
    except OSError:
        return


def _name_bad_samples() -> None:
    """Change torch so that the error of a data worker names the sample that the worker could not read.

    A sample is one item of the data set. A data worker sends its error to the parent process as text, and the
    parent cannot find the sample in that text. This is called in each process that the program has forked. If
    torch's data loader was not imported, there is no such error, so do nothing.
    """
    wrapper = getattr(sys.modules.get("torch._utils"), "ExceptionWrapper", None)
    if wrapper is None:
        return
    original_init = wrapper.__init__

    def init(self: object, exc_info: Any = None, where: str = "in background") -> None:
        _, _, trace = exc_info or sys.exc_info()
        sample = find_sample(trace)
        if sample is not None:
            where = f"{where}, at sample {sample} of the data set"
        original_init(self, exc_info, where)

    wrapper.__init__ = init


def _end_on_term_of_parent() -> None:
    """In a forked process, let TERM end the process only if the parent process has sent the signal.

    A scheduler sends TERM to all processes, and the forked process must survive that. But
    ``Process.terminate()`` in the parent must end it. A signal handler in Python cannot see the sender, so
    TERM is blocked, and a thread waits for it instead.
    """
    parent_pid = os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def exit_for_parent() -> None:
        # TERM from another process than the parent has no effect, so wait for the next one.
        while signal.sigwaitinfo([signal.SIGTERM]).si_pid != parent_pid:
            pass
        os._exit(0)  # torch's data workers do the same, since another code would look like a crash

    threading.Thread(target=exit_for_parent, daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1:])

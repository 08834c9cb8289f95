"""The guard: a small process between the node agent and torchrun. No process of a run outlives it.

torchrun puts each worker into a session of its own, and no worker ends when its parent is killed. So the
guard is the parent of torchrun and adopts every orphan below it (PR_SET_CHILD_SUBREAPER). The run is over
exactly when the guard has no child.

The guard reads commands from the node agent on one pipe: ``signal N``, ``terminate`` and ``kill``. It reports
on another: ``started PID``, ``failed REASON``, ``exit CODE``, and at the end ``clean NAMES`` or ``stuck
NAMES``. End of file on the first pipe means that the node agent is gone. Everything then ends at once.

The node agent runs this file by path, with the standard library alone, as
``python3 -I -S guard.py CONTROL STATUS FILES KIND COMMAND...``. FILES is the soft limit of open files for the
command, since the node agent of the head raises its own (rollcall/gather.py). With the KIND ``torchrun``, the
command inherits the mask of blocked signals through the guard. The KIND ``node`` is for the command of
dist-run --per-node, which starts with no signal blocked, but with USR1 and USR2 ignored: schedulers send them
as a warning, and the node agent turns them into TERM.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Iterator

# The option's number in prctl(2), from linux/prctl.h.
PR_SET_CHILD_SUBREAPER = 36
LEAVE_S = 3.0
"""Seconds that processes left by the program have to end by themselves, once torchrun has ended."""
REAP_S = 8.0
"""Seconds to wait after KILL. A process that is still there hangs in the kernel, and no signal reaches it."""
# Seconds between two looks at processes that are about to end.
TICK_S = 0.05
PROC = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
"""Descriptor of /proc, opened at the start.

The process that serves the image's files can end before the guard, and then no path leads to /proc.
"""


def adopt_orphans() -> bool:
    """Make this process the parent of every orphan below it. Return False if the system cannot do that."""
    try:
        import ctypes

        return bool(ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)
    except (ImportError, OSError, AttributeError):
        return False


def descendants() -> dict[int, str]:
    """Return the names of all processes below this one, by process id: ``{4711: "python3"}``."""
    children: dict[int, list[tuple[int, str]]] = {}
    for pid, parent, name in _list_processes():
        children.setdefault(parent, []).append((pid, name))
    names: dict[int, str] = {}
    # Walk down the tree of processes from this process.
    unvisited = [os.getpid()]
    while unvisited:
        for pid, name in children.get(unvisited.pop(), ()):
            names[pid] = name
            unvisited.append(pid)
    return names


def _list_processes() -> Iterator[tuple[int, int, str]]:
    """Yield the id, the parent's id and the name of each living process of the node.

    An example is ``4711, 1, "python3"``.
    """
    for entry in os.listdir(PROC):  # noqa: PTH208 - pathlib costs this process a third of its start
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError):  # the process has ended
                # "12 (name) S 1 ...": the name may contain spaces and parentheses.
                before, _, after = _read_proc_file(f"{entry}/stat").rpartition(b")")
                _, _, name = before.partition(b"(")
                state, parent, *_ = after.split()
                if state not in (b"Z", b"X"):  # a zombie or dead: no signal has an effect any more
                    yield int(entry), int(parent), name.decode(errors="replace")


def _read_proc_file(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY, dir_fd=PROC)
    try:
        return os.read(descriptor, 4096)
    finally:
        os.close(descriptor)


def reap(codes: dict[int, int]) -> bool:
    """Collect the exit codes of ended children into `codes`. Return False when no child is left.

    Without this, ended processes would stay as zombies. The children include orphans that this process has
    adopted.
    """
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
        codes[pid] = os.waitstatus_to_exitcode(status)


def end_all(within_s: float = REAP_S) -> tuple[str, ...]:
    """Kill and collect every process below this process. Return the names of processes that are still there.

    A process that is left after `within_s` seconds hangs in the kernel, where no signal reaches it.
    """
    deadline = time.monotonic() + within_s
    while reap({}):
        # Again and again, since a process may have started another one in the meantime.
        for pid in descendants():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() >= deadline:
            return tuple(sorted(descendants().values()))
        time.sleep(TICK_S)
    return ()


def main(control: int, status: int, open_files: int, kind: str, command: list[str]) -> None:
    """Run `command`, obey the node agent's commands, and end when no process is left.

    Parameters
    ----------
    control : descriptor of the pipe with the node agent's commands.
    status : descriptor of the pipe for reports.
    open_files : soft limit of open files for the command.
    kind : ``torchrun`` or ``node``; see the module.
    """
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, hard_limit))
    can_adopt = adopt_orphans()
    # SIG_IGN would be inherited, and torchrun could not be ended by these two signals. Handlers are reset at
    # exec.
    for number in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, lambda *_: None)
    for descriptor in (control, status):
        os.set_inheritable(descriptor, False)
    child_ended = _wake_on_child()
    try:
        child = _start_command(command, kind)
    except OSError as error:
        _report(status, f"failed {error.strerror}")
        return
    _report(status, f"started {child}" if can_adopt else f"started {child} alone")
    codes: dict[int, int] = {}
    orders: set[str] = set()  # names of the node agent's commands that have come until now
    signalled: set[int] = set()  # processes that have got TERM
    while "kill" not in orders and reap(codes) and child not in codes:
        orders |= _take_orders(control, child, (child_ended,), 1.0)
        if "terminate" in orders and not signalled:
            _terminate(signalled)
    if "kill" not in orders:
        _report(status, f"exit {codes[child]}")
        leave_at = time.monotonic()
        if "terminate" in orders:
            _terminate(signalled)  # processes that were just being started at the first TERM
            leave_at = float("inf")  # the node agent sends "kill" when the grace time is over
        elif codes[child] >= 0:
            # The processes left by a command that has exited may still be tidying up. If it was killed, its
            # workers do not know that yet, and waiting would not help.
            leave_at += LEAVE_S
        while "kill" not in orders and reap(codes) and time.monotonic() < leave_at:
            orders |= _take_orders(control, None, (), TICK_S)
    # Processes that the command has left running, such as a daemon. They are named in the last report.
    remaining = sorted(set(descendants().values()))
    stuck = end_all()
    if child not in codes:
        _report(status, f"exit {-signal.SIGKILL}")
    _report(status, f"stuck {' '.join(stuck)}" if stuck else f"clean {' '.join(remaining)}")


def _start_command(command: list[str], kind: str) -> int:
    """Start `command` with the signal settings of its kind (see the module), and return its process id.

    Raises
    ------
    OSError : `command` cannot be started.
    """
    # Python ignores these two signals, and the command would inherit that.
    reset = (signal.SIGPIPE, signal.SIGXFSZ)
    if kind == "torchrun":
        return os.posix_spawnp(command[0], command, os.environ, setsigdef=reset)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # the command inherits this, as intended
    return os.posix_spawnp(command[0], command, os.environ, setsigdef=reset, setsigmask=())


def _wake_on_child() -> int:
    """Return a descriptor that becomes readable when a child ends, so that `select` can wait for it."""
    # select() does not return for a signal by itself: Python writes a byte into this pipe (set_wakeup_fd).
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return reader


def _take_orders(control: int, child: int | None, wakers: tuple[int, ...], seconds: float) -> set[str]:
    """Wait up to `seconds` for commands of the node agent, and return their names, such as ``terminate``.

    The command ``signal N`` is carried out here: `child` gets the signal. If the node agent is gone, the
    result is ``kill``, so that the run ends with it. A byte on one of the descriptors in `wakers` ends the
    waiting.
    """
    readable, _, _ = select.select([control, *wakers], [], [], seconds)
    for descriptor in wakers:
        if descriptor in readable:
            os.read(descriptor, 4096)
    if control not in readable:
        return set()
    data = os.read(control, 4096)
    if not data:  # end of file
        return {"kill"}
    names = set()
    for line in data.decode().splitlines():
        name, _, number = line.partition(" ")
        names.add(name)
        if name == "signal" and child is not None:
            os.kill(child, int(number))  # the child was not collected yet, so its id is not used again
    return names


def _terminate(signalled: set[int]) -> None:
    """Send TERM to every process below this one that is not in `signalled`, and add its id there."""
    for pid in descendants().keys() - signalled:
        signalled.add(pid)
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGTERM)


def _report(status: int, line: str) -> None:
    """Write one line for the node agent, if it is still there."""
    with contextlib.suppress(OSError):  # the node agent is gone
        os.write(status, f"{line}\n".encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:])

"""The guard: a small process between the node agent and torchrun, which ends every process that a run leaves.

torchrun puts each worker into a session of its own, and a worker goes on when its parent is killed. So the
guard is the parent of torchrun, and adopts every orphaned process below it (PR_SET_CHILD_SUBREAPER). The run
is over exactly when the guard has no more children.

The guard reads commands from the node agent on one pipe: ``signal N``, ``terminate`` and ``kill``. On another
pipe, it reports ``started PID``, ``failed REASON``, ``exit CODE``, and finally ``clean NAMES`` or ``stuck
NAMES``. End of file on the first pipe means that the node agent is gone. The guard then ends everything at
once.

The node agent runs this file by its path and only with the standard library, as ``python3 -I -S guard.py
CONTROL STATUS FILES KIND COMMAND...``. FILES is the command's soft limit of open files. It is passed because
the node agent of the head raises its own limit (rollcall/gather.py). KIND says how the command starts:

* With ``torchrun``, the command inherits the mask of blocked signals through the guard.
* With ``node``, for the command of dist-run --per-node, no signal is blocked, but USR1 and USR2 are ignored.
    Schedulers
  send these two as a warning, and the node agent turns them into TERM.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Collection, Iterator

# The option's number in prctl(2), from linux/prctl.h.
PR_SET_CHILD_SUBREAPER = 36
LEAVE_S = 3.0
"""Seconds in which processes that are left after the end of torchrun may end by themselves."""
REAP_S = 8.0
"""Seconds to wait after KILL.

A process that still exists after that time hangs in the kernel, where no signal reaches it.
"""
# Seconds between two checks of whether processes have ended.
TICK_S = 0.05
PROC = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
"""Descriptor of /proc, opened at the start.

The process that serves the image's files may end before the guard. After that, /proc cannot be opened by its
path.
"""


def adopt_orphans() -> bool:
    """Make this process the parent of every orphaned process below it.

    Return False if the system does not support that.
    """
    try:
        # Imported here because an image's Python may lack ctypes.
        import ctypes

        return bool(ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)
    except (ImportError, OSError, AttributeError):
        return False


def descendants() -> dict[int, str]:
    """Return the names of all processes below this one, by process id: ``{4711: "python3"}``.

    Processes that have ended are left out, even if nobody has read their exit codes yet.
    """
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
        if not entry.isdigit():  # only the folders of processes have numbers as names
            continue
        with contextlib.suppress(OSError, ValueError):  # the process has ended
            # An example is "12 (name) S 1 ...". The name may contain spaces and parentheses, so split at the
            # last ")".
            id_and_name, _, rest = _read_proc_file(f"{entry}/stat").rpartition(b")")
            _, _, name = id_and_name.partition(b"(")
            state, parent, *_ = rest.split()
            if state not in (b"Z", b"X"):  # zombie or dead, so that no signal has an effect
                yield int(entry), int(parent), name.decode(errors="replace")


def _read_proc_file(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY, dir_fd=PROC)
    try:
        return os.read(descriptor, 4096)
    finally:
        os.close(descriptor)


def reap_into(codes: dict[int, int]) -> bool:
    """Collect the exit codes of all children that have ended into `codes`, by process id.

    Otherwise, ended processes would stay as zombies. The children include orphans that this process has
    adopted. Return False if no child is left.
    """
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:  # there are children, but none of them has ended since the last call
            return True
        codes[pid] = os.waitstatus_to_exitcode(status)


def end_all() -> tuple[str, ...]:
    """Kill every process below this process, and return the names of processes that could not be killed.

    A process that still exists after `REAP_S` seconds hangs in the kernel, where no signal reaches it.
    """
    deadline = time.monotonic() + REAP_S
    # `reap_into` collects the processes that have ended, and returns False once no child is left. The exit
    # codes do not matter here.
    while reap_into({}):
        # Look for processes in each round, since a process may have started another one in the meantime.
        for pid in descendants():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() >= deadline:
            return tuple(sorted(descendants().values()))
        time.sleep(TICK_S)
    return ()


def main(control: int, status: int, open_files: int, kind: str, command: list[str]) -> None:
    """Run `command`, follow the node agent's orders, and end when no process is left.

    Parameters
    ----------
    control : descriptor of the pipe with the node agent's commands.
    status : descriptor of the pipe for reports to the node agent.
    open_files : the command's soft limit for the number of open files.
    kind : ``torchrun`` or ``node``, which are described in the docstring of this module.
    """
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, hard_limit))
    can_adopt = adopt_orphans()
    # The guard itself must survive these two signals. torchrun would inherit SIG_IGN, and could then not be
    # ended by them. A handler, in contrast, is reset when the command is executed.
    for caught_signal in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(caught_signal, lambda *_: None)
    for descriptor in (control, status):
        os.set_inheritable(descriptor, False)
    child_ended = _make_child_wakeup()
    try:
        child = _start_command(command, kind)
    except OSError as error:
        _report(status, f"failed {error.strerror}")
        return
    _report(status, f"started {child}" if can_adopt else f"started {child} alone")
    has_ended = _supervise(child, _AgentCommands(control), child_ended, status)
    # The last report names the processes that the command has left running, such as a daemon.
    remaining = sorted(set(descendants().values()))
    stuck = end_all()
    if not has_ended:
        _report(status, f"exit {-signal.SIGKILL}")
    _report(status, f"stuck {' '.join(stuck)}" if stuck else f"clean {' '.join(remaining)}")


def _supervise(child: int, agent: _AgentCommands, child_ended: int, status: int) -> bool:
    """Follow the node agent's commands until the process `child` has ended, and report its exit code.

    Then give the processes that it has left time to end, and return True. Return False as soon as the node
    agent wants everything to be killed while the child is running. The descriptor `child_ended` becomes
    readable when a child ends, and `status` is that of the pipe for reports to the node agent.
    """
    terminated: set[int] = set()
    codes: dict[int, int] = {}
    while reap_into(codes) and child not in codes:
        for child_signal in agent.wait_for_commands(1.0, wakeup=child_ended):
            # Nobody has read the child's exit code yet, so its id cannot belong to another process.
            os.kill(child, child_signal)
        if agent.wants_end and not terminated:
            terminated = _terminate_all()
        if agent.wants_kill:
            return False
    _report(status, f"exit {codes[child]}")
    if agent.wants_end:
        _terminate_all(terminated)  # processes that were started around the time of the first TERM
    _wait_for_remaining(agent, codes[child])
    return True


def _start_command(command: list[str], kind: str) -> int:
    """Start `command` with the signal settings of its kind, and return its process id.

    A command of the kind ``torchrun`` inherits the mask of blocked signals, which contains the stop signals.
    For a command of the kind ``node``, which is the user's own, no signal is blocked. But it ignores USR1 and
    USR2: schedulers send these as a warning, which would end a program without a handler. The node agent
    turns them into TERM.

    Raises
    ------
    OSError : `command` cannot be started.
    """
    # Python ignores these two signals. Without a reset, the command would ignore them as well.
    reset = (signal.SIGPIPE, signal.SIGXFSZ)
    if kind == "torchrun":
        return os.posix_spawnp(command[0], command, os.environ, setsigdef=reset)
    for ignored_signal in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(ignored_signal, signal.SIG_IGN)  # the command inherits this from the guard
    return os.posix_spawnp(command[0], command, os.environ, setsigdef=reset, setsigmask=())


def _make_child_wakeup() -> int:
    """Return a descriptor that becomes readable when a child ends, so that `select` can wait for it."""
    # select() does not return for a signal by itself: Python writes a byte into this pipe (set_wakeup_fd).
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return reader


class _AgentCommands:
    """The node agent's commands, which arrive on the pipe `control`."""

    def __init__(self, control: int) -> None:
        self._control = control
        self.wants_end = False
        """True once the node agent has sent ``terminate``."""
        self.wants_kill = False
        """True once the node agent has sent ``kill``, or is gone."""

    def wait_for_commands(self, seconds: float, *, wakeup: int | None = None) -> list[int]:
        """Wait up to `seconds` for commands, and return the signals that the child should get.

        Other commands set the attributes `wants_end` and `wants_kill`. The wait also ends when a child ends,
        if `wakeup` is the descriptor from `_make_child_wakeup`. Return [] if no signal was requested.
        """
        descriptors = [self._control] if wakeup is None else [self._control, wakeup]
        readable, _, _ = select.select(descriptors, [], [], seconds)
        if wakeup is not None and wakeup in readable:
            os.read(wakeup, 4096)  # else the descriptor stays readable, and the next wait ends at once
        if self._control not in readable:
            return []
        # The node agent writes each short line at once, so a line arrives as a whole.
        command_lines = os.read(self._control, 4096)
        if not command_lines:  # end of file: the node agent is gone
            self.wants_kill = True
        return self._obey(command_lines.decode().splitlines())

    def _obey(self, command_lines: list[str]) -> list[int]:
        """Set the attributes that `command_lines` request, and return the signals that the child should get.

        The commands are ``signal N``, ``terminate`` and ``kill``.
        """
        signals = []
        for line in command_lines:
            verb, _, signal_number = line.partition(" ")
            if verb == "signal":
                signals.append(int(signal_number))
            elif verb == "terminate":
                self.wants_end = True
            elif verb == "kill":
                self.wants_kill = True
        return signals


def _wait_for_remaining(agent: _AgentCommands, code: int) -> None:
    """Give the processes that the command has left time to end by themselves.

    `code` is the exit code of the command, or the negative number of the signal that has killed it. After
    such a signal, the workers do not know yet that the command is gone, so there is no point in waiting.

    This only waits. The caller, `main`, kills what is left afterwards.
    """
    patience_s = LEAVE_S if code >= 0 else 0.0
    if agent.wants_end:
        patience_s = float("inf")  # the node agent sends "kill" when the grace time is over
    deadline = time.monotonic() + patience_s
    while not agent.wants_kill and time.monotonic() < deadline:
        if not reap_into({}):  # no child is left, and no orphan; their exit codes do not matter
            return
        agent.wait_for_commands(TICK_S)  # the signals are dropped, because the child has ended


def _terminate_all(except_pids: Collection[int] = ()) -> set[int]:
    """Send TERM to every process below this one except `except_pids`. Return the ids of these processes."""
    pids = descendants().keys() - set(except_pids)
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGTERM)
    return pids


def _report(status: int, line: str) -> None:
    """Write one line for the node agent. Do nothing if the node agent is gone."""
    with contextlib.suppress(OSError):  # the node agent is gone
        os.write(status, f"{line}\n".encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:])

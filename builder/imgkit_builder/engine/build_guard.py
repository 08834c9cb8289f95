"""Run a builder, and leave nothing behind if imgkit is interrupted or killed.

This file is the source of a separate program, the guard, and uses only the standard library. It is run as
``python -I -S -c SOURCE LIFE TOKEN CONTAINERS -- ARGV...``. The guard runs ARGV until it ends, or until the
pipe with the file descriptor LIFE is closed, which means that imgkit was interrupted or killed. ARGV inherits
the standard input. The guard copies its output, because a program whose output nobody reads would end at
once.

If buildx is ended by a signal, it ends its steps itself. Podman does not: it ends at once, and leaves behind
the running step and its working containers. So the guard ends the step instead of podman. Podman then sees a
failed step, and removes what it made. If podman does not end, the guard kills it. Finally, the guard removes
the working containers that are left.

The guard recognizes these containers by TOKEN, a build argument that podman writes into the folder of each
container. CONTAINERS is the folder with all containers. It is empty for buildx.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

# From linux/prctl.h.
PR_SET_CHILD_SUBREAPER = 36
# Podman needs a second or two to remove a step's container.
GRACE_S = 10.0
POLL_S = 0.1
CHUNK_BYTES = 1 << 16


def main() -> int:
    """Run the program ARGV, and return its exit code. If a signal N ended it, return 128 + N.

    The arguments are LIFE, TOKEN, CONTAINERS, ``--`` and ARGV, as described at the top of this file.
    """
    life, token, containers_folder, _, *argv = sys.argv[1:]
    # imgkit holds the other end of this pipe, which the kernel closes when imgkit ends.
    life_pipe = int(life)
    if sys.platform == "linux":
        # If the program ends before its child processes, they become children of the guard, which can then
        # find them.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child, output = start_program(argv, life_pipe)
    # Only the program reads standard input. If it ends early, imgkit's writes must fail and not block.
    os.close(0)
    # Only the pipe may end the guard, because it must still clean up. This comes after the start of the
    # program, which would inherit the ignored signals. `end_build` also sends SIGTERM to the guard itself.
    for signal_number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signal_number, signal.SIG_IGN)
    exit_code = copy_output(child, life_pipe, output)
    # None means that imgkit has ended first.
    if exit_code is None:
        exit_code = end_build(child, output, steps_only=bool(containers_folder))
        if containers_folder:
            remove_containers(containers_folder, token)
    if exit_code < 0:  # a signal ended the program, and this is its negative number
        return 128 - exit_code
    return exit_code


def start_program(argv: list[str], life_pipe: int) -> tuple[int, int]:
    """Start a program without `life_pipe`. Return its process id and the read end of its output's pipe."""
    output, write_end = os.pipe()
    file_actions = [
        (os.POSIX_SPAWN_DUP2, write_end, 1),
        (os.POSIX_SPAWN_DUP2, write_end, 2),
        (os.POSIX_SPAWN_CLOSE, life_pipe),
    ]
    # Python ignores these two signals. A child process would inherit that, so restore their defaults.
    ignored = (signal.SIGPIPE, signal.SIGXFSZ)
    child = os.posix_spawnp(argv[0], argv, os.environ, file_actions=file_actions, setsigdef=ignored)
    os.close(write_end)
    return child, output


def copy_output(child: int, life_pipe: int, output: int) -> int | None:
    """Copy the output of the process `child` to standard output until it ends, and return its exit code.

    If `life_pipe` closes first, return None. This means that imgkit was interrupted or killed. `output` is
    the read end of the pipe to which the process writes.
    """
    open_pipes = [life_pipe, output]
    while True:
        ready, _, _ = select.select(open_pipes, [], [], POLL_S)
        if life_pipe in ready:
            return None
        if output in ready:
            data = os.read(output, CHUNK_BYTES)
            try:
                os.write(1, data)
            except BrokenPipeError:
                return None  # nobody reads any more, so imgkit has ended
            if data:
                continue  # read all output before the exit code
            open_pipes = [life_pipe]  # the output has ended
        # WNOHANG: do not wait. If the process still runs, `pid` is 0.
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)


def end_build(child: int, output: int, *, steps_only: bool) -> int:
    """End the process `child` and its descendants, and return its exit code.

    The containers of running build steps are killed in any case. `steps_only` is meant for podman, which then
    sees a failed step, and cleans up. Otherwise the process also gets SIGTERM. If it does not end within
    `GRACE_S`, everything is killed. `output` is the read end of the pipe to which the process writes.
    """
    if not steps_only:
        # 0 is the process group of this process, which ignores the signal, and of the program.
        os.killpg(0, signal.SIGTERM)
    os.set_blocking(output, False)
    own_session = os.getsid(0)
    deadline = time.monotonic() + GRACE_S
    while True:
        # WNOHANG: do not wait. If the process still runs, `pid` is 0.
        pid, status = os.waitpid(child, os.WNOHANG)
        # Search in each round, also in the last one: a step may have started in the meantime.
        kill_processes(container_init_pids())
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            # Kill only processes of this session. Podman starts a helper for its next run in another session.
            kill_processes(pid for pid in descendants() if session_of(pid) == own_session)
        # Discard the output, so that a full pipe does not keep the program from ending.
        with contextlib.suppress(BlockingIOError):
            os.read(output, CHUNK_BYTES)
        time.sleep(POLL_S)


def kill_processes(pids: Iterable[int]) -> None:
    """Kill processes. A process that has already ended is no error."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def container_init_pids() -> list[int]:
    """Return the id of the first process in each container that this process has started, also indirectly.

    The first process has the number 1 in a PID namespace below that of this process. If it is killed, the
    kernel ends all other processes of the container.
    """
    # The number of nested PID namespaces that this process itself is in.
    depth = len(namespace_pids("self"))
    pids = []
    for pid in descendants():
        nested_pids = namespace_pids(pid)
        if len(nested_pids) > depth and nested_pids[-1] == "1":
            pids.append(pid)
    return pids


def session_of(pid: int) -> int:
    """Return the id of the session of `pid`, or 0 if the process has ended."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def namespace_pids(pid: int | str) -> list[str]:
    """Return the ids of the process `pid` in nested PID namespaces, with the innermost last.

    For a process in a container, this is ``["4711", "1"]``, for example. If the process has ended, the result
    is empty.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        if line.startswith("NSpid:"):
            return line.split()[1:]
    return []


def descendants() -> list[int]:
    """Return the ids of all processes that this process has started, directly or indirectly."""
    pids = []
    children = children_by_parent()
    pending_pids = children.get(os.getpid(), [])
    # This misses a process that starts after the scan. `end_build` scans again until the program ends.
    while pending_pids:
        pid = pending_pids.pop()
        pids.append(pid)
        pending_pids += children.get(pid, [])
    return pids


def children_by_parent() -> dict[int, list[int]]:
    """Return the ids of the children of each process on this machine, by the id of the parent."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            stat_line = path.read_text(errors="replace")
        except OSError:
            continue
        # The line is "PID (NAME) STATE PARENT ...". The name may contain parentheses and blanks, so split the
        # line at its last parenthesis.
        _, _, fields = stat_line.rpartition(")")
        _, parent, *_ = fields.split()
        children.setdefault(int(parent), []).append(int(path.parent.name))
    return children


def remove_containers(containers_folder: str, token: str) -> None:
    """Remove the containers that an interrupted podman has left behind.

    `containers_folder` has a folder for each of podman's containers. A container of this build has `token` in
    its file ``buildah.json``, because the token was a build argument.
    """
    for folder in Path(containers_folder).glob("*"):
        # Skip a container that cannot be read, and continue with the next one if podman cannot be started.
        with contextlib.suppress(OSError):
            description = (folder / "userdata/buildah.json").read_text(errors="replace")
            if token in description:
                remove_container(folder.name)  # the folder is named after the id of the container


def remove_container(container_id: str) -> None:
    """Remove a container with podman, and wait until podman ends. Its exit code and output are ignored.

    Raises
    ------
    OSError : podman cannot be started.
    """
    argv = ["podman", "--remote=false", "rm", "--force", container_id]
    # The standard streams of this process may be closed by now, so give podman open ones.
    null_streams = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
    pid = os.posix_spawnp(argv[0], argv, os.environ, file_actions=null_streams)
    os.waitpid(pid, 0)


if __name__ == "__main__":
    sys.exit(main())

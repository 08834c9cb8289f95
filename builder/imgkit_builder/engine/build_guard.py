"""Run a program that builds, and leave nothing of it: the source of ``python -c``, standard library only.

``python -I -S -c SOURCE LIFE TOKEN CONTAINERS -- ARGV...`` runs ARGV until it ends, or until the pipe LIFE
closes: imgkit was interrupted or killed. Standard input belongs to the program, and the guard copies its
output: a program whose output nobody reads would end at once.

Buildx ends its steps itself when a signal ends it. Podman does not: it ends at once, and leaves the running
step and its working containers. So the guard ends the step instead; podman then sees a failed step, and
removes what it made. A podman that does not end is killed, and its working containers are known by TOKEN, a
build argument that podman writes into the folder of each. CONTAINERS is that folder, or empty for buildx.
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
    """Run and return the program's exit code, 128 + N for signal N."""
    life, token, containers, _, *argv = sys.argv[1:]
    life_pipe = int(life)
    if sys.platform == "linux":
        # Orphans of the program become children of the guard, and can be found.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    output, write_end = os.pipe()
    file_actions = [
        (os.POSIX_SPAWN_DUP2, write_end, 1),
        (os.POSIX_SPAWN_DUP2, write_end, 2),
        (os.POSIX_SPAWN_CLOSE, life_pipe),
    ]
    # Python ignores these two signals, and a child would inherit that.
    ignored = (signal.SIGPIPE, signal.SIGXFSZ)
    child = os.posix_spawnp(argv[0], argv, os.environ, file_actions=file_actions, setsigdef=ignored)
    os.close(write_end)
    os.close(0)  # where the program ends early, imgkit has to see that nobody reads
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    code = copy_output(child, life_pipe, output)
    if code is None:
        code = end_build(child, output, steps_only=bool(containers))
        if containers:
            remove_containers(containers, token)
    if code < 0:  # the number of a signal
        return 128 - code
    return code


def copy_output(child: int, life_pipe: int, output: int) -> int | None:
    """Copy the output of the program `child` until it ends, and return its exit code.

    `output` is the end of a pipe that has the output. Return None if `life_pipe` closes first, which means
    that imgkit was interrupted or killed.
    """
    open_pipes = [life_pipe, output]
    while True:
        ready, _, _ = select.select(open_pipes, [], [], POLL_S)
        if life_pipe in ready:
            return None
        if output in ready:
            data = os.read(output, CHUNK_BYTES)
            if data:
                try:
                    os.write(1, data)
                except BrokenPipeError:
                    return None
                continue
            open_pipes = [life_pipe]  # the output has ended
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)


def end_build(child: int, output: int, *, steps_only: bool) -> int:
    """End the program `child` and its descendants, and return its exit code.

    With `steps_only`, for podman, only the processes of the running step are killed: podman sees a failed
    step, and cleans up. If it takes longer than `GRACE_S`, everything is killed.
    """
    if not steps_only:
        os.killpg(0, signal.SIGTERM)
    os.set_blocking(output, False)
    deadline = time.monotonic() + GRACE_S
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        kill_processes(step_processes())
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            # Only processes of this session: podman leaves a helper for its next run in a session of its own.
            kill_processes(pid for pid in descendants() if session_of(pid) == os.getsid(0))
        with contextlib.suppress(BlockingIOError):
            os.read(output, CHUNK_BYTES)
        time.sleep(POLL_S)


def kill_processes(pids: Iterable[int]) -> None:
    """Kill processes. One that has gone is no error."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def step_processes() -> list[int]:
    """Return the first process of each container that the guarded program has started.

    Such a process has the number 1 in a PID namespace below the guard's. If it is killed, the kernel ends all
    other processes of the container.
    """
    depth = len(namespace_pids("self"))
    pids = []
    for pid in descendants():
        numbers = namespace_pids(pid)
        if len(numbers) > depth and numbers[-1] == "1":
            pids.append(pid)
    return pids


def session_of(pid: int) -> int:
    """Return the session of `pid`, or 0 for a process that has gone."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def namespace_pids(pid: int | str) -> list[str]:
    """Return the numbers of the process `pid` in the nested PID namespaces: ``["4711", "1"]`` in a container.

    The innermost comes last. The result is empty if the process has gone.
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
    """Return the numbers of all processes that this one has started, directly or not."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text(errors="replace")
        except OSError:
            continue
        # "PID (NAME) STATE PARENT ...": a name may have parentheses and blanks.
        _, _, fields = text.rpartition(")")
        _, parent, *_ = fields.split()
        children.setdefault(int(parent), []).append(int(path.parent.name))
    pids = []
    pending_pids = children.get(os.getpid(), [])
    # A process that starts after the scan is found by the next one: `end_build` scans until the program ends.
    while pending_pids:
        pid = pending_pids.pop()
        pids.append(pid)
        pending_pids += children.get(pid, [])
    return pids


def remove_containers(containers: str, token: str) -> None:
    """Remove the containers that an interrupted podman has left.

    `containers` is podman's folder of containers. Those of this build have `token` in their file
    ``buildah.json``, since it was a build argument.
    """
    for folder in Path(containers).glob("*"):
        with contextlib.suppress(OSError):
            description = (folder / "userdata/buildah.json").read_text(errors="replace")
            if token not in description:
                continue
            argv = ["podman", "--remote=false", "rm", "--force", folder.name]
            no_files = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
            pid = os.posix_spawnp(argv[0], argv, os.environ, file_actions=no_files)
            os.waitpid(pid, 0)


if __name__ == "__main__":
    sys.exit(main())

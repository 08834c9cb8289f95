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

PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 10.0
LOOK_EVERY_S = 0.1
CHUNK_BYTES = 1 << 16


def main() -> int:
    """Run and return the program's exit code, 128 + N for signal N."""
    life, token, containers, _, *argv = sys.argv[1:]
    pipe = int(life)
    if sys.platform == "linux":
        # What the program leaves becomes a child of the guard, and can be found.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    source, sink = os.pipe()
    actions = [
        (os.POSIX_SPAWN_DUP2, sink, 1),
        (os.POSIX_SPAWN_DUP2, sink, 2),
        (os.POSIX_SPAWN_CLOSE, pipe),
    ]
    # Python ignores these two signals, and a child would inherit that.
    quiet = (signal.SIGPIPE, signal.SIGXFSZ)
    child = os.posix_spawnp(argv[0], argv, os.environ, file_actions=actions, setsigdef=quiet)
    os.close(sink)
    os.close(0)  # where the program ends early, imgkit has to see that nobody reads
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    code = follow(child, pipe, source)
    if code is None:
        code = end(child, source, steps_only=bool(containers))
        if containers:
            remove(containers, token)
    return 128 - code if code < 0 else code


def follow(child: int, pipe: int, source: int) -> int | None:
    """Copy the output until `child` has ended, and return its exit code; None where `pipe` closes first."""
    while True:
        ready = select.select([pipe, source], [], [], LOOK_EVERY_S)[0]
        if pipe in ready:
            return None
        if source in ready:
            data = os.read(source, CHUNK_BYTES)
            if data:
                try:
                    os.write(1, data)
                except BrokenPipeError:
                    return None
                continue
            source = pipe  # it has ended, or closed its output
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)


def end(child: int, source: int, *, steps_only: bool) -> int:
    """End `child` and all that it started; returns its exit code."""
    if not steps_only:
        os.killpg(0, signal.SIGTERM)
    os.set_blocking(source, False)
    limit = time.monotonic() + GRACE_S
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        kill(steps())
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > limit:
            kill(pid for pid in descendants() if session(pid) == os.getsid(0))
        with contextlib.suppress(BlockingIOError):
            os.read(source, CHUNK_BYTES)
        time.sleep(LOOK_EVERY_S)


def kill(pids: Iterable[int]) -> None:
    """Kill processes; one that has gone is no error."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def steps() -> list[int]:
    """The first processes of the containers that this guard's descendants started."""
    here = len(namespaced("self"))
    pids = [(pid, namespaced(pid)) for pid in descendants()]
    return [pid for pid, numbers in pids if len(numbers) > here and numbers[-1] == "1"]


def session(pid: int) -> int:
    """The session of `pid`; podman's helper for the next podman has one of its own, and stays."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def namespaced(pid: int | str) -> list[str]:
    """The numbers that the process `pid` has in the nested namespaces, its own last."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return []
    return next((line.split()[1:] for line in lines if line.startswith("NSpid:")), [])


def descendants() -> list[int]:
    """The processes below this one."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text(errors="replace").rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(path.parent.name))
    found: list[int] = []
    todo = [os.getpid()]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def remove(containers: str, token: str) -> None:
    """Remove podman's working containers that know `token`."""
    for path in Path(containers).glob("*/userdata/buildah.json"):
        try:
            ours = token in path.read_text(errors="replace")
        except OSError:
            continue
        if ours:
            null = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
            argv = ["podman", "--remote=false", "rm", "--force", path.parts[-3]]
            os.waitpid(os.posix_spawnp(argv[0], argv, os.environ, file_actions=null), 0)


if __name__ == "__main__":
    sys.exit(main())

"""Ports of a run: derived from the job id, probed by binding; and the process that holds a busy one."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.schedulers.placement import FIRST_PORT, PORTS, job_port

# Ports tried for torchrun before giving up.
PROBES = 64
BACKLOG = 1024


def rollcall_port(job_id: str, port: int | None) -> int:
    """Return the port on which the head listens: next to torchrun's given port, else from the job id."""
    if port is None:
        return job_port(job_id)
    return port + 1 if port < 65535 else port - 1


def listen(port: int, *, backlog: int = 0) -> socket.socket:
    """Open a non-blocking listener on all addresses of this machine, IPv4 and IPv6.

    The kernel queues `backlog` connections, at least `BACKLOG`, and never more than `longest_queue`.

    Raises
    ------
    OSError : the port is busy (EADDRINUSE) or not allowed.
    """
    backlog = max(backlog, BACKLOG)
    try:
        listener = socket.create_server(
            ("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True
        )
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise
        # This machine has IPv6 switched off.
        listener = socket.create_server(("", port), backlog=backlog)
    listener.setblocking(False)
    return listener


def longest_queue(root: Path = Path("/")) -> int:
    """Return the kernel's own limit of connections that wait for one listener."""
    try:
        return int((root / "proc/sys/net/core/somaxconn").read_text())
    except (OSError, ValueError):
        # The kernel does not tell.
        return sys.maxsize


def is_free(port: int) -> bool:
    """Whether a server could listen on `port` now."""
    try:
        listen(port).close()
    except OSError:
        return False
    return True


def first_free(after: int) -> int | None:
    """Return the first free port after `after`, within the range of `job_port`; None after `PROBES` tries."""
    for step in range(1, PROBES + 1):
        port = FIRST_PORT + (after + step - FIRST_PORT) % PORTS
        if is_free(port):
            return port
    return None


def next_free(port: int) -> int:
    """Return the first free port after `port`.

    Raises
    ------
    NoPlan : none of `PROBES` ports is free.
    """
    free_port = first_free(port)
    if free_port is None:
        raise NoPlan(
            f"no free port after {port}, between {FIRST_PORT} and {FIRST_PORT + PORTS - 1}, on the head",
            hint="see what listens there: ss -ltnp; or give all nodes the same --port N",
        )
    return free_port


def any_free() -> int:
    """Return a free port of the range of `job_port`, a random one: runs that start at once rarely collide.

    Raises
    ------
    NoPlan : see `next_free`.
    """
    return next_free(FIRST_PORT + int.from_bytes(os.urandom(4), "big") % PORTS)


def holder(port: int, root: Path = Path("/")) -> str:
    """Return who listens on `port`, as far as this user may see it: "python3 x.py (process 12, user ann)"."""
    inodes = dict(_listeners(port, root))
    if not inodes:
        return "a process outside this container, or one that has just ended"
    for folder in (root / "proc").iterdir():
        if folder.name.isdigit() and inodes.keys() & set(_sockets(folder)):
            with contextlib.suppress(OSError):
                argv = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                return f"{argv[:80] or 'a process'} (process {folder.name}, {_user(folder.stat().st_uid)})"
    return f"a process of {_user(next(iter(inodes.values())))}"


def _listeners(port: int, root: Path) -> Iterator[tuple[str, int]]:
    for name in ("tcp", "tcp6"):
        try:
            lines = (root / "proc/net" / name).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            # sl local_address rem_address st tx:rx tr:when retrnsmt uid timeout inode; 0A is LISTEN
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9], int(fields[7])


def _sockets(folder: Path) -> Iterator[str]:
    try:
        for link in (folder / "fd").iterdir():
            target = os.readlink(link)  # noqa: PTH115 - a path would lose "socket:[1]"
            if target.startswith("socket:["):
                yield target[8:-1]
    except OSError:
        # Another user's process, or one that has ended.
        return


def _user(uid: int) -> str:
    try:
        import pwd

        return f"user {pwd.getpwuid(uid).pw_name}"
    except (ImportError, KeyError):
        return f"user {uid}"

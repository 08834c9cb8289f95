"""Choose the ports of a run. They are derived from the job id, and are tested by listening on them."""

from __future__ import annotations

import errno
import secrets
import socket

from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.schedulers.placement import FIRST_PORT, PORTS, job_port

# Number of ports that are tried for torchrun before an error is raised.
PROBES = 64
# Number of connections that the kernel queues for a listener.
BACKLOG = 1024


def rollcall_port(job_id: str, port: int | None) -> int:
    """Return the port on which the head listens during the roll call, in which the nodes meet.

    If the user has chosen torchrun's `port`, it is the next port. Otherwise, it is derived from the job id.
    """
    if port is None:
        return job_port(job_id)
    return port + 1 if port < 65535 else port - 1


def listen(port: int, *, backlog: int = 0) -> socket.socket:
    """Open a non-blocking listener on all addresses of this machine, for IPv4 and IPv6.

    The kernel queues `backlog` connections, but at least `BACKLOG`, and never more than net.core.somaxconn.

    Raises
    ------
    OSError : the port is busy (EADDRINUSE) or not allowed.
    """
    queue = max(backlog, BACKLOG)
    try:
        listener = socket.create_server(
            ("", port), family=socket.AF_INET6, backlog=queue, dualstack_ipv6=True
        )
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise
        listener = socket.create_server(("", port), backlog=queue)  # IPv6 is switched off on this machine
    listener.setblocking(False)
    return listener


def is_free(port: int) -> bool:
    """Return whether a server could listen on `port` now."""
    try:
        listen(port).close()
    except OSError:
        return False
    return True


def first_free(after: int) -> int | None:
    """Return the first free port after `after` in the range of `job_port`.

    Return None if none of `PROBES` ports is free.
    """
    for step in range(1, PROBES + 1):
        port = FIRST_PORT + (after + step - FIRST_PORT) % PORTS  # after the last port comes the first one
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
    """Return a free port in the range of `job_port`, beginning the search at a random port.

    Because of the random port, runs that start at the same time rarely get the same port.

    Raises
    ------
    NoPlan : see `next_free`.
    """
    return next_free(FIRST_PORT + secrets.randbelow(PORTS))

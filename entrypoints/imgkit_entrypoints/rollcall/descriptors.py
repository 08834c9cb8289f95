"""File descriptors of the head: it keeps one connection to each node, more than the usual limit of 1,024."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

from imgkit_entrypoints.errors import NoPlan

ROOM = 512
"""Descriptors besides those of the nodes: strangers, and the launcher's own."""
SPARE = 64
"""Descriptors for the launcher itself: pipes to its children, files that it reads."""
FEWEST_STRANGERS = 16


@contextlib.contextmanager
def limit_kept() -> Iterator[int]:
    """Yield this process' soft limit, and set it back at the end."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        yield soft
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def make_room(nnodes: int, strangers: int) -> int:
    """Raise this process' soft limit for a run of `nnodes`; return how many strangers there is room for.

    The program gets the old limit back (launch/guard.py): some programs close every number up to the limit.

    Raises
    ------
    NoPlan : the hard limit is too low for the nodes.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = len(os.listdir("/proc/self/fd")) + nnodes + SPARE  # noqa: PTH208 - no need for paths
    wanted = max(nnodes + ROOM, least + strangers)
    if hard != resource.RLIM_INFINITY and least + FEWEST_STRANGERS > hard:
        raise NoPlan(
            f"the head of {nnodes} nodes needs {least + FEWEST_STRANGERS} open files; its limit is {hard}",
            where="ulimit -Hn",
            hint=f"raise it on the head: ulimit -n {wanted} in a shell of root, nofile in "
            f"/etc/security/limits.conf, or docker run --ulimit nofile={wanted}",
        )
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return min(strangers, wanted - least)

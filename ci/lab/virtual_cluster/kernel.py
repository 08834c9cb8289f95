"""System calls for which Python has no name before 3.12, and what is made of them."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Collection, Iterator
from pathlib import Path

# linux/mount.h
MS_BIND = 0x1000
MS_MOVE = 0x2000
MS_REC = 0x4000
MS_PRIVATE = 1 << 18

# linux/sched.h
CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
NODE_NAMESPACES = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET

# linux/prctl.h
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    """Give this process namespaces of its own; a pid namespace is for its children."""
    _raise_if_failed(_libc.unshare(flags), "unshare")


def setns(fd: int, flags: int) -> None:
    """Enter the namespaces that a descriptor stands for; a pid namespace is for children."""
    _raise_if_failed(_libc.setns(fd, flags), "setns")


def prctl(option: int, value: int) -> None:
    """Set a property of this process."""
    _raise_if_failed(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), "prctl")


def mount(source: str | None, target: str, kind: str | None = None, flags: int = 0, data: str = "") -> None:
    """Mount a file system of some kind, or with `flags` bind, move or change a mount."""
    result = _libc.mount(
        _encode(source), _encode(target), _encode(kind), ctypes.c_ulong(flags), _encode(data)
    )
    _raise_if_failed(result, f"mount {kind or source} on {target}")


def make_mounts_private() -> None:
    """Keep the mounts of this mount namespace from others, and those of others from it."""
    mount(None, "/", flags=MS_REC | MS_PRIVATE)


@contextlib.contextmanager
def network_of(pid: int) -> Iterator[None]:
    """Run the body of a ``with`` statement in the network namespace of a process."""
    own_network = os.open("/proc/self/ns/net", os.O_RDONLY)
    process = os.pidfd_open(pid)
    try:
        setns(process, CLONE_NEWNET)
        yield
    finally:
        setns(own_network, CLONE_NEWNET)
        os.close(own_network)
        os.close(process)


def close_descriptors(keep: Collection[int]) -> None:
    """Close all descriptors of this process but those in `keep`."""
    for path in list(Path("/proc/self/fd").iterdir()):
        fd = int(path.name)
        if fd not in keep:
            with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed already
                os.close(fd)


def _encode(text: str | None) -> bytes | None:
    return None if text is None else os.fsencode(text)


def _raise_if_failed(result: int, action: str) -> None:
    """Raise OSError if a system call has failed."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{action}: {os.strerror(number)}")

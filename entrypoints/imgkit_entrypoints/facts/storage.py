"""The file system below a path, and how fast this node writes to it."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from imgkit_entrypoints import files
from imgkit_entrypoints.facts.reader import Reader

WRITTEN_BYTES = 16 << 20
TURNS = 3
"""Files of `WRITTEN_BYTES`; the fastest counts, since a busy moment says nothing about the disk."""
ENOUGH_S = 2.0
"""Time after which no further file is written."""
_PIECE = bytes(1 << 20)


def write_MBps(folder: Path) -> float:
    """Write new files into `folder` that nobody else sees; return 1e6 bytes a second.

    The time of a file ends when it is on the disk (fsync).

    Raises
    ------
    OSError : a file cannot be written.
    """
    end, times = time.perf_counter() + ENOUGH_S, [_write_s(folder)]
    while len(times) < TURNS and time.perf_counter() < end:
        times.append(_write_s(folder))
    return WRITTEN_BYTES / min(times) / 1e6


def _write_s(folder: Path) -> float:
    path = files.temporary_name(folder / "imgkit-written")
    with files.create(path, mode=0o600) as stream:
        path.unlink()  # the space is free again even after a kill
        began = time.perf_counter()
        for _ in range(WRITTEN_BYTES // len(_PIECE)):
            stream.write(_PIECE)
        files.sync(stream)
        return time.perf_counter() - began


_NETWORK = re.compile(
    r"nfs4?|lustre|gpfs|beegfs|ceph|panfs|wekafs|pvfs2|orangefs|afs|glusterfs|ocfs2|gfs2|cifs|smb3"
    r"|fuse\.(?:ceph|ceph-fuse|glusterfs|sshfs|juicefs|mfs|moosefs|seaweedfs|lizardfs|dfuse)"
)
"""Types of file systems that several nodes mount. Others may be: a FUSE mount can also be a local disk."""


def on_network_disk(reader: Reader, path: str) -> bool:
    """Whether `path`, which may not exist yet, is on a network file system."""
    return bool(_NETWORK.fullmatch(_file_system(reader, path)))


def _file_system(reader: Reader, path: str) -> str:
    """Type of the file system that `path` is on, as the kernel calls it; empty where that is unknown.

    Source: /proc/self/mountinfo, proc_pid_mountinfo(5).
    """
    wanted, found, longest = os.path.realpath(path), "", -1
    for line in (reader.text("/proc/self/mountinfo") or "").splitlines():
        place, dash, rest = line.partition(" - ")
        fields = place.split(" ")
        if not dash or len(fields) < 5:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        inside = wanted == point or wanted.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= longest:  # of two mounts at one point the later one counts
            found, longest = rest.partition(" ")[0], len(point)
    return found

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
    end_s = time.perf_counter() + ENOUGH_S
    seconds = [_time_write(folder)]
    while len(seconds) < TURNS and time.perf_counter() < end_s:
        seconds.append(_time_write(folder))
    return WRITTEN_BYTES / min(seconds) / 1e6


def _time_write(folder: Path) -> float:
    """Return the seconds in which a new file of `WRITTEN_BYTES` is on the disk; it is removed again."""
    path = files.temporary_name(folder / "imgkit-written")
    with files.create_file(path, mode=0o600) as stream:
        path.unlink()  # the space is free again even after a kill
        start = time.perf_counter()
        for _ in range(WRITTEN_BYTES // len(_PIECE)):
            stream.write(_PIECE)
        files.sync_file(stream)
        return time.perf_counter() - start


_NETWORK = re.compile(
    r"nfs4?|lustre|gpfs|beegfs|ceph|panfs|wekafs|pvfs2|orangefs|afs|glusterfs|ocfs2|gfs2|cifs|smb3"
    r"|fuse\.(?:ceph|ceph-fuse|glusterfs|sshfs|juicefs|mfs|moosefs|seaweedfs|lizardfs|dfuse)"
)
"""Types of file systems that several nodes mount. Others may be: a FUSE mount can also be a local disk."""


def on_network_disk(reader: Reader, path: str) -> bool:
    """Return whether `path`, which may not exist yet, is on a network file system."""
    return bool(_NETWORK.fullmatch(_file_system(reader, path)))


def _file_system(reader: Reader, path: str) -> str:
    """Return the type of the file system that `path` is on, as the kernel calls it; empty if unknown.

    Source: /proc/self/mountinfo, proc_pid_mountinfo(5).
    """
    resolved = os.path.realpath(path)
    file_system = ""
    longest = -1
    for line in (reader.text("/proc/self/mountinfo") or "").splitlines():
        # "36 35 98:0 /root /mount/point rw,noatime - ext4 /dev/sda1 rw"
        mount, separator, description = line.partition(" - ")
        fields = mount.split(" ")
        if not separator or len(fields) < 5:
            continue
        # A space in a path is written as \040.
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        is_inside = resolved == point or resolved.startswith(point.rstrip("/") + "/")
        if is_inside and len(point) >= longest:  # of two mounts at one point the later one counts
            file_system, _, _ = description.partition(" ")
            longest = len(point)
    return file_system

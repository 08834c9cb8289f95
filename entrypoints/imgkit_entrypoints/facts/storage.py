"""Find out which file system a path is on, and how fast this node writes to it."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from imgkit_entrypoints import files
from imgkit_entrypoints.facts.reader import Reader

# Size of each file of the measurement.
FILE_BYTES = 16 << 20
MAX_FILE_COUNT = 3
"""Number of files. Only the fastest counts, because other programs may keep the disk busy for a moment."""
TIME_LIMIT_S = 2.0
"""Time in seconds after which no further file is written."""
_PIECE = bytes(1 << 20)


def measure_write_MBps(folder: Path) -> float:
    """Measure the speed of writing new files to `folder`, and return it in MB/s (1e6 bytes a second).

    Up to three files of 16 MiB are written one after the other, and the fastest counts. The time includes the
    wait until the file is on the disk (fsync). No files are left behind.

    Raises
    ------
    OSError : a file cannot be written.
    """
    deadline_s = time.perf_counter() + TIME_LIMIT_S
    durations_s = [_time_write(folder)]  # at least one file, however slow the disk is
    while len(durations_s) < MAX_FILE_COUNT and time.perf_counter() < deadline_s:
        durations_s.append(_time_write(folder))
    return FILE_BYTES / min(durations_s) / 1e6


def _time_write(folder: Path) -> float:
    """Write a file of `FILE_BYTES` bytes into `folder`, and return the seconds until it is on the disk."""
    path = files.temporary_name(folder / "imgkit-written")
    with files.create_file(path, mode=0o600) as stream:
        # The file is removed while it is open. The file system frees its space when it is closed, even if
        # this process is killed.
        path.unlink()
        start = time.perf_counter()
        for _ in range(FILE_BYTES // len(_PIECE)):
            stream.write(_PIECE)
        files.sync_file(stream)
        return time.perf_counter() - start


_NETWORK = re.compile(
    r"nfs4?|lustre|gpfs|beegfs|ceph|panfs|wekafs|pvfs2|orangefs|afs|glusterfs|ocfs2|gfs2|cifs|smb3"
    r"|fuse\.(?:ceph|ceph-fuse|glusterfs|sshfs|juicefs|mfs|moosefs|seaweedfs|lizardfs|dfuse)"
)
"""Types of file systems that several nodes can mount, as the kernel names them.

The list is not complete. Other FUSE types are left out, because they can also be local disks.
"""


_MOUNT = re.compile(r"(?:\S+ ){4}(?P<point>\S+)(?: .*?)? - (?P<type>\S*)")
"""A line of mountinfo: ``36 35 98:0 /root /mount/point rw,noatime - ext4 /dev/sda1 rw``."""


def on_network_disk(reader: Reader, path: str) -> bool:
    """Return whether `path` is on a network file system. The path need not exist."""
    return bool(_NETWORK.fullmatch(_file_system(reader, path)))


def _file_system(reader: Reader, path: str) -> str:
    """Return the type of the file system that `path` is on, such as ``lustre``, or "" if it is unknown.

    It is read from /proc/self/mountinfo, whose format is in proc_pid_mountinfo(5).
    """
    resolved = os.path.realpath(path)  # mount points have no links in their paths
    file_system = longest_point = ""
    for line in (reader.text("/proc/self/mountinfo") or "").splitlines():
        match = _MOUNT.match(line)
        if match is None:
            continue
        # A space in a path is written as \040.
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), match["point"])
        is_inside = resolved == point or resolved.startswith(point.rstrip("/") + "/")
        # The longest mount point contains the path. If two file systems are mounted at the same point, the
        # later one covers the earlier one.
        if is_inside and len(point) >= len(longest_point):
            file_system, longest_point = match["type"], point
    return file_system

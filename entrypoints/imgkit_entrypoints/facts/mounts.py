"""The file system below a path."""

from __future__ import annotations

import os
import re

from imgkit_entrypoints.facts.reader import Reader

_NETWORK = re.compile(
    r"nfs4?|lustre|gpfs|beegfs|ceph|panfs|wekafs|pvfs2|orangefs|afs|glusterfs|ocfs2|gfs2|cifs|smb3"
    r"|fuse\.(?:ceph|ceph-fuse|glusterfs|sshfs|juicefs|mfs|moosefs|seaweedfs|lizardfs|dfuse)"
)
"""Types of file systems that several nodes mount. Others may be: a FUSE mount can also be a local disk."""


def shared(reader: Reader, path: str) -> bool:
    """Whether `path`, which may not exist yet, is on a network file system."""
    return bool(_NETWORK.fullmatch(kind(reader, path)))


def kind(reader: Reader, path: str) -> str:
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

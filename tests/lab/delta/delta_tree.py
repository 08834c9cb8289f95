"""Everything about every file below the given folders, as one JSON object.

``python3 -I - /FOLDER...``; runs inside an image, from standard input.
"""

import contextlib
import hashlib
import json
import os
import stat
import sys

SKIPPED = {"/proc", "/sys", "/dev", "/tmp", "/root", "/home", "/var/tmp", "/opt/imgkit", "/etc"}


def main() -> None:
    """Print it."""
    found, links = {}, {}
    for folder, folders, names in (step for root in sys.argv[1:] for step in os.walk(root)):
        folders[:] = [name for name in folders if os.path.join(folder, name) not in SKIPPED]
        for name in [*folders, *names]:
            path = os.path.join(folder, name)
            found[path] = about = entry(path)
            # With the content: fuse-overlayfs gives files of different layers the same number.
            links.setdefault((*about.pop("inode"), about["content"]), []).append(path)
    for paths in links.values():
        for path in paths:
            if not stat.S_ISDIR(found[path]["mode"]) and len(paths) > 1:
                found[path]["links"] = sorted(paths)
    json.dump(found, sys.stdout)


def entry(path: str) -> dict:
    """One file."""
    try:
        about = os.lstat(path)
    except PermissionError:
        return {"mode": 0, "content": "denied", "inode": (path,)}
    content = ""
    if stat.S_ISREG(about.st_mode):
        try:
            with open(path, "rb") as stream:
                content = hashlib.sha256(stream.read()).hexdigest()
        except PermissionError:
            content = "denied"
    elif stat.S_ISLNK(about.st_mode):
        content = os.readlink(path)
    xattrs = {}
    with contextlib.suppress(OSError):  # a squashfs without any does not know what they are
        for name in os.listxattr(path, follow_symlinks=False):
            xattrs[name] = os.getxattr(path, name, follow_symlinks=False).hex()
    return {
        "mode": about.st_mode,
        "owner": (about.st_uid, about.st_gid),
        "device": about.st_rdev,
        "mtime": int(about.st_mtime) if stat.S_ISREG(about.st_mode) else 0,
        "content": content,
        "xattrs": xattrs,
        "inode": (about.st_dev, about.st_ino),
    }


main()

# ruff: noqa: PTH101, PTH102, PTH108, PTH112, PTH115, PTH116, PTH118, PTH120, PTH123, PTH208, PTH211
"""Unpack layers as root, member by member, as ``umoci unpack`` does: the reference for merged images.

It is slow and simple, and uses the kernel: the root of a forked child is the tree, so that links lead where
they would lead inside the image. Of extended attributes it unpacks capabilities, which every route keeps.
`layers` are lists of `tarfile` members with their content.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tars import TarEntry

_TIMES: dict[str, float] = {}
"""Times of folders, which change again with everything that is put into them."""


def unpack(layers: Sequence[Sequence[TarEntry]], root: Path) -> str:
    """Unpack into `root`; returns an empty text, or why that is impossible."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.umask(0o022)
            os.chroot(root)
            os.chdir("/")
            for layer in layers:
                touched: set[str] = set()
                for info, data in layer:
                    _entry(info, data, touched)
            for path, mtime_s in _TIMES.items():
                os.utime(path, (mtime_s, mtime_s))
            os._exit(0)
        except BaseException as error:
            os.write(writing, repr(error).encode()[:4000])
            os._exit(1)
    os.close(writing)
    with open(reading, "rb") as stream:
        error_text = stream.read().decode()
    os.waitpid(child, 0)
    return error_text


def _entry(info: tarfile.TarInfo, data: bytes, touched: set[str]) -> None:
    folder, _, name = info.name.strip("/").rpartition("/")
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.stat("/" + folder)  # links that lead to themselves
    folder = os.path.realpath("/" + folder)
    path = os.path.join(folder, name)
    if name.startswith(".wh."):
        if name == ".wh..wh..opq":
            _white_out(folder, touched, keep=True)
        else:
            _white_out(os.path.join(folder, name.removeprefix(".wh.")), touched)
        return
    _folders(folder)
    with contextlib.suppress(FileNotFoundError):
        if not (info.isdir() and stat.S_ISDIR(os.lstat(path).st_mode)):
            _remove(path)
    _make(info, path, data)
    while path != "/":
        touched.add(path)
        path = os.path.dirname(path)


def _folders(path: str) -> None:
    parts = path.strip("/").split("/") if path != "/" else []
    for count in range(1, len(parts) + 1):
        folder = "/" + "/".join(parts[:count])
        if not os.path.isdir(folder):
            _remove(folder)
            os.mkdir(folder, 0o755)
            _TIMES[folder] = 0


def _make(info: tarfile.TarInfo, path: str, data: bytes) -> None:
    if info.isdir():
        if not os.path.isdir(path):
            os.mkdir(path)
    elif info.isreg():
        with open(path, "xb") as stream:
            stream.write(data)
    elif info.issym():
        os.symlink(info.linkname, path)
    elif info.islnk():
        above, _, last = info.linkname.strip("/").rpartition("/")
        os.link(os.path.join(os.path.realpath("/" + above), last), path, follow_symlinks=False)
        return
    else:
        kinds = {tarfile.CHRTYPE: stat.S_IFCHR, tarfile.BLKTYPE: stat.S_IFBLK, tarfile.FIFOTYPE: stat.S_IFIFO}
        os.mknod(path, kinds[info.type] | 0o600, os.makedev(info.devmajor, info.devminor))
    os.chown(path, info.uid, info.gid, follow_symlinks=False)
    if not info.issym():
        os.chmod(path, info.mode)
    for name in os.listxattr(path, follow_symlinks=False):
        os.removexattr(path, name, follow_symlinks=False)
    for key, value in info.pax_headers.items():
        if key == "SCHILY.xattr.security.capability":
            raw = value.encode("utf-8", "surrogateescape")
            os.setxattr(path, key.removeprefix("SCHILY.xattr."), raw, follow_symlinks=False)
    os.utime(path, (info.mtime, info.mtime), follow_symlinks=False)
    if info.isdir():
        _TIMES[path] = info.mtime


def _white_out(path: str, touched: set[str], *, keep: bool = False) -> None:
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    if path not in touched and not keep and path != "/":
        _remove(path)
    elif stat.S_ISDIR(status.st_mode):
        for name in os.listdir(path):
            _white_out(os.path.join(path, name), touched)


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(os.lstat(path).st_mode):
            shutil.rmtree(path)
            for folder in [folder for folder in _TIMES if f"{folder}/".startswith(f"{path}/")]:
                del _TIMES[folder]
        else:
            os.unlink(path)


def described(root: Path) -> dict[str, dict[str, Any]]:
    """Return all metadata and the content of every file below `root`, by its path."""
    files, numbers = {}, dict[int, list[str]]()
    for path in sorted(root.rglob("*")):
        status, name = path.lstat(), path.relative_to(root).as_posix()
        folder = stat.S_ISDIR(status.st_mode)
        if not folder:
            numbers.setdefault(status.st_ino, []).append(name)
        files[name] = {
            "mode": oct(status.st_mode),
            "owner": (status.st_uid, status.st_gid),
            "device": status.st_rdev,
            "content": path.read_bytes() if stat.S_ISREG(status.st_mode) else b"",
            "link": os.readlink(path) if path.is_symlink() else "",
            "mtime": int(status.st_mtime),
            "xattrs": {
                attribute: os.getxattr(path, attribute, follow_symlinks=False)
                for attribute in os.listxattr(path, follow_symlinks=False)
            },
        }
    for names in numbers.values():
        for name in names:
            files[name]["links"] = names
    return files

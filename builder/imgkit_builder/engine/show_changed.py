"""Runs in a container: writes what an image shows at the paths that some of its layers change.

``python3 -c PROGRAM FOLDER NEW OLD [PATH ...]``: the folders of layers are ``FOLDER/0``, ``FOLDER/1`` and so
on. The first NEW ones are this image's, the uppermost first; OLD ones of the image that it is compared with
follow. PATHs are not looked at. `archive.changed_files` reads the output.

What shows is read from the container's own file system. So whiteouts, and folders that hide those below them,
need no understanding here: some of their marks can be read only with rights that this container lacks.

Notes
-----
The image's Python runs this without imgkit: the standard library only.
"""

from __future__ import annotations

import collections
import contextlib
import os
import stat
import sys
import tarfile
from collections.abc import Iterator, Sequence
from typing import BinaryIO

CAPABILITY = "security.capability"
REFUSED = 3
"""Exit code for a file system that cannot be read this way; the reason is the last line of stderr."""
_REDIRECTS = "/sys/module/overlay/parameters/redirect_dir"
"""The kernel's default: Y where a renamed folder has only a mark that leads to its content."""
_KINDS = {
    stat.S_IFREG: tarfile.REGTYPE,
    stat.S_IFDIR: tarfile.DIRTYPE,
    stat.S_IFLNK: tarfile.SYMTYPE,
    stat.S_IFCHR: tarfile.CHRTYPE,
    stat.S_IFBLK: tarfile.BLKTYPE,
    stat.S_IFIFO: tarfile.FIFOTYPE,
}


_TOUCHED = (b"etc", b"run")
"""Folders in which the engine makes files: their times are new in every container."""
_ENGINES = frozenset({b".dockerenv", b"dev", b"etc", b"proc", b"sys"})
"""What Docker puts over an image for a container: a layer of just these is none of the image's."""


class Refused(Exception):
    """The reason."""


class ShownPaths:
    """What shows below `root` at the paths of the layers in the folders `new` and `old`.

    Paths are bytes, relative to `root`. Those in `skip` and below are left out. What is mounted at a path in
    `mounts` is not the image's.
    """

    def __init__(
        self,
        root: bytes,
        new: Sequence[bytes],
        old: Sequence[bytes],
        *,
        skip: Sequence[bytes] = (),
        mounts: Sequence[bytes] = (),
    ) -> None:
        self.root = root
        self.new, self.old = ([one for one in layers if not _is_engines(one)] for layers in (new, old))
        self.skip, self.mounts = frozenset(skip), frozenset(mounts) - frozenset(skip)
        self.folders: list[tuple[bytes, bool, list[bytes]]] = []
        """Path of each folder, whether an old layer has it, and all names in it."""
        self.entries: list[tuple[bytes, os.stat_result]] = []

    def read(self) -> None:
        """Walk down where a layer has a folder, then find all names of the files with several."""
        self._folder(b"", (*self.new, *self.old))
        found = collections.Counter(map(_inode, self.entries))
        partial = {
            _inode(one)
            for one in self.entries
            if stat.S_ISREG(one[1].st_mode) and one[1].st_nlink > found[_inode(one)]
        }
        if partial:
            known = {path for path, _ in self.entries}
            self.entries += [
                one for one in self._files(b"") if one[0] not in known and _inode(one) in partial
            ]

    def _folder(self, path: bytes, layers: Sequence[bytes], *, whole: bool = False) -> None:
        """Take what layers have in the folder `path`; everything in it where it is `whole`."""
        if path in self.mounts:
            raise Refused(f"the engine mounts a file system over /{os.fsdecode(path)}")
        names = os.listdir(os.path.join(self.root, path))
        below: dict[bytes, list[bytes]] = {name: [] for name in names} if whole else {}
        hidden = set(names) if whole else set()
        for layer in layers:
            with os.scandir(os.path.join(layer, path)) as entries:
                for entry in entries:
                    having = below.setdefault(entry.name, [])
                    if entry.is_dir(follow_symlinks=False):
                        having.append(layer)
                    elif layer in self.old:
                        # A folder that shows there was hidden in the older image, with all that is in it.
                        hidden.add(entry.name)
        self.folders.append((path, any(layer in self.old for layer in layers), names))
        for name in sorted(below.keys() & set(names)):
            inside = _join(path, name)
            if inside not in self.skip:
                self._entry(inside, below[name], whole=name in hidden)

    def _entry(self, path: bytes, layers: Sequence[bytes], *, whole: bool) -> None:
        about = os.lstat(os.path.join(self.root, path))
        if not stat.S_ISDIR(about.st_mode):
            if path in self.mounts:
                raise Refused(f"the engine mounts a file over /{os.fsdecode(path)}")
            self.entries.append((path, about))
            return
        uppermost = next((layer for layer in layers if layer in self.new), self.root)
        if uppermost != self.root or path not in _TOUCHED:
            self.entries.append((path, os.lstat(os.path.join(uppermost, path))))
        self._folder(path, layers, whole=whole)

    def _files(self, path: bytes) -> Iterator[tuple[bytes, os.stat_result]]:
        with os.scandir(os.path.join(self.root, path)) as entries:
            for entry in entries:
                inside = _join(path, entry.name)
                if inside in self.skip or inside in self.mounts:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    yield from self._files(inside)
                elif entry.is_file(follow_symlinks=False):
                    # Not that of the entry: its number of the file may be another one in an overlay.
                    yield inside, os.lstat(os.path.join(self.root, inside))

    def write(self, out: BinaryIO) -> None:
        """Write the names, then a tar of the entries."""
        fields = [
            field
            for path, old, names in self.folders
            for field in (path, b"old" if old else b"new", b"/".join(names))
        ]
        listed = b"\0".join(fields)
        out.write(b"imgkit-changed 1 %d\n" % len(listed))
        out.write(listed)
        first: dict[tuple[int, int], str] = {}
        with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT, encoding="utf-8") as tar:
            for path, about in self.entries:
                kind = _KINDS.get(stat.S_IFMT(about.st_mode))
                if kind is not None:  # a socket: no layer has one
                    self._put(tar, path, about, kind, first)

    def _put(
        self,
        tar: tarfile.TarFile,
        path: bytes,
        about: os.stat_result,
        kind: bytes,
        first: dict[tuple[int, int], str],
    ) -> None:
        place = os.path.join(self.root, path)
        info = tarfile.TarInfo(path.decode("utf-8", "surrogateescape"))
        info.type, info.mode, info.uid, info.gid = (
            kind,
            stat.S_IMODE(about.st_mode),
            about.st_uid,
            about.st_gid,
        )
        info.mtime = about.st_mtime_ns // 10**9
        if kind == tarfile.SYMTYPE:
            info.linkname = os.readlink(place).decode("utf-8", "surrogateescape")
        elif kind in (tarfile.CHRTYPE, tarfile.BLKTYPE):
            info.devmajor, info.devminor = os.major(about.st_rdev), os.minor(about.st_rdev)
        if kind != tarfile.REGTYPE:
            tar.addfile(info)
            return
        if about.st_nlink > 1:
            info.linkname = first.setdefault(_inode((path, about)), info.name)
            if info.linkname != info.name:
                info.type = tarfile.LNKTYPE
                tar.addfile(info)
                return
            info.linkname = ""
        if capability := _capability(place):
            info.pax_headers = {f"SCHILY.xattr.{CAPABILITY}": capability.decode("utf-8", "surrogateescape")}
        info.size = about.st_size
        with open(os.open(place, os.O_RDONLY | os.O_NOFOLLOW), "rb") as stream:
            tar.addfile(info, stream)


def _join(folder: bytes, name: bytes) -> bytes:
    return folder + b"/" + name if folder else name


def _is_engines(layer: bytes) -> bool:
    names = os.listdir(layer)
    return b".dockerenv" in names and _ENGINES.issuperset(names)


def _inode(entry: tuple[bytes, os.stat_result]) -> tuple[int, int]:
    return entry[1].st_dev, entry[1].st_ino


def _capability(place: bytes) -> bytes:
    try:
        return os.getxattr(place, CAPABILITY, follow_symlinks=False)
    except OSError:
        return b""  # it has none, or the file system knows none


def _text(path: str) -> bytes:
    with contextlib.suppress(OSError), open(path, "rb") as stream:
        return stream.read()
    return b""


def mount_points(mountinfo: bytes, redirects: bytes) -> tuple[bytes, ...]:
    """Where file systems are mounted, relative to the root; the root itself is left out.

    Raises
    ------
    Refused : the root does not show what its layers hold at the same paths.
    """
    found = []
    for line in mountinfo.splitlines():
        place, options = line.split(b" ")[4], line.rpartition(b" ")[2]
        for code in (b"\\040", b"\\011", b"\\012", b"\\134"):
            place = place.replace(code, bytes([int(code[1:], 8)]))
        if place != b"/":
            found.append(place.lstrip(b"/"))
        elif b"redirect_dir=on" in options.split(b",") or redirects.startswith(b"Y"):
            raise Refused("the engine's storage keeps renamed folders elsewhere (redirect_dir)")
    return tuple(found)


def main(argv: Sequence[str]) -> int:
    """Write to the standard output; the exit code is `REFUSED` where that is not possible."""
    folder, new, old = os.fsencode(argv[0]), int(argv[1]), int(argv[2])
    layers = [b"%s/%d" % (folder, number) for number in range(new + old)]
    skip = tuple(map(os.fsencode, argv[3:]))
    try:
        mounts = mount_points(_text("/proc/self/mountinfo"), _text(_REDIRECTS))
        found = ShownPaths(b"/", layers[:new], layers[new:], skip=skip, mounts=mounts)
        found.read()
        found.write(sys.stdout.buffer)
        sys.stdout.buffer.flush()
    except Refused as error:
        print(error, file=sys.stderr)
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

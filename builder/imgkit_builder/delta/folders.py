"""Read an overlay2 folder of the engine as a layer: the files on its disk, for root only."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from imgkit_builder.base import files
from imgkit_builder.delta.tree import Kind, TreeEntry, join
from imgkit_entrypoints.errors import ToolFailed

_OWN = "trusted.overlay."
_OPAQUE = f"{_OWN}opaque"
_PARTIAL = (f"{_OWN}redirect", f"{_OWN}metacopy")
_KINDS: Mapping[int, Kind] = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "dir",
    stat.S_IFLNK: "symlink",
    stat.S_IFCHR: "char",
    stat.S_IFBLK: "block",
    stat.S_IFIFO: "fifo",
}


class Folder:
    """The layer in the folder `root`.

    Raises
    ------
    ToolFailed : while reading, if part of an entry lies elsewhere (overlayfs with redirect_dir or metacopy).
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._listed: dict[str, dict[str, TreeEntry]] = {}
        self._links: dict[int, list[str]] | None = None

    def children(self, path: str) -> Mapping[str, TreeEntry]:
        """Entries of the folder `path`, which must exist: an empty answer would delete the content below."""
        if path not in self._listed:
            names = os.listdir(self.root / path)  # noqa: PTH208 - Path.iterdir makes a Path of each
            found = {name: self._entry(join(path, name)) for name in names}
            self._listed[path] = {name: entry for name, entry in found.items() if entry is not None}
        return self._listed[path]

    def content(self, entry: TreeEntry) -> Iterator[bytes]:
        """The bytes of a file."""
        with files.open_regular(self.root / str(entry.place), buffering=0) as stream:
            while chunk := stream.read(files.CHUNK_BYTES):
                yield chunk

    def names(self, group: int) -> Collection[str]:
        """Paths with the inode `group`; walks the folder once."""
        if self._links is None:
            self._links = {}
            self._walk("", self._links)
        return self._links.get(group, ())

    def _walk(self, path: str, links: dict[int, list[str]]) -> None:
        for name, entry in self.children(path).items():
            inside = join(path, name)
            if entry.group is not None:
                links.setdefault(entry.group, []).append(inside)
            if entry.kind == "dir":
                self._walk(inside, links)

    def _entry(self, path: str) -> TreeEntry | None:
        place = self.root / path
        found = place.lstat()
        kind = _KINDS.get(stat.S_IFMT(found.st_mode))
        if kind is None:
            return None  # a socket: no layer has one
        if kind == "char" and found.st_rdev == 0:
            return TreeEntry(layer=self, kind="whiteout")
        xattrs = {
            name: os.getxattr(place, name, follow_symlinks=False)
            for name in os.listxattr(place, follow_symlinks=False)
        }
        if any(name in xattrs for name in _PARTIAL):
            raise ToolFailed("the engine's storage keeps parts of files elsewhere", where=str(place))
        return TreeEntry(
            layer=self,
            kind=kind,
            mode=stat.S_IMODE(found.st_mode),
            uid=found.st_uid,
            gid=found.st_gid,
            mtime_s=int(found.st_mtime),
            size_bytes=found.st_size if kind == "file" else 0,
            link=os.readlink(place) if kind == "symlink" else "",  # noqa: PTH115 - a Path loses ./ and //
            device=(os.major(found.st_rdev), os.minor(found.st_rdev)),
            xattrs=xattrs,
            opaque=xattrs.get(_OPAQUE) == b"y",
            group=found.st_ino if kind == "file" and found.st_nlink > 1 else None,
            place=path,
        )

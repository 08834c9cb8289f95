"""Layers that are not a squashfs: a plain tar, an overlay2 folder, what a container shows, files in memory.

`Tar` reads a layer's tar on disk. `Folder` reads the engine's files on its disk, for root only. `Changes`
lays over a .sif what a container of a newer image shows at the changed paths, and `Graft` a file or folder
that the .sif lacks. `Memory` holds the few files that imgkit itself adds.
"""

from __future__ import annotations

import dataclasses
import os
import posixpath
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from imgkit_builder.archive import tar_read
from imgkit_builder.archive.changed_files import ChangedFiles
from imgkit_builder.archive.tar_read import (
    AUFS,
    BLOCK,
    CHARACTER,
    DIRECTORY,
    FIFO,
    HARD_LINK,
    OPAQUE,
    REGULAR,
    SYMLINK,
    WHITEOUT,
    Member,
    Sparse,
    expanded,
)
from imgkit_builder.base import files
from imgkit_builder.delta.tree import DEEPEST, Kind, Layer, Stack, TreeEntry, children, find, join
from imgkit_builder.sif.entries import ImageEntry
from imgkit_entrypoints.errors import CheckFailed, ToolFailed

_IMPLIED_MODE = 0o755
_MOST_LINKS = 40
"""Hard links that lead from one to the next; a circle of them has no end."""
_TAR_KINDS: Mapping[bytes, Kind] = {
    DIRECTORY: "dir",
    SYMLINK: "symlink",
    CHARACTER: "char",
    BLOCK: "block",
    FIFO: "fifo",
}

_OWN = "trusted.overlay."
_OPAQUE = f"{_OWN}opaque"
_PARTIAL = (f"{_OWN}redirect", f"{_OWN}metacopy")
_FOLDER_KINDS: Mapping[int, Kind] = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "dir",
    stat.S_IFLNK: "symlink",
    stat.S_IFCHR: "char",
    stat.S_IFBLK: "block",
    stat.S_IFIFO: "fifo",
}

_OWN_KINDS: Mapping[bytes, Kind] = {DIRECTORY: "dir", REGULAR: "file", SYMLINK: "symlink"}


class Tar:
    """The layer in the tar `path`; it reads the headers on first use.

    Raises
    ------
    CheckFailed : damaged, or a hard link to a file that it does not contain.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tree: dict[str, dict[str, TreeEntry]] | None = None
        self._groups: dict[int, list[str]] = {}
        self._sparse: dict[int, Sparse] = {}

    def children(self, path: str) -> Mapping[str, TreeEntry]:
        """Entries of the folder `path`; empty if it is not in this layer."""
        if self._tree is None:
            self._tree = self._read()
        return self._tree.get(path, {})

    def content(self, entry: TreeEntry) -> Iterator[bytes]:
        """The bytes of a file."""
        sparse = self._sparse.get(int(entry.place), ((0, entry.size_bytes),))
        with files.open_regular(self.path, buffering=0) as stream:
            stream.seek(int(entry.place))

            def take(left: int) -> Iterator[memoryview]:
                while left:
                    chunk = stream.read(min(files.CHUNK_BYTES, left))
                    if not chunk:
                        raise CheckFailed("the layer is cut short", where=str(self.path))
                    left -= len(chunk)
                    yield memoryview(chunk)

            yield from map(bytes, expanded(sparse, entry.size_bytes, take))

    def names(self, group: int) -> Collection[str]:
        """Paths of the file whose body begins at `group`."""
        return self._groups.get(group, ())

    def _read(self) -> dict[str, dict[str, TreeEntry]]:
        members: dict[str, Member] = {}
        opaque: set[str] = set()
        gone: set[str] = set()
        for member in tar_read.headers(self.path):
            path = self._inside(member.name)
            folder, _, name = path.rpartition("/")
            if name == OPAQUE:
                opaque.add(folder)
            elif name.startswith(AUFS):
                continue
            elif name.startswith(WHITEOUT):
                gone.add(join(folder, self._deleted(name)))
            elif path:
                members[path] = member
                if member.sparse is not None:
                    self._sparse[member.offset] = member.sparse
        tree: dict[str, dict[str, TreeEntry]] = {"": {}}
        # A whiteout deletes from the layers below: a name that this layer also has is new.
        for path in gone - members.keys():
            self._put(tree, path, TreeEntry(layer=self, kind="whiteout"))
        for path, entry in self._entries(members, opaque | gone).items():
            self._put(tree, path, entry)
        for path in opaque - members.keys() - {""}:
            self._put(tree, path, self._implied(opaque=True))
        return tree

    def _inside(self, name: str) -> str:
        """Path within the layer of what a member calls `name`."""
        path = posixpath.normpath(f"/{name}").lstrip("/")
        if path.count("/") >= DEEPEST:
            raise CheckFailed(f"folders lie more than {DEEPEST} deep in it", where=str(self.path))
        return path

    def _deleted(self, name: str) -> str:
        deleted = name.removeprefix(WHITEOUT)
        if deleted in ("", ".", ".."):
            raise CheckFailed(f"the whiteout {name!r} deletes no file", where=str(self.path))
        return deleted

    def _put(self, tree: dict[str, dict[str, TreeEntry]], path: str, entry: TreeEntry) -> None:
        folder, _, name = path.rpartition("/")
        self._make_folder(tree, folder)
        before = tree[folder].get(name)
        if entry.implied and before is not None:
            entry = dataclasses.replace(before, opaque=True)
        tree[folder][name] = entry

    def _make_folder(self, tree: dict[str, dict[str, TreeEntry]], path: str) -> None:
        if path in tree:
            return
        above, _, name = path.rpartition("/")
        self._make_folder(tree, above)
        before = tree[above].get(name)
        if before is None or before.kind != "dir":
            tree[above][name] = self._implied(opaque=before is not None)
        tree[path] = {}

    def _implied(self, *, opaque: bool = False) -> TreeEntry:
        return TreeEntry(layer=self, kind="dir", mode=_IMPLIED_MODE, implied=True, opaque=opaque)

    def _entries(self, members: Mapping[str, Member], opaque: Collection[str]) -> dict[str, TreeEntry]:
        files: dict[str, list[str]] = {}
        for path, member in members.items():
            if member.kind in (HARD_LINK, REGULAR):
                files.setdefault(self._target(path, members), []).append(path)
        found = {
            path: self._entry(member, opaque=path in opaque)
            for path, member in members.items()
            if member.kind in _TAR_KINDS
        }
        for target, paths in files.items():
            entry = self._entry(members[target])
            if len(paths) > 1:
                entry = dataclasses.replace(entry, group=members[target].offset)
                self._groups[members[target].offset] = paths
            found |= {path: dataclasses.replace(entry) for path in paths}
        return found

    def _target(self, path: str, members: Mapping[str, Member]) -> str:
        """Name of the member with the content of the file `path`."""
        for _ in range(_MOST_LINKS):
            member = members.get(path)
            if member is None:
                break
            if member.kind != HARD_LINK:
                return path
            path = self._inside(member.link)
        raise CheckFailed(f"a hard link leads to {path}, not a file in its layer", where=str(self.path))

    def _entry(self, member: Member, *, opaque: bool = False) -> TreeEntry:
        kind = _TAR_KINDS.get(member.kind, "file")
        return TreeEntry(
            layer=self,
            kind=kind,
            mode=stat.S_IMODE(member.mode),
            uid=member.uid,
            gid=member.gid,
            mtime_s=member.mtime_s,
            size_bytes=member.content_bytes if kind == "file" else 0,
            link=member.link if kind == "symlink" else "",
            device=member.device,
            xattrs=member.xattrs,
            opaque=opaque and kind == "dir",
            place=member.offset,
        )


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
        kind = _FOLDER_KINDS.get(stat.S_IFMT(found.st_mode))
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
            mtime_s=found.st_mtime_ns // 10**9,
            size_bytes=found.st_size if kind == "file" else 0,
            link=os.readlink(place) if kind == "symlink" else "",  # noqa: PTH115 - a Path loses ./ and //
            device=(os.major(found.st_rdev), os.minor(found.st_rdev)),
            xattrs=xattrs,
            opaque=xattrs.get(_OPAQUE) == b"y",
            group=found.st_ino if kind == "file" and found.st_nlink > 1 else None,
            place=path,
        )


class Graft:
    """The layer that replaces `path` by the only tree in `tar`, or deletes it if there is no tar."""

    def __init__(self, path: str, tar: Path | None) -> None:
        self._folder, _, self._name = path.rpartition("/")
        self._path, self._tar = path, Tar(tar) if tar else None

    def children(self, path: str) -> Mapping[str, TreeEntry]:
        """Entries of the folder `path`."""
        if path == self._folder:
            return {self._name: self._top()}
        if self._tar and (path == self._path or path.startswith(f"{self._path}/")):
            inside = self._name + path.removeprefix(self._path)
            return {name: self._own(entry) for name, entry in self._tar.children(inside).items()}
        if not path or self._folder.startswith(f"{path}/"):
            following = self._folder.removeprefix(path).lstrip("/").partition("/")[0]
            return {following: TreeEntry(layer=self, kind="dir", mode=0o755, implied=True)}
        return {}

    def content(self, entry: TreeEntry) -> Iterator[bytes]:
        """The bytes of a file."""
        assert self._tar is not None  # noqa: S101 - for the type checker: no tar, no file
        return self._tar.content(entry)

    def names(self, group: int) -> Collection[str]:
        """Paths of one file."""
        assert self._tar is not None  # noqa: S101 - as above
        return [join(self._folder, name) for name in self._tar.names(group)]

    def _top(self) -> TreeEntry:
        entry = self._tar.children("").get(self._name) if self._tar else None
        return self._own(entry, opaque=True) if entry else TreeEntry(layer=self, kind="whiteout")

    def _own(self, entry: TreeEntry, *, opaque: bool = False) -> TreeEntry:
        return dataclasses.replace(entry, layer=self, opaque=opaque and entry.kind == "dir")


class Changes:
    """The layer over `below` that makes it show what a container `shown` of a newer image does.

    `kept` is a layer of paths that are in every .sif; no image needs to have them.
    """

    def __init__(self, shown: ChangedFiles, below: Stack, kept: Layer) -> None:
        self._tar, self._folders, self._below, self._kept = Tar(shown.tar), shown.folders, below, kept
        self._listed: dict[str, dict[str, TreeEntry]] = {}

    def children(self, path: str) -> Mapping[str, TreeEntry]:
        """Entries of the folder `path`; what lies below and does not show is a whiteout."""
        if path not in self._listed:
            self._listed[path] = dict(self._tar.children(path))
            if path in self._folders:
                gone = self.names_below(path).difference(self._folders[path].names, self._kept.children(path))
                for name in gone - self._listed[path].keys():
                    self._listed[path][name] = TreeEntry(layer=self, kind="whiteout")
        return self._listed[path]

    def names_below(self, path: str) -> set[str]:
        """Names in the folder `path` of the layers below."""
        layers = self._below
        if path:
            node = find(self._below, path)
            layers = node.layers if node else ()
        return set(children(layers, path))

    def uncovered(self) -> Mapping[str, Collection[str]]:
        """Names that show in a folder although neither a changed layer nor those below have them.

        A layer of the older image has such a folder, and hides what its lower layers hold there. The root is
        never one: there the engine adds files of its own.
        """
        found = {
            path: folder.names - self._tar.children(path).keys() - self.names_below(path)
            for path, folder in self._folders.items()
            if path and folder.in_old
        }
        return {path: names for path, names in found.items() if names}

    def content(self, entry: TreeEntry) -> Iterator[bytes]:
        """The bytes of a file."""
        return self._tar.content(entry)

    def names(self, group: int) -> Collection[str]:
        """Paths of one file."""
        return self._tar.names(group)


class Memory:
    """The layer of `files`, which root owns; a folder is one of them before what is in it."""

    def __init__(self, files: Iterable[ImageEntry]) -> None:
        self._data: dict[str, bytes] = {}
        self._tree: dict[str, dict[str, TreeEntry]] = {"": {}}
        for file in files:
            folder, _, name = file.name.rpartition("/")
            self._data[file.name] = file.read()
            self._tree.setdefault(folder, {})[name] = TreeEntry(
                layer=self,
                kind=_OWN_KINDS[file.kind],
                mode=file.mode,
                mtime_s=file.mtime_s,
                size_bytes=file.size_bytes,
                link=file.link,
                place=file.name,
            )

    def children(self, path: str) -> Mapping[str, TreeEntry]:
        """Entries of the folder `path`; empty if it is not in this layer."""
        return self._tree.get(path, {})

    def content(self, entry: TreeEntry) -> Iterator[bytes]:
        """The bytes of a file."""
        yield self._data[str(entry.place)]

    def names(self, group: int) -> tuple[str, ...]:
        """Empty: no file has two names."""
        return ()

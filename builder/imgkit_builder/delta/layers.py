"""Layers that are not a squashfs: a tar on disk, and the few files in memory that imgkit itself adds."""

from __future__ import annotations

import dataclasses
import posixpath
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from imgkit_builder.archive import tar_read
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
from imgkit_builder.delta.tree import DEEPEST, Kind, TreeEntry, join
from imgkit_builder.sif.entries import ImageEntry
from imgkit_entrypoints.errors import CheckFailed

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

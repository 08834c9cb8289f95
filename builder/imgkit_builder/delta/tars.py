"""Read a plain tar on disk as a layer."""

from __future__ import annotations

import dataclasses
import posixpath
import stat
import tarfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from imgkit_builder.delta.tree import Kind, TreeEntry, join
from imgkit_entrypoints.errors import CheckFailed

CHUNK_BYTES = 1 << 20
_WHITEOUT, _OPAQUE, _AUFS = ".wh.", ".wh..wh..opq", ".wh..wh."
_XATTR = "SCHILY.xattr."
_IMPLIED_MODE = 0o755
_KINDS: Mapping[bytes, Kind] = {
    tarfile.DIRTYPE: "dir",
    tarfile.SYMTYPE: "symlink",
    tarfile.CHRTYPE: "char",
    tarfile.BLKTYPE: "block",
    tarfile.FIFOTYPE: "fifo",
}


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

    def children(self, path: str) -> Mapping[str, TreeEntry]:
        """Entries of the folder `path`; empty if it is not in this layer."""
        if self._tree is None:
            self._tree = self._read()
        return self._tree.get(path, {})

    def content(self, entry: TreeEntry) -> Iterator[bytes]:
        """The bytes of a file."""
        left = entry.size_bytes
        with self.path.open("rb", buffering=0) as stream:
            stream.seek(int(entry.place))
            while left:
                chunk = stream.read(min(CHUNK_BYTES, left))
                if not chunk:
                    raise CheckFailed("the layer is cut short", where=str(self.path))
                left -= len(chunk)
                yield chunk

    def names(self, group: int) -> Collection[str]:
        """Paths of the file whose header is at `group`."""
        return self._groups.get(group, ())

    def _read(self) -> dict[str, dict[str, TreeEntry]]:
        members: dict[str, tarfile.TarInfo] = {}
        opaque: set[str] = set()
        gone: set[str] = set()
        try:
            with tarfile.open(self.path, "r:") as tar:
                for member in tar:
                    path = posixpath.normpath(member.name.lstrip("/"))
                    folder, _, name = path.rpartition("/")
                    if name == _OPAQUE:
                        opaque.add(folder)
                    elif name.startswith(_WHITEOUT):
                        if not name.startswith(_AUFS):
                            gone.add(join(folder, name.removeprefix(_WHITEOUT)))
                    elif path != ".":
                        members[path] = member
        except (tarfile.TarError, OSError, ValueError) as error:
            raise CheckFailed(f"the layer cannot be read: {error}", where=str(self.path)) from error
        tree: dict[str, dict[str, TreeEntry]] = {"": {}}
        # A whiteout deletes from the layers below: a name that this layer also has is new.
        for path in gone - members.keys():
            self._put(tree, path, TreeEntry(layer=self, kind="whiteout"))
        for path, entry in self._entries(members, opaque | gone).items():
            self._put(tree, path, entry)
        for path in opaque - members.keys() - {""}:
            self._put(tree, path, self._implied(opaque=True))
        return tree

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

    def _entries(
        self, members: Mapping[str, tarfile.TarInfo], opaque: Collection[str]
    ) -> dict[str, TreeEntry]:
        files: dict[str, list[str]] = {}
        for path, member in members.items():
            if member.islnk() or member.isreg():
                files.setdefault(self._target(path, members), []).append(path)
        found = {
            path: self._entry(member, opaque=path in opaque)
            for path, member in members.items()
            if member.type in _KINDS
        }
        for target, paths in files.items():
            entry = self._entry(members[target])
            if len(paths) > 1:
                entry = dataclasses.replace(entry, group=members[target].offset)
                self._groups[members[target].offset] = paths
            found |= {path: dataclasses.replace(entry) for path in paths}
        return found

    def _target(self, path: str, members: Mapping[str, tarfile.TarInfo]) -> str:
        """Name of the member with the content of the file `path`."""
        for _ in range(len(members)):
            member = members.get(path)
            if member is None:
                break
            if not member.islnk():
                return path
            path = posixpath.normpath(member.linkname.lstrip("/"))
        raise CheckFailed(f"a hard link leads to {path}, which is not in its layer", where=str(self.path))

    def _entry(self, member: tarfile.TarInfo, *, opaque: bool = False) -> TreeEntry:
        kind = _KINDS.get(member.type, "file")
        return TreeEntry(
            layer=self,
            kind=kind,
            mode=stat.S_IMODE(member.mode),
            uid=member.uid,
            gid=member.gid,
            mtime_s=int(member.mtime),
            size_bytes=member.size if kind == "file" else 0,
            link=member.linkname if kind == "symlink" else "",
            device=(member.devmajor, member.devminor) if kind in ("char", "block") else (0, 0),
            xattrs={
                key.removeprefix(_XATTR): value.encode("utf-8", "surrogateescape")
                for key, value in member.pax_headers.items()
                if key.startswith(_XATTR)
            },
            opaque=opaque and kind == "dir",
            place=member.offset_data,
        )

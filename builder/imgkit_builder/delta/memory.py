"""A layer of the few files that imgkit itself adds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from imgkit_builder.archive.tar_read import DIRECTORY, REGULAR, SYMLINK
from imgkit_builder.delta.tree import Kind, TreeEntry
from imgkit_builder.sif.entries import OwnFile

_KINDS: Mapping[bytes, Kind] = {DIRECTORY: "dir", REGULAR: "file", SYMLINK: "symlink"}


class Memory:
    """The layer of `files`, which root owns; a folder is one of them before what is in it."""

    def __init__(self, files: Iterable[OwnFile], *, mtime_s: int = 0) -> None:
        self._data: dict[str, bytes] = {}
        self._tree: dict[str, dict[str, TreeEntry]] = {"": {}}
        for one in files:
            folder, _, name = one.path.rpartition("/")
            self._data[one.path] = one.data
            self._tree.setdefault(folder, {})[name] = TreeEntry(
                layer=self,
                kind=_KINDS[one.kind],
                mode=one.mode,
                mtime_s=mtime_s,
                size_bytes=len(one.data),
                link=one.link,
                place=one.path,
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

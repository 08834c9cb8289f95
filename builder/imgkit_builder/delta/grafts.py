"""Lay one folder of an image over a .sif: the whole change if the layers only copy into that folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from imgkit_builder.delta.tars import Tar
from imgkit_builder.delta.tree import TreeEntry, join


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

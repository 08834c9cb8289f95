"""Compare the files of a new image with the file manifest of a .sif, in one pass: what a delta must hold.

Content decides, never size and time. A delta has a whiteout for each deleted entry, and no opaque folder: the
kernel ignores that mark where an ordinary user mounts (docs/adr/0037-file-manifest.md).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager

from imgkit_builder.archive.stored import hashed
from imgkit_builder.archive.tar_read import CHARACTER, DIRECTORY, HARD_LINK, REGULAR
from imgkit_builder.sif.entries import ImageEntry
from imgkit_builder.sif.file_manifest import FileRecord, file_record
from imgkit_entrypoints.errors import CheckFailed

_MOUNTED = ("dev", "proc", "sys", "run/secrets")
_MADE = ("etc/hostname", "etc/hosts", "etc/resolv.conf", "etc/mtab", ".dockerenv", "run/.containerenv")
_BYTECODE = re.compile(r"(.*/|)__pycache__/([^/]+)\.[^/.]+(?:\.opt-\d)?\.pyc")
_MOST_HELD_BYTES = 16 << 20
"""A larger file is not held until it is known whether it has changed: if so, it is read again."""

Reopen = Callable[[], AbstractContextManager[Iterator[ImageEntry]]]
"""Opens the stream of the new image's files, each with one name, a folder before what is in it."""


class Changes:
    """The entries that must lie over a .sif with the manifest `base` to show a new image."""

    def __init__(self, base: Mapping[str, FileRecord]) -> None:
        self.changed = 0
        """Number of new or different entries so far, without folders."""
        self.deleted = 0
        """Number of whiteouts so far."""
        self._base = base
        self._seen: dict[str, FileRecord] = {}
        """What the new image has."""
        self._folders: dict[str, ImageEntry] = {}
        self._written: set[str] = set()
        self._bytecode: dict[str, list[ImageEntry]] = {}
        """By its source file, which has not come yet: bytecode that differs."""
        self._missed: dict[str, list[str]] = {}
        """Names under which a file is needed whose content has passed: a new hard link, or a large file."""

    def entries(self, reopen: Reopen) -> Iterator[ImageEntry]:
        """Yield the changes; opens the stream again if content is needed that has passed.

        Raises
        ------
        CheckFailed : a hard link leads to no file, or a changed file is below something that is no folder.
        """
        with reopen() as stream:
            for entry in stream:
                if not _is_of_engine(entry.name):
                    yield from self._compared(entry)
        for waiting in self._bytecode.values():
            for entry in waiting:
                yield from self._emitted(entry)
        if self._missed:
            with reopen() as stream:
                for entry in stream:
                    if names := self._missed.get(entry.name):
                        yield from self._emitted(entry.changed(names=tuple(names)))
        yield from self._whiteouts()

    def _compared(self, entry: ImageEntry) -> Iterator[ImageEntry]:
        path = entry.name
        before = self._base.get(path)
        if entry.kind == REGULAR:
            if before and (before == file_record(entry, before.content) or _BYTECODE.fullmatch(path)):
                yield from self._candidate(entry, before)
            else:
                yield from self._new_file(entry)
        else:
            yield from self._other(entry, before)
        for waiting in self._bytecode.pop(path, ()):
            if self._seen[path] != before:
                yield from self._emitted(waiting)

    def _new_file(self, entry: ImageEntry) -> Iterator[ImageEntry]:
        """Yield a file that differs whatever its content is, which need not be held for that."""
        digest = hashlib.sha256()
        yield from self._emitted(entry.changed(content=hashed(entry.content, digest)))
        self._seen[entry.name] = file_record(entry, digest.hexdigest())

    def _candidate(self, entry: ImageEntry, before: FileRecord) -> Iterator[ImageEntry]:
        """Yield a file whose content decides, if it differs."""
        digest, chunks = hashlib.sha256(), []
        is_small = entry.size_bytes <= _MOST_HELD_BYTES
        for chunk in hashed(entry.content, digest):
            if is_small:
                chunks.append(bytes(chunk))
        record = file_record(entry, digest.hexdigest())
        self._seen[entry.name] = record
        if record != before and is_small:
            yield from self._differing(entry.changed(content=chunks))
        elif record != before:
            self._missed.setdefault(entry.name, []).append(entry.name)

    def _other(self, entry: ImageEntry, before: FileRecord | None) -> Iterator[ImageEntry]:
        record = file_record(entry)
        if entry.kind == HARD_LINK:
            if entry.link not in self._seen:
                raise CheckFailed(f"{entry.name!r} is a hard link to {entry.link!r}, which is not before it")
            record = self._seen[entry.link]
        elif entry.kind == DIRECTORY:
            self._folders[entry.name] = entry
        self._seen[entry.name] = record
        if record != before:
            yield from self._differing(entry)

    def _differing(self, entry: ImageEntry) -> Iterator[ImageEntry]:
        """Yield `entry`, unless it is bytecode that goes with a source file which has not changed.

        Python compares the time of the source with that in the bytecode: they stay together, or it compiles
        the source at every start. A repeated installation changes all times, and no more.
        """
        match = _BYTECODE.fullmatch(entry.name)
        source = f"{match[1]}{match[2]}.py" if match else ""
        if entry.name not in self._base or source not in self._base:
            yield from self._emitted(entry)
        elif source not in self._seen:
            self._bytecode.setdefault(source, []).append(entry)
        elif self._seen[source] != self._base[source]:
            yield from self._emitted(entry)

    def _emitted(self, entry: ImageEntry) -> Iterator[ImageEntry]:
        """Yield `entry` behind the folders above it."""
        if entry.kind == HARD_LINK and entry.link not in self._written:
            self._missed.setdefault(entry.link, []).append(entry.name)
            return
        for name in entry.names:
            yield from self._folders_above(name)
        self._written.update(entry.names)
        self.changed += len(entry.names) if entry.kind != DIRECTORY else 0
        yield entry

    def _folders_above(self, path: str) -> Iterator[ImageEntry]:
        parts = path.split("/")
        for count in range(1, len(parts)):
            above = "/".join(parts[:count])
            if above in self._seen and self._seen[above].type != "d":
                raise CheckFailed(f"/{above} of the image is not a folder, and the delta needs /{path}")
            if above not in self._written:
                self._written.add(above)
                yield self._folders.get(above) or ImageEntry(names=(above,), kind=DIRECTORY)

    def _whiteouts(self) -> Iterator[ImageEntry]:
        for path in self._base:
            above = path.rpartition("/")[0]
            # What replaces a folder hides all that was in it.
            is_shown = not above or (above in self._seen and self._seen[above].type == "d")
            if path not in self._seen and is_shown and not _is_of_engine(path):
                yield from self._folders_above(path)
                self.deleted += 1
                yield ImageEntry(names=(path,), kind=CHARACTER, mode=0)  # device 0/0, as overlayfs has them


def _is_of_engine(path: str) -> bool:
    """Return whether an engine or a runtime makes the file, and mounts over it."""
    return path in _MADE or any(path == top or path.startswith(f"{top}/") for top in _MOUNTED)

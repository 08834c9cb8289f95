"""Clamp the times of files and, with those of Python's sources, the copies of them in byte code.

Byte code names the time of its source, and Python takes it only where both are equal. Python's own documents
describe the 16 bytes at its beginning (PEP 552): a magic number, flags, then time and size of the source
where the flags are zero. Byte code with the hash of its source needs nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from imgkit_builder.archive.tar_header import HARD_LINK, REGULAR
from imgkit_builder.sif.image_entry import ImageEntry

_HEAD = struct.Struct("<4xII")
"""Flags, and the time of the source."""
_TIME = struct.Struct("<I")
_TIME_AT = 8
_MOST_BYTES = 64 << 20


@dataclass(slots=True)
class _OpenFolder:
    """A folder of sources that is still passing."""

    times: dict[str, int] = field(default_factory=dict)
    """Times of the late sources in it, by their names without the ending."""
    held: list[tuple[str, ImageEntry, bytes]] = field(default_factory=list)
    """Byte code that names a late time: the name of its source without the ending, and its content."""
    links: list[ImageEntry] = field(default_factory=list)
    """Hard links to what is held."""

    def holds(self, path: str) -> bool:
        """Whether the file `path` waits here."""
        return any(entry.name == path for _, entry, _ in self.held)


def settled(entries: Iterator[ImageEntry], epoch_s: int) -> Iterator[ImageEntry]:
    """The entries, none later than `epoch_s`; each folder comes with all in it, as engines export it.

    Byte code of a source with a late time comes behind the folder of the source. Where it was stale before,
    it is dropped: it would look fresh.
    """
    folders: dict[str, _OpenFolder] = {}
    for entry in entries:
        for folder in [one for one in folders if not entry.name.startswith(one)]:
            yield from _closed(folders.pop(folder), epoch_s)
        if entry.kind == HARD_LINK and (one := _holder(folders, entry.link)):
            one.links.append(entry)
            continue
        if entry.kind != REGULAR or not entry.name.endswith((".py", ".pyc")):
            yield _clamped(entry, epoch_s)
            continue
        above, _, name = entry.name.rpartition("/")
        folder = f"{above.removesuffix('/__pycache__')}/"
        source = name.partition(".")[0]
        if name.endswith(".py"):
            if entry.mtime_s > epoch_s:
                folders.setdefault(folder, _OpenFolder()).times[source] = entry.mtime_s
            yield _clamped(entry, epoch_s)
            continue
        if 16 <= entry.size_bytes <= _MOST_BYTES and entry.mtime_s > epoch_s:
            data = entry.read()
            flags, time_s = _HEAD.unpack_from(data)
            if not flags and time_s > epoch_s:
                folders.setdefault(folder, _OpenFolder()).held.append((source, entry, data))
                continue
            entry = entry.with_content(data)
        yield _clamped(entry, epoch_s)
    for one in folders.values():
        yield from _closed(one, epoch_s)


def _holder(folders: Mapping[str, _OpenFolder], path: str) -> _OpenFolder | None:
    return next((one for one in folders.values() if one.holds(path)), None)


def _closed(folder: _OpenFolder, epoch_s: int) -> Iterator[ImageEntry]:
    shown = set()
    for source, entry, data in folder.held:
        (time_s,) = _TIME.unpack_from(data, _TIME_AT)
        if folder.times.get(source, time_s) & 0xFFFFFFFF == time_s:
            changed = data[:_TIME_AT] + _TIME.pack(epoch_s) + data[_TIME_AT + _TIME.size :]
            shown.add(entry.name)
            yield _clamped(entry.with_content(changed), epoch_s)
    yield from (_clamped(one, epoch_s) for one in folder.links if one.link in shown)


def _clamped(entry: ImageEntry, epoch_s: int) -> ImageEntry:
    return entry if entry.mtime_s <= epoch_s else entry.changed(mtime_s=epoch_s)

"""The global header and the descriptor table of a .sif, byte by byte, and how to add or delete an object.

The structs are those of https://github.com/apptainer/sif (pkg/sif/sif.go). All integers are little-endian.
A descriptor's place in the table is its id minus 1; an unused one is 585 zero bytes.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

from imgkit_entrypoints import files
from imgkit_entrypoints.errors import CheckFailed

MAGIC = b"SIF_MAGIC\0"
MAGIC_OFFSET = 32
"""The launch script line comes first."""
GROUP = 0xF0000000
"""These high bits mark the number of a group in a descriptor; tools show the rest."""
HEADER = struct.Struct("<32s10s3s3s16s8q")
DESCRIPTOR = struct.Struct("<iBIII7q128s384s")
_MOST = 4096
_CHUNK_BYTES = 1 << 20


class Header(NamedTuple):
    """The global header, in the order of its bytes."""

    launch: bytes
    magic: bytes
    version: bytes
    arch: bytes
    uuid: bytes
    created_s: int
    modified_s: int
    free: int
    """Number of unused descriptors."""
    total: int
    table_offset: int
    table_bytes: int
    data_offset: int
    data_bytes: int


class Entry(NamedTuple):
    """One descriptor, in the order of its bytes."""

    datatype: int
    used: int
    id: int
    group: int
    """Number with the bits of `GROUP`."""
    link: int
    """Group or object that a signature covers, with the bits of `GROUP` for a group."""
    offset: int
    size_bytes: int
    padded_bytes: int
    """Size including the padding before the object."""
    created_s: int
    modified_s: int
    uid: int
    gid: int
    name: bytes
    extra: bytes

    @property
    def end(self) -> int:
        """Position of the first byte behind the object."""
        return self.offset + self.size_bytes

    @property
    def label(self) -> str:
        """Name of the object, for people."""
        return self.name.split(b"\0", 1)[0].decode("utf-8", "replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class SifTable:
    """Header and descriptors of one .sif."""

    header: Header
    slots: tuple[bytes, ...]
    """Every descriptor, also the unused ones."""

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The descriptors in use."""
        found = (Entry(*DESCRIPTOR.unpack(raw)) for raw in self.slots)
        return tuple(one for one in found if one.used)

    @property
    def end(self) -> int:
        """Position behind the last object."""
        return max((one.end for one in self.entries), default=self.header.data_offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewObject:
    """A data object to add."""

    datatype: int
    name: str
    group: int
    """Number of the group, without the bits of `GROUP`; a signature covers one group."""
    data: bytes | Path = field(repr=False)
    extra: bytes = b""
    align: int = 1
    """The object begins at a multiple of so many bytes; a partition at one of 4096."""


def read(path: Path, stream: BinaryIO) -> SifTable:
    """Read header and descriptors from `stream`, which is the file `path` at its start.

    Raises
    ------
    CheckFailed : not a .sif, cut short, or with an impossible table.
    """
    size = os.fstat(stream.fileno()).st_size
    raw = stream.read(HEADER.size)
    if len(raw) < HEADER.size or raw[MAGIC_OFFSET : MAGIC_OFFSET + len(MAGIC)] != MAGIC:
        raise CheckFailed("not a .sif file (no SIF_MAGIC in its header)", where=str(path))
    header = Header(*HEADER.unpack(raw))
    if (
        not 0 <= header.free <= header.total <= _MOST
        or header.table_offset < HEADER.size
        or header.table_bytes < header.total * DESCRIPTOR.size
    ):
        raise CheckFailed(
            f"its header claims {header.total} descriptors, {header.free} free: damaged", where=str(path)
        )
    stream.seek(min(header.table_offset, size))
    table = stream.read(header.total * DESCRIPTOR.size)
    if len(table) < header.total * DESCRIPTOR.size:
        raise CheckFailed(f"cut short within its descriptor table, at {size} bytes", where=str(path))
    starts = range(0, len(table), DESCRIPTOR.size)
    found = SifTable(header=header, slots=tuple(table[at : at + DESCRIPTOR.size] for at in starts))
    for one in found.entries:
        if one.offset < 0 or one.size_bytes < 0 or one.end > size:
            raise CheckFailed(
                f"data object {one.id} ends at byte {one.end}, the file at {size}: cut short", where=str(path)
            )
    return found


def next_entry(path: Path, table: SifTable, new: NewObject, size_bytes: int) -> Entry:
    """The descriptor that `add` will write for `new`, with the header's time, so that it is deterministic.

    Raises
    ------
    CheckFailed : the table is full.
    """
    free = next((number for number, raw in enumerate(table.slots, 1) if not any(raw)), None)
    if free is None:
        raise CheckFailed(f"all {len(table.slots)} descriptors of the .sif are in use", where=str(path))
    end = table.end
    offset = -(-end // new.align) * new.align
    created_s = table.header.created_s
    return Entry(
        datatype=new.datatype,
        used=1,
        id=free,
        group=GROUP | new.group,
        link=0,
        offset=offset,
        size_bytes=size_bytes,
        padded_bytes=offset - end + size_bytes,
        created_s=created_s,
        modified_s=created_s,
        uid=0,
        gid=0,
        name=new.name.encode(),
        extra=new.extra,
    )


def add(path: Path, new: NewObject) -> Entry:
    """Write `new` behind the last object of the .sif `path`; the file ends with it.

    Raises
    ------
    CheckFailed : no .sif, or its table is full.
    """
    with path.open("r+b") as stream:
        table = read(path, stream)
        size = len(new.data) if isinstance(new.data, bytes) else new.data.stat().st_size
        entry = next_entry(path, table, new, size)
        # A deleted object may lie there.
        stream.truncate(table.end)
        stream.seek(entry.offset)
        for chunk in _chunks(new.data):
            stream.write(chunk)
        _write_slot(stream, table, entry.id, DESCRIPTOR.pack(*entry))
        header = table.header._replace(
            free=table.header.free - 1, data_bytes=entry.end - table.header.data_offset
        )
        _write_header(stream, header)
    return entry


def _chunks(data: bytes | Path) -> Iterator[bytes]:
    if isinstance(data, bytes):
        yield data
        return
    with files.open_regular(data) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            yield chunk


def delete(path: Path, ids: Collection[int]) -> None:
    """Take the objects `ids` out of the .sif `path`, overwrite them with zeros, and cut the file at its end.

    Raises
    ------
    CheckFailed : no .sif.
    """
    with path.open("r+b") as stream:
        table = read(path, stream)
        header = table.header
        kept = [one for one in table.entries if one.id not in ids]
        end = max((one.end for one in kept), default=header.data_offset)
        for one in table.entries:
            if one.id in ids:
                _write_zeros(stream, one.offset, min(one.end, end))
                _write_slot(stream, table, one.id, bytes(DESCRIPTOR.size))
        stream.truncate(end)
        free = header.free + len(table.entries) - len(kept)
        _write_header(stream, header._replace(free=free, data_bytes=end - header.data_offset))


def _write_zeros(stream: BinaryIO, start: int, end: int) -> None:
    stream.seek(start)
    for at in range(start, end, _CHUNK_BYTES):
        stream.write(bytes(min(_CHUNK_BYTES, end - at)))


def _write_slot(stream: BinaryIO, table: SifTable, number: int, raw: bytes) -> None:
    stream.seek(table.header.table_offset + (number - 1) * DESCRIPTOR.size)
    stream.write(raw)


def _write_header(stream: BinaryIO, header: Header) -> None:
    stream.seek(0)
    stream.write(HEADER.pack(*header))

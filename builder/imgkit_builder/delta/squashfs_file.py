"""The bytes of a squashfs: metadata blocks, tables and data blocks, each within its bounds.

A damaged or hostile file ends in an error: every place lies within it, and a block unpacks to no more than
its size. No table is read as a whole, since its size is a number that anybody can write.
"""

from __future__ import annotations

import contextlib
import functools
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from imgkit_builder.delta import unpack
from imgkit_entrypoints import files
from imgkit_entrypoints.errors import CheckFailed

STORED = 1 << 24
"""Bit of a data block's size: it is not compressed."""
_SUPERBLOCK = struct.Struct("<4sIIIIHHHHHHQQQQQQQQ")
_MAGIC = b"hsqs"
_METADATA_BYTES = 8192
_CACHED_BLOCKS = 2048
_BLOCK_SIZES = tuple(1 << bits for bits in range(12, 21))
"""Sizes of a data block that the kernel mounts."""
_FAULTS = (struct.error, IndexError, OverflowError)
"""What Python raises where a damaged number is used as a place, a size or an index."""


class SquashfsFile:
    """The squashfs in `path` that starts at byte `offset`.

    Raises
    ------
    CheckFailed : no squashfs 4.0, or damaged.
    ToolMissing : this machine cannot unpack its compression.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self._offset = offset
        self._file = files.open_regular(path, buffering=0)
        self.used_bytes = max(os.fstat(self._file.fileno()).st_size - offset, 0)
        """Size of the squashfs."""
        fields = _SUPERBLOCK.unpack(self.raw(0, _SUPERBLOCK.size))
        magic, _, _, self.block_bytes, fragments, number, _, _, ids, major, _, self.root, used = fields[:13]
        id_table, xattr_table, self.inodes, self.folders, fragment_table, _ = fields[13:]
        if magic != _MAGIC or major != 4:
            raise CheckFailed("it is no squashfs", where=str(path))
        self._unpack = unpack.unpacker(number, path)
        if self.block_bytes not in _BLOCK_SIZES or used > self.used_bytes:
            raise self.damaged()
        self.used_bytes = used
        self.metadata = functools.lru_cache(_CACHED_BLOCKS)(self._read_metadata)
        self.ids = SquashfsTable(self, id_table, ids, "<I")
        self.fragments = SquashfsTable(self, fragment_table, fragments, "<QII")
        self.fragment = functools.lru_cache(8)(self._read_fragment)
        self.xattr_start, count = 0, 0
        if xattr_table != (1 << 64) - 1:
            self.xattr_start, count, _ = struct.unpack("<QII", self.raw(xattr_table, 16))
        self.xattrs = SquashfsTable(self, xattr_table + 16, count, "<QII")

    def raw(self, place: int, size: int) -> bytes:
        """The `size` bytes at `place`."""
        data = b""
        if 0 <= place <= self.used_bytes - size:
            data = os.pread(self._file.fileno(), size, self._offset + place)
        if len(data) != size:
            raise self.damaged()
        return data

    def data(self, place: int, word: int) -> bytes:
        """The data block at `place`, whose size and form are in `word`."""
        size = word & (STORED - 1)
        if size > self.block_bytes:
            raise self.damaged()
        data = self.raw(place, size)
        return data if word & STORED else self._unpacked(data, self.block_bytes)

    def reader(self, table: int, block: int, offset: int) -> MetadataReader:
        """Read from `offset` of the metadata block that lies `block` bytes behind the start of `table`."""
        return MetadataReader(self, table + block, offset)

    def at_most(self, number: int, most: int) -> int:
        """Return `number`, which must not be larger."""
        if number > most:
            raise self.damaged()
        return number

    @contextlib.contextmanager
    def sound(self) -> Iterator[None]:
        """Turn the faults of damaged numbers into the error for a damaged file."""
        try:
            yield
        except _FAULTS as error:
            raise self.damaged() from error

    def damaged(self) -> CheckFailed:
        """The error for a damaged file."""
        return CheckFailed(
            "the squashfs is damaged", where=str(self.path), hint="copy the file again, or write it again"
        )

    def _read_metadata(self, place: int) -> tuple[bytes, int]:
        """Read a metadata block; also returns where the next one begins."""
        (header,) = struct.unpack("<H", self.raw(place, 2))
        size = self.at_most(header & 0x7FFF, _METADATA_BYTES)
        data = self.raw(place + 2, size)
        return data if header & 0x8000 else self._unpacked(data, _METADATA_BYTES), place + 2 + size

    def _read_fragment(self, number: int) -> bytes:
        start, word, _ = self.fragments[number]
        return self.data(start, word)

    def _unpacked(self, data: bytes, most: int) -> bytes:
        try:
            return self._unpack(data, most)
        except unpack.FAULTS as error:
            raise self.damaged() from error


class SquashfsTable:
    """Entries of equal size behind a list of metadata blocks; it reads only the blocks that are needed."""

    def __init__(self, file: SquashfsFile, start: int, count: int, form: str) -> None:
        self._file, self._start, self._count = file, start, count
        self._entry = struct.Struct(form)
        self._cached = functools.lru_cache(1024)(self._read)

    def __getitem__(self, number: int) -> tuple[Any, ...]:
        return self._cached(number)

    def _read(self, number: int) -> tuple[Any, ...]:
        if not 0 <= number < self._count:
            raise self._file.damaged()
        index, offset = divmod(number * self._entry.size, _METADATA_BYTES)
        (place,) = struct.unpack("<Q", self._file.raw(self._start + 8 * index, 8))
        return self._entry.unpack_from(self._file.metadata(place)[0], offset)


class MetadataReader:
    """Read bytes of a run of metadata blocks, one call after the other."""

    def __init__(self, file: SquashfsFile, place: int, offset: int) -> None:
        self._file = file
        self.place, self.offset = place, offset
        """Metadata block, and offset in it, of the next byte."""

    def __call__(self, count: int) -> bytes:
        """The next `count` bytes."""
        found = b""
        while True:
            data, following = self._file.metadata(self.place)
            piece = data[self.offset : self.offset + count - len(found)]
            found, self.offset = found + piece, self.offset + len(piece)
            if len(found) == count:
                return found
            if not data or self.offset > len(data):
                raise self._file.damaged()
            self.place, self.offset = following, 0

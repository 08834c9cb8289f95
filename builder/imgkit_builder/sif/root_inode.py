"""Correct the root folder of a squashfs, which mksquashfs has no option for."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import BinaryIO

from imgkit_builder.base import files

_SUPERBLOCK = struct.Struct("<4s22xH4xQ8xQ8xQ")
_WRITTEN_AT = 8
"""Place in the superblock of the time at which the squashfs was written."""
_MAGIC = b"hsqs"
_BLOCK_BYTES = 8192
"""Size of an uncompressed metadata block; each has a two-byte header."""
_UNCOMPRESSED = 0x8000
_FOLDER_TYPES = (1, 8)
_OWNERS_AT, _TIME_AT = 4, 8
"""Offsets in an inode: type, mode, uid and gid take two bytes each; uid and gid index the table of owners."""


def set_root(path: Path, mtime_s: int, *, offset: int = 0) -> bool:
    """Set the time of the squashfs at byte `offset` of `path`, and time and owner (root) of its root folder.

    Returns False, and leaves the folder alone, if its inode is compressed.

    Notes
    -----
    ``mksquashfs -tar`` of 4.5.1 gives the root the current time and the calling user, and ignores
    ``-root-time`` and ``-root-uid``. SOURCE_DATE_EPOCH would also lower the time of every newer file.
    ``-noI`` stores inodes and owners as they are. mksquashfs 4.3 has no ``-mkfs-time``.
    """
    with files.open_own(path, os.O_RDWR, "r+b") as stream:
        stream.seek(offset)
        magic, owners, reference, owner_table, table = _SUPERBLOCK.unpack(stream.read(_SUPERBLOCK.size))
        if magic != _MAGIC:
            return False
        stream.seek(offset + _WRITTEN_AT)
        stream.write(struct.pack("<I", mtime_s))
        start, at = offset + table + (reference >> 16), reference & 0xFFFF
        stream.seek(start)
        (header,) = struct.unpack("<H", stream.read(2))
        if not header & _UNCOMPRESSED:
            return False

        def position(offset: int) -> int:
            """Place in the file of the byte at `offset` from the inode, which may lie in the next block."""
            block, inside = divmod(at + offset, _BLOCK_BYTES)
            return int(start + block * (2 + _BLOCK_BYTES) + 2 + inside)

        stream.seek(position(0))
        if stream.read(1)[0] not in _FOLDER_TYPES:
            return False
        changes = {_TIME_AT: struct.pack("<I", mtime_s)}
        root = _place_of_root(stream, offset, owner_table, owners)
        if root is not None:
            changes[_OWNERS_AT] = struct.pack("<HH", root, root)
        for offset, data in changes.items():
            for number, byte in enumerate(data):
                stream.seek(position(offset + number))
                stream.write(bytes([byte]))
    return True


def _place_of_root(stream: BinaryIO, offset: int, table: int, count: int) -> int | None:
    """Index of root in the table of owners; None if it is absent or the table is compressed."""
    stream.seek(offset + table)
    (block,) = struct.unpack("<Q", stream.read(8))
    stream.seek(offset + block)
    (header,) = struct.unpack("<H", stream.read(2))
    if not header & _UNCOMPRESSED:
        return None
    first = min(count, _BLOCK_BYTES // 4)
    owners = struct.unpack(f"<{first}I", stream.read(4 * first))
    return owners.index(0) if 0 in owners else None

"""The few bytes of a squashfs that mksquashfs cannot be told to write."""

from __future__ import annotations

import struct
from pathlib import Path

_SUPERBLOCK = struct.Struct("<4s28xQ24xQ")
_MAGIC = b"hsqs"
_BLOCK_BYTES = 8192
"""Of metadata, uncompressed; each block has a two-byte header."""
_UNCOMPRESSED = 0x8000
_FOLDER_TYPES = (1, 8)
_TIME_AT = 8
"""Of an inode: type, mode, uid and gid are two bytes each."""


def set_root_time(path: Path, mtime_s: int) -> bool:
    """Set the time of the root folder; False, and nothing done, where its inode is stored compressed.

    Notes
    -----
    ``mksquashfs -tar`` of 4.5.1 takes the time of now for the root, whatever ``-root-time`` says;
    SOURCE_DATE_EPOCH would also lower the time of every newer file. ``-noI`` stores inodes as they are.
    """
    with path.open("r+b") as stream:
        magic, reference, table = _SUPERBLOCK.unpack(stream.read(_SUPERBLOCK.size))
        start, at = table + (reference >> 16), reference & 0xFFFF
        stream.seek(start)
        (header,) = struct.unpack("<H", stream.read(2))
        if magic != _MAGIC or not header & _UNCOMPRESSED:
            return False

        def position(offset: int) -> int:
            """In the file, of a byte at `offset` from the inode: it may lie in the next block."""
            block, inside = divmod(at + offset, _BLOCK_BYTES)
            return int(start + block * (2 + _BLOCK_BYTES) + 2 + inside)

        stream.seek(position(0))
        if stream.read(1)[0] not in _FOLDER_TYPES:
            return False
        for number, byte in enumerate(struct.pack("<I", mtime_s)):
            stream.seek(position(_TIME_AT + number))
            stream.write(bytes([byte]))
    return True

"""Remove the calling user from a squashfs whose files belong to others.

``mksquashfs -tar`` of 4.5.1 gives the root folder the calling user, and with it an owner to the table of
owners. `root_inode` gives the folder to root, and the entry stays, so that two users would get two different
files. The tables that follow are few: the extended attributes. The format is that of the kernel's
Documentation/filesystems/squashfs.rst.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Collection
from pathlib import Path

from imgkit_builder.base import files

_COUNT_AT, _USED_AT, _OWNERS_AT, _ATTRIBUTES_AT = 26, 40, 48, 56
"""Places in the superblock: number of owners, bytes used, table of owners, table of attributes."""
_STORED = 0x8000
_MOST = 2048
"""Owners in one block."""
_ABSENT = (1 << 64) - 1
_PAD_BYTES = 4096


def remove_unused(path: Path, sent: Collection[int], *, offset: int = 0) -> bool:
    """Remove the last owners of the squashfs at byte `offset` of `path` that are not among those `sent`.

    Returns False, and changes nothing, if there is none, or if the table is compressed or long.
    """
    with files.open_own(path, os.O_RDWR, "r+b") as stream:
        stream.seek(offset)
        head = bytearray(stream.read(96))
        (count,) = struct.unpack_from("<H", head, _COUNT_AT)
        used, index, attributes = struct.unpack_from("<QQQ", head, _USED_AT)
        if not 1 < count <= _MOST:
            return False
        stream.seek(offset + index)
        (block,) = struct.unpack("<Q", stream.read(8))
        stream.seek(offset + block)
        tail = stream.read(used - block)
        (length,) = struct.unpack_from("<H", tail)
        if length != _STORED | 4 * count or block + 2 + 4 * count != index:
            return False
        owners = list(struct.unpack_from(f"<{count}I", tail, 2))
        while len(owners) > 1 and owners[-1] not in sent and owners[-1] != 0:
            owners.pop()
        gone = 4 * (count - len(owners))
        if not gone:
            return False
        rest = bytearray(tail[index - block + 8 :])
        if attributes != _ABSENT:
            _move(rest, attributes - index - 8, gone)
            struct.pack_into("<Q", head, _ATTRIBUTES_AT, attributes - gone)
        struct.pack_into("<H", head, _COUNT_AT, len(owners))
        struct.pack_into("<QQ", head, _USED_AT, used - gone, index - gone)
        table = struct.pack(f"<H{len(owners)}I", _STORED | 4 * len(owners), *owners)
        new = table + struct.pack("<Q", block) + rest
        stream.seek(offset)
        stream.write(head)
        stream.seek(offset + block)
        stream.write(new)
        size = block + len(new)
        # What squashes fills the last page with zeros.
        stream.write(bytes(-size % _PAD_BYTES))
        stream.truncate()
    return True


def _move(rest: bytearray, at: int, gone: int) -> None:
    """Correct the places in the table of attributes, which lies at byte `at` of `rest`."""
    start, count = struct.unpack_from("<QI", rest, at)
    struct.pack_into("<Q", rest, at, start - gone)
    # A block has 512 entries of 16 bytes.
    for place in range(at + 16, at + 16 + 8 * -(-count // 512), 8):
        (block,) = struct.unpack_from("<Q", rest, place)
        struct.pack_into("<Q", rest, place, block - gone)

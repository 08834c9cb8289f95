"""Count the names in a squashfs that has just been written, to compare them with what was sent.

mksquashfs 4.5.1 loses files of a tar and still exits 0. The lists of all folders follow each other without a
gap in the table of folders, so that one pass over it sees every name. ``-noI`` stores it as it is.
The format is that of the kernel's Documentation/filesystems/squashfs.rst.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from imgkit_builder.archive.tar_header import BLOCK, CHARACTER, DIRECTORY, FIFO, HARD_LINK, REGULAR, SYMLINK
from imgkit_entrypoints import files
from imgkit_entrypoints.errors import CheckFailed

_SUPERBLOCK = struct.Struct("<16xI28xQ16xQQQ")
"""Number of fragments; places of: index of owners, table of folders, indexes of fragments and of exports."""
_PLACE = struct.Struct("<Q")
_LENGTH = struct.Struct("<H")
_HEAD = struct.Struct("<III")
_ENTRY = struct.Struct("<HhHH")
_STORED = 0x8000
_ABSENT = (1 << 64) - 1
_KINDS = {1: DIRECTORY, 2: REGULAR, 3: SYMLINK, 4: BLOCK, 5: CHARACTER, 6: FIFO}


def names_by_kind(path: Path, *, offset: int = 0) -> Counter[bytes]:
    """Number of names for each type flag of a tar, in the squashfs at byte `offset`; without the root.

    Raises
    ------
    CheckFailed : the table of folders is compressed or damaged.
    """
    found: Counter[bytes] = Counter()
    with files.open_regular(path) as stream:
        table = b"".join(_table(stream, path, offset))
    at = 0
    try:
        while at < len(table):
            count, _, _ = _HEAD.unpack_from(table, at)
            at += _HEAD.size
            for _ in range(count + 1):
                _, _, kind, length = _ENTRY.unpack_from(table, at)
                at += _ENTRY.size + length + 1
                found[_KINDS[kind]] += 1
    except (struct.error, KeyError) as error:
        raise _damaged(path) from error
    return found


def compare(path: Path, sent: Counter[bytes], *, offset: int) -> None:
    """Raise CheckFailed if the squashfs at byte `offset` has not the names that were `sent`, counted by kind.

    The names of hard links count to the kind of what they name.
    """
    found = names_by_kind(path, offset=offset)
    kinds = sorted(found | sent)
    wrong = [kind for kind in kinds if kind != HARD_LINK and found[kind] < sent[kind]]
    if wrong or sum(found.values()) != sum(sent.values()):
        counts = ", ".join(f"{found[kind]} of {sent[kind]} of type {kind.decode()!r}" for kind in kinds)
        raise CheckFailed(
            f"the squashfs has other names than were sent: {counts}",
            where=str(path),
            hint="please report this",
        )


def _table(stream: BinaryIO, path: Path, offset: int) -> Iterator[bytes]:
    """The blocks of the table of folders."""
    fragments, ids, at, fragment_index, exports = _SUPERBLOCK.unpack(_read(stream, path, offset, 96))
    # It ends where the first block of the next table begins, which that table's index states.
    following = fragment_index if fragments else exports if exports != _ABSENT else ids
    (end,) = _PLACE.unpack(_read(stream, path, offset + following, _PLACE.size))
    while at < end:
        (head,) = _LENGTH.unpack(_read(stream, path, offset + at, _LENGTH.size))
        size = head & (_STORED - 1)
        if not head & _STORED or not size:
            raise _damaged(path)
        yield _read(stream, path, offset + at + _LENGTH.size, size)
        at += _LENGTH.size + size


def _read(stream: BinaryIO, path: Path, place: int, size: int) -> bytes:
    stream.seek(place)
    data = stream.read(size)
    if len(data) < size:
        raise _damaged(path)
    return data


def _damaged(path: Path) -> CheckFailed:
    return CheckFailed("a squashfs was written whose table of folders cannot be read", where=str(path))

"""Feed a tar entry by entry to what squashes; count the names written, correct the root folder and owners.

mksquashfs 4.5.1 loses files of a tar and still exits 0. The lists of all folders follow each other without a
gap in the table of folders, so that one pass over it sees every name. It also gives the root folder to the
calling user, and with it an owner to the table of owners: the folder is given to root, and the owner removed,
or two users would get two different files. The tables that follow are few: the extended attributes.

``-noI`` stores inodes, owners and folders as they are. The format is that of the kernel's
Documentation/filesystems/squashfs.rst.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, BinaryIO

from imgkit_builder.archive import tar_write
from imgkit_builder.archive.tar_read import BLOCK, CHARACTER, DIRECTORY, FIFO, HARD_LINK, REGULAR, SYMLINK
from imgkit_builder.archive.tar_write import END
from imgkit_builder.base import files
from imgkit_builder.oci.config import epoch
from imgkit_builder.sif import squashers
from imgkit_builder.sif.conversion import ConversionJob, SquashOrder
from imgkit_entrypoints.errors import CheckFailed

_TABLES = struct.Struct("<16xI28xQ16xQQQ")
"""Number of fragments; places of: index of owners, table of folders, indexes of fragments and of exports."""
_PLACE = struct.Struct("<Q")
_LENGTH = struct.Struct("<H")
_LIST_HEAD = struct.Struct("<III")
_NAME_ENTRY = struct.Struct("<HhHH")
_PLAIN = 0x8000
"""Bit in the header of a metadata block that is not compressed."""
_ABSENT = (1 << 64) - 1
"""Position of a table that is not there."""
_KINDS = {1: DIRECTORY, 2: REGULAR, 3: SYMLINK, 4: BLOCK, 5: CHARACTER, 6: FIFO}

_ROOT = struct.Struct("<4s22xH4xQ8xQ8xQ")
_WRITTEN_AT = 8
"""Place in the superblock of the time at which the squashfs was written."""
_MAGIC = b"hsqs"
_BLOCK_BYTES = 8192
"""Size of an uncompressed metadata block; each has a two-byte header."""
_FOLDER_TYPES = (1, 8)
_INODE_OWNERS_AT, _INODE_TIME_AT = 4, 8
"""Offsets in an inode: type, mode, uid and gid take two bytes each; uid and gid index the table of owners."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Squash:
    """A squashfs that is being written."""

    sink: IO[bytes]
    names: Counter[bytes] = field(default_factory=Counter)
    """Number of names of each kind so far."""

    def entry(self, kind: bytes, header: bytes) -> None:
        """Begin an entry; the content of a file follows in `content`."""
        self.names[kind] += 1
        self.sink.write(header)

    def content(self, pieces: Iterable[bytes | memoryview], size_bytes: int) -> None:
        """The content of a file, and the zeros that fill its last block."""
        for piece in pieces:
            self.sink.write(piece)
        self.sink.write(tar_write.padding(size_bytes))


@contextlib.contextmanager
def writing(job: ConversionJob, target: Path, *, created: str, offset: int = 0) -> Iterator[Squash]:
    """Yield a squashfs that goes to byte `offset` of `target`; afterwards it is complete.

    `created` is the time of the squashfs and its root folder, in RFC 3339 (empty: 1970).

    Raises
    ------
    ToolMissing, ToolFailed : nothing here squashes, or it failed or printed something unexpected.
    CheckFailed : the squashfs has other names than it should have.
    """
    order = SquashOrder(
        target=target,
        offset=offset,
        created_s=epoch(created),
        compression=job.compression,
        folder=job.work.folder,
        log=job.log,
        on_line=job.clock.line,
        note=job.clock.note,
    )
    squasher = job.squasher or squashers.choose()
    with squasher.feed(order) as sink:
        made = Squash(sink=sink)
        yield made
        sink.write(END)
    _compare(target, made.names, offset=offset)
    set_root(target, order.created_s, offset=offset)


def _names_by_kind(path: Path, *, offset: int = 0) -> Counter[bytes]:
    """Number of names for each type flag of a tar, in the squashfs at byte `offset`; without the root.

    Raises
    ------
    CheckFailed : the table of folders is compressed or damaged.
    """
    found: Counter[bytes] = Counter()
    with files.open_regular(path) as stream:
        table = b"".join(_folder_table(stream, path, offset))
    at = 0
    try:
        while at < len(table):
            count, _, _ = _LIST_HEAD.unpack_from(table, at)
            at += _LIST_HEAD.size
            for _ in range(count + 1):
                _, _, kind, length = _NAME_ENTRY.unpack_from(table, at)
                at += _NAME_ENTRY.size + length + 1
                found[_KINDS[kind]] += 1
    except (struct.error, KeyError) as error:
        raise _damaged(path) from error
    return found


def _compare(path: Path, sent: Counter[bytes], *, offset: int) -> None:
    """Raise CheckFailed if the squashfs at byte `offset` has not the names that were `sent`, counted by kind.

    The names of hard links count to the kind of what they name.
    """
    found = _names_by_kind(path, offset=offset)
    kinds = sorted(found | sent)
    wrong = [kind for kind in kinds if kind != HARD_LINK and found[kind] < sent[kind]]
    if wrong or sum(found.values()) != sum(sent.values()):
        counts = ", ".join(f"{found[kind]} of {sent[kind]} of type {kind.decode()!r}" for kind in kinds)
        raise CheckFailed(
            f"the squashfs has other names than were sent: {counts}",
            where=str(path),
            hint="please report this",
        )


def _folder_table(stream: BinaryIO, path: Path, offset: int) -> Iterator[bytes]:
    """The blocks of the table of folders."""
    fragments, ids, at, fragment_index, exports = _TABLES.unpack(_exactly(stream, path, offset, 96))
    # It ends where the first block of the next table begins, which that table's index states.
    following = fragment_index if fragments else exports if exports != _ABSENT else ids
    (end,) = _PLACE.unpack(_exactly(stream, path, offset + following, _PLACE.size))
    while at < end:
        (head,) = _LENGTH.unpack(_exactly(stream, path, offset + at, _LENGTH.size))
        size = head & (_PLAIN - 1)
        if not head & _PLAIN or not size:
            raise _damaged(path)
        yield _exactly(stream, path, offset + at + _LENGTH.size, size)
        at += _LENGTH.size + size


def _exactly(stream: BinaryIO, path: Path, place: int, size: int) -> bytes:
    stream.seek(place)
    data = stream.read(size)
    if len(data) < size:
        raise _damaged(path)
    return data


def _damaged(path: Path) -> CheckFailed:
    return CheckFailed("a squashfs was written whose table of folders cannot be read", where=str(path))


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
        magic, owners, reference, owner_table, table = _ROOT.unpack(stream.read(_ROOT.size))
        if magic != _MAGIC:
            return False
        stream.seek(offset + _WRITTEN_AT)
        stream.write(struct.pack("<I", mtime_s))
        start, at = offset + table + (reference >> 16), reference & 0xFFFF
        stream.seek(start)
        (header,) = struct.unpack("<H", stream.read(2))
        if not header & _PLAIN:
            return False

        def position(offset: int) -> int:
            """Place in the file of the byte at `offset` from the inode, which may lie in the next block."""
            block, inside = divmod(at + offset, _BLOCK_BYTES)
            return int(start + block * (2 + _BLOCK_BYTES) + 2 + inside)

        stream.seek(position(0))
        if stream.read(1)[0] not in _FOLDER_TYPES:
            return False
        changes = {_INODE_TIME_AT: struct.pack("<I", mtime_s)}
        root = _place_of_root(stream, offset, owner_table, owners)
        if root is not None:
            changes[_INODE_OWNERS_AT] = struct.pack("<HH", root, root)
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
    if not header & _PLAIN:
        return None
    first = min(count, _BLOCK_BYTES // 4)
    owners = struct.unpack(f"<{first}I", stream.read(4 * first))
    return owners.index(0) if 0 in owners else None

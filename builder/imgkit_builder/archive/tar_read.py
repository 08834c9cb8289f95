"""Read a tar once, from the beginning to the end, in limited memory. imgkit reads all archives with this.

Python's tarfile is not suitable. It takes twice as long per member (46 us against 24 us, Python 3.11), reads
extended headers of any size into memory, cannot return headers unchanged, and trusts what an archive says.
This module keeps the raw headers, so that they can be written again, and refuses archives beyond its
`TarLimits`.

The supported formats are POSIX ustar and pax, and GNU's formats, which GNU tar's manual describes in "Tar
Internals". Programs interpret a wrong header in different ways, so this module refuses it. Functions that
parse a header raise ValueError.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from imgkit_entrypoints import files
from imgkit_entrypoints.errors import CheckFailed

_PAX, _PAX_GLOBAL, _GNU_NAME, _GNU_LINK = b"x", b"g", b"L", b"K"
_EXTENDED_KINDS = (_PAX, _PAX_GLOBAL, _GNU_NAME, _GNU_LINK)
# Bytes to read at once if only headers are needed. Most bodies are larger, and are skipped.
_READ_BYTES = 16 << 10
_HOLE = memoryview(bytes(64 << 10))
"""Zeros for the holes of sparse files. A larger hole is yielded in several chunks of this size."""

BLOCK_BYTES = 512
_ZEROS = bytes(BLOCK_BYTES)
REGULAR, HARD_LINK, SYMLINK, CHARACTER, BLOCK, DIRECTORY, FIFO = (b"%d" % kind for kind in range(7))
_GNU_SPARSE = b"S"
WHITEOUT, OPAQUE, AUFS = ".wh.", ".wh..wh..opq", ".wh..wh."
"""Names of special files in a layer. ``.wh.a`` deletes ``a`` of the layers below. ``.wh..wh..opq`` deletes
everything in its folder. Other names that begin with ``.wh..wh.`` belong to the file system AUFS."""
XATTR = "SCHILY.xattr."
"""Prefix in the names of pax records that contain extended attributes."""
CAPABILITY = "security.capability"
"""The only extended attribute that all engines store and export. imgkit writes no other attribute."""

_REGULAR_KINDS = (b"0", b"\0", b"7", _GNU_SPARSE)
_BODILESS_KINDS = (HARD_LINK, SYMLINK, CHARACTER, BLOCK, DIRECTORY, FIFO)
# The fields of a ustar header. A GNU header has times and the map of a sparse file in place of the prefix.
_NAME = slice(0, 100)
_MODE = slice(100, 108)
_UID = slice(108, 116)
_GID = slice(116, 124)
_SIZE = slice(124, 136)
_MTIME = slice(136, 148)
_CHECKSUM = slice(148, 156)
_KIND = slice(156, 157)
_LINK = slice(157, 257)
MAGIC = slice(257, 263)
"""The magic bytes: ``ustar`` and a zero byte in POSIX's format, ``ustar`` and a space in GNU's."""
_MAJOR = slice(329, 337)
_MINOR = slice(337, 345)
_PREFIX = slice(345, 500)
# The map of a sparse file in the old GNU format begins in the header with 4 parts. Then follow a byte that
# says whether a block with 21 more parts comes next, and the size of the file. A part is two numbers of 12
# bytes.
_OLD_MAP = slice(386, 482)
_OLD_MAP_GOES_ON = 482
_OLD_CONTENT_SIZE = slice(483, 495)
_OLD_MAP_IN_BLOCK = slice(0, 504)
_OLD_MAP_GOES_ON_IN_BLOCK = 504
_OLD_PART = struct.Struct("12s12s")
CHECKSUM_AS_SPACES = 8 * 0x20
"""The checksum of a header is computed as if its own field of 8 bytes contained spaces."""

_OCTAL = re.compile(rb"[0-7]{1,22}")
_DECIMAL = re.compile(rb"[0-9]{1,19}")
_RECORD_LENGTH = re.compile(rb"(?P<digits>[0-9]{1,10}) ")  # of a pax record, which is smaller than 1 MiB
_TIME = re.compile(rb"(-?[0-9]{1,19})(\.[0-9]*)?")
# The largest size and time that Linux supports.
_MAX_NUMBER = (1 << 63) - 1
_MAX_NAME_BYTES = 4096
"""The longest path that Linux accepts."""


class _ExtendedHeaders(NamedTuple):
    """The extended headers before a member's own header. They contain values that do not fit into it."""

    pax: Mapping[str, bytes] = {}
    """Records of a pax header. They replace fields of the member's header."""
    gnu_name: bytes | None = None
    """A long name in GNU's format."""
    gnu_link: bytes | None = None
    """A long link target in GNU's format."""
    blocks: tuple[bytes, ...] = ()
    """All extended headers as raw bytes, so that the member can be written again unchanged."""
    counted_bytes: int = 0
    """Size of the extended headers, which `TarLimits.header_bytes` limits."""


_NO_EXTENDED_HEADERS = _ExtendedHeaders()
Sparse = tuple[tuple[int, int], ...]
"""Offset and size in bytes of each part of a sparse file that is stored in the archive, in order."""


class _SparseMap(NamedTuple):
    """The map of a sparse file. It lists the parts that are in the archive. The rest of the file is zeros."""

    content_bytes: int
    """Size of the file, including its holes."""
    numbers: list[int]
    """Offset and size of the first part, then of the second part: ``[0, 512, 4096, 512]``."""
    blocks: list[bytes]
    """The blocks of the archive that contain the map. Empty if the map is in the header."""
    body_bytes: int
    """Total size of the parts, which follow the blocks in the archive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TarLimits:
    """Limits for the memory and disk space that a tar needs.

    Without limits, a hostile archive of a few kB could need terabytes.
    """

    entries: int = 5_000_000
    """Number of members, not counting extended headers."""
    header_bytes: int = 1 << 20
    """Size of the extended headers before one member, or of the map of a sparse file."""
    hole_bytes: int = 10**11
    """Total size of the holes in sparse files. A hole is zeros that the archive does not contain."""


class TarStream:
    """Iterates over the members of a tar, whose bytes come from the iterator `chunks`.

    The caller may read the content of the current member. Otherwise the content is skipped.

    Parameters
    ----------
    name : name of the tar, for messages.
    jump : a function that moves `chunks` forward by a number of bytes without reading them, as is possible in
        a file. Without it, the bytes of skipped contents are read and dropped.

    Raises
    ------
    CheckFailed : (while iterating) the bytes are not a tar, are damaged or cut short, or exceed `limits`.
    """

    def __init__(
        self,
        chunks: Iterator[bytes],
        *,
        name: str,
        jump: Callable[[int], object] | None = None,
        limits: TarLimits = TarLimits(),
    ) -> None:
        self._chunks = chunks
        self._name = name
        self._jump = jump
        self._limits = limits
        self._pending = memoryview(b"")
        self._member: Member | None = None
        self._unread = 0
        self._padding = 0
        self.position = 0
        """Number of bytes read or skipped so far."""

    def __iter__(self) -> Iterator[Member]:
        member_count = 0
        hole_bytes = 0
        while True:
            self._skip_rest()  # the caller need not have read the content of the last member
            try:
                member = self._read_member()
            except ValueError as error:
                raise self._damage_error(str(error)) from None
            if member is None:
                return
            member_count += 1
            hole_bytes += member.content_bytes - member.size_bytes
            if member_count > self._limits.entries:
                raise self._limit_error(f"it has more than {self._limits.entries} entries")
            if hole_bytes > self._limits.hole_bytes:
                raise self._limit_error(
                    f"its sparse files have more than {self._limits.hole_bytes / 1e9:g} GB"
                )
            # `body`, `content` and `_skip_rest` read these. They are valid until the next member.
            self._member = member
            self._unread = member.size_bytes
            self._padding = -member.size_bytes % BLOCK_BYTES
            yield member

    def body(self) -> Iterator[memoryview]:
        """Yield the bytes of the current member as they are in the archive, without holes."""
        return self._read_pieces(self._unread)

    def content(self) -> Iterator[memoryview]:
        """Yield the content of the current file. The holes of a sparse file are filled with zeros."""
        member = self._member
        if member is None or member.sparse is None:
            yield from self.body()
            return
        yield from fill_holes(member.sparse, member.content_bytes, self._read_pieces)

    def drain(self) -> None:
        """Read the rest of the stream, because a sender may fail if its last bytes are not read."""
        for _ in self._chunks:
            pass

    # The methods below run at least once per member. An image has hundreds of thousands of members, so these
    # methods contain few function calls, for speed.

    def _read_member(self) -> Member | None:
        """Read the headers of the next member, and return the member, or None at the end of the archive.

        Each `_read_...` method moves `position` to the byte after what it has read.
        """
        # A member may have several extended headers in front of its own header. They contain values that do
        # not fit into it, such as a long name. `extended` collects the values of all of them.
        extended = _NO_EXTENDED_HEADERS
        header = self._read_header()
        while header is not None and header[_KIND] in _EXTENDED_KINDS:
            extended = self._read_extended_header(header, extended)
            header = self._read_header()
        if header is None:
            return None
        if extended is not _NO_EXTENDED_HEADERS:
            _refuse_two_names(extended)
        # The body of the member begins at `position`. Some formats store the map of a sparse file (a file
        # with holes) there, which `_read_sparse_map` reads.
        member = _parse_member(header, extended, offset=self.position)
        sparse_map = self._read_sparse_map(member)
        if sparse_map is None:  # most files have no holes
            return member
        return self._apply_sparse_map(member, sparse_map)

    def _read_header(self) -> bytes | None:
        """Read a header block and check its checksum. Return None for the zeros at the end of the archive."""
        header = self._read_exactly(BLOCK_BYTES)
        if header == _ZEROS:
            return None
        _verify_checksum(header)
        _refuse_gnu_prefix(header)
        return header

    def _read_extended_header(self, header: bytes, earlier: _ExtendedHeaders) -> _ExtendedHeaders:
        """Read the content of an extended header, and return it together with the `earlier` headers.

        Raises
        ------
        ValueError : the extended headers of this member are too large together. A hostile archive may have
            endless headers to fill the memory.
        """
        size_bytes = _parse_count(header[_SIZE])
        counted_bytes = earlier.counted_bytes + BLOCK_BYTES + size_bytes
        if counted_bytes > self._limits.header_bytes:
            raise ValueError(f"extended headers of more than {self._limits.header_bytes} bytes")
        # The content is padded to whole blocks.
        body = self._read_exactly(size_bytes + -size_bytes % BLOCK_BYTES)
        content = body[:size_bytes]
        blocks = (*earlier.blocks, header, body)
        extended = earlier._replace(blocks=blocks, counted_bytes=counted_bytes)
        kind = header[_KIND]
        if kind == _PAX:
            return extended._replace(pax=_parse_pax(content))
        if kind == _GNU_NAME:
            return extended._replace(gnu_name=_cut_at_zero_byte(content))
        if kind == _GNU_LINK:
            return extended._replace(gnu_link=_cut_at_zero_byte(content))
        # This is a global pax header. None of its records are needed.
        return extended

    def _read_sparse_map(self, member: Member) -> _SparseMap | None:
        """Read the map of a sparse file, which lists the positions of its parts. The rest are holes.

        GNU tar stores the map in three formats: the old format in the header, format 0.1 in pax records, and
        format 1.0 at the start of the body. Return None if `member` is not a sparse file.

        Raises
        ------
        ValueError : the map cannot be read, or has the outdated format 0.0.
        """
        pax = member.pax
        if member.header[_KIND] == _GNU_SPARSE:
            return self._read_old_map(member)
        if "GNU.sparse.map" in pax:  # format 0.1
            return _parse_map_in_pax(member)
        if "GNU.sparse.major" in pax:  # format 1.0
            return self._read_map_in_body(member)
        # Format 0.0 repeats a key for each part, but `pax` keeps only the last value of a key. Format 0.1 has
        # the key "numblocks", too, so this check must come after it.
        if "GNU.sparse.numblocks" in pax:
            raise ValueError("a sparse file of the outdated format 0.0")
        return None

    def _apply_sparse_map(self, member: Member, sparse_map: _SparseMap) -> Member:
        """Return a copy of the sparse file `member` with its parts, and with its size including holes.

        `sparse_map` must just have been read from the stream.
        """
        if member.kind != REGULAR:
            raise ValueError("a map of a sparse file before something that is not a file")
        parts = _validate_map(sparse_map.numbers, sparse_map.body_bytes, sparse_map.content_bytes)
        return dataclasses.replace(
            member,
            # The blocks of the map count as a header: they are not a part of the file's content.
            header=member.header + b"".join(sparse_map.blocks),
            size_bytes=sparse_map.body_bytes,
            offset=self.position,  # the position after the map, where the first part of the file begins
            content_bytes=sparse_map.content_bytes,
            sparse=parts,
        )

    def _read_old_map(self, member: Member) -> _SparseMap:
        """Read the map of a sparse file (a file with holes) in the old GNU format.

        The map lists the parts of the file that are stored. It begins with 4 parts in the header, and
        continues in blocks of 21 parts after the header. All of the body belongs to the file.
        """
        header = member.header
        content_bytes = _parse_count(header[_OLD_CONTENT_SIZE])
        blocks: list[bytes] = []
        table = header[_OLD_MAP]
        has_more = header[_OLD_MAP_GOES_ON]  # a byte that is 0 after the last block
        while has_more:
            # `_read_map_block` also limits the number of blocks, which a hostile archive could make endless.
            block = self._read_map_block(blocks)
            blocks.append(block)
            table += block[_OLD_MAP_IN_BLOCK]
            has_more = block[_OLD_MAP_GOES_ON_IN_BLOCK]
        numbers: list[int] = []
        for offset, size in _OLD_PART.iter_unpack(table):
            # An unused part consists of zero bytes.
            if offset.strip(b"\0") or size.strip(b"\0"):
                numbers += (_parse_count(offset), _parse_count(size))
        return _SparseMap(content_bytes, numbers, blocks, body_bytes=member.size_bytes)

    def _read_map_in_body(self, member: Member) -> _SparseMap:
        """Read the map of a sparse file in format 1.0, which is text at the beginning of the body.

        Its first line is the number of parts. Two lines follow for each part: its offset and its size. The
        map is not a part of the file, but `member.size_bytes` counts it.
        """
        content_bytes = _parse_decimal(member.pax.get("GNU.sparse.realsize"))
        block = self._read_map_block([], member.size_bytes)
        blocks = [block]
        part_count, _, _ = block.partition(b"\n")
        expected_lines = 1 + 2 * _parse_decimal(part_count)
        line_count = block.count(b"\n")
        while line_count < expected_lines:
            block = self._read_map_block(blocks, member.size_bytes)
            blocks.append(block)
            line_count += block.count(b"\n")
        # Skip the number of parts, and the padding after the last line.
        lines = b"".join(blocks).split(b"\n")[1:expected_lines]
        numbers = [_parse_decimal(line) for line in lines]
        body_bytes = member.size_bytes - len(blocks) * BLOCK_BYTES
        return _SparseMap(content_bytes, numbers, blocks, body_bytes)

    def _read_map_block(self, blocks: Sequence[bytes], most_bytes: int = _MAX_NUMBER) -> bytes:
        """Read and return the next block of a sparse file's map. `blocks` are the blocks read before it.

        Raises
        ------
        ValueError : with this block, the map would be larger than `most_bytes` or than the limit for headers.
            The limit protects the memory from hostile archives.
        """
        if (len(blocks) + 1) * BLOCK_BYTES > min(most_bytes, self._limits.header_bytes):
            raise ValueError("the map of a sparse file is too long")
        return self._read_exactly(BLOCK_BYTES)

    def _read_pieces(self, count: int) -> Iterator[memoryview]:
        """Yield the next `count` bytes in chunks. If the caller stops early, `_skip_rest` skips the rest."""
        while count:
            chunk = self._read_some(count)
            count -= len(chunk)
            self._unread -= len(chunk)
            yield chunk

    def _skip_rest(self) -> None:
        """Skip the unread bytes of the current member's body, and the zeros that fill its last block."""
        count = self._unread + self._padding
        # The bytes in `_pending` are already in memory. Only the bytes after them can be skipped in the file.
        count_in_file = count - len(self._pending)
        if self._jump is None or count_in_file <= 0:  # `_jump` is None for a stream that cannot skip
            for _ in self._read_pieces(count):  # this also moves `position` and `_pending`
                pass
        else:
            self.position += count
            self._pending = memoryview(b"")
            self._jump(count_in_file)
        self._unread = 0
        self._padding = 0

    def _read_some(self, most: int) -> memoryview:
        """Return the next bytes that are in memory: at least 1, and at most `most`."""
        while not self._pending:
            chunk = next(self._chunks, None)
            if chunk is None:
                raise self._damage_error("cut short")
            # Slices of a memoryview do not copy the bytes. The loop repeats if the chunk is empty.
            self._pending = memoryview(chunk)
        available = self._pending[:most]
        self._pending = self._pending[most:]
        self.position += len(available)
        return available

    def _read_exactly(self, count: int) -> bytes:
        """Return the next `count` bytes, which may be in several chunks.

        Raises
        ------
        CheckFailed : the archive has fewer bytes.
        """
        if count == 0:
            return b""
        # A shortcut for speed: most headers are in a single chunk, so nothing has to be joined.
        start = self._read_some(count)
        if len(start) == count:
            return bytes(start)
        data = bytearray(start)
        while len(data) < count:
            data += self._read_some(count - len(data))
        return bytes(data)

    def _damage_error(self, problem: str) -> CheckFailed:
        return CheckFailed(
            f"{problem}, at byte {self.position}: an incomplete or damaged tar archive", where=self._name
        )

    def _limit_error(self, problem: str) -> CheckFailed:
        return CheckFailed(
            problem, where=self._name, hint="do not use the archive if you do not know its author"
        )


def fill_holes(
    sparse: Sparse, content_bytes: int, read_bytes: Callable[[int], Iterator[memoryview]]
) -> Iterator[memoryview]:
    """Yield the `content_bytes` bytes of a sparse file, with zeros between its parts.

    In the archive, the parts follow each other without gaps. ``read_bytes(count)`` yields their next `count`
    bytes. If `sparse` is ``((2, 3),)`` and the file has 6 bytes, the result is 2 zeros, 3 bytes of the
    archive, and 1 zero.
    """
    position = 0
    # An empty part is added at the end of the file, so that the loop also fills the last hole.
    for offset, size in (*sparse, (content_bytes, 0)):
        while position < offset:
            hole = _HOLE[: offset - position]
            position += len(hole)
            yield hole
        yield from read_bytes(size)
        position += size


def read_first_file(chunks: Iterator[bytes], *, name: str, most_bytes: int) -> bytes | None:
    """Return the content of the first member of a tar.

    Return None if the tar is empty, or if the member is not a file or has more than `most_bytes`.
    """
    stream = TarStream(chunks, name=name)
    member = next(iter(stream), None)
    if member is None or member.kind != REGULAR or member.content_bytes > most_bytes:
        return None
    return b"".join(stream.content())


class FileChunks:
    """Iterates over the bytes of a file, at most `chunk_bytes` at a time. `skip` moves the position forward.

    Raises
    ------
    CheckFailed : the file cannot be read.
    """

    def __init__(
        self, path: Path, *, chunk_bytes: int, start: int = 0, size_bytes: int = _MAX_NUMBER
    ) -> None:
        self._path = path
        self._chunk_bytes = chunk_bytes
        self._position = start
        self._end = start + size_bytes
        try:
            self._file = files.open_regular(path, buffering=0)
        except OSError as error:
            raise self._unreadable_error(error) from error

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        # After `skip`, the position may be after the end, and even too large for `os.pread`.
        if self._position >= self._end:
            raise StopIteration
        count = min(self._chunk_bytes, self._end - self._position)
        try:
            chunk = os.pread(self._file.fileno(), count, self._position)
        except OSError as error:
            raise self._unreadable_error(error) from error
        if not chunk:
            raise StopIteration
        self._position += len(chunk)
        return chunk

    def skip(self, count: int) -> None:
        """Skip `count` bytes. The file may have fewer bytes."""
        self._position += count

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _unreadable_error(self, error: OSError) -> CheckFailed:
        return CheckFailed(f"cannot be read: {error.strerror}", where=str(self._path))


def read_headers(path: Path) -> Iterator[Member]:
    """Yield the members of the uncompressed tar `path`, without reading their content.

    Raises
    ------
    CheckFailed : the file is not a tar, is damaged or cut short, or exceeds `TarLimits`.
    """
    with contextlib.closing(FileChunks(path, chunk_bytes=_READ_BYTES)) as chunks:
        yield from TarStream(chunks, name=str(path), jump=chunks.skip)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """The headers of one member (entry) of a tar, raw and parsed."""

    kind: bytes
    """Type flag. It is ``REGULAR`` for every regular file."""
    name: str
    """Path without a leading ``./`` or trailing slash. Bytes that are not UTF-8 are surrogates."""
    link: str
    size_bytes: int
    """Size of the member's body in the archive."""
    mtime_s: int
    mode: int
    uid: int
    gid: int
    device: tuple[int, int]
    """Major and minor number of a device, else zeros."""
    header: bytes
    """The main header of 512 bytes. For a sparse file, the blocks of the map after it are included."""
    extended: bytes
    """The extended headers before the main header (pax or GNU long names). Empty for most members."""
    pax: Mapping[str, bytes]
    """Records of the member's pax header."""
    offset: int
    """Byte of the tar at which the body begins."""
    content_bytes: int
    """Size of the file. It equals `size_bytes`, but a sparse file is larger."""
    sparse: Sparse | None = None

    @property
    def xattrs(self) -> dict[str, bytes]:
        """Extended attributes by name."""
        return {key.removeprefix(XATTR): value for key, value in self.pax.items() if key.startswith(XATTR)}


def _refuse_two_names(extended: _ExtendedHeaders) -> None:
    """Raise ValueError if the extended headers of a member have its name, or its link target, twice."""
    has_two_names = "path" in extended.pax and extended.gnu_name is not None
    has_two_targets = "linkpath" in extended.pax and extended.gnu_link is not None
    if has_two_names or has_two_targets:
        raise ValueError("a member with two names: readers disagree on which one to use")


def _parse_member(header: bytes, extended: _ExtendedHeaders, *, offset: int) -> Member:
    """Return the member that `header` and the `extended` headers before it describe.

    Parameters
    ----------
    header : the member's main header of 512 bytes.
    offset : byte of the archive at which the member's body begins.

    Raises
    ------
    ValueError : a field cannot be read.
    """
    pax = extended.pax
    kind = header[_KIND]
    if kind in _REGULAR_KINDS:
        kind = REGULAR
    size_bytes = _parse_size(kind, pax, header)
    # "GNU.sparse.name" has priority, because GNU tar writes an invented name into "path" for a sparse file.
    name = pax.get("GNU.sparse.name") or pax.get("path") or extended.gnu_name or _join_ustar_name(header)
    link = pax.get("linkpath") or extended.gnu_link or _cut_at_zero_byte(header[_LINK])
    mtime_s = _parse_time(pax["mtime"]) if "mtime" in pax else _parse_number(header[_MTIME])
    device = (0, 0)
    if kind in (CHARACTER, BLOCK):
        device = (_parse_count(header[_MAJOR]), _parse_count(header[_MINOR]))
    return Member(
        kind=kind,
        name=_decode_path(name).rstrip("/").removeprefix("./"),
        link=_decode_path(link),
        size_bytes=size_bytes,
        mtime_s=mtime_s,
        mode=_parse_count(header[_MODE]),
        uid=_parse_owner("uid", pax, header[_UID]),
        gid=_parse_owner("gid", pax, header[_GID]),
        device=device,
        header=header,
        extended=b"".join(extended.blocks),
        pax=pax,
        offset=offset,
        content_bytes=size_bytes,
    )


def _parse_size(kind: bytes, pax: Mapping[str, bytes], header: bytes) -> int:
    """Return the size of a member's body from the pax record ``size``, or else from the header.

    A link, folder, device or FIFO has no body, although some programs write a size for links. With a wrong
    size, the bytes of the body would be taken for the next header.
    """
    if kind in _BODILESS_KINDS:
        return 0
    if "size" in pax:
        return _parse_decimal(pax["size"])
    return _parse_count(header[_SIZE])


def _parse_number(raw: bytes) -> int:
    """Return the number in a field of a header: ``b"0000644\\0"`` -> 420.

    Most fields contain octal digits. A number with too many digits is stored in binary (base-256). Its first
    byte is 0x80, or 0xFF if the number is negative.
    """
    if raw[0] == 0x80:
        value = int.from_bytes(raw[1:], "big")
    elif raw[0] == 0xFF:  # this byte is the sign in two's complement, so it is a part of the number
        value = int.from_bytes(raw, "big", signed=True)
    else:
        digits = raw.split(b"\0", 1)[0].strip(b" ") or b"0"
        if not _OCTAL.fullmatch(digits):
            raise ValueError(f"{raw!r} where a number belongs")
        value = int(digits, 8)
    if abs(value) > _MAX_NUMBER:
        raise ValueError(f"the number {raw!r}, which is out of range")
    return value


def _parse_count(raw: bytes) -> int:
    """Return the number in a field of a header, and refuse a negative number."""
    value = _parse_number(raw)
    if value < 0:
        raise ValueError(f"the negative size or id {value}")
    return value


def _parse_decimal(digits: bytes | None) -> int:
    """Return the size that a pax record or the map of a sparse file contains as decimal digits."""
    if digits is None or not _DECIMAL.fullmatch(digits) or int(digits) > _MAX_NUMBER:
        raise ValueError(f"the size {(digits or b'')[:40]!r} in a pax record")
    return int(digits)


def _parse_owner(key: str, pax: Mapping[str, bytes], field: bytes) -> int:
    """Return the uid or gid from the pax record `key`, or else from the `field` of the header."""
    value = _parse_decimal(pax[key]) if key in pax else _parse_count(field)
    if value >= 1 << 32:  # Linux stores a uid or gid in 32 bits
        raise ValueError(f"the {key} {value}, which is out of range")
    return value


def _parse_time(raw: bytes) -> int:
    """Return the whole seconds of a time in a pax record: ``1700000000.25`` -> 1700000000."""
    match = _TIME.fullmatch(raw)
    if match is None or abs(int(match[1])) > _MAX_NUMBER:
        raise ValueError(f"the time {raw[:40]!r} in a pax record")
    return int(match[1])


def _parse_pax(data: bytes) -> dict[str, bytes]:
    """Return the records of a pax header as a dict. Each record has the form ``LENGTH KEY=VALUE\\n``.

    LENGTH is the size of the whole record, including its own digits and the line break: ``9 uid=10\\n``.
    """
    records = {}
    start = 0
    while start < len(data):
        match = _RECORD_LENGTH.match(data, start)
        if match is None:
            raise ValueError("a pax header that cannot be read")
        end = start + int(match["digits"])
        # A damaged length could make the record end before its own digits or after the header.
        if not match.end() <= end <= len(data):
            raise ValueError("a pax header that cannot be read")
        record = data[match.end() : end - 1]  # without the line break
        key, _, value = record.partition(b"=")
        records[key.decode("utf-8", "surrogateescape")] = value
        start = end
    return records


def _verify_checksum(header: bytes) -> None:
    """Raise ValueError if a header has a wrong checksum."""
    checksum = header[_CHECKSUM]
    # In the sum, spaces stand for the checksum's own field.
    expected = sum(header) - sum(checksum) + CHECKSUM_AS_SPACES
    if _parse_number(checksum) != expected:
        raise ValueError("a header's checksum is wrong")


def _refuse_gnu_prefix(header: bytes) -> None:
    """Raise ValueError if a GNU header has a text in the field for the prefix.

    In this field, POSIX stores the first part of a long path, but GNU stores numbers. If a GNU header has a
    text there, some programs use it as a folder and others ignore it. So a hostile archive could show a
    different tree to each program.
    """
    if header[MAGIC] != b"ustar ":  # not GNU: the prefix is a path as it should be
        return
    prefix_field = header[_PREFIX]
    if header[_KIND] == _GNU_SPARSE:
        # Check only up to the end of the map. A flag byte, which is not a digit, and the file's size follow.
        prefix_field = header[_PREFIX.start : _OLD_MAP.stop]
    # GNU stores its times and sizes as octal digits, or in binary. Binary numbers are not ASCII.
    has_octal_only = not prefix_field.strip(b"\0 01234567")
    if not has_octal_only and prefix_field.isascii():
        raise ValueError("a GNU header with a prefix, which some readers use as a folder")


def _parse_map_in_pax(member: Member) -> _SparseMap:
    """Return the map of a sparse file in format 0.1, which is a pax record such as ``0,512,4096,10``."""
    content_bytes = _parse_decimal(member.pax.get("GNU.sparse.size"))
    numbers = [_parse_decimal(digits) for digits in member.pax["GNU.sparse.map"].split(b",")]
    return _SparseMap(content_bytes, numbers, [], body_bytes=member.size_bytes)


def _validate_map(numbers: Sequence[int], body_bytes: int, content_bytes: int) -> Sparse:
    """Return the parts of a sparse file: ``[0, 512, 4096, 10]`` -> ``((0, 512), (4096, 10))``.

    Parameters
    ----------
    numbers : the map: offset and length of each part.
    body_bytes : total size of all parts in the archive.
    content_bytes : size of the file, including its holes.

    Raises
    ------
    ValueError : parts overlap, a part ends after the end of the file, or the total size is wrong.
    """
    if len(numbers) % 2:  # an offset without a length
        raise ValueError("the map of a sparse file cannot be read")
    lengths = numbers[1::2]
    parts = tuple(zip(numbers[::2], lengths, strict=True))
    end = 0
    for offset, length in parts:
        if offset < end or offset + length > content_bytes:
            raise ValueError("the map of a sparse file is wrong")
        end = offset + length
    if sum(lengths) != body_bytes:
        raise ValueError("the map of a sparse file does not fit its size")
    return parts


def _decode_path(raw: bytes) -> str:
    """Return a path or link target as text. Bytes that are not UTF-8 become surrogates."""
    if len(raw) > _MAX_NAME_BYTES or b"\0" in raw:
        raise ValueError(f"a name of {len(raw)} bytes or with a zero byte, which no file can have")
    return raw.decode("utf-8", "surrogateescape")


def _join_ustar_name(header: bytes) -> bytes:
    """Return the path in a header. POSIX splits a long path into a prefix and a name."""
    name = _cut_at_zero_byte(header[_NAME])
    prefix = _cut_at_zero_byte(header[_PREFIX])
    # In GNU's format, the prefix field contains times.
    if not prefix or header[MAGIC] != b"ustar\0":
        return name
    return prefix + b"/" + name


def _cut_at_zero_byte(raw: bytes) -> bytes:
    """Return the text in a field, which ends at the first zero byte."""
    return raw.split(b"\0", 1)[0]

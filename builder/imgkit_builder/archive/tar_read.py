"""Walk over a tar once, forward only, in bounded memory: the one walk for everything that reads archives.

Python's tarfile cannot hand headers through unchanged, costs several times more per member, and believes what
an archive says. This walk keeps raw headers to pass them on, and refuses what is beyond its `TarLimits`.

The formats are POSIX ustar and pax, and GNU's, as GNU tar's manual describes them in "Tar Internals". Readers
differ in what they make of a wrong header, so this one refuses it: what parses a header raises ValueError.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from imgkit_entrypoints import files
from imgkit_entrypoints.errors import CheckFailed

_PAX, _PAX_GLOBAL, _GNU_NAME, _GNU_LINK = b"x", b"g", b"L", b"K"
_READ_BYTES = 16 << 10
_HOLE = memoryview(bytes(64 << 10))

BLOCK_BYTES = 512
REGULAR, HARD_LINK, SYMLINK, CHARACTER, BLOCK, DIRECTORY, FIFO = (b"%d" % kind for kind in range(7))
_GNU_SPARSE = b"S"
WHITEOUT, OPAQUE, AUFS = ".wh.", ".wh..wh..opq", ".wh..wh."
"""How the names of layers' marks begin: a deleted path, a folder emptied, something of AUFS's own."""
XATTR = "SCHILY.xattr."
"""Start of the names of pax records that hold extended attributes."""
CAPABILITY = "security.capability"
"""The only extended attribute that all engines store and export, so imgkit writes no other one."""

_REGULAR_KINDS = (b"0", b"\0", b"7", _GNU_SPARSE)
_BODILESS_KINDS = (HARD_LINK, SYMLINK, CHARACTER, BLOCK, DIRECTORY, FIFO)
_OCTAL = re.compile(rb"[0-7]{1,22}")
_SIZE = re.compile(rb"[0-9]{1,19}")
_TIME = re.compile(rb"(-?[0-9]{1,19})(\.[0-9]*)?")
_MOST = (1 << 63) - 1
_MAX_NAME_BYTES = 4096
"""Linux takes no longer path."""

Sparse = tuple[tuple[int, int], ...]
"""Place and size in bytes of each part of a sparse file that the archive holds, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TarLimits:
    """What a tar may ask of its reader."""

    entries: int = 5_000_000
    """Members, without their extended headers."""
    header_bytes: int = 1 << 20
    """Extended headers before one member, or its map where it is sparse."""
    hole_bytes: int = 10**11
    """Bytes that sparse files have and the archive has not, over all members."""


class TarStream:
    """Iterate over the members of a tar that comes in `chunks`; it skips a body that nobody reads.

    `jump` passes over that many bytes of `chunks`; by default, they are read.

    Raises
    ------
    CheckFailed : (while iterating) not a tar, damaged, cut short, or beyond `limits`; `where` is `name`.
    """

    def __init__(
        self,
        chunks: Iterator[bytes],
        *,
        name: str,
        jump: Callable[[int], object] | None = None,
        limits: TarLimits | None = None,
    ) -> None:
        self._chunks = chunks
        self._name = name
        self._jump = jump
        self._limits = limits or TarLimits()
        self._pending = memoryview(b"")
        self._member: Member | None = None
        self._left = 0
        self._padding = 0
        self.position = 0
        """Bytes consumed."""

    def __iter__(self) -> Iterator[Member]:
        number = hole_bytes = 0
        while True:
            self._skip()
            try:
                member = self._next()
            except ValueError as error:
                raise self._damaged(str(error)) from None
            if member is None:
                return
            number += 1
            hole_bytes += member.content_bytes - member.size_bytes
            if number > self._limits.entries:
                raise self._beyond(f"it has more than {self._limits.entries} entries")
            if hole_bytes > self._limits.hole_bytes:
                raise self._beyond(f"its sparse files have more than {self._limits.hole_bytes / 1e9:g} GB")
            self._member = member
            self._left, self._padding = member.size_bytes, -member.size_bytes % BLOCK_BYTES
            yield member

    def body(self) -> Iterator[memoryview]:
        """The current member's bytes, as they lie in the archive."""
        return self._taken(self._left)

    def padded_body(self) -> Iterator[memoryview]:
        """The current member's bytes with the padding to a whole block."""
        self._left, self._padding = self._left + self._padding, 0
        return self.body()

    def content(self) -> Iterator[memoryview]:
        """The current file's bytes: those of its body, and zeros between them where it is sparse."""
        member = self._member
        if member is None or member.sparse is None:
            yield from self.body()
            return
        yield from expanded(member.sparse, member.content_bytes, self._taken)

    def drain(self) -> None:
        """Read what follows the end: a sender fails if nobody reads its last bytes."""
        for _ in self._chunks:
            pass

    def _next(self) -> Member | None:
        """Read headers up to the next member's; None at the end of the archive."""
        pax: Mapping[str, bytes] = {}
        long: dict[bytes, bytes] = {}
        raw: list[bytes] = []
        room = self._limits.header_bytes
        while True:
            header = self._exactly(BLOCK_BYTES)
            if header == bytes(BLOCK_BYTES):
                return None
            _verify_checksum(header)
            kind = header[156:157]
            if kind not in (_PAX, _PAX_GLOBAL, _GNU_NAME, _GNU_LINK):
                before = _Before(
                    pax=pax, name=long.get(_GNU_NAME), link=long.get(_GNU_LINK), raw=b"".join(raw)
                )
                return self._mapped(_parsed_member(header, before, place=self.position))
            size = _parsed_count(header[124:136])
            room -= BLOCK_BYTES + size
            if room < 0:
                raise ValueError(f"extended headers of more than {self._limits.header_bytes} bytes")
            blocks = self._exactly(size + -size % BLOCK_BYTES)
            raw += (header, blocks)
            if kind == _PAX:
                pax = _pax_records(blocks[:size])
            elif kind != _PAX_GLOBAL:
                long[kind] = blocks[:size].split(b"\0", 1)[0]

    def _mapped(self, member: Member) -> Member:
        """Read the map of a sparse file in any of GNU tar's formats; other members stay as they are."""
        pax, header, size = member.pax, member.header, member.size_bytes
        if header[156:157] == _GNU_SPARSE:
            content = _parsed_count(header[483:495])
            parts = list(_gnu_map(header, 386, 4))
            block, at, blocks = header, 482, [header]
            while block[at]:
                if len(blocks) * BLOCK_BYTES > self._limits.header_bytes:
                    raise ValueError("the map of a sparse file is too long")
                block, at = self._exactly(BLOCK_BYTES), 504
                blocks.append(block)
                parts += _gnu_map(block, 0, 21)
            header = b"".join(blocks)
        elif "GNU.sparse.map" in pax:
            content = _parsed_decimal(pax.get("GNU.sparse.size"))
            parts = list(_text_map(pax["GNU.sparse.map"].split(b",")))
        elif "GNU.sparse.major" in pax:
            content = _parsed_decimal(pax.get("GNU.sparse.realsize"))
            raw, words = self._words(size)
            parts, header, size = list(_text_map(words)), header + raw, size - len(raw)
        elif "GNU.sparse.numblocks" in pax:
            raise ValueError("a sparse file of the outdated format 0.0")
        else:
            return member
        if member.kind != REGULAR:
            raise ValueError("a map of a sparse file before something that is not a file")
        found: Sparse = tuple(parts)
        _check_map(found, size, content)
        return dataclasses.replace(
            member, header=header, size_bytes=size, place=self.position, content_bytes=content, sparse=found
        )

    def _words(self, size: int) -> tuple[bytes, list[bytes]]:
        """The map that a body of `size` bytes begins with: its blocks, and two words for each part."""
        raw, lines, wanted = bytearray(), 0, -1
        while wanted < 0 or lines < wanted:
            if len(raw) + BLOCK_BYTES > min(size, self._limits.header_bytes):
                raise ValueError("the map of a sparse file is too long")
            block = self._exactly(BLOCK_BYTES)
            raw, lines = raw + block, lines + block.count(b"\n")
            if wanted < 0:
                wanted = 1 + 2 * _parsed_decimal(block.partition(b"\n")[0])
        return bytes(raw), bytes(raw).split(b"\n")[1:wanted]

    def _taken(self, count: int) -> Iterator[memoryview]:
        while count:
            piece = self._some(count)
            count, self._left = count - len(piece), self._left - len(piece)
            yield piece

    def _skip(self) -> None:
        beyond = self._left + self._padding - len(self._pending)
        if self._jump is not None and beyond > 0:
            self.position += self._left + self._padding
            self._pending, self._left, self._padding = memoryview(b""), 0, 0
            self._jump(beyond)
        for _ in self.padded_body():
            pass

    def _some(self, most: int) -> memoryview:
        """Return the next bytes, between 1 and `most`."""
        while not self._pending:
            chunk = next(self._chunks, None)
            if chunk is None:
                raise self._damaged("cut short")
            self._pending = memoryview(chunk)
        piece, self._pending = self._pending[:most], self._pending[most:]
        self.position += len(piece)
        return piece

    def _exactly(self, count: int) -> bytes:
        piece = self._some(count) if count else memoryview(b"")
        if len(piece) == count:
            return bytes(piece)
        found = bytearray(piece)
        while (missing := count - len(found)) > 0:
            found += self._some(missing)
        return bytes(found)

    def _damaged(self, what: str) -> CheckFailed:
        return CheckFailed(
            f"{what}, at byte {self.position}: an incomplete or damaged tar archive", where=self._name
        )

    def _beyond(self, what: str) -> CheckFailed:
        return CheckFailed(
            what, where=self._name, hint="do not use the archive if you do not know its author"
        )


def expanded(
    sparse: Sparse, content_bytes: int, take: Callable[[int], Iterator[memoryview]]
) -> Iterator[memoryview]:
    """The bytes of a sparse file; `take` yields so many of those that the archive holds."""
    at = 0
    for place, size in (*sparse, (content_bytes, 0)):
        while at < place:
            hole = _HOLE[: place - at]
            at += len(hole)
            yield hole
        yield from take(size)
        at += size


def first_file(chunks: Iterator[bytes], *, name: str, most_bytes: int) -> bytes | None:
    """Content of the first member; None where it is no file or has more than `most_bytes`."""
    stream = TarStream(chunks, name=name)
    member = next(iter(stream), None)
    if member is None or member.kind != REGULAR or member.content_bytes > most_bytes:
        return None
    return b"".join(stream.content())


def headers(path: Path, *, limits: TarLimits | None = None) -> Iterator[Member]:
    """Yield the members of the plain tar `path`, without reading their content.

    Raises
    ------
    CheckFailed : not a tar, damaged, cut short, or beyond `limits`.
    """
    with files.open_regular(path, buffering=0) as file:
        most = file.seek(0, os.SEEK_END)
        file.seek(0)
        yield from TarStream(
            iter(lambda: file.read(_READ_BYTES), b""),
            name=str(path),
            # A size that lies may be more than a seek takes. Behind the end, the file is cut short.
            jump=lambda count: file.seek(min(count, most), os.SEEK_CUR),
            limits=limits,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One member's headers, raw and parsed."""

    kind: bytes
    """Type flag; ``REGULAR`` for every regular file."""
    name: str
    """Path without a leading ``./`` or trailing slash; undecodable bytes are surrogates."""
    link: str
    size_bytes: int
    """Size of its body in the archive."""
    mtime_s: int
    mode: int
    uid: int
    gid: int
    device: tuple[int, int]
    """Major and minor number; zeros where it is no device."""
    header: bytes
    """The last 512-byte block, and the map behind it where the file is sparse."""
    extended: bytes
    """The blocks before it (pax or GNU long names), empty for most members."""
    pax: Mapping[str, bytes]
    """Records of its pax header."""
    place: int
    """Byte of the tar at which its body begins."""
    content_bytes: int
    """Size of the file: `size_bytes`, or more where it is sparse."""
    sparse: Sparse | None = None

    @property
    def xattrs(self) -> dict[str, bytes]:
        """Extended attributes by name."""
        return {key.removeprefix(XATTR): value for key, value in self.pax.items() if key.startswith(XATTR)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Before:
    """What the extended headers before a member say."""

    pax: Mapping[str, bytes] = field(default_factory=dict)
    name: bytes | None = None
    """GNU long name."""
    link: bytes | None = None
    """GNU long link."""
    raw: bytes = b""


def _parsed_number(raw: bytes) -> int:
    """Value of a header's field: octal digits, or base-256 for what they cannot hold."""
    if raw[0] in (0x80, 0xFF):
        value = int.from_bytes(raw[1:], "big", signed=False) - (raw[0] == 0xFF) * (1 << 8 * (len(raw) - 1))
    else:
        digits = raw.split(b"\0", 1)[0].strip(b" ")
        if digits and not _OCTAL.fullmatch(digits):
            raise ValueError(f"{raw!r} where a number belongs")
        value = int(digits, 8) if digits else 0
    if abs(value) > _MOST:
        raise ValueError(f"the number {raw!r}, which is out of range")
    return value


def _parsed_count(raw: bytes) -> int:
    """Value of a field that cannot be negative."""
    value = _parsed_number(raw)
    if value < 0:
        raise ValueError(f"the negative size or id {value}")
    return value


def _verify_checksum(header: bytes) -> None:
    """Compare the checksum, which counts its own field as spaces."""
    if sum(header) - sum(header[148:156]) + 8 * 0x20 != _parsed_number(header[148:156]):
        raise ValueError("a header's checksum is wrong")
    # A sparse file's header has a mark and its size there, which is no name either.
    end = 482 if header[156:157] == _GNU_SPARSE else 500
    if header[257:263] == b"ustar " and _is_name(header[345:end]):
        raise ValueError("a GNU header with a prefix, which some readers use as a folder")


def _pax_records(data: bytes) -> dict[str, bytes]:
    """Records of a pax header, ``LENGTH KEY=VALUE\\n`` each."""
    found: dict[str, bytes] = {}
    at = 0
    while at < len(data):
        digits, _, _ = data[at : at + 10].partition(b" ")
        end = at + int(digits) if _SIZE.fullmatch(digits) else 0
        if not at + len(digits) < end <= len(data):
            raise ValueError("a pax header that cannot be read")
        key, _, value = data[at + len(digits) + 1 : end - 1].partition(b"=")
        found[_decoded(key)] = value
        at = end
    return found


def _parsed_member(header: bytes, before: _Before, *, place: int) -> Member:
    """Combine a header and what came before it; the map of a sparse file is not read yet."""
    pax, kind = before.pax, header[156:157]
    if ("path" in pax and before.name is not None) or ("linkpath" in pax and before.link is not None):
        raise ValueError("a member with two names: readers disagree on which one to use")
    # Some writers state a size for links, which have no body.
    size = 0 if kind in _BODILESS_KINDS else _stated(pax, "size", header[124:136])
    device = (0, 0)
    if kind in (CHARACTER, BLOCK):
        device = _parsed_count(header[329:337]), _parsed_count(header[337:345])
    return Member(
        kind=REGULAR if kind in _REGULAR_KINDS else kind,
        name=_name(pax.get("GNU.sparse.name") or pax.get("path") or before.name or _ustar_name(header)),
        link=_checked_text(pax.get("linkpath") or before.link or header[157:257].split(b"\0", 1)[0]),
        size_bytes=size,
        mtime_s=_time(pax["mtime"]) if "mtime" in pax else _parsed_number(header[136:148]),
        mode=_parsed_count(header[100:108]),
        uid=_owner(pax, "uid", header[108:116]),
        gid=_owner(pax, "gid", header[116:124]),
        device=device,
        header=header,
        extended=before.raw,
        pax=pax,
        place=place,
        content_bytes=size,
    )


def _gnu_map(block: bytes, start: int, entries: int) -> Iterator[tuple[int, int]]:
    """Parts in a block of GNU's own sparse format."""
    for at in range(start, start + entries * 24, 24):
        if block[at : at + 24].strip(b"\0"):
            yield _parsed_count(block[at : at + 12]), _parsed_count(block[at + 12 : at + 24])


def _text_map(words: list[bytes]) -> Iterator[tuple[int, int]]:
    """Parts of a map in decimal words."""
    if len(words) % 2 or not all(_SIZE.fullmatch(word) for word in words):
        raise ValueError("the map of a sparse file cannot be read")
    values = [int(word) for word in words]
    yield from zip(values[::2], values[1::2], strict=True)


def _parsed_decimal(word: bytes | None) -> int:
    """Value of a pax record that is a size."""
    if word is None or not _SIZE.fullmatch(word) or int(word) > _MOST:
        raise ValueError(f"the size {(word or b'')[:40]!r} in a pax record")
    return int(word)


def _check_map(parts: Sparse, size_bytes: int, content_bytes: int) -> None:
    """Refuse parts that overlap, lie outside the file, or are not what the body holds."""
    end = 0
    for place, length in parts:
        if place < end or place + length > content_bytes:
            raise ValueError("the map of a sparse file is wrong")
        end = place + length
    if sum(length for _, length in parts) != size_bytes or content_bytes > _MOST:
        raise ValueError("the map of a sparse file does not fit its size")


def _decoded(raw: bytes) -> str:
    """Decode a name; undecodable bytes are surrogates."""
    return raw.decode("utf-8", "surrogateescape")


def _stated(pax: Mapping[str, bytes], key: str, field: bytes) -> int:
    return _parsed_decimal(pax[key]) if key in pax else _parsed_count(field)


def _owner(pax: Mapping[str, bytes], key: str, field: bytes) -> int:
    value = _stated(pax, key, field)
    if value >= 1 << 32:
        raise ValueError(f"the {key} {value}, which is out of range")
    return value


def _time(raw: bytes) -> int:
    match = _TIME.fullmatch(raw)
    if match is None or abs(value := int(match[1])) > _MOST:
        raise ValueError(f"the time {raw[:40]!r} in a pax record")
    return value


def _name(raw: bytes) -> str:
    return _checked_text(raw).rstrip("/").removeprefix("./")


def _checked_text(raw: bytes) -> str:
    if len(raw) > _MAX_NAME_BYTES or b"\0" in raw:
        raise ValueError(f"a name of {len(raw)} bytes or with a zero byte, which no file can have")
    return _decoded(raw)


def _ustar_name(header: bytes) -> bytes:
    name, prefix = header[:100].split(b"\0", 1)[0], header[345:500].split(b"\0", 1)[0]
    # GNU's variant of the format has times where POSIX has the prefix.
    return prefix + b"/" + name if prefix and header[257:263] == b"ustar\0" else name


def _is_name(prefix: bytes) -> bool:
    """Whether `prefix`, where GNU's headers have times and sizes, holds text."""
    return bool(prefix.strip(b"\0 01234567")) and prefix.isascii()

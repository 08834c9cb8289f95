"""Read a tar stream once, forward only, in bounded memory, and keep raw headers to pass them on.

Python's tarfile cannot hand headers through unchanged, and costs several times more per member.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from imgkit_entrypoints.errors import CheckFailed

BLOCK_BYTES = 512
END = bytes(2 * BLOCK_BYTES)
"""Two zero blocks end an archive."""

REGULAR, HARD_LINK, SYMLINK, DIRECTORY = b"0", b"1", b"2", b"5"
_REGULAR_KINDS = (b"0", b"\0", b"7")
_BODILESS_KINDS = (b"1", b"2", b"3", b"4", b"5", b"6")
_PAX, _PAX_GLOBAL, _GNU_NAME, _GNU_LINK = b"x", b"g", b"L", b"K"
_MAX_EXTENDED_BYTES = 1 << 20
_READ_BYTES = 16 << 10
_NO_PAX: Mapping[str, bytes] = types.MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One member's headers, raw and parsed."""

    kind: bytes
    """Type flag; ``REGULAR`` for every regular file."""
    name: str
    """Path without a leading ``./`` or trailing slash; undecodable bytes are surrogates."""
    link: str
    size_bytes: int
    mtime_s: int
    mode: int
    header: bytes
    """The last 512-byte block."""
    extended: bytes
    """The blocks before it (pax or GNU long names), empty for most members."""
    pax: Mapping[str, bytes]
    """Records of its pax header."""


class TarStream:
    """Iterate over the members of a tar that comes in `chunks`; it skips a body that nobody reads.

    `jump` passes over that many bytes of `chunks`; by default, they are read.

    Raises
    ------
    CheckFailed : (while iterating) not a tar, damaged, or cut short; `where` is `name`.
    """

    def __init__(
        self, chunks: Iterator[bytes], *, name: str, jump: Callable[[int], object] | None = None
    ) -> None:
        self._chunks = chunks
        self._name = name
        self._jump = jump
        self._pending = memoryview(b"")
        self._left = 0
        self._padding = 0
        self.position = 0
        """Bytes consumed."""

    def __iter__(self) -> Iterator[Member]:
        extended, pax, long = b"", _NO_PAX, {}
        while True:
            self._skip()
            header = self._exactly(BLOCK_BYTES)
            if header == END[:BLOCK_BYTES]:
                return
            self._verify(header)
            if header[257:263] == b"ustar " and _is_name(header[345:500]):
                raise self._damaged("a GNU header with a prefix, which some readers take for a folder")
            kind, size = header[156:157], self._number(header[124:136])
            if kind in (_PAX, _PAX_GLOBAL, _GNU_NAME, _GNU_LINK):
                if size > _MAX_EXTENDED_BYTES:
                    raise self._damaged(f"an extended header of {size} bytes")
                blocks = self._exactly(size + -size % BLOCK_BYTES)
                extended += header + blocks
                if kind == _PAX:
                    pax = self._pax(blocks[:size])
                elif kind != _PAX_GLOBAL:
                    long[kind] = blocks[:size].rstrip(b"\0")
                continue
            member = self._member(header, kind, size, extended=extended, pax=pax, long=long)
            extended, pax, long = b"", _NO_PAX, {}
            self._left, self._padding = member.size_bytes, -member.size_bytes % BLOCK_BYTES
            yield member

    def body(self) -> Iterator[memoryview]:
        """The current member's bytes."""
        while self._left:
            piece = self._some(self._left)
            self._left -= len(piece)
            yield piece

    def padded_body(self) -> Iterator[memoryview]:
        """The current member's bytes with the padding to a whole block."""
        self._left, self._padding = self._left + self._padding, 0
        return self.body()

    def drain(self) -> None:
        """Read what follows the end: a sender fails if nobody reads its last bytes."""
        for _ in self._chunks:
            pass

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
        parts = [bytes(piece)]
        while (missing := count - sum(map(len, parts))) > 0:
            parts.append(bytes(self._some(missing)))
        return b"".join(parts)

    def _member(
        self,
        header: bytes,
        kind: bytes,
        size: int,
        *,
        extended: bytes,
        pax: Mapping[str, bytes],
        long: Mapping[bytes, bytes],
    ) -> Member:
        name = pax.get("GNU.sparse.name") or pax.get("path") or long.get(_GNU_NAME) or _ustar_name(header)
        link = pax.get("linkpath") or long.get(_GNU_LINK) or header[157:257].split(b"\0", 1)[0]
        if ("path" in pax and _GNU_NAME in long) or ("linkpath" in pax and _GNU_LINK in long):
            raise self._damaged("a member with two names: readers differ in the one that they take")
        try:
            size = int(pax.get("size", size))
            mtime = int(float(pax["mtime"])) if "mtime" in pax else self._number(header[136:148])
        except ValueError as error:
            raise self._damaged(f"a pax record: {error}") from None
        return Member(
            kind=REGULAR if kind in _REGULAR_KINDS else kind,
            name=_text(name).rstrip("/").removeprefix("./"),
            link=_text(link),
            # Some writers state a size for links, which have no body.
            size_bytes=0 if kind in _BODILESS_KINDS else size,
            mtime_s=mtime,
            mode=self._number(header[100:108]),
            header=header,
            extended=extended,
            pax=pax,
        )

    def _pax(self, data: bytes) -> Mapping[str, bytes]:
        """Records of ``LENGTH KEY=VALUE\\n``."""
        records: dict[str, bytes] = {}
        at = 0
        while at < len(data):
            digits, _, _ = data[at : at + 10].partition(b" ")
            end = at + int(digits) if digits.isdigit() else 0
            if not at + len(digits) < end <= len(data):
                raise self._damaged("a pax header that cannot be read")
            key, _, value = data[at + len(digits) + 1 : end - 1].partition(b"=")
            records[_text(key)] = value
            at = end
        return records

    def _verify(self, header: bytes) -> None:
        # The checksum counts its own field as spaces.
        if sum(header) - sum(header[148:156]) + 8 * 0x20 != self._number(header[148:156]):
            raise self._damaged("a header's checksum is wrong")

    def _number(self, field: bytes) -> int:
        if field[0] & 0x80:  # base-256: what octal digits cannot hold
            return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
        digits = field.split(b"\0", 1)[0].strip()
        try:
            return int(digits, 8) if digits else 0
        except ValueError:
            raise self._damaged(f"{field!r} where a number belongs") from None

    def _damaged(self, what: str) -> CheckFailed:
        return CheckFailed(f"{what}, at byte {self.position}: not a whole tar archive", where=self._name)


def headers(path: Path) -> Iterator[Member]:
    """Yield the members of the plain tar `path`, without reading their content.

    Raises
    ------
    CheckFailed : not a tar, damaged, or cut short.
    """
    with path.open("rb", buffering=0) as file:
        chunks = iter(lambda: file.read(_READ_BYTES), b"")
        yield from TarStream(chunks, name=str(path), jump=lambda count: file.seek(count, 1))


def _ustar_name(header: bytes) -> bytes:
    name, prefix = header[:100].split(b"\0", 1)[0], header[345:500].split(b"\0", 1)[0]
    # GNU's variant of the format has times where POSIX has the prefix.
    return prefix + b"/" + name if prefix and header[257:263] == b"ustar\0" else name


def _is_name(prefix: bytes) -> bool:
    """Whether `prefix`, where GNU's headers have times and sizes, holds text."""
    return bool(prefix.strip(b"\0 01234567")) and prefix.isascii()


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def pax_header(records: Mapping[str, bytes]) -> bytes:
    """The blocks of a pax header that holds `records`."""
    body = b""
    for key, value in records.items():
        rest = b" " + key.encode() + b"=" + value + b"\n"
        length = len(rest) + len(str(len(rest)))
        length = len(rest) + len(str(length))
        body += str(length).encode() + rest
    return _special(_PAX, b"PaxHeaders/imgkit", body)


def gnu_link_header(target: bytes) -> bytes:
    """The blocks that give the next member a link target of any length and content."""
    return _special(_GNU_LINK, b"././@LongLink", target + b"\0")


def _special(kind: bytes, name: bytes, body: bytes) -> bytes:
    return ustar_header(name=name, kind=kind, size_bytes=len(body)) + body + bytes(-len(body) % BLOCK_BYTES)


def ustar_header(
    *, name: bytes, kind: bytes, mode: int = 0o644, size_bytes: int = 0, mtime_s: int = 0, link: bytes = b""
) -> bytes:
    """A plain header owned by root; `name` and `link` of at most 100 bytes.

    Raises
    ------
    ValueError : a name or link that does not fit.
    """
    if len(name) > 100 or len(link) > 100:
        raise ValueError(f"too long for a plain tar header: {name!r} {link!r}")
    header = bytearray(BLOCK_BYTES)
    header[: len(name)] = name
    header[100:124] = b"%07o\0%07o\0%07o\0" % (mode, 0, 0)
    header[124:148] = b"%011o\0%011o\0" % (size_bytes, mtime_s)
    header[148:156] = b" " * 8
    header[156:157] = kind
    header[157 : 157 + len(link)] = link
    header[257:265] = b"ustar\x0000"
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)

"""Walk over a tar once, forward only, in bounded memory: the one walk for everything that reads archives.

Python's tarfile cannot hand headers through unchanged, costs several times more per member, and believes what
an archive says. This walk keeps raw headers to pass them on, and refuses what is beyond its `TarLimits`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.archive import tar_header
from imgkit_builder.archive.tar_header import BLOCK_BYTES, GNU_SPARSE, REGULAR, Before, Member, Sparse
from imgkit_entrypoints import files
from imgkit_entrypoints.errors import CheckFailed

END = bytes(2 * BLOCK_BYTES)
"""Two zero blocks end an archive."""

_PAX, _PAX_GLOBAL, _GNU_NAME, _GNU_LINK = b"x", b"g", b"L", b"K"
_READ_BYTES = 16 << 10
_HOLE = memoryview(bytes(64 << 10))


@dataclass(frozen=True, slots=True, kw_only=True)
class TarLimits:
    """What a tar may ask of its reader."""

    entries: int = 5_000_000
    """Members, without their extended headers."""
    header_bytes: int = 1 << 20
    """Extended headers before one member, or its map where it is sparse."""
    hole_bytes: int = 10**11
    """Bytes that sparse files have and the archive has not, over all members."""
    hint: str = "do not use the archive if you do not know its author"
    """What to do for an archive that needs more, with the option that raises the limit."""


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
            if header == END[:BLOCK_BYTES]:
                return None
            tar_header.verify(header)
            kind = header[156:157]
            if kind not in (_PAX, _PAX_GLOBAL, _GNU_NAME, _GNU_LINK):
                before = Before(
                    pax=pax, name=long.get(_GNU_NAME), link=long.get(_GNU_LINK), raw=b"".join(raw)
                )
                return self._mapped(tar_header.member(header, before, place=self.position))
            size = tar_header.count(header[124:136])
            room -= BLOCK_BYTES + size
            if room < 0:
                raise ValueError(f"extended headers of more than {self._limits.header_bytes} bytes")
            blocks = self._exactly(size + -size % BLOCK_BYTES)
            raw += (header, blocks)
            if kind == _PAX:
                pax = tar_header.records(blocks[:size])
            elif kind != _PAX_GLOBAL:
                long[kind] = blocks[:size].split(b"\0", 1)[0]

    def _mapped(self, member: Member) -> Member:
        """Read the map of a sparse file in any of GNU tar's formats; other members stay as they are."""
        pax, header, size = member.pax, member.header, member.size_bytes
        if header[156:157] == GNU_SPARSE:
            content = tar_header.count(header[483:495])
            parts = list(tar_header.gnu_map(header, 386, 4))
            block, at, blocks = header, 482, [header]
            while block[at]:
                if len(blocks) * BLOCK_BYTES > self._limits.header_bytes:
                    raise ValueError("the map of a sparse file is too long")
                block, at = self._exactly(BLOCK_BYTES), 504
                blocks.append(block)
                parts += tar_header.gnu_map(block, 0, 21)
            header = b"".join(blocks)
        elif "GNU.sparse.map" in pax:
            content = tar_header.decimal(pax.get("GNU.sparse.size"))
            parts = list(tar_header.text_map(pax["GNU.sparse.map"].split(b",")))
        elif "GNU.sparse.major" in pax:
            content = tar_header.decimal(pax.get("GNU.sparse.realsize"))
            raw, words = self._words(size)
            parts, header, size = list(tar_header.text_map(words)), header + raw, size - len(raw)
        elif "GNU.sparse.numblocks" in pax:
            raise ValueError("a sparse file of the outdated format 0.0")
        else:
            return member
        if member.kind != REGULAR:
            raise ValueError("a map of a sparse file before something that is no file")
        found: Sparse = tuple(parts)
        tar_header.check_map(found, size, content)
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
                wanted = 1 + 2 * tar_header.decimal(block.partition(b"\n")[0])
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
        return CheckFailed(f"{what}, at byte {self.position}: not a whole tar archive", where=self._name)

    def _beyond(self, what: str) -> CheckFailed:
        return CheckFailed(what, where=self._name, hint=self._limits.hint)


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


def pax_header(records: Mapping[str, bytes]) -> bytes:
    """The blocks of a pax header that holds `records`."""
    body = b""
    for key, value in records.items():
        rest = b" " + key.encode() + b"=" + value + b"\n"
        length = len(rest) + len(str(len(rest)))
        length = len(rest) + len(str(length))
        body += str(length).encode() + rest
    return _special(_PAX, b"PaxHeaders/imgkit", body)


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

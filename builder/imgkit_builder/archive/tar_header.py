"""Parse what a member's headers say: numbers, pax records, maps of sparse files. Every fault is a ValueError.

The formats are POSIX ustar and pax, and GNU's, as GNU tar's manual describes them in "Tar Internals". Readers
differ in what they make of a wrong header, so this one refuses it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

BLOCK_BYTES = 512
REGULAR, HARD_LINK, SYMLINK, CHARACTER, BLOCK, DIRECTORY, FIFO = (b"%d" % kind for kind in range(7))
GNU_SPARSE = b"S"
WHITEOUT, OPAQUE, AUFS = ".wh.", ".wh..wh..opq", ".wh..wh."
"""How the names of layers' marks begin: a deleted path, a folder emptied, something of AUFS's own."""
XATTR = "SCHILY.xattr."
"""Start of the names of pax records that hold extended attributes."""
CAPABILITY = "security.capability"
"""The only extended attribute that all engines store and export, so imgkit writes no other one."""

_REGULAR_KINDS = (b"0", b"\0", b"7", GNU_SPARSE)
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
class Before:
    """What the extended headers before a member say."""

    pax: Mapping[str, bytes] = field(default_factory=dict)
    name: bytes | None = None
    """GNU long name."""
    link: bytes | None = None
    """GNU long link."""
    raw: bytes = b""


def number(raw: bytes) -> int:
    """Value of a header's field: octal digits, or base-256 for what they cannot hold."""
    if raw[0] in (0x80, 0xFF):
        value = int.from_bytes(raw[1:], "big", signed=False) - (raw[0] == 0xFF) * (1 << 8 * (len(raw) - 1))
    else:
        digits = raw.split(b"\0", 1)[0].strip(b" ")
        if digits and not _OCTAL.fullmatch(digits):
            raise ValueError(f"{raw!r} where a number belongs")
        value = int(digits, 8) if digits else 0
    if abs(value) > _MOST:
        raise ValueError(f"the number {raw!r}, which no file has")
    return value


def count(raw: bytes) -> int:
    """Value of a field that cannot be negative."""
    value = number(raw)
    if value < 0:
        raise ValueError(f"the negative size or id {value}")
    return value


def verify(header: bytes) -> None:
    """Compare the checksum, which counts its own field as spaces."""
    if sum(header) - sum(header[148:156]) + 8 * 0x20 != number(header[148:156]):
        raise ValueError("a header's checksum is wrong")
    # A sparse file's header has a mark and its size there, which is no name either.
    end = 482 if header[156:157] == GNU_SPARSE else 500
    if header[257:263] == b"ustar " and _is_name(header[345:end]):
        raise ValueError("a GNU header with a prefix, which some readers take for a folder")


def records(data: bytes) -> dict[str, bytes]:
    """Records of a pax header, ``LENGTH KEY=VALUE\\n`` each."""
    found: dict[str, bytes] = {}
    at = 0
    while at < len(data):
        digits, _, _ = data[at : at + 10].partition(b" ")
        end = at + int(digits) if _SIZE.fullmatch(digits) else 0
        if not at + len(digits) < end <= len(data):
            raise ValueError("a pax header that cannot be read")
        key, _, value = data[at + len(digits) + 1 : end - 1].partition(b"=")
        found[text(key)] = value
        at = end
    return found


def member(header: bytes, before: Before, *, place: int) -> Member:
    """Combine a header and what came before it; the map of a sparse file is not read yet."""
    pax, kind = before.pax, header[156:157]
    if ("path" in pax and before.name is not None) or ("linkpath" in pax and before.link is not None):
        raise ValueError("a member with two names: readers differ in the one that they take")
    # Some writers state a size for links, which have no body.
    size = 0 if kind in _BODILESS_KINDS else _stated(pax, "size", header[124:136])
    device = (0, 0)
    if kind in (CHARACTER, BLOCK):
        device = count(header[329:337]), count(header[337:345])
    return Member(
        kind=REGULAR if kind in _REGULAR_KINDS else kind,
        name=_name(pax.get("GNU.sparse.name") or pax.get("path") or before.name or _ustar_name(header)),
        link=_text(pax.get("linkpath") or before.link or header[157:257].split(b"\0", 1)[0]),
        size_bytes=size,
        mtime_s=_time(pax["mtime"]) if "mtime" in pax else number(header[136:148]),
        mode=count(header[100:108]),
        uid=_owner(pax, "uid", header[108:116]),
        gid=_owner(pax, "gid", header[116:124]),
        device=device,
        header=header,
        extended=before.raw,
        pax=pax,
        place=place,
        content_bytes=size,
    )


def gnu_map(block: bytes, start: int, entries: int) -> Iterator[tuple[int, int]]:
    """Parts in a block of GNU's own sparse format."""
    for at in range(start, start + entries * 24, 24):
        if block[at : at + 24].strip(b"\0"):
            yield count(block[at : at + 12]), count(block[at + 12 : at + 24])


def text_map(words: list[bytes]) -> Iterator[tuple[int, int]]:
    """Parts of a map in decimal words."""
    if len(words) % 2 or not all(_SIZE.fullmatch(word) for word in words):
        raise ValueError("the map of a sparse file cannot be read")
    values = [int(word) for word in words]
    yield from zip(values[::2], values[1::2], strict=True)


def decimal(word: bytes | None) -> int:
    """Value of a pax record that is a size."""
    if word is None or not _SIZE.fullmatch(word) or int(word) > _MOST:
        raise ValueError(f"the size {(word or b'')[:40]!r} in a pax record")
    return int(word)


def check_map(parts: Sparse, size_bytes: int, content_bytes: int) -> None:
    """Refuse parts that overlap, lie outside the file, or are not what the body holds."""
    end = 0
    for place, length in parts:
        if place < end or place + length > content_bytes:
            raise ValueError("the map of a sparse file is wrong")
        end = place + length
    if sum(length for _, length in parts) != size_bytes or content_bytes > _MOST:
        raise ValueError("the map of a sparse file does not fit its size")


def text(raw: bytes) -> str:
    """Decode a name; undecodable bytes are surrogates."""
    return raw.decode("utf-8", "surrogateescape")


def _stated(pax: Mapping[str, bytes], key: str, field: bytes) -> int:
    return decimal(pax[key]) if key in pax else count(field)


def _owner(pax: Mapping[str, bytes], key: str, field: bytes) -> int:
    value = _stated(pax, key, field)
    if value >= 1 << 32:
        raise ValueError(f"the {key} {value}, which no kernel has")
    return value


def _time(raw: bytes) -> int:
    match = _TIME.fullmatch(raw)
    if match is None or abs(value := int(match[1])) > _MOST:
        raise ValueError(f"the time {raw[:40]!r} in a pax record")
    return value


def _name(raw: bytes) -> str:
    return _text(raw).rstrip("/").removeprefix("./")


def _text(raw: bytes) -> str:
    if len(raw) > _MAX_NAME_BYTES or b"\0" in raw:
        raise ValueError(f"a name of {len(raw)} bytes or with a zero byte, which no file can have")
    return text(raw)


def _ustar_name(header: bytes) -> bytes:
    name, prefix = header[:100].split(b"\0", 1)[0], header[345:500].split(b"\0", 1)[0]
    # GNU's variant of the format has times where POSIX has the prefix.
    return prefix + b"/" + name if prefix and header[257:263] == b"ustar\0" else name


def _is_name(prefix: bytes) -> bool:
    """Whether `prefix`, where GNU's headers have times and sizes, holds text."""
    return bool(prefix.strip(b"\0 01234567")) and prefix.isascii()

"""Write the headers of a tar that mksquashfs reads, and plain ones.

GNU's form holds names of any length and content. mksquashfs 4.5.1 cuts link targets in a pax header, so that
one holds a file's capability only.
"""

from __future__ import annotations

from collections.abc import Mapping

from imgkit_builder.archive.tar_read import BLOCK, BLOCK_BYTES, CAPABILITY, CHARACTER, XATTR

END = bytes(2 * BLOCK_BYTES)
"""Two zero blocks end an archive."""
_MOST_TIME_S = (1 << 32) - 1
"""A squashfs has 32 bits for it, and mksquashfs refuses a negative one."""
_NAME_BYTES = 100
_PAX, _GNU_NAME, _GNU_LINK = b"x", b"L", b"K"


def header(
    path: str,
    kind: bytes,
    *,
    mode: int = 0o644,
    uid: int = 0,
    gid: int = 0,
    mtime_s: int = 0,
    size_bytes: int = 0,
    link: str = "",
    device: tuple[int, int] = (0, 0),
    xattrs: Mapping[str, bytes] | None = None,
) -> bytes:
    """The blocks before the content of `path`; `kind` is a type flag, `mode` the permission bits.

    Of `xattrs` they hold `CAPABILITY`, and no other.
    """
    name, target = _raw(path), _raw(link)
    before = b""
    if xattrs and CAPABILITY in xattrs:
        before = pax_header({f"{XATTR}{CAPABILITY}": xattrs[CAPABILITY]})
    if len(name) > _NAME_BYTES:
        before += _long(_GNU_NAME, name)
    if len(target) > _NAME_BYTES:
        before += _long(_GNU_LINK, target)
    major, minor = device if kind in (CHARACTER, BLOCK) else (0, 0)
    block = b"".join(
        (
            name[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0"),
            b"%07o\0" % (mode & 0o7777),
            _number(uid, 8),
            _number(gid, 8),
            _number(size_bytes, 12),
            b"%011o\0        " % min(max(mtime_s, 0), _MOST_TIME_S),
            kind,
            target[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0"),
            b"ustar  \0".ljust(72, b"\0"),
            _number(major, 8),
            _number(minor, 8),
            bytes(167),
        )
    )
    return before + block[:148] + b"%06o\0 " % sum(block) + block[156:]


def _long(kind: bytes, raw: bytes) -> bytes:
    """A header that gives the next one a name or link target of any length."""
    size = len(raw) + 1
    return header("././@LongLink", kind, size_bytes=size) + raw + b"\0" + padding(size)


def padding(size_bytes: int) -> bytes:
    """The zeros that fill the last block of a file."""
    return bytes(-size_bytes % BLOCK_BYTES)


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _number(value: int, width: int) -> bytes:
    """Octal digits, or base-256 for what they cannot hold."""
    if value < 8 ** (width - 1):
        return b"%0*o\0" % (width - 1, value)
    return b"\x80" + value.to_bytes(width - 1, "big")


def pax_header(records: Mapping[str, bytes]) -> bytes:
    """The blocks of a pax header that holds `records`."""
    body = b""
    for key, value in records.items():
        rest = b" " + key.encode() + b"=" + value + b"\n"
        length = len(rest) + len(str(len(rest)))
        length = len(rest) + len(str(length))
        body += str(length).encode() + rest
    return _extended(_PAX, b"PaxHeaders/imgkit", body)


def _extended(kind: bytes, name: bytes, body: bytes) -> bytes:
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

"""Write the headers of a tar, in the format of GNU for mksquashfs or in the plain format of POSIX.

The GNU format supports names of any length and content. mksquashfs 4.5.1 shortens link targets in a pax
header. So a pax header is used only for the capability of a file.
"""

from __future__ import annotations

from collections.abc import Mapping

from imgkit_builder.archive.tar_read import (
    BLOCK,
    BLOCK_BYTES,
    CAPABILITY,
    CHARACTER,
    CHECKSUM_AS_SPACES,
    XATTR,
)

END = bytes(2 * BLOCK_BYTES)
"""Two zero blocks end an archive."""
_MOST_TIME_S = (1 << 32) - 1
"""The latest time that a squashfs can store, in 32 bits. mksquashfs refuses a negative time."""
_NAME_BYTES = 100
"""Size of the field for a name or a link target. A longer text is written in an extended header before."""
_OWNER_NAMES_BYTES = 2 * 32
"""Size of the fields for the names of user and group, which remain empty."""
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
    """Return the header blocks of a tar for the file `path`. The content of the file follows them.

    `kind` is a type flag such as ``tar_read.SYMLINK``, and `mode` contains the permission bits. Of the
    extended attributes `xattrs`, only `CAPABILITY` is written. A long path, a long `link` and a capability
    are written in extended headers before the main header.
    """
    # A name in an image may be any bytes. Those that are not UTF-8 were decoded to surrogates.
    name = path.encode("utf-8", "surrogateescape")
    target = link.encode("utf-8", "surrogateescape")
    # Extended headers change only the header that follows them, so they are written before it.
    extended = b""
    if xattrs and CAPABILITY in xattrs:
        extended = pax_header({f"{XATTR}{CAPABILITY}": xattrs[CAPABILITY]})
    if len(name) > _NAME_BYTES:
        extended += _make_long_text_header(_GNU_NAME, name)
    if len(target) > _NAME_BYTES:
        extended += _make_long_text_header(_GNU_LINK, target)
    # These fields are written one after the other, so their order and widths are those of the format. The
    # numbers are octal.
    fields = b"%07o\0" % (mode & 0o7777)
    fields += _number(uid, 8)
    fields += _number(gid, 8)
    fields += _number(size_bytes, 12)
    fields += b"%011o\0" % min(max(mtime_s, 0), _MOST_TIME_S)
    if kind not in (CHARACTER, BLOCK):
        device = (0, 0)
    device_fields = b"".join(_number(number, 8) for number in device)
    # These magic bytes declare GNU's format, in which `_number` may store large numbers in binary.
    return extended + _make_header_block(name, fields, kind, target, b"ustar  \0", device_fields)


def _make_long_text_header(kind: bytes, text: bytes) -> bytes:
    """Return an extended header in GNU's format whose content is `text`, a long name or link target."""
    content = text + b"\0"
    header_block = header("././@LongLink", kind, size_bytes=len(content))
    return header_block + content + padding(len(content))


def ustar_header(
    *, name: bytes, kind: bytes, mode: int = 0o644, size_bytes: int = 0, link: bytes = b""
) -> bytes:
    """Return a header in the POSIX format for a file that belongs to root and has the time 0 (1970).

    The fixed owner and time make the bytes of the archive reproducible.

    Raises
    ------
    ValueError : `name` or `link` has more than 100 bytes.
    """
    if len(name) > _NAME_BYTES or len(link) > _NAME_BYTES:
        raise ValueError(f"too long for a plain tar header: {name!r} {link!r}")
    uid = gid = mtime_s = 0
    fields = b"%07o\0%07o\0%07o\0%011o\0%011o\0" % (mode, uid, gid, size_bytes, mtime_s)
    return _make_header_block(name, fields, kind, link, b"ustar\x0000", b"")


def pax_header(records: Mapping[str, bytes]) -> bytes:
    """Return the blocks of a pax header: an extended header with one line ``LENGTH KEY=VALUE\\n`` per record.

    LENGTH is the size of the whole line, including its own digits and the line break: ``9 uid=10\\n``.
    """
    body = b""
    for key, value in records.items():
        record = b" " + key.encode() + b"=" + value + b"\n"
        # The length includes its own digits, so it is computed in a loop. For example, 98 other bytes and 2
        # digits make 100. But 100 has 3 digits, so the length is 101.
        length = 0
        while length != len(record) + len(str(length)):
            length = len(record) + len(str(length))
        body += str(length).encode() + record
    header_block = ustar_header(name=b"PaxHeaders/imgkit", kind=_PAX, size_bytes=len(body))
    return header_block + body + padding(len(body))


def padding(size_bytes: int) -> bytes:
    """Return the zeros that fill the last block after a file: 412 zeros after a file of 100 bytes."""
    return bytes(-size_bytes % BLOCK_BYTES)


def _make_header_block(
    name: bytes, fields: bytes, kind: bytes, link: bytes, magic: bytes, device: bytes
) -> bytes:
    """Return a header block of 512 bytes, including its checksum.

    `fields` are the bytes of mode, uid, gid, size and time, and `device` those of the major and minor number.
    In the block, the checksum is between `fields` and `kind`.
    """
    before_checksum = name[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0") + fields
    after_checksum = kind + link[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
    after_checksum += magic + bytes(_OWNER_NAMES_BYTES) + device
    checksum = sum(before_checksum) + sum(after_checksum) + CHECKSUM_AS_SPACES
    block = before_checksum + b"%06o\0 " % checksum + after_checksum
    return block.ljust(BLOCK_BYTES, b"\0")


def _number(value: int, width: int) -> bytes:
    """Return a field of `width` bytes with `value`: octal digits, or binary if it has too many digits."""
    # The first byte 0x80 marks a binary number (GNU calls this base-256).
    if value < 8 ** (width - 1):
        return b"%0*o\0" % (width - 1, value)
    return b"\x80" + value.to_bytes(width - 1, "big")

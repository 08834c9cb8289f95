"""Tar archives in memory, and the chunks in which a stream brings them."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence

TarEntry = tuple[tarfile.TarInfo, bytes]
"""Header and content."""
TarMember = tuple[str, bytes, str]
"""Name, type, and target of a link."""


def tar_entry(
    name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, *, mode: int = 0o755, **fields: object
) -> TarEntry:
    """Return a member of a tar; `fields` are those of its header, such as ``linkname`` and ``uid``."""
    info = tarfile.TarInfo(name)
    info.type, info.size, info.mode = kind, len(data), mode
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def tar_of_entries(entries: Iterable[TarEntry], *, form: int = tarfile.PAX_FORMAT) -> bytes:
    """Return a tar with these members, in order; names may be any bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form, errors="surrogateescape") as tar:
        for info, data in entries:
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def tar_of_files(
    files: Mapping[str, bytes], links: Mapping[str, str] | None = None, *, mode: int = 0o644
) -> bytes:
    """Return a tar of `links`, which are symlinks, and of `files`."""
    entries = [
        tar_entry(name, kind=tarfile.SYMTYPE, mode=mode, linkname=target)
        for name, target in (links or {}).items()
    ]
    entries += [tar_entry(name, data, mode=mode) for name, data in files.items()]
    return tar_of_entries(entries)


def tar_of_links(members: Sequence[TarMember], *, form: int = tarfile.PAX_FORMAT) -> bytes:
    """Return a tar of members without content: links, folders, devices and empty files."""
    entries = [tar_entry(name, kind=kind, mode=0o644, linkname=target) for name, kind, target in members]
    return tar_of_entries(entries, form=form)


def chunks(data: bytes, size: int = 1 << 15) -> Iterator[bytes]:
    """Cut `data` into chunks of `size` bytes, as a pipe or an engine sends it."""
    for start in range(0, len(data), size):
        yield data[start : start + size]


def changed_header(header: bytes, *changes: tuple[slice, bytes]) -> bytes:
    """Return a header with other fields, and with a right checksum."""
    changed = bytearray(header)
    for field, value in changes:
        changed[field] = value
    changed[148:156] = b" " * 8
    changed[148:156] = b"%06o\0 " % sum(changed)
    return bytes(changed)

"""Tar archives in memory, and the chunks in which a stream brings them."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence

TarMember = tuple[str, bytes, str]
"""Name, type, and target of a link."""


def tar_of_entries(
    entries: Iterable[tuple[tarfile.TarInfo, bytes]], *, form: int = tarfile.PAX_FORMAT
) -> bytes:
    """Return a tar with these headers and contents, in order; names may be any bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form, errors="surrogateescape") as tar:
        for info, data in entries:
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def tar_of_files(files: Mapping[str, bytes], links: Mapping[str, str] | None = None) -> bytes:
    """Return a tar of `links`, which are symlinks, and of `files`."""
    entries = []
    for name, target in (links or {}).items():
        link = tarfile.TarInfo(name)
        link.type, link.linkname = tarfile.SYMTYPE, target
        entries.append((link, b""))
    for name, data in files.items():
        info = tarfile.TarInfo(name)
        info.size = len(data)
        entries.append((info, data))
    return tar_of_entries(entries)


def tar_of_links(members: Sequence[TarMember], *, form: int = tarfile.PAX_FORMAT) -> bytes:
    """Return a tar of members without content: links, folders, devices and empty files."""
    entries = []
    for name, kind, target in members:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, target
        entries.append((info, b""))
    return tar_of_entries(entries, form=form)


def chunks(data: bytes, size: int = 1 << 15) -> Iterator[bytes]:
    """Cut `data` into chunks of `size` bytes, as a pipe or an engine sends it."""
    for start in range(0, len(data), size):
        yield data[start : start + size]

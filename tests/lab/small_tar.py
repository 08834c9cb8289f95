"""Tar archives in memory, for tests of what reads them."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Mapping


def tar_of_entries(entries: Iterable[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    """Return a tar with these headers and contents, in order; names may be any bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT, errors="surrogateescape") as tar:
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

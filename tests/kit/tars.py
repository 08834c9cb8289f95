"""Small tars in memory, and the chunks in which a stream brings them."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator, Mapping, Sequence

TarMember = tuple[str, bytes, str]
"""Name, type, and target of a link."""


def tar_of_files(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def tar_of_links(members: Sequence[TarMember], *, form: int = tarfile.PAX_FORMAT) -> bytes:
    """Return a tar of members without content: links, folders, devices and empty files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
        for name, kind, target in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            tar.addfile(info)
    return buffer.getvalue()


def chunks(data: bytes, size: int = 1 << 15) -> Iterator[bytes]:
    """Cut `data` into chunks of `size` bytes, as a pipe or an engine sends it."""
    for start in range(0, len(data), size):
        yield data[start : start + size]

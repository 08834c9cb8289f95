"""Free space: what a conversion needs, compared with the disks before it starts."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from shutil import disk_usage

from imgkit_builder.archive import compressed
from imgkit_builder.archive.stored import StoredImage
from imgkit_builder.base.sizes import size_text
from imgkit_builder.sif import stream
from imgkit_builder.sif.options import Archive, EngineImage, OciFolder, Piped, Source
from imgkit_builder.sif.plan import Means
from imgkit_builder.sif.squasher import PACKED_SHARE, Squasher
from imgkit_entrypoints.errors import CheckFailed

_LAYOUT_SHARE = 3.3
"""Peak of the temporary files per image byte where a runtime builds: layers, its copy, files and squashfs."""
UNPACKED_FACTOR = 3.0
"""Guessed ratio of a compressed archive."""


def temporary_share(squasher: Squasher | None) -> float:
    """Bytes of temporary files per byte of the image; None is a runtime that builds."""
    return squasher.disk_share if squasher else _LAYOUT_SHARE


def source_bytes(source: Source) -> int | None:
    """Size of the uncompressed image, estimated if it is compressed; None if unknown."""
    if isinstance(source, EngineImage):
        return source.size_bytes
    if isinstance(source, OciFolder):
        return sum(path.stat().st_size for path in source.path.glob("blobs/sha256/*"))
    if isinstance(source, Archive):
        size = source.path.stat().st_size
        return size if compressed.kind(source.path) == "none" else int(size * UNPACKED_FACTOR)
    if isinstance(source, Piped):
        return _rest_of(source)
    return None


def _rest_of(source: Piped) -> int | None:
    """Bytes that standard input still has where it is a file, as in ``imgkit sif - < X.tar``."""
    try:
        about = os.fstat(source.stream.fileno())
    except (OSError, ValueError):
        return None
    return about.st_size if stat.S_ISREG(about.st_mode) else None


def room_for_layers(image: StoredImage, target: Path, base: Path, squasher: Squasher | None) -> int:
    """Bytes of `base` that plain layers may take; 0 where compressed ones would probably not fit."""
    plain = image.stored_bytes + int(image.packed_bytes * (UNPACKED_FACTOR - 1))
    share = temporary_share(squasher)
    if base.stat().st_dev == target.parent.stat().st_dev:
        share += PACKED_SHARE
    room = disk_usage(base).free - int(plain * share)
    return room if room >= image.packed_bytes * UNPACKED_FACTOR else 0


def check(source: Source, target: Path, base: Path, means: Means) -> None:
    """Raise CheckFailed if the disk of `target`, or of `base` for temporary files, has too little space."""
    size = source_bytes(source)
    if size is None:
        return
    spool = size if means.squasher and stream.is_spooled(source, means.way) else 0
    need(size, int(size * temporary_share(means.squasher)) + spool, target, base)


def need(size: int, temporary: int, target: Path, base: Path) -> None:
    """Raise CheckFailed if an image of `size` bytes, with `temporary` ones in `base`, has no space."""
    packed = int(size * PACKED_SHARE)
    needs = {base: temporary}
    if base.stat().st_dev == target.parent.stat().st_dev:
        needs[base] += packed
    else:
        needs[target.parent] = packed
    for folder, needed in needs.items():
        free = disk_usage(folder).free
        if free < needed:
            raise CheckFailed(
                f"{size_text(free)} are free, an image of {size_text(size)} needs {size_text(needed)}",
                where=str(folder),
                hint="--tmpdir DIR on a larger disk" if folder == base else "-o FILE.sif on a larger disk",
            )

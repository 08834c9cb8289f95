"""Write a tree to a squashfs: the same tree gives the same bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from imgkit_builder.archive.tar_read import (
    BLOCK,
    CAPABILITY,
    CHARACTER,
    DIRECTORY,
    FIFO,
    HARD_LINK,
    REGULAR,
    SYMLINK,
)
from imgkit_builder.delta.tree import Kind, TreeEntry
from imgkit_builder.sif import conversion, image, squash
from imgkit_builder.sif.conversion import Compression, ConversionJob, Options
from imgkit_builder.sif.entries import ImageEntry
from imgkit_builder.sif.image import SifImage
from imgkit_entrypoints.system import CompressionChoice

_TYPES: Mapping[Kind, bytes] = {
    "file": REGULAR,
    "dir": DIRECTORY,
    "symlink": SYMLINK,
    "char": CHARACTER,
    "block": BLOCK,
    "fifo": FIFO,
    "whiteout": CHARACTER,  # 0/0, as overlayfs has them
}


def compression_of(base: SifImage, options: Options) -> Compression:
    """The compression of `base`: a machine that mounts one mounts the other.

    Raises
    ------
    ToolMissing : nothing here squashes.
    """
    found = image.squashfs(base)
    wanted: CompressionChoice = "auto" if found and found.compressor == "zstd" else "gzip"
    return conversion.choose_compression(None, wanted, zstd_error=squash.choose().zstd_error)


def make(
    job: ConversionJob,
    target: Path,
    entries: Iterable[tuple[str, TreeEntry | None]],
    *,
    created: str = "",
    offset: int = 0,
) -> None:
    """Write `entries` to byte `offset` of `target`, folders first; None is a whiteout.

    `created` is the time of the squashfs and its root, in RFC 3339 (default: 1970).
    """
    squash.write(image_entries(entries), job, target, created=created, offset=offset)


def image_entries(entries: Iterable[tuple[str, TreeEntry | None]]) -> Iterator[ImageEntry]:
    """Yield `entries` as a squasher takes them; several names of one file become hard links."""
    first: dict[tuple[int, int], str] = {}
    for path, entry in entries:
        if entry is None:
            yield ImageEntry(names=(path,), kind=CHARACTER, mode=0)
            continue
        if entry.group is not None:
            key = id(entry.layer), entry.group
            if key in first:
                yield ImageEntry(names=(path,), kind=HARD_LINK, link=first[key])
                continue
            first[key] = path
        kind = _TYPES[entry.kind]
        yield ImageEntry(
            names=(path,),
            kind=kind,
            mode=entry.mode,
            uid=entry.uid,
            gid=entry.gid,
            mtime_s=entry.mtime_s,
            link=entry.link,
            device=entry.device,
            xattrs={name: value for name, value in entry.xattrs.items() if name == CAPABILITY},
            size_bytes=entry.size_bytes if kind == REGULAR else 0,
            content=entry.layer.content(entry) if kind == REGULAR else (),
        )

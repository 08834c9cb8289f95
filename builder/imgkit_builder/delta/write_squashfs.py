"""Write a tree to a squashfs: the same tree gives the same bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from imgkit_builder.archive import tar_write
from imgkit_builder.archive.tar_read import BLOCK, CHARACTER, DIRECTORY, FIFO, HARD_LINK, REGULAR, SYMLINK
from imgkit_builder.delta.tree import Kind, TreeEntry
from imgkit_builder.sif import conversion, image, squash, squashers
from imgkit_builder.sif.conversion import Compression, ConversionJob, Options
from imgkit_builder.sif.image import SifImage
from imgkit_builder.sif.squash import Squash
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
    return conversion.choose_compression(None, wanted, lacks_zstd=squashers.choose().lacks_zstd)


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
    with squash.writing(job, target, created=created, offset=offset) as made:
        put(made, entries)


def put(made: Squash, entries: Iterable[tuple[str, TreeEntry | None]]) -> None:
    """Write `entries`; several names of one file become hard links."""
    first: dict[tuple[int, int], str] = {}
    for path, entry in entries:
        if entry is None:
            made.entry(CHARACTER, tar_write.header(path, CHARACTER, mode=0))
            continue
        kind = _TYPES[entry.kind]
        if entry.group is not None:
            key = id(entry.layer), entry.group
            if key in first:
                made.entry(kind, tar_write.header(path, HARD_LINK, link=first[key]))
                continue
            first[key] = path
        made.entry(kind, _header(path, kind, entry))
        if kind == REGULAR:
            made.content(entry.layer.content(entry), entry.size_bytes)


def _header(path: str, kind: bytes, entry: TreeEntry) -> bytes:
    return tar_write.header(
        path,
        kind,
        mode=entry.mode,
        uid=entry.uid,
        gid=entry.gid,
        mtime_s=entry.mtime_s,
        size_bytes=entry.size_bytes,
        link=entry.link,
        device=entry.device,
        xattrs=entry.xattrs,
    )

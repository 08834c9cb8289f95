"""Write a tree to a squashfs: the same tree gives the same bytes."""

from __future__ import annotations

import tarfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from imgkit_builder.archive.tarstream import END, pax_header
from imgkit_builder.delta.tree import Kind, TreeEntry
from imgkit_builder.image.config import epoch
from imgkit_builder.sif import compression, image, mksquashfs, root_inode
from imgkit_builder.sif.compression import Compression
from imgkit_builder.sif.conversion_job import ConversionJob
from imgkit_builder.sif.image import SifImage
from imgkit_builder.sif.options import CompressionChoice
from imgkit_builder.sif.runtime import RuntimeTool

_TYPES: Mapping[Kind, bytes] = {
    "file": tarfile.REGTYPE,
    "dir": tarfile.DIRTYPE,
    "symlink": tarfile.SYMTYPE,
    "char": tarfile.CHRTYPE,
    "block": tarfile.BLKTYPE,
    "fifo": tarfile.FIFOTYPE,
    "whiteout": tarfile.CHRTYPE,  # 0/0, as overlayfs has them
}


def compression_of(base: SifImage, tool: RuntimeTool) -> Compression:
    """The compression of `base`: a machine that mounts one mounts the other."""
    found = image.squashfs(base)
    wanted: CompressionChoice = "auto" if found and found.compressor == "zstd" else "gzip"
    return compression.choose(tool.capabilities, wanted, direct=True)


def make(
    job: ConversionJob, target: Path, entries: Iterable[tuple[str, TreeEntry | None]], *, created: str = ""
) -> None:
    """Write `entries` to `target`, folders first; None is a whiteout.

    `created` is the time of the squashfs and its root, in RFC 3339 (default: 1970).
    """
    argv = mksquashfs.squash_argv(target, job.compression.options, created)
    job.log.write(f"$ ... | {' '.join(argv)}\n")
    with mksquashfs.squashing(argv, log=job.log, on_line=job.clock.line) as sink:
        for chunk in tar(entries):
            sink.write(chunk)
    root_inode.set_root(target, epoch(created))


def tar(entries: Iterable[tuple[str, TreeEntry | None]]) -> Iterator[bytes]:
    """Yield the tar that mksquashfs reads; several names of one file become hard links."""
    first: dict[tuple[int, int], str] = {}
    for path, entry in entries:
        if entry is None:
            yield _header(path, "whiteout")
            continue
        if entry.group is not None:
            key = id(entry.layer), entry.group
            if key in first:
                yield _header(path, entry.kind, entry, hard_link=first[key])
                continue
            first[key] = path
        if entry.xattrs:
            yield pax_header({f"SCHILY.xattr.{name}": value for name, value in sorted(entry.xattrs.items())})
        yield _header(path, entry.kind, entry)
        if entry.kind == "file":
            yield from entry.layer.content(entry)
            yield bytes(-entry.size_bytes % tarfile.BLOCKSIZE)
    yield END


def _header(path: str, kind: Kind, entry: TreeEntry | None = None, *, hard_link: str = "") -> bytes:
    info = tarfile.TarInfo(path)
    info.type, info.mode = _TYPES[kind], 0
    if entry is not None:
        info.mode, info.uid, info.gid, info.mtime = entry.mode, entry.uid, entry.gid, entry.mtime_s
        info.size, info.linkname = entry.size_bytes, entry.link
        info.devmajor, info.devminor = entry.device
    if hard_link:
        info.type, info.linkname, info.size = tarfile.LNKTYPE, hard_link, 0
    # GNU's form holds any name; mksquashfs 4.5.1 cuts link targets in a pax header.
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")

"""Write the engine's stream to a checked archive on disk, in one pass. Standard library only.

Memory stays small for any image size: each chunk is hashed, compressed and written as it arrives.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from imgkit_builder.archive import sidecar
from imgkit_builder.archive.compressed import Compress
from imgkit_builder.archive.sidecar import Sidecar
from imgkit_builder.base import files, process
from imgkit_builder.base.progress import SILENT, Reporter
from imgkit_builder.base.sizes import size_text
from imgkit_entrypoints.errors import ToolFailed, ToolMissing, UsageError

SUFFIXES: dict[Compress, str] = {"none": ".tar", "gzip": ".tar.gz", "zstd": ".tar.zst"}

ZSTD_HINT = "install it (apt-get install zstd, module load zstd), or use --compression gzip"

_BLOCK_BYTES = 256 << 10
"""Plain bytes of one gzip member: small enough that readers unpack several side by side."""
_FLUSH_BYTES = 64 << 20
"""What is written before it is flushed to the disk in the background."""
_MAX_WORKERS = 8
"""More threads than these wait for the one that writes the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """A complete archive on disk."""

    path: Path
    sha256: str
    size_bytes: int
    compress: Compress


def save_archive(
    chunks: Iterable[bytes],
    *,
    target: Path,
    compress: Compress = "none",
    expected_bytes: int | None = None,
    report: Reporter = SILENT,
    describe: Callable[[SavedFile], Sidecar] | None = None,
) -> SavedFile:
    """Write a tar stream to `target`, and return its digest. The file is complete, or it is absent.

    Parameters
    ----------
    chunks : raises if the stream is cut short; then nothing is kept.
    expected_bytes : the size of the uncompressed stream, for the free-space check and the time left.
    describe : returns the content of the two files beside the archive. An interrupted save leaves them so
    that ``imgkit verify`` calls them incomplete.

    Raises
    ------
    UsageError : the target's folder is absent or has too little space; raised before the first chunk is read.
    ToolMissing : `compress` is ``zstd``, which is not on PATH.
    ToolFailed : no space left on the way, or ``zstd`` failed; nothing is left.
    """
    check_target(target, compress=compress, expected_bytes=expected_bytes)
    remove_leftovers(target)
    digest = hashlib.sha256()
    size_bytes = 0
    # Progress counts plain bytes, whose total is known; what is written is smaller.
    reported = _report_progress(chunks, target=target, expected_bytes=expected_bytes, report=report)
    try:
        with contextlib.ExitStack() as sidecars, files.replace_file(target) as stream:
            _lock(stream)
            for chunk in _write_chunks(_compress_chunks(reported, compress), stream):
                digest.update(chunk)
                size_bytes += len(chunk)
            saved = SavedFile(
                path=target, sha256=digest.hexdigest(), size_bytes=size_bytes, compress=compress
            )
            if describe:
                files.sync_file(stream)  # before the old checksum goes: what can fail has happened then
                # Around the renaming of the archive, which the other block does at its end.
                sidecars.enter_context(sidecar.replace_around(describe(saved), target))
    except OSError as error:  # errors of the stream itself are not OSErrors: the engine's are typed
        if error.errno in files.FULL:
            raise ToolFailed(
                f"no space left after {size_bytes / 1e6:.0f} MB: {error.strerror}; removed the partial file",
                where=str(target),
                hint="choose another path with -o, or save with --compression zstd",
            ) from error
        raise ToolFailed(f"cannot write: {error.strerror or error}", where=str(target)) from error
    return saved


def check_target(target: Path, *, compress: Compress, expected_bytes: int | None) -> None:
    """Refuse at once a save that would fail after minutes. Raises as `save_archive` does."""
    if "\n" in target.name or "\\" in target.name:
        raise UsageError("sha256sum cannot list a name with a newline or backslash", where=str(target))
    if target.is_dir():
        raise UsageError("the target is a folder", where=str(target), hint=f"-o {target / 'image.tar'}")
    folder = target.parent
    if not folder.is_dir():
        raise UsageError("the folder does not exist", where=str(folder), hint=f"mkdir -p {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError("the folder is not writable", where=str(folder), hint="-o ELSEWHERE.tar")
    if compress == "zstd" and shutil.which("zstd") is None:
        raise ToolMissing("the program 'zstd' is not on PATH", hint=ZSTD_HINT)
    if expected_bytes is not None:
        _refuse_full_disk(folder, compress, expected_bytes)


def _refuse_full_disk(folder: Path, compress: Compress, plain_bytes: int) -> None:
    """Raise UsageError if `folder` has no room for an archive of `plain_bytes` before compression."""
    needed_bytes = plain_bytes
    hint = "choose another path with -o"
    if compress == "none":
        hint += ", or --compression zstd"
    else:
        needed_bytes //= 2  # PyTorch images compress to 0.3-0.45 of their size; half leaves a margin
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        message = f"{size_text(needed_bytes)} needed, {size_text(free_bytes)} free"
        raise UsageError(message, where=str(folder), hint=hint)


def remove_leftovers(target: Path) -> None:
    """Remove files of killed runs for the same target. A run that still writes keeps its file."""
    for leftover in files.temporary_files(target):
        # Open for writing: NFS gives an exclusive lock to no other descriptor.
        with contextlib.suppress(OSError), files.open_own(leftover, os.O_RDWR) as stream:
            # A living run holds the lock; where the file system has no locks the file is left alone.
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            leftover.unlink()


def _lock(stream: BinaryIO) -> None:
    """Mark the file as that of a living run, for `remove_leftovers` of another one."""
    with contextlib.suppress(OSError):
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _report_progress(
    chunks: Iterable[bytes], *, target: Path, expected_bytes: int | None, report: Reporter
) -> Iterator[bytes]:
    """Yield `chunks` unchanged, and report progress. The stage begins with the first of them."""
    done_bytes = 0
    for chunk in chunks:
        if not done_bytes:
            report.stage(f"save {target.name}")
        done_bytes += len(chunk)
        total_bytes = None
        if expected_bytes:
            # A tar is a little larger than its layers: never report more than 100 %.
            total_bytes = max(expected_bytes, done_bytes)
        report.advance(done_bytes, total_bytes)
        yield chunk


def _write_chunks(chunks: Iterator[bytes], stream: BinaryIO) -> Iterator[bytes]:
    """Write `chunks` to `stream`, yield them, and flush to the disk in a thread.

    The fsync at the end then has little left to do.

    Raises
    ------
    OSError : the disk has failed. Linux reports that once, so the last fsync would succeed.
    """
    flush: Future[None] | None = None
    unflushed_bytes = 0
    with ThreadPoolExecutor(1) as pool:
        for chunk in chunks:
            stream.write(chunk)
            unflushed_bytes += len(chunk)
            # One flush at a time.
            if unflushed_bytes >= _FLUSH_BYTES and (flush is None or flush.done()):
                if flush:
                    flush.result()  # raises its error
                flush = pool.submit(os.fdatasync, stream.fileno())
                unflushed_bytes = 0
            yield chunk
    if flush:
        flush.result()


def _compress_chunks(chunks: Iterator[bytes], compress: Compress) -> Iterator[bytes]:
    if compress == "gzip":
        return _gzip_chunks(chunks)
    if compress == "zstd":
        # One worker (250 MB/s, 44 MiB) outruns the engine's stream; each further one takes 13 MiB more.
        return process.filter_through(["zstd", "-q", "-3", "-T1", "-c"], chunks, hint=ZSTD_HINT)
    return chunks


def _gzip_chunks(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield gzip members of 256 KiB each, made side by side. Any gzip reader takes them as one file."""
    workers = min(process.count_processors(), _MAX_WORKERS)
    with ThreadPoolExecutor(workers) as pool:
        jobs: deque[Future[bytes]] = deque()
        for block in _equal_blocks(chunks):
            jobs.append(pool.submit(_make_member, block))
            # One more than there are threads, so that none waits for the reader.
            if len(jobs) > workers:
                yield jobs.popleft().result()
        for job in jobs:
            yield job.result()


def _make_member(block: bytes) -> bytes:
    packer = zlib.compressobj(level=1, wbits=31)  # 31: with the header and trailer of gzip
    return packer.compress(block) + packer.flush()


def _equal_blocks(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield blocks of equal size, so that the bytes do not depend on how the engine cut its stream."""
    block = bytearray()
    for chunk in chunks:
        block += chunk
        while len(block) >= _BLOCK_BYTES:
            yield bytes(block[:_BLOCK_BYTES])
            del block[:_BLOCK_BYTES]
    yield bytes(block)

"""Write the stream of ``docker save`` to an archive with a checksum, in one pass.

Each chunk is hashed, compressed and written when it arrives, so the memory does not depend on the size of the
image. The module needs only the standard library.
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
"""Uncompressed size of one gzip member. It is small, so that readers can unpack members in parallel."""
_FLUSH_BYTES = 64 << 20
"""Number of written bytes after which a thread flushes the file to disk."""
_MAX_WORKERS = 8
"""Maximum number of threads. More threads would only wait for the thread that writes the file."""


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
    """Write a tar stream to `target`, and return its digest.

    The archive is written to a temporary file, and renamed to `target` when it is complete. After an error,
    `target` is unchanged.

    Parameters
    ----------
    chunks : the stream. It must raise an exception if the engine ends it too early.
    expected_bytes : the size of the uncompressed stream, for the check of free space and the progress
        display.
    describe : a function that returns the content of the two files beside the archive, ``.sha256`` and
        ``.manifest.json``. If a save is interrupted while these files are replaced, ``imgkit verify`` reports
        that the archive is incomplete.

    Raises
    ------
    UsageError : the folder of the target does not exist or has too little space. This error is raised before
        the first chunk is read.
    ToolMissing : `compress` is ``zstd``, but the program ``zstd`` is not on PATH.
    ToolFailed : the disk is full, or ``zstd`` failed. The partial file is removed.
    """
    check_target(target, compress=compress, expected_bytes=expected_bytes)
    remove_leftovers(target)
    digest = hashlib.sha256()
    size_bytes = 0
    # The progress display counts uncompressed bytes, because their total is known.
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
                # If the disk is full, fail here, while the old archive and its checksum are still unchanged.
                files.sync_file(stream)
                # The order matters. Entering `replace_around` now removes the old checksum. At the end of
                # the block, `replace_file` renames the archive first. Then `sidecars` ends, and
                # `replace_around` writes the new checksum.
                sidecars.enter_context(sidecar.replace_around(describe(saved), target))
    except OSError as error:  # an error of the disk, as errors of the engine's stream have another type
        if error.errno in files.FULL:
            raise ToolFailed(
                f"no space left after {size_bytes / 1e6:.0f} MB: {error.strerror}; removed the partial file",
                where=str(target),
                hint="choose another path with -o, or save with --compression zstd",
            ) from error
        raise ToolFailed(f"cannot write: {error.strerror or error}", where=str(target)) from error
    return saved


def check_target(target: Path, *, compress: Compress, expected_bytes: int | None) -> None:
    """Raise an error if a save to `target` would fail later, after minutes of work.

    Parameters
    ----------
    expected_bytes : the size of the uncompressed archive, or None if it is unknown. Then the free space is
        not checked.

    Raises
    ------
    UsageError : the folder is missing or not writable, has too little space, or the name of `target` is that
        of a folder or one that sha256sum cannot list.
    ToolMissing : the archive is to be compressed by the program ``zstd``, which is not on PATH.
    """
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
    """Raise UsageError if the disk of `folder` has too little space for an archive.

    `plain_bytes` is the size of the archive before compression.
    """
    needed_bytes = plain_bytes
    hint = "choose another path with -o"
    if compress == "none":
        hint += ", or --compression zstd"
    else:
        needed_bytes //= 2  # PyTorch images compress to 0.3-0.45 of their size. The rest is a margin.
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        message = f"{size_text(needed_bytes)} needed, {size_text(free_bytes)} free"
        raise UsageError(message, where=str(folder), hint=hint)


def remove_leftovers(target: Path) -> None:
    """Remove temporary files for `target` that killed runs have left.

    A run that is still writing holds a lock on its file (see `_lock`). Such a file is not removed.
    """
    for leftover in files.temporary_files(target):
        # The file is opened for writing because NFS requires that for an exclusive lock.
        with contextlib.suppress(OSError), files.open_own(leftover, os.O_RDWR) as stream:
            # `flock` fails if another run holds the lock, or if the file system has no locks. Then the file
            # is not removed.
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            leftover.unlink()


def _lock(stream: BinaryIO) -> None:
    """Lock the file while this run writes it, so that `remove_leftovers` of another run leaves it alone."""
    # Some file systems have no locks. Then the file is written without one.
    with contextlib.suppress(OSError):
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _report_progress(
    chunks: Iterable[bytes], *, target: Path, expected_bytes: int | None, report: Reporter
) -> Iterator[bytes]:
    """Yield `chunks` unchanged, and report the number of bytes to the progress display.

    The display shows "save" only after the first chunk, because the engine may need a while to prepare its
    stream.
    """
    done_bytes = 0
    for chunk in chunks:
        if done_bytes == 0:
            report.stage(f"save {target.name}")
        done_bytes += len(chunk)
        if expected_bytes:
            # A tar is slightly larger than its layers. `max` prevents a display of more than 100 %.
            report.advance(done_bytes, max(expected_bytes, done_bytes))
        else:
            report.advance(done_bytes, None)
        yield chunk


def _write_chunks(chunks: Iterator[bytes], stream: BinaryIO) -> Iterator[bytes]:
    """Write `chunks` to `stream`, and yield them. Meanwhile, a thread flushes the written bytes to disk.

    So the caller's fsync after the last chunk does not take long. A chunk is written only when the caller
    asks for it, so the caller must read to the end.

    Raises
    ------
    OSError : the disk has failed. Linux reports a failed write only once. If a flush of the thread fails, the
        fsync at the end would still succeed, so the thread's error must be raised here.
    """
    flush: Future[None] | None = None
    unflushed_bytes = 0
    with ThreadPoolExecutor(1) as pool:
        for chunk in chunks:
            stream.write(chunk)
            unflushed_bytes += len(chunk)
            # A new flush begins only after the previous flush has ended.
            can_flush = flush is None or flush.done()
            if can_flush and unflushed_bytes >= _FLUSH_BYTES:
                if flush:
                    flush.result()  # raises the error of the previous flush, if it failed
                flush = pool.submit(os.fdatasync, stream.fileno())
                unflushed_bytes = 0
            yield chunk
    if flush:
        flush.result()  # also the last flush may have failed


def _compress_chunks(chunks: Iterator[bytes], compress: Compress) -> Iterator[bytes]:
    if compress == "gzip":
        return _gzip_chunks(chunks)
    if compress == "zstd":
        # One zstd thread (250 MB/s, 44 MiB) is faster than the engine's stream. Each additional thread needs
        # 13 MiB more.
        return process.filter_through(["zstd", "-q", "-3", "-T1", "-c"], chunks, hint=ZSTD_HINT)
    return chunks


def _gzip_chunks(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Compress `chunks` in several threads, and yield the parts of a gzip file in order.

    Each part is a gzip member: a complete gzip stream for 256 KiB of uncompressed bytes. Every gzip reader
    accepts members that follow each other as one file. The module `compressed` unpacks them in several
    threads.
    """
    workers = min(process.count_processors(), _MAX_WORKERS)
    with ThreadPoolExecutor(workers) as pool:
        jobs: deque[Future[bytes]] = deque()
        for block in _cut_into_blocks(chunks):
            jobs.append(pool.submit(_compress_block, block))
            # Keep one block more than there are threads, so that no thread waits for new data.
            if len(jobs) > workers:
                yield jobs.popleft().result()
        for job in jobs:
            yield job.result()


def _compress_block(block: bytes) -> bytes:
    """Compress `block` to one gzip member."""
    packer = zlib.compressobj(level=1, wbits=31)  # 31: with the header and trailer of gzip
    return packer.compress(block) + packer.flush()


def _cut_into_blocks(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the bytes of `chunks` in blocks of 256 KiB. The last block may be shorter.

    The engine divides its stream into chunks of random sizes. Blocks of a fixed size make sure that equal
    streams give equal gzip files.
    """
    buffer = bytearray()
    for chunk in chunks:
        buffer += chunk
        while len(buffer) >= _BLOCK_BYTES:
            yield bytes(buffer[:_BLOCK_BYTES])
            del buffer[:_BLOCK_BYTES]
    # The last block may be empty, so that an empty stream still gives a valid gzip file.
    yield bytes(buffer)

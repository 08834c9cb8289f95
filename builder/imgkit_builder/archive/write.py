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
"""Bytes after which a thread flushes what was written to the disk."""
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
    """Write a tar stream to `target`, and return its digest.

    The archive is renamed to `target` when it is complete. After an error, `target` is what it was before.

    Parameters
    ----------
    chunks : the stream. It raises an exception if the engine ends it too early.
    expected_bytes : the size of the uncompressed stream, for the free-space check and the time left.
    describe : returns the content of the two files beside the archive, ``.sha256`` and ``.manifest.json``. If
        a save is interrupted while they are replaced, ``imgkit verify`` calls the archive incomplete.

    Raises
    ------
    UsageError : the target's folder is absent or has too little space; raised before the first chunk is read.
    ToolMissing : `compress` is ``zstd``, which is not on PATH.
    ToolFailed : the disk is full, or ``zstd`` failed. The partial file is removed.
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
                # A full disk shows here, while the old archive and its checksum are still in place.
                files.sync_file(stream)
                # `replace_file` renames the archive when it is left. `sidecars` was entered before it and is
                # left after it, so the checksum is removed before the renaming and written after it.
                sidecars.enter_context(sidecar.replace_around(describe(saved), target))
    except OSError as error:  # of the disk: an error of the engine's stream has another type
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

    The reasons are a missing folder, too little space, a name that sha256sum cannot list, or no ``zstd``.

    Raises
    ------
    UsageError, ToolMissing : as in `save_archive`.
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
        needed_bytes //= 2  # PyTorch images compress to 0.3-0.45 of their size; half leaves a margin
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        message = f"{size_text(needed_bytes)} needed, {size_text(free_bytes)} free"
        raise UsageError(message, where=str(folder), hint=hint)


def remove_leftovers(target: Path) -> None:
    """Remove temporary files that killed runs have left for the same target.

    A run that still writes has locked its file (see `_lock`), and keeps it.
    """
    for leftover in files.temporary_files(target):
        # Open for writing: NFS grants an exclusive lock only then.
        with contextlib.suppress(OSError), files.open_own(leftover, os.O_RDWR) as stream:
            # It fails if a living run holds the lock, or if the file system has no locks: the file stays.
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            leftover.unlink()


def _lock(stream: BinaryIO) -> None:
    """Lock the file while this run writes it, so that `remove_leftovers` of another run leaves it alone."""
    with contextlib.suppress(OSError):
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _report_progress(
    chunks: Iterable[bytes], *, target: Path, expected_bytes: int | None, report: Reporter
) -> Iterator[bytes]:
    """Yield `chunks` unchanged, and report the number of bytes.

    The display says "save" only from the first chunk on: the engine may prepare its stream for a while.
    """
    done_bytes = 0
    for chunk in chunks:
        if done_bytes == 0:
            report.stage(f"save {target.name}")
        done_bytes += len(chunk)
        if expected_bytes:
            # A tar is a little larger than its layers: never report more than 100 %.
            report.advance(done_bytes, max(expected_bytes, done_bytes))
        else:
            report.advance(done_bytes, None)
        yield chunk


def _write_chunks(chunks: Iterator[bytes], stream: BinaryIO) -> Iterator[bytes]:
    """Write `chunks` to `stream` and yield them. A thread flushes what was written to the disk meanwhile.

    The fsync after the last chunk then has little left to do.

    Raises
    ------
    OSError : the disk has failed. Linux reports a failed write to one flush only, so an error of the thread's
        flush must be raised here: the fsync at the end would succeed.
    """
    flush: Future[None] | None = None
    unflushed_bytes = 0
    with ThreadPoolExecutor(1) as pool:
        for chunk in chunks:
            stream.write(chunk)
            unflushed_bytes += len(chunk)
            # A new flush begins only when the one before has ended.
            can_flush = flush is None or flush.done()
            if can_flush and unflushed_bytes >= _FLUSH_BYTES:
                if flush:
                    flush.result()  # raises the error of the flush before, if it failed
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
    """Compress `chunks` in several threads, and yield the parts of a gzip file in order.

    Each part is a gzip member, a complete gzip stream of 256 KiB of plain bytes. Any gzip reader takes
    members that follow each other as one file, and `compressed` unpacks them in several threads.
    """
    workers = min(process.count_processors(), _MAX_WORKERS)
    with ThreadPoolExecutor(workers) as pool:
        jobs: deque[Future[bytes]] = deque()
        for block in _equal_blocks(chunks):
            jobs.append(pool.submit(_gzip_member, block))
            # One more block than there are threads, so that no thread waits for new data.
            if len(jobs) > workers:
                yield jobs.popleft().result()
        for job in jobs:
            yield job.result()


def _gzip_member(block: bytes) -> bytes:
    """Return `block` as one gzip member."""
    packer = zlib.compressobj(level=1, wbits=31)  # 31: with the header and trailer of gzip
    return packer.compress(block) + packer.flush()


def _equal_blocks(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the bytes of `chunks` in blocks of 256 KiB; the last block may be shorter.

    The engine cuts its stream at random places. With equal blocks, equal streams give equal gzip files.
    """
    buffer = bytearray()
    for chunk in chunks:
        buffer += chunk
        while len(buffer) >= _BLOCK_BYTES:
            yield bytes(buffer[:_BLOCK_BYTES])
            del buffer[:_BLOCK_BYTES]
    yield bytes(buffer)

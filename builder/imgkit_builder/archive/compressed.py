"""Plain bytes of compressed files: gzip by the standard library, zstd by the ``zstd`` program."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import threading
import zlib
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from imgkit_builder.base import process
from imgkit_entrypoints import files
from imgkit_entrypoints.errors import CheckFailed, ToolFailed, ToolMissing, UsageError

Compress = Literal["none", "gzip", "zstd"]

CHUNK_BYTES = 1 << 20
_PIECE_BYTES = 128 << 10
"""Size of zlib's input per call. zlib copies the input that it has not used yet, so small pieces take a tenth
less time."""
_AHEAD_BYTES = 4 << 20
"""Bytes that a thread unpacks before it hands them over, so that threads seldom wait for each other."""
UNPACKED_FACTOR = 100
"""An archive may unpack to at most this many times its size: images reach 5, a hostile archive 1000."""
UNPACKED_LEAST_BYTES = 10**9
"""Any archive may unpack to this size, so that a small image with many zeros is not refused."""
_MAX_WORKERS = 8
"""More threads than these wait for the one that reads the file."""
_MAGICS: tuple[tuple[bytes, Compress], ...] = ((b"\x1f\x8b", "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"))
_MEMBER_START = b"\x1f\x8b\x08\0\0\0\0\0"
"""The start of a gzip member without flags and time, as `imgkit save` writes them."""
_REFUSED_MAGICS = ((b"BZh", "bzip2"), (b"\xfd7zXZ\0", "xz"))


@dataclass(slots=True)
class Allowance:
    """Counts the bytes to which an archive of `packed_bytes` unpacks, and refuses too many.

    A hostile archive of some MB could unpack to terabytes and fill the disk. The default limit is
    `UNPACKED_FACTOR` times the size of the archive, but at least `UNPACKED_LEAST_BYTES`.
    """

    packed_bytes: int
    name: str
    limit_bytes: int | None = None
    """Replaces the default limit."""
    unpacked_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add_unpacked(self, count: int) -> None:
        """Add `count` to the unpacked bytes. Several threads may call this.

        The bytes of a compressed layer in a compressed archive count twice, once for each unpacking.

        Raises
        ------
        CheckFailed : the sum is above the limit.
        """
        with self._lock:
            self.unpacked_bytes += count
        limit = self.limit_bytes
        if limit is None:
            limit = max(UNPACKED_LEAST_BYTES, UNPACKED_FACTOR * self.packed_bytes)
        if self.unpacked_bytes > limit:
            raise CheckFailed(
                f"its {self.packed_bytes / 1e6:.1f} MB unpack to more than {limit / 1e9:g} GB: it may "
                "be a decompression bomb (--unpack-limit GB allows more)",
                where=self.name,
                hint="raise the limit only if you know its author",
            )


def detect_compression(path: Path) -> Compress:
    """Return how the file `path` is compressed, which its first bytes tell. ``"none"`` stands for plain.

    Raises
    ------
    UsageError : the file is compressed with bzip2 or xz. imgkit does not read them, since no container
        runtime writes them.
    """
    with files.open_regular(path) as stream:
        start = stream.read(8)
    for magic, program in _REFUSED_MAGICS:
        if start.startswith(magic):
            raise UsageError(
                f"the file is compressed with {program}; imgkit reads plain, gzip and zstd files",
                where=str(path),
                hint=f"{program} -dk {path}   (then pass the unpacked file)",
            )
    return compression_of(start)


def compression_of(start: bytes) -> Compress:
    """Return how a stream that begins with `start`, at least 4 bytes, is compressed."""
    for magic, compress in _MAGICS:
        if start.startswith(magic):
            return compress
    return "none"


def read_plain(path: Path, *, allowance: Allowance) -> Generator[bytes, None, None]:
    """Yield the unpacked bytes of `path`, at most 1 MiB at a time.

    Raises
    ------
    CheckFailed : the file is damaged or cut short, or unpacks to more than `allowance`.
    ToolMissing : it is compressed with zstd, and there is no program ``zstd``.
    """
    with files.open_regular(path, buffering=0) as stream:
        raw = iter(lambda: stream.read(CHUNK_BYTES), b"")
        compress = detect_compression(path)
        yield from unpack_chunks(raw, compress, name=str(path), allowance=allowance)


def unpack_chunks(
    chunks: Iterable[bytes], compress: Compress, *, name: str, allowance: Allowance | None = None
) -> Generator[bytes, None, None]:
    """Yield the unpacked bytes of a stream that is compressed with `compress`.

    `name` is the stream's, for messages. `allowance` limits the number of unpacked bytes. Raises as
    `read_plain` does.
    """
    if compress == "none":
        yield from chunks
        return
    unpack = _gunzip if compress == "gzip" else _unzstd
    for plain in unpack(chunks, name):
        if allowance is not None:
            allowance.add_unpacked(len(plain))
        if plain:
            yield plain


class Gunzip:
    """Unpacks a gzip stream piece by piece, in bounded memory.

    A gzip stream consists of members, each of which could be a .gz file of its own.

    Raises
    ------
    CheckFailed : damaged or cut short.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._inflate = zlib.decompressobj(wbits=31)  # 31: with the header and trailer of gzip

    @property
    def is_between_members(self) -> bool:
        """Whether the bytes fed so far end exactly where a member ends."""
        return self._inflate.eof

    def feed(self, data: bytes | memoryview) -> Iterator[bytes]:
        """Unpack `data`, the next bytes of the stream, and yield the result, at most 1 MiB at a time."""
        for start in range(0, len(data), _PIECE_BYTES):
            yield from self._feed_piece(bytes(data[start : start + _PIECE_BYTES]))

    def _feed_piece(self, packed: bytes) -> Iterator[bytes]:
        """Unpack `packed`, which may have the end of a member and the start of the next."""
        while packed:
            if self._inflate.eof:
                # A member has ended. Concatenated files have several; zeros behind the last are padding.
                packed = packed.lstrip(b"\0")
                if not packed:
                    return
                self._inflate = zlib.decompressobj(wbits=31)
            try:
                plain = self._inflate.decompress(packed, CHUNK_BYTES)
            except zlib.error as error:
                raise self._error(f"is damaged: {error}") from error
            packed = self._inflate.unconsumed_tail
            if self._inflate.eof:
                packed = self._inflate.unused_data
            if plain:
                yield plain

    def finish(self) -> bytes:
        """Return the last unpacked bytes. Raise CheckFailed if the stream was cut short."""
        try:
            plain = self._inflate.flush()
        except zlib.error as error:
            raise self._error(f"is damaged: {error}") from error
        if not self._inflate.eof:
            raise self._error("is cut short")
        return plain

    def _error(self, problem: str) -> CheckFailed:
        return CheckFailed(f"the gzip data {problem}", where=self._name, hint="copy the file again")


def _gunzip(chunks: Iterable[bytes], name: str) -> Iterator[bytes]:
    """Yield the unpacked bytes of a gzip stream.

    A stream of many small members, as `imgkit save` writes, is unpacked by several threads, since members do
    not depend on each other. Other streams are unpacked by one.
    """
    later_chunks = iter(chunks)
    first_chunk = next(later_chunks, b"")
    all_chunks = itertools.chain([first_chunk], later_chunks)
    # The first chunk tells: gzip and pigz write one member per file, so no second member begins in it.
    if first_chunk.find(_MEMBER_START, 1) > 0:
        return _unpack_members(Gunzip(name), all_chunks)
    return _unpack_ahead(Gunzip(name), all_chunks)


def _unpack_ahead(gunzip: Gunzip, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the unpacked bytes of `chunks`. A thread unpacks the next bytes while the caller uses the last.

    That helps because zlib, writes and digests let other threads run. The caller's own thread reads `chunks`:
    reading from a pipe may take for ever, and Ctrl-C would not interrupt another thread.
    """
    previous_batch: list[bytes] = []
    # One thread: each part of a stream can be unpacked only after the part before it.
    with ThreadPoolExecutor(1) as pool:
        for chunk in chunks:
            plain = gunzip.feed(chunk)
            has_more = True
            while has_more:
                job = pool.submit(_unpack_batch, plain)
                # While the caller uses these bytes, the thread unpacks the next ones.
                yield from previous_batch
                previous_batch, has_more = job.result()
    yield from previous_batch
    yield gunzip.finish()


def _unpack_batch(plain: Iterator[bytes]) -> tuple[list[bytes], bool]:
    """Return the next 4 MiB of `plain`, and whether there may be more.

    Handing over a batch makes the threads wait for each other, so smaller batches would cost time.
    """
    batch = []
    batch_bytes = 0
    for chunk in plain:
        batch.append(chunk)
        batch_bytes += len(chunk)
        if batch_bytes >= _AHEAD_BYTES:
            return batch, True
    return batch, False


def _unpack_members(gunzip: Gunzip, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the unpacked bytes of a stream of many small members, which several threads unpack.

    The stream is cut wherever the bytes look like the start of a member. They may do so by chance, in the
    middle of a member. So the result of a thread is used only if the data before it ended there with a
    member; `gunzip` unpacks all other pieces in order.
    """
    is_between_members = True
    for piece, plain in _inflate_in_threads(chunks):
        if is_between_members and plain is not None:
            yield plain
        else:
            yield from gunzip.feed(piece)
            is_between_members = gunzip.is_between_members
    # Where the last member was complete, there is nothing left to check.
    if not is_between_members:
        yield gunzip.finish()


_InflatedPiece = tuple[bytes, bytes | None]
"""A piece of a gzip stream, and its unpacked bytes. These are None if it is not exactly one small member."""


def _inflate_in_threads(chunks: Iterator[bytes]) -> Iterator[_InflatedPiece]:
    """Cut a gzip stream where members seem to begin, and yield each piece with its unpacked bytes.

    Several threads unpack; the pieces keep their order.
    """
    workers = min(process.count_processors(), _MAX_WORKERS)
    jobs: deque[Future[list[_InflatedPiece]]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for pieces in _split_at_members(chunks):
            jobs.append(pool.submit(_inflate_members, pieces))
            # One more job than there are threads, so that no thread waits for new data.
            if len(jobs) > workers:
                yield from jobs.popleft().result()
        for job in jobs:
            yield from job.result()


def _split_at_members(chunks: Iterator[bytes]) -> Iterator[list[bytes]]:
    """Cut a gzip stream where members seem to begin, and yield the pieces in groups, one per chunk or so.

    If no member begins within 1 MiB, it is cut there, too, so that memory stays bounded.
    """
    pending = b""
    for chunk in chunks:
        pending += chunk
        pieces = []
        start = 0
        next_start = pending.find(_MEMBER_START, 1)
        while next_start > 0:
            pieces.append(pending[start:next_start])
            start = next_start
            next_start = pending.find(_MEMBER_START, start + 1)
        pending = pending[start:]
        if len(pending) > CHUNK_BYTES:
            # Keep the last bytes: they may be the first half of the mark at which the next member begins.
            cut = len(pending) - len(_MEMBER_START)
            pieces.append(pending[:cut])
            pending = pending[cut:]
        if pieces:
            yield pieces
    if pending:
        yield [pending]


def _inflate_members(pieces: list[bytes]) -> list[_InflatedPiece]:
    """Return each of `pieces` with its unpacked bytes.

    A call unpacks 4 MiB at most; further pieces give None, and the caller unpacks them in bounded memory.
    """
    budget_bytes = _AHEAD_BYTES
    inflated = []
    for piece in pieces:
        plain = None
        if budget_bytes > 0:
            plain = _inflate_member(piece, min(budget_bytes, CHUNK_BYTES))
        if plain is not None:
            budget_bytes -= len(plain)
        inflated.append((piece, plain))
    return inflated


def _inflate_member(piece: bytes, most_bytes: int) -> bytes | None:
    """Return the unpacked bytes of `piece`. Return None if it is not one member of at most `most_bytes`."""
    inflate = zlib.decompressobj(wbits=31)
    with contextlib.suppress(zlib.error):
        plain = inflate.decompress(piece, most_bytes)
        if inflate.eof and not inflate.unused_data:
            return plain
    return None


def _unzstd(chunks: Iterable[bytes], name: str) -> Iterator[bytes]:
    """Yield the unpacked bytes of a zstd stream. The program ``zstd`` unpacks it: zlib cannot.

    Raises
    ------
    ToolMissing : there is no program ``zstd``.
    CheckFailed : the data is damaged.
    """
    if shutil.which("zstd") is None:
        raise ToolMissing(
            "the data is compressed with zstd, and the program zstd is not on PATH",
            where=name,
            hint="module load zstd, or unpack the file where zstd is installed: zstd -d FILE.tar.zst",
        )
    try:
        yield from process.filter_through(["zstd", "-dcq"], chunks)
    except ToolFailed as error:
        raise CheckFailed(
            f"the zstd data is damaged: {error.what}", where=name, hint="copy the file again"
        ) from error

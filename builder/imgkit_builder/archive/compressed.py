"""Unpack compressed files: gzip with the standard library, zstd with the program ``zstd``."""

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
"""Number of bytes passed to zlib per call. zlib copies the input that it has not used yet, so small pieces
save a tenth of the time."""
_AHEAD_BYTES = 4 << 20
"""Number of bytes that a thread unpacks before it passes them on. A large number avoids that threads wait."""
UNPACKED_FACTOR = 100
"""Largest allowed ratio of unpacked to packed size. Images reach 5, a hostile archive can reach 1000."""
UNPACKED_LEAST_BYTES = 10**9
"""Every archive may unpack to this size, so that a small image with many zeros is not refused."""
_MAX_WORKERS = 8
"""Maximum number of threads. More threads would only wait for the thread that reads the file."""
_MAGICS: tuple[tuple[bytes, Compress], ...] = ((b"\x1f\x8b", "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"))
_MEMBER_START = b"\x1f\x8b\x08\0\0\0\0\0"
"""The first bytes of a gzip member without flags and time, as `imgkit save` writes it."""
_REFUSED_MAGICS = ((b"BZh", "bzip2"), (b"\xfd7zXZ\0", "xz"))


@dataclass(slots=True)
class Allowance:
    """Counts the unpacked bytes of an archive, and refuses more than a limit.

    A hostile archive of a few MB could unpack to terabytes and fill the disk. The default limit is
    `UNPACKED_FACTOR` times the size of the archive (`packed_bytes`), but at least `UNPACKED_LEAST_BYTES`.
    """

    packed_bytes: int
    name: str
    limit_bytes: int | None = None
    """Replaces the default limit."""
    unpacked_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add_unpacked(self, count: int) -> None:
        """Add `count` to the number of unpacked bytes. Several threads may call this method.

        If an archive and a layer in it are both compressed, the bytes of the layer are unpacked twice and
        count twice.

        Raises
        ------
        CheckFailed : the number exceeds the limit.
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
    """Return how the file `path` is compressed, according to its first bytes, or ``"none"``.

    Raises
    ------
    UsageError : the file is compressed with bzip2 or xz. imgkit does not read these formats, because no
        container runtime writes them.
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
    """Return how a stream is compressed. `start` contains its first bytes, at least 4."""
    for magic, compress in _MAGICS:
        if start.startswith(magic):
            return compress
    return "none"


def read_plain(path: Path, *, allowance: Allowance) -> Generator[bytes, None, None]:
    """Yield the unpacked bytes of the file `path`, at most 1 MiB at a time.

    Raises
    ------
    CheckFailed : the file is damaged or cut short, or unpacks to more bytes than `allowance` permits.
    ToolMissing : the file is compressed with zstd, and the program ``zstd`` is missing.
    """
    with files.open_regular(path, buffering=0) as stream:
        raw = iter(lambda: stream.read(CHUNK_BYTES), b"")
        compress = detect_compression(path)
        yield from unpack_chunks(raw, compress, name=str(path), allowance=allowance)


def unpack_chunks(
    chunks: Iterable[bytes], compress: Compress, *, name: str, allowance: Allowance | None = None
) -> Generator[bytes, None, None]:
    """Yield the unpacked bytes of a stream that is compressed with `compress`.

    Parameters
    ----------
    name : name of the stream, for messages.
    allowance : limits the number of unpacked bytes.

    Raises
    ------
    CheckFailed : the stream is damaged or cut short, or unpacks to more bytes than `allowance` permits.
    ToolMissing : the stream is compressed with zstd, and the program ``zstd`` is missing.
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
    """Unpacks a gzip stream in small pieces, so that it needs little memory.

    A gzip stream consists of one or more members. Each member is a complete .gz file.

    Raises
    ------
    CheckFailed : the stream is damaged or cut short.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._inflate = zlib.decompressobj(wbits=31)  # 31: with the header and trailer of gzip

    @property
    def is_between_members(self) -> bool:
        """Whether the last byte passed to `feed` was the last byte of a member."""
        return self._inflate.eof

    def feed(self, data: bytes | memoryview) -> Iterator[bytes]:
        """Unpack `data`, the next bytes of the stream. Yield the unpacked bytes, at most 1 MiB at a time."""
        for start in range(0, len(data), _PIECE_BYTES):
            yield from self._feed_piece(bytes(data[start : start + _PIECE_BYTES]))

    def _feed_piece(self, packed: bytes) -> Iterator[bytes]:
        """Unpack `packed`, which may contain the end of a member and the start of the next member.

        A member is a complete gzip stream. `_inflate` is the state of the current one, which may go on in the
        next call.
        """
        while packed:
            if self._inflate.eof:
                # The member has ended, and another one may follow. Zeros after the last member are padding.
                packed = packed.lstrip(b"\0")
                if not packed:
                    return
                self._inflate = zlib.decompressobj(wbits=31)
            plain, packed = self._decompress_some(packed)
            if plain:
                yield plain

    def _decompress_some(self, packed: bytes) -> tuple[bytes, bytes]:
        """Unpack at most 1 MiB of the current member.

        Return the unpacked bytes, and the rest of `packed`, which is still compressed.
        """
        try:
            plain = self._inflate.decompress(packed, CHUNK_BYTES)
        except zlib.error as error:
            raise self._error(f"is damaged: {error}") from error
        # zlib has two names for the rest: after the end of the member, and after `CHUNK_BYTES` of output.
        if self._inflate.eof:
            return plain, self._inflate.unused_data
        return plain, self._inflate.unconsumed_tail

    def finish(self) -> bytes:
        """Return the last unpacked bytes. Raise CheckFailed if the stream was damaged or cut short."""
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

    `imgkit save` writes a stream of many small members. Members do not depend on each other, so several
    threads unpack such a stream. A single thread unpacks any other stream.
    """
    later_chunks = iter(chunks)
    first_chunk = next(later_chunks, b"")
    all_chunks = itertools.chain([first_chunk], later_chunks)
    # gzip and pigz write one member per file. So a second member in the first chunk shows that the stream has
    # many small members.
    if first_chunk.find(_MEMBER_START, 1) > 0:
        return _unpack_members(Gunzip(name), all_chunks)
    return _unpack_ahead(Gunzip(name), all_chunks)


def _unpack_ahead(gunzip: Gunzip, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the unpacked bytes of `chunks`. A thread unpacks ahead while the caller uses the latest bytes.

    This saves time because zlib, writes and digests release Python's global lock (GIL).
    """
    # The batch that the thread has finished. It is always one behind the batch that is being unpacked.
    previous_batch: list[bytes] = []
    # One thread is enough, since each part of a stream can be unpacked only after the part before it.
    with ThreadPoolExecutor(1) as pool:
        for batch_job in _start_batches(gunzip, chunks, pool):
            # While the caller uses these bytes, the thread unpacks the next batch.
            yield from previous_batch
            previous_batch, _ = batch_job.result()
    yield from previous_batch  # the last one
    yield gunzip.finish()  # a few bytes, or an error if the stream is cut short


def _start_batches(
    gunzip: Gunzip, chunks: Iterator[bytes], pool: ThreadPoolExecutor
) -> Iterator[Future[tuple[list[bytes], bool]]]:
    """Let the thread of `pool` unpack one batch after the other, and yield each job when it has started.

    The next job starts when the caller asks for it, and this one has ended. `chunks` is read in the caller's
    thread: reading from a pipe may block, and Ctrl-C cannot interrupt another thread.
    """
    for chunk in chunks:
        plain = gunzip.feed(chunk)
        has_more = True
        while has_more:  # a small chunk may unpack to several batches
            job = pool.submit(_unpack_batch, plain)
            yield job
            # Wait, because only one thread at a time may use `plain` and `gunzip`.
            _, has_more = job.result()


def _unpack_batch(plain: Iterator[bytes]) -> tuple[list[bytes], bool]:
    """Return the next 4 MiB of `plain` (`_AHEAD_BYTES`), and whether more bytes may follow.

    The threads wait for each other once per batch, so smaller batches would be slower.
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
    """Yield the unpacked bytes of a stream of many small members. Several threads unpack the members.

    The stream is cut wherever the bytes look like the start of a member. By chance, this may happen in the
    middle of a member. So the result of a thread is used only if the piece before ended with the end of a
    member. `gunzip` unpacks all other pieces in order.
    """
    is_between_members = True  # the stream begins with a member
    for piece, plain in _inflate_in_threads(chunks):
        # `plain` is None if the piece is not exactly one small member.
        if is_between_members and plain is not None:
            # `gunzip` need not see this piece: before and after it, `gunzip` waits for the next member.
            yield plain
        else:
            yield from gunzip.feed(piece)
            is_between_members = gunzip.is_between_members
    # If the stream ends inside a member, `finish` raises an error.
    if not is_between_members:
        yield gunzip.finish()


_InflatedPiece = tuple[bytes, bytes | None]
"""A piece of a gzip stream and its unpacked bytes, or None if the piece is not exactly one small member."""


def _inflate_in_threads(chunks: Iterator[bytes]) -> Iterator[_InflatedPiece]:
    """Cut a gzip stream where members seem to begin, and yield each piece with its unpacked bytes.

    Several threads unpack the pieces. The results are yielded in the order of the stream.
    """
    workers = min(process.count_processors(), _MAX_WORKERS)
    jobs: deque[Future[list[_InflatedPiece]]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for pieces in _split_at_members(chunks):
            jobs.append(pool.submit(_inflate_members, pieces))
            # Keep one job more than there are threads, so that no thread waits for new data.
            if len(jobs) > workers:
                yield from jobs.popleft().result()
        for job in jobs:
            yield from job.result()


def _split_at_members(chunks: Iterator[bytes]) -> Iterator[list[bytes]]:
    """Cut a gzip stream where members seem to begin, and yield lists of pieces, about one list per chunk.

    A gzip file may consist of several members, which are complete gzip streams. Threads can unpack them at
    the same time. The bytes of `_MEMBER_START` may also occur inside a member by chance, so the caller must
    be able to join two pieces. If no member begins within 1 MiB, the stream is cut anyway, to limit the
    memory.
    """
    pending = b""  # the last piece so far, which may go on in the next chunk
    for chunk in chunks:
        pieces, pending = _split_bytes_at_members(pending + chunk)
        if len(pending) > CHUNK_BYTES:
            # Keep the last bytes for the next round: they may be the first part of `_MEMBER_START`.
            cut = len(pending) - len(_MEMBER_START)
            pieces.append(pending[:cut])
            pending = pending[cut:]
        if pieces:
            yield pieces
    if pending:
        yield [pending]


def _split_bytes_at_members(packed: bytes) -> tuple[list[bytes], bytes]:
    """Cut `packed` before each `_MEMBER_START` in it. Return all pieces but the last, and the last one."""
    pieces = []
    start = 0
    # `packed` itself usually begins with a member, so the search starts at byte 1.
    next_start = packed.find(_MEMBER_START, 1)
    while next_start > 0:  # `find` returns -1 if there is none
        pieces.append(packed[start:next_start])
        start = next_start
        next_start = packed.find(_MEMBER_START, start + 1)
    return pieces, packed[start:]


def _inflate_members(pieces: list[bytes]) -> list[_InflatedPiece]:
    """Return each of `pieces` with its unpacked bytes, or with None if they are not unpacked here.

    A piece is not unpacked if it is not exactly one member, or a large one. To limit the memory, a call
    unpacks at most 4 MiB (`_AHEAD_BYTES`). The caller unpacks the other pieces later in small steps.
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
    """Return the unpacked bytes of `piece`, or None if it is not a single member of at most `most_bytes`."""
    decompressor = zlib.decompressobj(wbits=31)
    # A cut in the middle of a member gives an error. That is normal, since the cuts are only guesses.
    with contextlib.suppress(zlib.error):
        plain = decompressor.decompress(piece, most_bytes)
        if decompressor.eof and not decompressor.unused_data:
            return plain
    return None


def _unzstd(chunks: Iterable[bytes], name: str) -> Iterator[bytes]:
    """Yield the bytes of a zstd stream, unpacked with the program ``zstd``.

    Raises
    ------
    ToolMissing : the program ``zstd`` is missing.
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

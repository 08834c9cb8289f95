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
_AHEAD_BYTES = 4 << 20
"""What a thread unpacks at once, so that it seldom waits for the others."""
UNPACKED_FACTOR = 100
"""Most bytes to which one byte unpacks: images reach 5, an archive made to fill a disk reaches 1000."""
UNPACKED_LEAST_BYTES = 10**9
_MAGICS: tuple[tuple[bytes, Compress], ...] = ((b"\x1f\x8b", "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"))
_MEMBER = b"\x1f\x8b\x08\0\0\0\0\0"
"""The start of a gzip member without a time."""
_REFUSED = ((b"BZh", "bzip2"), (b"\xfd7zXZ\0", "xz"))


@dataclass(slots=True)
class Allowance:
    """Bytes to which an archive of `packed_bytes` may unpack; `limit_bytes` replaces the default limit."""

    packed_bytes: int
    name: str
    limit_bytes: int | None = None
    unpacked_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, count: int) -> None:
        """Count unpacked bytes, also those of a compressed layer in a compressed archive.

        Raises
        ------
        CheckFailed : they are too many.
        """
        with self._lock:
            self.unpacked_bytes += count
        default = max(UNPACKED_LEAST_BYTES, UNPACKED_FACTOR * self.packed_bytes)
        limit = default if self.limit_bytes is None else self.limit_bytes
        if self.unpacked_bytes > limit:
            raise CheckFailed(
                f"its {self.packed_bytes / 1e6:.1f} MB unpack to more than {limit / 1e9:g} GB: it may "
                "be a decompression bomb (--unpack-limit GB allows more)",
                where=self.name,
                hint="raise the limit only if you know its author",
            )


def kind(path: Path) -> Compress:
    """Return how `path` is compressed, by its first bytes.

    Raises
    ------
    UsageError : bzip2 or xz, which no runtime and no tutorial uses.
    """
    with files.open_regular(path) as stream:
        start = stream.read(8)
    for magic, program in _REFUSED:
        if start.startswith(magic):
            raise UsageError(
                f"the file is compressed with {program}; imgkit reads plain, gzip and zstd files",
                where=str(path),
                hint=f"{program} -dk {path}   (then pass the unpacked file)",
            )
    return kind_of(start)


def kind_of(start: bytes) -> Compress:
    """Return how a stream that begins with `start`, at least 4 bytes, is compressed."""
    for magic, compress in _MAGICS:
        if start.startswith(magic):
            return compress
    return "none"


def chunks(path: Path, *, allowance: Allowance | None = None) -> Generator[bytes, None, None]:
    """Yield the plain bytes of `path`, at most 1 MiB at a time.

    Raises
    ------
    CheckFailed : damaged, cut short, or larger than `allowance`.
    ToolMissing : zstd data and no ``zstd`` program.
    """
    with files.open_regular(path, buffering=0) as stream:
        raw = iter(lambda: stream.read(CHUNK_BYTES), b"")
        yield from unpacked(raw, kind(path), name=str(path), allowance=allowance)


def unpacked(
    raw: Iterable[bytes], compress: Compress, *, name: str, allowance: Allowance | None = None
) -> Generator[bytes, None, None]:
    """Yield the plain bytes of the stream `raw`; `name` is for messages. Raises as `chunks` does."""
    if compress == "none":
        yield from raw
        return
    for chunk in _gunzipped(raw, name) if compress == "gzip" else _unzstd(raw, name):
        if allowance:
            allowance.take(len(chunk))
        if chunk:
            yield chunk


class Gunzip:
    """Unpack a gzip stream piece by piece, in bounded memory.

    Raises
    ------
    CheckFailed : damaged or cut short.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._inflate = zlib.decompressobj(wbits=31)

    @property
    def is_between(self) -> bool:
        """Whether what it was fed ends with a member."""
        return self._inflate.eof

    def feed(self, data: bytes | memoryview) -> Iterator[bytes]:
        """Yield what `data` unpacks to, at most 1 MiB at a time."""
        # zlib copies what it leaves of its input: small pieces take a tenth less time.
        for start in range(0, len(data), _PIECE_BYTES):
            piece = bytes(data[start : start + _PIECE_BYTES])
            while piece:
                if self._inflate.eof:
                    # pigz and concatenated files have several members; zeros after the last are padding.
                    piece = piece.lstrip(b"\0")
                    if not piece:
                        break
                    self._inflate = zlib.decompressobj(wbits=31)
                try:
                    plain = self._inflate.decompress(piece, CHUNK_BYTES)
                except zlib.error as error:
                    raise self._refused(f"is damaged: {error}") from error
                piece = self._inflate.unused_data if self._inflate.eof else self._inflate.unconsumed_tail
                if plain:
                    yield plain

    def finish(self) -> bytes:
        """Return the last bytes, and refuse a stream without its end."""
        try:
            rest = self._inflate.flush()
        except zlib.error as error:
            raise self._refused(f"is damaged: {error}") from error
        if not self._inflate.eof:
            raise self._refused("is cut short")
        return rest

    def _refused(self, problem: str) -> CheckFailed:
        return CheckFailed(f"the gzip data {problem}", where=self._name, hint="copy the file again")


def _gunzipped(raw: Iterable[bytes], name: str) -> Iterator[bytes]:
    pieces = iter(raw)
    start = next(pieces, b"")
    unpack = _unpack_members if start.find(_MEMBER, 1) > 0 else _unpack_ahead
    return unpack(Gunzip(name), itertools.chain((start,), pieces))


def _unpack_ahead(gunzip: Gunzip, raw: Iterator[bytes]) -> Iterator[bytes]:
    """Unpack in a thread while the caller works on what came before; `raw` is read by the caller's thread.

    zlib lets other threads run, and so do writes and digests. A read may wait for ever, as from a pipe, and
    a thread that waits cannot be interrupted.
    """
    ready: list[bytes] = []
    with ThreadPoolExecutor(1) as pool:
        for piece in raw:
            plain = gunzip.feed(piece)
            has_more = True
            while has_more:
                job = pool.submit(_take_some, plain)
                yield from ready
                ready, has_more = job.result()
    yield from ready
    yield gunzip.finish()


def _take_some(plain: Iterator[bytes]) -> tuple[list[bytes], bool]:
    """Return the next 4 MiB, and whether there may be more: each step costs threads a wait for each other."""
    chunks: list[bytes] = []
    budget = _AHEAD_BYTES
    for chunk in plain:
        chunks.append(chunk)
        budget -= len(chunk)
        if budget <= 0:
            return chunks, True
    return chunks, False


def _unpack_members(gunzip: Gunzip, raw: Iterator[bytes]) -> Iterator[bytes]:
    """Unpack small members side by side, as `imgkit save` writes them.

    Where a member seems to begin, there may be other data that looks so. What was unpacked from there counts
    only if the data before ended there; `gunzip` unpacks all else.
    """
    workers = min(process.processors(), 8)
    jobs: deque[tuple[list[bytes], Future[list[bytes | None]]]] = deque()
    groups = _cut(raw)
    is_between = True
    with ThreadPoolExecutor(workers) as pool:
        while True:
            while len(jobs) <= workers and (group := next(groups, None)):
                jobs.append((group, pool.submit(_inflate_members, group)))
            if not jobs:
                break
            group, job = jobs.popleft()
            for piece, plain in zip(group, job.result(), strict=True):
                if is_between and plain is not None:
                    yield plain
                else:
                    yield from gunzip.feed(piece)
                    is_between = gunzip.is_between
    if not is_between:
        yield gunzip.finish()


def _cut(raw: Iterator[bytes]) -> Iterator[list[bytes]]:
    """Cut a gzip stream where members seem to begin, and where none does for long."""
    data = b""
    for chunk in raw:
        data += chunk
        start, pieces = 0, []
        while (end := data.find(_MEMBER, start + 1)) > 0:
            pieces.append(data[start:end])
            start = end
        data = data[start:]
        if len(data) > CHUNK_BYTES:
            pieces.append(data[: -len(_MEMBER)])
            data = data[-len(_MEMBER) :]
        if pieces:
            yield pieces
    if data:
        yield [data]


def _inflate_members(pieces: list[bytes]) -> list[bytes | None]:
    """Return what each of `pieces` unpacks to if it is one small member of a gzip file; else None."""
    budget = _AHEAD_BYTES
    members: list[bytes | None] = []
    for piece in pieces:
        inflate = zlib.decompressobj(wbits=31)
        members.append(None)
        with contextlib.suppress(zlib.error):
            plain = inflate.decompress(piece, min(budget, CHUNK_BYTES)) if budget > 0 else b""
            if inflate.eof and not inflate.unused_data:
                members[-1] = plain
                budget -= len(plain)
    return members


def _unzstd(raw: Iterable[bytes], name: str) -> Iterator[bytes]:
    if shutil.which("zstd") is None:
        raise ToolMissing(
            "the data is compressed with zstd, and the program zstd is not on PATH",
            where=name,
            hint="module load zstd, or unpack the file where zstd is installed: zstd -d FILE.tar.zst",
        )
    try:
        yield from process.through(["zstd", "-dcq"], raw)
    except ToolFailed as error:
        raise CheckFailed(
            f"the zstd data is damaged: {error.what}", where=name, hint="copy the file again"
        ) from error

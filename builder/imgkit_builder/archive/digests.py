"""Hash an image archive and everything in it in one pass, without extracting. Standard library only."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from imgkit_builder.archive import compressed, read
from imgkit_builder.archive.compressed import CHUNK_BYTES, Allowance, Compress
from imgkit_builder.archive.read import BLOBS, MAX_JSON_BYTES, Members, SelectedImage
from imgkit_builder.base.progress import Reporter
from imgkit_entrypoints import files
from imgkit_entrypoints.errors import CheckFailed, ToolFailed, UsageError

_MAGIC_BYTES = 4
_SMALL_BYTES = 1024
"""A file of this size is kept whatever it begins with, so that a message can say that it is not JSON."""
_MAX_DOCUMENTS_BYTES = 32 << 20
"""Images have some kB of JSON; an archive of many files that unpack to 4 MiB each would fill the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HashedFile:
    """Digests of one file in an archive."""

    sha256: str
    """Hex digest of its bytes as they lie in the archive."""
    diff_id: str
    """``sha256:...`` of its unpacked bytes; empty for zstd, which is not unpacked here."""
    data: bytes | None
    """Its bytes if it may be JSON."""

    def document(self) -> bytes | None:
        """Return its bytes; None if it has more than `MAX_JSON_BYTES`."""
        return self.data


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """An archive that was read to its end."""

    sha256: str
    size_bytes: int
    image: SelectedImage[HashedFile] | None
    wrong_blobs: tuple[str, ...]
    """Blobs whose bytes do not have the digest in their name."""
    problem: str
    """Why there is no `image`; empty otherwise."""


def archive_compression(path: Path) -> Compress | None:
    """How the archive `path` is compressed; None if it is no archive.

    Raises
    ------
    UsageError : bzip2 or xz.
    """
    compress = compressed.kind(path)
    if compress != "none":
        return compress
    with files.open_regular(path) as stream:
        return "none" if stream.read(262)[257:] == b"ustar" else None


def digest_archive(
    path: Path, *, compress: Compress, report: Reporter, unpack_limit_bytes: int | None = None
) -> Contents:
    """Read the archive at `path` once, to its end even where it is damaged; unpack no more than the limit.

    Raises
    ------
    ToolMissing : it is zstd-compressed and there is no ``zstd``.
    """
    where = str(path)
    image: SelectedImage[HashedFile] | None = None
    wrong: tuple[str, ...] = ()
    problem = ""
    with files.open_regular(path, buffering=0) as file:
        size_bytes = path.stat().st_size
        whole = _WholeFile(file, size_bytes, report)
        allowance = Allowance(size_bytes, where, unpack_limit_bytes)
        unpacked = compressed.unpacked(whole, compress, name=where, allowance=allowance)
        try:
            with contextlib.closing(unpacked) as chunks:
                store = functools.partial(_hashed, allowance, _Documents(where))
                members = read.members(chunks, store, where=where)
            wrong = _wrong_blobs(members)
            image = read.select(members.find, where=where)
            if not image.config.os:
                raise CheckFailed("its image configuration names no operating system", where=where)
        except (CheckFailed, ToolFailed, UsageError) as error:
            image = None
            problem = error.what if error.where in (None, where) else f"{error.where}: {error.what}"
        whole.drain()
    return Contents(
        sha256=whole.digest.hexdigest(),
        size_bytes=whole.done_bytes,
        image=image,
        wrong_blobs=wrong,
        problem=problem,
    )


def sha256(path: Path, *, report: Reporter) -> str:
    """Hex digest of the whole file."""
    with files.open_regular(path, buffering=0) as file:
        whole = _WholeFile(file, path.stat().st_size, report)
        whole.drain()
    return whole.digest.hexdigest()


class _WholeFile:
    """Iterate over the chunks of a file, and hash them on the way."""

    def __init__(self, file: BinaryIO, size_bytes: int, report: Reporter) -> None:
        self._file, self._size_bytes, self._report = file, size_bytes, report
        self.digest, self.done_bytes = hashlib.sha256(), 0

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        data = self._file.read(CHUNK_BYTES)
        if not data:
            raise StopIteration
        self.digest.update(data)
        self.done_bytes += len(data)
        self._report.advance(self.done_bytes, self._size_bytes)
        return data

    def drain(self) -> None:
        for _ in self:
            pass


class _Documents:
    """Count the bytes of the files that are kept because they may be JSON."""

    def __init__(self, where: str) -> None:
        self._where, self._left = where, _MAX_DOCUMENTS_BYTES

    def takes(self, start: bytes, size_bytes: int) -> bool:
        """Whether a file of that start and size is kept.

        Raises
        ------
        CheckFailed : there are too many.
        """
        like_json = not start.strip() or start.lstrip().startswith((b"{", b"["))
        if size_bytes > MAX_JSON_BYTES or not like_json:
            return size_bytes <= _SMALL_BYTES
        self._left -= size_bytes
        if self._left < 0:
            raise CheckFailed(
                f"its JSON files have more than {_MAX_DOCUMENTS_BYTES >> 20} MiB together",
                where=self._where,
                hint="do not use the archive if you do not know its author",
            )
        return True


def _hashed(
    allowance: Allowance, documents: _Documents, name: str, size_bytes: int, pieces: Iterator[memoryview]
) -> HashedFile:
    start = b""
    while len(start) < _MAGIC_BYTES and (piece := next(pieces, None)):
        start += piece
    compress, small = compressed.kind_of(start), documents.takes(start, size_bytes)
    stored, unpacked, kept = hashlib.sha256(), hashlib.sha256(), bytearray()
    gunzip = compressed.Gunzip(name) if compress == "gzip" else None
    for piece in itertools.chain([memoryview(start)], pieces):
        stored.update(piece)
        for plain in gunzip.feed(piece) if gunzip else ():
            allowance.take(len(plain))
            unpacked.update(plain)
        if small:
            kept += piece
    if gunzip:
        unpacked.update(gunzip.finish())
    digest = unpacked if gunzip else stored
    return HashedFile(
        sha256=stored.hexdigest(),
        diff_id="" if compress == "zstd" else f"sha256:{digest.hexdigest()}",
        data=bytes(kept) if small else None,
    )


def _wrong_blobs(members: Members[HashedFile]) -> tuple[str, ...]:
    blobs = [name for name in sorted({*members.files, *members.links}) if name.startswith(BLOBS)]
    found = [(name, members.find(name)) for name in blobs]
    return tuple(name for name, file in found if file is not None and name != BLOBS + file.sha256)

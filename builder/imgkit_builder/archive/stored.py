"""The image of a plain archive or an OCI folder where it lies: nothing is copied, a layer can be read twice.

A layer is a range of bytes of a file. Its headers are read by seeking from one to the next, and `layers.scan`
computes its digest meanwhile. Compressed layers are unpacked once, several at a time, into a `Spool`, with
readers close behind. Without room for one, they are unpacked at each reading.

Threads help: zlib, digests and writes let other threads run. The files of a spool have no names, so that
nothing stays after a kill. They are never flushed to the disk, and a small image never leaves the memory for
files.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from imgkit_builder.archive import compressed, read
from imgkit_builder.archive.compressed import Allowance
from imgkit_builder.archive.read import MAX_JSON_BYTES, SelectedImage
from imgkit_builder.archive.tar_read import Member, TarLimits, TarStream, expanded
from imgkit_builder.base import files
from imgkit_builder.base.files import FULL
from imgkit_builder.base.sizes import size_text
from imgkit_entrypoints.errors import CheckFailed

_HEADER_BYTES = 64 << 10
"""Read at once where only headers count, and the rest is passed over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Bytes of a file."""

    path: Path
    start: int
    size_bytes: int

    def document(self) -> bytes | None:
        """Return the bytes; None if there are more than `MAX_JSON_BYTES`."""
        if self.size_bytes > MAX_JSON_BYTES:
            return None
        return b"".join(self.chunks(MAX_JSON_BYTES))

    def chunks(self, most: int, *, step: Callable[[], int] = lambda: 0) -> Iterator[bytes]:
        """Yield the bytes, at most `most` at a time; `step` says how many to pass over before the next."""
        left = self.size_bytes
        try:
            with files.open_regular(self.path, buffering=0) as stream:
                stream.seek(self.start)
                while left > 0:
                    if beyond := step():
                        stream.seek(beyond, 1)
                        left -= beyond
                    if left <= 0 or not (chunk := stream.read(min(most, left))):
                        return
                    left -= len(chunk)
                    yield chunk
        except OSError as error:
            raise self._unreadable(error) from error

    def sha256(self) -> str:
        """Hex digest of the bytes."""
        try:
            with files.open_regular(self.path, buffering=0) as stream:
                return files.sha256(stream, self.start, self.size_bytes)
        except OSError as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: OSError) -> CheckFailed:
        return CheckFailed(f"cannot be read: {error.strerror}", where=str(self.path))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLayer:
    """One layer; ``open`` begins a new walk over its members."""

    region: Region | SpoolFile
    """Where its bytes are; a file of a spool holds plain ones."""
    diff_id: str
    """``sha256:...`` of its plain bytes."""
    name: str
    """What messages call it."""
    compress: compressed.Compress
    limits: TarLimits
    stored_sha256: str = ""
    """Digest of its bytes as they lie in the file, where `spool` has seen them; else empty."""

    @contextlib.contextmanager
    def open(self, *, bodies: bool, digest: Digest | None = None) -> Iterator[TarStream]:
        """Walk over the members; without `bodies` their content is passed over where that is possible.

        A compressed layer passes its plain bytes through `digest`.
        """
        if self.compress == "none":
            jumps: list[int] = []
            chunks = self.region.chunks(
                compressed.CHUNK_BYTES if bodies else _HEADER_BYTES,
                step=lambda: jumps.pop() if jumps else 0,
            )
            yield TarStream(chunks, name=self.name, jump=jumps.append, limits=self.limits)
            return
        with contextlib.closing(self.plain()) as plain:
            yield TarStream(digest.through(plain) if digest else plain, name=self.name, limits=self.limits)

    def content(self, member: Member) -> Iterator[bytes | memoryview]:
        """The bytes of a file of this layer, which is plain, read where they lie."""
        if member.sparse is None:
            yield from self._range(member.place, member.size_bytes)
            return
        at = member.place

        def take(count: int) -> Iterator[memoryview]:
            nonlocal at
            at += count
            return map(memoryview, self._range(at - count, count))

        yield from expanded(member.sparse, member.content_bytes, take)

    def _range(self, start: int, left: int) -> Iterator[bytes]:
        jumps = [start]
        most = max(min(compressed.CHUNK_BYTES, left), 1)
        for chunk in self.region.chunks(most, step=lambda: jumps.pop() if jumps else 0) if left else ():
            yield chunk[:left]
            left -= len(chunk)
            if left <= 0:
                return
        if left > 0:
            raise CheckFailed("cut short", where=self.name)

    def plain(self) -> Generator[bytes, None, None]:
        """Its unpacked bytes."""
        raw = self.region.chunks(compressed.CHUNK_BYTES)
        return compressed.unpacked(raw, self.compress, name=self.name)


class Digest:
    """The sha256 of a stream that somebody else reads."""

    def __init__(self, allowance: Allowance) -> None:
        self._found = hashlib.sha256()
        self._allowance = allowance

    def through(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            self._allowance.take(len(chunk))
            self._found.update(chunk)
            yield chunk

    def hexdigest(self) -> str:
        return self._found.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredImage:
    """An image whose layers can be read where they are."""

    selected: SelectedImage[Region]
    layers: tuple[StoredLayer, ...]
    """The lowest first."""
    where: str

    @property
    def stored_bytes(self) -> int:
        """Size of the layers as they lie there, compressed or not."""
        return sum(layer.region.size_bytes for layer in self.layers)

    @property
    def packed_bytes(self) -> int:
        """Size of the layers that are compressed."""
        return sum(layer.region.size_bytes for layer in self.layers if layer.compress != "none")

    def refuse_other_digest(self, number: int, sha256: str) -> None:
        """Raise CheckFailed unless `sha256` is that of the plain bytes of layer `number`, counted from 1."""
        expected = self.layers[number - 1].diff_id.removeprefix("sha256:")
        if sha256 != expected:
            raise CheckFailed(
                f"layer {number} of {len(self.layers)} is damaged: its sha256 is {sha256}, "
                f"should be {expected}",
                where=self.where,
                hint=read.AGAIN,
            )


@contextlib.contextmanager
def opened(
    path: Path,
    folder: Path,
    *,
    advance: Callable[[int], None] = lambda _: None,
    unpack_limit_bytes: int | None = None,
) -> Iterator[StoredImage]:
    """Yield the image of the archive or OCI folder `path`; unpack a compressed archive to `folder` first.

    `advance` gets the number of bytes unpacked so far.

    Raises
    ------
    CheckFailed : damaged, or larger than the limit once unpacked.
    UsageError : several images, none, or no image archive at all.
    ToolMissing : a zstd archive and no ``zstd`` program.
    """
    if path.is_dir() or compressed.kind(path) == "none":
        yield open_image(path)
        return
    plain, where = folder / "spool.tar", str(path)
    allowance = Allowance(path.stat().st_size, where, unpack_limit_bytes)
    with contextlib.closing(compressed.chunks(path, allowance=allowance)) as chunks:
        digests = spool(chunks, plain, where=where, advance=advance)
    yield open_image(plain, where=where, digests=digests)
    plain.unlink()


def spool(
    chunks: Iterator[bytes], path: Path, *, where: str, advance: Callable[[int], None]
) -> dict[int, str]:
    """Write the plain archive that comes in `chunks` to `path`, and hash every file in it on the way.

    The result has the sha256 of each by the byte at which it begins. `open_image` then reads no layer once
    more to compare it. `advance` gets the number of bytes so far.

    Raises
    ------
    CheckFailed : damaged or cut short.
    """
    found: dict[int, str] = {}
    with path.open("wb") as out:

        def written() -> Iterator[bytes]:
            done = 0
            for chunk in chunks:
                try:
                    out.write(chunk)
                except OSError as error:
                    said = f"{error.strerror}, after {size_text(done)} of the image, which is put there first"
                    raise OSError(error.errno, said) from error
                done += len(chunk)
                advance(done)
                yield chunk

        def store(member: Member) -> Region:
            digest = hashlib.sha256()
            for piece in stream.body():
                digest.update(piece)
            found[member.place] = digest.hexdigest()
            return Region(path=path, start=member.place, size_bytes=member.size_bytes)

        stream = TarStream(written(), name=where)
        read.members(stream, store, where=where)
        stream.drain()
    return found


def open_image(
    path: Path,
    *,
    where: str = "",
    digests: Mapping[int, str] = MappingProxyType({}),
) -> StoredImage:
    """Find the image of the plain archive or OCI folder `path`; reads no layer. `digests` comes from `spool`.

    Raises
    ------
    CheckFailed : damaged, or its configuration and its list of layers differ.
    UsageError : several images, none, or no image at all.
    """
    where = where or str(path)
    selected = _in_folder(path, where) if path.is_dir() else _in_archive(path, where)
    selected.refuse_faults(where)
    layers = tuple(
        StoredLayer(
            region=region,
            diff_id=diff_id,
            name=f"{where}: layer {number}",
            compress=compressed.kind_of(next(region.chunks(8), b"")),
            limits=TarLimits(),
            stored_sha256=digests.get(region.start, ""),
        )
        for number, ((_, region), diff_id) in enumerate(
            zip(selected.layers, selected.config.diff_ids, strict=True), 1
        )
    )
    return StoredImage(selected=selected, layers=layers, where=where)


def _in_archive(path: Path, where: str) -> SelectedImage[Region]:
    whole = StoredLayer(
        region=Region(path=path, start=0, size_bytes=path.stat().st_size),
        diff_id="",
        name=where,
        compress="none",
        limits=TarLimits(),
    )

    def store(member: Member) -> Region:
        return Region(path=path, start=member.place, size_bytes=member.size_bytes)

    with whole.open(bodies=False) as stream:
        members = read.members(stream, store, where=where)
    return read.select(members.find, where=where)


def _in_folder(path: Path, where: str) -> SelectedImage[Region]:
    def find(name: str) -> Region | None:
        file = path / name
        return Region(path=file, start=0, size_bytes=file.stat().st_size) if file.is_file() else None

    return read.select_oci(find, where=where)


class NoRoom(Exception):
    """The plain layers take more than the spool may; none of its files is of use."""


class SpoolFile:
    """One layer's plain bytes, which one thread writes while another reads what is there."""

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - `close` does
        self._changed = threading.Condition()
        self._ended = False
        self._error: BaseException | None = None
        self.size_bytes = 0
        """What is there so far."""

    def append(self, data: bytes) -> None:
        """Write `data`; readers see it from now on."""
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]
        with self._changed:
            self.size_bytes += len(data)
            self._changed.notify_all()

    def end(self, error: BaseException | None = None) -> None:
        """Nothing follows; with an `error`, readers that come so far get it."""
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    def chunks(self, most: int, *, step: Callable[[], int] = lambda: 0) -> Iterator[bytes]:
        """Yield the bytes, as `stored.Region.chunks` does; waits for those that are still to come."""
        at = 0
        while self._is_there(at := at + step()):
            chunk = os.pread(self._file.fileno(), most, at)
            at += len(chunk)
            yield chunk

    def _is_there(self, at: int) -> bool:
        """Whether the layer has a byte `at`; waits until that is known."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self.size_bytes > at)
            if self.size_bytes <= at and self._error:
                raise self._error
            return self.size_bytes > at

    def close(self) -> None:
        """Give the room on the disk back."""
        self._file.close()


@dataclass(kw_only=True, slots=True)
class Spool:
    """Where plain layers go, and how much of the disk they may take together."""

    folder: Path
    room_bytes: int
    advance: Callable[[int], None] = lambda _: None
    """Gets the number of plain bytes so far."""
    _done_bytes: int = 0
    _files: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stopped: bool = False

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def file(self) -> SpoolFile:
        """A new one, which lasts as long as the spool."""
        return self._files.enter_context(contextlib.closing(SpoolFile(self.folder)))

    def stop(self) -> None:
        """Let every `fill` end early: nobody needs the rest."""
        self._stopped = True

    def fill(self, file: SpoolFile, chunks: Generator[bytes, None, None], allowance: Allowance) -> str:
        """Write the plain bytes `chunks` to `file`, and return their sha256.

        Raises
        ------
        NoRoom : they take more than there is.
        CheckFailed : they are damaged, or more than `allowance`.
        """
        digest = hashlib.sha256()
        try:
            with contextlib.closing(chunks):
                for chunk in chunks:
                    if self._stopped:
                        break
                    self._count(len(chunk), allowance)
                    digest.update(chunk)
                    file.append(chunk)
        except OSError as error:
            # Somebody else fills the disk, too.
            told = NoRoom() if error.errno in FULL else error
            file.end(told)
            raise told from error
        except BaseException as error:
            file.end(error)
            raise
        file.end()
        return digest.hexdigest()

    def _count(self, size_bytes: int, allowance: Allowance) -> None:
        with self._lock:
            allowance.take(size_bytes)
            self._done_bytes += size_bytes
            self.advance(self._done_bytes)
            if self._done_bytes > self.room_bytes:
                raise NoRoom

"""Read an image directly from a plain archive or an OCI folder, without copying its layers.

A layer is a range of bytes in a file, so it can be read twice. Its headers are read by seeking from one
header to the next. Meanwhile, threads of `layers.scan_layers` compute its digest. Compressed layers are
unpacked once into a `Spool` (a folder for temporary files), several layers at a time. If the disk has too
little space for a spool, a compressed layer is unpacked each time it is read.

Threads save time because zlib, digests and writes release Python's global lock (GIL). The files of a spool
are never flushed to disk, so those of a small image stay in the page cache of the system.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, BinaryIO, TypeVar

from imgkit_builder.archive import compressed, read
from imgkit_builder.archive.compressed import CHUNK_BYTES, Allowance, Compress
from imgkit_builder.archive.read import MAX_JSON_BYTES, SelectedImage
from imgkit_builder.archive.tar_read import FileChunks, Member, TarStream
from imgkit_builder.base.files import FULL
from imgkit_builder.base.sizes import size_text
from imgkit_entrypoints.errors import CheckFailed

if TYPE_CHECKING:
    from hashlib import _Hash

_Chunk = TypeVar("_Chunk", bytes, memoryview, "bytes | memoryview")
_HEADER_BYTES = 64 << 10
"""Number of bytes to read at once if only headers are needed and file contents are skipped."""
# Enough bytes to recognize the compression of a layer.
_MAGIC_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A range of bytes of a file, such as a layer in an archive."""

    path: Path
    start: int
    size_bytes: int
    known_sha256: str = field(default="", compare=False)
    """Hex digest of the bytes if it is already known, else empty."""

    def chunks(self, chunk_bytes: int) -> FileChunks:
        """Open the file, and return an iterator over the bytes of the region, in chunks of `chunk_bytes`."""
        return FileChunks(self.path, chunk_bytes=chunk_bytes, start=self.start, size_bytes=self.size_bytes)

    def document(self) -> bytes | None:
        """Return the bytes of the region, or None if it is larger than a JSON file may be."""
        if self.size_bytes > MAX_JSON_BYTES:
            return None
        with contextlib.closing(self.chunks(MAX_JSON_BYTES)) as chunks:
            return b"".join(chunks)

    def sha256(self) -> str:
        """Return the sha256 of the region in hex."""
        if self.known_sha256:
            return self.known_sha256
        digest = hashlib.sha256()
        with contextlib.closing(self.chunks(CHUNK_BYTES)) as chunks:
            for chunk in chunks:
                digest.update(chunk)
        return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLayer:
    """A layer of an image in a file. It can be read several times."""

    region: Region
    diff_id: str
    """``sha256:...`` of the uncompressed layer."""
    name: str
    """Name of the layer in messages."""
    compress: Compress

    @contextlib.contextmanager
    def open(self, *, bodies: bool) -> Iterator[TarStream]:
        """Yield an iterator over the members of the layer.

        If `bodies` is false, the caller needs only the headers, and the contents of files are skipped. A
        compressed layer must be unpacked to its end in any case.
        """
        if self.compress != "none":
            with contextlib.closing(self.plain()) as plain:
                yield TarStream(plain, name=self.name)
            return
        # If only headers are needed, small chunks are better: a large chunk would also read most bodies.
        chunk_bytes = CHUNK_BYTES if bodies else _HEADER_BYTES
        with contextlib.closing(self.region.chunks(chunk_bytes)) as chunks:
            yield TarStream(chunks, name=self.name, jump=chunks.skip)

    def plain(self, allowance: Allowance | None = None) -> Generator[bytes, None, None]:
        """Yield the unpacked bytes of the layer. `allowance` limits the bytes of a compressed layer."""
        with contextlib.closing(self.region.chunks(CHUNK_BYTES)) as packed:
            yield from compressed.unpack_chunks(packed, self.compress, name=self.name, allowance=allowance)


def hash_chunks(chunks: Iterable[_Chunk], digest: _Hash) -> Iterator[_Chunk]:
    """Yield `chunks` unchanged, and add them to `digest`."""
    for chunk in chunks:
        digest.update(chunk)
        yield chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredImage:
    """An image whose layers can be read directly from their files."""

    selected: SelectedImage[Region]
    layers: tuple[StoredLayer, ...]
    """The layers, lowest first."""
    where: str

    @property
    def stored_bytes(self) -> int:
        """Total size of the layers as they are stored, compressed or not."""
        return sum(layer.region.size_bytes for layer in self.layers)

    @property
    def packed_bytes(self) -> int:
        """Total stored size of the compressed layers."""
        return sum(layer.region.size_bytes for layer in self.layers if layer.compress != "none")

    def refuse_other_digest(self, number: int, sha256: str) -> None:
        """Raise CheckFailed if the digest of a layer differs from the one in the image's configuration.

        `number` is the number of the layer, counted from 1. `sha256` is the digest of its unpacked bytes, in
        hex.
        """
        expected = self.layers[number - 1].diff_id.removeprefix("sha256:")
        if sha256 != expected:
            raise CheckFailed(
                f"layer {number} of {len(self.layers)} is damaged: its sha256 is {sha256}, "
                f"should be {expected}",
                where=self.where,
                hint=read.COPY_AGAIN_HINT,
            )


@contextlib.contextmanager
def open_archive(
    path: Path,
    folder: Path,
    *,
    advance: Callable[[int], None] = lambda _: None,
    unpack_limit_bytes: int | None,
) -> Iterator[StoredImage]:
    """Yield the image of the archive or OCI folder `path`.

    A compressed archive is first unpacked to a file in `folder`. The file is removed at the end of the block.
    `advance` receives the number of bytes unpacked so far.

    Raises
    ------
    CheckFailed : the archive is damaged, or unpacks to more than `unpack_limit_bytes`.
    UsageError : the archive has several images or none, or is not an image archive.
    ToolMissing : the archive is compressed with zstd, and the program ``zstd`` is missing.
    """
    if path.is_dir() or compressed.detect_compression(path) == "none":
        yield open_image(path)
        return
    allowance = Allowance(path.stat().st_size, str(path), unpack_limit_bytes)
    plain = contextlib.closing(compressed.read_plain(path, allowance=allowance))
    with spool_archive(plain, folder, where=str(path), advance=advance) as image:
        yield image


@contextlib.contextmanager
def spool_archive(
    opening: AbstractContextManager[Iterator[bytes]],
    folder: Path,
    *,
    where: str,
    advance: Callable[[int], None],
) -> Iterator[StoredImage]:
    """Write an uncompressed archive to a temporary file in `folder`, and yield the image in it.

    The file is removed after the block. After an error it is left, since the caller removes `folder`.

    Parameters
    ----------
    opening : yields the bytes of the archive. It is closed before the image is yielded.
    where : the name of the archive, for messages.
    advance : receives the number of bytes written so far.

    Raises
    ------
    CheckFailed : the archive is damaged or cut short, or its configuration lists another number of layers.
    UsageError : the archive has several images or none, or is not an image archive.
    """
    path = folder / "spool.tar"
    with opening as chunks:
        image = _write_archive(chunks, path, where=where, advance=advance)
    yield image
    path.unlink()


def _write_archive(
    chunks: Iterator[bytes], path: Path, *, where: str, advance: Callable[[int], None]
) -> StoredImage:
    """Write an uncompressed archive to `path`, and return the image in it.

    The digest of every file in the archive is computed at the same time. So no layer has to be read again for
    its digest.

    Parameters
    ----------
    chunks : the bytes of the archive.
    where : the name of the archive, for messages.
    advance : receives the number of bytes written so far.

    Raises
    ------
    CheckFailed : the archive is damaged or cut short, or its configuration lists another number of layers.
    UsageError : the archive has several images or none, or is not an image archive.
    """
    with path.open("wb") as file:
        # `_write_chunks` writes each chunk when the tar reader asks for it, so one pass does both.
        stream = TarStream(_write_chunks(chunks, file, advance), name=where)

        def hash_member(member: Member) -> Region:
            """Read the content of `member`, which is next in `stream`. Return its region with its digest."""
            digest = hashlib.sha256()
            for chunk in stream.body():
                digest.update(chunk)
            return Region(
                path=path,
                start=member.offset,
                size_bytes=member.size_bytes,
                known_sha256=digest.hexdigest(),
            )

        members = read.read_members(stream, hash_member, where=where)
        # Bytes after the last member are written to the file, too, and the sender can finish.
        stream.drain()
    # Only after the file is closed: `select_image` reads JSON documents from it.
    return _make_image(read.select_image(members.find, where=where), where)


def _write_chunks(chunks: Iterator[bytes], file: BinaryIO, advance: Callable[[int], None]) -> Iterator[bytes]:
    """Write `chunks` to `file`, and yield them unchanged. `advance` receives the number of bytes so far.

    Raises
    ------
    OSError : the disk is full or has failed. The message says how much of the image was written.
    """
    written_bytes = 0
    for chunk in chunks:
        try:
            file.write(chunk)
        except OSError as error:
            size = size_text(written_bytes)
            reason = f"{error.strerror}, after {size} of the image, which is put there first"
            raise OSError(error.errno, reason) from error
        written_bytes += len(chunk)
        advance(written_bytes)
        yield chunk


def open_image(path: Path) -> StoredImage:
    """Find the image of the uncompressed archive or OCI folder `path`, without reading a layer.

    Raises
    ------
    CheckFailed : the archive is damaged, or its configuration lists another number of layers.
    UsageError : the archive has several images or none, or is not an image archive.
    """
    where = str(path)
    select = _select_in_folder if path.is_dir() else _select_in_archive
    return _make_image(select(path, where), where)


def _make_image(selected: SelectedImage[Region], where: str) -> StoredImage:
    """Return the image with the layers of `selected`. `where` is the name of the archive in messages.

    Raises
    ------
    CheckFailed : the configuration has a wrong digest, or lists another number of layers.
    """
    selected.refuse_problems(where)
    regions = [region for _, region in selected.layers]
    layers: list[StoredLayer] = []
    for region, diff_id in zip(regions, selected.config.diff_ids, strict=True):
        layer = StoredLayer(
            region=region,
            diff_id=diff_id,
            name=f"{where}: layer {len(layers) + 1}",
            compress=_detect_compression(region),
        )
        layers.append(layer)
    return StoredImage(selected=selected, layers=tuple(layers), where=where)


def _detect_compression(region: Region) -> Compress:
    with contextlib.closing(region.chunks(_MAGIC_BYTES)) as chunks:
        return compressed.compression_of(next(chunks, b""))


def _select_in_archive(path: Path, where: str) -> SelectedImage[Region]:
    """Return the only image of the uncompressed archive `path`. Only headers and JSON files are read."""

    def locate_content(member: Member) -> Region:
        """Return where the content of `member` is in the archive, instead of reading it."""
        return Region(path=path, start=member.offset, size_bytes=member.size_bytes)

    with contextlib.closing(FileChunks(path, chunk_bytes=_HEADER_BYTES)) as chunks:
        # With `skip`, the stream jumps over the contents, so that they are not read from the file.
        stream = TarStream(chunks, name=where, jump=chunks.skip)
        members = read.read_members(stream, locate_content, where=where)
    return read.select_image(members.find, where=where)


def _select_in_folder(path: Path, where: str) -> SelectedImage[Region]:
    """Return the only image of the OCI folder `path`."""

    # `name` comes from `read`, which uses only fixed names and digests, so it cannot lead out of the folder.
    def find(name: str) -> Region | None:
        file = path / name
        if not file.is_file():
            return None
        return Region(path=file, start=0, size_bytes=file.stat().st_size)

    return read.select_oci_image(find, where=where)


class NoRoom(Exception):
    """The unpacked layers need more disk space than a `Spool` may use. Its files are then incomplete."""


@dataclass(kw_only=True, slots=True)
class Spool:
    """Temporary files with unpacked layers in a folder. Together they may have `room_bytes`.

    A `Spool` is used in a ``with`` statement, which removes the files at the end.
    """

    folder: Path
    room_bytes: int
    advance: Callable[[int], None] = lambda _: None
    """A function that receives the number of unpacked bytes so far, for a progress display."""
    _paths: list[Path] = field(default_factory=list)
    _is_stopped: bool = False

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        for path in self._paths:
            path.unlink(missing_ok=True)

    def stop(self) -> None:
        """Make all running calls of `unpack` end early, because their results are no longer needed."""
        self._is_stopped = True

    def unpack(self, layer: StoredLayer, allowance: Allowance) -> tuple[StoredLayer, str]:
        """Unpack `layer` to a new file. Several threads may call this method for different layers.

        Returns
        -------
        The layer that can be read uncompressed from the new file, and the sha256 of its unpacked bytes.

        Raises
        ------
        NoRoom : all layers together need more than `room_bytes`, or the disk is full.
        CheckFailed : the layer is damaged, or all layers unpack to more than `allowance`.
        """
        try:
            with (
                tempfile.NamedTemporaryFile(dir=self.folder, suffix=".tar", delete=False) as file,
                contextlib.closing(layer.plain(allowance)) as chunks,
            ):
                path = Path(file.name)
                self._paths.append(path)  # to be removed at the end, even if this call fails
                sha256 = self._write_layer(chunks, file, allowance)
                size_bytes = file.tell()
        except OSError as error:
            if error.errno not in FULL:
                raise
            # The disk is full before `room_bytes` are used, because another program also writes to it.
            raise NoRoom from error
        region = Region(path=path, start=0, size_bytes=size_bytes)
        return replace(layer, region=region, compress="none"), sha256

    def _write_layer(self, chunks: Iterator[bytes], file: IO[bytes], allowance: Allowance) -> str:
        """Write the unpacked bytes of one layer to `file`, and return their sha256.

        Raise NoRoom if all layers together, which `allowance` counts, have more than `room_bytes`.
        """
        digest = hashlib.sha256()
        for chunk in chunks:
            # Another thread has called `stop` after an error. Nobody reads the result of this call.
            if self._is_stopped:
                break
            self.advance(allowance.unpacked_bytes)
            if allowance.unpacked_bytes > self.room_bytes:
                raise NoRoom
            digest.update(chunk)
            file.write(chunk)
        return digest.hexdigest()

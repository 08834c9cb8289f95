"""The image of a plain archive or an OCI folder where it lies: nothing is copied, a layer can be read twice.

A layer is a range of bytes of a file. Its headers are read by seeking from one to the next, and
`layers.scan_layers` computes its digest meanwhile. Compressed layers are unpacked once, several at a time,
into a `Spool`. Without room for one, they are unpacked at each reading.

Threads help: zlib, digests and writes let other threads run. The files of a spool are never flushed to the
disk, and a small image never leaves the memory for files.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

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
"""Read at once where only headers count, and the rest is passed over."""
# Enough to tell how a layer is compressed.
_MAGIC_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A range of bytes of a file, such as a layer in an archive."""

    path: Path
    start: int
    size_bytes: int
    known_sha256: str = field(default="", compare=False)
    """Hex digest of the bytes if it has been computed; else empty."""

    def chunks(self, chunk_bytes: int) -> FileChunks:
        """Open the file, and return an iterator over the bytes, at most `chunk_bytes` at a time."""
        return FileChunks(self.path, chunk_bytes=chunk_bytes, start=self.start, size_bytes=self.size_bytes)

    def document(self) -> bytes | None:
        """Return the bytes, or None if there are more than `MAX_JSON_BYTES`, too many for a JSON file."""
        if self.size_bytes > MAX_JSON_BYTES:
            return None
        with contextlib.closing(self.chunks(MAX_JSON_BYTES)) as chunks:
            return b"".join(chunks)

    def sha256(self) -> str:
        """Return the hex digest of the bytes."""
        if self.known_sha256:
            return self.known_sha256
        digest = hashlib.sha256()
        with contextlib.closing(self.chunks(CHUNK_BYTES)) as chunks:
            for chunk in chunks:
                digest.update(chunk)
        return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLayer:
    """One layer. ``open`` begins a new walk over its members."""

    region: Region
    diff_id: str
    """``sha256:...`` of its plain bytes."""
    name: str
    """What messages call it."""
    compress: Compress

    @contextlib.contextmanager
    def open(self, *, bodies: bool) -> Iterator[TarStream]:
        """Yield an iterator over the members of the layer.

        Without `bodies`, the caller wants the headers alone, and the content of files is jumped over. A
        compressed layer must be unpacked to its end all the same.
        """
        if self.compress != "none":
            with contextlib.closing(self.plain()) as plain:
                yield TarStream(plain, name=self.name)
            return
        # For headers alone, a large chunk would read most bodies together with the header before them.
        chunk_bytes = CHUNK_BYTES if bodies else _HEADER_BYTES
        with contextlib.closing(self.region.chunks(chunk_bytes)) as chunks:
            yield TarStream(chunks, name=self.name, jump=chunks.skip)

    def plain(self, allowance: Allowance | None = None) -> Generator[bytes, None, None]:
        """Yield its unpacked bytes. `allowance` limits those of a compressed layer."""
        with contextlib.closing(self.region.chunks(CHUNK_BYTES)) as packed:
            yield from compressed.unpack_chunks(packed, self.compress, name=self.name, allowance=allowance)


def hash_chunks(chunks: Iterable[_Chunk], digest: _Hash) -> Iterator[_Chunk]:
    """Yield `chunks` unchanged, and add them to `digest`."""
    for chunk in chunks:
        digest.update(chunk)
        yield chunk


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
        """Raise CheckFailed if a layer is damaged.

        `number` counts layers from 1, and `sha256` is the digest of the layer's unpacked bytes, in hex. The
        image's configuration states the digest that it should have.
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

    A compressed archive is first unpacked to a file in `folder`, which is removed when the block ends.
    `advance` gets the number of bytes unpacked so far.

    Raises
    ------
    CheckFailed : the archive is damaged, or unpacks to more than `unpack_limit_bytes`.
    UsageError : it has several images or none, or is no image archive at all.
    ToolMissing : it is compressed with zstd, and there is no program ``zstd``.
    """
    if path.is_dir() or compressed.detect_compression(path) == "none":
        yield open_image(path)
        return
    plain = folder / "spool.tar"
    where = str(path)
    allowance = Allowance(path.stat().st_size, where, unpack_limit_bytes)
    with contextlib.closing(compressed.read_plain(path, allowance=allowance)) as chunks:
        image = spool_archive(chunks, plain, where=where, advance=advance)
    yield image
    plain.unlink()


def spool_archive(
    chunks: Iterator[bytes], path: Path, *, where: str, advance: Callable[[int], None]
) -> StoredImage:
    """Write the uncompressed archive that comes in `chunks` to `path`, and return the image in it.

    Every file in the archive is hashed on the way, so that no layer has to be read again for its digest.

    Parameters
    ----------
    where : the archive's name, for messages.
    advance : gets the number of bytes so far.

    Raises
    ------
    CheckFailed, UsageError : as in `open_image`, or the archive is cut short.
    """
    with path.open("wb") as file:
        stream = TarStream(_write_chunks(chunks, file, advance), name=where)

        def hash_member(member: Member) -> Region:
            digest = hashlib.sha256()
            for piece in stream.body():
                digest.update(piece)
            return Region(
                path=path,
                start=member.offset,
                size_bytes=member.size_bytes,
                known_sha256=digest.hexdigest(),
            )

        members = read.read_members(stream, hash_member, where=where)
        stream.drain()
    return _make_image(read.select_image(members.find, where=where), where)


def _write_chunks(chunks: Iterator[bytes], file: BinaryIO, advance: Callable[[int], None]) -> Iterator[bytes]:
    """Write `chunks` to `file` and yield them unchanged. `advance` gets the number of bytes so far.

    Raises
    ------
    OSError : the disk is full or fails. The message says how much of the image was written.
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
    CheckFailed : the archive is damaged, or its configuration lists other layers than it has.
    UsageError : it has several images or none, or is no image archive at all.
    """
    where = str(path)
    select = _select_in_folder if path.is_dir() else _select_in_archive
    return _make_image(select(path, where), where)


def _make_image(selected: SelectedImage[Region], where: str) -> StoredImage:
    """Return the image with the selected layers. `where` is its name in messages.

    Raises
    ------
    CheckFailed : its configuration lists other layers.
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

    def store(member: Member) -> Region:
        return Region(path=path, start=member.offset, size_bytes=member.size_bytes)

    with contextlib.closing(FileChunks(path, chunk_bytes=_HEADER_BYTES)) as chunks:
        members = read.read_members(TarStream(chunks, name=where, jump=chunks.skip), store, where=where)
    return read.select_image(members.find, where=where)


def _select_in_folder(path: Path, where: str) -> SelectedImage[Region]:
    """Return the only image of the OCI folder `path`."""

    def find(name: str) -> Region | None:
        file = path / name
        if not file.is_file():
            return None
        return Region(path=file, start=0, size_bytes=file.stat().st_size)

    return read.select_oci_image(find, where=where)


class NoRoom(Exception):
    """The unpacked layers need more disk space than a `Spool` may take. Its files are incomplete then."""


@dataclass(kw_only=True, slots=True)
class Spool:
    """A folder for temporary files with unpacked layers, which may take `room_bytes` together.

    The files are removed at the end of its ``with`` block.
    """

    folder: Path
    room_bytes: int
    advance: Callable[[int], None] = lambda _: None
    """Gets the number of unpacked bytes so far, for a progress display."""
    _paths: list[Path] = field(default_factory=list)
    _is_stopped: bool = False

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        for path in self._paths:
            path.unlink(missing_ok=True)

    def stop(self) -> None:
        """Make every `unpack` end early, because nobody needs the rest."""
        self._is_stopped = True

    def unpack(self, layer: StoredLayer, allowance: Allowance) -> tuple[StoredLayer, str]:
        """Unpack `layer` to a new file. Threads may call this for several layers at once.

        Returns
        -------
        The layer as an uncompressed one in the new file, and the sha256 of its unpacked bytes.

        Raises
        ------
        NoRoom : all layers together need more than `room_bytes`, or the disk is full.
        CheckFailed : the layer is damaged, or all layers unpack to more than `allowance`.
        """
        digest = hashlib.sha256()
        size_bytes = 0
        try:
            with (
                tempfile.NamedTemporaryFile(dir=self.folder, suffix=".tar", delete=False) as file,
                contextlib.closing(layer.plain(allowance)) as chunks,
            ):
                path = Path(file.name)
                self._paths.append(path)
                for chunk in chunks:
                    if self._is_stopped:
                        break
                    # Not `size_bytes`: the allowance counts the bytes of all layers, in all threads.
                    self.advance(allowance.unpacked_bytes)
                    if allowance.unpacked_bytes > self.room_bytes:
                        raise NoRoom
                    digest.update(chunk)
                    file.write(chunk)
                    size_bytes += len(chunk)
        except OSError as error:
            if error.errno not in FULL:
                raise
            # The disk is full within `room_bytes`: another program writes to it, too.
            raise NoRoom from error
        region = Region(path=path, start=0, size_bytes=size_bytes)
        return replace(layer, region=region, compress="none"), digest.hexdigest()

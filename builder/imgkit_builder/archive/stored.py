"""The image of a plain archive or an OCI folder where it lies: nothing is copied, a layer can be read twice.

A layer is a range of bytes of a file. Its headers are read by seeking from one to the next, and `scan`
computes its digest beside that. Compressed layers are unpacked side by side into a spool, and read there.
Without room for one, they are unpacked at each reading.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from imgkit_builder.archive import compressed, read
from imgkit_builder.archive.compressed import Allowance
from imgkit_builder.archive.layer_spool import SpoolFile
from imgkit_builder.archive.read import MAX_JSON_BYTES, SelectedImage
from imgkit_builder.archive.tar_header import HARD_LINK, REGULAR, SYMLINK, Member
from imgkit_builder.archive.tarstream import TarLimits, TarStream, expanded
from imgkit_builder.base import files
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

        stream = TarStream(written(), name=where, limits=TarLimits(entries=read.MAX_MEMBERS))
        for member in stream:
            if member.kind == REGULAR:
                digest = hashlib.sha256()
                for piece in stream.body():
                    digest.update(piece)
                found[member.place] = digest.hexdigest()
        stream.drain()
    return found


def open_image(
    path: Path,
    *,
    limits: TarLimits | None = None,
    where: str = "",
    digests: Mapping[int, str] = MappingProxyType({}),
) -> StoredImage:
    """Find the image of the plain archive or OCI folder `path`; reads no layer. `digests` comes from `spool`.

    Raises
    ------
    CheckFailed : damaged, or its configuration and its list of layers differ.
    UsageError : several images, none, or no image at all.
    """
    where, limits = where or str(path), limits or TarLimits()
    selected = _in_folder(path, where) if path.is_dir() else _in_archive(path, where)
    selected.refuse_faults(where)
    layers = tuple(
        StoredLayer(
            region=region,
            diff_id=diff_id,
            name=f"{where}: layer {number}",
            compress=compressed.kind_of(next(region.chunks(8), b"")),
            limits=limits,
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
        limits=TarLimits(entries=read.MAX_MEMBERS),
    )
    members: read.Members[Region] = read.Members()
    with whole.open(bodies=False) as stream:
        for member in stream:
            if member.kind == REGULAR:
                members.add(member.name, Region(path=path, start=member.place, size_bytes=member.size_bytes))
            elif member.kind in (SYMLINK, HARD_LINK):
                members.add_link(member.name, member.link, symbolic=member.kind == SYMLINK)
    return read.select(members.find, where=where)


def _in_folder(path: Path, where: str) -> SelectedImage[Region]:
    def find(name: str) -> Region | None:
        file = path / name
        return Region(path=file, start=0, size_bytes=file.stat().st_size) if file.is_file() else None

    return read.select_oci(find, where=where)

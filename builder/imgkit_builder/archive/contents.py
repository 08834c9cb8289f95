"""What a saved image archive holds, read and hashed in one pass without extracting. Standard library only.

Layouts: ``docker save`` of engines before 25 (``<id>/layer.tar``), of later ones (OCI blobs with a
``manifest.json``), and plain OCI archives; as tar, tar.gz or tar.zst.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import posixpath
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from imgkit_builder.archive import write
from imgkit_builder.archive.sidecar import Compress
from imgkit_builder.base import process
from imgkit_builder.base.progress import Reporter
from imgkit_entrypoints.errors import CheckFailed, ToolFailed

_BLOCK = 1 << 20
_JSON_MOST = 4 << 20
"""Larger members are layers, never JSON."""

_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_BLOBS = "blobs/sha256/"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedLayer:
    """One layer as it lies in the archive."""

    name: str
    diff_id: str
    """``sha256:...`` of its uncompressed bytes; empty where it is compressed in a way not read here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedImage:
    """The one image of an archive."""

    stated_id: str
    """``sha256:...`` that the configuration's name states."""
    id: str
    """``sha256:...`` that the configuration's bytes have."""
    manifest_digests: tuple[str, ...]
    """``sha256:...`` of its OCI manifests: what engines with the containerd store show as the image's id."""
    platform: str
    tags: tuple[str, ...]
    diff_ids: tuple[str, ...]
    """As the configuration lists them, lowest first."""
    layers: tuple[ArchivedLayer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """An archive that was read to its end."""

    sha256: str
    size_bytes: int
    compress: Compress
    image: ArchivedImage | None
    wrong_blobs: tuple[str, ...]
    """Blobs whose bytes are not what their names state."""
    problem: str
    """Why there is no `image`; empty otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    sha256: str
    diff_sha256: str
    data: bytes | None
    """Of small members only."""


class _Wrong(CheckFailed):
    """The archive is not what it should be."""


def compression(start: bytes) -> Compress | None:
    """How a file that begins with `start` (>= 262 bytes) is compressed; None when it is no archive."""
    if start.startswith(_GZIP):
        return "gzip"
    if start.startswith(_ZSTD):
        return "zstd"
    return "none" if start[257:262] == b"ustar" else None


def read(path: Path, *, compress: Compress, report: Reporter) -> Contents:
    """Read the archive at `path` once, to its end even where it is damaged.

    Raises
    ------
    ToolMissing : it is zstd-compressed and there is no ``zstd``.
    """
    members: dict[str, _Member] = {}
    image, problem = None, ""
    with path.open("rb") as file:
        whole = _Hashed(file, path.stat().st_size, report)
        try:
            _collect(_opened(whole, compress), members)
            image = _image(members)
        except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, ToolFailed, _Wrong) as error:
            problem = error.what if isinstance(error, (ToolFailed, _Wrong)) else f"damaged: {error}"
        whole.drain()
    wrong = tuple(
        name
        for name, member in sorted(members.items())
        if name.startswith(_BLOBS) and name != _BLOBS + member.sha256
    )
    return Contents(
        sha256=whole.digest.hexdigest(),
        size_bytes=whole.done_bytes,
        compress=compress,
        image=image,
        wrong_blobs=wrong,
        problem=problem,
    )


def sha256(path: Path, *, report: Reporter) -> str:
    """Hex digest of the whole file."""
    with path.open("rb") as file:
        whole = _Hashed(file, path.stat().st_size, report)
        whole.drain()
    return whole.digest.hexdigest()


class _Hashed:
    """A file that is hashed as it is read."""

    def __init__(self, file: BinaryIO, size_bytes: int, report: Reporter) -> None:
        self._file, self._size_bytes, self._report = file, size_bytes, report
        self.digest, self.done_bytes = hashlib.sha256(), 0

    def read(self, size: int, /) -> bytes:
        data = self._file.read(size)
        self.digest.update(data)
        self.done_bytes += len(data)
        self._report.advance(self.done_bytes, self._size_bytes)
        return data

    def drain(self) -> None:
        while self.read(_BLOCK):
            pass


class _Unpacked:
    """What ``zstd`` makes of a file; reads may be shorter than asked."""

    def __init__(self, source: _Hashed) -> None:
        chunks = iter(lambda: source.read(_BLOCK), b"")
        self._output = process.through(["zstd", "-q", "-dc"], chunks, hint=write.ZSTD_HINT)
        self._rest = b""

    def read(self, size: int, /) -> bytes:
        if not self._rest:
            self._rest = next(self._output, b"")
        data, self._rest = self._rest[:size], self._rest[size:]
        return data


def _opened(whole: _Hashed, compress: Compress) -> IO[bytes]:
    # tarfile and gzip ask nothing but read(size) of a stream.
    plain = cast(IO[bytes], whole)
    if compress == "gzip":
        return cast(IO[bytes], gzip.GzipFile(fileobj=plain))
    return cast(IO[bytes], _Unpacked(whole)) if compress == "zstd" else plain


def _collect(stream: IO[bytes], members: dict[str, _Member]) -> None:
    links: dict[str, str] = {}
    with tarfile.open(fileobj=stream, mode="r|", bufsize=_BLOCK) as tar:
        for info in tar:
            name = posixpath.normpath(info.name)
            if info.issym():
                # Engines before 25 store a layer that comes twice as a link to its first place.
                links[name] = posixpath.normpath(posixpath.join(posixpath.dirname(name), info.linkname))
            elif info.islnk():
                links[name] = posixpath.normpath(info.linkname)
            elif info.isreg():
                content = tar.extractfile(info)
                assert content is not None  # noqa: S101 - only None for members that are not files
                members[name] = _hashed_member(content, info.size)
    for name, target in links.items():
        if target in members:
            members[name] = members[target]


def _hashed_member(content: IO[bytes], size_bytes: int) -> _Member:
    stored, kept, inner = hashlib.sha256(), bytearray(), None
    first = content.read(_BLOCK)
    if first.startswith(_GZIP):
        inner = _Inflated()
    data = first
    while data:
        stored.update(data)
        if inner:
            inner.update(data)
        if size_bytes <= _JSON_MOST:
            kept += data
        data = content.read(_BLOCK)
    diff = "" if first.startswith(_ZSTD) else (inner.digest if inner else stored).hexdigest()
    return _Member(
        sha256=stored.hexdigest(), diff_sha256=diff, data=bytes(kept) if size_bytes <= _JSON_MOST else None
    )


class _Inflated:
    """Hash of what a gzip stream of one or more members holds."""

    def __init__(self) -> None:
        self.digest, self._inflate = hashlib.sha256(), zlib.decompressobj(wbits=31)

    def update(self, data: bytes) -> None:
        while data:
            self.digest.update(self._inflate.decompress(data))
            data = self._inflate.unused_data
            if self._inflate.eof:
                self._inflate = zlib.decompressobj(wbits=31)


def _image(members: Mapping[str, _Member]) -> ArchivedImage:
    try:
        return _only_image(members)
    except (KeyError, TypeError, AttributeError) as error:
        raise _Wrong(f"its JSON does not describe an image: {error!r}") from error


def _only_image(members: Mapping[str, _Member]) -> ArchivedImage:
    manifests, digests = _oci_manifests(members)
    if "manifest.json" in members:
        entries = _json(members, "manifest.json")
        if not isinstance(entries, list) or len(entries) != 1:
            count = len(entries) if isinstance(entries, list) else "no list of"
            raise _Wrong(f"{count} images in it; a conversion takes exactly one")
        (entry,) = entries
        return _described(
            members, str(entry["Config"]), entry.get("Layers") or (), entry.get("RepoTags") or (), digests
        )
    if len(manifests) == 1:
        (manifest,) = manifests
        layers = [_blob(layer["digest"]) for layer in manifest["layers"]]
        return _described(members, _blob(manifest["config"]["digest"]), layers, (), digests)
    if manifests:
        raise _Wrong(f"{len(manifests)} images in it; a conversion takes exactly one")
    raise _Wrong("neither manifest.json nor index.json in it: not an image archive, or cut off")


def _oci_manifests(members: Mapping[str, _Member]) -> tuple[list[Mapping[str, Any]], tuple[str, ...]]:
    """The image manifests below index.json, and the digests of all that was passed on the way."""
    if "index.json" not in members:
        return [], ()
    found, digests, open_entries = [], [], list(_json(members, "index.json")["manifests"])
    while open_entries:
        entry = open_entries.pop(0)
        # BuildKit puts statements about an image beside it, as further "manifests".
        if (entry.get("annotations") or {}).get("vnd.docker.reference.type") == "attestation-manifest":
            continue
        digests.append(str(entry["digest"]))
        document = _json(members, _blob(entry["digest"]))
        if "manifests" in document:
            open_entries += document["manifests"]
        else:
            found.append(document)
    return found, tuple(digests)


def _described(
    members: Mapping[str, _Member],
    config_name: str,
    layer_names: Sequence[str],
    tags: Sequence[str],
    digests: tuple[str, ...],
) -> ArchivedImage:
    config = _json(members, config_name)
    absent = [name for name in layer_names if name not in members]
    if absent:
        raise _Wrong(f"the layer {absent[0]} is missing")
    layers = (ArchivedLayer(name=name, diff_id=_prefixed(members[name].diff_sha256)) for name in layer_names)
    return ArchivedImage(
        stated_id=_prefixed(posixpath.basename(config_name).removesuffix(".json")),
        id=_prefixed(members[config_name].sha256),
        manifest_digests=digests,
        platform=f"{config['os']}/{config['architecture']}",
        tags=tuple(tags),
        diff_ids=tuple(config["rootfs"]["diff_ids"]),
        layers=tuple(layers),
    )


def _prefixed(digest: str) -> str:
    return f"sha256:{digest}" if digest else ""


def _blob(digest: object) -> str:
    return _BLOBS + str(digest).removeprefix("sha256:")


def _json(members: Mapping[str, _Member], name: str) -> Any:
    member = members.get(name)
    if member is None or member.data is None:
        raise _Wrong(f"{name} is missing in it: cut off, or not an image archive")
    try:
        return json.loads(member.data)
    except ValueError as error:
        raise _Wrong(f"{name} in it is not JSON: {error}") from error

"""Find the one image of an archive or OCI folder, whichever tool wrote it, or hash all of it in one pass.

There are three layouts. ``docker save`` before release 25 writes a folder per layer, and ``manifest.json``
last. From 25 on it writes an OCI layout with a ``manifest.json``. Other tools write the OCI layout alone. A
consumer decides where the files go (`members`), then `select` finds the image among them. Names in an archive
are looked up and never used as paths. Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import posixpath
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Generic, Protocol, TypeVar

from imgkit_builder.archive import compressed
from imgkit_builder.archive.compressed import CHUNK_BYTES, Allowance, Compress
from imgkit_builder.archive.tar_read import HARD_LINK, REGULAR, SYMLINK, Member, TarStream
from imgkit_builder.base.progress import Reporter
from imgkit_builder.oci.config import ImageConfig, parse_config
from imgkit_entrypoints import files, json_text
from imgkit_entrypoints.errors import CheckFailed, ToolFailed, UsageError

MAX_JSON_BYTES = 4 << 20
"""Registries refuse larger manifests; larger files are layers."""
_BLOBS = "blobs/sha256/"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
MAX_MEMBERS = 20_000
"""Files of an image archive; images have hundreds."""
_MAX_LINKS = 8
_MAX_INDEX_DEPTH = 4
AGAIN = "copy the archive again and compare its .sha256 (imgkit verify), or save it again"
_SAVE_HINT = "write one with: imgkit save RECIPE|IMAGE, or: docker save -o FILE.tar REPOSITORY:TAG"

_MAGIC_BYTES = 4
_SMALL_BYTES = 1024
"""A file of this size is kept whatever it begins with, so that a message can say that it is not JSON."""
_MAX_DOCUMENTS_BYTES = 32 << 20
"""Images have some kB of JSON; an archive of many files that unpack to 4 MiB each would fill the memory."""


class _StoredFile(Protocol):
    """A file of an image, wherever a consumer put it."""

    def document(self) -> bytes | None:
        """Return its bytes; None if it has more than `MAX_JSON_BYTES`."""
        ...


File = TypeVar("File", bound=_StoredFile)
Find = Callable[[str], File | None]
"""Look up a file by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Members(Generic[File]):
    """The regular files of an archive; links inside the archive lead to them."""

    files: dict[str, File] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, file: File) -> None:
        """Add a file."""
        self.files[posixpath.normpath(name)] = file

    def add_link(self, name: str, target: str, *, symbolic: bool) -> None:
        """Add a link. Docker before 25 stores a layer that occurs twice as a link to the first one."""
        name = posixpath.normpath(name)
        folder = posixpath.dirname(name) if symbolic else ""
        self.links[name] = posixpath.normpath(posixpath.join(folder, target))

    def find(self, name: str) -> File | None:
        """The file `name`; None if the archive does not have it."""
        name = posixpath.normpath(name)
        for _ in range(_MAX_LINKS):
            if name in self.files:
                return self.files[name]
            if name not in self.links:
                return None
            name = self.links[name]
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedImage(Generic[File]):
    """The only image of an archive or OCI folder."""

    config: ImageConfig
    config_name: str
    layers: tuple[tuple[str, File], ...]
    """Name and file of each layer, lowest first."""
    names: tuple[str, ...]
    """Tags of the image."""

    @property
    def stated_id(self) -> str:
        """``sha256:...`` that the name of the configuration states."""
        digest = posixpath.basename(self.config_name).removesuffix(".json").removeprefix("sha256:")
        return f"sha256:{digest}"

    @property
    def id_fault(self) -> str:
        """How the configuration differs from its name; empty if it does not."""
        if self.stated_id == self.config.image_id:
            return ""
        return f"the configuration has digest {self.config.image_id}, but is named {self.stated_id}"

    @property
    def count_fault(self) -> str:
        """How the number of layers differs from the configuration's; empty if it does not."""
        if len(self.layers) == len(self.config.diff_ids):
            return ""
        return (
            f"the archive has {len(self.layers)} layers, its configuration lists {len(self.config.diff_ids)}"
        )

    def refuse_faults(self, where: str) -> None:
        """Raise CheckFailed where the configuration differs from its name or from the number of layers."""
        # Some tools give the configuration a name that is no digest.
        states_digest = len(self.stated_id) == len(self.config.image_id)
        if fault := (self.id_fault if states_digest else "") or self.count_fault:
            raise CheckFailed(fault, where=where, hint=AGAIN)


def members(stream: TarStream, store: Callable[[Member], File], *, where: str) -> Members[File]:
    """Read the headers of an archive to its end; `store` returns a regular file, and may read its body.

    Raises
    ------
    CheckFailed : damaged or cut short.
    UsageError : far too many members for an image.
    """
    found: Members[File] = Members()
    for number, member in enumerate(stream):
        if number >= MAX_MEMBERS:
            raise _no_image(f"it has more than {MAX_MEMBERS} members", where)
        if member.kind == REGULAR:
            found.add(member.name, store(member))
        elif member.kind in (SYMLINK, HARD_LINK):
            found.add_link(member.name, member.link, symbolic=member.kind == SYMLINK)
    return found


def select(find: Find[File], *, where: str) -> SelectedImage[File]:
    """The only image that ``manifest.json``, or else ``index.json``, describes.

    Raises
    ------
    CheckFailed : damaged: a file is missing, is not JSON or does not describe an image.
    UsageError : several images, none, or not an image archive at all.
    """
    listed = find("manifest.json")
    if listed is None:
        return select_oci(find, where=where)
    images = _parsed(_bytes(listed, "manifest.json", where), "manifest.json", where)
    with _describing("manifest.json", where):
        if not isinstance(images, list):
            raise TypeError("it is not a list")
        described = [
            (str(one["Config"]), _texts(one.get("Layers")), _texts(one.get("RepoTags"))) for one in images
        ]
    if len(described) != 1:
        tags = sorted(tag for _, _, names in described for tag in names)
        hint = f"docker save -o FILE.tar {tags[0] if tags else 'REPOSITORY:TAG'}"
        raise _not_one(len(described), tags, where, hint)
    ((config, layers, names),) = described
    return _selected(find, config, layers, names, named_by="manifest.json", where=where)


def select_oci(find: Find[File], *, where: str) -> SelectedImage[File]:
    """The only image that ``index.json`` describes; raises as `select` does."""
    names: tuple[str, ...] = ()
    entries = _index(find, where)
    for _ in range(_MAX_INDEX_DEPTH + 1):
        if len(entries) != 1:
            hint = "copy one out, for example: skopeo copy oci:DIR:NAME oci:OTHER"
            raise _not_one(len(entries), [_label(one) for one in entries], where, hint)
        (entry,) = entries
        names = _texts([_name(entry)]) or names
        name = _blob_name(entry, "index.json", where)
        document = _blob_document(find, name, "index.json", where)
        with _describing(name, where):
            if "manifests" not in document:
                config = _blob_name(document["config"], name, where)
                layers = tuple(_blob_name(one, name, where) for one in document["layers"])
                return _selected(find, config, layers, names, named_by=name, where=where)
            entries = _images(document)
    raise CheckFailed(f"index.json nests indexes more than {_MAX_INDEX_DEPTH} deep", where=where)


def _selected(
    find: Find[File],
    config: str,
    layers: Sequence[str],
    names: tuple[str, ...],
    *,
    named_by: str,
    where: str,
) -> SelectedImage[File]:
    raw = _bytes(_needed(find, config, named_by, where), config, where)
    files = tuple((name, _needed(find, name, named_by, where)) for name in layers)
    with _describing(config, where):
        parsed = parse_config(raw, where=where)
    return SelectedImage(config=parsed, config_name=config, layers=files, names=names)


def _index(find: Find[File], where: str) -> list[Any]:
    file = find("index.json")
    if file is None:
        raise _no_image("it has neither manifest.json nor index.json", where)
    index = _parsed(_bytes(file, "index.json", where), "index.json", where)
    with _describing("index.json", where):
        return _images(index)


def _images(index: Any) -> list[Any]:
    """Entries of an OCI index without attestations, which BuildKit lists as further images."""
    return [
        one
        for one in index["manifests"]
        if (one.get("annotations") or {}).get("vnd.docker.reference.type") != "attestation-manifest"
        and (one.get("platform") or {}).get("architecture") != "unknown"
    ]


def _name(entry: Any) -> str | None:
    annotations = entry.get("annotations") or {}
    # containerd writes the whole name, skopeo the tag alone.
    return annotations.get("io.containerd.image.name") or annotations.get("org.opencontainers.image.ref.name")


def _label(entry: Any) -> str:
    return str(_name(entry) or (entry.get("platform") or {}).get("architecture", "?"))


def _texts(values: Any) -> tuple[str, ...]:
    return tuple(str(one) for one in values or () if one)


def _blob_name(entry: Any, named_by: str, where: str) -> str:
    with _describing(named_by, where):
        digest = entry["digest"]
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise CheckFailed(f"{named_by} has {digest!r}, which is not a sha256 digest", where=where)
    return _BLOBS + digest.removeprefix("sha256:")


def _blob_document(find: Find[File], name: str, named_by: str, where: str) -> Any:
    raw = _bytes(_needed(find, name, named_by, where), name, where)
    actual = hashlib.sha256(raw).hexdigest()
    if name != _BLOBS + actual:
        raise CheckFailed(f"{name} is damaged: its sha256 is {actual}", where=where)
    return _parsed(raw, name, where)


def _needed(find: Find[File], name: str, named_by: str, where: str) -> File:
    file = find(name)
    if file is None:
        raise CheckFailed(f"{name!r} is missing, though {named_by} names it", where=where)
    return file


def _bytes(file: _StoredFile, name: str, where: str) -> bytes:
    raw = file.document()
    if raw is None:
        raise CheckFailed(
            f"{name} has more than {MAX_JSON_BYTES >> 20} MiB or is not JSON: it does not describe an image",
            where=where,
        )
    return raw


def _parsed(raw: bytes, name: str, where: str) -> Any:
    try:
        return json_text.parse(raw)
    except ValueError as error:
        raise CheckFailed(f"{name} is not JSON: {error}", where=where) from error


@contextlib.contextmanager
def _describing(name: str, where: str) -> Iterator[None]:
    """Turn an error in the use of parsed JSON into a refusal."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckFailed(f"{name} does not describe an image: {error!r}", where=where) from error


def _not_one(count: int, labels: Sequence[str], where: str, hint: str) -> UsageError:
    named = ", ".join(labels) or "without tags"
    return UsageError(f"{count} images ({named}), but imgkit needs exactly one", where=where, hint=hint)


def _no_image(found: str, where: str) -> UsageError:
    return UsageError(
        f"not an image archive: {found} (`docker export` writes such files, without an image)",
        where=where,
        hint=_SAVE_HINT,
    )


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
                stream, documents = TarStream(chunks, name=where), _Documents(where)

                def store(member: Member) -> HashedFile:
                    return _hashed(allowance, documents, member.name, member.size_bytes, stream.body())

                found = members(stream, store, where=where)
                stream.drain()
            wrong = _wrong_blobs(found)
            image = select(found.find, where=where)
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
    blobs = [name for name in sorted({*members.files, *members.links}) if name.startswith(_BLOBS)]
    found = [(name, members.find(name)) for name in blobs]
    return tuple(name for name, file in found if file is not None and name != _BLOBS + file.sha256)

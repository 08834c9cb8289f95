"""Find the one image of an archive or OCI folder, whichever tool wrote it, or hash all of it in one pass.

There are three layouts. ``docker save`` before release 25 writes a folder per layer, and ``manifest.json``
last. From 25 on it writes an OCI layout with a ``manifest.json``. Other tools write the OCI layout alone. The
caller of `read_members` decides what becomes of the files, then `select_image` finds the image among them.
Names in an archive are looked up and never used as paths. Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from imgkit_builder.archive import compressed
from imgkit_builder.archive.compressed import CHUNK_BYTES, Allowance, Compress
from imgkit_builder.archive.tar_read import (
    BLOCK_BYTES,
    HARD_LINK,
    MAGIC,
    REGULAR,
    SYMLINK,
    FileChunks,
    Member,
    TarStream,
)
from imgkit_builder.base import files
from imgkit_builder.base.progress import Reporter
from imgkit_builder.oci.config import ImageConfig, parse_config
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import CheckFailed, ToolFailed, UsageError

MAX_JSON_BYTES = 4 << 20
"""Registries refuse larger manifests; larger files are layers."""
_BLOBS = "blobs/sha256/"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
MAX_MEMBERS = 20_000
"""Files of an image archive; images have hundreds."""
# How many links may follow each other. Tools write one.
_MAX_LINKS = 8
# How many indexes may lie within each other. Tools write two.
MAX_INDEX_DEPTH = 4
COPY_AGAIN_HINT = "copy the archive again and compare its .sha256 (imgkit verify), or save it again"
_SAVE_HINT = "write one with: imgkit save RECIPE|IMAGE, or: docker save -o FILE.tar REPOSITORY:TAG"

# The mark of zstd has 4 bytes, that of gzip 2.
_MAGIC_BYTES = 4
_SMALL_BYTES = 1024
"""A file of this size is kept whatever it begins with, so that a message can say that it is not JSON."""
_MAX_DOCUMENTS_BYTES = 32 << 20
"""Images have some kB of JSON; an archive of many files that unpack to 4 MiB each would fill the memory."""


class _StoredFile(Protocol):
    """A file of an image, in whatever form the caller of `read_members` keeps it: as digests, or on disk."""

    def document(self) -> bytes | None:
        """Return its bytes. None if it has more than `MAX_JSON_BYTES`."""
        ...


File = TypeVar("File", bound=_StoredFile)
Find = Callable[[str], File | None]
"""A function that returns the file of a name such as ``index.json``, or None if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Members(Generic[File]):
    """The regular files of an archive. Links inside the archive lead to them."""

    files: dict[str, File] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)

    def find(self, name: str) -> File | None:
        """Return the file `name`, or None if the archive does not have it. Links are followed."""
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
        """The digest in the name of the configuration: ``blobs/sha256/1a2b...`` -> ``sha256:1a2b...``."""
        digest = posixpath.basename(self.config_name).removesuffix(".json").removeprefix("sha256:")
        return f"sha256:{digest}"

    @property
    def id_problem(self) -> str:
        """A sentence for the user if the configuration has another digest than its name says, or ``""``."""
        if self.stated_id == self.config.image_id:
            return ""
        return f"the configuration has digest {self.config.image_id}, but is named {self.stated_id}"

    @property
    def count_problem(self) -> str:
        """A sentence for the user if the configuration lists another number of layers, or ``""``."""
        count = len(self.layers)
        expected = len(self.config.diff_ids)
        if count == expected:
            return ""
        return f"the archive has {count} layers, its configuration lists {expected}"

    def refuse_problems(self, where: str) -> None:
        """Raise CheckFailed if the configuration has another digest than its name, or lists other layers.

        Such an archive is damaged. `where` is the archive's name, for the message.
        """
        # Some tools give the configuration a name that is no digest.
        states_digest = len(self.stated_id) == len(self.config.image_id)
        if states_digest and self.id_problem:
            raise CheckFailed(self.id_problem, where=where, hint=COPY_AGAIN_HINT)
        if self.count_problem:
            raise CheckFailed(self.count_problem, where=where, hint=COPY_AGAIN_HINT)


def read_members(stream: TarStream, store: Callable[[Member], File], *, where: str) -> Members[File]:
    """Read the headers of an archive to its end, and return its files and links.

    Parameters
    ----------
    store : is called for each regular file. It may read the file's body from `stream`. What it returns, such
        as the file's digest, is the file's value in the result.
    where : the archive's name, for messages.

    Raises
    ------
    CheckFailed : the archive is damaged or cut short.
    UsageError : it has far too many members for an image.
    """
    result: Members[File] = Members()
    for number, member in enumerate(stream):
        if number >= MAX_MEMBERS:
            raise _no_image(f"it has more than {MAX_MEMBERS} members", where)
        name = posixpath.normpath(member.name)
        if member.kind == REGULAR:
            result.files[name] = store(member)
        # Docker before 25 stores a layer that occurs twice as a link to the first one.
        elif member.kind == HARD_LINK:
            result.links[name] = posixpath.normpath(member.link)
        elif member.kind == SYMLINK:
            # Its target is relative to its own folder.
            target = posixpath.join(posixpath.dirname(name), member.link)
            result.links[name] = posixpath.normpath(target)
    return result


def select_image(find: Find[File], *, where: str) -> SelectedImage[File]:
    """Return the only image of an archive, as its ``manifest.json`` or else its ``index.json`` describes it.

    `find` returns a file of the archive by its name. `where` is the archive's name, for messages.

    Raises
    ------
    CheckFailed : the archive is damaged: a file is missing, is not JSON or does not describe an image.
    UsageError : the archive has several images or none, or is not an image archive at all.
    """
    selector = _Selector(find, where)
    if find("manifest.json"):
        return selector.select_by_manifest()
    return selector.select_by_index()


def select_oci_image(find: Find[File], *, where: str) -> SelectedImage[File]:
    """Return the only image that ``index.json`` describes. Raises as `select_image` does."""
    return _Selector(find, where).select_by_index()


class _Selector(Generic[File]):
    """Finds the image that the JSON files of an archive describe. `where` is for messages."""

    def __init__(self, find: Find[File], where: str) -> None:
        self._find = find
        self._where = where

    def select_by_manifest(self) -> SelectedImage[File]:
        """Return the only image of ``manifest.json``, which ``docker save`` writes."""
        images = self._read_json("manifest.json")
        with self._explain_errors("manifest.json"):
            if not isinstance(images, list):
                raise TypeError("it is not a list")
            descriptions = [_describe_image(image) for image in images]
        if len(descriptions) != 1:
            raise self._tags_error(descriptions)
        image = descriptions[0]
        return self._make_image(image.config, image.layers, image.tags, named_by="manifest.json")

    def _tags_error(self, images: Sequence[_ManifestImage]) -> UsageError:
        """Return the error for an archive that has several images or none.

        Its hint shows how to save one of them: ``docker save -o FILE.tar TAG``.
        """
        all_tags: list[str] = []
        for image in images:
            all_tags += image.tags
        all_tags.sort()
        example_tag = "REPOSITORY:TAG"
        if all_tags:
            example_tag = all_tags[0]
        return self._not_one_error(len(images), all_tags, f"docker save -o FILE.tar {example_tag}")

    def select_by_index(self) -> SelectedImage[File]:
        """Return the only image of ``index.json``. The index may refer to an index that lists the image."""
        if self._find("index.json") is None:
            raise _no_image("it has neither manifest.json nor index.json", self._where)
        name = "index.json"
        tags: tuple[str, ...] = ()
        document = self._read_json(name)
        for _ in range(MAX_INDEX_DEPTH + 1):
            entry = self._select_entry(name, document)
            # Each index may state a tag. The one next to the image counts.
            tags = _to_texts([_tag(entry)]) or tags
            name = self._blob_name(entry, "index.json")
            document = self._read_json(name, "index.json")
            with self._explain_errors(name):
                is_index = "manifests" in document
            if not is_index:
                return self._make_image_of_manifest(name, document, tags)
        raise self._error(f"index.json nests indexes more than {MAX_INDEX_DEPTH} deep")

    def _make_image_of_manifest(self, name: str, manifest: Any, tags: tuple[str, ...]) -> SelectedImage[File]:
        """Return the image of the parsed OCI `manifest`, which the file `name` holds."""
        with self._explain_errors(name):
            config = self._blob_name(manifest["config"], name)
            layers = [self._blob_name(layer, name) for layer in manifest["layers"]]
        return self._make_image(config, layers, tags, named_by=name)

    def _select_entry(self, name: str, index: Any) -> Any:
        """Return the only entry of the parsed `index`, which the file `name` holds.

        The entry describes an image or a further index. Entries that describe neither are ignored.

        Raises
        ------
        UsageError : several entries or none.
        """
        with self._explain_errors(name):
            entries = [entry for entry in index["manifests"] if not _is_attestation(entry)]
            labels = [str(_tag(entry) or _architecture(entry) or "?") for entry in entries]
        if len(entries) != 1:
            hint = "copy one out, for example: skopeo copy oci:DIR:NAME oci:OTHER"
            raise self._not_one_error(len(entries), labels, hint)
        return entries[0]

    def _make_image(
        self, config: str, layers: Sequence[str], tags: tuple[str, ...], *, named_by: str
    ) -> SelectedImage[File]:
        """Return the image that has the configuration file `config` and the layer files `layers`.

        `named_by` is the file that lists these names, for messages about a missing file.
        """
        raw = self._read_document(config, named_by)
        # Before the configuration is parsed: if a layer is missing, too, that error explains more.
        layer_files = tuple((layer, self._require_file(layer, named_by)) for layer in layers)
        with self._explain_errors(config):
            parsed = parse_config(raw, where=self._where)
        return SelectedImage(config=parsed, config_name=config, layers=layer_files, names=tags)

    def _require_file(self, name: str, named_by: str) -> File:
        """Return the file `name`, to which the file `named_by` refers."""
        file = self._find(name)
        if file is None:
            raise self._error(f"{name!r} is missing, though {named_by} names it")
        return file

    def _read_document(self, name: str, named_by: str) -> bytes:
        """Return the bytes of the JSON file `name`, to which the file `named_by` refers.

        Raises
        ------
        CheckFailed : it is missing, or so large that it cannot describe an image.
        """
        raw = self._require_file(name, named_by).document()
        if raw is None:
            size = f"{MAX_JSON_BYTES >> 20} MiB"
            raise CheckFailed(
                f"{name} has more than {size} or is not JSON: it does not describe an image",
                where=self._where,
            )
        return raw

    def _read_json(self, name: str, named_by: str = "") -> Any:
        """Return the parsed JSON file `name`.

        A blob is a file that is named after its digest, ``blobs/sha256/1a2b...``: its bytes must have that
        digest.

        Raises
        ------
        CheckFailed : it is missing, has another digest, or is not JSON.
        """
        raw = self._read_document(name, named_by)
        digest = hashlib.sha256(raw).hexdigest()
        if name.startswith(_BLOBS) and name != _BLOBS + digest:
            raise self._error(f"{name} is damaged: its sha256 is {digest}")
        try:
            return json_text.parse(raw)
        except ValueError as error:
            raise self._error(f"{name} is not JSON: {error}") from error

    def _blob_name(self, entry: Any, named_by: str) -> str:
        """Return the name of the file to which an entry of the file `named_by` refers by its digest.

        ``{"digest": "sha256:1a2b..."}`` -> ``blobs/sha256/1a2b...``.
        """
        with self._explain_errors(named_by):
            digest = entry["digest"]
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise self._error(f"{named_by} has {digest!r}, which is not a sha256 digest")
        return _BLOBS + digest.removeprefix("sha256:")

    @contextlib.contextmanager
    def _explain_errors(self, name: str) -> Iterator[None]:
        """Turn an exception in the block, which uses the parsed JSON file `name`, into a CheckFailed.

        The JSON may have any form, so a missing key or a wrong type means that the archive is damaged.
        """
        try:
            yield
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self._error(f"{name} does not describe an image: {error!r}") from error

    def _error(self, problem: str) -> CheckFailed:
        return CheckFailed(problem, where=self._where)

    def _not_one_error(self, count: int, labels: Sequence[str], hint: str) -> UsageError:
        names = ", ".join(labels) or "without tags"
        return UsageError(
            f"{count} images ({names}), but imgkit needs exactly one", where=self._where, hint=hint
        )


class _ManifestImage(NamedTuple):
    """An image in ``manifest.json``. The names of its configuration and layers are those of files."""

    config: str
    layers: tuple[str, ...]
    tags: tuple[str, ...]


def _describe_image(image: Any) -> _ManifestImage:
    """Return what an entry of ``manifest.json`` says."""
    layers = _to_texts(image.get("Layers"))
    tags = _to_texts(image.get("RepoTags"))
    return _ManifestImage(str(image["Config"]), layers, tags)


def _annotations(entry: Any) -> Any:
    return entry.get("annotations") or {}


def _architecture(entry: Any) -> Any:
    """Return the architecture that an entry of an OCI index states, or None."""
    return (entry.get("platform") or {}).get("architecture")


def _is_attestation(entry: Any) -> bool:
    """Return whether an entry of an OCI index describes how an image was built, as BuildKit adds it."""
    kind = _annotations(entry).get("vnd.docker.reference.type")
    return bool(kind == "attestation-manifest" or _architecture(entry) == "unknown")


def _tag(entry: Any) -> Any:
    """Return the name or tag that an entry of an OCI index states, or None."""
    # containerd writes the whole name, skopeo the tag alone.
    values = _annotations(entry)
    return values.get("io.containerd.image.name") or values.get("org.opencontainers.image.ref.name")


def _to_texts(values: Any) -> tuple[str, ...]:
    """Return the values of a JSON list as texts, without empty ones: ``["a", null]`` -> ``("a",)``."""
    return tuple(str(value) for value in values or () if value)


def _no_image(problem: str, where: str) -> UsageError:
    return UsageError(
        f"not an image archive: {problem} (`docker export` writes such files, without an image)",
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
        """Return its bytes. None if it has more than `MAX_JSON_BYTES`."""
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
    """Return how the archive `path` is compressed, ``"none"`` for a plain tar, or None if it is no archive.

    Raises
    ------
    UsageError : the file is compressed with bzip2 or xz, which imgkit does not read.
    """
    compress = compressed.detect_compression(path)
    if compress != "none":
        return compress
    with files.open_regular(path) as stream:
        header = stream.read(BLOCK_BYTES)
    if not header[MAGIC].startswith(b"ustar"):
        return None
    return "none"


def hash_file(path: Path, *, report: Reporter) -> str:
    """Return the hex digest of the whole file."""
    with files.open_regular(path, buffering=0) as file:
        return files.sha256(file, 0, path.stat().st_size, advance=report.advance)


def digest_archive(
    path: Path, *, compress: Compress, report: Reporter, unpack_limit_bytes: int | None = None
) -> Contents:
    """Read the archive `path` once, hash it and the files in it, and find its image.

    A damaged archive is read to its end, too, since its digest says whether the copy or the original is at
    fault. Nothing is written: a login node may have no room for the content of a compressed archive.

    Returns
    -------
    The digests, and the image. If there is none, `Contents.problem` says why.

    Raises
    ------
    ToolMissing : the archive is compressed with zstd, and there is no program ``zstd``.
    """
    where = str(path)
    total = path.stat().st_size
    digest = hashlib.sha256()
    size_bytes = 0
    image: SelectedImage[HashedFile] | None = None
    wrong_blobs = []
    problem = ""
    with contextlib.closing(FileChunks(path, chunk_bytes=CHUNK_BYTES)) as chunks:

        def next_chunk() -> bytes:
            nonlocal size_bytes
            chunk = next(chunks, b"")
            digest.update(chunk)
            size_bytes += len(chunk)
            report.advance(size_bytes, total)
            return chunk

        raw = iter(next_chunk, b"")
        allowance = Allowance(total, where, unpack_limit_bytes)
        try:
            plain = compressed.unpack_chunks(raw, compress, name=where, allowance=allowance)
            with contextlib.closing(plain):
                members = _MemberHasher(plain, allowance, where).hash_members()
            wrong_blobs = _find_wrong_blobs(members)
            selected = select_image(members.find, where=where)
            if not selected.config.os:
                raise CheckFailed("its image configuration names no operating system", where=where)
            image = selected
        except (CheckFailed, ToolFailed, UsageError) as error:
            problem = error.what
            if error.where not in (None, where):
                problem = f"{error.where}: {problem}"
        # Read the rest: `digest` is that of the whole file.
        for _ in raw:
            pass
    return Contents(
        sha256=digest.hexdigest(),
        size_bytes=size_bytes,
        image=image,
        wrong_blobs=tuple(wrong_blobs),
        problem=problem,
    )


def _find_wrong_blobs(members: Members[HashedFile]) -> list[str]:
    """Return the names of blobs whose bytes do not have the digest in their name."""
    wrong_blobs = []
    for name in sorted(members.files | members.links):
        file = members.find(name)
        if name.startswith(_BLOBS) and file and name != _BLOBS + file.sha256:
            wrong_blobs.append(name)
    return wrong_blobs


class _MemberHasher:
    """Hashes every file of an archive, and keeps the content of files that may be JSON.

    `chunks` are the unpacked bytes of the archive. `allowance` limits what its layers may unpack to.
    """

    def __init__(self, chunks: Iterator[bytes], allowance: Allowance, where: str) -> None:
        self._stream = TarStream(chunks, name=where)
        self._allowance = allowance
        self._where = where
        self._json_bytes = 0

    def hash_members(self) -> Members[HashedFile]:
        """Read the archive to its end, and return the digests of its files.

        Raises
        ------
        CheckFailed : the archive is damaged, or has more JSON than fits into memory.
        """
        members = read_members(self._stream, self._hash_member, where=self._where)
        self._stream.drain()
        return members

    def _hash_member(self, member: Member) -> HashedFile:
        """Return the digests of the file `member`, and its content if that may be JSON."""
        pieces = self._stream.body()
        # The first piece may be too short to tell the compression.
        start = b""
        while len(start) < min(_MAGIC_BYTES, member.size_bytes):
            start += next(pieces)
        may_be_json = member.size_bytes <= MAX_JSON_BYTES and _begins_as_json(start)
        if may_be_json:
            self._json_bytes += member.size_bytes
            if self._json_bytes > _MAX_DOCUMENTS_BYTES:
                raise CheckFailed(
                    f"its JSON files have more than {_MAX_DOCUMENTS_BYTES >> 20} MiB together",
                    where=self._where,
                    hint="do not use the archive if you do not know its author",
                )
        return _hash_file(
            itertools.chain([memoryview(start)], pieces),
            compressed.compression_of(start),
            self._allowance,
            name=member.name,
            is_kept=may_be_json or member.size_bytes <= _SMALL_BYTES,
        )


def _begins_as_json(start: bytes) -> bool:
    """Return whether a file that begins with `start` may be a JSON object or list."""
    return start.lstrip()[:1] in (b"", b"{", b"[")


def _hash_file(
    pieces: Iterable[memoryview], compress: Compress, allowance: Allowance, *, name: str, is_kept: bool
) -> HashedFile:
    """Return the digest of a file as it lies in the archive, and the digest of its unpacked bytes.

    Parameters
    ----------
    pieces : the bytes of the file.
    compress : how the file is compressed. A zstd file is not unpacked, and has no second digest.
    allowance : limits how many bytes may come out.
    name : the file's name, for messages.
    is_kept : keep the bytes, too, because the file may be JSON.
    """
    stored = hashlib.sha256()
    unpacked = hashlib.sha256()
    gunzip = compressed.Gunzip(name)
    data = bytearray()
    for piece in pieces:
        stored.update(piece)
        if is_kept:
            data += piece
        if compress == "gzip":
            for plain in gunzip.feed(piece):
                allowance.add_unpacked(len(plain))
                unpacked.update(plain)
    sha256 = stored.hexdigest()
    diff_id = ""
    if compress == "gzip":
        unpacked.update(gunzip.finish())
        diff_id = f"sha256:{unpacked.hexdigest()}"
    elif compress == "none":
        diff_id = f"sha256:{sha256}"
    return HashedFile(sha256=sha256, diff_id=diff_id, data=bytes(data) if is_kept else None)

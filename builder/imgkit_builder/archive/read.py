"""Find the image in an archive or OCI folder of any tool, or hash a whole archive in one pass.

There are three layouts. ``docker save`` before release 25 writes a folder for each layer, and
``manifest.json`` last. From release 25 on, it writes an OCI layout with a ``manifest.json``. Other tools
write only the OCI layout. The caller of `read_members` decides how the files are stored. Then `select_image`
finds the image among them. Names in an archive are only looked up, and never used as paths. The module needs
only the standard library.
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
from imgkit_entrypoints.errors import CheckFailed, ImgkitError, ToolFailed, UsageError

MAX_JSON_BYTES = 4 << 20
"""Largest size of a JSON file. Registries refuse larger manifests, so a larger file must be a layer."""
_SHA256_BLOBS = "blobs/sha256/"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
MAX_MEMBERS = 20_000
"""Largest number of members in an image archive. Images have hundreds."""
# The longest chain of links. Tools write chains of one.
_MAX_LINKS = 8
# The deepest nesting of indexes. Tools write two levels.
MAX_INDEX_DEPTH = 4
COPY_AGAIN_HINT = "copy the archive again and compare its .sha256 (imgkit verify), or save it again"
_SAVE_HINT = "write one with: imgkit save RECIPE|IMAGE, or: docker save -o FILE.tar REPOSITORY:TAG"

# The magic bytes of zstd are 4 bytes, those of gzip 2.
_MAGIC_BYTES = 4
_SMALL_BYTES = 1024
"""A file up to this size is always kept."""
_MAX_DOCUMENTS_BYTES = 32 << 20
"""Largest total size of the JSON files. Images have a few kB of JSON. Without this limit, an archive of many
files that unpack to 4 MiB each could fill the memory."""


class _StoredFile(Protocol):
    """A file of an image, as the caller of `read_members` stores it: as digests, or as a range on disk."""

    def document(self) -> bytes | None:
        """Return the bytes of the file, or None if it has more than `MAX_JSON_BYTES`."""
        ...


File = TypeVar("File", bound=_StoredFile)
Find = Callable[[str], File | None]
"""A function that returns the file with a name such as ``index.json``, or None if it does not exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Members(Generic[File]):
    """The regular files of an archive by name, and the links in the archive with their targets."""

    files: dict[str, File] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)

    def find(self, name: str) -> File | None:
        """Return the file `name`, or None if it is not in the archive. Links are followed."""
        name = posixpath.normpath(name)
        # The number of links is limited, because a hostile archive may have a link to itself.
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
        """A sentence for the user if the number of layers differs from the configuration's, or ``""``."""
        count = len(self.layers)
        expected = len(self.config.diff_ids)
        if count == expected:
            return ""
        return f"the archive has {count} layers, its configuration lists {expected}"

    def refuse_problems(self, where: str) -> None:
        """Raise CheckFailed if the digest of the configuration or the number of its layers is wrong.

        Such an archive is damaged. `where` is the name of the archive, for the message.
        """
        # Some tools give the configuration a name that is not a digest. Then there is nothing to compare. A
        # name with as many characters as "sha256:" and 64 digits counts as a digest.
        is_named_by_digest = len(self.stated_id) == len(self.config.image_id)
        # Both problems are sentences, and empty if nothing is wrong.
        if is_named_by_digest and self.id_problem:
            raise CheckFailed(self.id_problem, where=where, hint=COPY_AGAIN_HINT)
        if self.count_problem:
            raise CheckFailed(self.count_problem, where=where, hint=COPY_AGAIN_HINT)


def read_members(stream: TarStream, store: Callable[[Member], File], *, where: str) -> Members[File]:
    """Read the headers of an archive to its end, and return its files and links.

    Parameters
    ----------
    store : a function that is called for each regular file. It may read the content of the file from
        `stream`. Its result, such as the digest of the file, is stored in `Members.files`.
    where : the name of the archive, for messages.

    Raises
    ------
    CheckFailed : the archive is damaged or cut short.
    UsageError : the archive has far more members than an image.
    """
    members: Members[File] = Members()
    for index, member in enumerate(stream):
        if index >= MAX_MEMBERS:  # a hostile archive may have endless members to fill the memory
            raise _no_image_error(f"it has more than {MAX_MEMBERS} members", where)
        name = posixpath.normpath(member.name)
        if member.kind == REGULAR:
            # Call `store` now: the content can be read only before the next member.
            members.files[name] = store(member)
        # Docker before 25 stores a layer that occurs twice as a link to the first one.
        elif member.kind == HARD_LINK:
            members.links[name] = posixpath.normpath(member.link)
        elif member.kind == SYMLINK:
            # The target of a symlink is relative to the folder of the link.
            target = posixpath.join(posixpath.dirname(name), member.link)
            members.links[name] = posixpath.normpath(target)
    return members


def select_image(find: Find[File], *, where: str) -> SelectedImage[File]:
    """Return the only image of an archive, described by its ``manifest.json`` or else by its ``index.json``.

    `find` is a function that returns a file of the archive by its name. `where` is the name of the archive,
    for messages.

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
    """Return the only image that ``index.json`` describes. The errors are those of `select_image`."""
    return _Selector(find, where).select_by_index()


class _Selector(Generic[File]):
    """Finds the image that the JSON files of an archive describe. `where` is only used in messages."""

    def __init__(self, find: Find[File], where: str) -> None:
        self._find = find
        self._where = where

    def select_by_manifest(self) -> SelectedImage[File]:
        """Return the only image in ``manifest.json``, the list of images that ``docker save`` writes."""
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
        """Return the error for an archive with several images or none.

        The hint shows how to save a single image: ``docker save -o FILE.tar TAG``.
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
        """Return the only image of ``index.json``. This index may refer to another index with the image."""
        if self._find("index.json") is None:
            raise _no_image_error("it has neither manifest.json nor index.json", self._where)
        # `document` is the parsed JSON of the file `name`: first index.json, then what each index refers to.
        name = "index.json"
        document = self._read_json(name)
        tags: tuple[str, ...] = ()
        # The number of levels is limited, so that a hostile archive cannot make the loop long.
        for _ in range(MAX_INDEX_DEPTH + 1):
            entry = self._select_entry(name, document)
            # Each index may contain a tag. The innermost tag has priority. `_to_texts` leaves None out.
            tags = _to_texts([_get_tag(entry)]) or tags
            name = self._get_blob_name(entry, "index.json")
            document = self._read_json(name, "index.json")
            if not self._is_index(name, document):  # it is the manifest of the image
                return self._make_image_of_manifest(name, document, tags)
        raise self._error(f"index.json nests indexes more than {MAX_INDEX_DEPTH} deep")

    def _is_index(self, name: str, document: Any) -> bool:
        """Return whether the parsed JSON of the file `name` is an index, and not the manifest of an image.

        Raises
        ------
        CheckFailed : the JSON is neither, for example a number.
        """
        with self._explain_errors(name):
            return "manifests" in document

    def _make_image_of_manifest(self, name: str, manifest: Any, tags: tuple[str, ...]) -> SelectedImage[File]:
        """Return the image of an OCI manifest. `manifest` is the parsed JSON of the file `name`."""
        with self._explain_errors(name):
            config_name = self._get_blob_name(manifest["config"], name)
            layer_names = [self._get_blob_name(layer, name) for layer in manifest["layers"]]
        return self._make_image(config_name, layer_names, tags, named_by=name)

    def _select_entry(self, name: str, index: Any) -> Any:
        """Return the only entry of an OCI index. `index` is the parsed JSON of the file `name`.

        The entry describes an image or another index. Attestations, which describe neither, are ignored.

        Raises
        ------
        UsageError : the index has several such entries or none.
        """
        with self._explain_errors(name):
            entries = [entry for entry in index["manifests"] if not _is_attestation(entry)]
            labels = [str(_get_tag(entry) or _get_architecture(entry) or "?") for entry in entries]
        if len(entries) != 1:
            hint = "copy one out, for example: skopeo copy oci:DIR:NAME oci:OTHER"
            raise self._not_one_error(len(entries), labels, hint)
        return entries[0]

    def _make_image(
        self, config_name: str, layer_names: Sequence[str], tags: tuple[str, ...], *, named_by: str
    ) -> SelectedImage[File]:
        """Return the image with this configuration file and these layer files.

        `named_by` is the file that lists these names. It is used in messages about a missing file.

        Raises
        ------
        CheckFailed : a file is missing, or the configuration is not that of an image.
        """
        config_json = self._read_document(config_name, named_by)
        # Look for the layers before parsing the configuration. If both fail, a missing layer explains more.
        layers = tuple((name, self._require_file(name, named_by)) for name in layer_names)
        # The JSON may have any structure. This turns a KeyError or TypeError into CheckFailed.
        with self._explain_errors(config_name):
            config = parse_config(config_json, where=self._where)
        return SelectedImage(config=config, config_name=config_name, layers=layers, names=tags)

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
        CheckFailed : the file is missing, or so large that it cannot describe an image.
        """
        document = self._require_file(name, named_by).document()
        if document is None:
            size = f"{MAX_JSON_BYTES >> 20} MiB"
            raise CheckFailed(
                f"{name} has more than {size} or is not JSON: it does not describe an image",
                where=self._where,
            )
        return document

    def _read_json(self, name: str, named_by: str = "") -> Any:
        """Return the parsed JSON file `name`.

        If the file is a blob (named after its digest, ``blobs/sha256/1a2b...``), its digest is verified.

        Parameters
        ----------
        named_by : the file that refers to `name`, for the message if it is missing. It is only left out for
            a file such as ``index.json``, which is known to exist.

        Raises
        ------
        CheckFailed : the file is missing, has a wrong digest, or is not JSON.
        """
        json_bytes = self._read_document(name, named_by)
        sha256 = hashlib.sha256(json_bytes).hexdigest()
        is_blob = name.startswith(_SHA256_BLOBS)
        if is_blob and name != _SHA256_BLOBS + sha256:
            raise self._error(f"{name} is damaged: its sha256 is {sha256}")
        try:
            return json_text.parse(json_bytes)
        except ValueError as error:
            raise self._error(f"{name} is not JSON: {error}") from error

    def _get_blob_name(self, entry: Any, named_by: str) -> str:
        """Return the file name for the digest in an entry of the JSON file `named_by`.

        ``{"digest": "sha256:1a2b..."}`` -> ``blobs/sha256/1a2b...``.

        Raises
        ------
        CheckFailed : the entry has no valid digest.
        """
        with self._explain_errors(named_by):
            digest = entry["digest"]
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise self._error(f"{named_by} has {digest!r}, which is not a sha256 digest")
        return _SHA256_BLOBS + digest.removeprefix("sha256:")

    @contextlib.contextmanager
    def _explain_errors(self, name: str) -> Iterator[None]:
        """Replace exceptions of a block that uses the parsed JSON file `name` by CheckFailed.

        The JSON may have any structure. A missing key or a wrong type means that the archive is damaged.
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
    """An image in ``manifest.json``. `config` and `layers` are names of files in the archive."""

    config: str
    layers: tuple[str, ...]
    tags: tuple[str, ...]


def _describe_image(image: Any) -> _ManifestImage:
    """Return the names and tags in an entry of ``manifest.json``."""
    layers = _to_texts(image.get("Layers"))
    tags = _to_texts(image.get("RepoTags"))
    return _ManifestImage(str(image["Config"]), layers, tags)


def _get_annotations(entry: Any) -> Any:
    return entry.get("annotations") or {}


def _get_architecture(entry: Any) -> Any:
    """Return the architecture in an entry of an OCI index, or None."""
    return (entry.get("platform") or {}).get("architecture")


def _is_attestation(entry: Any) -> bool:
    """Return whether an entry of an OCI index is an attestation.

    BuildKit adds such entries, which describe how the image was built.
    """
    kind = _get_annotations(entry).get("vnd.docker.reference.type")
    return bool(kind == "attestation-manifest" or _get_architecture(entry) == "unknown")


def _get_tag(entry: Any) -> Any:
    """Return the name or tag in an entry of an OCI index, or None."""
    # containerd writes the full name of the image, skopeo only the tag.
    annotations = _get_annotations(entry)
    return annotations.get("io.containerd.image.name") or annotations.get("org.opencontainers.image.ref.name")


def _to_texts(values: Any) -> tuple[str, ...]:
    """Return the values of a JSON list as strings, without empty values: ``["a", null]`` -> ``("a",)``."""
    return tuple(str(value) for value in values or () if value)


def _no_image_error(problem: str, where: str) -> UsageError:
    return UsageError(
        f"not an image archive: {problem} (`docker export` writes such files, without an image)",
        where=where,
        hint=_SAVE_HINT,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HashedFile:
    """The digests of one file in an archive."""

    sha256: str
    """Hex digest of the file as it is stored in the archive."""
    diff_id: str
    """``sha256:...`` of the unpacked file. Empty for a zstd file, which is not unpacked here."""
    data: bytes | None
    """The bytes of the file if it may be JSON, else None."""

    def document(self) -> bytes | None:
        """Return the bytes of the file, or None if it cannot be JSON."""
        return self.data


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The result of reading an archive to its end: digests and the image."""

    sha256: str
    size_bytes: int
    image: SelectedImage[HashedFile] | None
    wrong_blobs: tuple[str, ...]
    """Names of blobs whose digest differs from the digest in their name."""
    problem: str
    """Why `image` is None. Empty if there is an image."""


def archive_compression(path: Path) -> Compress | None:
    """Return how the archive `path` is compressed, or None if the file is not an archive.

    The result for a plain tar is ``"none"``.

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
    """Return the sha256 of the whole file in hex."""
    with files.open_regular(path, buffering=0) as file:
        return files.sha256(file, 0, path.stat().st_size, advance=report.advance)


def digest_archive(
    path: Path, *, compress: Compress, report: Reporter, unpack_limit_bytes: int | None = None
) -> Contents:
    """Read the archive `path` once, compute the digests of the archive and its files, and find its image.

    Even a damaged archive is read to its end. Its digest shows whether the original is damaged or only this
    copy. Nothing is written to disk, because a login node may have no space for an unpacked archive.

    Returns
    -------
    The digests and the image. If no image was found, `Contents.problem` says why.

    Raises
    ------
    ToolMissing : the archive is compressed with zstd, and the program ``zstd`` is missing.
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
            image = _select_image_with_os(members, where)
        except (CheckFailed, ToolFailed, UsageError) as error:
            problem = _describe_problem(error, where)
        # After an error, read the rest of the file, so that `digest` is complete.
        for _ in raw:
            pass
    return Contents(
        sha256=digest.hexdigest(),
        size_bytes=size_bytes,
        image=image,
        wrong_blobs=tuple(wrong_blobs),
        problem=problem,
    )


def _select_image_with_os(members: Members[HashedFile], where: str) -> SelectedImage[HashedFile]:
    """Return the only image of an archive. Raise CheckFailed if its operating system is unknown."""
    image = select_image(members.find, where=where)
    if not image.config.os:
        raise CheckFailed("its image configuration names no operating system", where=where)
    return image


def _describe_problem(error: ImgkitError, where: str) -> str:
    """Return the message of `error`. If it is about another file than the archive `where`, name that file."""
    if error.where in (None, where):
        return error.what
    return f"{error.where}: {error.what}"


def _find_wrong_blobs(members: Members[HashedFile]) -> list[str]:
    """Return the names of blobs whose digest differs from the digest in their name."""
    # A blob is a file that is named after its digest: ``blobs/sha256/1a2b...``. A link may have such a name.
    wrong_blobs = []
    for name in sorted(members.files | members.links):
        file = members.find(name)
        is_blob = name.startswith(_SHA256_BLOBS)
        # `file` is None for a link without a target.
        if is_blob and file and name != _SHA256_BLOBS + file.sha256:
            wrong_blobs.append(name)
    return wrong_blobs


class _MemberHasher:
    """Computes the digests of all files of an archive, and keeps the content of files that may be JSON.

    `chunks` are the unpacked bytes of the archive. `allowance` limits the size of its unpacked layers.
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
        CheckFailed : the archive is damaged, or its JSON files exceed `_MAX_DOCUMENTS_BYTES`.
        """
        members = read_members(self._stream, self._hash_member, where=self._where)
        # Also unpack what follows the last member: only there, a compressed archive shows that it is cut.
        self._stream.drain()
        return members

    def _hash_member(self, member: Member) -> HashedFile:
        """Return the digests of the file `member`, and its content if it may be JSON or is small."""
        chunks = self._stream.body()
        start = _read_start(chunks, min(_MAGIC_BYTES, member.size_bytes))
        # Layers are too large to be kept. But which of the files are JSON documents is known only after the
        # index has been read, so everything that may be one is kept.
        may_be_json = member.size_bytes <= MAX_JSON_BYTES and _begins_as_json(start)
        if may_be_json:
            self._json_bytes += member.size_bytes
            if self._json_bytes > _MAX_DOCUMENTS_BYTES:
                raise CheckFailed(
                    f"its JSON files have more than {_MAX_DOCUMENTS_BYTES >> 20} MiB together",
                    where=self._where,
                    hint="do not use the archive if you do not know its author",
                )
        # A small file is always kept, so that a message can say that it is not JSON. It is not counted,
        # because `MAX_MEMBERS` limits the number of files.
        is_small = member.size_bytes <= _SMALL_BYTES
        return _hash_file(
            itertools.chain([memoryview(start)], chunks),
            compressed.compression_of(start),
            self._allowance,
            name=member.name,
            is_kept=may_be_json or is_small,
        )


def _read_start(chunks: Iterator[memoryview], least_bytes: int) -> bytes:
    """Read the first chunks of a file until there are `least_bytes`, because a chunk may be shorter."""
    start = b""
    while len(start) < least_bytes:
        start += next(chunks)
    return start


def _begins_as_json(start: bytes) -> bool:
    """Return whether a file that begins with `start` may be a JSON object or list."""
    # If `start` has only spaces or is empty, the JSON may follow.
    return start.lstrip()[:1] in (b"", b"{", b"[")


def _hash_file(
    pieces: Iterable[memoryview], compress: Compress, allowance: Allowance, *, name: str, is_kept: bool
) -> HashedFile:
    """Return the digest of a file as it is stored, and the digest of its unpacked bytes (`diff_id`).

    The second digest shows which layer of the image the file is, because the configuration lists the layers
    by it.

    Parameters
    ----------
    pieces : the bytes of the file, in chunks.
    compress : how the file is compressed. A zstd file is not unpacked, so its `diff_id` is ``""``.
    allowance : limits the number of unpacked bytes.
    name : name of the file, for messages.
    is_kept : whether the result includes the bytes, because the file may be JSON.
    """
    stored = hashlib.sha256()
    unpacked = hashlib.sha256()
    gunzip = compressed.Gunzip(name)
    kept_bytes = bytearray()
    for piece in pieces:
        stored.update(piece)
        if is_kept:
            kept_bytes += piece
        if compress == "gzip":
            for plain in gunzip.feed(piece):
                allowance.add_unpacked(len(plain))  # raises an error if the archive unpacks to too much
                unpacked.update(plain)
    sha256 = stored.hexdigest()
    diff_id = ""
    if compress == "gzip":
        unpacked.update(gunzip.finish())
        diff_id = f"sha256:{unpacked.hexdigest()}"
    elif compress == "none":
        diff_id = f"sha256:{sha256}"
    return HashedFile(sha256=sha256, diff_id=diff_id, data=bytes(kept_bytes) if is_kept else None)

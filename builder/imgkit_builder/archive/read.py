"""Find the one image of an archive or OCI folder, whichever tool wrote it. Standard library only.

There are three layouts. ``docker save`` before release 25 writes a folder per layer, and ``manifest.json``
last. From 25 on it writes an OCI layout with a ``manifest.json``. Other tools write the OCI layout alone. A
consumer decides where the files go (`members`), then `select` finds the image among them. Names in an archive
are looked up and never used as paths.
"""

from __future__ import annotations

import contextlib
import hashlib
import posixpath
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from imgkit_builder.archive.tar_header import HARD_LINK, REGULAR, SYMLINK
from imgkit_builder.archive.tarstream import TarStream
from imgkit_builder.oci.config import ImageConfig, parse_config
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import CheckFailed, UsageError

MAX_JSON_BYTES = 4 << 20
"""Registries refuse larger manifests; larger files are layers."""
BLOBS = "blobs/sha256/"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
MAX_MEMBERS = 20_000
"""Files of an image archive; images have hundreds."""
_MAX_LINKS = 8
_MAX_INDEX_DEPTH = 4
AGAIN = "copy the archive again and compare its .sha256 (imgkit verify), or save it again"
_SAVE_HINT = "write one with: imgkit save RECIPE|IMAGE, or: docker save -o FILE.tar REPOSITORY:TAG"


class StoredFile(Protocol):
    """A file of an image, wherever a consumer put it."""

    def document(self) -> bytes | None:
        """Return its bytes; None if it has more than `MAX_JSON_BYTES`."""
        ...


File = TypeVar("File", bound=StoredFile)
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


def members(
    chunks: Iterator[bytes], store: Callable[[str, int, Iterator[memoryview]], File], *, where: str
) -> Members[File]:
    """Read the tar in `chunks` to its end; `store` takes name, size in bytes and bytes of each regular file.

    Raises
    ------
    CheckFailed : damaged or cut short.
    UsageError : far too many members for an image.
    """
    found: Members[File] = Members()
    stream = TarStream(chunks, name=where)
    for number, member in enumerate(stream):
        if number >= MAX_MEMBERS:
            raise _no_image(f"it has more than {MAX_MEMBERS} members", where)
        if member.kind == REGULAR:
            found.add(member.name, store(member.name, member.size_bytes, stream.body()))
        elif member.kind in (SYMLINK, HARD_LINK):
            found.add_link(member.name, member.link, symbolic=member.kind == SYMLINK)
    stream.drain()
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
        raise CheckFailed(f"{named_by} has {digest!r} where a sha256 digest belongs", where=where)
    return BLOBS + digest.removeprefix("sha256:")


def _blob_document(find: Find[File], name: str, named_by: str, where: str) -> Any:
    raw = _bytes(_needed(find, name, named_by, where), name, where)
    actual = hashlib.sha256(raw).hexdigest()
    if name != BLOBS + actual:
        raise CheckFailed(f"{name} is damaged: its sha256 is {actual}", where=where)
    return _parsed(raw, name, where)


def _needed(find: Find[File], name: str, named_by: str, where: str) -> File:
    file = find(name)
    if file is None:
        raise CheckFailed(f"{name!r} is missing, though {named_by} names it", where=where)
    return file


def _bytes(file: StoredFile, name: str, where: str) -> bytes:
    raw = file.document()
    if raw is None:
        raise CheckFailed(
            f"{name} has more than {MAX_JSON_BYTES >> 20} MiB or is no JSON: it does not describe an image",
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
    return UsageError(f"{count} images ({named}), and imgkit needs exactly one", where=where, hint=hint)


def _no_image(found: str, where: str) -> UsageError:
    return UsageError(
        f"not an image archive: {found} (`docker export` writes such files, without an image)",
        where=where,
        hint=_SAVE_HINT,
    )

"""Read and write the description in a delta file, and list the deltas in a .sif.

A delta file is a squashfs that a runtime can mount as it is; a mount ignores the bytes after it::

    +---------------------+  byte 0
    | squashfs            |  the changed files, and whiteouts
    +---------------------+
    | JSON object         |  `Delta`
    +---------------------+
    | length of the JSON  |  8 bytes, little-endian
    | mark ``IMGDELTA``   |  8 bytes
    +---------------------+

``imgkit show FILE`` prints `file_facts`; ``singularity inspect`` shows only the base.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from imgkit_builder.base import files
from imgkit_builder.sif import image, sqsh
from imgkit_builder.sif.image import Descriptor, ImgkitRecord, SifImage
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import CheckFailed, UsageError
from imgkit_entrypoints.launch import delta_check

SCHEMA = 1
INSIDE = delta_check.DELTA_JSON.lstrip("/")
"""A file in the delta's tree, by which the commands of the image see that the delta is there."""
CODE_PLACE = "workspace"
"""Folder of an image over which the code of a run lies (`delta/code.py`)."""
_MARK = image.DELTA_MARK

_FACTS_SCHEMA = 1
_MB, _KB = 1e6, 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseSif:
    """The .sif below a delta, identified by its content and never by the whole file's digest."""

    image_id: str
    root_sha256: str
    """Hex digest of the root partition."""
    deltas: tuple[str, ...]
    """Hex sha256 of the deltas in it, lowest first."""

    def __str__(self) -> str:
        image = self.image_id.removeprefix("sha256:")[:12]
        return f"image {image} ({len(self.deltas)} deltas on root partition {self.root_sha256[:12]})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """Description of one delta."""

    image_id: str
    """``sha256:...`` of the image that base and delta form together."""
    diff_ids: tuple[str, ...]
    """``sha256:...`` of the image's layers, lowest first."""
    arch: str
    created: str
    source: str
    """Name of the image, for people."""
    base: BaseSif
    sha256: str
    """Hex digest of the squashfs."""
    size_bytes: int
    """Size of the squashfs."""
    imgkit: str
    """Version of imgkit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A .sif with the deltas in it."""

    sif: SifImage
    deltas: tuple[Delta, ...]
    partitions: tuple[Descriptor, ...]
    """The deltas' partitions."""
    base: BaseSif
    """The base of a further delta."""
    diff_ids: tuple[str, ...]
    """Layers of the image that all of it forms."""


def inside(image_id: str) -> bytes:
    """Content of `INSIDE`."""
    return json.dumps({"schema": SCHEMA, "image_id": image_id}, indent=1).encode() + b"\n"


def with_sha256(delta: Delta, path: Path) -> Delta:
    """Return `delta` with the digest of its squashfs `path`."""
    return dataclasses.replace(delta, sha256=sha256(path, delta))


def append(path: Path, delta: Delta) -> None:
    """Write `delta` behind the squashfs `path`."""
    files.append(path, files.description(_text(delta), _MARK))


def _text(delta: Delta) -> bytes:
    values = {"schema": SCHEMA, **dataclasses.asdict(delta)}
    return json.dumps(json_text.sealed(values), indent=1, sort_keys=True).encode()


def read(path: Path) -> Delta:
    """Read the description in the delta file `path`.

    Raises
    ------
    UsageError : there is no such file.
    CheckFailed : it is no delta, or cut short.
    """
    try:
        return _read(path, 0, path.stat().st_size)
    except OSError as error:
        raise UsageError(
            f"cannot be read: {error.strerror}",
            where=str(path),
            hint="imgkit delta RECIPE --against BASE.sif",
        ) from error


def is_delta(path: Path) -> bool:
    """Whether the file ends like a delta; False also if it cannot be read."""
    try:
        with files.open_regular(path) as stream:
            return files.ends_with(stream, _MARK)
    except OSError:
        return False


def sha256(
    path: Path, delta: Delta, *, start: int = 0, advance: Callable[[int, int | None], None] = lambda *_: None
) -> str:
    """Hex digest of the squashfs of `delta`, which starts at byte `start` of `path`."""
    with files.open_regular(path) as stream:
        return files.sha256(stream, start, delta.size_bytes, advance=advance)


def stack(path: Path) -> Stack:
    """Read the .sif `path` and the deltas in its record.

    Raises
    ------
    CheckFailed : no .sif, no record in it, or deltas that differ from the record.
    """
    sif = image.read(path)
    record, root = sif.record, sif.root
    if root is None or record is None or not record.image_id:
        raise CheckFailed(
            "it has no record of imgkit, so its image and layers are unknown",
            where=str(path),
            hint=f"convert the image with imgkit: imgkit sif IMAGE -o {path.name}; a full transfer of about "
            f"{sif.size_bytes / 1e6:.1f} MB once, deltas from then on",
        )
    partitions = sif.overlays
    deltas = tuple(_read(path, one.offset, one.size_bytes) for one in partitions)
    if tuple(delta.sha256 for delta in deltas) != record.deltas:
        raise CheckFailed(
            f"its record lists {len(record.deltas)} deltas, a runtime would mount {len(deltas)} others: "
            "it silently ignores an overlay outside the root partition's group",
            where=str(path),
            hint="apply the deltas to the base again: imgkit apply X.imgdelta BASE.sif -o NEW.sif",
        )
    top = deltas[-1] if deltas else record
    return Stack(
        sif=sif,
        deltas=deltas,
        partitions=partitions,
        base=BaseSif(image_id=top.image_id, root_sha256=record.root_sha256, deltas=record.deltas),
        diff_ids=top.diff_ids,
    )


def _read(path: Path, start: int, size_bytes: int) -> Delta:
    with files.open_regular(path) as stream:
        text = files.described(stream, start, size_bytes, _MARK)
    if text is None:
        raise CheckFailed("not a delta of imgkit, or cut short", where=str(path), hint="copy it again")
    try:
        values: dict[str, Any] = json_text.parse(text)
        if values["schema"] != SCHEMA:
            raise CheckFailed(
                "a later version of imgkit wrote this delta", where=str(path), hint="update imgkit"
            )
        json_text.unseal(values)
        del values["schema"]
        found: Delta = json_text.read(Delta, values, "delta", closed=True)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckFailed(f"its description cannot be read: {error}", where=str(path)) from error
    if _text(found) != text:
        raise CheckFailed(
            "its description is not in the form that imgkit writes", where=str(path), hint="copy it again"
        )
    stated = found.size_bytes + len(files.description(text, _MARK))
    if stated != size_bytes:
        raise CheckFailed(
            f"it has {size_bytes} bytes, its description says {stated}",
            where=str(path),
            hint="copy it again",
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """Content of a .sif (`record`, and `deltas` lowest first), a .sqsh (`record`), or a delta alone."""

    kind: Literal["sif", "sqsh", "delta"]
    path: str
    size_bytes: int
    arch: str
    record: ImgkitRecord | None
    deltas: tuple[Delta, ...]

    def lines(self) -> tuple[str, ...]:
        """Aligned lines for people."""
        rows = list(self._rows())
        width = max(len(key) for key, _ in rows)
        return tuple(f"{key:{width}}  {value}".rstrip() for key, value in rows)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, with its schema number."""
        return {
            "schema": _FACTS_SCHEMA,
            **dataclasses.asdict(self),
        }

    def _rows(self) -> Iterator[tuple[str, str]]:
        record = self.record
        yield self.kind, f"{self.path}  {self.size_bytes / _MB:.1f} MB  {self.arch}"
        if record:
            yield "base", f"{record.source}  {record.image_id}"
            root = "squashfs" if self.kind == "sqsh" else "root partition"
            yield "", f"{root} sha256:{record.root_sha256}, {len(record.diff_ids)} layers"
            yield "", f"{record.compression}, by {record.runtime}"
        for number, delta in enumerate(self.deltas, 1):
            yield f"delta {number}" if record else "image", f"{delta.source}  {delta.image_id}"
            yield "", f"{delta.size_bytes / _KB:.1f} kB  sha256:{delta.sha256}, made {delta.created}"
            if not record:
                yield "over", str(delta.base)
        if record and self.kind == "sif":
            top = self.deltas[-1] if self.deltas else record
            yield "together", f"{top.source}  {top.image_id}"


def is_file(name: str) -> bool:
    """Whether the file `name` exists and is a .sif, .sqsh or delta."""
    path = Path(name)
    return image.is_sif(path) or is_delta(path) or sqsh.is_sqsh(path)


def file_facts(name: str) -> FileFacts:
    """The facts of the .sif, .sqsh or delta `name`.

    Raises
    ------
    CheckFailed : the file has no record, is damaged, or has other deltas than recorded.
    """
    path = Path(name)
    kind: Literal["sif", "sqsh", "delta"]
    if image.is_sif(path):
        found = stack(path)
        arch, record, deltas = found.sif.arch, found.sif.record, found.deltas
        kind = "sif"
    elif sqsh.is_sqsh(path):
        record, deltas, kind = sqsh.record(path), (), "sqsh"
        if record is None:
            raise CheckFailed(
                "it has no record of imgkit: another program made this .sqsh",
                where=name,
                hint=f"imgkit verify {name}",
            )
        arch = record.arch
    else:
        delta = read(path)
        arch, record, deltas, kind = delta.arch, None, (delta,), "delta"
    return FileFacts(
        kind=kind, path=name, size_bytes=path.stat().st_size, arch=arch, record=record, deltas=deltas
    )

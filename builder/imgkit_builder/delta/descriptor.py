"""Read and write the description in a delta file, and find the delta in a .sif.

A delta file is a squashfs that a runtime can mount as it is; a mount ignores the bytes after it::

    +---------------------+  byte 0
    | squashfs            |  the changed files, and whiteouts
    +---------------------+
    | gzip                |  `file_manifest` of these, with the facts of the whole new image
    | JSON object         |  `Delta`
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
from imgkit_builder.sif import file_manifest, image, sqsh, unsquash
from imgkit_builder.sif.image import ImgkitRecord, SifImage
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

    def __str__(self) -> str:
        return f"image {self.image_id.removeprefix('sha256:')[:12]} (root partition {self.root_sha256[:12]})"


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
    manifest_sha256: str
    """Hex digest of the file manifest."""
    manifest_bytes: int
    """Size of the file manifest."""
    imgkit: str
    """Version of imgkit."""


def inside(image_id: str) -> bytes:
    """Return the content of `INSIDE`."""
    return json.dumps({"schema": SCHEMA, "image_id": image_id}, indent=1).encode() + b"\n"


def append(path: Path, manifest: bytes, delta: Delta) -> None:
    """Write `manifest` and `delta` behind the squashfs `path`."""
    files.append(path, manifest + files.description(_text(delta), _MARK))


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
    """Return whether the file ends like a delta; False also if it cannot be read."""
    try:
        with files.open_regular(path) as stream:
            return files.ends_with(stream, _MARK)
    except OSError:
        return False


def sha256(
    path: Path, delta: Delta, *, start: int = 0, advance: Callable[[int, int | None], None] = lambda *_: None
) -> str:
    """Return the hex digest of the squashfs of `delta`, which starts at byte `start` of `path`."""
    with files.open_regular(path) as stream:
        return files.sha256(stream, start, delta.size_bytes, advance=advance)


def base_of(sif: SifImage) -> BaseSif:
    """Return the identity of a .sif as the base of a delta.

    Raises
    ------
    CheckFailed : it has no record of imgkit.
    """
    record = sif.record
    if record is None or not record.image_id:
        raise CheckFailed(
            "it has no record of imgkit, so its image is unknown",
            where=str(sif.path),
            hint=f"convert the image with imgkit: imgkit sif IMAGE -o {sif.path.name}; a full transfer of "
            f"about {sif.size_bytes / _MB:.1f} MB once, deltas from then on",
        )
    return BaseSif(image_id=record.image_id, root_sha256=record.root_sha256)


def plain_base_of(sif: SifImage) -> BaseSif:
    """Return the identity of a .sif that takes a delta.

    Raises
    ------
    CheckFailed : as of `base_of` and `applied`.
    UsageError : it has a delta already.
    """
    base = base_of(sif)
    if applied(sif) is not None:
        raise UsageError(
            "it has a delta already, and a .sif takes one",
            where=str(sif.path),
            hint=f"name the .sif below it, which imgkit show {sif.path.name} names; or convert the image: "
            "imgkit sif IMAGE",
        )
    return base


def applied(sif: SifImage) -> Delta | None:
    """Return the delta in a .sif; None if there is none.

    Raises
    ------
    CheckFailed : a runtime would mount another delta than the record says, or none.
    """
    deltas = [_read(sif.path, overlay.offset, overlay.size_bytes) for overlay in sif.overlays]
    recorded = sif.record.delta_sha256 if sif.record else ""
    if [delta.sha256 for delta in deltas] != ([recorded] if recorded else []):
        raise CheckFailed(
            f"its record names {'a delta' if recorded else 'no delta'}, and a runtime would mount "
            f"{len(deltas)}: it silently ignores an overlay outside the root partition's group",
            where=str(sif.path),
            hint="apply the delta to the base again: imgkit apply X.imgdelta BASE.sif -o NEW.sif",
        )
    return deltas[0] if deltas else None


def manifest(path: Path, delta: Delta, *, start: int = 0) -> bytes:
    """Return the file manifest of `delta`, whose squashfs starts at byte `start` of `path`.

    Raises
    ------
    CheckFailed : it is damaged.
    """
    with files.open_regular(path) as stream:
        stream.seek(start + delta.size_bytes)
        data = stream.read(delta.manifest_bytes)
    file_manifest.refuse_other(data, delta.manifest_sha256, where=str(path))
    return data


def is_code(path: Path, delta: Delta) -> bool:
    """Return whether the delta in the file `path` changes nothing but files of `CODE_PLACE`.

    What a build notes in every image, and folders, do not count.

    Raises
    ------
    CheckFailed : its file manifest is damaged.
    """
    records = file_manifest.parse_records(manifest(path, delta), where=str(path))
    files = {name for name, record in records.items() if record.type != "d"}
    changed = {name for name in files if not name.startswith(("opt/imgkit/", ".singularity.d/"))}
    return bool(changed) and all(name.startswith(f"{CODE_PLACE}/") for name in changed)


def baked_facts(path: Path, overlay: Path | None = None) -> file_manifest.BakedFacts:
    """Return what is noted in the image of a .sif or .sqsh, with the delta `overlay` over it.

    Where there is no file manifest, the files of imgkit are read, and the distributions stay unknown.

    Raises
    ------
    CheckFailed : a manifest or the squashfs is damaged.
    ToolMissing : it has no file manifest, and there is no unsquashfs for its compression.
    """
    if overlay is not None:
        return file_manifest.parse_facts(manifest(overlay, read(overlay)), where=str(overlay))
    if image.is_sif(path):
        sif = image.read(path)
        delta = applied(sif)
        if delta is not None:
            data = manifest(path, delta, start=sif.overlays[0].offset)
            return file_manifest.parse_facts(data, where=str(path))
    stored = file_manifest.read(path)
    if stored is not None:
        return file_manifest.parse_facts(stored, where=str(path))
    collector = file_manifest.BakedFactsCollector()
    for name, text in unsquash.read(path, file_manifest.BAKED_FILES).items():
        collector.add(name, text)
    return dataclasses.replace(collector.facts(""), distributions=None)


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
        delta: Delta = json_text.read(Delta, values, "delta", closed=True)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckFailed(f"its description cannot be read: {error}", where=str(path)) from error
    if _text(delta) != text:
        raise CheckFailed(
            "its description is not in the form that imgkit writes", where=str(path), hint="copy it again"
        )
    expected_bytes = delta.size_bytes + delta.manifest_bytes + len(files.description(text, _MARK))
    if expected_bytes != size_bytes or not 0 <= delta.manifest_bytes <= image.MOST_MANIFEST_BYTES:
        raise CheckFailed(
            f"it has {size_bytes} bytes, its description says {expected_bytes}",
            where=str(path),
            hint="copy it again",
        )
    return delta


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """Content of a .sif (`record`, and `delta` if it has one), a .sqsh (`record`), or a delta alone."""

    kind: Literal["sif", "sqsh", "delta"]
    path: str
    size_bytes: int
    arch: str
    record: ImgkitRecord | None
    delta: Delta | None

    def lines(self) -> tuple[str, ...]:
        """Return aligned lines for people."""
        rows = list(self._rows())
        width = max(len(key) for key, _ in rows)
        return tuple(f"{key:{width}}  {value}".rstrip() for key, value in rows)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, with its schema number."""
        return {"schema": _FACTS_SCHEMA, **dataclasses.asdict(self)}

    def _rows(self) -> Iterator[tuple[str, str]]:
        record, delta = self.record, self.delta
        yield self.kind, f"{self.path}  {self.size_bytes / _MB:.1f} MB  {self.arch}"
        if record:
            yield "base" if delta else "image", f"{record.source}  {record.image_id}"
            root = "squashfs" if self.kind == "sqsh" else "root partition"
            yield "", f"{root} sha256:{record.root_sha256}, {len(record.diff_ids)} layers"
            yield "", f"{record.compression}, by {record.runtime}"
        if delta:
            yield "delta" if record else "image", f"{delta.source}  {delta.image_id}"
            yield "", f"{delta.size_bytes / _KB:.1f} kB  sha256:{delta.sha256}, made {delta.created}"
        if delta and not record:
            yield "over", str(delta.base)


def is_file(name: str) -> bool:
    """Return whether the file `name` exists and is a .sif, .sqsh or delta."""
    path = Path(name)
    return image.is_sif(path) or is_delta(path) or sqsh.is_sqsh(path)


def file_facts(name: str) -> FileFacts:
    """Return the facts of the .sif, .sqsh or delta `name`.

    Raises
    ------
    CheckFailed : the file has no record, is damaged, or has another delta than recorded.
    """
    path = Path(name)
    record, delta = None, None
    kind: Literal["sif", "sqsh", "delta"]
    if image.is_sif(path):
        sif = image.read(path)
        base_of(sif)
        arch, record, delta, kind = sif.arch, sif.record, applied(sif), "sif"
    elif sqsh.is_sqsh(path):
        record, kind = sqsh.record(path), "sqsh"
        if record is None:
            raise CheckFailed(
                "it has no record of imgkit: another program made this .sqsh",
                where=name,
                hint=f"imgkit verify {name}",
            )
        arch = record.arch
    else:
        delta = read(path)
        arch, kind = delta.arch, "delta"
    return FileFacts(
        kind=kind, path=name, size_bytes=path.stat().st_size, arch=arch, record=record, delta=delta
    )

"""The object ``imgkit-coverage`` of a .sif: digests of the whole file, so that no changed byte passes.

It lies behind the record (`image.ImgkitRecord`). Both belong to the object group of the root partition. So a
signature of that group covers them, and through this object the header, every descriptor and every other
object. It holds sha256 digests of

* the global header, without ``modified_s``, ``free`` and ``data_bytes``, which signing changes;
* each descriptor, its own too, as its 585 bytes;
* the data of each object;
* all other bytes before it: the padding, and what deleted objects left;
* its own text.

Bytes that no check sees, because they mean nothing to a runtime or to imgkit:

* ``modified_s`` of the header (8 bytes at 72): the time of the last change; signing sets it;
* the content of a signature object, which the runtime checks (``apptainer verify``).

``free`` and ``data_bytes`` of the header follow from the descriptors, and `check` compares them. An unused
descriptor is zeros, and so is the padding between signatures.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import BinaryIO

from imgkit_builder.base import files
from imgkit_builder.sif import image, table
from imgkit_builder.sif.image import IMGKIT_OBJECT, DataType, Descriptor, ImgkitRecord, SifImage
from imgkit_builder.sif.table import DESCRIPTOR, GROUP, HEADER, Entry, NewObject, SifTable
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import CheckFailed

NAME = "imgkit-coverage"
SCHEMA = 1
_HEX = "0" * 64
_MOST_BYTES = 4 << 20
_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class CoveredObject:
    """Hex sha256 digests of one object."""

    id: int
    descriptor: str
    data: str
    """Empty for the coverage object itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Content of the coverage object; digests are hex sha256."""

    header: str
    objects: tuple[CoveredObject, ...]
    gaps: str
    """The bytes before the coverage object that belong to no object, nor to header and table."""
    sha256: str
    """Its own text, with this digest as zeros."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What `check` found."""

    covered: bool
    """Whether there is a coverage object; other tools write none."""
    faults: tuple[str, ...]
    """Each difference, for people; empty if all is as it was written."""
    objects: int
    """Number of covered objects."""


def put_record(path: Path, record: ImgkitRecord) -> None:
    """Write `record` and then the coverage object as the last objects of `path`, in place of older ones.

    Raises
    ------
    CheckFailed : as in `add`, or the record cannot be read back.
    """
    clear(path)
    root = _root(path)
    text = image.record_text(record)
    table.add(path, NewObject(datatype=DataType.JSON, name=IMGKIT_OBJECT, group=root.group, data=text))
    add(path, root_sha256=record.root_sha256)
    if image.read(path).record != record:
        raise CheckFailed("its record cannot be read back", where=str(path), hint="please report this")


def add(path: Path, *, root_sha256: str | None = None) -> None:
    """Write the coverage object as the last object of the .sif `path`, in place of an older one.

    Parameters
    ----------
    path : a .sif with a root partition and no signature. The result depends on its bytes alone.
    root_sha256 : hex digest of the root partition, if it is known; saves reading it.

    Raises
    ------
    CheckFailed : no .sif, no root partition in it, or a full table.
    """
    clear(path, names=(NAME,))
    root = _root(path)
    with files.open_regular(path) as stream:
        found = table.read(path, stream)
        known = {root.id: root_sha256} if root_sha256 else {}
        covered = _describe(path, stream, found, root.group, known)
    table.add(path, _object(covered, root.group))


def clear(path: Path, *, names: Collection[str] = (IMGKIT_OBJECT, NAME), also: Collection[int] = ()) -> None:
    """Delete imgkit's objects and those with the ids `also` from the .sif `path`, before it changes."""
    gone = [one.id for one in image.read(path).descriptors if one.name in names or one.id in also]
    if gone:
        table.delete(path, gone)


def _root(path: Path) -> Descriptor:
    root = image.read(path).root
    if root is None:
        raise CheckFailed("the .sif has no root partition", where=str(path))
    return root


def check(path: Path, *, root_sha256: str | None = None) -> Findings:
    """Compare the .sif `path` with its coverage object; added signatures are no difference.

    `root_sha256` is as in `add`, but computed now.

    Raises
    ------
    CheckFailed : no .sif.
    """
    sif = image.read(path)
    root = sif.root
    with files.open_regular(path) as stream:
        found = table.read(path, stream)
        own = [one for one in found.entries if _is_coverage(one.datatype, one.label)]
        if not own:
            # Another tool made it, or the object's own descriptor is damaged.
            why = (
                "its coverage object is missing" if sif.record else "" if root else "it has no root partition"
            )
            return Findings(covered=False, faults=(why,) if why else (), objects=0)
        if root is None or len(own) > 1 or own[0].group != GROUP | root.group:
            why = "its coverage object is not the only one, or not in the root partition's group"
            return Findings(covered=True, faults=(why,), objects=0)
        try:
            stated = _parse(_read(stream, own[0].offset, min(own[0].size_bytes, _MOST_BYTES)))
        except ValueError as error:
            why = f"its coverage object cannot be read: {error}"
            return Findings(covered=True, faults=(why,), objects=0)
        known = {root.id: root_sha256} if root_sha256 else {}
        faults = tuple(_faults(stream, found, own[0], stated, known))
    return Findings(covered=True, faults=faults, objects=len(stated.objects))


def undamaged(
    path: Path, wanted: Callable[[SifImage, ImgkitRecord], bool]
) -> tuple[SifImage, ImgkitRecord] | None:
    """The .sif `path` and its record, if it has no delta, is `wanted`, and no byte of it has changed.

    Every byte is read, but only after `wanted` has said yes. None also where `path` is no .sif.
    """
    if not image.is_sif(path):
        return None
    try:
        sif = image.read(path)
        record = sif.record
        if record is None or record.deltas or not wanted(sif, record):
            return None
        root_sha256 = image.root_sha256(path)
        if root_sha256 != record.root_sha256 or check(path, root_sha256=root_sha256).faults:
            return None
    except CheckFailed:
        return None
    return sif, record


def _is_coverage(datatype: int, name: str) -> bool:
    return datatype == DataType.JSON and name == NAME


def _object(covered: Coverage, group: int) -> NewObject:
    return NewObject(datatype=DataType.JSON, name=NAME, group=group, data=_text(covered))


def _describe(
    path: Path, stream: BinaryIO, found: SifTable, group: int, known: Mapping[int, str]
) -> Coverage:
    """Coverage of a file that has no coverage object yet; `stream` is the file."""
    listed = [
        CoveredObject(id=one.id, descriptor=_sha256(DESCRIPTOR.pack(*one)), data=_data(stream, one, known))
        for one in found.entries
    ]
    # Its own size follows from the number of objects, because every digest has the same length.
    draft = Coverage(header=_header(found), objects=(), gaps=_HEX, sha256=_HEX)
    own = table.next_entry(path, found, _object(draft, group), 0)
    mine = CoveredObject(id=own.id, descriptor=_HEX, data="")
    draft = replace(draft, objects=tuple(sorted((*listed, mine), key=lambda one: one.id)))
    own = table.next_entry(path, found, _object(draft, group), len(_text(draft)))
    mine = replace(mine, descriptor=_sha256(DESCRIPTOR.pack(*own)))
    draft = replace(
        draft,
        objects=tuple(mine if one.id == mine.id else one for one in draft.objects),
        gaps=_gaps(stream, found, found.entries, own.offset),
    )
    return replace(draft, sha256=_sha256(_text(draft)))


def _text(covered: Coverage) -> bytes:
    return json.dumps({"schema": SCHEMA, **asdict(covered)}, indent=1, sort_keys=True).encode()


def _parse(text: bytes) -> Coverage:
    values = json_text.parse(text)
    if not isinstance(values, dict):
        raise ValueError("not a JSON object")
    if values.pop("schema", None) != SCHEMA:
        raise ValueError("a later version of imgkit wrote it; update imgkit")
    found: Coverage = json_text.read(Coverage, values, "coverage", closed=True)
    if _text(found) != text or _sha256(_text(replace(found, sha256=_HEX))) != found.sha256:
        raise ValueError("its own sha256 differs")
    return found


def _faults(
    stream: BinaryIO, found: SifTable, own: Entry, stated: Coverage, known: Mapping[int, str]
) -> Iterable[str]:
    """Yield every difference between a file and its coverage `stated`."""
    if _header(found) != stated.header:
        yield "the header"
    expected = {one.id: one for one in stated.objects}
    here = {one.id: one for one in found.entries}
    for number in sorted(expected.keys() - here.keys()):
        yield f"object {number} is missing"
    for number, one in sorted(here.items()):
        described = f"object {number} ({one.label or hex(one.datatype)})"
        covered = expected.get(number)
        if covered is None:
            if one.datatype != DataType.SIGNATURE or one.used != 1 or one.offset < own.end:
                yield f"{described} was added and is not a signature"
            continue
        if _sha256(DESCRIPTOR.pack(*one)) != covered.descriptor:
            yield f"the descriptor of {described}"
        elif number != own.id and _data(stream, one, known) != covered.data:
            yield described
    before = [one for one in found.entries if one.id in expected and one.id != own.id]
    if _gaps(stream, found, before, own.offset) != stated.gaps:
        yield "bytes between the objects"
    yield from _behind(stream, found, own)


def _behind(stream: BinaryIO, found: SifTable, own: Entry) -> Iterable[str]:
    """Yield what is wrong behind the coverage object, and in the numbers that follow from the descriptors."""
    header, entries = found.header, found.entries
    if header.free != len(found.slots) - len(entries) or header.data_bytes != found.end - header.data_offset:
        yield "the header's number of descriptors or size of the data"
    slots = (DESCRIPTOR.unpack(raw)[1] or not any(raw) for raw in found.slots)
    ids = [one.id for one in entries]
    if not all(slots) or ids != [number for number, raw in enumerate(found.slots, 1) if any(raw)]:
        yield "unused descriptors, or the ids of used ones"
    at = own.end
    for one in sorted((one for one in entries if one.offset >= own.end), key=lambda one: one.offset):
        # Signing adds no padding, or less than a page of zeros.
        padding = one.offset - at
        if not 0 <= padding < _PAGE_BYTES or any(_read(stream, at, padding)):
            yield f"bytes before object {one.id}, or objects that overlap"
        at = max(at, one.end)
    size = stream.seek(0, 2)
    if size != found.end:
        yield f"{size - found.end} bytes after the last object"


def _header(found: SifTable) -> str:
    return _sha256(HEADER.pack(*found.header._replace(modified_s=0, free=0, data_bytes=0)))


def _data(stream: BinaryIO, one: Entry, known: Mapping[int, str]) -> str:
    return known.get(one.id) or files.sha256(stream, one.offset, one.end - one.offset)


def _gaps(stream: BinaryIO, found: SifTable, objects: Iterable[Entry], end: int) -> str:
    """Digest of the bytes before `end` that lie outside header, table and `objects`, with their places."""
    header = found.header
    taken = [
        (0, HEADER.size),
        (header.table_offset, header.table_offset + len(found.slots) * DESCRIPTOR.size),
    ]
    digest, at = hashlib.sha256(), 0
    for start, stop in sorted([*taken, *((one.offset, one.end) for one in objects), (end, end)]):
        if at < start:
            digest.update(f"{at} {start} {files.sha256(stream, at, start - at)}\n".encode())
        at = max(at, stop)
    return digest.hexdigest()


def _read(stream: BinaryIO, start: int, size_bytes: int) -> bytes:
    stream.seek(start)
    return stream.read(max(size_bytes, 0))


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()

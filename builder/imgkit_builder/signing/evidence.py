"""Reads what the image in a .sif or archive says about its making; nothing of it runs."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import posixpath
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.archive import compressed, read
from imgkit_builder.archive.compressed import Allowance
from imgkit_builder.archive.tar_read import REGULAR, TarStream
from imgkit_builder.base.progress import Reporter
from imgkit_builder.delta import descriptor, source, tree
from imgkit_builder.oci import manifest as manifests
from imgkit_builder.oci.manifest import CREATED_LABEL, LOCK_TOML, MANIFEST_JSON
from imgkit_builder.recipe import lock_file
from imgkit_builder.sif import check, coverage, image
from imgkit_builder.signing.provenance import Evidence, Subject
from imgkit_entrypoints.errors import CheckFailed, UsageError

_MOST_BYTES = 16 << 20
_AGAIN = "copy it again; imgkit verify says more"


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """A file, and what its image says."""

    file: Subject
    parts: tuple[Subject, ...]
    """Root partition and deltas of a .sif: they stay the same when an object is added."""
    evidence: Evidence


def of_file(path: Path, report: Reporter) -> Examined:
    """Read the .sif or archive `path`, and compare it with its own digests.

    Raises
    ------
    CheckFailed : it is damaged, or imgkit did not build its image.
    UsageError : it is neither a .sif nor an archive.
    ToolMissing : this machine cannot unpack its compression.
    """
    if not path.is_file():
        raise UsageError("there is no such file", where=str(path))
    if image.is_sif(path):
        return _of_sif(path, report)
    compress = read.archive_compression(path)
    if compress is None:
        raise UsageError("neither a .sif nor an image archive", where=str(path))
    report.stage(f"read {path.name}")
    held = read.digest_archive(path, compress=compress, report=report)
    if held.image is None or held.wrong_blobs:
        why = held.problem or f"damaged: {held.wrong_blobs[0]}"
        raise CheckFailed(why, where=str(path), hint=_AGAIN)
    held.image.refuse_faults(str(path))
    report.stage("look into its layers")
    names = [posixpath.normpath(name) for name, _ in held.image.layers]
    files = _in_archive(path, names, (MANIFEST_JSON, LOCK_TOML))
    config = held.image.config
    made = _evidence(path, files, labels=dict(config.labels), image_id=config.image_id, tools={})
    return Examined(file=Subject(name=path.name, sha256=held.sha256), parts=(), evidence=made)


def _of_sif(path: Path, report: Reporter) -> Examined:
    report.stage(f"read {path.name}")
    sif = image.read(path)
    record = sif.record
    if record is None:
        raise CheckFailed("imgkit did not make this .sif: nothing says how it was made", where=str(path))
    root_sha256 = image.root_sha256(path, advance=report.advance)
    faults = coverage.check(path, root_sha256=root_sha256).faults
    if faults or root_sha256 != record.root_sha256:
        raise CheckFailed(f"it is changed: {(*faults, 'root partition')[0]}", where=str(path), hint=_AGAIN)
    layers = source.mounted(sif)
    files = {name: tree.content(layers, name, _MOST_BYTES) for name in (MANIFEST_JSON, LOCK_TOML)}
    labels, image_id = dict(check.stated_labels(sif) or {}), record.image_id
    if record.deltas:
        # The newest image is that of the last delta, and the labels are those of the oldest.
        newest = descriptor.stack(path).deltas[-1]
        labels, image_id = {CREATED_LABEL: newest.created}, newest.image_id
    made = _evidence(
        path,
        {name: data for name, data in files.items() if data is not None},
        labels=labels,
        image_id=image_id,
        tools={"sif": record.runtime},
    )
    parts = (
        ("root partition", root_sha256),
        *((f"delta {n}", one) for n, one in enumerate(record.deltas, 1)),
    )
    return Examined(
        file=Subject(name=path.name, sha256=read.sha256(path, report=report)),
        parts=tuple(Subject(name=name, sha256=sha256) for name, sha256 in parts),
        evidence=made,
    )


def _evidence(
    path: Path, files: dict[str, bytes], *, labels: dict[str, str], image_id: str, tools: dict[str, str]
) -> Evidence:
    if MANIFEST_JSON not in files:
        raise CheckFailed(
            f"no {MANIFEST_JSON}: imgkit did not build this image, and nothing says how it was made",
            where=str(path),
        )
    try:
        made = manifests.from_json(files[MANIFEST_JSON].decode())
        content = files.get(LOCK_TOML, b"")
        lock = lock_file.parse(content, Path(LOCK_TOML)).of(made.platform) if content else None
    except UnicodeDecodeError as error:
        raise CheckFailed(f"a file of imgkit in it is no text: {error}", where=str(path)) from error
    return Evidence(
        manifest=made,
        image_id=image_id,
        labels=labels,
        lock=lock,
        lock_sha256=hashlib.sha256(content).hexdigest() if content else "",
        tools=tools,
    )


def _in_archive(path: Path, layers: Collection[str], wanted: Collection[str]) -> dict[str, bytes]:
    """The files `wanted` of the image; the highest of its `layers` that has one counts."""
    by_layer: dict[str, dict[str, bytes]] = {}
    allowance = Allowance(path.stat().st_size, str(path))
    with contextlib.closing(compressed.chunks(path, allowance=allowance)) as chunks:
        outer = TarStream(chunks, name=str(path))
        for member in outer:
            name = posixpath.normpath(member.name)
            if member.kind == REGULAR and name in layers:
                by_layer[name] = dict(_in_layer(outer, f"{path}: {name}", wanted))
    found: dict[str, bytes] = {}
    for name in layers:
        found.update(by_layer.get(name, {}))
    return found


def _in_layer(outer: TarStream, name: str, wanted: Collection[str]) -> Iterator[tuple[str, bytes]]:
    """Name and content of each `wanted` file in the layer at which `outer` stands."""
    body = map(bytes, outer.body())
    first = next(body, b"")
    raw = itertools.chain((first,), body)
    with contextlib.closing(compressed.unpacked(raw, compressed.kind_of(first), name=name)) as chunks:
        inner = TarStream(chunks, name=name)
        for member in inner:
            path = posixpath.normpath(f"/{member.name}")
            if path in wanted and member.kind == REGULAR and member.size_bytes <= _MOST_BYTES:
                yield path, b"".join(map(bytes, inner.body()))

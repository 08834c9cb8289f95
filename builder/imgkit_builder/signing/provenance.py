"""Provenance as an in-toto Statement v1 with the SLSA v1 predicate: what a file is, and what it was made of.

It states what the image records about itself, and nothing of the clock and the machine that run this program.
Nothing of the image runs. A .sif can carry the statement as one more object, which its signature then covers.

Notes
-----
https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md, https://slsa.dev/spec/v1.0/provenance
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import posixpath
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from imgkit_builder.archive import compressed, read
from imgkit_builder.archive.compressed import Allowance
from imgkit_builder.archive.tar_read import REGULAR, TarStream
from imgkit_builder.base import files
from imgkit_builder.base.progress import Reporter
from imgkit_builder.delta import apply, descriptor, source, tree
from imgkit_builder.oci import manifest as manifests
from imgkit_builder.oci.manifest import CONTEXT_LABEL, CREATED_LABEL, LOCK_TOML, MANIFEST_JSON, Manifest
from imgkit_builder.recipe import lock_file
from imgkit_builder.recipe.model import LockedPlatform
from imgkit_builder.recipe.requirements import canonical
from imgkit_builder.sif import check, coverage, image, sqsh, table
from imgkit_builder.sif.image import IMGKIT_OBJECT, DataType
from imgkit_builder.sif.table import NewObject
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import CheckFailed, UsageError

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"

# Package URLs: the distribution, and the page in its source that describes what a statement holds.
BUILDER = "pkg:pypi/imgkit-hpc"
BUILD_TYPE = f"{BUILDER}#docs/howto/provenance.md"

_MOST_BYTES = 16 << 20
_AGAIN = "copy it again; details: imgkit verify"

OBJECT_NAME = "imgkit-provenance"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What a statement is about: a file, or a part of a .sif."""

    name: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What an image says about its making."""

    manifest: Manifest
    image_id: str
    """``sha256:...`` of the configuration; empty where nothing states it."""
    labels: Mapping[str, str]
    lock: LockedPlatform | None = None
    lock_sha256: str = ""
    tools: Mapping[str, str] = field(default_factory=dict)
    """Version by name of what made the file of the image."""


def text(subjects: tuple[Subject, ...], evidence: Evidence) -> str:
    """The statement about `subjects`; the same input gives the same bytes."""
    statement = {
        "_type": STATEMENT,
        "subject": [{"name": one.name, "digest": {"sha256": one.sha256}} for one in subjects],
        "predicateType": PREDICATE,
        "predicate": {"buildDefinition": _definition(evidence), "runDetails": _run(evidence)},
    }
    return json.dumps(statement, indent=2, sort_keys=True) + "\n"


def check_target(path: Path) -> None:
    """Raise UsageError where `path` is something else than an older statement, or has no folder."""
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent}", where=str(path))
    if not path.exists():
        return
    try:
        found = json_text.load(path)
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or found.get("_type") != STATEMENT:
        raise UsageError(
            "target exists and is not a provenance statement; refusing to overwrite it",
            where=str(path),
            hint="choose another name",
        )


def write(path: Path, statement: str) -> None:
    """Write `statement` to `path`, in place of an older one.

    Raises
    ------
    UsageError : as `check_target`.
    """
    check_target(path)
    files.put(path, statement)


def _definition(evidence: Evidence) -> dict[str, Any]:
    made = evidence.manifest
    outer: dict[str, Any] = {
        "recipe": {"name": made.recipe, "sha256": made.recipe_sha256},
        "platform": made.platform,
    }
    if evidence.lock_sha256:
        outer["lock"] = {"sha256": evidence.lock_sha256}
    inner = {"imgkit": made.imgkit}
    if context := evidence.labels.get(CONTEXT_LABEL):
        inner["context_sha256"] = context
    return {
        "buildType": BUILD_TYPE,
        "externalParameters": outer,
        "internalParameters": inner,
        "resolvedDependencies": list(_dependencies(evidence)),
    }


def _dependencies(evidence: Evidence) -> Iterator[dict[str, Any]]:
    made = evidence.manifest
    yield _base(evidence)
    yield {"name": "imgkit_entrypoints", "digest": {"sha256": made.wheel_sha256}}
    commit, dirty, _ = made.revision.partition("-dirty")
    if commit:
        known = {"name": "folder of the recipe", "digest": {"gitCommit": commit}}
        yield {**known, **({"annotations": {"uncommittedChanges": True}} if dirty else {})}
    if evidence.lock is None:
        return
    for deb in evidence.lock.apt:
        yield _package(deb.file, deb.sha256, deb.url)
    for wheel in evidence.lock.pip:
        yield {
            "uri": f"pkg:pypi/{canonical(wheel.name)}@{wheel.version}",
            **_package(wheel.file, wheel.sha256, wheel.url),
        }


def _base(evidence: Evidence) -> dict[str, Any]:
    base, lock = evidence.manifest.base, evidence.lock
    digest = base.digest.partition("@")[2] or (lock.base.digest if lock else "")
    if digest:
        return {"name": "base", "uri": f"docker://{base.name}", "digest": {"sha256": _hex(digest)}}
    about = {"digestOf": "the image's configuration: the image was never in a registry"}
    return {"name": "base", "digest": {"sha256": _hex(base.id)}, "annotations": about}


def _package(file: str, sha256: str, url: str) -> dict[str, Any]:
    found = {"name": file, "digest": {"sha256": sha256}}
    return {**found, **({"downloadLocation": url} if url else {})}


def _run(evidence: Evidence) -> dict[str, Any]:
    versions = {"imgkit": evidence.manifest.imgkit, **evidence.tools}
    found: dict[str, Any] = {"builder": {"id": BUILDER, "version": versions}}
    created = evidence.labels.get(CREATED_LABEL, "")
    if re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", created):
        found["metadata"] = {"startedOn": created}
    if evidence.image_id:
        image = {"name": "configuration of the image", "digest": {"sha256": _hex(evidence.image_id)}}
        found["byproducts"] = [image]
    return found


def _hex(digest: str) -> str:
    return digest.removeprefix("sha256:")


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
    if sqsh.is_sqsh(path):
        raise UsageError(
            "a provenance statement is about a .sif or an archive, and this is a .sqsh",
            where=str(path),
            hint="make it of the archive that the .sqsh came from",
        )
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
        raise CheckFailed(
            "imgkit did not make this .sif: there is no record of how it was made", where=str(path)
        )
    root_sha256 = image.root_sha256(path, advance=report.advance)
    faults = coverage.check(path, root_sha256=root_sha256).faults
    if faults or root_sha256 != record.root_sha256:
        raise CheckFailed(f"it was modified: {(*faults, 'root partition')[0]}", where=str(path), hint=_AGAIN)
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
            f"no {MANIFEST_JSON}: imgkit did not build this image, and there is no record of how it was made",
            where=str(path),
        )
    try:
        made = manifests.from_json(files[MANIFEST_JSON].decode())
        content = files.get(LOCK_TOML, b"")
        lock = lock_file.parse(content, Path(LOCK_TOML)).of(made.platform) if content else None
    except UnicodeDecodeError as error:
        raise CheckFailed(f"a file of imgkit in it is not text: {error}", where=str(path)) from error
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


def attach(path: Path, statement: str) -> None:
    """Write `statement` into the .sif `path`, in place of an older one; a failure leaves the file as it was.

    The statement lies before imgkit's record and the coverage object, which is written anew and covers it. It
    is about the partitions: the digest of the whole file would change by adding it.

    Raises
    ------
    CheckFailed : the .sif is signed, or is not one of imgkit's.
    """
    sif = image.read(path)
    if sif.record is None or sif.root is None:
        raise CheckFailed("imgkit did not make this .sif", where=str(path), hint="write a file: -o FILE")
    if sif.signatures:
        raise CheckFailed(
            "it is signed, and one more object would break the signature",
            where=str(path),
            hint=f"imgkit sbom {path} --provenance -o FILE, or add the statement before signing",
        )
    part = files.temporary_name(path)
    try:
        apply.clone(path, part)
        coverage.clear(part, names=(IMGKIT_OBJECT, coverage.NAME, OBJECT_NAME))
        data = statement.encode()
        table.add(part, NewObject(datatype=DataType.JSON, name=OBJECT_NAME, group=sif.root.group, data=data))
        coverage.put_record(part, sif.record)
        if faults := coverage.check(part).faults:
            raise CheckFailed(
                f"it cannot be read back: {faults[0]}", where=str(path), hint="please report this"
            )
        part.chmod(path.stat().st_mode & 0o777)
        files.publish(part, path)
    finally:
        part.unlink(missing_ok=True)

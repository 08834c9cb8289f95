"""Provenance as an in-toto Statement v1 with the SLSA v1 predicate: what a file is, and what it was made of.

It states what the image records about itself, and nothing of the clock and the machine that run this program.

Notes
-----
https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md, https://slsa.dev/spec/v1.0/provenance
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from imgkit_builder.base import files
from imgkit_builder.oci.manifest import CONTEXT_LABEL, CREATED_LABEL, Manifest
from imgkit_builder.recipe.lock import LockedPlatform
from imgkit_builder.recipe.requirements import canonical
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import UsageError

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
# A placeholder until the project has a public home: CONTRIBUTING, "Release", step 1.
BUILD_TYPE = "https://example.org/imgkit-hpc/imgkit/docs/howto/provenance.html#build-type-1"
BUILDER = "https://example.org/imgkit-hpc/imgkit"


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
        raise UsageError("it is there, and is no statement", where=str(path), hint="choose another name")


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
    about = {"digestOf": "the image's configuration: the image never was in a registry"}
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

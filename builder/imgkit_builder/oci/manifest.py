"""Provenance of an image, stored in it as ``/opt/imgkit/manifest.json``. Standard library only."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import UsageError

SCHEMA = 1
MANIFEST_JSON = "/opt/imgkit/manifest.json"
LOCK_TOML = "/opt/imgkit/lock.toml"
"""The lock in an image that was built by one."""
STANDIN_LABEL = "imgkit.standin"
CONTEXT_LABEL = "imgkit.context.sha256"
LOCK_LABEL = "imgkit.lock.sha256"
CREATED_LABEL = "org.opencontainers.image.created"


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Versions in the base, found by running it once; `skipped` is the reason where it could not run."""

    python: str = ""
    torch: str = ""
    """``torch.__version__``; empty where there is no torch."""
    cuda: str = ""
    nccl: str = ""
    """``2.20.5``; empty without CUDA."""
    pip_conflicts: tuple[str, ...] = ()
    """Lines of ``pip check`` in the base: conflicts that the recipe did not cause."""
    skipped: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseImage:
    """The base image as the engine reports it."""

    name: str
    id: str = ""
    """``sha256:...`` of the image configuration."""
    digest: str = ""
    """``repo@sha256:...``; empty for an image that was never in a registry, which `id` identifies."""
    platform: str = ""
    standin: bool = False
    """Whether the base has the label ``imgkit.standin``: no NVIDIA software, for tests only."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Its variables; empty where they are unknown, as every image has a PATH."""
    user: str = ""
    """Its containers start as this user; empty for root."""
    probe: Probe = Probe()


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledProject:
    """A project that an image has installed."""

    name: str
    """The canonical name."""
    folder: str = ""
    """Where an editable installation leads in the image; empty: pip has copied the project."""
    step: int | None = None
    """Number of the recipe's pip step that installs it, from 0; None: another command did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Provenance stored in the image; the same inputs give the same bytes."""

    imgkit: str
    recipe: str
    recipe_sha256: str
    base: BaseImage
    platform: str
    wheel_sha256: str
    """Digest of the imgkit_entrypoints wheel in the image."""
    revision: str = ""
    """git commit of the recipe's folder, with ``-dirty`` after changes; empty outside git, and where the
    image has no files of that folder."""
    projects: tuple[InstalledProject, ...] = ()
    """What the recipe's pip steps install of the user's own."""
    workdir: str = ""
    """The folder in which jobs start, if the recipe states one."""
    env: Mapping[str, str] = field(default_factory=dict)
    """The recipe's ``image.env``, without values that add to the base's. A launch tells by this and by the
    base's variables which ones the image brings."""


def labels(manifest: Manifest, *, context_sha256: str, created: str, locked: bool) -> dict[str, str]:
    """Return the labels that only a build knows, sorted; those of the recipe are in the rendered text.

    An empty revision is written too: otherwise the image would inherit the revision of NVIDIA's image. So is
    an empty label of a lock, on a base that was built by one.
    """
    base = manifest.base
    result = {
        CREATED_LABEL: created,
        "org.opencontainers.image.revision": manifest.revision,
        "org.opencontainers.image.base.name": base.name,
        "org.opencontainers.image.base.digest": base.digest.partition("@")[2] or base.id,
        CONTEXT_LABEL: context_sha256,
    }
    if not locked:
        result[LOCK_LABEL] = ""
    return dict(sorted(result.items()))


def time_of_build() -> str:
    """Return the time of a build that begins now, in RFC 3339; ``SOURCE_DATE_EPOCH`` where that is set."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now_s()))


def now_s() -> int:
    """Return the seconds since 1970; ``SOURCE_DATE_EPOCH`` where that is set."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    return int(epoch) if epoch.isdigit() else int(time.time())


def to_json(manifest: Manifest) -> str:
    """Return deterministic text."""
    return json.dumps({"schema": SCHEMA, **dataclasses.asdict(manifest)}, indent=2, sort_keys=True) + "\n"


def from_json(text: str) -> Manifest:
    """Read what `to_json` wrote.

    Raises
    ------
    UsageError : it is not a manifest, or has a later schema.
    """
    try:
        data: dict[str, Any] = json_text.parse(text)
        if data.pop("schema") != SCHEMA:
            raise UsageError(
                "the manifest is from a later imgkit", hint="use that version, or build the image again"
            )
        manifest: Manifest = json_text.build_value(Manifest, data, "manifest", closed=True)
        return manifest
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"not an imgkit manifest: {error}") from error

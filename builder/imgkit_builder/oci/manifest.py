"""The manifest: where an image comes from, stored in it as ``/opt/imgkit/manifest.json``.

This module imports the standard library only, apart from the entry points.
"""

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

# Version of the JSON form. `from_json` refuses every other one.
SCHEMA = 1
MANIFEST_JSON = "/opt/imgkit/manifest.json"
LOCK_TOML = "/opt/imgkit/lock.toml"
"""The file in an image that holds the lock from which it was built."""
# A base with this label has no NVIDIA software. Images on it are for tests only.
STANDIN_LABEL = "imgkit.standin"
# The digest of the build context.
CONTEXT_LABEL = "imgkit.context.sha256"
# The digest of the lock. Empty in an image that was built without a lock.
LOCK_LABEL = "imgkit.lock.sha256"
CREATED_LABEL = "org.opencontainers.image.created"


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The versions of programs in the base image, which imgkit runs once to find them out."""

    python: str = ""
    torch: str = ""
    """The text of ``torch.__version__``. Empty if the base has no torch."""
    cuda: str = ""
    nccl: str = ""
    """The version of NCCL, ``2.20.5``. Empty without CUDA."""
    pip_conflicts: tuple[str, ...] = ()
    """The lines that ``pip check`` prints in the base. The recipe did not cause these conflicts."""
    skipped: str = ""
    """The reason why the base could not run. Empty if it has run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseImage:
    """The base image of a build, as the engine or the file that holds it describes it."""

    name: str
    id: str = ""
    """The image id of the base, ``sha256:...``, which is the digest of its configuration."""
    digest: str = ""
    """The base in a registry, ``repo@sha256:...``. Empty if it was never in one; then `id` identifies it."""
    platform: str = ""
    standin: bool = False
    """Whether the base has the label ``imgkit.standin``.

    Such a base has no NVIDIA software, and is for tests.
    """
    env: Mapping[str, str] = field(default_factory=dict)
    """The base's variables. Empty if they are unknown: every image has at least PATH."""
    user: str = ""
    """The user as whom containers of the base start. Empty means root."""
    probe: Probe = Probe()


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledProject:
    """A Python project of the user that is installed in an image."""

    name: str
    """The name as PyPI normalizes it: ``my-project`` for ``My_Project``."""
    folder: str = ""
    """The folder in the image to which an editable installation leads.

    Empty if pip has copied the project.
    """
    step: int | None = None
    """The number of the recipe's pip step that installs it, from 0. None if another command has done that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The provenance that is stored in an image. The same inputs give the same bytes."""

    imgkit: str
    """The version of imgkit that built the image."""
    recipe: str
    recipe_sha256: str
    base: BaseImage
    platform: str
    wheel_sha256: str
    """The digest of the wheel of ``imgkit_entrypoints`` that is installed in the image."""
    revision: str = ""
    """The git commit of the recipe's folder, followed by ``-dirty`` if the folder has changes.

    Empty outside git, and if the image has no files of that folder.
    """
    projects: tuple[InstalledProject, ...] = ()
    """The user's own projects that the recipe's pip steps install."""
    workdir: str = ""
    """The folder in which jobs start. Empty if the recipe does not set it."""
    env: Mapping[str, str] = field(default_factory=dict)
    """The variables of the recipe's ``image.env``, without values that extend those of the base.

    From these and from the base's variables a launch knows which variables come from the image.
    """


def labels(manifest: Manifest, *, context_sha256: str, created: str, locked: bool) -> dict[str, str]:
    """Return the labels whose values only a build knows, sorted by name.

    The recipe's own labels are in the rendered Dockerfile or definition. A label without a value is set to
    the empty string: otherwise the image would inherit the revision of NVIDIA's image, or the lock's digest
    of a base that was built from a lock.
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
    """Return the time of a build that begins now, in RFC 3339: ``2024-05-01T12:00:00Z``.

    If the variable ``SOURCE_DATE_EPOCH`` is set, it gives the time instead of the clock.
    """
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now_s()))


def now_s() -> int:
    """Return the time of now in seconds since 1970, or the value of ``SOURCE_DATE_EPOCH`` if that is set."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    if epoch.isdigit():
        return int(epoch)
    return int(time.time())


def to_json(manifest: Manifest) -> str:
    """Return `manifest` as JSON text. Equal manifests give equal text."""
    return json.dumps({"schema": SCHEMA, **dataclasses.asdict(manifest)}, indent=2, sort_keys=True) + "\n"


def from_json(text: str) -> Manifest:
    """Return the manifest in `text`, which `to_json` has written.

    Raises
    ------
    UsageError : `text` is not a manifest, or it has another schema.
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

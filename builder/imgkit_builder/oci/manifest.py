"""The manifest: the provenance of an image, stored in the image as ``/opt/imgkit/manifest.json``.

Apart from the entry points, this module imports only the standard library.
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

# Version of the JSON form. `from_json` refuses any other version.
SCHEMA = 1
MANIFEST_JSON = "/opt/imgkit/manifest.json"
LOCK_TOML = "/opt/imgkit/lock.toml"
"""The file in an image with the lock from which the image was built."""
# A base with this label (a stand-in) has no NVIDIA software. It is used in tests only.
STANDIN_LABEL = "imgkit.standin"
# The digest of the build context.
CONTEXT_LABEL = "imgkit.context.sha256"
# The digest of the lock. Empty if the image was built without a lock.
LOCK_LABEL = "imgkit.lock.sha256"
CREATED_LABEL = "org.opencontainers.image.created"


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The versions of programs in the base image. imgkit runs the base once to determine them."""

    python: str = ""
    torch: str = ""
    """The value of ``torch.__version__``. Empty if the base has no torch."""
    cuda: str = ""
    nccl: str = ""
    """The version of NCCL, such as ``2.20.5``. Empty without CUDA."""
    pip_conflicts: tuple[str, ...] = ()
    """The lines that ``pip check`` prints in the base itself. The recipe has not caused these conflicts."""
    skipped: str = ""
    """The reason why the base could not run. Empty if it ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseImage:
    """The base image of a build, as described by the engine or by the file that contains it."""

    name: str
    id: str = ""
    """The image id of the base, ``sha256:...``, which is the digest of its configuration."""
    digest: str = ""
    """The digest of the base in a registry, ``repo@sha256:...``.

    If it was never in one, this is empty and `id` identifies the base.
    """
    platform: str = ""
    standin: bool = False
    """Whether the base is a stand-in, which has the label ``imgkit.standin``.

    A stand-in has no NVIDIA software. It is used in tests only.
    """
    env: Mapping[str, str] = field(default_factory=dict)
    """The variables of the base. Empty means unknown, because every image sets at least PATH."""
    user: str = ""
    """The user that runs containers of the base. Empty means root."""
    probe: Probe = Probe()


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledProject:
    """A Python project of the user that is installed in an image."""

    name: str
    """The name as normalised by PyPI: ``my-project`` for ``My_Project``."""
    folder: str = ""
    """The folder in the image to which an editable installation refers.

    Empty if pip has copied the project.
    """
    step: int | None = None
    """The index of the pip step in the recipe that installs it. None if another command has installed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The provenance that is stored in an image. Equal inputs give equal bytes."""

    imgkit: str
    """The version of imgkit that built the image."""
    recipe: str
    recipe_sha256: str
    base: BaseImage
    platform: str
    wheel_sha256: str
    """The digest of the wheel of ``imgkit_entrypoints`` in the image."""
    revision: str = ""
    """The git commit of the recipe's folder. If the folder has changes, ``-dirty`` is appended.

    Empty outside of git, and if the image contains no files from that folder.
    """
    projects: tuple[InstalledProject, ...] = ()
    """The user's own projects that the recipe's pip steps install."""
    workdir: str = ""
    """The folder in which jobs start. Empty if the recipe does not set it."""
    env: Mapping[str, str] = field(default_factory=dict)
    """The variables in ``image.env`` of the recipe, without values that extend those of the base.

    With these and the variables of the base, a launch can tell which variables come from the image.
    """


def labels(manifest: Manifest, *, context_sha256: str, created: str, locked: bool) -> dict[str, str]:
    """Return the labels whose values are known only during a build, sorted by name.

    The recipe's own labels are already in the rendered Dockerfile or definition file. A label without a value
    is set to an empty text. Otherwise the image would inherit the value of its base, such as the revision of
    NVIDIA's image, or the digest of the lock from which the base was built.
    """
    base = manifest.base
    label_values = {
        CREATED_LABEL: created,
        "org.opencontainers.image.revision": manifest.revision,
        "org.opencontainers.image.base.name": base.name,
        # The digest without the repository. A base that was never in a registry has only its id.
        "org.opencontainers.image.base.digest": base.digest.partition("@")[2] or base.id,
        CONTEXT_LABEL: context_sha256,
    }
    # With a lock, the Dockerfile already sets this label.
    if not locked:
        label_values[LOCK_LABEL] = ""
    return dict(sorted(label_values.items()))


def time_of_build() -> str:
    """Return the current time for a build that begins now, in RFC 3339: ``2024-05-01T12:00:00Z``.

    If the variable ``SOURCE_DATE_EPOCH`` is set, its value is used instead.
    """
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now_s()))


def now_s() -> int:
    """Return the current time in seconds since 1970, or the value of ``SOURCE_DATE_EPOCH`` if it is set."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    if epoch.isdigit():
        return int(epoch)
    return int(time.time())


def to_json(manifest: Manifest) -> str:
    """Return `manifest` as JSON text. Equal manifests give equal text."""
    return json.dumps({"schema": SCHEMA, **dataclasses.asdict(manifest)}, indent=2, sort_keys=True) + "\n"


def from_json(text: str) -> Manifest:
    """Parse the JSON text of a manifest, as written by `to_json`.

    Raises
    ------
    UsageError : `text` is not a manifest, or it has another schema version.
    """
    try:
        data: dict[str, Any] = json_text.parse(text)
        # Another schema is a later one, since there has been only one so far. `except` does not catch this.
        if data.pop("schema") != SCHEMA:
            raise UsageError(
                "the manifest is from a later imgkit", hint="use that version, or build the image again"
            )
        # `closed` makes a key an error that is not a field of the class.
        manifest: Manifest = json_text.build_value(Manifest, data, "manifest", closed=True)
        return manifest
    except (KeyError, TypeError, ValueError, AttributeError) as error:  # no JSON, or other JSON
        raise UsageError(f"not an imgkit manifest: {error}") from error

"""The values of a recipe and of its lock: frozen; their annotations are the types that a file is checked
by.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from imgkit_builder.recipe.problems import KeyPath, Position, Problem, place
from imgkit_entrypoints.system import SystemFacts
from imgkit_recipes import FOLDER

__all__ = [
    "BuildSecret",
    "Constraints",
    "CopyStep",
    "Image",
    "KeyPath",
    "PipStep",
    "Platform",
    "Position",
    "Recipe",
    "RunCommand",
    "UvProject",
]

Platform = Literal["linux/amd64", "linux/arm64"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSecret:
    """A value that steps may use and that never becomes part of the image: a token, a netrc file."""

    id: str
    """Its name; a step finds the value in the file ``/run/secrets/ID``."""
    env: str | None = None
    """The variable of this machine that holds the value; a step sees the same variable."""
    file: Path | None = None
    """The file of this machine that holds the value: absolute, below ``~``, or relative to the recipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipStep:
    """One ``pip install``: `packages`, a `requirements` file or a `project`, with `options` before them."""

    packages: tuple[str, ...] = ()
    """Requirements as pip writes them: ``numpy``, ``deepspeed==0.13.1``."""
    requirements: Path | None = None
    """A requirements file, relative to the recipe's file; absolute after loading."""
    project: Path | None = None
    """Folder with a pyproject.toml: its dependencies are installed in this order, its code before `copy`."""
    editable: str | None = None
    """Absolute path in the image where the project's folder stays; ``pip install --editable`` links to it."""
    options: tuple[str, ...] = ()
    """Options of this ``pip install``, one word per item: ``--no-build-isolation``."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables of this ``pip install`` alone: ``MAX_JOBS``, ``TORCH_CUDA_ARCH_LIST``."""
    secrets: tuple[str, ...] = ()
    """Names (`id`) of the build secrets that this ``pip install`` may use."""
    ignore: tuple[str, ...] = ()
    """Patterns of gitignore's kind (``*.pyc``, ``data/``), matched below `project`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UvProject:
    """A uv project: what the base lacks of its ``uv.lock`` is installed before the pip steps."""

    project: Path
    """Folder with pyproject.toml and uv.lock, relative to the recipe's file; absolute after loading."""
    extras: tuple[str, ...] = ()
    """Extras of the project (``project.optional-dependencies``) that the image needs."""
    groups: tuple[str, ...] = ()
    """Dependency groups that the image needs; none by default, not even ``dev``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """How pip treats the base's own constraint file (NGC's /etc/pip/constraint.txt).

    YAML has ``keep``, ``ignore`` or ``{drop: [name, ...]}``.
    """

    policy: Literal["keep", "ignore", "drop"] = "keep"
    drop: tuple[str, ...] = ()
    """Packages that may differ from the base's version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyStep:
    """User code that is copied into the image."""

    source: Path
    """File or folder relative to the recipe's file, inside its folder; absolute after loading."""
    target: str = "/workspace"
    """Absolute path in the image; a folder's content lands in it, a file lands in it under its name."""
    ignore: tuple[str, ...] = ()
    """Patterns of gitignore's kind (``*.pyc``, ``data/``), matched below `source`."""
    after: Literal["base", "apt", "pip"] = "pip"
    """``base``, ``apt``: just before the `run` steps that state the same; ``pip``: late, as code changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCommand:
    """A shell command; a text in the list is short for ``{command: TEXT}``."""

    command: str
    """What ``/bin/sh`` runs; a separate layer. Of several lines, the first that fails ends the build."""
    after: Literal["base", "apt", "pip", "copy"] = "pip"
    """``base``: before the apt step; ``apt``: before pip; ``pip``: after it; ``copy``: after your code."""
    secrets: tuple[str, ...] = ()
    """Names (`id`) of the build secrets that this command may use."""

    @property
    def short(self) -> str | None:
        """The text that stands for this command; None where it states more."""
        return self.command if self == RunCommand(command=self.command) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """The image part of a recipe."""

    base: str
    """The image to start from, with tag or digest."""
    current_base: str | None = None
    """A newer base, which ``--base current`` selects."""
    platforms: tuple[Platform, ...] = ("linux/amd64",)
    """``platform`` in YAML, one or a list; default: the host's platform if listed, else the first."""
    ca: tuple[Path, ...] = ()
    """Certificates (PEM) of the site's own authority, trusted before the first step that uses the network."""
    secrets: tuple[BuildSecret, ...] = ()
    """Values that the steps which name them may use, and that the image never holds."""
    args: Mapping[str, str] = field(default_factory=dict)
    """Variables of every build step, not kept in the image; ``--build-arg NAME=VALUE`` sets another value."""
    apt: tuple[str, ...] = ()
    """Debian packages: ``git``, ``git=1:2.39.2-1``."""
    uv: UvProject | None = None
    """A uv project whose ``uv.lock`` decides on versions."""
    pip: tuple[PipStep, ...] = ()
    """``pip install`` steps, in this order."""
    constraints: Constraints = Constraints()
    """How pip treats the base's own constraint file; the base's torch and NCCL are always protected."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables stored in the image; ``PATH: /x:$PATH`` adds to the base's value. Network and thread tuning
    belongs in ``system.env``."""
    copy: tuple[CopyStep, ...] = ()
    """User code, copied into the last layers of the image."""
    run: tuple[RunCommand, ...] = ()
    """Shell commands, one layer each: after pip and before imgkit's own files, or ``after: copy``."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the image, in addition to those that imgkit writes."""
    workdir: str = "/workspace"
    """Folder in which ``run`` and, if the recipe states it, the commands of jobs start; absolute."""

    @property
    def used_secrets(self) -> frozenset[str]:
        """Names of the secrets that a step uses."""
        return frozenset().union(*(one.secrets for one in self.pip), *(one.secrets for one in self.run))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A recipe whose ``extends`` is resolved and whose values are checked."""

    name: str
    description: str = ""
    image: Image
    system: SystemFacts
    file: Path
    """The requested file, absolute."""
    sha256: str
    """Digest of the resolved content: canonical JSON and requirements files, no positions or comments."""
    positions: Mapping[KeyPath, Position]
    """Position of every value that a file states; defaults have none."""
    sources: Mapping[Path, str] = field(default_factory=dict)
    """The sha256 of every file that decided on these values, as it was read."""
    warnings: tuple[Problem, ...] = ()
    """Problems that do not stop a build but deserve a look, for example a secret in ``env``."""
    lock: LockedPlatform | None = None
    """What the build installs, where it follows a lock; `load` attaches none."""
    lock_text: str = ""
    """`lock` as the content of a lock file."""
    kept: Mapping[str, Path] = field(default_factory=dict)
    """Packages of `lock` that lie on this machine, by the names of their files."""

    @property
    def reference(self) -> str:
        """The word for it on a command line in its folder: the name of a shipped recipe, else the file."""
        return self.name if self.file.parent == FOLDER else self.file.name

    def where(self, *path: str | int) -> str:
        """``file.yaml:12`` for the nearest stated value at or above `path`, for comments and messages."""
        return place(self.positions, path, self.file)


LOCK_SCHEMA = 1
UV_STEP = -1
"""The step of the wheels of a uv project, which come before those of the pip steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedStep:
    """One pip step as the recipe asked for it when the lock was made."""

    requirements: tuple[str, ...] = ()
    """Its packages, the lines of its requirements file, or the dependencies of its project."""
    options: tuple[str, ...] = ()
    """Its options, then those that the requirements file states."""
    env: tuple[str, ...] = ()
    """``NAME=VALUE``, sorted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockRequest:
    """What the recipe asked for: a recipe that asks for something else has a stale lock."""

    base: str
    """The base's name as the recipe, or ``--base``, states it."""
    apt: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ("keep",)
    """The policy, and behind ``drop`` the names."""
    uv: str = ""
    """Digest of the project's uv.lock with the chosen extras and groups; empty without a uv project."""
    pip: tuple[LockedStep, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedBase:
    """The image that a locked build starts from."""

    name: str
    """The name in the request."""
    digest: str = ""
    """``sha256:...`` of the registry's manifest; empty for an image that was never in a registry."""
    id: str = ""
    """``sha256:...`` of the configuration."""

    @property
    def exact(self) -> str:
        """``REPOSITORY@sha256:...``; the name itself where it has a digest or no registry had the image."""
        if "@" in self.name or not self.digest:
            return self.name
        folder, slash, last = self.name.rpartition("/")
        return f"{folder}{slash}{last.partition(':')[0]}@{self.digest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedDeb:
    """One Debian package that the apt step installs."""

    name: str
    version: str
    architecture: str
    file: str
    url: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedWheel:
    """One wheel that a pip step installs."""

    step: int
    """Number of the step, from 0, or `UV_STEP`."""
    name: str
    version: str
    file: str
    url: str = ""
    """Where it came from; empty for one that was built from a source distribution."""
    sha256: str
    kept: bool = False
    """Whether no index has it: it lies in the folder of kept files only."""
    direct: bool = False
    """Whether the recipe names the URL itself, and no index is asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedPlatform:
    """All that one platform's image is made of."""

    platform: str
    source_date_epoch: int
    """The time of the lock in seconds since 1970, for the snapshot services of Debian and Ubuntu."""
    request: LockRequest
    base: LockedBase
    apt: tuple[LockedDeb, ...] = ()
    """Sorted by name."""
    pip: tuple[LockedWheel, ...] = ()
    """Sorted by step, then by name."""

    @property
    def digests(self) -> dict[str, str]:
        """The sha256 of every file, by its name."""
        return dict(
            [(one.file, one.sha256) for one in self.apt] + [(one.file, one.sha256) for one in self.pip]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """The content of a lock file."""

    schema: int = LOCK_SCHEMA
    recipe: str
    """The recipe's name."""
    imgkit: str
    """The version that made the lock."""
    platforms: tuple[LockedPlatform, ...]
    """Sorted by platform."""

    def of(self, platform: str) -> LockedPlatform | None:
        """The part for `platform`."""
        return next((one for one in self.platforms if one.platform == platform), None)

    def replaced(self, part: LockedPlatform) -> Lock:
        """This lock with `part` in the place of its platform's."""
        others = (one for one in self.platforms if one.platform != part.platform)
        return dataclasses.replace(
            self, platforms=tuple(sorted((*others, part), key=lambda one: one.platform))
        )

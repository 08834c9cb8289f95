"""The values of a lock: what an image is made of, to the byte. Frozen, standard library only."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

SCHEMA = 1
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
    """``sha256:...`` of the registry's manifest; empty for an image that never was in a registry."""
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
class LockedTools:
    """What makes the .sif: its bytes are promised for the same tools."""

    mksquashfs: str = ""
    """``4.5.1``; empty where there was none."""
    compressor: str = ""


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
    """The time of the lock in seconds since 1970: no file of the image is newer."""
    request: LockRequest
    base: LockedBase
    tools: LockedTools = LockedTools()
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

    schema: int = SCHEMA
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

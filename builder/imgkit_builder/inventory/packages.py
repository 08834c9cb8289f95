"""The values of an inventory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Licence:
    """What a package says about its licence."""

    spdx: str = ""
    """An SPDX expression; empty where the package states none that leaves no doubt."""
    stated: str = ""
    """The package's own words, shortened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """An installed package."""

    kind: Literal["deb", "pypi"]
    name: str
    version: str
    architecture: str = ""
    """``amd64`` or ``all``; empty for a Python package."""
    folder: str = ""
    """Folder of a Python package, ``/usr/lib/python3/dist-packages``; empty for a Debian package."""
    licence: Licence = Licence()
    sha256: str = ""
    """Hex digest of the file that was installed; empty where the image does not record it."""
    url: str = ""
    """Place from which that file came; empty where the image does not record it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BakedFile:
    """A file that imgkit put into the image."""

    path: str
    size_bytes: int
    sha1: str
    """Hex digest; SPDX 2.3 demands one."""
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """Everything that is known about what an image holds; the same files give the same value."""

    recipe: str
    """Name of the recipe; empty for an image that imgkit did not build."""
    base: str
    """Name of the base image; empty where it is not known."""
    base_digest: str
    """``sha256:...`` of the base's manifest, or of its configuration if it never was in a registry."""
    distribution: str
    """``debian``, ``ubuntu``; empty where the image does not say it."""
    release: str
    """``12``, ``22.04``."""
    arch: str
    """``amd64``, as in OCI."""
    created_s: int
    """Seconds since 1970 of the image's creation."""
    packages: tuple[Package, ...]
    """Sorted by kind, name, version and folder."""
    baked: tuple[BakedFile, ...]
    """Sorted by path."""
    left_out: tuple[str, ...]
    """What could not be read, and why, sorted."""

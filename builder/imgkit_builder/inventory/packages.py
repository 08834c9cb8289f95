"""The values of an inventory, and the Debian and Python packages that the files of an image describe.

dpkg's list has one paragraph of mail headers per package. A distroless image has a file for each package
instead of the list. Python packages are found as pip finds them: METADATA of wheels, PKG-INFO of eggs and of
distutils.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import PurePosixPath
from typing import Literal

_PARAGRAPH_END = re.compile(r"\r?\n[ \t\r]*\n")
_DEB_NAME = re.compile(r"[a-z0-9][a-z0-9+.-]{1,127}")
_DEB_VERSION = re.compile(r"[0-9A-Za-z.+:~-]{1,128}")
_ARCHITECTURE = re.compile(r"[a-z0-9-]{0,32}")

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,126}[A-Za-z0-9])?")
_VERSION = re.compile(r"[0-9A-Za-z.!+_*-]{1,128}")
_FOLDERS = ("site-packages", "dist-packages")
PYTHON_ENDINGS = (".dist-info/METADATA", ".egg-info/PKG-INFO", ".egg/EGG-INFO/PKG-INFO", ".egg-info")
"""How files end that describe a Python package."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Package:
    """An installed package."""

    kind: Literal["deb", "pypi"]
    name: str
    version: str
    architecture: str = ""
    """``amd64`` or ``all``; empty for a Python package."""
    folder: str = ""
    """Folder of a Python package, ``/usr/lib/python3/dist-packages``; empty for a Debian package."""
    sha256: str = ""
    """Hex digest of the file that was installed; empty where the image does not record it."""
    url: str = ""
    """Place from which that file came; empty where the image does not record it."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class BakedFile:
    """A file that imgkit put into the image."""

    path: str
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
    """``sha256:...`` of the base's manifest, or of its configuration if it was never in a registry."""
    distribution: str
    """``debian``, ``ubuntu``; empty where the image does not say it."""
    release: str
    """``12``, ``22.04``."""
    arch: str
    """``amd64``, as in OCI."""
    created_s: int
    """Seconds since 1970 of the image's creation."""
    packages: tuple[Package, ...]
    """Sorted by their fields, the kind first."""
    baked: tuple[BakedFile, ...]
    """Sorted by path."""
    left_out: tuple[str, ...]
    """What could not be read, and why, sorted."""


def debian_packages(text: str) -> Iterator[Package | str]:
    """Yield the packages that the list `text` says are there, or what is wrong with an entry."""
    for number, paragraph in enumerate(filter(None, _PARAGRAPH_END.split(text.strip())), 1):
        fields = _field_reader(paragraph)
        name, version, architecture = fields("Package"), fields("Version"), fields("Architecture")
        state = fields("Status").split()
        if state and state[-1] in ("not-installed", "config-files"):
            continue
        is_valid = _DEB_NAME.fullmatch(name) and _DEB_VERSION.fullmatch(version)
        if is_valid and _ARCHITECTURE.fullmatch(architecture):
            yield Package(kind="deb", name=name, version=version, architecture=architecture)
        elif name or state:
            yield f"entry {number} is not a package"


def _field_reader(paragraph: str) -> Callable[[str], str]:
    """Return what gives the first value of a field of `paragraph`; empty where there is none."""
    message = HeaderParser().parsestr(paragraph)
    return lambda name: str(message.get(name, "")).strip()


def python_package(path: str, text: str) -> Package | None:
    """Return the package that the file `path` describes; None where it is none.

    The name of the file says name and version where `text` does not, where it is too large.
    """
    entry = _package_path(path)
    fields = _field_reader(_PARAGRAPH_END.split(text.lstrip(), 1)[0])
    name, version = fields("Name"), fields("Version")
    if not _NAME.fullmatch(name) or not _VERSION.fullmatch(version):
        name, version = (*entry.name.split("-"), "", "")[:2]
    if not _NAME.fullmatch(name) or not _VERSION.fullmatch(version):
        return None
    return Package(kind="pypi", name=name, version=version, folder=str(entry.parent))


def folder_of(path: str) -> str:
    """Return the folder of the package that the file `path` describes."""
    return str(_package_path(path).parent)


def _package_path(path: str) -> PurePosixPath:
    """Return the path of the package that the file `path` describes, without the ending of the file."""
    ending = next(suffix for suffix in PYTHON_ENDINGS if path.endswith(suffix))
    return PurePosixPath("/", path.removesuffix(ending))


def is_installed_python(package: Package) -> bool:
    """Return whether Python finds it; what another one has in a folder of its own, as setuptools, is none."""
    return PurePosixPath(package.folder).name in _FOLDERS

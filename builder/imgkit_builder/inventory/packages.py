"""The values of an inventory, and functions that read Debian and Python packages from files of an image.

dpkg's list has one paragraph of mail-style headers per package. Distroless images have one file per package
instead of the list. Python packages are found in the same way as pip finds them: by the file METADATA of
wheels, and by PKG-INFO of eggs and distutils packages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser
from pathlib import PurePosixPath
from typing import Literal

# The first paragraph has the headers. In a METADATA file, a long description may follow.
_PARAGRAPH_END = re.compile(r"\r?\n[ \t\r]*\n")
# The files may be of unknown origin, and their values go into a document. So each value must have its usual
# form.
_DEB_NAME = re.compile(r"[a-z0-9][a-z0-9+.-]{1,127}")
_DEB_VERSION = re.compile(r"[0-9A-Za-z.+:~-]{1,128}")
_ARCHITECTURE = re.compile(r"[a-z0-9-]{0,32}")

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,126}[A-Za-z0-9])?")
_VERSION = re.compile(r"[0-9A-Za-z.!+_*-]{1,128}")
# The folders in which Python looks for packages. Debian's own Python calls its folder dist-packages.
_FOLDERS = ("site-packages", "dist-packages")
PYTHON_ENDINGS = (".dist-info/METADATA", ".egg-info/PKG-INFO", ".egg/EGG-INFO/PKG-INFO", ".egg-info")
"""The ends of the paths of files that describe a Python package."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Package:
    """A Debian or Python package that is installed in an image."""

    kind: Literal["deb", "pypi"]
    name: str
    version: str
    architecture: str = ""
    """The architecture of a Debian package, ``amd64`` or ``all``. Empty for a Python package."""
    folder: str = ""
    """The folder of a Python package, ``/usr/lib/python3/dist-packages``. Empty for a Debian package."""
    sha256: str = ""
    """The digest in hex of the .deb or wheel that was installed. Empty if the image does not record it."""
    url: str = ""
    """The URL from which that file was downloaded. Empty if the image does not record it."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class BakedFile:
    """A file of imgkit itself that is part of an image."""

    path: str
    sha1: str
    """The SHA-1 digest in hex, which SPDX 2.3 demands of every file."""
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """What is known about the packages and files in an image. Equal files result in equal inventories."""

    recipe: str
    """The name of the recipe. Empty for an image that imgkit did not build."""
    base: str
    """The name of the base image. Empty if it is not known."""
    base_digest: str
    """The digest ``sha256:...`` of the base in its registry, or its image id if it was never in one."""
    distribution: str
    """The distribution, ``debian`` or ``ubuntu``. Empty if the image has no os-release file that names it."""
    release: str
    """The release of the distribution, ``12`` or ``22.04``."""
    arch: str
    """The architecture in the words of OCI, for example ``amd64``."""
    created_s: int
    """The time of the image's creation in seconds since 1970."""
    packages: tuple[Package, ...]
    """The packages, sorted by their fields, the kind first."""
    baked: tuple[BakedFile, ...]
    """The files of imgkit, sorted by path."""
    left_out: tuple[str, ...]
    """Sorted texts about what could not be read: ``/var/lib/dpkg/status: too large``."""


def debian_packages(text: str) -> Iterator[Package | str]:
    """Yield the installed packages in `text`, which is dpkg's list or one paragraph of it.

    For an entry that is not a valid package, yield a text such as ``entry 7 is not a package``. The inventory
    lists it under what was left out.
    """
    paragraphs = [paragraph for paragraph in _PARAGRAPH_END.split(text.strip()) if paragraph]
    for entry_number, paragraph in enumerate(paragraphs, 1):
        headers = HeaderParser().parsestr(paragraph)
        name = _read_field(headers, "Package")
        version = _read_field(headers, "Version")
        architecture = _read_field(headers, "Architecture")
        status = _read_field(headers, "Status")
        # After "Status: deinstall ok config-files", the package is removed and only its settings are left. An
        # entry without a status counts as installed.
        if status.endswith(("not-installed", "config-files")):
            continue
        # The image may be of unknown origin, so only well-formed values are passed on.
        is_named = _DEB_NAME.fullmatch(name) and _DEB_VERSION.fullmatch(version)
        if is_named and _ARCHITECTURE.fullmatch(architecture):
            yield Package(kind="deb", name=name, version=version, architecture=architecture)
        elif name or status:  # a paragraph with neither is no entry of dpkg
            yield f"entry {entry_number} is not a package"


def _read_field(headers: Message, name: str) -> str:
    """Return the first value of a mail-style header field, or "" if the field is missing."""
    return str(headers.get(name, "")).strip()


def python_package(path: str, text: str) -> Package | None:
    """Return the Python package that a file describes, or None if neither its content nor its path names one.

    `text` is the content of the file at `path`. If it does not give a valid name and version, for example
    because the file was too large to read, both are taken from the path: ``torch-2.3.0.dist-info/METADATA``.
    """
    package_path = _package_path(path)
    for name, version in (_parse_metadata(text), _parse_package_name(package_path.name)):
        if _NAME.fullmatch(name) and _VERSION.fullmatch(version):
            return Package(kind="pypi", name=name, version=version, folder=str(package_path.parent))
    return None


def _parse_metadata(text: str) -> tuple[str, str]:
    """Return the name and version in a METADATA or PKG-INFO file. A missing value is empty."""
    paragraph, *_ = _PARAGRAPH_END.split(text.lstrip(), 1)
    headers = HeaderParser().parsestr(paragraph)
    return _read_field(headers, "Name"), _read_field(headers, "Version")


def _parse_package_name(text: str) -> tuple[str, str]:
    """Return the name and version in ``torch-2.3.0``, or in the name of an egg, ``torch-2.3.0-py3.10``."""
    name, _, version_and_tag = text.partition("-")
    version, _, _ = version_and_tag.partition("-")
    return name, version


def folder_of(path: str) -> str:
    """Return the folder in which the package that the file at `path` describes is installed.

    It begins with a slash: ``/usr/lib/site-packages``.
    """
    return str(_package_path(path).parent)


def _package_path(path: str) -> PurePosixPath:
    """Return `path` without its ending from `PYTHON_ENDINGS`: ``/usr/lib/site-packages/torch-2.3.0``."""
    for ending in PYTHON_ENDINGS:
        if path.endswith(ending):
            return PurePosixPath("/", path.removesuffix(ending))
    return PurePosixPath("/", path)


def is_installed_python(package: Package) -> bool:
    """Return whether `package` is in a folder in which Python looks for packages.

    Some packages bring copies of others in a folder of their own, as setuptools does. These copies do not
    count.
    """
    return PurePosixPath(package.folder).name in _FOLDERS

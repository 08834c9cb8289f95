"""Collect the facts for an inventory from the files of an image, which come in any order.

Only files of interest are read, each up to a limit, and little is kept of them. A file that is too large or
damaged does not end the collection; the inventory names it under `left_out`. Hard links are followed within
the collected names only, so that none leads out of the image.

The lock from which an image was built is read as ``recipe.lock_file`` writes it. Python's standard library
reads TOML from 3.11 on. The inventory must have the same bytes on every Python, so `_locked_files` does not
parse TOML: it takes just the lines that it needs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import re
from typing import NamedTuple, TypeVar

from packaging.utils import canonicalize_name

from imgkit_builder.inventory import packages
from imgkit_builder.inventory.packages import BakedFile, Inventory, Package
from imgkit_builder.oci import manifest
from imgkit_builder.oci.manifest import BaseImage, Manifest
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import UsageError

OWN_FOLDER = "opt/imgkit"
"""The folder of imgkit's own files in an image."""
SPDX_PATH = f"{OWN_FOLDER}/sbom.spdx.json"
"""The path of the SPDX document that an image holds about itself. No inventory lists this file."""

MAX_FILE_BYTES = 16 << 20
"""16 MB, the size of the largest file that is read. The largest lists of dpkg have 5 MB."""
# Limits that keep an inventory small, whatever the image holds.
_MOST_PACKAGES = 50_000
_MOST_LEFT_OUT = 100
_IMGKIT_PREFIX = f"{OWN_FOLDER}/"
# dpkg's list, and the folder that a distroless image has instead, with one file per package.
_DPKG_LIST = "var/lib/dpkg/status"
_DPKG_LIST_FOLDER = "var/lib/dpkg/status.d/"
# Files that name the distribution. The first one that does so counts.
_OS_RELEASE_FILES = ("etc/os-release", "usr/lib/os-release")
Value = TypeVar("Value")
_LockKey = tuple[str, str, str]
"""The name, version and architecture of a package. A Python package has an empty architecture."""


class _LockedFile(NamedTuple):
    """What the lock records about the file of a package. A value that it does not state is empty."""

    sha256: str = ""
    url: str = ""


# A value of os-release, such as ubuntu or 22.04.
_RELEASE_VALUE = re.compile(r"[a-z0-9._-]{1,64}")

# The beginning of a table of the lock, [[platforms.apt]], and a line of it, version = "2.3.0".
_TABLE_START = re.compile(r"^\[\[platforms\.(?:apt|pip)\]\]$", re.MULTILINE)
_TABLE_LINE = re.compile(r'(?P<key>name|version|architecture|url|sha256) = (?P<quoted>".*")')
_SHA256 = re.compile(r"[0-9a-f]{64}")
_URL = re.compile(r"https?://[A-Za-z0-9._~:/?\[\]!&+,=%-]{1,2000}")  # as recipe/lock_file.py reads it


class InventoryCollector:
    """Takes the files and hard links of an image that describe packages, and returns the inventory.

    The caller asks `is_relevant` about every file, and passes the content to `add` where it is true.
    """

    def __init__(self) -> None:
        self._packages: list[Package] = []
        self._python: dict[str, Package | None] = {}
        """The package that each collected file describes, by the path of the file.

        None if it describes none.
        """
        self._hard_links: dict[str, str] = {}
        """The target of each hard link that has the name of such a file."""
        self._releases: dict[str, dict[str, str]] = {}
        self._baked: list[BakedFile] = []
        self._manifest: Manifest | None = None
        self._locked: dict[_LockKey, _LockedFile] = {}
        self._left_out: set[str] = set()

    def is_relevant(self, path: str) -> bool:
        """Return whether `add` needs the content of the file `path`.

        It is fast, as callers ask about every file of an image.
        """
        if path.endswith(packages.PYTHON_ENDINGS):
            return True
        if path.startswith(_DPKG_LIST_FOLDER):
            return not path.endswith(".md5sums")
        if path.startswith(_IMGKIT_PREFIX):
            is_in_subfolder = "/" in path.removeprefix(_IMGKIT_PREFIX)
            return path != SPDX_PATH and not is_in_subfolder
        return path == _DPKG_LIST or path in _OS_RELEASE_FILES

    def add(self, path: str, data: bytes | None) -> None:
        """Record what the file `path` describes. `is_relevant` must be true for it.

        `data` is its content, or None if the file exceeds `MAX_FILE_BYTES`.
        """
        if data is not None and path.startswith(OWN_FOLDER):
            self._add_imgkit_file(path, data)
            return
        text = ""
        if data is not None:
            text = data.decode("utf-8", "replace")
        else:
            # A Python package is listed all the same, because its path names it.
            self._leave_out(path, "too large")
        if path.endswith(packages.PYTHON_ENDINGS):
            self._store(self._python, path, packages.python_package(path, text))
        elif path in _OS_RELEASE_FILES:
            self._releases[path] = _parse_os_release(text)
        else:
            self._add_debian_packages(path, text)

    def add_hard_link(self, path: str, target: str) -> None:
        """Record a hard link, which gives the file that describes a package a second path."""
        if self.is_relevant(path):
            self._store(self._hard_links, path, target)

    def inventory(self, *, arch: str, created_s: int) -> Inventory:
        """Return the inventory of an image, from the files that were added so far.

        `arch` is its architecture in the words of OCI, such as ``amd64``, and `created_s` the time of its
        creation in seconds since 1970.
        """
        recipe = ""
        base = BaseImage(name="")
        if self._manifest is not None:
            recipe = self._manifest.recipe
            base = self._manifest.base
        release = self._os_release()
        # A set, because two files may describe the same package.
        listed = {self._with_locked_file(package) for package in self._packages}
        listed.update(self._with_locked_file(package) for package in self._python_packages())
        return Inventory(
            recipe=recipe,
            base=base.name,
            base_digest=base.digest.partition("@")[2] or base.id,
            distribution=release.get("ID", ""),
            release=release.get("VERSION_ID", ""),
            arch=arch,
            created_s=created_s,
            packages=tuple(sorted(listed)),
            baked=tuple(sorted(self._baked)),
            left_out=tuple(sorted(self._left_out)),
        )

    def _os_release(self) -> dict[str, str]:
        """Return ID and VERSION_ID of the first os-release file that has one of them."""
        for path in _OS_RELEASE_FILES:
            if self._releases.get(path):
                return self._releases[path]
        return {}

    def _with_locked_file(self, package: Package) -> Package:
        """Return `package` with the sha256 and URL that the lock records for it, if there are any."""
        key = _lock_key(package.name, package.version, package.architecture)
        locked = self._locked.get(key, _LockedFile())
        return dataclasses.replace(package, sha256=locked.sha256, url=locked.url)

    def _add_imgkit_file(self, path: str, data: bytes) -> None:
        """Record the digests of a file of imgkit. The manifest and the lock are also parsed.

        The manifest names recipe and base, and the lock the digests of packages.
        """
        sha1 = hashlib.sha1(data, usedforsecurity=False).hexdigest()
        sha256 = hashlib.sha256(data).hexdigest()
        self._baked.append(BakedFile(path=f"/{path}", sha1=sha1, sha256=sha256))
        if f"/{path}" == manifest.MANIFEST_JSON:
            try:
                self._manifest = manifest.from_json(data.decode())
            except (ValueError, UsageError):
                self._leave_out(path, "not a manifest of imgkit")
        elif f"/{path}" == manifest.LOCK_TOML:
            self._locked = _locked_files(data.decode("utf-8", "replace"))

    def _add_debian_packages(self, path: str, text: str) -> None:
        """Record the Debian packages in `text`, the content of the file `path`.

        An entry that is not a valid package is listed as left out.
        """
        for package_or_problem in packages.debian_packages(text):
            if len(self._packages) >= _MOST_PACKAGES:
                self._leave_out(path, f"more than {_MOST_PACKAGES} packages")
                return
            if isinstance(package_or_problem, Package):
                self._packages.append(package_or_problem)
            else:
                self._leave_out(path, package_or_problem)

    def _python_packages(self) -> list[Package]:
        """Return the installed Python packages.

        An image may store equal files once, and make the others hard links. So if a hard link points to a
        collected file, the package is also installed in the folder of the link.
        """
        packages_by_path = dict(self._python)
        for path, target in self._hard_links.items():
            if path.endswith(packages.PYTHON_ENDINGS):
                packages_by_path[path] = _linked_package(path, packages_by_path.get(target))
        installed = []
        for package in packages_by_path.values():
            if package is not None and packages.is_installed_python(package):
                installed.append(package)
        return installed

    def _store(self, entries: dict[str, Value], path: str, value: Value) -> None:
        """Set ``entries[path] = value``, unless `entries` has as many items as an inventory may have.

        Then the value is dropped, and the inventory says so once. An image of unknown origin could otherwise
        fill the memory.
        """
        if len(entries) < _MOST_PACKAGES:
            entries[path] = value
        else:
            self._left_out.add(f"more than {_MOST_PACKAGES} files that describe packages, or links to them")

    def _leave_out(self, path: str, reason: str) -> None:
        """Record that the file `path` could not be used: ``/var/lib/dpkg/status: too large``.

        After `_MOST_LEFT_OUT` files, further ones are not named, so that the inventory stays small.
        """
        if len(self._left_out) < _MOST_LEFT_OUT:
            self._left_out.add(f"/{path}: {reason}".encode("ascii", "backslashreplace").decode())


def _linked_package(path: str, original: Package | None) -> Package | None:
    """Return the Python package that is installed where the hard link `path` lies.

    The link leads to a file that describes the package `original`. If that is None, name and version are
    taken from the path of the link. Return None if the path does not have them, either.
    """
    package = original or packages.python_package(path, "")
    if package is None:
        return None
    return dataclasses.replace(package, folder=packages.folder_of(path))


def _parse_os_release(text: str) -> dict[str, str]:
    """Return ID and VERSION_ID of an os-release file: ``{"ID": "ubuntu", "VERSION_ID": "22.04"}``.

    Values that are not plain words are left out, since the file may be of unknown origin.
    """
    values = {}
    for line in text.splitlines():
        name, _, quoted = line.partition("=")
        value = quoted.strip("\"'")
        if name in ("ID", "VERSION_ID") and _RELEASE_VALUE.fullmatch(value):
            values[name] = value
    return values


def _lock_key(name: str, version: str, architecture: str) -> _LockKey:
    """Return the key of a package in a lock. ``Flash_Attn`` and ``flash-attn`` have the same key."""
    if not architecture:  # a Python package
        name = canonicalize_name(name)
    return (name, version, architecture)


def _locked_files(text: str) -> dict[_LockKey, _LockedFile]:
    """Return what `text`, the content of a lock file, records about the file of each package.

    The URL is empty if the lock states none, or one in a form that imgkit would not write.
    """
    files = {}
    _, *tables = _TABLE_START.split(text)
    for table in tables:
        values = _parse_lock_table(table)
        if not _SHA256.fullmatch(values["sha256"]):
            continue
        key = _lock_key(values["name"], values["version"], values["architecture"])
        url = values["url"] if _URL.fullmatch(values["url"]) else ""
        files[key] = _LockedFile(sha256=values["sha256"], url=url)
    return files


def _parse_lock_table(text: str) -> dict[str, str]:
    """Return name, version, architecture, url and sha256 of the first table in `text`, or "" for each.

    Lines that imgkit does not write are skipped.
    """
    values = dict.fromkeys(("name", "version", "architecture", "url", "sha256"), "")
    table, _, _ = text.partition("\n[")
    for line in table.splitlines():
        match = _TABLE_LINE.fullmatch(line)
        if match is not None:
            # A quoted text of TOML, as imgkit writes it, is a text of JSON, too.
            with contextlib.suppress(ValueError):
                values[match["key"]] = str(json_text.parse(match["quoted"]))
    return values

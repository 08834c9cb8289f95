"""Collect what an inventory needs while the files of an image pass by, in any order.

Only files of interest are read, each up to a limit, and what is kept of them is small. Whatever an image
holds, collecting ends with an inventory that says what it leaves out. Hard links are followed within the
collected names, so that none leads out of the image.

The lock that an image was made by is read as ``recipe.lock_file`` writes it. Python reads TOML from 3.11 on.
The list must have the same bytes on every Python, so `_locked_files` takes just the lines that it needs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from typing import TypeVar

from packaging.utils import canonicalize_name

from imgkit_builder.inventory import packages
from imgkit_builder.inventory.packages import BakedFile, Inventory, Package
from imgkit_builder.oci import manifest
from imgkit_builder.oci.manifest import BaseImage, Manifest
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import UsageError

BAKED = "opt/imgkit"
"""Folder of imgkit's own files in an image."""
DOCUMENT = f"{BAKED}/sbom.spdx.json"
"""Place of an image's own document, which no inventory lists."""

MOST_BYTES = 16 << 20
"""The largest file that is read. The largest dpkg lists have 5 MB."""
_MOST_PACKAGES = 50_000
_MOST_LEFT_OUT = 100
_STATUS = "var/lib/dpkg/status"
_STATUS_FOLDER = "var/lib/dpkg/status.d/"
_RELEASES = ("etc/os-release", "usr/lib/os-release")
Kept = TypeVar("Kept")
_LockKey = tuple[str, str, str]
"""Name, version and architecture of a package; the last is empty for a Python package."""

_WORD = re.compile(r"[a-z0-9._-]{1,64}")

_HEAD = re.compile(r"^\[\[platforms\.(?:apt|pip)\]\]$", re.MULTILINE)
_VALUE = re.compile(r'(name|version|architecture|url|sha256) = (".*")')
_SHA256 = re.compile(r"[0-9a-f]{64}")
_URL = re.compile(r"https?://[A-Za-z0-9._~:/?\[\]!&+,=%-]{1,2000}")  # as recipe/lock_file.py reads it


class InventoryCollector:
    """Gets files and links of interest, and makes the inventory of them."""

    def __init__(self) -> None:
        self._packages: list[Package] = []
        self._python: dict[str, Package | None] = {}
        """Files that describe a Python package, by their path."""
        self._hard_links: dict[str, str] = {}
        self._releases: dict[str, dict[str, str]] = {}
        self._baked: list[BakedFile] = []
        self._manifest: Manifest | None = None
        self._locked: dict[_LockKey, tuple[str, str]] = {}
        self._left_out: set[str] = set()

    def wants(self, path: str) -> bool:
        """Return whether `add` has a use for the file `path`. This costs little, as it sees every file."""
        if path.endswith(packages.PYTHON_ENDINGS):
            return True
        if path.startswith(_STATUS_FOLDER):
            return not path.endswith(".md5sums")
        in_baked = path.startswith(f"{BAKED}/") and path.count("/") == 2 and path != DOCUMENT
        return in_baked or path == _STATUS or path in _RELEASES

    def add(self, path: str, data: bytes | None) -> None:
        """Take the content of a file for which `wants` is true. None stands for more than `MOST_BYTES`."""
        if data is None:
            self._leave_out(path, "too large")
        elif path.startswith(BAKED):
            self._add_baked(path, data)
            return
        text = (data or b"").decode("utf-8", "replace")
        if path.endswith(packages.PYTHON_ENDINGS):
            self._keep(self._python, path, packages.python_package(path, text))
        elif path in _RELEASES:
            self._releases[path] = _parse_os_release(text)
        else:
            self._add_debian(path, text)

    def add_hard_link(self, path: str, target: str) -> None:
        """Take a hard link that may give a Python package a second name."""
        if self.wants(path):
            self._keep(self._hard_links, path, target)

    def inventory(self, *, arch: str, created_s: int) -> Inventory:
        """Return what the files say about an image for `arch`, made at `created_s`."""
        release = next((self._releases[path] for path in _RELEASES if self._releases.get(path)), {})
        base = self._manifest.base if self._manifest else BaseImage(name="")
        packages = {self._with_origin(package) for package in (*self._packages, *self._pythons())}
        return Inventory(
            recipe=self._manifest.recipe if self._manifest else "",
            base=base.name,
            base_digest=base.digest.partition("@")[2] or base.id,
            distribution=release.get("ID", ""),
            release=release.get("VERSION_ID", ""),
            arch=arch,
            created_s=created_s,
            packages=tuple(sorted(packages)),
            baked=tuple(sorted(self._baked)),
            left_out=tuple(sorted(self._left_out)),
        )

    def _add_baked(self, path: str, data: bytes) -> None:
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

    def _add_debian(self, path: str, text: str) -> None:
        for package in packages.debian_packages(text):
            if len(self._packages) >= _MOST_PACKAGES:
                self._leave_out(path, f"more than {_MOST_PACKAGES} packages")
                return
            if isinstance(package, Package):
                self._packages.append(package)
            else:
                self._leave_out(path, package)

    def _pythons(self) -> list[Package]:
        pythons = dict(self._python)
        for path, target in self._hard_links.items():
            if path.endswith(packages.PYTHON_ENDINGS):
                package = pythons.get(target) or packages.python_package(path, "")
                pythons[path] = package and dataclasses.replace(package, folder=packages.folder_of(path))
        return [package for package in pythons.values() if package and packages.is_installed_python(package)]

    def _keep(self, entries: dict[str, Kept], path: str, value: Kept) -> None:
        if len(entries) < _MOST_PACKAGES:
            entries[path] = value
        else:
            self._left_out.add(f"more than {_MOST_PACKAGES} files that describe packages, or links to them")

    def _with_origin(self, package: Package) -> Package:
        """Return the package with what the lock says about its file."""
        key = _lock_key(package.name, package.version, package.architecture)
        sha256, url = self._locked.get(key, ("", ""))
        return dataclasses.replace(package, sha256=sha256, url=url)

    def _leave_out(self, path: str, reason: str) -> None:
        if len(self._left_out) < _MOST_LEFT_OUT:
            self._left_out.add(f"/{path}: {reason}".encode("ascii", "backslashreplace").decode())


def _parse_os_release(text: str) -> dict[str, str]:
    """Return the variables of an os-release file that are plain words."""
    pairs = (line.partition("=") for line in text.splitlines())
    values = {name: value.strip("\"'") for name, _, value in pairs}
    return {name: values[name] for name in ("ID", "VERSION_ID") if _WORD.fullmatch(values.get(name, ""))}


def _lock_key(name: str, version: str, architecture: str) -> _LockKey:
    """Return the key of a Debian package, or of a Python package, whose name has several spellings."""
    return (name if architecture else canonicalize_name(name), version, architecture)


def _locked_files(text: str) -> dict[_LockKey, tuple[str, str]]:
    """Return sha256 and URL of the packages in the lock `text`, and pass over what imgkit does not write."""
    files = {}
    for table in _HEAD.split(text)[1:]:
        lines = table.partition("\n[")[0].splitlines()
        values = {pair[1]: _unquote(pair[2]) for pair in map(_VALUE.fullmatch, lines) if pair}
        sha256, url = values.get("sha256", ""), values.get("url", "")
        if _SHA256.fullmatch(sha256):
            key = _lock_key(values.get("name", ""), values.get("version", ""), values.get("architecture", ""))
            files[key] = (sha256, url if _URL.fullmatch(url) else "")
    return files


def _unquote(text: str) -> str:
    """Return the value of a TOML text in quotes; empty where it is none."""
    try:
        value = json_text.parse(text)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""

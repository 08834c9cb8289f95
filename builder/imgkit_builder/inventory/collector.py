"""Collect the facts for an inventory from the files of an image, which arrive in any order.

Only relevant files are read, and each only up to a size limit. A file that is too large or damaged does not
stop the collection. The inventory lists it under `left_out`. Hard links are only followed to other collected
files, so that no link can lead out of the image.

The inventory must have the same bytes on every version of Python. The standard library can parse TOML only
from Python 3.11 on. So `_parse_locked_files` does not parse the image's lock as TOML. It picks the lines
that it needs, in the form in which ``recipe.lock_file`` writes them.
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
"""The folder in an image that contains imgkit's own files."""
SPDX_PATH = f"{OWN_FOLDER}/sbom.spdx.json"
"""The path of the SPDX document that an image contains about itself. No inventory lists this file."""

MAX_FILE_BYTES = 16 << 20
"""16 MB, the size of the largest file that is read. The largest package lists of dpkg have 5 MB."""
# Limits that keep an inventory small, whatever an image contains.
_MOST_PACKAGES = 50_000
_MOST_LEFT_OUT = 100
_IMGKIT_PREFIX = f"{OWN_FOLDER}/"
# dpkg's list of installed packages. Distroless images have a folder with one file per package instead.
_DPKG_LIST = "var/lib/dpkg/status"
_DPKG_LIST_FOLDER = "var/lib/dpkg/status.d/"
# Files that name the distribution. The first file that names it counts.
_OS_RELEASE_FILES = ("etc/os-release", "usr/lib/os-release")
Value = TypeVar("Value")
_LockKey = tuple[str, str, str]
"""The name, version and architecture of a package. A Python package has an empty architecture."""


class _LockedFile(NamedTuple):
    """What the lock records about the file of a package. A value that the lock does not have is empty."""

    sha256: str = ""
    url: str = ""


# A value of os-release, such as ubuntu or 22.04.
_RELEASE_VALUE = re.compile(r"[a-z0-9._-]{1,64}")

# A table in the lock begins with the line [[platforms.apt]] or [[platforms.pip]]. It has lines such as
# version = "2.3.0".
_TABLE_START = re.compile(r"^\[\[platforms\.(?:apt|pip)\]\]$", re.MULTILINE)
_TABLE_LINE = re.compile(r'(?P<key>name|version|architecture|url|sha256) = (?P<quoted>".*")')
_SHA256 = re.compile(r"[0-9a-f]{64}")
_URL = re.compile(r"https?://[A-Za-z0-9._~:/?\[\]!&+,=%-]{1,2000}")  # as recipe/lock_file.py reads it


class InventoryCollector:
    """Collects the files and hard links of an image that describe packages, and returns the inventory.

    The caller asks `is_relevant` about each file. If it is relevant, the caller passes its content to `add`.
    """

    def __init__(self) -> None:
        self._packages: list[Package] = []
        self._python_by_path: dict[str, Package | None] = {}
        """The package that each collected file describes, by the path of the file.

        The value is None if the file does not describe a package.
        """
        self._target_by_link: dict[str, str] = {}
        """The target of each hard link whose name is that of a file that describes a package."""
        self._release_values_by_path: dict[str, dict[str, str]] = {}
        self._baked: list[BakedFile] = []
        self._manifest: Manifest | None = None
        self._locked: dict[_LockKey, _LockedFile] = {}
        self._left_out: set[str] = set()

    def is_relevant(self, path: str) -> bool:
        """Return whether `add` needs the content of the file `path`.

        This is fast, because callers ask about every file of an image.
        """
        if path.endswith(packages.PYTHON_ENDINGS):
            return True
        if path.startswith(_DPKG_LIST_FOLDER):
            # Beside the entry of a package, there may be a list of its files.
            return not path.endswith(".md5sums")
        if path.startswith(_IMGKIT_PREFIX):
            is_in_subfolder = "/" in path.removeprefix(_IMGKIT_PREFIX)
            # The image's own SPDX document is made from this inventory, so it cannot be part of it.
            return path != SPDX_PATH and not is_in_subfolder
        return path == _DPKG_LIST or path in _OS_RELEASE_FILES

    def add(self, path: str, data: bytes | None) -> None:
        """Record what the file `path` describes. The file must be relevant (see `is_relevant`).

        `data` is the content of the file, or None if the file is larger than `MAX_FILE_BYTES`.
        """
        if data is not None and path.startswith(OWN_FOLDER):
            self._add_imgkit_file(path, data)
            return
        text = ""
        if data is not None:
            text = data.decode("utf-8", "replace")
        else:
            # A Python package is listed even without its file's content, because the path of the file names
            # it.
            self._leave_out(path, "too large")
        if path.endswith(packages.PYTHON_ENDINGS):
            self._store(self._python_by_path, path, packages.python_package(path, text))
        elif path in _OS_RELEASE_FILES:
            # The files may come in any order, so `_choose_os_release` chooses between them later.
            self._release_values_by_path[path] = _parse_os_release(text)
        else:
            # If the file is too large, its text is empty here, and no package is added.
            self._add_debian_packages(path, text)

    def add_hard_link(self, path: str, target: str) -> None:
        """Record a hard link, which is a second path of a file that describes a package."""
        if self.is_relevant(path):
            self._store(self._target_by_link, path, target)

    def inventory(self, *, arch: str, created_s: int) -> Inventory:
        """Return the inventory of an image, made from the files that were added so far.

        `arch` is the architecture as OCI calls it, such as ``amd64``. `created_s` is the time at which the
        image was created, in seconds since 1970.
        """
        recipe = ""
        base = BaseImage(name="")
        if self._manifest is not None:
            recipe = self._manifest.recipe
            base = self._manifest.base
        release = self._choose_os_release()
        # The lock may have been added after the packages, so its digests are looked up only now. This is a
        # set because two files may describe the same package.
        listed_packages = {self._complete_from_lock(package) for package in self._packages}
        listed_packages.update(self._complete_from_lock(package) for package in self._list_python_packages())
        return Inventory(
            recipe=recipe,
            base=base.name,
            # ``repo@sha256:...`` -> ``sha256:...``, or the id of a base that was never in a registry
            base_digest=base.digest.partition("@")[2] or base.id,
            distribution=release.get("ID", ""),
            release=release.get("VERSION_ID", ""),
            arch=arch,
            created_s=created_s,
            packages=tuple(sorted(listed_packages)),
            baked=tuple(sorted(self._baked)),
            left_out=tuple(sorted(self._left_out)),
        )

    def _choose_os_release(self) -> dict[str, str]:
        """Return ID and VERSION_ID from the first os-release file that has at least one of them."""
        for path in _OS_RELEASE_FILES:
            if self._release_values_by_path.get(path):
                return self._release_values_by_path[path]
        return {}

    def _complete_from_lock(self, package: Package) -> Package:
        """Return `package` with the SHA-256 digest and URL from the lock, if the lock has them."""
        key = _make_lock_key(package.name, package.version, package.architecture)
        locked = self._locked.get(key, _LockedFile())
        return dataclasses.replace(package, sha256=locked.sha256, url=locked.url)

    def _add_imgkit_file(self, path: str, data: bytes) -> None:
        """Record the digests of a file of imgkit.

        The manifest and the lock are parsed as well. The manifest names the recipe and the base, and the lock
        has the digests of packages.
        """
        sha1 = hashlib.sha1(data, usedforsecurity=False).hexdigest()
        sha256 = hashlib.sha256(data).hexdigest()
        self._baked.append(BakedFile(path=f"/{path}", sha1=sha1, sha256=sha256))
        if f"/{path}" == manifest.MANIFEST_JSON:
            try:
                self._manifest = manifest.from_json(data.decode())
            except (ValueError, UsageError):
                # The image may be of unknown origin, so a wrong manifest must not end the collection.
                self._leave_out(path, "not a manifest of imgkit")
        elif f"/{path}" == manifest.LOCK_TOML:
            self._locked = _parse_locked_files(data.decode("utf-8", "replace"))

    def _add_debian_packages(self, path: str, text: str) -> None:
        """Record the Debian packages in `text`, the content of the file `path`.

        An entry that is not a valid package is recorded as left out.
        """
        for package_or_problem in packages.debian_packages(text):
            if len(self._packages) >= _MOST_PACKAGES:
                self._leave_out(path, f"more than {_MOST_PACKAGES} packages")
                return
            if isinstance(package_or_problem, Package):
                self._packages.append(package_or_problem)
            else:
                self._leave_out(path, package_or_problem)

    def _list_python_packages(self) -> list[Package]:
        """Return the installed Python packages.

        An image may store a file once and make its other copies hard links. So if a hard link points to a
        collected file, the package is also installed in the folder of the link. This is done last, because a
        link may come before its target.
        """
        packages_by_path = dict(self._python_by_path)
        for path, target in self._target_by_link.items():
            if path.endswith(packages.PYTHON_ENDINGS):
                packages_by_path[path] = _find_linked_package(path, packages_by_path.get(target))
        installed = []
        for package in packages_by_path.values():
            if package is not None and packages.is_installed_python(package):
                installed.append(package)
        return installed

    def _store(self, entries: dict[str, Value], path: str, value: Value) -> None:
        """Set ``entries[path] = value``, unless `entries` is full.

        If it has as many items as an inventory may have, the value is dropped, and the inventory reports that
        once. Without this limit, an image of unknown origin could fill the memory.
        """
        if len(entries) < _MOST_PACKAGES:
            entries[path] = value
        else:
            self._left_out.add(f"more than {_MOST_PACKAGES} files that describe packages, or links to them")

    def _leave_out(self, path: str, reason: str) -> None:
        """Record that a file could not be used, for example ``/var/lib/dpkg/status: too large``.

        Only the first `_MOST_LEFT_OUT` files are recorded, so that the inventory stays small.
        """
        if len(self._left_out) < _MOST_LEFT_OUT:
            self._left_out.add(f"/{path}: {reason}".encode("ascii", "backslashreplace").decode())


def _find_linked_package(path: str, original: Package | None) -> Package | None:
    """Return the Python package that is installed in the folder of the hard link `path`.

    For example, `path` is ``b/torch-2.3.0.dist-info/METADATA``, a second name of the file
    ``a/torch-2.3.0.dist-info/METADATA``. `original` is the package that the file describes under its first
    name. If it is None, the name and version are taken from `path`. The result is None if `path` does not
    contain them, either.
    """
    package = original or packages.python_package(path, "")  # "": the file's content is not known here
    if package is None:
        return None
    return dataclasses.replace(package, folder=packages.folder_of(path))


def _parse_os_release(text: str) -> dict[str, str]:
    """Return ID and VERSION_ID of an os-release file: ``{"ID": "ubuntu", "VERSION_ID": "22.04"}``.

    Values with unusual characters are left out, because the file may be of unknown origin.
    """
    release_values = {}
    for line in text.splitlines():
        name, _, quoted = line.partition("=")
        value = quoted.strip("\"'")
        if name in ("ID", "VERSION_ID") and _RELEASE_VALUE.fullmatch(value):
            release_values[name] = value
    return release_values


def _make_lock_key(name: str, version: str, architecture: str) -> _LockKey:
    """Return the key of a package in a lock. It is the same for ``Flash_Attn`` and ``flash-attn``."""
    if not architecture:  # a Python package
        name = canonicalize_name(name)
    return (name, version, architecture)


def _parse_locked_files(text: str) -> dict[_LockKey, _LockedFile]:
    """Return what `text`, the content of a lock file, records about the file of each package.

    The URL is empty if the lock has none, or one in a form that imgkit does not write. A package without a
    valid digest is left out. The lock is not parsed as TOML, because not every supported Python can do that.
    """
    files_by_package = {}
    # The text before the first table has no packages.
    _, *tables = _TABLE_START.split(text)
    for table in tables:
        table_values = _parse_lock_table(table)
        if not _SHA256.fullmatch(table_values["sha256"]):
            continue  # the image may be of unknown origin, so nothing in its lock is trusted
        key = _make_lock_key(table_values["name"], table_values["version"], table_values["architecture"])
        url = table_values["url"] if _URL.fullmatch(table_values["url"]) else ""
        files_by_package[key] = _LockedFile(sha256=table_values["sha256"], url=url)
    return files_by_package


def _parse_lock_table(text: str) -> dict[str, str]:
    """Return name, version, architecture, url and sha256 of the first table in `text`.

    A value that the table does not have is "". Lines in a form that imgkit does not write are skipped.
    """
    values_by_key = dict.fromkeys(("name", "version", "architecture", "url", "sha256"), "")
    table, _, _ = text.partition("\n[")  # "[" at the start of a line begins the next table
    for line in table.splitlines():
        match = _TABLE_LINE.fullmatch(line)
        if match is not None:
            # A quoted string in TOML, as imgkit writes it, is also a valid string in JSON.
            with contextlib.suppress(ValueError):
                values_by_key[match["key"]] = str(json_text.parse(match["quoted"]))
    return values_by_key

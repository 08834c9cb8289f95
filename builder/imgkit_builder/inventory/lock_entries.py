"""Read the packages in the lock that an image was made by, as ``recipe.lock_file`` writes it.

Python reads TOML from 3.11 on. The list must have the same bytes on every Python, so this takes just the
lines that it needs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from imgkit_entrypoints import json_text

_HEAD = re.compile(r"\[\[platforms\.(apt|pip)\]\]")
_VALUE = re.compile(r'(name|version|architecture|url|sha256) = (".*")')
_SHA256 = re.compile(r"[0-9a-f]{64}")
_URL = re.compile(r"https?://[A-Za-z0-9._~:/?\[\]!&+,=%-]{1,2000}")  # as recipe/lock_file.py reads it


@dataclass(frozen=True, slots=True, kw_only=True)
class LockEntry:
    """Where the file of a package came from."""

    sha256: str
    url: str
    """Empty where the lock names none."""


Key = tuple[str, str, str]
"""Kind or architecture, name and version of a package."""


def deb_key(name: str, version: str, architecture: str) -> Key:
    """The key of a Debian package."""
    return architecture, name, version


def pypi_key(name: str, version: str) -> Key:
    """The key of a Python package, whose name has several spellings."""
    return "pypi", re.sub(r"[-_.]+", "-", name).lower(), version


def entries(text: str) -> dict[Key, LockEntry]:
    """The packages in the lock `text`; lines that are not as imgkit writes them are passed over."""
    found: dict[Key, LockEntry] = {}
    for kind, values in _tables(text):
        name, version = values.get("name", ""), values.get("version", "")
        sha256, url = values.get("sha256", ""), values.get("url", "")
        if _SHA256.fullmatch(sha256):
            architecture = values.get("architecture", "")
            key = deb_key(name, version, architecture) if kind == "apt" else pypi_key(name, version)
            found[key] = LockEntry(sha256=sha256, url=url if _URL.fullmatch(url) else "")
    return found


def _tables(text: str) -> Iterator[tuple[str, Mapping[str, str]]]:
    kind, values = "", dict[str, str]()
    for line in (*text.splitlines(), "["):
        if line.startswith("["):
            if kind:
                yield kind, values
            head = _HEAD.fullmatch(line)
            kind, values = head[1] if head else "", {}
        elif kind and (pair := _VALUE.fullmatch(line)):
            values[pair[1]] = _plain(pair[2])


def _plain(text: str) -> str:
    """The value of a TOML text in quotes; empty where it is none."""
    try:
        value = json_text.parse(text)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""

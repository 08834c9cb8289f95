"""Checks the content of files that a recipe names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from imgkit_builder.recipe import requirements, uv_fresh, uv_lock
from imgkit_builder.recipe.problems import Collector, KeyPath, Position
from imgkit_entrypoints import files


def certificate(file: Path, position: Position, path: KeyPath, found: Collector) -> None:
    """Report a file of ``image.ca`` that is not a certificate as PEM text, or that holds a private key."""
    try:
        data = files.read_bytes(file)
    except OSError as error:
        found.error(position, path, f"{file.name} cannot be read: {error.strerror}")
        return
    if b"PRIVATE KEY-----" in data:
        hint = f"keep only the certificate: openssl x509 -in {file.name} -out certificate.crt"
        found.error(position, path, f"{file.name} holds a private key, which would be in the image", hint)
    elif b"-----BEGIN CERTIFICATE-----" not in data:
        hint = f"if it is DER, convert it: openssl x509 -inform der -in {file.name} -out certificate.crt"
        found.error(position, path, f"{file.name} is not a certificate in PEM form", hint)


def project(folder: Path, position: Position, path: KeyPath, found: Collector) -> None:
    """Report a folder of ``project`` without a usable pyproject.toml."""
    if not (folder / requirements.PYPROJECT).is_file():
        what = f"{folder.name} has no {requirements.PYPROJECT}"
        hint = "name the folder that has one" if folder.is_dir() else "name a folder"
        if (folder / "setup.py").is_file():
            hint = 'add one beside setup.py: [build-system] with requires = ["setuptools"]'
        found.error(position, path, what, hint)
        return
    try:
        needed = requirements.of_project(folder)
    except (OSError, ValueError) as error:
        found.error(position, path, f"its {requirements.PYPROJECT} cannot be read: {error}")
        return
    for one in needed:
        # PEP 508 spells a path "NAME @ file:...".
        if requirements.names_other_file(one.rpartition("@")[2]):
            what = f"depends on {one!r}, a path that is not in the image"
            found.error(position, path, what, "add a pip step with a project of its own before this one")


def uv_project(
    folder: Path,
    position: Position,
    path: KeyPath,
    found: Collector,
    *,
    extras: Sequence[str],
    groups: Sequence[str],
) -> None:
    """Report a folder of ``uv`` without a usable uv.lock, or whose pyproject.toml has changed since."""
    for name in (requirements.PYPROJECT, uv_lock.UV_LOCK):
        if not (folder / name).is_file():
            hint = (
                "write it: uv lock"
                if name == uv_lock.UV_LOCK and folder.is_dir()
                else "name the folder of one"
            )
            found.error(position, path, f"{folder.name} has no {name}", hint)
            return
    try:
        pyproject, content = uv_lock.tables(folder)
        lock = uv_lock.from_tables(pyproject, content)
        changed = uv_fresh.changed(pyproject, lock.stated, extras=extras, groups=groups)
    except (OSError, ValueError) as error:
        found.error(position, path, f"its uv.lock cannot be used: {error}")
        return
    for name in changed:
        what = f"uv.lock is not up to date: {_line(folder, name)} and the lock differ about {name}"
        found.error(position, path, what, "write it again: uv lock")


def _line(folder: Path, name: str) -> str:
    """``pyproject.toml:7`` for the first line that names a distribution, or the file's name."""
    lines = files.read_text(folder / requirements.PYPROJECT).splitlines()
    known = re.compile(rf"(?<![A-Za-z0-9]){re.sub('-', '[-_.]+', name)}(?![A-Za-z0-9_.-])", re.IGNORECASE)
    number = next((number for number, line in enumerate(lines, 1) if known.search(line)), 0)
    return requirements.PYPROJECT + (f":{number}" if number else "")

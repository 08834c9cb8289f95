"""Fits an exported uv.lock to the base. Runs by path in the base, before its pip installs the result.

``python3 inside_uv.py FOLDER`` reads ``FOLDER/uv.json``, which ``uv_export`` wrote, and
``FOLDER/constraint.txt``, which has the versions of the base's torch and related packages. It writes
``FOLDER/requirements-uv.txt``, and adds the locked versions to constraint.txt, so that later pip steps keep
them. The exit code is 1 where lock and base do not fit together.

It needs the standard library and the ``packaging`` inside pip, which evaluates markers as that pip does.
"""

from __future__ import annotations

import importlib
import json
import platform
import re
import sys
from pathlib import Path
from typing import Any


def main(folder: Path) -> int:
    """Write the files for pip, or print all that does not fit."""
    exported = json.loads((folder / "uv.json").read_text(encoding="utf-8"))
    constraint_file = folder / "constraint.txt"
    base = read_pins(constraint_file)
    try:
        errors = [*environment_errors(exported), *torch_errors(exported["requirements"], base)]
    except ImportError as error:
        errors = [f"this base has no pip that imgkit can use for uv.lock: {error}"]
    if errors:
        print("uv.lock does not fit this base:", *errors, sep="\n")
        return 1
    lines = exported["requirements"]
    if "torch" in base:
        lines = exported["beside_torch"]  # without what only torch needs
    requirements = [" ".join(exported["index_options"])]
    constraints = []
    for line in lines:
        name = requirement_name(line)
        if name in base:
            continue
        if name not in exported["left_to_pip"]:
            requirements.append(line)
        # A constraint needs no hash, and cannot be a URL or a folder.
        constraint, _, _ = line.partition(" --hash=")
        if re.match(r"[\w.-]+==", constraint):
            constraints.append(constraint)
    write_lines(folder / "requirements-uv.txt", "w", requirements)
    write_lines(constraint_file, "a", constraints)
    return 0


def read_pins(file: Path) -> dict[str, str]:
    """Return the versions in a file of lines such as ``torch==2.3.0``, by name."""
    versions = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        name, _, version = line.partition("==")
        versions[canonical_name(name)] = version
    return versions


def write_lines(path: Path, mode: str, lines: list[str]) -> None:
    """Write or append `lines`, by the `mode` of ``open``."""
    with path.open(mode, encoding="utf-8") as stream:
        stream.writelines(f"{line}\n" for line in lines)


def import_packaging(module: str) -> Any:
    """Return a module of the ``packaging`` inside pip."""
    return importlib.import_module(f"pip._vendor.packaging.{module}")


def canonical_name(name: str) -> str:
    """Return the name as PyPA's specification normalises it: ``Flash_Attn`` -> ``flash-attn``."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirement_name(line: str) -> str:
    """Return the name of an exported requirement: ``numpy`` of ``numpy==2.1 --hash=...``."""
    return re.split(r"[=@ ]", line)[0]


def environment_errors(exported: dict[str, Any]) -> list[str]:
    """Return why the project does not allow this Python or platform. No requirement states that."""
    errors = []
    required = exported["requires_python"]
    if required:
        version = platform.python_version()
        allowed = import_packaging("specifiers").SpecifierSet(required)
        if not allowed.contains(version, prereleases=True):
            errors.append(f"the project requires Python {required}, and the base has {version}")
    environments = exported["environments"]
    if environments:
        markers = import_packaging("markers")
        if not any(markers.Marker(environment).evaluate() for environment in environments):
            errors.append(f"the project is only for: {' or '.join(environments)} (tool.uv.environments)")
    return errors


def torch_errors(lines: list[str], base: dict[str, str]) -> list[str]:
    """Return the packages of `base`, such as torch, that the lock has in another release.

    A base builds its own torch, 2.3.0a0+40ec155e58.nv24.03: 2.3.0 is what counts.
    """
    errors = []
    for line in lines:
        base_version = base.get(requirement_name(line))
        if base_version is None:
            continue
        requirement_text, _, _ = line.partition(" --hash=")
        requirement = import_packaging("requirements").Requirement(requirement_text)
        if requirement.marker and not requirement.marker.evaluate():
            continue
        name = requirement.name
        base_release = parse_release(base_version)
        for specifier in requirement.specifier:
            if parse_release(specifier.version) == base_release:
                print(f"{name}: the base's {base_version} stays in place of {specifier.version}")
            else:
                errors.append(
                    f"{name}: uv.lock has {specifier.version}, but the base has {base_version}, which imgkit"
                    f" never replaces\n  -> uv lock --upgrade-package '{name}=={base_release}'"
                )
    return errors


def parse_release(version: str) -> Any:
    """Return the release 2.3.0 of ``2.3.0a0+nv24.03``."""
    module = import_packaging("version")
    return module.Version(module.Version(version).base_version)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

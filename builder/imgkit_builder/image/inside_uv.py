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
    constraint = folder / "constraint.txt"
    base = {}
    for line in constraint.read_text(encoding="utf-8").splitlines():
        name, _, version = line.partition("==")
        base[canonical(name)] = version
    try:
        errors = [*environment_errors(exported), *torch_errors(exported["requirements"], base)]
    except ImportError as error:
        errors = [f"this base has no pip that imgkit can use for uv.lock: {error}"]
    if errors:
        print("uv.lock does not fit this base:", *errors, sep="\n")
        return 1
    lines = exported["beside_torch" if "torch" in base else "requirements"]
    lines = [line for line in lines if name_of(line) not in base]
    to_install = [line for line in lines if name_of(line) not in exported["left_to_pip"]]
    write(folder / "requirements-uv.txt", "w", [" ".join(exported["index_options"]), *to_install])
    # A constraint needs no hash; a URL or a folder is none.
    write(constraint, "a", [line.partition(" --hash=")[0] for line in lines if re.match(r"[\w.-]+==", line)])
    return 0


def write(path: Path, mode: str, lines: list[str]) -> None:
    """Write or append `lines`."""
    with path.open(mode, encoding="utf-8") as stream:
        stream.writelines(f"{line}\n" for line in lines)


def packaging(module: str) -> Any:
    """Return a module of the ``packaging`` inside pip."""
    return importlib.import_module(f"pip._vendor.packaging.{module}")


def canonical(name: str) -> str:
    """Return the name as PyPA's specification normalises it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def name_of(line: str) -> str:
    """Return the name of a requirement."""
    return re.split(r"[=@ ]", line)[0]


def environment_errors(exported: dict[str, Any]) -> list[str]:
    """Return why the project does not allow this Python or platform; no requirement states that."""
    errors = []
    version, required = platform.python_version(), exported["requires_python"]
    if required and not packaging("specifiers").SpecifierSet(required).contains(version, prereleases=True):
        errors.append(f"the project requires Python {required}, and the base has {version}")
    environments = exported["environments"]
    if environments and not any(packaging("markers").Marker(marker).evaluate() for marker in environments):
        errors.append(f"the project is only for: {' or '.join(environments)} (tool.uv.environments)")
    return errors


def torch_errors(lines: list[str], base: dict[str, str]) -> list[str]:
    """Return the packages of `base`, such as torch, that the lock has in another release.

    A base builds its own torch, 2.3.0a0+40ec155e58.nv24.03: 2.3.0 is what counts.
    """
    errors = []
    for line in lines:
        if name_of(line) not in base:
            continue
        requirement = packaging("requirements").Requirement(line.partition(" --hash=")[0])
        if requirement.marker and not requirement.marker.evaluate():
            continue
        name, version = requirement.name, base[name_of(line)]
        for specifier in requirement.specifier:
            if release(specifier.version) != release(version):
                errors.append(
                    f"{name}: uv.lock has {specifier.version}, but the base has {version}, which imgkit never"
                    f" replaces\n  -> uv lock --upgrade-package '{name}=={release(version)}'"
                )
            else:
                print(f"{name}: the base's {version} stays in place of {specifier.version}")
    return errors


def release(version: str) -> Any:
    """Return the release 2.3.0 of ``2.3.0a0+nv24.03``."""
    versions = packaging("version")
    return versions.Version(versions.Version(version).base_version)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

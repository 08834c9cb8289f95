"""Select the packages of an exported uv.lock that fit the base.

Runs inside the base, before pip installs them. ``python3 inside_uv.py FOLDER`` reads two files.
``FOLDER/uv.json`` was written by ``uv_export``. ``FOLDER/constraint.txt`` has the versions of the base's
torch and related packages. The program writes ``FOLDER/requirements-uv.txt``, and appends the locked versions
to constraint.txt, so that later pip steps keep them. If the lock does not fit the base, the exit code is 1.

The program needs only the standard library and the copy of ``packaging`` inside pip, which evaluates markers
in the same way as that pip.
"""

from __future__ import annotations

import importlib
import json
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple


def main(folder: Path) -> int:
    """Write the requirements and constraints for pip, and return 0 as the exit code of this program.

    If uv.lock does not fit the base, write nothing, print the reasons and return 1. `folder` contains the
    files ``uv.json``, the exported uv.lock, and ``constraint.txt``, the base's own versions of torch and
    related packages.
    """
    exported = json.loads((folder / "uv.json").read_text(encoding="utf-8"))
    constraint_file = folder / "constraint.txt"
    base = read_pins(constraint_file)
    try:
        errors = [*environment_errors(exported), *release_errors(exported["requirements"], base)]
    except ImportError as error:
        errors = [f"this base has no pip that imgkit can use for uv.lock: {error}"]
    if errors:
        print("uv.lock does not fit this base:", *errors, sep="\n")
        return 1
    lines = exported["requirements"]
    if "torch" in base:
        lines = exported["beside_torch"]  # without packages that only torch needs
    # The base keeps its own versions of the packages that it has.
    lines = [line for line in lines if requirement_name(line) not in base]
    # A later pip step installs the packages that are left to pip. It gets only their constraints.
    requirements = [line for line in lines if requirement_name(line) not in exported["left_to_pip"]]
    write_lines(folder / "requirements-uv.txt", "w", [" ".join(exported["index_options"]), *requirements])
    write_lines(constraint_file, "a", list_constraints(lines))
    return 0


def list_constraints(requirements: list[str]) -> list[str]:
    """Return the constraints for `requirements`, without their hashes, which a constraint does not need.

    A package from a URL or a folder is left out, because a constraint cannot be one.
    """
    constraints = [line.partition(" --hash=")[0] for line in requirements]
    return [constraint for constraint in constraints if re.match(r"[\w.-]+==", constraint)]


def read_pins(file: Path) -> dict[str, str]:
    """Return the versions in a file with lines such as ``torch==2.3.0``, by the name of the package."""
    versions = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        name, _, version = line.partition("==")
        versions[canonical_name(name)] = version
    return versions


def write_lines(path: Path, mode: str, lines: list[str]) -> None:
    """Write `lines` to a file. `mode` is ``w`` to replace the file, or ``a`` to append to it."""
    with path.open(mode, encoding="utf-8") as stream:
        stream.writelines(f"{line}\n" for line in lines)


def import_packaging(module: str) -> Any:
    """Import a module from the copy of ``packaging`` inside pip."""
    return importlib.import_module(f"pip._vendor.packaging.{module}")


def canonical_name(name: str) -> str:
    """Return the name as PyPA's specification normalises it: ``Flash_Attn`` -> ``flash-attn``."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirement_name(line: str) -> str:
    """Return the name in an exported requirement: ``numpy`` for ``numpy==2.1 --hash=...``."""
    return re.split(r"[=@ ]", line)[0]


def environment_errors(exported: dict[str, Any]) -> list[str]:
    """Return why the project does not allow the Python version or the platform of this base.

    These limits are in pyproject.toml. The exported requirements do not contain them.
    """
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
        # Each marker is evaluated for this Python and this machine. One that is true is enough.
        if not any(markers.Marker(environment).evaluate() for environment in environments):
            errors.append(f"the project is only for: {' or '.join(environments)} (tool.uv.environments)")
    return errors


class SharedPackage(NamedTuple):
    """A package that both uv.lock and the base have, such as torch, with the two versions."""

    name: str
    locked: str
    base: str

    def has_same_release(self) -> bool:
        """Return whether both versions are of the same release.

        For example, NVIDIA's own build 2.3.0a0+40ec155e58.nv24.03 counts as 2.3.0.
        """
        return bool(parse_release(self.locked) == parse_release(self.base))


def find_shared_packages(lines: list[str], base: dict[str, str]) -> Iterator[SharedPackage]:
    """Yield the packages of uv.lock that the base has, too, if they are for its Python and platform.

    Parameters
    ----------
    lines : the exported requirements.
    base : the versions of the base's packages, by name.
    """
    for line in lines:
        base_version = base.get(requirement_name(line))
        if base_version is None:
            continue
        requirement_text, _, _ = line.partition(" --hash=")
        requirement = import_packaging("requirements").Requirement(requirement_text)
        # The requirement is not for this Python or platform.
        if requirement.marker and not requirement.marker.evaluate():
            continue
        # uv exports exactly one clause, "==VERSION". A package from a URL has no clause.
        for clause in requirement.specifier:
            yield SharedPackage(requirement.name, clause.version, base_version)


def release_errors(lines: list[str], base: dict[str, str]) -> list[str]:
    """Return an error for each package of which uv.lock and the base have different releases.

    For any other package that both have, print that the base's own version stays. `lines` are the exported
    requirements. `base` has the versions of the base's packages.
    """
    errors = []
    for package in find_shared_packages(lines, base):
        if package.has_same_release():
            print(f"{package.name}: the base's {package.base} stays in place of {package.locked}")
            continue
        errors.append(
            f"{package.name}: uv.lock has {package.locked}, but the base has {package.base}, which imgkit"
            f" never replaces\n  -> uv lock --upgrade-package '{package.name}=={parse_release(package.base)}'"
        )
    return errors


def parse_release(version: str) -> Any:
    """Return the release of a version without suffixes: 2.3.0 for ``2.3.0a0+nv24.03``."""
    module = import_packaging("version")
    return module.Version(module.Version(version).base_version)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

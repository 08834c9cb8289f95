"""The single-file executable (zipapp): any Python >= 3.10 runs it, without installation or network.

It holds imgkit's own packages and the pure-Python distributions that its verbs need, copied from this
installation, with their licences. Compiled modules are refused: the file must run on every architecture.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.metadata as metadata
import io
import os
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from imgkit_builder.base import files, process
from imgkit_builder.recipe import targets
from imgkit_entrypoints import __version__
from imgkit_entrypoints.errors import ToolFailed, UsageError

ROOTS = ("typer", "rich", "spython", "jinja2", "packaging", "pathspec")
"""Distributions that the verbs import; their requirements follow."""

PACKAGES = ("imgkit_builder", "imgkit_entrypoints", "imgkit_recipes")

FLOOR = (3, 10)
"""The oldest Python that must run the file."""
_NEWEST_MINOR = 15
"""Requirements that depend on the Python version are evaluated from 3.10 up to this minor version."""

_COMPILED = (".so", ".pyd", ".dylib")
_ALSO_PYTHON = ("markupsafe",)
"""Distributions whose compiled module only makes them faster; it stays out."""
_LICENCES = ("licen", "copying", "notice", "authors")

_OMITTED = (
    "/tests/",
    "pygments/lexers/",
    "pygments/formatters/",
    "pygments/styles/",
    "templates/project/",
    "imgkit_builder/remote/",  # its verbs run on a laptop
)
"""Most of the size, and never imported; `_KEPT` lists the exceptions."""
_KEPT = ("__init__.py", "_mapping.py")

_MAIN = """\
import sys

if sys.version_info < (3, {minor}):
    this = "%d.%d" % sys.version_info[:2]
    sys.exit("imgkit: needs Python 3.{minor} or newer, this is " + this + "; try: module avail python")

import os

# Only the standard library and this file: PYTHONPATH and site-packages of a login node hold other versions.
foreign = [os.path.abspath(part) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
sites = ("site-packages", "dist-packages")
sys.path[1:] = [
    part for part in sys.path[1:] if os.path.abspath(part) not in foreign and not part.endswith(sites)
]

from {module} import {function}

{function}()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A single-file executable that was tried and works."""

    path: Path
    size_bytes: int
    sha256: str
    distributions: tuple[str, ...]
    """``rich 15.0.0``, sorted; imgkit itself is not listed."""


def bundle(target: Path, entry: Callable[[], None], trials: Sequence[Sequence[str]]) -> Bundle:
    """Write the single-file executable to `target`; one installation always gives the same bytes.

    Parameters
    ----------
    entry : the function of a module of imgkit that it calls.
    trials : arguments with which it must run on a bare interpreter.

    Raises
    ------
    UsageError : a required distribution is compiled, too new for Python 3.10, or not installed.
    ToolFailed : the file does not run on a bare interpreter.
    """
    if not target.parent.is_dir():
        raise UsageError(
            "there is no such folder", where=str(target.parent), hint=f"create it: mkdir -p {target.parent}"
        )
    chosen = _closure()
    members = {
        "__main__.py": _main(entry).encode(),
        f"imgkit_builder/{targets.RECIPES_JSON}": targets.bundled_json().encode(),
    }
    for package in PACKAGES:
        members |= dict(_own(package))
    members |= dict(_licences(metadata.distribution("imgkit-hpc")))
    for distribution in chosen.values():
        members |= dict(_copied(distribution))
    for name, data in members.items():
        _refuse_newer(name, data)
    data = _zipped(members)
    with files.writing(target) as stream:
        os.fchmod(stream.fileno(), 0o755)
        stream.write(data)
        stream.flush()
        _try(Path(stream.name), trials)
    return Bundle(
        path=target,
        size_bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        distributions=tuple(sorted(f"{one.name} {one.version}" for one in chosen.values())),
    )


def _main(entry: Callable[[], None]) -> str:
    return _MAIN.format(minor=FLOOR[1], module=entry.__module__, function=entry.__name__)


def _closure() -> dict[str, metadata.Distribution]:
    """The distributions of `ROOTS` and their requirements on Linux, by normalised name."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    found: dict[str, metadata.Distribution] = {}
    todo = [(root, "imgkit") for root in ROOTS]
    while todo:
        name, wanted_by = todo.pop()
        key = canonicalize_name(name)
        if key in found:
            continue
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError as error:
            raise UsageError(
                f"{name}, needed by {wanted_by}, is not installed", hint=f"pip install {name}"
            ) from error
        if key not in _ALSO_PYTHON:
            _refuse_compiled(distribution, wanted_by)
        found[key] = distribution
        for text in distribution.requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or any(map(requirement.marker.evaluate, _environments())):
                todo.append((requirement.name, f"{distribution.name} {distribution.version}"))
    return dict(sorted(found.items()))


def _environments() -> list[dict[str, str]]:
    return [
        {
            "python_version": f"3.{minor}",
            "python_full_version": f"3.{minor}.0",
            "sys_platform": "linux",
            "platform_system": "Linux",
            "os_name": "posix",
            "extra": "",
        }
        for minor in range(FLOOR[1], _NEWEST_MINOR + 1)
    ]


def _refuse_compiled(distribution: metadata.Distribution, wanted_by: str) -> None:
    for path in distribution.files or ():
        if path.suffix in _COMPILED:
            raise UsageError(
                f"{distribution.name} {distribution.version}, needed by {wanted_by}, is compiled ({path})",
                hint=f"install a version of {wanted_by.partition(' ')[0]} that does not need it: "
                "pip install --upgrade imgkit-hpc",
            )


def _refuse_newer(name: str, data: bytes) -> None:
    """Refuse syntax that `FLOOR` cannot read.

    ``Requires-Python`` is ignored: it states what a project still supports, and one release excluded 3.10
    without any change in the code.
    """
    if not name.endswith(".py"):
        return
    try:
        ast.parse(data, filename=name, feature_version=FLOOR)
    except SyntaxError as error:
        raise UsageError(
            f"{name}:{error.lineno} is not Python {FLOOR[0]}.{FLOOR[1]}: {error.msg}",
            hint=f"install an older version of {name.partition('/')[0]}",
        ) from error


def _own(package: str) -> Iterator[tuple[str, bytes]]:
    """Files of one of imgkit's packages; of the recipes all but the YAML, which `targets` has as JSON."""
    folder = Path(importlib.import_module(package).__path__[0])
    for path in folder.rglob("*"):
        name = PurePosixPath(package, path.relative_to(folder).as_posix())
        # Images get every file of the entry points, as from an installed imgkit.
        if path.is_file() and path.suffix != ".yaml" and (_wanted(str(name)) or path.name == "py.typed"):
            yield str(name), path.read_bytes()


def _copied(distribution: metadata.Distribution) -> Iterator[tuple[str, bytes]]:
    """Modules, data and licence of a distribution."""
    if not distribution.files:
        raise UsageError(
            f"{distribution.name} is installed without a list of its files",
            hint=f"pip install --force-reinstall {distribution.name}",
        )
    for path in distribution.files:
        # Scripts lie outside, at ../../../bin.
        if path.parts[0] == ".." or path.parts[0].endswith(".dist-info"):
            continue
        if _wanted(str(path)):
            yield str(path), path.read_binary()
    yield from _licences(distribution)


def _licences(distribution: metadata.Distribution) -> Iterator[tuple[str, bytes]]:
    """Licence texts and METADATA, under ``NAME-VERSION.dist-info``."""
    for path in distribution.files or ():
        if not path.parts[0].endswith(".dist-info"):
            continue
        if path.name == "METADATA" or path.name.lower().startswith(_LICENCES) or "licenses" in path.parts:
            yield str(path), path.read_binary()


def _wanted(name: str) -> bool:
    if "__pycache__" in name or name.endswith((".pyc", ".pyi", ".c", "py.typed", *_COMPILED)):
        return False
    if any(part in name for part in _OMITTED):
        return PurePosixPath(name).name in _KEPT
    return True


def _zipped(members: dict[str, bytes]) -> bytes:
    """A zip that begins with a ``#!`` line; members are sorted, with fixed times and modes."""
    stream = io.BytesIO()
    stream.write(b"#!/usr/bin/env python3\n")
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name in sorted(members):
            info = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            info.create_system, info.external_attr = 3, 0o100644 << 16  # Unix, on every host
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, members[name])
    return stream.getvalue()


def _try(path: Path, trials: Sequence[Sequence[str]]) -> None:
    """Run it without site-packages."""
    for arguments in trials:
        done = process.run([sys.executable, "-I", "-S", path, *arguments], check=False)
        if done.returncode != 0:
            raise ToolFailed(
                f"the single-file executable does not run: {' '.join(arguments)}",
                hint=f"imgkit {__version__} on Python {sys.version.split()[0]} printed:\n{done.tail()}",
            )

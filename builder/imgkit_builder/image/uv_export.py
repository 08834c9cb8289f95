"""Export a project's uv.lock with uv on this machine, for ``inside_uv``, which selects what fits the base.

``uv export --frozen`` works offline, and runs no code of the project. ``uv lock --check`` is not used,
because it would run the project's build backend and the Python of its ``.venv``. Instead, this module itself
compares the requirements in pyproject.toml with the export.

The lock is exported twice, with and without the packages that only torch needs. Only inside the base is it
known whether the base has a torch.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from imgkit_builder.base import process
from imgkit_builder.recipe import problems
from imgkit_builder.recipe.lock_file import hide_secrets
from imgkit_builder.recipe.model import Recipe, UvProject
from imgkit_builder.recipe.requirements import PROTECTED, PYPROJECT, canonical_name, requirement_name
from imgkit_entrypoints.errors import ToolFailed, ToolMissing, UsageError
from imgkit_entrypoints.files import read_text

_INSTALL_UV = "python3 -m pip install uv"
_OFFLINE = ("--offline", "--no-cache", "--quiet")
_EXPORT = (
    *("export", "--frozen", "--format", "requirements-txt", "--no-default-groups", "--no-emit-project"),
    *("--no-annotate", "--no-header"),
)
_PYTHONS = [f"3.{minor}" for minor in range(10, 17)]
"""The versions of Python that a base may have, including some that do not exist yet."""
_HASHES = r"(?: --hash=sha256:[0-9a-f]{64})+"
# "numpy==2.1.0 ; python_version >= '3.10' --hash=sha256:...", "name @ https://host/name.whl
# --hash=sha256:..."
_WHEEL = re.compile(rf"[a-z0-9-]+(==\S+| @ https?://[^\s@]+\.whl)(?: ; [^\\]+?)?{_HASHES}")
_CREDENTIALS = re.compile(r"://[^/@\s]*@")


def export_uv_lock(recipe: Recipe) -> bytes:
    """Return the packages in the uv.lock of the recipe's project, as JSON for ``inside_uv``.

    ``inside_uv`` later runs in the base, and selects the packages that fit it.

    Raises
    ------
    ToolMissing : uv is not installed.
    UsageError : uv cannot use the lock, the lock does not meet the requirements in pyproject.toml, or it
        contains packages that are not wheels with a sha256.
    """
    uv = recipe.image.uv
    assert uv is not None  # noqa: S101 - for the type checker
    where = recipe.where("image", "uv")
    program = _find_uv(where)
    _refuse_links_out(uv.project, where)
    argv = [program, *_EXPORT, *_OFFLINE, "--project", str(uv.project)]
    argv += [f"--extra={extra}" for extra in uv.extras]
    argv += [f"--group={group}" for group in uv.groups]
    with _explain_unusable_lock(where):
        requirements = _read_export(argv, uv.project)
        # Export again without torch and the packages that only torch needs, for a base that already has a
        # torch.
        beside_torch = _read_export([*argv, "--prune", "torch"], uv.project)
        pyproject = _read_pyproject(uv.project)
        outdated = _find_unmet_requirement(pyproject, requirements, uv)
        options = index_options(recipe)
    if outdated:
        raise UsageError(
            f"uv.lock is not up to date: {PYPROJECT} requires {outdated}",
            where=where,
            hint=f"write it again: uv lock --project {uv.project}",
        )
    left_to_pip = set(_list_names_in_pip_steps(recipe))
    _refuse_unlocked(beside_torch, left_to_pip, where)
    content = {
        "requires_python": pyproject["project"].get("requires-python", ""),
        "environments": _read_uv_settings(pyproject).get("environments", []),
        "index_options": options,
        "left_to_pip": sorted(left_to_pip),
        "requirements": requirements,
        "beside_torch": beside_torch,
    }
    # This JSON is copied into the image. The URL of a repository that a pip step builds may contain a
    # password.
    json_without_credentials = _CREDENTIALS.sub("://", json.dumps(content, indent=1))
    return f"{json_without_credentials}\n".encode()


def _refuse_links_out(project: Path, where: str) -> None:
    """Raise UsageError, at `where`, if a file that uv reads is a link out of the folder `project`."""
    # uv's error messages quote these files. With a link, a message could reveal any file of this machine.
    for name in (PYPROJECT, "uv.lock", "uv.toml"):
        if not (project / name).resolve().is_relative_to(project.resolve()):
            raise UsageError(f"its {name} is a link out of the project", where=where, hint="copy the file")


@contextlib.contextmanager
def _explain_unusable_lock(where: str) -> Iterator[None]:
    """Convert errors of uv and of the project's files to a UsageError at `where`, a line of the recipe."""
    try:
        yield
    except ToolFailed as error:
        raise UsageError(f"its uv.lock cannot be used: {error.what}", where=where, hint=error.hint) from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"its uv.lock cannot be used: {error}", where=where) from error


def _read_uv_settings(pyproject: dict[str, Any]) -> dict[str, Any]:
    """Return the table ``tool.uv`` of a pyproject.toml, which is empty if there is none."""
    settings: dict[str, Any] = pyproject.get("tool", {}).get("uv", {})
    return settings


def _find_unmet_requirement(pyproject: dict[str, Any], lines: list[str], uv: UvProject) -> str:
    """Return the first requirement of the project that uv.lock does not meet, or an empty text.

    For example, ``numpy>=2, and uv.lock has 1.26``, if pyproject.toml was changed after the lock was made.
    Requirements that cannot apply to an image, such as those for Windows, are skipped.

    Parameters
    ----------
    pyproject : the content of pyproject.toml.
    lines : the requirements that uv has exported from uv.lock.
    uv : the extras and groups that the recipe selects.
    """
    from packaging.requirements import Requirement

    locked_versions = _list_locked_versions(lines)
    ignored_names = _list_ignored_names(pyproject)
    environments = _list_environments(pyproject)
    for requirement_text in _list_requirements(pyproject, uv):
        requirement = Requirement(requirement_text)
        name = canonical_name(requirement.name)
        if name in ignored_names:
            continue
        if requirement.marker is not None and not any(map(requirement.marker.evaluate, environments)):
            continue
        if name not in locked_versions:
            return f"{requirement_text}, which uv.lock lacks"
        versions = locked_versions[name]
        # A package from a URL has no version to compare. A pre-release counts, because uv has chosen it.
        matching_versions = [*requirement.specifier.filter(versions, prereleases=True)]
        if versions and not matching_versions:
            return f"{requirement_text}, and uv.lock has {', '.join(versions)}"
    return ""


def _list_ignored_names(pyproject: dict[str, Any]) -> set[str]:
    """Return the packages whose requirements in pyproject.toml are not compared with uv.lock."""
    # An override replaces the project's requirement for a package, so that requirement does not apply.
    overrides = _read_uv_settings(pyproject).get("override-dependencies", [])
    # An extra may require other extras of the project itself, which is not in the exported lines.
    return {*map(requirement_name, overrides), canonical_name(pyproject["project"]["name"])}


def _list_locked_versions(lines: list[str]) -> dict[str, list[str]]:
    """Return the versions of each package in exported requirements.

    A package can have several versions, each for other versions of Python. A package from a URL has none.
    """
    versions: dict[str, list[str]] = {}
    for line in lines:
        package_versions = versions.setdefault(requirement_name(line), [])
        match = re.match(r"\S+==(\S+)", line)
        if match is not None:
            package_versions.append(match[1])
    return versions


def _list_requirements(pyproject: dict[str, Any], uv: UvProject) -> Iterator[str]:
    """Yield the requirements of the project, and those of the extras and groups that the recipe selects."""
    project = pyproject["project"]
    yield from project.get("dependencies", [])
    extras = {canonical_name(extra) for extra in uv.extras}
    for extra, requirements in project.get("optional-dependencies", {}).items():
        if canonical_name(extra) in extras:
            yield from requirements
    groups = {canonical_name(group) for group in uv.groups}
    for group, requirements in pyproject.get("dependency-groups", {}).items():
        if canonical_name(group) in groups:
            # An item that includes another group is a table and not a text. It is skipped.
            yield from (item for item in requirements if isinstance(item, str))


def _list_environments(pyproject: dict[str, Any]) -> list[dict[str, str]]:
    """Return the environments that an image may have and that the project allows.

    Each environment has the variables of PEP 508 markers, for a Python version and a processor on Linux. A
    marker such as ``python_version < "3.12"`` is evaluated in all of them.
    """
    from packaging.markers import Marker
    from packaging.specifiers import SpecifierSet

    markers = [Marker(text) for text in _read_uv_settings(pyproject).get("environments", [])]
    requires_python = SpecifierSet(pyproject["project"].get("requires-python", ""))
    environments = []
    # Evaluate markers for every combination, since the base is not known on this machine.
    for python, machine in itertools.product(_PYTHONS, ("x86_64", "aarch64")):
        version = f"{python}.99"  # newer than any patch release: only the minor version counts
        environment = {
            "sys_platform": "linux",
            "platform_system": "Linux",
            "os_name": "posix",
            "platform_machine": machine,
            "python_version": python,
            "python_full_version": version,
            "extra": "",
        }
        is_allowed = not markers or any(marker.evaluate(environment) for marker in markers)
        if is_allowed and requires_python.contains(version):
            environments.append(environment)
    return environments


def _refuse_unlocked(requirements: list[str], left_to_pip: set[str], where: str) -> None:
    """Refuse a package in uv.lock that is not a wheel with a sha256, such as a git repository.

    pip installs the packages of the lock only with hashes. Packages in `left_to_pip` are allowed, because a
    pip step of the recipe names them and can build them.

    Raises
    ------
    UsageError : there is such a package. `where` is the line of the recipe that names the uv project.
    """
    for line in requirements:
        name = requirement_name(line)
        is_wheel = _WHEEL.fullmatch(line)
        # A protected package such as torch is allowed, because the base usually has its own.
        if not is_wheel and name not in left_to_pip and not re.fullmatch(PROTECTED, name):
            raise UsageError(
                f"uv.lock has {hide_secrets(line)}, which is not a wheel with a sha256",
                where=where,
                hint=f"install it in a pip step: pip: [{{packages: [{name or 'NAME'}]}}]",
            )


def _find_uv(where: str) -> str:
    """Return the path of uv, from the folder of imgkit's Python or else from PATH."""
    # "pip install uv" puts it beside imgkit's Python, whose folder is not always on PATH.
    uv_beside_python = Path(sys.executable).with_name("uv")
    if uv_beside_python.exists():
        return str(uv_beside_python)
    program = shutil.which("uv")
    if program is None:
        raise ToolMissing("uv, which reads uv.lock, is not installed", where=where, hint=_INSTALL_UV)
    return program


def _read_export(argv: list[str], project: Path) -> list[str]:
    """Run uv with `argv`, and return the exported requirements, one per item."""
    output = process.read_answer(process.filter_through(argv, (), cwd=project), "uv").decode()
    # uv writes each hash to a line of its own, joined by backslashes.
    return re.sub(r" \\\n *", " ", output).splitlines()


def _list_names_in_pip_steps(recipe: Recipe) -> Iterator[str]:
    """Yield the names of the packages that the recipe's pip steps install.

    A pip step can build a package from source. The step for uv.lock cannot, because it installs only wheels.
    """
    for step in recipe.image.pip:
        lines = list(step.packages)
        if step.requirements is not None:
            lines += read_text(step.requirements, errors="replace").splitlines()
        for line in lines:
            # A git URL alone does not contain the name of the package. NAME @ git+URL does.
            if not line.startswith("git+"):
                yield requirement_name(line)


def _read_pyproject(project: Path) -> dict[str, Any]:
    """Return the content of the project's pyproject.toml.

    Raises
    ------
    OSError, ValueError : the file cannot be read, is not TOML, or has no ``project.name``.
    """
    content = problems.parse_toml(read_text(project / PYPROJECT))
    if not isinstance(content.get("project", {}).get("name"), str):
        raise ValueError(f"{PYPROJECT} has no project.name")
    return content


def index_options(recipe: Recipe) -> list[str]:
    """Return pip options for the package indexes in ``tool.uv.index`` of the recipe's uv project.

    For example, ``["--extra-index-url", "https://host/simple"]``. The result is empty if the recipe has no uv
    project.

    Raises
    ------
    UsageError : an index is not a plain HTTP URL, for example because it contains a password.
    OSError, ValueError : pyproject.toml cannot be read.
    """
    uv = recipe.image.uv
    if uv is None:
        return []
    indexes = _read_uv_settings(_read_pyproject(uv.project)).get("index", [])
    options = []
    for index in indexes:
        url = str(index.get("url", ""))
        if not _is_plain_http_url(url):
            raise UsageError(
                f"the index {hide_secrets(url)} is no plain HTTP URL; a password would be in the image",
                where=recipe.where("image", "uv"),
                hint=f"change tool.uv.index in {PYPROJECT}, or name its packages in a pip step with a secret",
            )
        option = "--extra-index-url"
        # In uv, a default index replaces PyPI, as --index-url does in pip.
        if index.get("default"):
            option = "--index-url"
        options += [option, url]
    return options


def _is_plain_http_url(url: str) -> bool:
    """Return whether `url` is an HTTP URL without a user, a password or another secret."""
    # A user and a password would come before an "@". Other secrets are in parameters: "?token=...".
    return re.fullmatch(r"https?://[^\s@]+", url) is not None and hide_secrets(url) == url

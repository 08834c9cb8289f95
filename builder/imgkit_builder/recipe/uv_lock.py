"""Compares the ``uv.lock`` of a project with its pyproject.toml: which dependencies have changed since.

Notes
-----
The format is that of uv's version 1; later revisions of it only add keys. Nothing else of the lock is read
here: uv exports it for the build (`image/uv_export.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imgkit_builder.recipe import problems
from imgkit_builder.recipe.requirements import PYPROJECT, canonical
from imgkit_entrypoints import files

if TYPE_CHECKING:
    from packaging.requirements import Requirement

UV_LOCK = "uv.lock"
VERSION = 1
_MOST_BYTES = 16 << 20
_SOURCES = {"virtual", "editable", "directory"}
"""Kinds of sources that the project itself can have in its lock."""


def _table(file: Path) -> dict[str, Any]:
    text = files.read_text(file, most_bytes=_MOST_BYTES)
    try:
        return problems.parse_toml(text)
    except problems.NotToml as error:
        raise ValueError(f"{file.name}:{error.line}: {error.what}") from error


def stale(folder: Path, *, extras: Iterable[str], groups: Iterable[str]) -> tuple[str, ...]:
    """Return the dependencies about which pyproject.toml and the lock of a project differ, sorted.

    Raises
    ------
    OSError : one of the files cannot be read; its `filename` is set.
    ValueError : they are no uv project, the lock is one that imgkit cannot read, or there is no such extra.
    """
    pyproject, lock = _table(folder / PYPROJECT), _table(folder / UV_LOCK)
    if lock.get("version") != VERSION:
        raise ValueError(f"{UV_LOCK} has version {lock.get('version')}; this imgkit reads version {VERSION}")
    if lock.get("conflicts"):
        raise ValueError(
            f"{UV_LOCK} has conflicting extras or groups (tool.uv.conflicts), which imgkit cannot read"
        )
    name = pyproject.get("project", {}).get("name")
    if not isinstance(name, str):
        raise ValueError(f"{PYPROJECT} has no project.name")
    try:
        metadata = _project_metadata(lock, canonical(name))
        return _changed(pyproject, metadata, extras=extras, groups=groups)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{UV_LOCK} is not complete: {error}") from error


def _project_metadata(lock: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return what pyproject.toml said when uv wrote the lock: ``package.metadata`` of the project."""
    for package in lock.get("package", ()):
        if package["name"] == name and set(package["source"]) & _SOURCES:
            metadata: Mapping[str, Any] = package.get("metadata", {})
            return metadata
    raise ValueError(f"{UV_LOCK} does not know the project {name}")


_PYTHONS = tuple(f"3.{minor}" for minor in range(8, 17))
_MACHINES = ("x86_64", "aarch64")
_BY_ADDRESS = ("git", "url", "path", "directory", "editable", "virtual")
"""Kinds of sources for which uv records no version specifier."""
_ADDRESS = "@"
"""Stands for the specifier of such a requirement."""


def _changed(
    pyproject: Mapping[str, Any], metadata: Mapping[str, Any], *, extras: Iterable[str], groups: Iterable[str]
) -> tuple[str, ...]:
    project = pyproject.get("project", {})
    dynamic = project.get("dynamic", ())
    locked = [_locked(requirement) for requirement in metadata.get("requires-dist", ())]
    differing: set[str] = set()
    if "dependencies" not in dynamic:
        differing |= _differing(_requirements(project.get("dependencies", ())), locked, "")
    if "optional-dependencies" not in dynamic:
        optional = project.get("optional-dependencies", {})
        by_extra = {canonical(name): texts for name, texts in optional.items()}
        for extra in extras:
            if canonical(extra) not in by_extra:
                raise ValueError(f"pyproject.toml has no extra {extra!r}; it has {_listed(by_extra)}")
            needed = _requirements([*project.get("dependencies", ()), *by_extra[canonical(extra)]])
            differing |= _differing(needed, locked, canonical(extra))
    for group in groups:
        needed = _requirements(_group(pyproject, group, ()))
        in_lock = metadata.get("requires-dev", {}).get(canonical(group), ())
        differing |= _differing(needed, [_locked(requirement) for requirement in in_lock], "")
    return tuple(sorted(differing))


def _requirements(texts: Iterable[str]) -> list[Requirement]:
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        return [Requirement(text) for text in texts]
    except InvalidRequirement as error:
        raise ValueError(f"pyproject.toml: {error}") from error


def _locked(entry: Mapping[str, Any]) -> Requirement:
    extras = f"[{','.join(entry['extras'])}]" if entry.get("extras") else ""
    has_address = any(key in entry for key in _BY_ADDRESS)
    specifier = " @ https://example.org/place " if has_address else entry.get("specifier", "")
    marker = f"; {entry['marker']}" if entry.get("marker") else ""
    return _requirements([f"{entry['name']}{extras}{specifier}{marker}"])[0]


def _group(pyproject: Mapping[str, Any], name: str, above: tuple[str, ...]) -> Iterator[str]:
    groups = {canonical(key): items for key, items in pyproject.get("dependency-groups", {}).items()}
    if canonical(name) == "dev":
        groups.setdefault("dev", [])
        yield from pyproject.get("tool", {}).get("uv", {}).get("dev-dependencies", ())
    if canonical(name) not in groups or name in above:
        raise ValueError(f"pyproject.toml has no dependency group {name!r}; it has {_listed(groups)}")
    for item in groups[canonical(name)]:
        if isinstance(item, dict):
            yield from _group(pyproject, str(item.get("include-group", "")), (*above, name))
        else:
            yield item


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _differing(needed: list[Requirement], locked: list[Requirement], extra: str) -> set[str]:
    """Return the names of requirements that differ in an environment that an image can have."""
    names: set[str] = set()
    for python in _PYTHONS:
        for machine in _MACHINES:
            environment = {
                "python_version": python,
                "python_full_version": f"{python}.0",
                "platform_machine": machine,
                "sys_platform": "linux",
                "platform_system": "Linux",
                "os_name": "posix",
                "implementation_name": "cpython",
                "platform_python_implementation": "CPython",
                "extra": extra,
            }
            old, new = _applying(locked, environment), _applying(needed, environment)
            names |= {name for name in old.keys() | new.keys() if not _same(old.get(name), new.get(name))}
    return names


_Selection = tuple[set[str], set[str]]
"""Extras and specifiers of one package."""


def _applying(requirements: Iterable[Requirement], environment: dict[str, str]) -> dict[str, _Selection]:
    selections: dict[str, _Selection] = {}
    for requirement in requirements:
        if requirement.marker is None or requirement.marker.evaluate(environment):
            extras, specifiers = selections.setdefault(canonical(requirement.name), (set(), set()))
            extras |= {canonical(extra) for extra in requirement.extras}
            specifiers |= {_ADDRESS} if requirement.url else set(map(str, requirement.specifier))
    return selections


def _same(locked: _Selection | None, needed: _Selection | None) -> bool:
    if locked is None or needed is None:
        return locked is needed
    # pyproject.toml may state a version besides a place in tool.uv.sources; the lock knows the place alone.
    return locked[0] == needed[0] and (locked[1] == needed[1] or _ADDRESS in locked[1])

"""Reads the ``uv.lock`` of a project: its packages, what wants them, and their wheels.

Notes
-----
The format is that of uv's version 1; later revisions of it only add keys. Nothing is evaluated here: markers
and wheels depend on the base's Python, so ``image/uv_inside.py`` decides inside the base.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
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

_ELSEWHERE = {"git": "git", "path": "the file", "directory": "the folder", "editable": "the folder"}
"""Kinds of a source that is no package index, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UvWheel:
    """A wheel of a package."""

    file: str
    url: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UvNeed:
    """One package that another one, or the project, depends on."""

    package: int
    """Its index in `UvLock.packages`."""
    extras: tuple[str, ...] = ()
    marker: str = ""
    """The condition, for example ``python_full_version < '3.11'``; empty for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UvPackage:
    """A package in one version."""

    name: str
    version: str
    source: str
    """``git https://...`` or ``the folder ../x``; empty for an index, which has wheels."""
    wheels: tuple[UvWheel, ...]
    needs: tuple[UvNeed, ...]
    extras: Mapping[str, tuple[UvNeed, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class UvLock:
    """What a project locks."""

    project: int
    """The project's own index in `packages`."""
    requires_python: str
    environments: tuple[str, ...]
    """The markers that the lock was made for; empty for all."""
    packages: tuple[UvPackage, ...]
    groups: Mapping[str, tuple[UvNeed, ...]]
    """Dependency groups of the project."""
    stated: Mapping[str, Any]
    """What pyproject.toml said when uv wrote the lock: the table ``package.metadata`` of the project."""


def tables(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The content of the project's pyproject.toml and of its uv.lock.

    Raises
    ------
    OSError : one of them cannot be read; its `filename` is set.
    ValueError : one of them is not TOML, or is too large; names it.
    """
    return _table(folder / PYPROJECT), _table(folder / UV_LOCK)


def _table(file: Path) -> dict[str, Any]:
    text = files.read_text(file, most_bytes=_MOST_BYTES)
    try:
        return problems.parse_toml(text)
    except problems.NotToml as error:
        raise ValueError(f"{file.name}:{error.line}: {error.what}") from error


def read(folder: Path) -> UvLock:
    """The lock of the project in `folder`.

    Raises
    ------
    OSError : uv.lock or pyproject.toml cannot be read.
    ValueError : they are no uv project, or the lock is one that imgkit cannot read.
    """
    pyproject, lock = tables(folder)
    return from_tables(pyproject, lock)


def from_tables(pyproject: Mapping[str, Any], lock: Mapping[str, Any]) -> UvLock:
    """The lock in the parsed files.

    Raises
    ------
    ValueError : they are no uv project, or the lock is one that imgkit cannot read.
    """
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
        listed = [one for one in lock.get("package", ()) if isinstance(one, dict)]
        project = _own(listed, canonical(name))
        about = listed[project]
        return UvLock(
            project=project,
            requires_python=str(lock.get("requires-python", "")),
            environments=tuple(map(str, lock.get("supported-markers", ()))),
            packages=tuple(_package(one, listed) for one in listed),
            groups={
                group: tuple(_needs(needs, listed))
                for group, needs in about.get("dev-dependencies", {}).items()
            },
            stated=about.get("metadata", {}),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{UV_LOCK} is not complete: {error}") from error


def _own(listed: list[dict[str, Any]], name: str) -> int:
    for index, one in enumerate(listed):
        if one["name"] == name and set(one["source"]) & {"virtual", "editable", "directory"}:
            return index
    raise ValueError(f"{UV_LOCK} does not know the project {name}")


def _package(about: Mapping[str, Any], listed: list[dict[str, Any]]) -> UvPackage:
    ((kind, place),) = about["source"].items()
    wheels = about.get("wheels", ())
    return UvPackage(
        name=about["name"],
        version=about.get("version", ""),
        source=f"{_ELSEWHERE[kind]} {_public(place)}" if kind in _ELSEWHERE else "",
        wheels=tuple(_wheel(one, about["name"]) for one in wheels if "url" in one and "linux" in _tags(one)),
        needs=tuple(_needs(about.get("dependencies", ()), listed)),
        extras={
            extra: tuple(_needs(needs, listed))
            for extra, needs in about.get("optional-dependencies", {}).items()
        },
    )


def _public(place: str) -> str:
    """`place` without the commit, and without credentials, which must not reach the image."""
    return re.sub(r"://[^/@]*@", "://", place.partition("#")[0])


def _tags(wheel: Mapping[str, Any]) -> str:
    """The platforms of a wheel, where one for every platform counts as one for Linux."""
    platforms = wheel["url"].rpartition("-")[2]
    return "linux" if platforms == "any.whl" else platforms


def _wheel(about: Mapping[str, Any], name: str) -> UvWheel:
    url = urllib.parse.urlsplit(about["url"])
    if url.username or url.password:
        raise ValueError(f"the URL of {name} holds a user or a password, which would be in the image")
    kind, _, digest = about.get("hash", "").partition(":")
    if kind != "sha256" or not re.fullmatch("[0-9a-f]{64}", digest):
        raise ValueError(f"{name} has a wheel without a sha256")
    if url.scheme not in ("https", "http") or re.search(r"""[\s"'<>\\]""", about["url"]):
        raise ValueError(f"{name} has a wheel at {about['url']!r}, which is not an HTTP URL")
    return UvWheel(
        file=urllib.parse.unquote(url.path.rpartition("/")[2]),
        url=about["url"].partition("#")[0],
        sha256=digest,
    )


def _needs(stated: list[dict[str, Any]], listed: list[dict[str, Any]]) -> Iterator[UvNeed]:
    for need in stated:
        # uv states version and source only where the name alone is not enough.
        fitting = [
            index
            for index, one in enumerate(listed)
            if one["name"] == need["name"]
            and all(one.get(key) == need[key] for key in ("version", "source") if key in need)
        ]
        if len(fitting) != 1:
            raise ValueError(f"{UV_LOCK} has {len(fitting)} packages that fit {need['name']}")
        yield UvNeed(
            package=fitting[0], extras=tuple(need.get("extra", ())), marker=str(need.get("marker", ""))
        )


_PYTHONS = tuple(f"3.{minor}" for minor in range(8, 17))
_MACHINES = ("x86_64", "aarch64")
_BY_PLACE = ("git", "url", "path", "directory", "editable", "virtual")
"""Kinds of sources for which uv records no version specifier."""
_PLACE = "@"
"""Stands for the specifier of such a requirement."""


def changed(
    pyproject: Mapping[str, Any], stated: Mapping[str, Any], *, extras: Iterable[str], groups: Iterable[str]
) -> tuple[str, ...]:
    """The dependencies about which `pyproject` and the lock's `stated` metadata differ, sorted.

    Raises
    ------
    ValueError : a requirement cannot be read, or pyproject.toml has no such extra or group.
    """
    project = pyproject.get("project", {})
    dynamic = project.get("dynamic", ())
    locked = [_locked(one) for one in stated.get("requires-dist", ())]
    differing: set[str] = set()
    if "dependencies" not in dynamic:
        differing |= _differing(_requirements(project.get("dependencies", ())), locked, "")
    if "optional-dependencies" not in dynamic:
        known = {canonical(name): names for name, names in project.get("optional-dependencies", {}).items()}
        for extra in extras:
            if canonical(extra) not in known:
                raise ValueError(f"pyproject.toml has no extra {extra!r}; it has {_listed(known)}")
            own = _requirements([*project.get("dependencies", ()), *known[canonical(extra)]])
            differing |= _differing(own, locked, canonical(extra))
    for group in groups:
        own = _requirements(_group(pyproject, group, ()))
        in_lock = stated.get("requires-dev", {}).get(canonical(group), ())
        differing |= _differing(own, [_locked(one) for one in in_lock], "")
    return tuple(sorted(differing))


def _requirements(texts: Iterable[str]) -> list[Requirement]:
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        return [Requirement(text) for text in texts]
    except InvalidRequirement as error:
        raise ValueError(f"pyproject.toml: {error}") from error


def _locked(about: Mapping[str, Any]) -> Requirement:
    extras = f"[{','.join(about['extras'])}]" if about.get("extras") else ""
    by_place = any(key in about for key in _BY_PLACE)
    specifier = " @ https://example.org/place " if by_place else about.get("specifier", "")
    marker = f"; {about['marker']}" if about.get("marker") else ""
    return _requirements([f"{about['name']}{extras}{specifier}{marker}"])[0]


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


def _differing(own: list[Requirement], locked: list[Requirement], extra: str) -> set[str]:
    """Names of requirements that differ in an environment that an image can have."""
    found: set[str] = set()
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
            there, here = _applying(locked, environment), _applying(own, environment)
            found |= {
                name for name in there.keys() | here.keys() if not _same(there.get(name), here.get(name))
            }
    return found


_Wanted = dict[str, tuple[set[str], set[str]]]
"""Extras and specifiers by name."""


def _applying(requirements: Iterable[Requirement], environment: dict[str, str]) -> _Wanted:
    wanted: _Wanted = {}
    for one in requirements:
        if one.marker is None or one.marker.evaluate(environment):
            extras, specifiers = wanted.setdefault(canonical(one.name), (set(), set()))
            extras |= {canonical(extra) for extra in one.extras}
            specifiers |= {_PLACE} if one.url else {str(specifier) for specifier in one.specifier}
    return wanted


def _same(locked: tuple[set[str], set[str]] | None, own: tuple[set[str], set[str]] | None) -> bool:
    if locked is None or own is None:
        return locked is own
    # pyproject.toml may state a version besides a place in tool.uv.sources; the lock knows the place alone.
    return locked[0] == own[0] and (locked[1] == own[1] or _PLACE in locked[1])

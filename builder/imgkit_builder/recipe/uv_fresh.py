"""Finds what pyproject.toml asks for that its ``uv.lock`` was not made for, without the program uv.

uv rewrites markers, so texts differ where the meaning does not. Both sides are therefore evaluated in the
environments that an image can have, and what applies there is compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from imgkit_builder.recipe.requirements import canonical

if TYPE_CHECKING:
    from packaging.requirements import Requirement

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
    # pyproject.toml may state a version beside a place in tool.uv.sources; the lock knows the place alone.
    return locked[0] == own[0] and (locked[1] == own[1] or _PLACE in locked[1])

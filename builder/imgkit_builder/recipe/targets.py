"""The parts of a recipe that a cluster needs, also in the one-file tool, which cannot read recipes.

Reading YAML needs PyYAML and pydantic, which are compiled. The one-file tool carries the facts of the shipped
recipes as ``systems.json`` instead. Standard library only, except where a recipe is read.
"""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from imgkit_entrypoints import system as systems
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.system import SystemFacts

SCHEMA = 1
SYSTEMS_JSON = "systems.json"
"""A file of the one-file tool, in the folder of the package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The parts of a recipe that matter on its machine."""

    name: str
    system: SystemFacts
    platforms: tuple[str, ...]
    """``linux/amd64``; the first is the default."""

    @property
    def module_line(self) -> str:
        """``module load ...`` for its runtime; empty where the recipe names no module."""
        return module_line(self.system)


def module_line(system: SystemFacts) -> str:
    """``module load ...`` for the runtime of `system`; empty where it needs no module."""
    modules = system.runtime.modules
    return f"module load {' '.join(modules)}" if modules else ""


def find(ref: str) -> Target:
    """Find the recipe `ref`: a shipped name or, outside the one-file tool, a path.

    Raises
    ------
    UsageError : there is no such recipe, it has problems, or it is a path in the one-file tool.
    """
    bundled = importlib.resources.files("imgkit_builder").joinpath(SYSTEMS_JSON)
    if not bundled.is_file():
        from imgkit_builder.recipe.load import load

        recipe = load(ref)
        return Target(name=recipe.name, system=recipe.system, platforms=recipe.image.platforms)
    known = {target.name: target for target in from_json(bundled.read_text(encoding="utf-8"))}
    if ref not in known:
        raise UsageError(
            f"the one-file imgkit does not know the recipe {ref!r}",
            hint=f"it knows: {', '.join(sorted(known))}; only an installed imgkit reads recipe files",
        )
    return known[ref]


def shipped() -> tuple[Target, ...]:
    """Every shipped recipe, sorted by name."""
    import imgkit_recipes

    return tuple(find(name) for name in imgkit_recipes.recipe_names())


def to_json(targets: Sequence[Target]) -> str:
    """Deterministic text of `SYSTEMS_JSON`."""
    entries = {
        target.name: {
            "platforms": list(target.platforms),
            "system": json.loads(systems.to_json(target.system)),
        }
        for target in targets
    }
    return json.dumps({"schema": SCHEMA, "recipes": entries}, indent=1, sort_keys=True) + "\n"


def from_json(text: str) -> tuple[Target, ...]:
    """Read what `to_json` wrote."""
    entries: dict[str, Any] = json.loads(text)["recipes"]
    return tuple(
        Target(
            name=name,
            system=systems.from_json(json.dumps(entry["system"])),
            platforms=tuple(entry["platforms"]),
        )
        for name, entry in entries.items()
    )

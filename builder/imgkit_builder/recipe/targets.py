"""The parts of a recipe that its machine needs, and all its values as text and JSON."""

from __future__ import annotations

import dataclasses
import json
import posixpath
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imgkit_builder.oci.manifest import InstalledProject
from imgkit_builder.recipe import problems, rules, systems
from imgkit_builder.recipe.model import Document, Recipe, RunCommand
from imgkit_builder.recipe.problems import KeyPath, Position, choices, key_text
from imgkit_builder.recipe.requirements import PYPROJECT, project_name
from imgkit_builder.recipe.validation import validate
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.system import SystemFacts
from imgkit_entrypoints.terminal import shown

if TYPE_CHECKING:
    from imgkit_builder.recipe.model import PipStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The parts of a recipe that matter on its machine."""

    name: str
    system: SystemFacts
    platforms: tuple[str, ...]
    """``linux/amd64``; the first is the default."""
    file: Path
    """Where the values come from."""
    positions: Mapping[KeyPath, Position] = field(default_factory=dict)
    """Position of every value that a recipe's file states."""
    projects: tuple[InstalledProject, ...] = ()
    """What its image has installed of the user's own, as far as that is known here."""
    workdir: str = ""
    """``image.workdir``, where the recipe states it: jobs start there."""
    base: str = ""
    """The base of its image."""
    base_env: tuple[str, ...] = ()
    """Names of the base's variables, where the image is known."""

    @property
    def module_line(self) -> str:
        """``module load ...`` for its runtime; empty where the recipe names no module."""
        return module_line(self.system)

    def where(self, *path: str | int) -> str:
        """``file.yaml:12`` for the nearest stated value at or above `path`, for messages."""
        return problems.place(self.positions, path, self.file)


def module_line(system: SystemFacts) -> str:
    """``module load ...`` for the runtime of `system`; empty where it needs no module."""
    modules = system.runtime.modules
    return f"module load {' '.join(modules)}" if modules else ""


def find(ref: str | Path) -> Target:
    """Find the recipe `ref`: a shipped name or a recipe's file.

    Raises
    ------
    UsageError : there is no such recipe, or it has problems.
    """
    from imgkit_builder.recipe.load import load

    recipe = load(ref)
    return Target(
        name=recipe.name,
        system=recipe.system,
        platforms=recipe.image.platforms,
        file=recipe.file,
        positions=recipe.positions,
        projects=installed(recipe.image.pip),
        workdir=stated_workdir(recipe),
        base=recipe.image.base,
    )


def stated_workdir(recipe: Recipe) -> str:
    """``image.workdir``; empty where neither the recipe nor one that it extends states it."""
    return recipe.image.workdir if ("image", "workdir") in recipe.positions else ""


def installed(steps: Iterable[PipStep]) -> tuple[InstalledProject, ...]:
    """The projects that the pip steps of a recipe install."""
    return tuple(
        InstalledProject(
            name=project_name(step.project / PYPROJECT),
            folder=posixpath.normpath(step.editable) if step.editable else "",
            step=number,
        )
        for number, step in enumerate(steps)
        if step.project is not None
    )


def checked(target: Target) -> Target:
    """Return `target`, after the rules that apply to a recipe's file.

    Raises
    ------
    UsageError : a value breaks a rule; lists all of them.
    """
    faults = [("name", *fault) for fault in rules.recipe_name(target.name)]
    image: dict[str, Any] = {"base": "scratch:none", "platform": target.platforms}
    if target.workdir:
        image["workdir"] = target.workdir
    _, mistakes = validate(Document, {"image": image, "system": stated(target.system)})
    faults += [(key_text(mistake.path), mistake.message, mistake.hint) for mistake in mistakes]
    if not systems.is_known(target.system.scheduler):
        word = target.system.scheduler
        hint = choices(systems.meant(word), systems.words())
        faults.append(("system.scheduler", f"{word!r} is not known", hint))
    if not faults:
        faults += [
            (key_text(("system", *fault.path)), fault.what, fault.hint)
            for fault in systems.registration(target.system.scheduler).faults(target.system)
        ]
    if faults:
        texts = [f"{key}: {what}; {hint}" if hint else f"{key}: {what}" for key, what, hint in faults]
        raise several(texts, target.file)
    return target


def stated(values: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as a recipe states them: without those that have no value."""
    return dataclasses.asdict(
        values, dict_factory=lambda pairs: {key: value for key, value in pairs if value is not None}
    )


def several(faults: Sequence[str], file: Path, *hints: str) -> UsageError:
    """The error of a file with values that no recipe may have: one fault stands in it, several below it."""
    if len(faults) == 1:
        return UsageError(faults[0], where=str(file), hint="\n".join(hints) or None)
    what = f"{len(faults)} of its values are not valid in a recipe"
    return UsageError(what, where=str(file), hint="\n".join((*faults, *hints)))


def values_of(content: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """Yield every value below `content` that has no parts, with its path."""
    if dataclasses.is_dataclass(content):
        for known in dataclasses.fields(content):
            yield from values_of(getattr(content, known.name), (*path, known.name))
    elif isinstance(content, Mapping):
        for name, value in content.items():
            yield from values_of(value, (*path, name))
    elif isinstance(content, tuple):
        for index, value in enumerate(content):
            yield from values_of(value, (*path, index))
    else:
        yield path, content


SHOW_SCHEMA = 1

_WORDS: Mapping[KeyPath, KeyPath] = {("image", "constraints", "policy"): ("image", "constraints")}
"""Fields whose name YAML omits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One value of a recipe; `position` is None for a default."""

    key: str
    value: str | int | None
    position: Position | None


def values(recipe: Recipe) -> tuple[Value, ...]:
    """Every value of `recipe` in the order of the reference; an empty list or mapping counts as None."""
    return tuple(
        value
        for part, content in (("image", recipe.image), ("system", recipe.system))
        for value in _below((part,), content, recipe.positions)
    )


def _below(path: KeyPath, content: Any, positions: Mapping[KeyPath, Position]) -> Iterator[Value]:
    parts: list[tuple[str | int, Any]] | None = None
    if isinstance(content, RunCommand) and content.short is not None:
        yield from _below(path, content.short, positions)
        return
    if dataclasses.is_dataclass(content):
        parts = [
            (known.metadata.get("alias", known.name), getattr(content, known.name))
            for known in dataclasses.fields(content)
        ]
    elif isinstance(content, Mapping):
        parts = list(content.items())
    elif isinstance(content, tuple):
        parts = list(enumerate(content))
    if parts:
        for part, below in parts:
            if path == ("image", "constraints") and part == "drop" and not below:
                continue
            if isinstance(path[-1], int) and below in ((), None, {}):
                continue  # a step shows only what it has
            yield from _below((*path, part), below, positions)
        return
    value = None if parts is not None else str(content) if isinstance(content, Path) else content
    yield Value(key=key_text(_WORDS.get(path, path)), value=value, position=positions.get(path))


def table(text: str) -> list[str]:
    """The text of `to_json` as the lines of a table: key, value, and ``file:line`` or ``default``."""
    recipe = json_text.parse(text)
    head = f"{recipe['name']}: {recipe['description']}" if recipe["description"] else recipe["name"]
    rows = [(row["key"], shown(_plain(row["value"])), _place(row)) for row in recipe["values"]]
    key_width = max(len(key) for key, _, _ in rows)
    value_width = min(max(len(value) for _, value, _ in rows), 60)
    lines = [head, f"file    {recipe['file']}", f"sha256  {recipe['sha256']}", ""]
    lines += [f"{key:{key_width}}  {value:{value_width}}  {place}" for key, value, place in rows]
    return lines


def _run(command: RunCommand) -> str | dict[str, Any]:
    return dataclasses.asdict(command) if command.short is None else command.short


def _plain(value: str | int | None) -> str:
    return "-" if value is None or value == "" else str(value)


def _place(row: Mapping[str, Any]) -> str:
    return "default" if row["default"] else f"{problems.label(Path(row['file']))}:{row['line']}"


def described_json(recipe: Recipe) -> str:
    """One JSON object: the resolved parts, and `values` with their places."""
    rows = [
        {
            "key": row.key,
            "value": row.value,
            "default": row.position is None,
            "file": str(row.position.file) if row.position else None,
            "line": row.position.line if row.position else None,
            "column": row.position.column if row.position else None,
        }
        for row in values(recipe)
    ]
    content = {
        "schema": SHOW_SCHEMA,
        "name": recipe.name,
        "description": recipe.description,
        "file": str(recipe.file),
        "sha256": recipe.sha256,
        "image": {**dataclasses.asdict(recipe.image), "run": [_run(one) for one in recipe.image.run]},
        "system": dataclasses.asdict(recipe.system),
        "values": rows,
        "warnings": [str(warning) for warning in recipe.warnings],
    }
    return json.dumps(content, indent=2, default=str)

"""The parts of a recipe that its machine needs, and all its values as text and JSON."""

from __future__ import annotations

import dataclasses
import json
import posixpath
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imgkit_builder.oci.manifest import InstalledProject
from imgkit_builder.recipe import problems, rules, systems
from imgkit_builder.recipe.load import load
from imgkit_builder.recipe.model import Document, Recipe, RunCommand
from imgkit_builder.recipe.problems import Collector, KeyPath, Position, RecipeErrors, choices, key_text
from imgkit_builder.recipe.requirements import PYPROJECT, project_name
from imgkit_builder.recipe.validation import validate
from imgkit_entrypoints import json_text, terminal
from imgkit_entrypoints.system import SystemFacts

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
    copies: tuple[str, ...] = ()
    """Folders of the image into which the recipe copies code, in its order (``image.copy``)."""
    base: str = ""
    """The base of its image."""
    base_env: tuple[str, ...] = ()
    """Names of the base's variables, where the image is known."""

    @property
    def title(self) -> str:
        """Return the name of its system for people."""
        return self.system.title or self.name

    @property
    def module_line(self) -> str:
        """Return ``module load ...`` for its runtime; empty where the recipe names no module."""
        return module_line(self.system)

    def where(self, *path: str | int) -> str:
        """Return ``file.yaml:12`` for the nearest stated value at or above `path`, for messages."""
        return problems.place(self.positions, path, self.file)


def module_line(system: SystemFacts) -> str:
    """Return ``module load ...`` for the runtime of `system`; empty where it needs no module."""
    modules = system.runtime.modules
    return f"module load {' '.join(modules)}" if modules else ""


def find(ref: str | Path) -> Target:
    """Find the recipe `ref`: a shipped name or a recipe's file.

    Raises
    ------
    UsageError : there is no such recipe, or it has problems.
    """
    recipe = load(ref)
    return Target(
        name=recipe.name,
        system=recipe.system,
        platforms=recipe.image.platforms,
        file=recipe.file,
        positions=recipe.positions,
        projects=installed(recipe.image.pip),
        workdir=stated_workdir(recipe),
        copies=tuple(step.target for step in recipe.image.copy),
        base=recipe.image.base,
    )


def stated_workdir(recipe: Recipe) -> str:
    """Return ``image.workdir``; empty where neither the recipe nor one that it extends states it."""
    return recipe.image.workdir if ("image", "workdir") in recipe.positions else ""


def installed(steps: Iterable[PipStep]) -> tuple[InstalledProject, ...]:
    """Return the projects that the pip steps of a recipe install."""
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
    # The values come from an archive, which a stranger may have made, and end in a job script.
    name = target.system.scheduler
    image: dict[str, Any] = {"base": "scratch:none", "platform": target.platforms}
    if target.workdir:
        image["workdir"] = target.workdir
    # A recipe leaves out what has no value.
    system = dataclasses.asdict(
        target.system,
        dict_factory=lambda pairs: {key: value for key, value in pairs if value is not None},
    )
    _, mistakes = validate(Document, {"image": image, "system": system})
    collector, position = Collector(), Position(file=target.file, line=0, column=0)
    for message, hint in rules.recipe_name(target.name):
        collector.error(position, ("name",), message, hint)
    for mistake in mistakes:
        collector.error(position, mistake.path, mistake.message, mistake.hint)
    if not systems.is_known(name):
        hint = choices(systems.with_alias(name), systems.names())
        collector.error(position, ("system", "scheduler"), f"{name!r} is not known", hint)
    elif not collector.errors:
        for fault in systems.registration(name).faults(target.system):
            collector.error(position, ("system", *fault.path), fault.what, fault.hint)
    if collector.errors:
        raise RecipeErrors(collector.errors, of=target.file.name)
    return target


SHOW_SCHEMA = 1

_UNNAMED: Mapping[KeyPath, KeyPath] = {("image", "constraints", "policy"): ("image", "constraints")}
"""Fields whose name YAML omits."""


def _values(path: KeyPath, content: Any, positions: Mapping[KeyPath, Position]) -> Iterator[dict[str, Any]]:
    """Yield a row for each value below `content`; a default has no position."""
    parts: list[tuple[str | int, Any]] | None = None
    if isinstance(content, RunCommand) and content.short is not None:
        content = content.short
    if dataclasses.is_dataclass(content):
        parts = [
            (field.metadata.get("alias", field.name), getattr(content, field.name))
            for field in dataclasses.fields(content)
        ]
    elif isinstance(content, Mapping):
        parts = list(content.items())
    elif isinstance(content, tuple):
        parts = list(enumerate(content))
    if not parts:
        position = positions.get(path)
        yield {
            "key": key_text(_UNNAMED.get(path, path)),
            "value": None if parts == [] else content,
            "default": position is None,
            "file": position and position.file,
            "line": position and position.line,
            "column": position and position.column,
        }
    for part, value in parts or ():
        is_absent_drop = path == ("image", "constraints") and part == "drop" and not value
        # A step shows only what it has.
        if not is_absent_drop and not (isinstance(path[-1], int) and value in ((), None, {})):
            yield from _values((*path, part), value, positions)


def table(text: str) -> list[str]:
    """Return the text of `described_json` as a table: key, value, and ``file:line`` or ``default``."""
    recipe = json_text.parse(text)
    head = f"{recipe['name']}: {recipe['description']}" if recipe["description"] else recipe["name"]
    rows = [(row["key"], terminal.shown(_plain(row["value"])), _source(row)) for row in recipe["values"]]
    key_width = max(len(key) for key, _, _ in rows)
    value_width = min(max(len(value) for _, value, _ in rows), 60)
    lines = [head, f"file    {recipe['file']}", f"sha256  {recipe['sha256']}", ""]
    lines += [f"{key:{key_width}}  {value:{value_width}}  {source}" for key, value, source in rows]
    return lines


def _plain(value: str | int | None) -> str:
    return "-" if value is None or value == "" else str(value)


def _source(row: Mapping[str, Any]) -> str:
    return "default" if row["default"] else f"{problems.label(Path(row['file']))}:{row['line']}"


def described_json(recipe: Recipe) -> str:
    """Return one JSON object: the resolved parts, and ``values`` with their positions."""
    image = dataclasses.asdict(recipe.image)
    image["run"] = [command.short or dataclasses.asdict(command) for command in recipe.image.run]
    parts = (("image", recipe.image), ("system", recipe.system))
    rows = [row for part, content in parts for row in _values((part,), content, recipe.positions)]
    described = {
        "schema": SHOW_SCHEMA,
        "name": recipe.name,
        "description": recipe.description,
        "file": str(recipe.file),
        "sha256": recipe.sha256,
        "image": image,
        "system": dataclasses.asdict(recipe.system),
        "values": rows,
        "warnings": [str(warning) for warning in recipe.warnings],
    }
    return json.dumps(described, indent=2, default=str)

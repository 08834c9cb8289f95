"""The parts of a recipe that its machine needs, and all its values as text and JSON."""

from __future__ import annotations

import dataclasses
import json
import posixpath
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imgkit_builder.oci.manifest import InstalledProject
from imgkit_builder.recipe import problems, rules, systems
from imgkit_builder.recipe.load import load
from imgkit_builder.recipe.model import Document, Recipe, RunCommand
from imgkit_builder.recipe.problems import Collector, KeyPath, Position, RecipeErrors, key_text
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
    positions: Mapping[KeyPath, Position] = dataclasses.field(default_factory=dict)
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
        """Return ``module load ...`` for its runtime. It is empty where the recipe names no module."""
        return module_line(self.system)

    def where(self, *path: str | int) -> str:
        """Return ``file.yaml:12`` for the nearest stated value at or above `path`, for messages."""
        return problems.stated_at(self.positions, path, self.file)


def module_line(system: SystemFacts) -> str:
    """Return ``module load ...`` for the runtime of `system`. The line is empty where it needs no module."""
    modules = " ".join(system.runtime.modules)
    if not modules:
        return ""
    return f"module load {modules}"


def load_target(ref: str | Path) -> Target:
    """Load the recipe `ref`, a shipped name or a recipe's file, and return what its machine needs.

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
        projects=list_projects(recipe.image.pip),
        workdir=stated_workdir(recipe),
        copies=tuple(step.target for step in recipe.image.copy),
        base=recipe.image.base,
    )


def stated_workdir(recipe: Recipe) -> str:
    """Return ``image.workdir``. It is empty where neither the recipe nor one that it extends states it."""
    if ("image", "workdir") not in recipe.positions:
        return ""
    return recipe.image.workdir


def list_projects(steps: Iterable[PipStep]) -> tuple[InstalledProject, ...]:
    """Return the projects that the pip steps of a recipe install."""
    projects = []
    for number, step in enumerate(steps):
        if step.project is None:
            continue
        # The image has the name that pip records, whatever the folder is called.
        name = project_name(step.project / PYPROJECT)
        folder = ""
        if step.editable:
            folder = posixpath.normpath(step.editable)
        projects.append(InstalledProject(name=name, folder=folder, step=number))
    return tuple(projects)


def validate_target(target: Target) -> Target:
    """Check `target` with the rules for a recipe's file, and return it.

    Its values come from an archive of unknown origin and end in a job script, so a value that breaks a rule
    could run commands.

    Raises
    ------
    UsageError : values break a rule; lists all of them.
    """
    collector = Collector()
    position = Position(file=target.file, line=0, column=0)
    for message, hint in rules.recipe_name(target.name):
        collector.error(position, ("name",), message, hint)
    # The rules demand a base. It is not used: the image has been built already.
    image: dict[str, Any] = {"base": "scratch:none", "platform": target.platforms}
    if target.workdir:
        image["workdir"] = target.workdir
    system = dataclasses.asdict(target.system, dict_factory=_without_none)
    _, mistakes = validate(Document, {"image": image, "system": system})
    for mistake in mistakes:
        collector.error(position, mistake.path, mistake.message, mistake.hint)
    _check_scheduler(target.system, position, collector)
    if collector.errors:
        raise RecipeErrors(collector.errors, of=target.file.name)
    return target


def _check_scheduler(system: SystemFacts, position: Position, collector: Collector) -> None:
    """Report an unknown scheduler to `collector`, or else values that the scheduler cannot work with.

    The rules of a scheduler see valid values only, so they are skipped after other errors.
    """
    unknown = systems.scheduler_fault(system.scheduler)
    if unknown is not None:
        collector.error(position, ("system", "scheduler"), *unknown)
    elif not collector.errors:
        for fault in systems.find_registration(system.scheduler).faults(system):
            collector.error(position, ("system", *fault.path), fault.what, fault.hint)


def _without_none(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return a mapping without the keys that have no value, as a recipe leaves them out."""
    return {key: value for key, value in pairs if value is not None}


SHOW_SCHEMA = 1

_SHORT_PATHS: Mapping[KeyPath, KeyPath] = {("image", "constraints", "policy"): ("image", "constraints")}
"""Fields whose name YAML omits: ``constraints: keep`` means the policy."""


def _list_values(
    path: KeyPath, value: Any, positions: Mapping[KeyPath, Position]
) -> Iterator[dict[str, Any]]:
    """Yield a row of the table for each value of a recipe at the key `path` and below it.

    `positions` has the line of each value that a file states. Other values are defaults.
    """
    if isinstance(value, RunCommand) and value.short is not None:
        value = value.short
    children = _list_children(value)
    if children is None:
        yield _make_row(path, value, positions)
        return
    if not children:
        yield _make_row(path, None, positions)
        return
    # Of a step, which has an index in a list, and of the constraints, only the keys that are set.
    is_step = isinstance(path[-1], int)
    for key, child in children:
        is_unset = child in ((), None, {})
        if is_unset and (is_step or path == ("image", "constraints")):
            continue
        yield from _list_values((*path, key), child, positions)


def _make_row(path: KeyPath, value: Any, positions: Mapping[KeyPath, Position]) -> dict[str, Any]:
    """Return the row for a value: its key, the value, and the file, line and column that state it.

    For a default, the position is None.
    """
    position = positions.get(path)
    return {
        "key": key_text(_SHORT_PATHS.get(path, path)),
        "value": value,
        "default": position is None,
        "file": position and position.file,
        "line": position and position.line,
        "column": position and position.column,
    }


def _list_children(value: Any) -> list[tuple[str | int, Any]] | None:
    """Return the keys and values in a dataclass, a mapping or a list, or None for any other value.

    Keys are those of YAML: ``platform`` for the field ``platforms``. Those of a list are its indices.
    """
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple):
        return list(enumerate(value))
    if not dataclasses.is_dataclass(value):
        return None
    children: list[tuple[str | int, Any]] = []
    for field in dataclasses.fields(value):
        # The key in YAML: `platform` for platforms.
        key = field.metadata.get("alias", field.name)
        children.append((key, getattr(value, field.name)))
    return children


_WIDEST_VALUE = 60
"""Most characters that the column of values is wide. Behind a longer value, the source moves to the right."""


def format_table(text: str) -> list[str]:
    """Return the lines of a table of all values of a recipe: key, value, and ``file:line`` or ``default``.

    `text` is the result of `describe_as_json`.
    """
    recipe = json_text.parse(text)
    title = recipe["name"]
    if recipe["description"]:
        title += f": {recipe['description']}"
    rows = recipe["values"]
    values = []
    for row in rows:
        value = "-"
        if row["value"] not in (None, ""):
            value = terminal.escape_controls(str(row["value"]))
        values.append(value)
    key_width = max(len(row["key"]) for row in rows)
    value_width = min(max(map(len, values)), _WIDEST_VALUE)
    lines = [title, f"file    {recipe['file']}", f"sha256  {recipe['sha256']}", ""]
    for row, value in zip(rows, values, strict=True):
        lines.append(f"{row['key']:{key_width}}  {value:{value_width}}  {_describe_source(row)}")
    return lines


def _describe_source(row: Mapping[str, Any]) -> str:
    if row["default"]:
        return "default"
    return f"{problems.file_label(Path(row['file']))}:{row['line']}"


def describe_as_json(recipe: Recipe) -> str:
    """Return the recipe as JSON for ``imgkit show --json``: its parts, and ``values``, a list of all values.

    Each item of ``values`` has the key, the value, and the file, line and column that state it.
    """
    image = dataclasses.asdict(recipe.image)
    image["run"] = [command.short or dataclasses.asdict(command) for command in recipe.image.run]
    values = [
        *_list_values(("image",), recipe.image, recipe.positions),
        *_list_values(("system",), recipe.system, recipe.positions),
    ]
    content = {
        "schema": SHOW_SCHEMA,
        "name": recipe.name,
        "description": recipe.description,
        "file": str(recipe.file),
        "sha256": recipe.sha256,
        "image": image,
        "system": dataclasses.asdict(recipe.system),
        "values": values,
        "warnings": [str(warning) for warning in recipe.warnings],
    }
    return json.dumps(content, indent=2, default=str)

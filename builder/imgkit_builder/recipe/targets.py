"""The values of a recipe that its machine needs, and all values of a recipe as text and JSON."""

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
    """The values of a recipe that matter on the machine where its jobs run."""

    name: str
    system: SystemFacts
    platforms: tuple[str, ...]
    """The platforms of the image, such as ``linux/amd64``. The first is the default."""
    file: Path
    """The file that the values come from."""
    positions: Mapping[KeyPath, Position] = dataclasses.field(default_factory=dict)
    """The position of every value that a file of the recipe sets."""
    projects: tuple[InstalledProject, ...] = ()
    """The user's own projects that are installed in the image, as far as they are known on this machine."""
    workdir: str = ""
    """``image.workdir``, the folder in which jobs start. Empty if the recipe does not set it."""
    copies: tuple[str, ...] = ()
    """The folders of the image into which the recipe copies code (``image.copy``), in the recipe's order."""
    base: str = ""
    """The base of the image."""
    base_env: tuple[str, ...] = ()
    """The names of the base's variables. Empty if the image is not known."""

    @property
    def title(self) -> str:
        """The name of the system, as shown to users."""
        return self.system.title or self.name

    @property
    def module_line(self) -> str:
        """The command ``module load ...`` for the container runtime. Empty if the recipe names no module."""
        return module_line(self.system)

    def where(self, *path: str | int) -> str:
        """Return ``file.yaml:12`` for a message: the position of `path`, or of the nearest key above it."""
        return problems.stated_at(self.positions, path, self.file)


def module_line(system: SystemFacts) -> str:
    """Return the command ``module load ...`` for the container runtime of `system`.

    The result is empty if the runtime needs no module.
    """
    modules = " ".join(system.runtime.modules)
    if not modules:
        return ""
    return f"module load {modules}"


def load_target(ref: str | Path) -> Target:
    """Load a recipe, and return the values that its machine needs.

    `ref` is the name of a shipped recipe, or the path of a recipe's file.

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
    """Return ``image.workdir``, or an empty text if neither the recipe nor a parent recipe sets it."""
    if ("image", "workdir") not in recipe.positions:
        return ""
    return recipe.image.workdir


def list_projects(steps: Iterable[PipStep]) -> tuple[InstalledProject, ...]:
    """Return the user's projects that the pip steps of a recipe install."""
    projects = []
    for step_index, step in enumerate(steps):
        if step.project is None:
            continue
        # pip records the name in pyproject.toml, whatever the folder is called.
        name = project_name(step.project / PYPROJECT)
        folder = ""
        if step.editable:
            folder = posixpath.normpath(step.editable)
        projects.append(InstalledProject(name=name, folder=folder, step=step_index))
    return tuple(projects)


def validate_target(target: Target) -> Target:
    """Check the values of `target` as if they were in a recipe's file, and return `target`.

    The values come from an archive of unknown origin, and are later written to a job script. A value that
    breaks a rule could run commands there.

    Raises
    ------
    UsageError : some values break a rule. The error lists all of them.
    """
    collector = Collector()
    # The values have no lines. Line 0 means the file as a whole.
    position = Position(file=target.file, line=0, column=0)
    for message, hint in rules.find_recipe_name_faults(target.name):
        collector.error(position, ("name",), message, hint)
    _, mistakes = validate(Document, _make_recipe_data(target))
    for mistake in mistakes:
        collector.error(position, mistake.path, mistake.message, mistake.hint)
    _check_scheduler(target.system, position, collector)
    if collector.errors:
        raise RecipeErrors(collector.errors, of=target.file.name)
    return target


def _make_recipe_data(target: Target) -> dict[str, Any]:
    """Return the values of `target` as the data of a recipe's file."""
    # The rules require a base. This placeholder is never used, because the image has already been built.
    image: dict[str, Any] = {"base": "scratch:none", "platform": target.platforms}
    if target.workdir:
        image["workdir"] = target.workdir
    # None is no value in a recipe. A key that is not set is left out instead.
    system = dataclasses.asdict(target.system, dict_factory=_make_dict_without_none)
    return {"image": image, "system": system}


def _make_dict_without_none(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return a dict of `pairs` without those whose value is None."""
    return {key: value for key, value in pairs if value is not None}


def _check_scheduler(system: SystemFacts, position: Position, collector: Collector) -> None:
    """Report an unknown scheduler, or values that the scheduler cannot use, to `collector`.

    The rules of a scheduler expect valid values. They are skipped if other errors have been found.
    """
    scheduler_fault = systems.find_scheduler_fault(system.scheduler)
    if scheduler_fault is not None:
        message, hint = scheduler_fault
        collector.error(position, ("system", "scheduler"), message, hint)
    elif not collector.errors:
        registration = systems.find_registration(system.scheduler)
        for fault in registration.find_faults(system):
            collector.error(position, ("system", *fault.path), fault.what, fault.hint)


SHOW_SCHEMA = 1

_SHORT_PATHS: Mapping[KeyPath, KeyPath] = {("image", "constraints", "policy"): ("image", "constraints")}
"""Fields whose name may be left out in YAML. For example, ``constraints: keep`` sets the policy."""


def _list_values(
    path: KeyPath, value: Any, positions: Mapping[KeyPath, Position]
) -> Iterator[dict[str, Any]]:
    """Yield a row of the table of values for each value at and below the key `path`.

    Parameters
    ----------
    path : the key of `value` in the recipe.
    value : a value of the recipe, which may contain others.
    positions : the position of each value that a file sets. All other values are defaults.
    """
    # A command that the author wrote as plain text is shown as plain text.
    if isinstance(value, RunCommand) and value.short is not None:
        value = value.short
    children = _list_children(value)
    if children is None:  # a single value
        yield _make_row(path, value, positions)
        return
    if not children:  # an empty list or mapping is shown as no value
        yield _make_row(path, None, positions)
        return
    # A step is an item of a list, so its path ends with an index. For steps and for the constraints, only the
    # keys that are set are listed, because the many optional keys of each step would fill the table.
    lists_only_set_keys = isinstance(path[-1], int) or path == ("image", "constraints")
    for key, child in children:
        is_set = child not in ((), None, {})
        if is_set or not lists_only_set_keys:
            yield from _list_values((*path, key), child, positions)


def _make_row(path: KeyPath, value: Any, positions: Mapping[KeyPath, Position]) -> dict[str, Any]:
    """Return a row of the table: the key, its value, and the file, line and column that set it.

    For a default, file, line and column are None.
    """
    position = positions.get(path)
    # Some keys are written in a short form in a recipe, so the table shows that form.
    return {
        "key": key_text(_SHORT_PATHS.get(path, path)),
        "value": value,
        "default": position is None,
        "file": position and position.file,
        "line": position and position.line,
        "column": position and position.column,
    }


def _list_children(value: Any) -> list[tuple[str | int, Any]] | None:
    """Return the keys and values in a dataclass, a mapping or a list. For any other value, return None.

    The keys are those of YAML, such as ``platform`` for the field ``platforms``. The keys of a list are its
    indices.
    """
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple):
        return list(enumerate(value))
    if not dataclasses.is_dataclass(value):
        return None
    children: list[tuple[str | int, Any]] = []
    for field in dataclasses.fields(value):
        # The key in YAML may differ from the name of the field: `platform` for `platforms`.
        key = field.metadata.get("alias", field.name)
        children.append((key, getattr(value, field.name)))
    return children


_WIDEST_VALUE = 60
"""The largest width of the column of values, in characters. A longer value moves the source of its line to
the right."""


def format_table(recipe_json: str) -> list[str]:
    """Return a table of a recipe's values, one per line: key, value, and ``file:line`` or ``default``.

    `recipe_json` is the result of `describe_as_json`, in which paths are texts already.
    """
    recipe_data = json_text.parse(recipe_json)
    title = recipe_data["name"]
    if recipe_data["description"]:
        title += f": {recipe_data['description']}"
    rows = recipe_data["values"]
    value_texts = [_format_value(row["value"]) for row in rows]
    key_width = max(len(row["key"]) for row in rows)
    # A few very long values must not widen the whole table.
    value_width = min(max(map(len, value_texts)), _WIDEST_VALUE)
    lines = [title, f"file    {recipe_data['file']}", f"sha256  {recipe_data['sha256']}", ""]
    for row, value_text in zip(rows, value_texts, strict=True):
        lines.append(f"{row['key']:{key_width}}  {value_text:{value_width}}  {_describe_source(row)}")
    return lines


def _format_value(value: Any) -> str:
    """Return a value of a recipe for the table. A value that is not set or empty is shown as ``-``."""
    if value in (None, ""):
        return "-"
    # A text from a recipe may contain control characters, which must not reach the terminal.
    return terminal.escape_controls(str(value))


def _describe_source(row: Mapping[str, Any]) -> str:
    """Return ``mine.yaml:12``, the line that sets the value of `row`, or ``default``."""
    if row["default"]:
        return "default"
    return f"{problems.file_label(Path(row['file']))}:{row['line']}"


def describe_as_json(recipe: Recipe) -> str:
    """Return the recipe as JSON, for ``imgkit show --json``.

    The object contains the sections of the recipe, and ``values``, a list of all values. Each item of
    ``values`` has a key, its value, and the file, line and column that set it.
    """
    image = dataclasses.asdict(recipe.image)
    # A command that the author wrote as plain text is shown as plain text.
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

"""``imgkit.toml``: the values of ``imgkit run`` in a folder, each with its place in the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from imgkit_builder.job import container, resolve
from imgkit_builder.job import quoting as job_fields
from imgkit_builder.recipe import problems, rules
from imgkit_builder.recipe.problems import Collector, KeyPath, Position, RecipeErrors, choices
from imgkit_entrypoints import files, json_text
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.json_text import Fault

NAME = "imgkit.toml"
_MOST_BYTES = 32 << 10
_MOST_LINES = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectValues:
    """The keys of the file; each takes what the flag of its name takes, and empty means "not stated"."""

    remote: str = ""
    recipe: str = ""
    account: str = ""
    queue: str = ""
    qos: str = ""
    time: str = ""
    nodes: str = ""
    binds: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    """``NAME=VALUE``, or ``NAME`` for the value that the variable has here."""
    code: str = ""
    """A folder to lay over /workspace; the path starts at the file's folder."""
    command: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectFile:
    """An ``imgkit.toml`` that was read."""

    file: Path
    values: ProjectValues
    positions: Mapping[str, Position]
    """The place of every key that the file states."""

    @property
    def recipe_file(self) -> Path | None:
        """The file of the recipe, whose path starts at the file's folder; None for a shipped recipe."""
        from imgkit_builder.recipe import load

        word = self.values.recipe
        return self.file.parent / word if load.is_path(word) or word.endswith(".sif") else None

    @property
    def recipe(self) -> str:
        """The path of the recipe's file, or the name of a shipped recipe."""
        file = self.recipe_file
        return str(file) if file else self.values.recipe

    @property
    def code(self) -> Path | None:
        """The folder to lay over /workspace."""
        return self.file.parent / self.values.code if self.values.code else None


def locate(folder: Path) -> Path | None:
    """Return the ``imgkit.toml`` of `folder`, or of the nearest folder above it in its git repository.

    Outside of a repository only `folder` counts: a file in /tmp or a home says nothing about what lies below.
    """
    folder = folder.absolute()
    above = [folder, *folder.parents]
    root = next((number for number, place in enumerate(above) if (place / ".git").exists()), 0)
    for place in above[: root + 1]:
        if (place / NAME).is_file():
            return place / NAME
    return None


def read(file: Path) -> ProjectFile:
    """Read `file`.

    Raises
    ------
    UsageError : it is not TOML, or has an unknown key or a wrong value; lists all of them with their lines.
    """
    return parse(_text(file), file)


def parse(text: str, file: Path) -> ProjectFile:
    """`text` as the content of `file`.

    Raises
    ------
    UsageError : as `read`.
    """
    found = Collector(lines={file: text.split("\n")}, shows=(file.parent.resolve(),))
    data = _parsed(text, file, found)
    positions = _positions(text, file) if data else {}
    data = {key: value for key, value in data.items() if value != ""}
    _check_types(data, positions, found)
    if not found.errors:
        values = ProjectValues(**{key: _plain(value) for key, value in data.items()})
        _check_values(values, positions, found)
    if found.errors:
        problems = sorted(found.errors, key=lambda one: (one.position.line, one.position.column))
        raise RecipeErrors(problems, of=NAME)
    return ProjectFile(file=file, values=values, positions=positions)


def _text(file: Path) -> str:
    try:
        text = files.read_text(file, most_bytes=_MOST_BYTES)
        if text.count("\n") > _MOST_LINES:
            raise ValueError(f"it has more than {_MOST_LINES} lines")
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot be read: {error}", where=str(file), hint="correct or remove it") from error
    return text


def _parsed(text: str, file: Path, found: Collector) -> dict[str, Any]:
    try:
        return problems.parse_toml(text)
    except problems.NotToml as error:
        place = Position(file=file, line=error.line, column=error.column)
        found.error(place, (), error.what, 'write KEY = "VALUE"')
    return {}


def _positions(text: str, file: Path) -> dict[str, Position]:
    """The first place of each key; a table is an unknown one."""
    found: dict[str, Position] = {}
    for path, line, column in problems.toml_positions(text):
        found.setdefault(str(path[0]), Position(file=file, line=line, column=column))
    return found


def _check_types(data: Mapping[str, Any], positions: Mapping[str, Position], found: Collector) -> None:
    plain = {
        key: str(value) if key == "nodes" and type(value) is int else value for key, value in data.items()
    }
    for fault in json_text.checked(ProjectValues, plain, closed=True)[1]:
        key = str(fault.path[0])
        found.error(positions[key], fault.path, *_explained(key, fault))


def _explained(key: str, fault: Fault) -> tuple[str, str]:
    if fault.kind == "unknown":
        return "unknown key", choices(key, fault.expected)
    if fault.expected is not str:
        return f"must be a list of strings, not {_kind(fault.value)}", 'write ["ONE", "TWO"]'
    hint = "" if isinstance(fault.value, list | dict) else f'quote it: "{fault.value}"'
    return f"must be text, not {_kind(fault.value)}", hint


def _kind(value: object) -> str:
    names = {bool: "true or false", int: "an integer", float: "a number", str: "text", list: "a list"}
    return names.get(type(value), "a table" if isinstance(value, dict) else "a date or time")


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else str(value)


def _check_values(values: ProjectValues, positions: Mapping[str, Position], found: Collector) -> None:
    """Report each value that its flag would refuse."""

    def report(path: KeyPath, check: Callable[[], object]) -> None:
        try:
            check()
        except UsageError as error:
            found.error(positions[str(path[0])], path, error.what, error.hint or "")

    for key in ("account", "queue", "qos"):
        report((key,), partial(job_fields.check, f"--{key}", getattr(values, key)))
    if values.time:
        report(("time",), partial(job_fields.seconds, values.time, where=""))
    if values.nodes:
        report(("nodes",), partial(resolve.parse_nodes, values.nodes))
    for number, one in enumerate(values.env):
        report(("env", number), partial(container.variable, one))
        for what, hint in rules.env_value(one):
            found.error(positions["env"], ("env", number), what, hint)
    for number, one in enumerate(values.binds):
        for what, hint in rules.bind(one):
            found.error(positions["binds"], ("binds", number), what, hint)
    if not values.code.isprintable():
        found.error(positions["code"], ("code",), f"{values.code!r} holds a control character", "delete it")
    for key in ("binds", "command"):
        for number, one in enumerate(getattr(values, key)):
            if not one.isprintable():
                found.error(positions[key], (key, number), f"{one!r} holds a control character", "delete it")

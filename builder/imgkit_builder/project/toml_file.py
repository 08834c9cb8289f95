"""``imgkit.toml``: the values of ``imgkit run`` in a folder, each with its place in the file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from imgkit_builder.jobs import contents, quoting, resolve
from imgkit_builder.recipe.model import KEYS, Short
from imgkit_builder.recipe.problems import Collector, Position, RecipeErrors, parse_toml_file
from imgkit_builder.recipe.system_files import is_path
from imgkit_builder.recipe.validation import rule_of, validate
from imgkit_entrypoints import files
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.rules import EnvValue, Line
from imgkit_entrypoints.system import Bind

NAME = "imgkit.toml"
_MOST_BYTES = 32 << 10
_MOST_LINES = 500


def _number_as_text(value: Any) -> Any:
    return str(value) if type(value) is int else value


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectValues:
    """The keys of the file; each takes what the flag of its name takes, and empty means "not stated"."""

    __pydantic_config__ = KEYS

    remote: Line = ""
    recipe: Line = ""
    account: Annotated[str, rule_of(partial(quoting.check, "--account"))] = ""
    queue: Annotated[str, rule_of(partial(quoting.check, "--queue"))] = ""
    qos: Annotated[str, rule_of(partial(quoting.check, "--qos"))] = ""
    time: Annotated[str, rule_of(partial(quoting.seconds, where=""))] = ""
    nodes: Annotated[str, rule_of(resolve.parse_nodes), Short(_number_as_text)] = ""
    binds: tuple[Bind, ...] = ()
    env: tuple[Annotated[EnvValue, rule_of(contents.variable)], ...] = ()
    """``NAME=VALUE``, or ``NAME`` for the value that the variable has here."""
    code: Line = ""
    """A folder to lay over /workspace; the path starts at the file's folder."""
    command: tuple[Line, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectFile:
    """An ``imgkit.toml`` that was read."""

    file: Path
    values: ProjectValues
    positions: Mapping[str, Position]
    """The place of every key that the file states."""

    @property
    def recipe_file(self) -> Path | None:
        """Return the recipe's file, whose path starts at the file's folder; None for a shipped recipe."""
        ref = self.values.recipe
        return self.file.parent / ref if is_path(ref) or ref.endswith(".sif") else None

    @property
    def recipe(self) -> str:
        """Return the path of the recipe's file, or the name of a shipped recipe."""
        file = self.recipe_file
        return str(file) if file else self.values.recipe

    @property
    def code(self) -> Path | None:
        """Return the folder to lay over /workspace."""
        return self.file.parent / self.values.code if self.values.code else None


def locate(folder: Path) -> Path | None:
    """Return the ``imgkit.toml`` of `folder`, or of the nearest folder above it in its git repository.

    Outside of a repository only `folder` counts: a file in /tmp or a home says nothing about what lies below.
    """
    folder = folder.absolute()
    above = [folder, *folder.parents]
    root = next((number for number, parent in enumerate(above) if (parent / ".git").exists()), 0)
    for parent in above[: root + 1]:
        if (parent / NAME).is_file():
            return parent / NAME
    return None


def read(file: Path) -> ProjectFile:
    """Read `file`.

    Raises
    ------
    UsageError : it is not TOML, or has an unknown key or a wrong value; lists all of them with their lines.
    """
    try:
        text = files.read_text(file, most_bytes=_MOST_BYTES)
        if text.count("\n") > _MOST_LINES:
            raise ValueError(f"it has more than {_MOST_LINES} lines")
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot be read: {error}", where=str(file), hint="correct or remove it") from error
    return parse(text, file)


def parse(text: str, file: Path) -> ProjectFile:
    """Read `text` as the content of `file`.

    Raises
    ------
    UsageError : as `read`.
    """
    problems = Collector(shows=(file.parent.resolve(),))
    data = parse_toml_file(text, file, problems, 'write KEY = "VALUE"')
    positions = {key: _position(key, text, file) for key in data}
    values, mistakes = validate(ProjectValues, {key: value for key, value in data.items() if value != ""})
    for mistake in mistakes:
        hint = mistake.hint
        if mistake.kind == "type":
            hint = 'write ["ONE", "TWO"]' if mistake.expected == "a list" else 'write "TEXT"'
        problems.error(positions[str(mistake.path[0])], mistake.path, mistake.message, hint)
    if values is None or problems.errors:
        errors = sorted(problems.errors, key=lambda problem: problem.position.line)
        raise RecipeErrors(errors, of=NAME)
    return ProjectFile(file=file, values=values, positions=positions)


def _position(key: str, text: str, file: Path) -> Position:
    """Return the line of `key`, which begins it in a file without tables, or the file as a whole."""
    match = re.search(rf"^[ \t]*(?:{re.escape(key)}[ \t]*=|\[+{re.escape(key)}\b)", text, re.MULTILINE)
    line = text.count("\n", 0, match.start()) + 1 if match else 0
    return Position(file=file, line=line, column=min(line, 1))

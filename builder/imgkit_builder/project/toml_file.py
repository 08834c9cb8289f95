"""``imgkit.toml``: the values of ``imgkit run`` in a folder, each with its place in the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imgkit_builder.job import container, resolve
from imgkit_builder.job import quoting as job_fields
from imgkit_builder.recipe import problems, rules
from imgkit_builder.recipe.problems import Collector, KeyPath, Position, RecipeErrors, choices
from imgkit_entrypoints import files
from imgkit_entrypoints.errors import UsageError

if TYPE_CHECKING:
    from pydantic import BaseModel

NAME = "imgkit.toml"
_MOST_BYTES = 32 << 10
_MOST_LINES = 500
"""`_statements` reads a value of many lines once for each of them."""


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
    def recipe(self) -> str:
        """The word for the recipe; a path in the file starts at the file's folder."""
        from imgkit_builder.recipe import load

        word = self.values.recipe
        is_file = load.is_path(word) or word.endswith((".sif", ".json"))
        return str(self.file.parent / word) if is_file else word

    @property
    def code(self) -> Path | None:
        """The folder to lay over /workspace."""
        return self.file.parent / self.values.code if self.values.code else None


def find(folder: Path) -> ProjectFile | None:
    """The ``imgkit.toml`` of `folder`, or of the nearest folder above it in its git repository.

    Outside of a repository only `folder` counts: a file in /tmp or a home says nothing about what lies below.

    Raises
    ------
    UsageError : the file has problems; lists all of them with their lines.
    """
    file = locate(folder)
    return read(file) if file else None


def locate(folder: Path) -> Path | None:
    """The file that `find` reads."""
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
    UsageError : it is no TOML, or has an unknown key or a wrong value; lists all of them with their lines.
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
    positions = dict(reversed([*_statements(text, file)])) if data else {}
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
        return problems.parse(text)
    except problems.NotToml as error:
        place = Position(file=file, line=error.line, column=error.column)
        found.error(place, (), error.what, 'write KEY = "VALUE"')
    return {}


def _statements(text: str, file: Path) -> Iterator[tuple[str, Position]]:
    """Each key at the left of a line, with its place.

    No parser of TOML gives places. But a value ends at the first line where its statement is TOML.
    """
    loads, lines, start = problems.parse, text.split("\n"), 0
    for end in range(len(lines)):
        statement = "\n".join(lines[start : end + 1])
        try:
            data = loads(statement)
        except problems.NotToml:
            continue
        column = len(lines[start]) - len(lines[start].lstrip()) + 1
        yield from ((key, Position(file=file, line=start + 1, column=column)) for key in data)
        start = end + 1


def _model() -> type[BaseModel]:
    import pydantic

    kinds: dict[str, Any] = {
        "str": (str, ""),
        "tuple[str, ...]": (list[str], []),
    }
    shapes = {one.name: kinds[str(one.type)] for one in fields(ProjectValues)}
    shapes["nodes"] = (int | str, "")
    strict = pydantic.ConfigDict(extra="forbid", strict=True)
    return pydantic.create_model("ImgkitToml", __config__=strict, **shapes)


def _check_types(data: Mapping[str, Any], positions: Mapping[str, Position], found: Collector) -> None:
    from pydantic import ValidationError

    try:
        _model().model_validate(data)
    except ValidationError as error:
        # `nodes` may be one of two types, and each would be reported.
        details = {
            tuple(part for number, part in enumerate(one["loc"]) if number == 0 or isinstance(part, int)): one
            for one in error.errors(include_url=False)
        }
        for path, detail in details.items():
            key = str(path[0])
            what, hint = _type_fault(key, detail["type"], detail["input"])
            found.error(positions[key], path, what, hint)


def _type_fault(key: str, kind: str, value: object) -> tuple[str, str]:
    if kind == "extra_forbidden":
        return "unknown key", choices(key, [one.name for one in fields(ProjectValues)])
    if kind == "list_type":
        return f"must be a list of texts, not {_kind(value)}", 'write ["ONE", "TWO"]'
    return f"must be text, not {_kind(value)}", "" if isinstance(
        value, list | dict
    ) else f'quote it: "{value}"'


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
        report(("nodes",), partial(resolve.node_range, values.nodes))
    for number, one in enumerate(values.env):
        report(("env", number), partial(container.variable, one))
    for number, one in enumerate(values.binds):
        for what, hint in rules.bind(one):
            found.error(positions["binds"], ("binds", number), what, hint)
    if not values.code.isprintable():
        found.error(positions["code"], ("code",), f"{values.code!r} holds a control character", "delete it")
    for key in ("binds", "command"):
        for number, one in enumerate(getattr(values, key)):
            if not one.isprintable():
                found.error(positions[key], (key, number), f"{one!r} holds a control character", "delete it")

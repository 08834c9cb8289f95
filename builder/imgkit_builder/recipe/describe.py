"""Describes a recipe: every resolved value with its file and line, as text and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imgkit_builder.recipe.model import Recipe, RunCommand
from imgkit_builder.recipe.problems import KeyPath, Position, key_text
from imgkit_entrypoints import json_text
from imgkit_entrypoints.terminal import shown

SCHEMA = 1

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
        parts = [(known.name, getattr(content, known.name)) for known in dataclasses.fields(content)]
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
    return "default" if row["default"] else f"{Path(row['file']).name}:{row['line']}"


def to_json(recipe: Recipe) -> str:
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
        "schema": SCHEMA,
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

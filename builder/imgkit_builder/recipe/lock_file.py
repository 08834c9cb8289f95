"""Lock files: TOML text with one short line per value, so that a diff shows what an upgrade changed."""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from imgkit_builder.recipe import toml_text
from imgkit_builder.recipe.lock import SCHEMA, UV_STEP, Lock, LockedDeb, LockedPlatform, LockedWheel
from imgkit_builder.recipe.model import Recipe
from imgkit_builder.recipe.problems import Collector, KeyPath, Position, RecipeErrors, choices
from imgkit_builder.recipe.rules import PLATFORMS
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import UsageError
from imgkit_recipes import FOLDER

SUFFIX = ".lock"
_HEAD = "# Made by imgkit lock, which also changes it. Keep it beside its recipe, under version control.\n"
_MOST_BYTES = 16 << 20
_AGAIN = "do not edit a lock; make it again: imgkit lock RECIPE"
_WORD = r"[A-Za-z0-9][A-Za-z0-9.+~:_!-]*"
_FILE = r"[A-Za-z0-9][A-Za-z0-9.+~%:_!-]*"
_DIGEST = r"(sha256:[0-9a-f]{64})?"
_RULES: Mapping[str, tuple[str, str]] = {
    "name": (_WORD, "must be the name of a package"),
    "version": (_WORD, "must be a version"),
    "architecture": (_WORD, "must be an architecture"),
    "file": (_FILE, "must be the name of a file, without a folder"),
    "sha256": (r"[0-9a-f]{64}", "must be 64 hex digits"),
    "url": (r"(https?://[^\s@\\\x00-\x20\x7f]+)?", "must be a URL of http or https, without credentials"),
}
"""What a text of a package must match, by its key."""


def beside(recipe: Recipe) -> Path:
    """Where the lock of `recipe` lies: beside its file; for a shipped recipe in the working folder."""
    if recipe.file.parent == FOLDER:
        return Path.cwd() / f"{recipe.name}{SUFFIX}"
    return recipe.file.with_suffix(SUFFIX)


def text(lock: Lock) -> str:
    """The content of the file; the same lock gives the same bytes."""
    return _HEAD + "".join(_table(lock, ""))


def section(lock: Lock, part: LockedPlatform) -> str:
    """The content of a file with `part` alone."""
    return text(dataclasses.replace(lock, platforms=(part,)))


def _table(value: Any, above: str) -> Iterator[str]:
    """Yield the lines of a dataclass: plain values first, as TOML wants, then the tables below it."""
    tables = []
    for known in dataclasses.fields(value):
        found = getattr(value, known.name)
        key = f"{above}.{known.name}" if above else known.name
        if dataclasses.is_dataclass(found):
            tables += [(f"[{key}]", key, found)]
        elif isinstance(found, tuple) and found and dataclasses.is_dataclass(found[0]):
            tables += [(f"[[{key}]]", key, one) for one in found]
        elif known.name == "schema" or found != known.default:
            yield f"{known.name} = {_plain(found)}\n"
    for head, key, found in tables:
        lines = "".join(_table(found, key))
        if lines or head.startswith("[["):
            yield f"\n{head}\n{lines}" if not lines.startswith("\n") else f"\n{head}{lines}"


def _plain(value: str | bool | int | tuple[str, ...]) -> str:
    if isinstance(value, tuple):
        items = [_plain(one) for one in value]
        return f"[{', '.join(items)}]" if len(items) < 2 else "[\n    " + ",\n    ".join(items) + ",\n]"
    if isinstance(value, str):
        # A text of TOML is one of JSON, except that DEL must be escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower()


def read(file: Path) -> Lock:
    """Read `file`.

    Raises
    ------
    UsageError : it cannot be read, is no TOML, has a later schema, an unknown key, or a missing or wrong
        value; lists all faults with their lines.
    """
    try:
        with file.open("rb") as stream:
            data = stream.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES} bytes")
        content = data.decode()
    except (OSError, ValueError) as error:
        raise UsageError(f"the lock cannot be read: {error}", where=str(file), hint=_AGAIN) from error
    return parse(content, file)


def parse(content: str, file: Path) -> Lock:
    """`content` as that of `file`.

    Raises
    ------
    UsageError : as `read`.
    """
    content = content.replace("\r\n", "\n")
    found = _Faults(file, content)
    data = _parsed(content, found)
    schema = data.get("schema", SCHEMA)
    if not found.problems.errors and schema != SCHEMA:
        later = isinstance(schema, int) and schema > SCHEMA
        hint = "use that imgkit, or make the lock again: imgkit lock RECIPE" if later else _AGAIN
        what = (
            f"schema {schema} is that of a later imgkit" if later else f"{schema!r} is not a schema of a lock"
        )
        found.add(("schema",), what, hint)
    if not found.problems.errors:
        _check_keys(Lock, data, (), found)
    if not found.problems.errors:
        try:
            lock: Lock = json_text.read(Lock, data, _PLACE)
        except (ValueError, TypeError) as error:  # json has no dates, which TOML has
            _add_type_fault(str(error), found)
        else:
            _check_values(lock, found)
    if found.problems.errors:
        raise RecipeErrors(found.problems.errors, of=file.name)
    return lock


class _Faults:
    """Collects the faults of a file, each with its line."""

    def __init__(self, file: Path, content: str) -> None:
        lines = content.split("\n")
        self.problems = Collector(lines={file: lines})
        self._file = file
        self._lines = dict(_places(lines))

    def add(self, path: KeyPath, what: str, hint: str = _AGAIN) -> None:
        """Add a fault of the value at `path`."""
        above = path
        while above and above not in self._lines:
            above = above[:-1]
        self.at(self._lines.get(above, 1), path, what, hint)

    def at(self, line: int, path: KeyPath, what: str, hint: str = _AGAIN) -> None:
        """Add a fault in a line."""
        key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
        position = Position(file=self._file, line=line, column=1)
        # Not as the path of a recipe's value, whose names differ.
        self.problems.error(position, (), f"{key}: {what}" if key else what, hint)


def _places(lines: list[str]) -> Iterator[tuple[KeyPath, int]]:
    """Yield the path and line of each table and key; no parser of TOML gives them.

    The lines are those of `text`: a key at the left of a line, tables with a header, and no dotted keys.
    """
    counts: dict[KeyPath, int] = {}
    table: KeyPath = ()
    for number, line in enumerate(lines, 1):
        if head := re.match(r"\s*(\[\[?)\s*([A-Za-z0-9_.-]+)\s*\]", line):
            *above, last = head[2].split(".")
            table = ()
            for name in above:
                table = (*table, name)
                # A table below a list of tables belongs to its last item.
                table = (*table, counts[table]) if table in counts else table
            table = (*table, last)
            if head[1] == "[[":
                counts[table] = counts.get(table, -1) + 1
                table = (*table, counts[table])
            yield table, number
        elif key := re.match(r"\s*([A-Za-z0-9_-]+)\s*=", line):
            yield (*table, key[1]), number


def _parsed(content: str, found: _Faults) -> dict[str, Any]:
    try:
        return toml_text.parse(content)
    except (ValueError, RecursionError) as error:
        message = str(error) or "its brackets lie too deep within each other"
        place = re.search(r" \(at line (\d+), column (\d+)\)$", message)
        line = int(place[1]) if place else content.rstrip().count("\n") + 1
        found.at(line, (), f"it is no TOML: {message.partition(' (at ')[0]}")
    return {}


def _check_keys(shape: type[Any], data: Any, path: KeyPath, found: _Faults) -> None:
    """Report every key that `shape` lacks, and every value that it needs; types come later."""
    if not isinstance(data, dict):
        found.add(path, "must be a table")
        return
    known = {one.name: one for one in dataclasses.fields(shape)}
    for key in data.keys() - known.keys():
        found.add((*path, key), "unknown key", choices(key, known))
    hints = typing.get_type_hints(shape)
    for name, field in known.items():
        inner = [one for one in (hints[name], *typing.get_args(hints[name])) if dataclasses.is_dataclass(one)]
        if name not in data:
            if field.default is dataclasses.MISSING:
                found.add((*path, name), "is missing")
        elif not isinstance(data[name], str | int | list | dict):
            found.add((*path, name), "must not be a date, a time or a number with a point")
        elif inner and isinstance(data[name], list) and inner[0] is not hints[name]:
            for number, one in enumerate(data[name]):
                _check_keys(typing.cast("type[Any]", inner[0]), one, (*path, name, number), found)
        elif inner and inner[0] is hints[name]:
            _check_keys(typing.cast("type[Any]", inner[0]), data[name], (*path, name), found)


_PLACE = "lock"


def _add_type_fault(message: str, found: _Faults) -> None:
    """Report a ValueError of `json_text.read`, which begins with the place: ``lock.platforms[0].apt[2]``."""
    place = re.match(rf"{_PLACE}((?:\.\w+|\[\d+\])*)", message)
    parts = re.findall(r"\.(\w+)|\[(\d+)\]", place[1] if place else "")
    path = tuple(name or int(number) for name, number in parts)
    found.add(path, message[place.end() if place else 0 :].strip() or "has the wrong type")


def _check_values(lock: Lock, found: _Faults) -> None:
    seen: set[str] = set()
    for number, part in enumerate(lock.platforms):
        path: KeyPath = ("platforms", number)
        if part.platform not in PLATFORMS:
            found.add((*path, "platform"), f"{part.platform!r}", choices(part.platform, PLATFORMS))
        if part.platform in seen:
            found.add((*path, "platform"), f"{part.platform} occurs twice")
        seen.add(part.platform)
        if not 0 <= part.source_date_epoch < 1 << 32:
            found.add((*path, "source_date_epoch"), "must be seconds since 1970, and fit into 32 bits")
        for key in ("digest", "id"):
            if not re.fullmatch(_DIGEST, getattr(part.base, key)):
                found.add((*path, "base", key), "must be sha256: and 64 hex digits")
        if not (part.base.digest or part.base.id):
            found.add((*path, "base"), "must have a digest or an id")
        for index, deb in enumerate(part.apt):
            _check_package(deb, ".deb", (*path, "apt", index), found)
        for index, wheel in enumerate(part.pip):
            _check_package(wheel, ".whl", (*path, "pip", index), found)
            first = UV_STEP if part.request.uv else 0
            if not first <= wheel.step < len(part.request.pip):
                found.add((*path, "pip", index, "step"), f"there is no pip step {wheel.step} in the request")
            if not (wheel.url or wheel.kept):
                found.add((*path, "pip", index, "url"), "is missing, and the wheel is not a kept one")


def _check_package(one: LockedDeb | LockedWheel, suffix: str, path: KeyPath, found: _Faults) -> None:
    for key, (pattern, what) in _RULES.items():
        value = getattr(one, key, None)
        if value is not None and not re.fullmatch(pattern, value):
            found.add((*path, key), f"{value[:60]!r} {what}")
    if not one.file.endswith(suffix):
        found.add((*path, "file"), f"must end in {suffix}")
    if isinstance(one, LockedDeb) and (one.size_bytes < 0 or not one.url):
        found.add(path, "must have a URL and a size")

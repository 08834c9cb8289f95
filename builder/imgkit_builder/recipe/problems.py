"""Problems of files with their positions, and the position of a key in a TOML file."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from imgkit_entrypoints import secret_patterns, terminal
from imgkit_entrypoints.errors import UsageError, shortened

KeyPath = tuple[str | int, ...]
"""Path of a resolved value, for example ``("image", "pip", 0, "packages", 2)``."""

YAML_NAMES = {"platforms": "platform"}
"""Fields of the model whose name differs in YAML, where a single value may replace a list."""


SYSTEMS = "systems"
"""Folder of files that describe systems, in imgkit and at a site."""
_SHOWN = 75
"""Characters of the recipe's line that a problem shows before and after its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The place of a value; `line` and `column` count from 1, in characters."""

    file: Path
    line: int
    column: int

    def __str__(self) -> str:
        return f"{shown(self.file)}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem in a recipe."""

    position: Position
    key: str
    """Dotted, for example ``image.pip[0].packages[2]``; empty for the file as a whole."""
    what: str
    hint: str = ""
    """The allowed values, and the one that was probably meant."""
    source: str = ""
    """The line at `position`."""

    def __str__(self) -> str:
        text = f"{self.position}: {self.key}: {self.what}" if self.key else f"{self.position}: {self.what}"
        if self.hint:
            text += f"; {self.hint}"
        text = shortened(terminal.shown(text))
        if not self.source.strip():
            return text
        # A long line shows what is around the problem.
        at = self.position.column - 1
        start = max(0, at - _SHOWN) if len(self.source) > 2 * _SHOWN else 0
        before = terminal.shown(self.source[start:at])
        after = terminal.shown(self.source[at : start + 2 * _SHOWN])
        return f"{text}\n    {before}{after}\n    {' ' * len(before)}^"


class RecipeErrors(UsageError):
    """The error of an unusable recipe, or of another file `of` values; `problems` lists all its problems."""

    def __init__(self, problems: Iterable[Problem], *, of: str = "the recipe") -> None:
        self.problems = tuple(problems)
        self._of = of
        first = self.problems[0]
        super().__init__(first.what, where=str(first.position), hint=first.hint or None)

    def __str__(self) -> str:
        texts = [str(problem) for problem in self.problems]
        return texts[0] if len(texts) == 1 else "\n".join([f"{len(texts)} problems in {self._of}:", *texts])


@dataclass(slots=True, kw_only=True)
class Collector:
    """Collects problems while a recipe is read, so that one run reports all of them."""

    errors: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)
    lines: dict[Path, list[str]] = field(default_factory=dict)
    """Source lines of the files read so far."""
    digests: dict[Path, str] = field(default_factory=dict)
    """The sha256 of each file read so far."""
    shows: tuple[Path, ...] | None = None
    """Resolved folders whose files a problem may quote; None: all. A stranger's recipe can name any file."""

    def error(self, position: Position, path: KeyPath, what: str, hint: str = "") -> None:
        """Add a problem that makes the recipe unusable."""
        self._add(self.errors, "cannot be used", position, path, what, hint)

    def warn(self, position: Position, path: KeyPath, what: str, hint: str = "") -> None:
        """Add a problem that the user should look at."""
        self._add(self.warnings, "has warnings", position, path, what, hint)

    def may_show(self, file: Path) -> bool:
        """Whether a message may repeat what `file` holds."""
        try:
            return self.shows is None or any(file.resolve().is_relative_to(folder) for folder in self.shows)
        except (OSError, ValueError, RuntimeError):  # a NUL byte, or a circle of links
            return False

    def _add(
        self, to: list[Problem], how: str, position: Position, path: KeyPath, what: str, hint: str
    ) -> None:
        if self.shows is None or self.may_show(position.file):
            to.append(self._problem(position, path, what, hint))
            return
        start = Position(file=position.file, line=1, column=1)
        what = f"it {how}; nothing of a file outside {shown(self.shows[0])} is shown"
        if (hidden := Problem(position=start, key="", what=what, hint="look at the file itself")) not in to:
            to.append(hidden)

    def _problem(self, position: Position, path: KeyPath, what: str, hint: str) -> Problem:
        lines = self.lines.get(position.file, [])
        source = secret_patterns.masked(lines[position.line - 1]) if position.line <= len(lines) else ""
        return Problem(position=position, key=key_text(path), what=what, hint=hint, source=source)


def shown(file: Path) -> Path:
    """`file` relative to the working directory if it is below it, else unchanged."""
    try:
        return file.relative_to(Path.cwd())
    except (ValueError, OSError):
        return file


def place(positions: Mapping[KeyPath, Position], path: KeyPath, file: Path) -> str:
    """``file.yaml:12`` for the nearest stated value at or above `path`, else the name of `file`."""
    while path and path not in positions:
        path = path[:-1]
    found = positions.get(path)
    # A name may have a line break, and this is a comment in files that imgkit renders.
    return terminal.shown(f"{label(found.file)}:{found.line}" if found else file.name)


def label(file: Path) -> str:
    """Name of `file` for comments and tables; a system may have the name of a recipe."""
    return f"{SYSTEMS}/{file.name}" if file.parent.name == SYSTEMS else file.name


def key_text(path: KeyPath) -> str:
    """The dotted form with the names of the YAML file: ``image.pip[0].packages[2]``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{YAML_NAMES.get(part, part)}" if text else YAML_NAMES.get(part, part)
    return text


def nearest(word: str, allowed: Iterable[str]) -> str:
    """The word in `allowed` that was probably meant, or an empty string."""
    by_lower = {name.lower(): name for name in allowed}
    found = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else ""


def choices(word: str, allowed: Iterable[str]) -> str:
    """``allowed: b, a, c; did you mean b?``, sorted with the nearest word first."""
    names = sorted(allowed)
    near = nearest(word, names)
    if near:
        names.remove(near)
        names.insert(0, near)
    text = f"allowed: {', '.join(names)}"
    return f"{text}; did you mean {near}?" if near else text


def reason(error: Exception) -> str:
    """Return why a file cannot be used, without its path, which may be long."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


DEEPEST = 32
"""Tables and lists within each other, and parts of a dotted key: the time for them grows with the square."""
_LONG_KEY = re.compile(
    rf"""(?<![\w"'-])(?:(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){{{DEEPEST}}}"""
)
_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


class NotToml(UsageError, ValueError):
    """A text is not TOML, or beyond its limits; `line` and `column` count from 1."""

    def __init__(self, why: str, *, line: int, column: int) -> None:
        super().__init__(f"it is not TOML: {why}")
        self.line, self.column = line, column


def parse_toml(text: str) -> dict[str, Any]:
    """The values in `text`.

    Raises
    ------
    NotToml : it is not TOML, too deep, or an integer has more than TOML's 64 bits.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    if long := _LONG_KEY.search(text):
        line = text.count("\n", 0, long.start()) + 1
        raise NotToml(f"a key has more than {DEEPEST} parts", line=line, column=1)
    last = text.rstrip().count("\n") + 1
    try:
        found: dict[str, Any] = tomllib.loads(text)
        _check(found)
    except RecursionError:
        raise NotToml("its brackets are nested too deeply", line=last, column=1) from None
    except ValueError as error:
        place = _PLACE.search(str(error))
        line, column = (int(place[1]), int(place[2])) if place and place[1] else (last, 1)
        raise NotToml(_PLACE.sub("", str(error)), line=line, column=column) from error
    return found


def _check(found: dict[str, Any]) -> None:
    """Raise ValueError for what Python reads and TOML, or a reader of the values, does not take."""
    level: list[Any] = [found]
    for _ in range(DEEPEST):
        if any(isinstance(one, int) and not -(1 << 63) <= one < 1 << 63 for one in level):
            raise ValueError("an integer has more than 64 bits")
        level = [
            child
            for one in level
            if isinstance(one, dict | list)
            for child in (one.values() if isinstance(one, dict) else one)
        ]
    if level:
        raise RecursionError


def toml_positions(text: str) -> Iterator[tuple[KeyPath, int, int]]:
    """Path, line and column of each table in a TOML text, and of each key at the start of a statement.

    No parser of TOML gives positions. The text is one that `parse_toml` takes.
    """
    counts: dict[KeyPath, int] = {}
    table: KeyPath = ()
    for statement, line, column in _statements(text):
        if statement.startswith("["):
            names, is_item = _header(statement), statement.startswith("[[")
            table = ()
            for name in names:
                # A table below a list of tables belongs to its last item.
                table = (*table, counts[table]) if table in counts else table
                table = (*table, name)
            if is_item:
                counts[table] = counts.get(table, -1) + 1
                table = (*table, counts[table])
            yield table, line, column
        else:
            try:
                keys = parse_toml(statement)
            except NotToml:
                continue
            yield from (((*table, key), line, column) for key in keys)


_PIECE = re.compile(
    r'''"""(?:\\.|[^\\])*?"{3,5}|\'{3}.*?\'{3,5}|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'|\#[^\n]*|[\[{]|[\]}]|\n|[^"\'\#\[\]{}\n]+|.''',
    re.DOTALL,
)
"""A string, a comment, a bracket, a line end, or anything else: what ends a statement is a line end alone."""


def _statements(text: str) -> Iterator[tuple[str, int, int]]:
    """Each statement of the TOML `text` with its line and column; comments and empty lines are none."""
    depth, start, line, first = 0, 0, 1, 1
    for piece in _PIECE.finditer(text + "\n"):
        if piece[0] in ("[", "{"):
            depth += 1
        elif piece[0] in ("]", "}"):
            depth -= 1
        elif piece[0] == "\n" and depth <= 0:
            statement = text[start : piece.start()]
            if (bare := statement.lstrip()) and not bare.startswith("#"):
                yield bare, first, len(statement) - len(bare) + 1
            start, first, depth = piece.end(), line + 1, 0
        line += piece[0].count("\n")


def _header(statement: str) -> list[str]:
    """The names in ``[a.b]`` or ``[[a.b]]``."""
    try:
        found: Any = parse_toml(statement)
    except NotToml:
        return []
    names = []
    while found:
        ((name, found),) = found.items()
        found = found[0] if isinstance(found, list) else found
        names.append(name)
    return names

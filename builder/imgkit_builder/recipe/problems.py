"""Problems of files that a person wrote, with their positions; the words for keys and choices; TOML."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from imgkit_entrypoints import secret_patterns, terminal
from imgkit_entrypoints.errors import UsageError, shortened

KeyPath = tuple[str | int, ...]
"""Path of a resolved value, for example ``("image", "pip", 0, "packages", 2)``."""
ANY = "*"
"""Any key or index in a pattern of paths."""

SYSTEMS = "systems"
"""Folder of files that describe systems, in imgkit and at a site."""
_SHOWN = 75
"""Characters of the recipe's line that a problem shows before and after its place."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Position:
    """The place of a value; `line` and `column` count from 1, in characters; 0: the file as a whole."""

    file: Path
    line: int
    column: int

    def __str__(self) -> str:
        return f"{shown(self.file)}:{self.line}:{self.column}" if self.line else str(shown(self.file))


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
        text = ": ".join(filter(None, (str(self.position), self.key, self.what)))
        if self.hint:
            text += f"; {self.hint}"
        text = shortened(terminal.shown(text))
        if not self.source.strip():
            return text
        # A long line shows what is around the problem.
        index = self.position.column - 1
        start = max(0, index - _SHOWN) if len(self.source) > 2 * _SHOWN else 0
        before = terminal.shown(self.source[start:index])
        after = terminal.shown(self.source[index : start + 2 * _SHOWN])
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

    def error(self, position: Position, path: KeyPath, message: str, hint: str = "") -> None:
        """Add a problem that makes the recipe unusable."""
        self._add(self.errors, "it cannot be used", self._problem(position, path, message, hint))

    def warn(self, position: Position, path: KeyPath, message: str, hint: str = "") -> None:
        """Add a problem that the user should look at."""
        self._add(self.warnings, "it has warnings", self._problem(position, path, message, hint))

    def may_show(self, file: Path) -> bool:
        """Return whether a message may repeat what `file` holds."""
        try:
            return self.shows is None or any(file.resolve().is_relative_to(folder) for folder in self.shows)
        except (OSError, ValueError, RuntimeError):  # a NUL byte, or a circle of links
            return False

    def _add(self, problems: list[Problem], summary: str, problem: Problem) -> None:
        if self.shows is not None and not self.may_show(problem.position.file):
            start = Position(file=problem.position.file, line=1, column=1)
            message = f"{summary}; nothing of a file outside {shown(self.shows[0])} is shown"
            problem = Problem(position=start, key="", what=message, hint="look at the file itself")
            if problem in problems:
                return
        problems.append(problem)

    def _problem(self, position: Position, path: KeyPath, message: str, hint: str) -> Problem:
        lines = self.lines.get(position.file, [])
        has_source = 0 < position.line <= len(lines)
        # Logs of CI keep messages: the quoted line must not show a token that stands in it.
        source = secret_patterns.masked(lines[position.line - 1]) if has_source else ""
        return Problem(position=position, key=key_text(path), what=message, hint=hint, source=source)


def shown(file: Path) -> Path:
    """Return `file` relative to the working directory if it is below it, else unchanged."""
    try:
        return file.relative_to(Path.cwd())
    except (ValueError, OSError):
        return file


def nearest_position(positions: Mapping[KeyPath, Position], path: KeyPath) -> Position | None:
    """Return the position of the nearest stated value at or above `path`."""
    while path and path not in positions:
        path = path[:-1]
    return positions.get(path)


def place(positions: Mapping[KeyPath, Position], path: KeyPath, file: Path) -> str:
    """Return ``file.yaml:12`` for the nearest stated value at or above `path`, else the name of `file`."""
    position = nearest_position(positions, path)
    # A name may have a line break, and this is a comment in files that imgkit renders.
    return terminal.shown(f"{label(position.file)}:{position.line}" if position else file.name)


def label(file: Path) -> str:
    """Return the name of `file` for comments and tables; a system may have the name of a recipe."""
    return f"{SYSTEMS}/{file.name}" if file.parent.name == SYSTEMS else file.name


def key_text(path: KeyPath) -> str:
    """Return the dotted form: ``image.pip[0].packages[2]``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Return the one of `allowed` that was probably meant, or an empty string."""
    # Keys and names are lower-case; a person may write Apt or MN5.
    by_lower = {choice.lower(): choice for choice in allowed}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[matches[0]] if matches else ""


def choices(name: str, allowed: Iterable[str]) -> str:
    """Return ``allowed: b, a, c; did you mean b?``, sorted with the nearest first."""
    near = nearest(name, allowed := tuple(allowed))
    names = sorted(allowed, key=lambda choice: (choice != near, choice))
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

    def __init__(self, reason: str, *, line: int, column: int) -> None:
        super().__init__(f"it is not TOML: {reason}")
        self.line, self.column = line, column


def parse_toml(text: str) -> dict[str, Any]:
    """Return the values in `text`.

    Raises
    ------
    NotToml : it is not TOML, too deep, or an integer has more than TOML's 64 bits.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    # tomllib takes time with the square of a dotted key's length: this is looked for before it reads.
    if long := _LONG_KEY.search(text):
        line = text.count("\n", 0, long.start()) + 1
        raise NotToml(f"a key has more than {DEEPEST} parts", line=line, column=1)
    last = text.rstrip().count("\n") + 1
    try:
        values: dict[str, Any] = tomllib.loads(text)
        _check_limits(values)
    except RecursionError:
        raise NotToml("its brackets are nested too deeply", line=last, column=1) from None
    except ValueError as error:
        # Python 3.14 has attributes for it; before, only the message has the position.
        match = _PLACE.search(str(error))
        line, column = (int(match[1]), int(match[2])) if match and match[1] else (last, 1)
        raise NotToml(_PLACE.sub("", str(error)), line=line, column=column) from error
    return values


def parse_toml_file(text: str, file: Path, problems: Collector, hint: str) -> dict[str, Any]:
    """Return the values in `text`, the content of `file`, whose lines `problems` may then quote.

    Raises
    ------
    RecipeErrors : it is not TOML; says how to correct it by `hint`.
    """
    problems.lines[file] = text.split("\n")
    try:
        return parse_toml(text)
    except NotToml as error:
        problems.error(Position(file=file, line=error.line, column=error.column), (), error.what, hint)
        raise RecipeErrors(problems.errors, of=file.name) from error


def _check_limits(values: dict[str, Any]) -> None:
    """Raise ValueError for what Python reads and TOML, or a reader of the values, does not take."""
    level: list[Any] = [values]
    for _ in range(DEEPEST):
        if any(isinstance(value, int) and not -(1 << 63) <= value < 1 << 63 for value in level):
            raise ValueError("an integer has more than 64 bits")
        containers = [
            value.values() if isinstance(value, dict) else value
            for value in level
            if isinstance(value, dict | list)
        ]
        level = [child for container in containers for child in container]
    if level:
        raise RecursionError

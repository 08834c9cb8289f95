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
from imgkit_entrypoints.errors import UsageError, shorten_message

KeyPath = tuple[str | int, ...]
"""Path of a resolved value, for example ``("image", "pip", 0, "packages", 2)``."""
ANY = "*"
"""Any key or index in a pattern of paths."""

SYSTEMS = "systems"
"""Folder of files that describe systems, in imgkit and at a site."""
_CONTEXT_CHARACTERS = 75
"""How many characters of the recipe's line a problem shows before its column. It shows up to twice as many
in all."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Position:
    """The file, line and column of a value.

    Lines and columns count from 1. The line 0 means the file as a whole.
    """

    file: Path
    line: int
    column: int

    def __str__(self) -> str:
        file = str(shorten_path(self.file))
        if not self.line:
            return file
        return f"{file}:{self.line}:{self.column}"


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
        parts = [part for part in (str(self.position), self.key, self.what) if part]
        text = ": ".join(parts)
        if self.hint:
            text += f"; {self.hint}"
        # A recipe can hold control characters and texts of any length.
        text = shorten_message(terminal.escape_controls(text))
        if self.source.strip():
            text += _quote_line(self.source, self.position.column)
        return text


def _quote_line(line: str, column: int) -> str:
    """Return two further lines of a message: `line`, of which a long one is cut, and ``^`` below `column`."""
    index = column - 1
    start = 0
    if len(line) > 2 * _CONTEXT_CHARACTERS:
        start = max(0, index - _CONTEXT_CHARACTERS)
    end = start + 2 * _CONTEXT_CHARACTERS
    before = terminal.escape_controls(line[start:index])
    after = terminal.escape_controls(line[index:end])
    marker = " " * len(before) + "^"
    return f"\n    {before}{after}\n    {marker}"


def warning_lines(problems: Iterable[Problem]) -> tuple[str, ...]:
    """Return the lines to print for `problems`.

    Each problem begins with ``warning:`` and its place in a file.
    """
    lines: list[str] = []
    for problem in problems:
        lines += f"warning: {problem}".split("\n")
    return tuple(lines)


class RecipeErrors(UsageError):
    """The error of an unusable recipe, or of another file, which `of` names.

    It lists all `problems` of it.
    """

    def __init__(self, problems: Iterable[Problem], *, of: str = "the recipe") -> None:
        self.problems = tuple(problems)
        self._of = of
        first = self.problems[0]
        super().__init__(first.what, where=str(first.position), hint=first.hint or None)

    def __str__(self) -> str:
        texts = [str(problem) for problem in self.problems]
        if len(texts) == 1:
            return texts[0]
        return "\n".join([f"{len(texts)} problems in {self._of}:", *texts])


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
    """Resolved folders whose files a message may quote; None: all files.

    A recipe of unknown origin can name any file of this machine, and a message must not reveal a secret.
    """

    def error(self, position: Position, path: KeyPath, message: str, hint: str = "") -> None:
        """Add a problem that makes the recipe unusable."""
        self._add(self.errors, "it cannot be used", self._problem(position, path, message, hint))

    def warn(self, position: Position, path: KeyPath, message: str, hint: str = "") -> None:
        """Add a problem that the user should look at."""
        self._add(self.warnings, "it has warnings", self._problem(position, path, message, hint))

    def may_show(self, file: Path) -> bool:
        """Return whether a message may quote lines of `file`, see `shows`."""
        try:
            return self.shows is None or any(file.resolve().is_relative_to(folder) for folder in self.shows)
        except (OSError, ValueError, RuntimeError):  # a NUL byte, or a circle of links
            return False

    def _add(self, problems: list[Problem], summary: str, problem: Problem) -> None:
        """Add `problem` to the list `problems`.

        If nothing of its file may be shown, add the `summary` instead, such as ``it cannot be used``.
        """
        if self.shows is None or self.may_show(problem.position.file):
            problems.append(problem)
            return
        # One problem in place of all of them, so that not even their number says something about the file.
        file_start = Position(file=problem.position.file, line=1, column=1)
        message = f"{summary}; nothing of a file outside {shorten_path(self.shows[0])} is shown"
        placeholder = Problem(position=file_start, key="", what=message, hint="look at the file itself")
        if placeholder not in problems:
            problems.append(placeholder)

    def _problem(self, position: Position, path: KeyPath, message: str, hint: str) -> Problem:
        """Return a problem that quotes the line at `position`, if the file has been read."""
        source = ""
        lines = self.lines.get(position.file, [])
        if 0 < position.line <= len(lines):
            # Messages end up in logs of CI, so a token in the quoted line is masked.
            source = secret_patterns.mask_secrets(lines[position.line - 1])
        return Problem(position=position, key=key_text(path), what=message, hint=hint, source=source)


def shorten_path(file: Path) -> Path:
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


def stated_at(positions: Mapping[KeyPath, Position], path: KeyPath, file: Path) -> str:
    """Return ``file.yaml:12`` for the nearest stated value at or above `path`, else the name of `file`."""
    position = nearest_position(positions, path)
    text = file.name
    if position:
        text = f"{file_label(position.file)}:{position.line}"
    # A name may have a line break, and this is a comment in files that imgkit renders.
    return terminal.escape_controls(text)


def file_label(file: Path) -> str:
    """Return the name of `file` for comments and tables: ``mine.yaml``, or ``systems/mn5.yaml`` for a system.

    A system and a recipe may have the same name.
    """
    if file.parent.name != SYSTEMS:
        return file.name
    return f"{SYSTEMS}/{file.name}"


def key_text(path: KeyPath) -> str:
    """Return the dotted form: ``image.pip[0].packages[2]``."""
    text = ""
    for key in path:
        if isinstance(key, int):
            text += f"[{key}]"
        else:
            text += f".{key}"
    return text.removeprefix(".")


def nearest_name(name: str, allowed: Iterable[str]) -> str:
    """Return the one of `allowed` that was probably meant, or an empty string."""
    # Keys and names are lower-case; a person may write Apt or MN5.
    by_lower = {choice.lower(): choice for choice in allowed}
    for match in difflib.get_close_matches(name.lower(), by_lower, n=1):
        return by_lower[match]
    return ""


def allowed_hint(name: str, allowed: Iterable[str]) -> str:
    """Return ``allowed: b, a, c; did you mean b?``, sorted with the nearest to `name` first."""
    names = sorted(allowed)
    nearest = nearest_name(name, names)
    if not nearest:
        return f"allowed: {', '.join(names)}"
    names.sort(key=lambda choice: choice != nearest)  # a stable sort: the others keep their order
    return f"allowed: {', '.join(names)}; did you mean {nearest}?"


def error_reason(error: Exception) -> str:
    """Return why a file cannot be used, without its path, which may be long."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)


DEEPEST = 32
"""Limit for tables and lists within each other, and for the parts of a dotted key.

The time that tomllib takes grows with the square of both.
"""
_LONG_KEY = re.compile(
    rf"""(?<![\w"'-])(?:(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){{{DEEPEST}}}"""
)
_TOML_POSITION = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


class NotToml(UsageError, ValueError):
    """A text is not TOML, or beyond its limits. `line` and `column` count from 1."""

    def __init__(self, reason: str, *, line: int, column: int) -> None:
        super().__init__(f"it is not TOML: {reason}")
        self.line = line
        self.column = column


def parse_toml(text: str) -> dict[str, Any]:
    """Return the values in the TOML `text`. A hostile text cannot take hours or fill the memory.

    Raises
    ------
    NotToml : the text is not TOML, is nested too deeply, or has an integer of more than 64 bits.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    # Checked first: tomllib could take hours to read a key with very many parts.
    long_key = _LONG_KEY.search(text)
    if long_key is not None:
        line = text.count("\n", 0, long_key.start()) + 1
        raise NotToml(f"a key has more than {DEEPEST} parts", line=line, column=1)
    last_line = text.rstrip().count("\n") + 1
    try:
        values: dict[str, Any] = tomllib.loads(text)
        _check_limits(values)
    except RecursionError:
        raise NotToml("its brackets are nested too deeply", line=last_line, column=1) from None
    except ValueError as error:
        raise _syntax_error(str(error), last_line) from error
    return values


def _syntax_error(message: str, last_line: int) -> NotToml:
    """Return the error for a `message` of tomllib: ``Invalid value (at line 3, column 7)``.

    The position is taken out of the message, since only Python 3.14 has attributes for it. `last_line` is
    used if the message states none.
    """
    reason = _TOML_POSITION.sub("", message)
    match = _TOML_POSITION.search(message)
    if match is None or not match[1]:
        return NotToml(reason, line=last_line, column=1)
    return NotToml(reason, line=int(match[1]), column=int(match[2]))


def parse_toml_file(text: str, file: Path, problems: Collector, hint: str) -> dict[str, Any]:
    """Return the values in `text`, the content of the TOML file `file`.

    `problems` receives the lines of the file, so that later messages can quote them.

    Raises
    ------
    RecipeErrors : the text is not TOML. The error ends with `hint`, which says how to correct the file.
    """
    problems.lines[file] = text.split("\n")
    try:
        return parse_toml(text)
    except NotToml as error:
        problems.error(Position(file=file, line=error.line, column=error.column), (), error.what, hint)
        raise RecipeErrors(problems.errors, of=file.name) from error


def _check_limits(value: Any, depth: int = 0) -> None:
    """Refuse values that Python's TOML reader accepts and other programs do not.

    `depth` is the number of tables and lists around `value`.

    Raises
    ------
    ValueError : an integer has more than 64 bits, the limit of TOML.
    RecursionError : more than `DEEPEST` tables and lists lie within each other.
    """
    if depth == DEEPEST:
        raise RecursionError
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise ValueError("an integer has more than 64 bits")
    children: Iterable[Any] = ()
    if isinstance(value, dict):
        children = value.values()
    elif isinstance(value, list):
        children = value
    for child in children:
        _check_limits(child, depth + 1)

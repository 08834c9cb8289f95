"""Problems in files that a person wrote, the text of messages about them, and a TOML parser."""

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
"""Matches any key or index in a pattern of a key path."""

SYSTEMS = "systems"
"""The name of the folder with files that describe systems, in imgkit and at a site."""
_CONTEXT_CHARACTERS = 75
"""How many characters of a long line a message shows before the column of the problem. In all, it shows up to
twice as many."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Position:
    """The file, line and column of a value.

    Lines and columns count from 1. Line 0 means the file as a whole.
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
    """The dotted key, such as ``image.pip[0].packages[2]``. Empty for the file as a whole."""
    what: str
    hint: str = ""
    """What to do about it, often the allowed values and the one that was probably meant."""
    source: str = ""
    """The text of the line at `position`."""

    def __str__(self) -> str:
        parts = [part for part in (str(self.position), self.key, self.what) if part]
        text = ": ".join(parts)
        if self.hint:
            text += f"; {self.hint}"
        # A recipe can contain control characters, and texts of any length.
        text = shorten_message(terminal.escape_controls(text))
        if self.source.strip():
            text += _quote_line(self.source, self.position.column)
        return text


def _quote_line(line: str, column: int) -> str:
    """Return two lines for the end of a message: `line`, and a ``^`` below `column`.

    A long line is cut before and after the column.
    """
    marker_index = column - 1
    start = 0
    if len(line) > 2 * _CONTEXT_CHARACTERS:
        start = max(0, marker_index - _CONTEXT_CHARACTERS)
    end = start + 2 * _CONTEXT_CHARACTERS
    before = terminal.escape_controls(line[start:marker_index])
    after = terminal.escape_controls(line[marker_index:end])
    marker = " " * len(before) + "^"
    return f"\n    {before}{after}\n    {marker}"


def warning_lines(problems: Iterable[Problem]) -> tuple[str, ...]:
    """Return the lines to print for `problems`. Each problem begins with ``warning:`` and its position."""
    lines: list[str] = []
    for problem in problems:
        lines += f"warning: {problem}".split("\n")
    return tuple(lines)


class RecipeErrors(UsageError):
    """The error for a recipe that cannot be used. It lists all `problems` of the recipe.

    For another kind of file, `of` is the text that names the file in the message.
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
    """Collects problems while a recipe is read, so that a single run reports all of them."""

    errors: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)
    lines: dict[Path, list[str]] = field(default_factory=dict)
    """The lines of the files read so far."""
    digests: dict[Path, str] = field(default_factory=dict)
    """The sha256 of each file read so far."""
    visible_folders: tuple[Path, ...] | None = None
    """Resolved folders whose files a message may quote. None allows all files.

    A recipe of unknown origin can name any file on this machine, and a message must not reveal a secret.
    """

    def error(self, position: Position, path: KeyPath, message: str, hint: str = "") -> None:
        """Add a problem that makes the recipe unusable."""
        self._add(self.errors, "it cannot be used", self._make_problem(position, path, message, hint))

    def warn(self, position: Position, path: KeyPath, message: str, hint: str = "") -> None:
        """Add a problem that the user should look at."""
        self._add(self.warnings, "it has warnings", self._make_problem(position, path, message, hint))

    def may_show(self, file: Path) -> bool:
        """Return whether a message may quote lines of `file`, because it is in one of the visible folders."""
        if self.visible_folders is None:  # all files are visible
            return True
        try:
            return any(file.resolve().is_relative_to(folder) for folder in self.visible_folders)
        except (OSError, ValueError, RuntimeError):  # a NUL byte, or links that form a circle
            return False

    def _add(self, problems: list[Problem], summary: str, problem: Problem) -> None:
        """Add `problem` to the list `problems`, without details if its file must not be shown.

        In that case, a placeholder with the text `summary`, such as ``it cannot be used``, takes its place.
        """
        # None: all files are visible.
        if self.visible_folders is None or self.may_show(problem.position.file):
            problems.append(problem)
            return
        # A single placeholder stands for all problems of the file, since even their number would reveal
        # something.
        file_start = Position(file=problem.position.file, line=1, column=1)
        first_folder = shorten_path(self.visible_folders[0])
        message = f"{summary}; nothing of a file outside {first_folder} is shown"
        placeholder = Problem(position=file_start, key="", what=message, hint="look at the file itself")
        if placeholder not in problems:
            problems.append(placeholder)

    def _make_problem(self, position: Position, path: KeyPath, message: str, hint: str) -> Problem:
        """Return a problem. If the file has been read, the problem quotes the line at `position`."""
        source = ""
        lines = self.lines.get(position.file, [])
        if 0 < position.line <= len(lines):
            # Messages end up in CI logs, so secrets in the quoted line are masked.
            source = secret_patterns.mask_secrets(lines[position.line - 1])
        return Problem(position=position, key=key_text(path), what=message, hint=hint, source=source)


def shorten_path(file: Path) -> Path:
    """Return `file` relative to the working directory. A path outside of it is returned unchanged."""
    try:
        return file.relative_to(Path.cwd())
    except (ValueError, OSError):
        return file


def nearest_position(positions: Mapping[KeyPath, Position], path: KeyPath) -> Position | None:
    """Return the position of `path`, or of the nearest key above it that a file sets."""
    while path and path not in positions:
        path = path[:-1]
    return positions.get(path)


def stated_at(positions: Mapping[KeyPath, Position], path: KeyPath, file: Path) -> str:
    """Return ``file.yaml:12``, the position of `path` or of the nearest key above it, without the column.

    If no file sets such a key, return the name of `file`.
    """
    position = nearest_position(positions, path)
    label = file.name
    if position:
        label = f"{file_label(position.file)}:{position.line}"
    # The result is also written into comments of rendered files. A line break in a file's name would end the
    # comment.
    return terminal.escape_controls(label)


def file_label(file: Path) -> str:
    """Return the name of `file` for comments and tables: ``mine.yaml``.

    For a system, the name includes the folder, as in ``systems/mn5.yaml``, because a recipe may have the same
    name.
    """
    if file.parent.name != SYSTEMS:
        return file.name
    return f"{SYSTEMS}/{file.name}"


def key_text(path: KeyPath) -> str:
    """Return a key path in dotted form, such as ``image.pip[0].packages[2]``."""
    dotted_key = ""
    for key in path:
        if isinstance(key, int):
            dotted_key += f"[{key}]"
        else:
            dotted_key += f".{key}"
    return dotted_key.removeprefix(".")


def nearest_name(name: str, allowed: Iterable[str]) -> str:
    """Return the name in `allowed` that was probably meant by `name`, or an empty text."""
    # Compare in lower case, because a person may write Apt or MN5.
    by_lower = {choice.lower(): choice for choice in allowed}
    for match in difflib.get_close_matches(name.lower(), by_lower, n=1):
        return by_lower[match]
    return ""


def allowed_hint(name: str, allowed: Iterable[str]) -> str:
    """Return a hint such as ``allowed: b, a, c; did you mean b?``.

    The allowed names are sorted, with the one most similar to `name` first.
    """
    names = sorted(allowed)
    nearest = nearest_name(name, names)
    if not nearest:
        return f"allowed: {', '.join(names)}"
    names.sort(key=lambda choice: choice != nearest)  # the sort is stable: all other names keep their order
    return f"allowed: {', '.join(names)}; did you mean {nearest}?"


def error_reason(error: Exception) -> str:
    """Return why a file cannot be used, without the path of the file, which may be long."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)


DEEPEST = 32
"""The limit for the nesting of tables and lists, and for the parts of a dotted key. The time that tomllib
needs grows with the square of both."""
_LONG_KEY = re.compile(
    rf"""(?<![\w"'-])(?:(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){{{DEEPEST}}}"""
)
_TOML_POSITION = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


class NotToml(UsageError, ValueError):
    """A text is not TOML, or exceeds a limit. `line` and `column` count from 1."""

    def __init__(self, reason: str, *, line: int, column: int) -> None:
        super().__init__(f"it is not TOML: {reason}")
        self.line = line
        self.column = column


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a TOML text safely: a hostile text can neither take hours nor fill the memory.

    Raises
    ------
    NotToml : the text is not TOML, is nested too deeply, or has an integer of more than 64 bits.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    # Check this first, because tomllib could take hours to read a key with very many parts.
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
        raise _make_syntax_error(str(error), last_line) from error
    return values


def _make_syntax_error(message: str, last_line: int) -> NotToml:
    """Return the error for a `message` of tomllib, such as ``Invalid value (at line 3, column 7)``.

    The position is parsed from the message, because only Python 3.14 has attributes for it. `last_line` is
    used if the message contains no line.
    """
    reason = _TOML_POSITION.sub("", message)
    # At the end of the file, the message has words instead of numbers, so the first group is empty.
    match = _TOML_POSITION.search(message)
    if match is None or not match[1]:
        return NotToml(reason, line=last_line, column=1)
    return NotToml(reason, line=int(match[1]), column=int(match[2]))


def parse_toml_file(text: str, file: Path, problems: Collector, hint: str) -> dict[str, Any]:
    """Parse `text`, the content of the TOML file `file`.

    `problems` receives the lines of the file, so that later messages can quote them.

    Raises
    ------
    RecipeErrors : the text is not TOML. The error ends with `hint`, which says how to correct the file, and
        also lists the problems found before.
    """
    problems.lines[file] = text.split("\n")
    try:
        return parse_toml(text)
    except NotToml as error:
        problems.error(Position(file=file, line=error.line, column=error.column), (), error.what, hint)
        raise RecipeErrors(problems.errors, of=file.name) from error


def _check_limits(value: Any, depth: int = 0) -> None:
    """Raise an error for values that Python's TOML parser accepts although other programs do not.

    `depth` is the number of tables and lists around `value`.

    Raises
    ------
    ValueError : an integer has more than 64 bits, the limit of TOML.
    RecursionError : tables and lists are nested more than `DEEPEST` levels deep.
    """
    # The caller treats this error like the RecursionError that a parser raises.
    if depth == DEEPEST:
        raise RecursionError
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise ValueError("an integer has more than 64 bits")
    # Only tables and lists contain further values.
    children: Iterable[Any] = ()
    if isinstance(value, dict):
        children = value.values()
    elif isinstance(value, list):
        children = value
    for child in children:
        _check_limits(child, depth + 1)

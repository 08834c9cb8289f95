"""Reads TOML on every Python. Standard library only, where that is 3.11 or newer."""

from __future__ import annotations

import re
import sys
from typing import Any

from imgkit_entrypoints.errors import ToolMissing, UsageError

DEEPEST = 32
"""Tables and lists within each other, and parts of a dotted key: the time for them grows with the square."""
_LONG_KEY = re.compile(
    rf"""(?<![\w"'-])(?:(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){{{DEEPEST}}}"""
)
_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


class NotToml(UsageError, ValueError):
    """A text is not TOML, or beyond its limits; `line` and `column` count from 1."""

    def __init__(self, why: str, *, line: int, column: int) -> None:
        super().__init__(f"it is no TOML: {why}")
        self.line, self.column = line, column


def parse(text: str) -> dict[str, Any]:
    """The values in `text`.

    Raises
    ------
    NotToml : it is not TOML, too deep, or an integer has more than TOML's 64 bits.
    ToolMissing : this Python has no reader of TOML, as the one-file tool brings none.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib
        except ModuleNotFoundError:
            raise ToolMissing(
                f"Python {sys.version_info[0]}.{sys.version_info[1]} cannot read TOML",
                where=sys.executable,
                hint="run imgkit with Python 3.11 or newer, or: python3 -m pip install --user tomli",
            ) from None
    if long := _LONG_KEY.search(text):
        line = text.count("\n", 0, long.start()) + 1
        raise NotToml(f"a key has more than {DEEPEST} parts", line=line, column=1)
    last = text.rstrip().count("\n") + 1
    try:
        found: dict[str, Any] = tomllib.loads(text)
        _check(found)
    except RecursionError:
        raise NotToml("its brackets lie too deep within each other", line=last, column=1) from None
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

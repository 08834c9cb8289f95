"""Command lines: a parser that raises, and numbers with clear errors."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from imgkit_entrypoints.errors import UsageError


class Parser(argparse.ArgumentParser):
    """A parser whose errors are exceptions, so that ``--dry-run`` shows them like all others."""

    def parse_args(  # type: ignore[override]  # no caller gives a namespace of a class of its own
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        given = sys.argv[1:] if args is None else args
        try:
            found, unknown = self.parse_known_args(given, namespace)
        except UsageError as error:
            # argparse takes the value of an unknown option for a positional argument: name the option.
            named = tuple(f"argument {one.metavar}:" for one in self._actions if not one.option_strings)
            options = [word for word in given if word.startswith("--") and not self._knows(word)]
            if options and str(error).startswith(named):
                self.error(self._unknown(options))
            raise
        if unknown:
            self.error(self._unknown(unknown))
        return found

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"{self.prog} --help")

    def _knows(self, word: str) -> bool:
        return word == "--" or word.partition("=")[0] in self._option_string_actions

    def _unknown(self, words: Sequence[str]) -> str:
        options = [word.partition("=")[0] for word in words if word.startswith("-")]
        if not options:
            return f"unexpected argument{'s' * (len(words) > 1)} {' '.join(words)}"
        shown = (one for one in self._actions if one.help != argparse.SUPPRESS)
        known = [flag for action in shown for flag in action.option_strings if flag.startswith("--")]
        near = [found for one in options for found in difflib.get_close_matches(one, known, n=1)]
        said = f"unknown option{'s' * (len(options) > 1)} {', '.join(options)}"
        return f"{said}; did you mean {', '.join(dict.fromkeys(near))}?" if near else said


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What an option needs to have an effect."""

    option: str
    """The option, or a positional argument by its metavar."""
    why: str
    """Why it has no effect otherwise: ``without --optimizer sgd``, ``with --compute``."""
    met: Callable[[argparse.Namespace], object]


def refuse_unused(parser: argparse.ArgumentParser, found: argparse.Namespace, needs: Iterable[Need]) -> None:
    """Raise UsageError for options in `found` that are not at their default and have no effect."""
    defaults = parser.parse_args([])
    places = {
        name: action.dest for action in parser._actions for name in action.option_strings or (action.metavar,)
    }
    unused: dict[str, list[str]] = {}
    for need in needs:
        place = places[need.option]
        if getattr(found, place) != getattr(defaults, place) and not need.met(found):
            unused.setdefault(need.why, []).append(need.option)
    if unused:
        raise UsageError(
            "; ".join(f"{', '.join(options)} would have no effect {why}" for why, options in unused.items()),
            hint="remove the option, or add what it needs",
        )


def natural(text: str) -> int:
    """Parse a whole number that is at least 0."""
    return _whole(text, 0)


def positive(text: str) -> int:
    """Parse a whole number that is at least 1."""
    return _whole(text, 1)


def duration(text: str) -> int:
    """Parse ``90``, ``90s``, ``50m`` or ``1h30m`` into seconds."""
    found = re.fullmatch(r"(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9})s?)?", text, re.ASCII)
    if not text or found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 90, 90s, 50m or 1h30m")
    hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return hours * 3600 + minutes * 60 + seconds


def digits(text: str) -> int | None:
    """The number of at most 18 ASCII digits; None for any other text.

    str.isdigit also takes ``²``, which int refuses; and older Pythons take hours for a million digits.
    """
    return int(text) if 0 < len(text) <= 18 and text.isascii() and text.isdigit() else None


def _whole(text: str, least: int) -> int:
    value = digits(text)
    if value is None or value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return value

"""Command lines: a parser that raises, and numbers with clear errors."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NoReturn

from imgkit_entrypoints.errors import UsageError


class Parser(argparse.ArgumentParser):
    """A parser whose errors are exceptions, so that ``--dry-run`` shows them like all others."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"{self.prog} --help")


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

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
        argv = sys.argv[1:] if args is None else args
        try:
            options, unknown = self.parse_known_args(argv, namespace)
        except UsageError as error:
            # argparse takes the value of an unknown option for a positional argument: name the option.
            prefixes = tuple(
                f"argument {action.metavar}:" for action in self._actions if not action.option_strings
            )
            flags = {*self._option_string_actions, "--"}
            unknown = [arg for arg in argv if arg.startswith("--") and arg.partition("=")[0] not in flags]
            if unknown and str(error).startswith(prefixes):
                self.error(self._unknown(unknown))
            raise
        if unknown:
            self.error(self._unknown(unknown))
        return options

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"{self.prog} --help")

    def _unknown(self, args: Sequence[str]) -> str:
        options = [arg.partition("=")[0] for arg in args if arg.startswith("-")]
        if not options:
            return f"unexpected argument{'s' * (len(args) > 1)} {' '.join(args)}"
        visible = (action for action in self._actions if action.help != argparse.SUPPRESS)
        flags = [flag for action in visible for flag in action.option_strings if flag.startswith("--")]
        matches = [match for option in options for match in difflib.get_close_matches(option, flags, n=1)]
        message = f"unknown option{'s' * (len(options) > 1)} {', '.join(options)}"
        return f"{message}; did you mean {', '.join(dict.fromkeys(matches))}?" if matches else message


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What an option needs to have an effect."""

    option: str
    """The option, or a positional argument by its metavar."""
    reason: str
    """Why it has no effect otherwise: ``without --optimizer sgd``, ``with --compute``."""
    met: Callable[[argparse.Namespace], object]


def refuse_unused(
    parser: argparse.ArgumentParser, options: argparse.Namespace, needs: Iterable[Need]
) -> None:
    """Raise UsageError for options that are not at their default and have no effect."""
    defaults = parser.parse_args([])
    fields = {
        name: action.dest for action in parser._actions for name in action.option_strings or (action.metavar,)
    }
    unused: dict[str, list[str]] = {}
    for need in needs:
        field = fields[need.option]
        if getattr(options, field) != getattr(defaults, field) and not need.met(options):
            unused.setdefault(need.reason, []).append(need.option)
    if unused:
        effects = (f"{', '.join(names)} would have no effect {reason}" for reason, names in unused.items())
        raise UsageError("; ".join(effects), hint="remove the option, or add what it needs")


def natural(text: str, least: int = 0) -> int:
    """Parse a whole number that is at least 0."""
    value = digits(text)
    if value is None or value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return value


def positive(text: str) -> int:
    """Parse a whole number that is at least 1."""
    return natural(text, 1)


def duration(text: str) -> int:
    """Parse ``90``, ``90s``, ``50m`` or ``1h30m`` into seconds."""
    match = re.fullmatch(r"(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9})s?)?", text, re.ASCII)
    if not text or match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 90, 90s, 50m or 1h30m")
    hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return hours * 3600 + minutes * 60 + seconds


def digits(text: str) -> int | None:
    """Return the number of at most 18 ASCII digits; None for any other text.

    str.isdigit also takes ``²``, which int refuses; and older Pythons take hours for a million digits.
    """
    return int(text) if 0 < len(text) <= 18 and text.isascii() and text.isdigit() else None

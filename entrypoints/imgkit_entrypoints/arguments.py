"""Command lines: how an option is declared, a parser that raises, and numbers with clear errors."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from imgkit_entrypoints.errors import UsageError


@dataclass(frozen=True, slots=True)
class Option:
    """An option or a positional argument of a ``dist-*`` command, for argparse.

    ``Option("--port", "torchrun's port on the head", port, "PORT", unset="from the job id")``
    """

    names: str
    """The spellings in the help, ``--verbose -v``, or the name of a positional argument."""
    help: str
    """The default is added to it."""
    type: Callable[[str], object] | tuple[str, ...] = str
    """Parses the value, or lists all values."""
    metavar: str | None = None
    _: dataclasses.KW_ONLY
    default: object = None
    unset: str = ""
    """What the help calls the default; empty: `default` itself."""
    action: Any = "store"
    """As of argparse: ``store_true`` makes a switch."""
    nargs: str | None = None
    dest: str | None = None
    """Name of the parsed value; None: derived from the option's name."""
    aliases: tuple[str, ...] = ()
    """More spellings, which the help does not show."""
    heading: str = ""
    """Title of a new group in the help, which this option and those after it belong to."""
    one_of: str = ""
    """Only one option with the same text here may be given."""

    def keywords(self) -> dict[str, Any]:
        """Return the keywords of argparse's ``add_argument``."""
        keywords = {
            name: getattr(self, name)
            for name in ("help", "metavar", "default", "action", "nargs", "dest")
            if getattr(self, name) is not None
        }
        if self.action in ("store", "append"):
            keywords["choices" if isinstance(self.type, tuple) else "type"] = self.type
        default = self.unset or self.default
        if self.action == "store" and default is not None:
            keywords["help"] = f"{self.help} (default: {default})"
        return keywords


def add_options(parser: argparse.ArgumentParser, options: Iterable[Option]) -> None:
    """Add the options to a parser, below their headings in its help."""
    group: argparse._ActionsContainer = parser
    exclusive: dict[str, argparse._ActionsContainer] = {}
    for option in options:
        if option.heading:
            group = parser.add_argument_group(option.heading)
        target = group
        if option.one_of:
            if option.one_of not in exclusive:
                exclusive[option.one_of] = group.add_mutually_exclusive_group()
            target = exclusive[option.one_of]
        action = target.add_argument(*option.names.split(), **option.keywords())
        if option.aliases:
            hidden = {"dest": action.dest, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
            target.add_argument(*option.aliases, **option.keywords() | hidden)


def option(*args: Any, **keywords: Any) -> Any:
    """Return a dataclass field for the value of an `Option` with these arguments."""
    return dataclasses.field(metadata={"option": Option(*args, **keywords)})


def declared_options(kind: Any) -> Iterator[Option]:
    """Yield the options of the fields of dataclass `kind`; the parsed values have the names of the fields."""
    for field in dataclasses.fields(kind):
        declaration: Option = field.metadata["option"]
        if declaration.names.startswith("-"):  # argparse refuses a name for a positional argument
            declaration = dataclasses.replace(declaration, dest=field.name)
        yield declaration


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


def parse_natural(text: str, least: int = 0) -> int:
    """Parse a whole number that is at least 0."""
    value = parse_digits(text)
    if value is None or value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return value


def parse_positive(text: str) -> int:
    """Parse a whole number that is at least 1."""
    return parse_natural(text, 1)


def parse_duration(text: str) -> int:
    """Parse ``90``, ``90s``, ``50m`` or ``1h30m`` into seconds."""
    match = re.fullmatch(r"(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9})s?)?", text, re.ASCII)
    if not text or match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 90, 90s, 50m or 1h30m")
    hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return hours * 3600 + minutes * 60 + seconds


def parse_digits(text: str) -> int | None:
    """Return the number of at most 18 ASCII digits; None for any other text.

    str.isdigit also takes ``²``, which int refuses; and older Pythons take hours for a million digits.
    """
    return int(text) if 0 < len(text) <= 18 and text.isascii() and text.isdigit() else None

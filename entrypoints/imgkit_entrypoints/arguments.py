"""Declare and parse the options of the ``dist-*`` commands.

argparse does the parsing. This module adds a declaration of options as values, a parser that raises
`UsageError` instead of ending the process, and functions that parse numbers and raise clear errors.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from imgkit_entrypoints.errors import UsageError


@dataclass(frozen=True, slots=True)
class Option:
    """An option or a positional argument of a ``dist-*`` command, as arguments for argparse.

    An example is ``Option("--port", "torchrun's port on the head", port, "PORT", unset="from the job id")``.
    """

    names: str
    """The spellings in the help, such as ``--verbose -v``, or the name of a positional argument."""
    help: str
    """The help text. The default value is appended to it."""
    type: Callable[[str], object] | tuple[str, ...] = str
    """The function that parses the value, or a tuple of all allowed values."""
    metavar: str | None = None
    _: dataclasses.KW_ONLY
    default: object = None
    unset: str = ""
    """Description of the default in the help, such as ``from the job id``. If empty, `default` is shown."""
    action: Any = "store"
    """The action of argparse. With ``store_true``, the option is a switch."""
    nargs: str | None = None
    dest: str | None = None
    """Attribute for the parsed value. With None, argparse derives it from the option's name."""
    aliases: tuple[str, ...] = ()
    """Further spellings, which the help does not show."""
    heading: str = ""
    """Title of a new group in the help, which begins with this option."""
    one_of: str = ""
    """Name of a group of options that exclude each other."""

    def keywords(self) -> dict[str, Any]:
        """Return the keyword arguments for argparse's ``add_argument``, with the default in the help text."""
        keywords = {}
        for name in ("help", "metavar", "default", "action", "nargs", "dest"):
            if getattr(self, name) is not None:
                keywords[name] = getattr(self, name)
        # argparse refuses a type for actions without a value, such as store_true.
        if self.action in ("store", "append"):
            kind = "choices" if isinstance(self.type, tuple) else "type"
            keywords[kind] = self.type
        # `unset` describes what happens without the option, if its default is not a simple value.
        default = self.unset or self.default
        if self.action == "store" and default is not None:
            keywords["help"] = f"{self.help} (default: {default})"
        return keywords


def add_options(parser: argparse.ArgumentParser, options: Iterable[Option]) -> None:
    """Add `options` to a parser, with the groups in which the help shows them."""
    # An option with a heading begins a group, and the options after it belong to the same group.
    group: argparse._ActionsContainer = parser
    exclusive: dict[str, argparse._ActionsContainer] = {}
    for option in options:
        if option.heading:
            group = parser.add_argument_group(option.heading)
        container = group
        if option.one_of:  # argparse accepts only one of the options with the same value of `one_of`
            if option.one_of not in exclusive:
                exclusive[option.one_of] = group.add_mutually_exclusive_group()
            container = exclusive[option.one_of]
        action = container.add_argument(*option.names.split(), **option.keywords())
        # argparse shows all spellings of an option. So the hidden spellings become a separate option without
        # help, which stores its value in the same attribute.
        if option.aliases:
            hidden = {"dest": action.dest, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
            container.add_argument(*option.aliases, **option.keywords() | hidden)


def option(*args: Any, **keywords: Any) -> Any:
    """Return a dataclass field for the value of an option. The arguments are those of `Option`."""
    return dataclasses.field(metadata={"option": Option(*args, **keywords)})


def declared_options(kind: Any) -> Iterator[Option]:
    """Yield the options of the dataclass `kind`, whose fields were created with `option`.

    The parsed value of each option gets the name of its field.
    """
    for field in dataclasses.fields(kind):
        declaration: Option = field.metadata["option"]
        if declaration.names.startswith("-"):  # argparse refuses a name for a positional argument
            declaration = dataclasses.replace(declaration, dest=field.name)
        yield declaration


class Parser(argparse.ArgumentParser):
    """A parser that raises `UsageError` for a wrong command line, instead of ending the process.

    A dry run with ``--json`` can then print the error.
    """

    def parse_args(  # type: ignore[override]  # no caller gives a namespace
        self, args: Sequence[str] | None = None
    ) -> argparse.Namespace:
        """Parse `args`, or the arguments of this process, and return the options.

        Raises
        ------
        UsageError : an argument is wrong or unknown.
        """
        argv = sys.argv[1:] if args is None else args
        try:
            options, unknown = self.parse_known_args(argv)
        except UsageError as error:
            self._refuse_unknown_flags(argv, error)
            raise
        if unknown:
            self.error(self._describe_unknown(unknown))  # raises UsageError
        return options

    def _refuse_unknown_flags(self, argv: Sequence[str], error: UsageError) -> None:
        """Raise UsageError about unknown options in `argv`, if they are the cause of argparse's `error`.

        argparse takes the value of an unknown option for a positional argument. For ``--unknown 5 FILE``, its
        error is then about this argument: ``argument FILE: invalid choice: '5'``.
        """
        positionals = [action for action in self._actions if not action.option_strings]
        prefixes = tuple(f"argument {action.metavar}:" for action in positionals)
        unknown = self._find_unknown_flags(argv)
        if unknown and str(error).startswith(prefixes):
            self.error(self._describe_unknown(unknown))

    def _find_unknown_flags(self, argv: Sequence[str]) -> list[str]:
        """Return the arguments that look like a long option that this parser does not have."""
        flags = {*self._option_string_actions, "--"}
        return [arg for arg in argv if arg.startswith("--") and arg.partition("=")[0] not in flags]

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"{self.prog} --help")

    def _describe_unknown(self, args: Sequence[str]) -> str:
        """Return the message about unknown arguments. If there are similar options, it suggests them."""
        options = [arg.partition("=")[0] for arg in args if arg.startswith("-")]
        if not options:
            noun = "argument" if len(args) == 1 else "arguments"
            return f"unexpected {noun} {' '.join(args)}"
        noun = "option" if len(options) == 1 else "options"
        message = f"unknown {noun} {', '.join(options)}"
        similar = self._find_similar_flags(options)
        if not similar:
            return message
        return f"{message}; did you mean {', '.join(similar)}?"

    def _find_similar_flags(self, options: Sequence[str]) -> Collection[str]:
        """Return the visible flags that are similar to `options`.

        There is at most one flag for each option, and no flag occurs twice.
        """
        flags = []
        for action in self._actions:
            if action.help != argparse.SUPPRESS:
                flags += [flag for flag in action.option_strings if flag.startswith("--")]
        similar: dict[str, None] = {}  # a dict, because it keeps the order and drops duplicates
        for option in options:
            similar.update(dict.fromkeys(difflib.get_close_matches(option, flags, n=1)))
        return similar


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """A condition that must be met for an option to have an effect."""

    option: str
    """Name of the option, or metavar of a positional argument."""
    reason: str
    """End of the message if the condition is not met, such as ``without --optimizer sgd``."""
    met: Callable[[argparse.Namespace], object]
    """Returns a true value if the parsed options meet the condition."""


def refuse_unused(
    parser: argparse.ArgumentParser, options: argparse.Namespace, needs: Iterable[Need]
) -> None:
    """Refuse options that the user has set, but that have no effect because of the other options.

    For example, ``--momentum 0.9`` has no effect without ``--optimizer sgd``.

    Raises
    ------
    UsageError : an option differs from its default, but its condition in `needs` is not met.
    """
    # An option that was set to its default has no effect either, but this cannot be seen.
    defaults = parser.parse_args([])
    attributes = _find_attributes(parser)
    unused_by_reason: dict[str, list[str]] = {}
    for need in needs:
        attribute = attributes[need.option]
        is_set = getattr(options, attribute) != getattr(defaults, attribute)
        if is_set and not need.met(options):
            unused_by_reason.setdefault(need.reason, []).append(need.option)
    problems = []
    for reason, names in unused_by_reason.items():
        problems.append(f"{', '.join(names)} would have no effect {reason}")
    if problems:
        raise UsageError("; ".join(problems), hint="remove the option, or add what it needs")


def _find_attributes(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return the attribute of the parsed value by each spelling of its option: ``{"--amp": "amp"}``.

    A positional argument has no spelling. Its key is its metavar.
    """
    attributes = {}
    for action in parser._actions:
        for name in action.option_strings or [str(action.metavar)]:
            attributes[name] = action.dest
    return attributes


def parse_natural(text: str, least: int = 0) -> int:
    """Parse a whole number of at least `least`. Usable as the `type` of an argparse option."""
    value = parse_digits(text)
    if value is None or value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return value


def parse_positive(text: str) -> int:
    """Parse a whole number of at least 1. Usable as the `type` of an argparse option."""
    return parse_natural(text, 1)


def parse_duration(text: str) -> int:
    """Return the seconds of a duration: ``90`` and ``90s`` are 90, ``50m`` is 3000, and ``1h30m`` is 5400."""
    # All parts are optional, and so is the "s". The pattern therefore also matches an empty text, which is
    # refused below.
    match = re.fullmatch(r"(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9})s?)?", text, re.ASCII)
    if not text or match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 90, 90s, 50m or 1h30m")
    hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return hours * 3600 + minutes * 60 + seconds


def parse_digits(text: str) -> int | None:
    """Return the number in a text of 1 to 18 ASCII digits, or None for any other text.

    The check is needed because str.isdigit accepts characters such as ``²``, which int refuses. The limit is
    needed because older versions of Python need hours to parse a million digits.
    """
    if len(text) > 18 or not (text.isascii() and text.isdigit()):
        return None
    return int(text)

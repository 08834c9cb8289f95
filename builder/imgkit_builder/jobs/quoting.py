"""Values in the text of a job: directives and names, which no shell quotes, and the arguments of
commands.

A value of a directive (``#SBATCH``, ``#PBS``) has a pattern. A value that does not match is refused with
the reason, never escaped.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.rules import SITE_VARIABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """The pattern of a value, and the same in words."""

    pattern: str
    allowed: str


_WORD = Field(
    pattern=r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,127}", allowed="letters, digits and . _ @ + -, no blanks"
)
# A blank is safe in a directive, because the value is in double quotes. These would change it, or a bind.
_PATH = Field(
    pattern=r"/[^\x00-\x1f\x7f\"'\\%`$:,]*", allowed="an absolute path without quotes and \\ % $ ` : ,"
)

FIELDS: Mapping[str, Field] = {
    "--name": Field(pattern=r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", allowed="up to 63 letters, digits and . _ -"),
    "--account": _WORD,
    "--queue": _WORD,
    "--qos": _WORD,
    "--directory": _PATH,
    "--code": _PATH,
    "--secret-file": _PATH,
    "--env-file": _PATH,
}


def check(flag: str, value: str) -> str:
    """`value`, if it matches the pattern of `flag`; empty means "not set".

    Raises
    ------
    UsageError : it does not match.
    """
    field = FIELDS[flag]
    if value and not re.fullmatch(field.pattern, value):
        raise UsageError(f"{value!r} cannot be used in a job", where=flag, hint=f"allowed: {field.allowed}")
    return value


def search_first(libraries: Sequence[str]) -> str:
    """Shell words that have libraries searched in these folders before those of LD_LIBRARY_PATH."""
    return f'export LD_LIBRARY_PATH="{":".join(libraries)}{INHERITED}"'


INHERITED = "${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
"""Expanded where it is used, to the value there: a plain value would replace it."""


def option(value: str) -> str:
    """A scheduler option as one directive: one word, which cannot start a second directive.

    Raises
    ------
    UsageError : it is not one word.
    """
    if not re.fullmatch(r"[A-Za-z0-9._@+:=,/^*()\[\]|&!~%-]+", value):
        raise UsageError(
            f"{value!r} cannot be used in a directive",
            where="--option",
            hint="one argument without blanks and quotes, for example --option=--exclusive",
        )
    return value


def is_job_id(text: str) -> bool:
    """Whether `text` can be a job's id, which is an argument of the scheduler and part of names of files."""
    return ".." not in text and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.\[\]+-]{0,126}", text) is not None


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds(text: str, *, where: str) -> int:
    """A time limit in seconds: ``HH:MM:SS``, ``D-HH:MM:SS``, ``MM:SS``, ``90m``, ``2h``.

    Raises
    ------
    UsageError : it is in no such form, or zero.
    """
    total_s = 0
    if match := re.fullmatch(r"(\d{1,5})([smhd])", text):
        total_s = int(match[1]) * _UNITS[match[2]]
    elif match := re.fullmatch(r"(?:(\d{1,3})-)?(\d{1,4}):(\d{2}):(\d{2})", text):
        days, hours, minutes, rest = (int(part or 0) for part in match.groups())
        if minutes < 60 and rest < 60:
            total_s = days * 86400 + hours * 3600 + minutes * 60 + rest
    elif match := re.fullmatch(r"(\d{1,4}):(\d{2})", text):
        total_s = int(match[1]) * 60 + int(match[2]) if int(match[2]) < 60 else 0
    if total_s == 0:
        raise UsageError(f"{text!r} is not a time limit", where=where, hint="write HH:MM:SS, or 90m, 2h")
    return total_s


def clock(seconds: int) -> str:
    """The time as ``HH:MM:SS``; hours can exceed 24."""
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


WIDTH = 100


class Shell(str):
    """Text that the script's own shell expands. imgkit writes it; it is never a user's value."""

    __slots__ = ()


def expanding(text: str) -> str:
    """Return `text` for a shell on the node that replaces its variables of the site."""
    if not SITE_VARIABLE.search(text):
        return text
    # Whatever is no variable of the site stays as it is.
    special = re.compile(rf"(?P<variable>{SITE_VARIABLE.pattern})|[$`\"\\\\]")
    return Shell(
        '"' + special.sub(lambda match: match[0] if match["variable"] else f"\\{match[0]}", text) + '"'
    )


def exports(variables: Mapping[str, str]) -> list[str]:
    """Return shell lines that export `variables`, with the values of the site's variables in them."""
    return [f"export {name}={quote(expanding(value))}" for name, value in variables.items()]


def default_exports(variables: Mapping[str, str]) -> list[str]:
    """Return shell lines that export those of `variables` that are not set, as `exports` does."""
    pairs = zip(variables, exports(variables), strict=True)
    return [f'if [ -z "${{{name}+set}}" ]; then {line}; fi' for name, line in pairs]


def quote(argument: str) -> str:
    """Return `argument`, quoted as a shell needs it; `Shell` text stays as it is, to be expanded."""
    return str(argument) if isinstance(argument, Shell) else shlex.quote(argument)


def repeat_option(option: str, values: Iterable[str]) -> tuple[str, ...]:
    """Return `option` with each of `values`, for example ``-x A -x B``."""
    return tuple(argument for value in values for argument in (option, value))


def line(argv: Sequence[str], *, indent: str = "    ") -> str:
    """One command. A long one continues over several lines; no word is broken."""
    rows, row = [], ""
    for argument in map(quote, argv):
        if row and len(row) + 1 + len(argument) > WIDTH:
            rows.append(row)
            row = indent + argument
        else:
            row = f"{row} {argument}" if row else argument
    return " \\\n".join((*rows, row))

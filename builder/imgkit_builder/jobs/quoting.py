"""Check and quote the values in a job script.

Directives (``#SBATCH``, ``#PBS``) are comments for the shell, so shell quotes have no effect in them. Each
value in a directive must therefore match a pattern. A value that does not match is refused, and is never
escaped. The same applies to names. Arguments of commands are quoted for the shell.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.rules import SITE_VARIABLE


class ValuePattern(NamedTuple):
    """A regular expression for a value, and a description of the allowed characters for error messages."""

    pattern: str
    allowed: str


# "bsc98", "acc_debug@x": one word, which needs no quotes in a directive.
_WORD = ValuePattern(
    pattern=r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,127}", allowed="letters, digits and . _ @ + -, no blanks"
)
# A path may contain blanks, because it is in double quotes in a directive. The excluded characters would end
# or change the quoted text. A colon or comma would end the path in a mount option.
_PATH = ValuePattern(
    pattern=r"/[^\x00-\x1f\x7f\"'\\%`$:,]*", allowed="an absolute path without quotes and \\ % $ ` : ,"
)

# The patterns of values that are not quoted for a shell in a job script, by the flags that set them.
FLAG_PATTERNS = {
    "--name": ValuePattern(
        pattern=r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", allowed="up to 63 letters, digits and . _ -"
    ),
    "--account": _WORD,
    "--queue": _WORD,
    "--qos": _WORD,
    "--directory": _PATH,
    "--code": _PATH,
    "--secret-file": _PATH,
    "--env-file": _PATH,
    "data": _PATH,
}


def check_flag_value(flag: str, value: str) -> str:
    """Return `value` if it matches the pattern of `flag` in `FLAG_PATTERNS`.

    An empty value means that the flag is not given. It is returned as well.

    Raises
    ------
    UsageError : `value` does not match the pattern.
    """
    pattern, allowed = FLAG_PATTERNS[flag]
    if value and not re.fullmatch(pattern, value):
        raise UsageError(f"{value!r} cannot be used in a job", where=flag, hint=f"allowed: {allowed}")
    return value


def export_library_path(libraries: Sequence[str]) -> str:
    """Return the shell command that adds folders of libraries to the start of LD_LIBRARY_PATH.

    For example: ``export LD_LIBRARY_PATH="/a:/b${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"``.
    """
    return f'export LD_LIBRARY_PATH="{":".join(libraries)}{INHERITED}"'


# Shell text for the end of a new LD_LIBRARY_PATH. The shell replaces it by a colon and the old value. If the
# variable is empty or not set, the shell replaces it by nothing.
INHERITED = "${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"

# One word of a scheduler's option, such as "--exclusive" or "select=1:ncpus=4". Blanks and quotes are
# excluded because they could begin a second option. The characters $ ` \ # ; < > ? { } are excluded as well.
_OPTION = re.compile(r"[A-Za-z0-9._@+:=,/^*()\[\]|&!~%-]+")


def check_scheduler_option(value: str, *, where: str = "--option") -> str:
    """Return `value` if it can be the option in a directive of a job script, such as ``--exclusive``.

    A directive is a line ``#SBATCH OPTION`` or ``#PBS OPTION``.

    Parameters
    ----------
    where : the flag, or the line of a file, that contains the option, for the error.

    Raises
    ------
    UsageError : `value` contains blanks, quotes or line breaks, which could begin a second directive. The
        hint shows how to write an option that has a value.
    """
    if _OPTION.fullmatch(value):
        return value
    options = _options_without_blanks(value) or ["--exclusive"]
    if where == "--option":
        example = " ".join(f"--option={option}" for option in options)
    else:
        example = ", ".join(options)
    raise UsageError(
        f"{value!r} cannot be used in a directive",
        where=where,
        hint=f"one word without blanks and quotes, for example {example}",
    )


def _options_without_blanks(option: str) -> list[str]:
    """Return a form of `option` without blanks that the scheduler also accepts, for a hint.

    ``--time 10`` -> ``["--time=10"]``. PBS takes a short option and its value as two separate words: ``-l
    walltime=1`` -> ``["-l", "walltime=1"]``. If no such form is known, the result is empty.
    """
    words = option.split(" ")
    if not option.startswith("-") or not all(map(_OPTION.fullmatch, words)):
        return []
    if "=" in words[0]:  # "--comment=my job": the blanks are in the value
        return ["_".join(words)]
    if len(words) != 2:
        return []
    return ["=".join(words)] if option.startswith("--") else words


def is_job_id(text: str) -> bool:
    """Return whether `text` has the form of a job id: ``4711``, ``4711_3``, ``4711[3].pbs01``.

    An id becomes an argument of the scheduler's commands and a part of file names. So it must not begin with
    a hyphen, and must not contain a slash, a blank or ``..``.
    """
    if ".." in text:
        return False
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.\[\]+-]{0,126}", text) is not None


_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}  # seconds in each unit of "90m"


def parse_time_limit(text: str, *, where: str) -> int:
    """Convert a time limit to seconds.

    The allowed forms are ``HH:MM:SS``, ``D-HH:MM:SS``, ``MM:SS``, and a number with a unit, such as ``90m``
    or ``2h``.

    Parameters
    ----------
    where : the flag, or the line of a file, that contains the value, for the error.

    Raises
    ------
    UsageError : `text` has none of these forms, or the limit is zero.
    """
    total_s = _parse_number_with_unit(text) or _parse_clock(text)
    if total_s == 0:
        raise UsageError(f"{text!r} is not a time limit", where=where, hint="write HH:MM:SS, or 90m, 2h")
    return total_s


def _parse_number_with_unit(text: str) -> int:
    """Convert a number with a unit to seconds: ``90m`` -> 5400. Return 0 if `text` has another form."""
    match = re.fullmatch(r"(\d{1,5})([smhd])", text)
    if match is None:
        return 0
    number, unit = match.groups()
    return int(number) * _UNITS_S[unit]


def _parse_clock(text: str) -> int:
    """Convert ``MM:SS``, ``HH:MM:SS`` or ``D-HH:MM:SS`` to seconds.

    The first number has no upper limit, so ``90:00`` is an hour and a half. If `text` has another form, or if
    a later number is 60 or more, the result is 0.
    """
    match = re.fullmatch(r"(\d{1,4}):([0-5]\d)", text)
    if match is not None:
        minutes, seconds = map(int, match.groups())
        return minutes * 60 + seconds
    match = re.fullmatch(r"(?:(\d{1,3})-)?(\d{1,4}):([0-5]\d):([0-5]\d)", text)
    if match is None:
        return 0
    # A missing number of days counts as 0.
    days, hours, minutes, seconds = map(int, match.groups("0"))
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def format_time_limit(seconds: int) -> str:
    """Return a time in seconds as ``HH:MM:SS``. The hours can exceed 24: 90000 -> ``25:00:00``."""
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


# Number of characters after which `command_line` breaks a line. A single argument can be longer.
WIDTH = 100


class ShellText(str):
    """Shell text that `quote` leaves unchanged, so that the shell of the job script expands it.

    Only imgkit itself writes such text. A value from the user is never used in this way without escaping.
    """

    __slots__ = ()


def quote_with_site_variables(text: str) -> str:
    """Return `text` as shell text in which the shell on the node expands only variables of the site.

    The result is in double quotes, and all other special characters are escaped: ``$SCRATCH/5$`` becomes
    ``"$SCRATCH/5\\$"``. A text without such variables is returned unchanged, because `quote` quotes it later.
    """
    if not SITE_VARIABLE.search(text):
        return text

    def escape(match: re.Match[str]) -> str:
        """Keep a variable of the site as it is, and add a backslash before any other special character."""
        if match["variable"]:
            return match[0]
        return f"\\{match[0]}"

    # In double quotes, the shell would also expand any other "$". A backquote, a double quote and a backslash
    # have a special meaning as well.
    special_pattern = re.compile(rf"(?P<variable>{SITE_VARIABLE.pattern})|[$`\"\\]")
    return ShellText(f'"{special_pattern.sub(escape, text)}"')


def assignments(variables: Mapping[str, object]) -> list[str]:
    """Return ``NAME=VALUE`` for each variable, as arguments of programs such as env."""
    return [f"{name}={value}" for name, value in variables.items()]


def export_lines(variables: Mapping[str, str]) -> list[str]:
    """Return one shell line for each variable, ``export NAME=VALUE``.

    The shell on the node expands variables of the site in the values.
    """
    return [f"export {name}={quote(quote_with_site_variables(value))}" for name, value in variables.items()]


def default_exports(variables: Mapping[str, str]) -> list[str]:
    """Return shell lines that export each variable, unless it is already set on the node.

    The values are written in the same way as by `export_lines`.
    """
    lines = []
    for name, value in variables.items():
        (export,) = export_lines({name: value})
        lines.append(f'if [ -z "${{{name}+set}}" ]; then {export}; fi')
    return lines


def quote(argument: str) -> str:
    """Return `argument` quoted for the shell. A `ShellText` is returned as it is."""
    return str(argument) if isinstance(argument, ShellText) else shlex.quote(argument)


def repeat_option(option: str, values: Iterable[str]) -> tuple[str, ...]:
    """Return arguments with `option` before each value: ``"-x"``, ``["A", "B"]`` -> ``-x A -x B``."""
    argv: list[str] = []
    for value in values:
        argv += (option, value)
    return tuple(argv)


def command_line(argv: Sequence[str]) -> str:
    """Return a command as shell text with quoted arguments: ``["ls", "a b"]`` -> ``ls 'a b'``.

    If the text is longer than `WIDTH`, it is broken between arguments into several lines. Each line except
    the last ends with a backslash, and the lines after the first are indented.
    """
    lines = []
    line = ""
    for argument in map(quote, argv):
        longer_line = f"{line} {argument}" if line else argument
        if line and len(longer_line) > WIDTH:
            lines.append(line)
            longer_line = f"    {argument}"
        line = longer_line
    return " \\\n".join((*lines, line))

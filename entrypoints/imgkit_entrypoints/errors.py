"""The errors that imgkit raises. Each error says what happened, where, and what to do next.

Functions raise these errors, and only ``main`` prints them and exits. The exit codes are part of the
interface: 0 done, 1 the check ran and the answer is no, 2 usage or recipe, 3 a needed tool is missing, 4 a
tool failed, 5 no usable launch plan, 85 state saved, requeue me.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from imgkit_entrypoints.terminal import escape_controls

# The docstring of this module explains each exit code.
EXIT_NO = 1
EXIT_USAGE = 2
EXIT_TOOL_MISSING = 3
EXIT_TOOL_FAILED = 4
EXIT_NO_PLAN = 5
EXIT_SAVED = 85


_LONG, _HEAD, _TAIL = 200, 40, 20
"""A value of 200 or more characters in a message is shortened to its first 40 and its last 20 characters."""
# Largest length of a line of a message, in characters.
_LINE = 1000
# A quoted text, or a word without quotes and spaces.
_VALUE = re.compile(rf"""'[^'\n]{{{_LONG},}}'|"[^"\n]{{{_LONG},}}"|[^\s'"]{{{_LONG},}}""")


def shorten_message(text: str) -> str:
    """Return a message in which very long values, words and lines are shortened, as in ``'aaaa…aaaa'``."""
    text = _VALUE.sub(lambda match: f"{match[0][:_HEAD]}…{match[0][-_TAIL:]}", text)
    lines = (line if len(line) <= _LINE else f"{line[:_LONG]}…" for line in text.split("\n"))
    return "\n".join(lines)


def join_names(names: Sequence[str], limit: int) -> str:
    """Return `names` as a text for a message, with at most `limit` of them: ``n1, n2 and 3 more``."""
    text = ", ".join(names[:limit])
    if len(names) > limit:
        text += f" and {len(names) - limit} more"
    return text


def count_text(number: int, noun: str) -> str:
    """Return a number and its noun for a message, such as ``1 node`` or ``2 nodes``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


class ImgkitError(Exception):
    """An error that the user can do something about.

    Parameters
    ----------
    what : what happened, in one sentence.
    where : the place of the error: ``file:line:col``, a variable, or a path.
    hint : allowed values and the next step, if possible as the exact command. It may have several lines, for
        example the last lines of a program's output.
    """

    exit_code = EXIT_NO

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        lines = [escape_controls(f"{self.where}: {self.what}" if self.where else self.what)]
        if self.hint:
            # A hint may quote a program's output. Because of the indentation, such lines do not look like
            # imgkit's own.
            hints = [escape_controls(line.expandtabs()) for line in self.hint.split("\n")]
            lines += [f"  -> {hints[0]}", *(f"     {line}" for line in hints[1:])]
        return shorten_message("\n".join(lines))


class CheckFailed(ImgkitError):
    """A check ran, and its result is negative."""


class UsageError(ImgkitError):
    """An option, an argument or a recipe is wrong."""

    exit_code = EXIT_USAGE


class ToolMissing(ImgkitError):
    """A program or service that the command needs is missing."""

    exit_code = EXIT_TOOL_MISSING


class ToolFailed(ImgkitError):
    """A program or service ran and failed. `hint` contains its last lines and the path of the full log."""

    exit_code = EXIT_TOOL_FAILED


class NoPlan(ImgkitError):
    """No launch can work on this node or in this job."""

    exit_code = EXIT_NO_PLAN

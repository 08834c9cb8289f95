"""The errors that imgkit raises. Each says what happened, where, and what to do next.

Functions raise them, and only ``main`` prints them and exits. The exit codes are part of the interface:
0 done, 1 the check ran and the answer is no, 2 usage or recipe, 3 a needed tool is missing, 4 a tool failed,
5 no usable launch plan, 85 state saved, requeue me.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from imgkit_entrypoints.terminal import escape_controls

# The module's docstring has the meaning of each exit code.
EXIT_NO = 1
EXIT_USAGE = 2
EXIT_TOOL_MISSING = 3
EXIT_TOOL_FAILED = 4
EXIT_NO_PLAN = 5
EXIT_SAVED = 85


_LONG, _HEAD, _TAIL = 200, 40, 20
"""A value of `_LONG` or more characters is cut to its first 40 and last 20, as a message may repeat it."""
# Longest line of a message, in characters.
_LINE = 1000
# A quoted text, or a word without quotes and spaces.
_VALUE = re.compile(rf"""'[^'\n]{{{_LONG},}}'|"[^"\n]{{{_LONG},}}"|[^\s'"]{{{_LONG},}}""")


def shorten_message(text: str) -> str:
    """Return a message in which very long values, words and lines are cut: ``'aaaa…aaaa'``."""
    text = _VALUE.sub(lambda match: f"{match[0][:_HEAD]}…{match[0][-_TAIL:]}", text)
    lines = (line if len(line) <= _LINE else f"{line[:_LONG]}…" for line in text.split("\n"))
    return "\n".join(lines)


def join_names(names: Sequence[str], limit: int) -> str:
    """Return `names` for a message, at most `limit` of them: ``n1, n2 and 3 more``."""
    text = ", ".join(names[:limit])
    if len(names) > limit:
        text += f" and {len(names) - limit} more"
    return text


def count_text(number: int, noun: str) -> str:
    """Return a number with its noun for a message: ``1 node``, ``2 nodes``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


class ImgkitError(Exception):
    """An error that a user can act on.

    Parameters
    ----------
    what : what happened, in one sentence.
    where : ``file:line:col``, the variable, or the path with its content.
    hint : allowed values and the next step, if possible as the exact command; may have several lines, for
        example the last ones of a program.
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
            # A hint may quote a program's output. Indentation keeps its lines from looking like imgkit's own.
            hints = [escape_controls(line.expandtabs()) for line in self.hint.split("\n")]
            lines += [f"  -> {hints[0]}", *(f"     {line}" for line in hints[1:])]
        return shorten_message("\n".join(lines))


class CheckFailed(ImgkitError):
    """A check ran, and its answer is no."""


class UsageError(ImgkitError):
    """A wrong flag, argument or recipe."""

    exit_code = EXIT_USAGE


class ToolMissing(ImgkitError):
    """A program or service that the verb needs is missing."""

    exit_code = EXIT_TOOL_MISSING


class ToolFailed(ImgkitError):
    """A program or service ran and failed. `hint` quotes its last lines and names the full log."""

    exit_code = EXIT_TOOL_FAILED


class NoPlan(ImgkitError):
    """There is no launch plan that could work here."""

    exit_code = EXIT_NO_PLAN

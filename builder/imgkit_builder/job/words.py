"""Words of commands, as a shell reads them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

WIDTH = 100


class Shell(str):
    """Text that the script's own shell expands: written by imgkit, never a user's value."""

    __slots__ = ()


def quote(word: str) -> str:
    """`word` so that a shell takes it as it is, or expands it where it is meant to."""
    return str(word) if isinstance(word, Shell) else shlex.quote(word)


def line(words: Sequence[str], *, indent: str = "    ") -> str:
    """One command, continued over several lines where it is long; no word is broken."""
    rows, row = [], ""
    for word in map(quote, words):
        if row and len(row) + 1 + len(word) > WIDTH:
            rows.append(row)
            row = indent + word
        else:
            row = f"{row} {word}" if row else word
    return " \\\n".join((*rows, row))

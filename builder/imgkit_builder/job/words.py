"""Words of commands, quoted for a shell."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

WIDTH = 100


class Shell(str):
    """Text that the script's own shell expands. imgkit writes it; it is never a user's value."""

    __slots__ = ()


def quote(word: str) -> str:
    """`word`, quoted so that a shell does not change it; `Shell` text stays as it is, to be expanded."""
    return str(word) if isinstance(word, Shell) else shlex.quote(word)


def line(words: Sequence[str], *, indent: str = "    ") -> str:
    """One command. A long one continues over several lines; no word is broken."""
    rows, row = [], ""
    for word in map(quote, words):
        if row and len(row) + 1 + len(word) > WIDTH:
            rows.append(row)
            row = indent + word
        else:
            row = f"{row} {word}" if row else word
    return " \\\n".join((*rows, row))

"""Maps the engine's step numbers to lines of the Dockerfile."""

from __future__ import annotations

from collections.abc import Collection


def instruction_lines(text: str, *, only: Collection[str] = ()) -> tuple[int, ...]:
    """First line, from 1, of each instruction of the Dockerfile `text`; `only` of these kinds.

    The engine numbers its steps in the same order, from 1. Here-documents are not supported: the classic
    builder does not know them either.
    """
    found: list[int] = []
    continued = False
    for number, line in enumerate(text.splitlines(), start=1):
        word = line.strip()
        # A continued instruction may contain comments and empty lines.
        if not word or word.startswith("#"):
            continue
        if not continued and (not only or word.split()[0].upper() in only):
            found.append(number)
        continued = word.endswith("\\")
    return tuple(found)

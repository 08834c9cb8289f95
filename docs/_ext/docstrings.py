"""Docstrings for Sphinx: the project's sections (`name : meaning`) as lists of fields."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

FIELDS = {"Parameters": "param", "Raises": "raises"}


def fields(lines: Sequence[str]) -> Iterator[str]:
    """The lines of a docstring, with each entry of a section as one reStructuredText field."""
    field = ""
    for number, line in enumerate(lines):
        following = lines[number + 1] if number + 1 < len(lines) else ""
        if following and set(following) == {"-"}:
            field = FIELDS.get(line, "")
            yield "" if field else f".. rubric:: {line}"
        elif line and set(line) == {"-"}:
            yield ""
        elif field and (entry := re.match(r"(\w+(?:, \w+)*) : (.*)", line)):
            yield from (f":{field} {name}: {entry[2]}" for name in entry[1].split(", "))
        else:
            yield line


def process(app: object, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Replace the lines of a docstring; Sphinx calls this for each one (autodoc-process-docstring)."""
    lines[:] = fields(lines)

"""Read paragraphs of ``Field: value`` lines, as dpkg, Python metadata and debian/copyright have them.

Python's email package reads such headers too, but slower, and as those of mail.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

Fields = Mapping[str, tuple[str, ...]]
"""Field name in lower case to its values; the lines of a value have no indentation."""


def paragraphs(text: str) -> Iterator[Fields]:
    """Yield the fields of each paragraph; lines that are no field are passed over."""
    found: dict[str, list[str]] = {}
    last: list[str] | None = None
    for line in text.split("\n"):
        line = line.rstrip("\r")
        if not line.strip():
            if found:
                yield _frozen(found)
            found, last = {}, None
        elif line[0] in " \t":
            if last:
                last[-1] += f"\n{line.strip()}"
        elif not line.startswith("#"):
            name, colon, value = line.partition(":")
            last = found.setdefault(name.strip().lower(), []) if colon else None
            if last is not None:
                last.append(value.strip())
    if found:
        yield _frozen(found)


def first(text: str) -> Fields:
    """The fields of the first paragraph; empty where there is none."""
    return next(paragraphs(text), {})


def value(fields: Fields, name: str) -> str:
    """The first value of the field `name`; empty where there is none."""
    return fields.get(name, ("",))[0]


def _frozen(found: Mapping[str, list[str]]) -> Fields:
    return {name: tuple(values) for name, values in found.items()}

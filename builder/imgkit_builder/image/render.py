"""Recipe to Dockerfile or Singularity definition: one model, two templates, the same bytes everywhere.

Notes
-----
Docker's classic builder reads the text (no heredoc, ``RUN --mount``, ``COPY --link``; docs/adr/0003). It
expands ``$``, quotes and backslashes in ENV, LABEL, WORKDIR and COPY, in COPY even after its JSON was
decoded, but not in RUN. So everything that comes from a recipe is quoted for the place where it stands.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from imgkit_builder.image.layers import Layers, layers, refuse
from imgkit_builder.image.quoting import copy_words, docker_key, docker_quote
from imgkit_builder.recipe.model import Recipe
from imgkit_recipes import FOLDER

if TYPE_CHECKING:
    from jinja2 import Environment

TRACE = re.compile(r"\s*# (imgkit: .+|--base .+|[^/]+:\d+(?:-\d+)?(?:, [^/]+:\d+(?:-\d+)?)*)")


def dockerfile(recipe: Recipe, *, base: str | None = None, platform: str | None = None) -> str:
    """Text of the Dockerfile; `base` replaces the recipe's, `platform` is only named in the text.

    The platform is no part of FROM: the engine compares it with the base and refuses, whereas
    ``FROM --platform`` with a local image of another architecture builds the wrong thing.

    Raises
    ------
    UsageError : a value that a Dockerfile cannot hold, for example a variable with a line end.
    """
    return _fill("dockerfile.j2", layers(recipe, base=base, platform=platform))


def definition(recipe: Recipe, *, base: str | None = None, platform: str | None = None) -> str:
    """Text of a Singularity definition file that makes the same image.

    Build it inside the unpacked build context, as the text's first lines say.

    Raises
    ------
    UsageError : a value that a definition file cannot hold; Dockerfiles can hold most of them.
    """
    made = layers(recipe, base=base, platform=platform)
    for label in made.labels.entries:
        if re.search(r"\s", label.key) or label.value != label.value.strip():
            found = f"label {label.key!r}: white space in its name or around its value"
            refuse(found, "a definition file", made.labels.origin, "remove it, or use --format dockerfile")
    text = _fill("definition.j2", made)
    for number, line in enumerate(text.split("\n"), 1):
        # Apptainer >= 1.2 replaces {{ word }} by a build argument and stops where there is none of that name.
        if match := re.search(r"\{\{\s*\w+\s*\}\}", line):
            refuse(match.group(), "a definition file", origin(text, number), "use --format dockerfile")
    return text


def origin(text: str, line: int) -> str:
    """What stands in the comment above line `line` (from 1) of a rendered text: ``mn5.yaml:12``.

    An instruction made of several values gives ``mn5.yaml:12-14, mn5-llm.yaml:3``; a step of imgkit's own
    gives ``imgkit: `` and what it is for; a line above all instructions gives an empty string.
    """
    for above in reversed(text.split("\n")[:line]):
        if found := TRACE.fullmatch(above):
            return found.group(1)
    return ""


def _fill(template: str, made: Layers) -> str:
    jinja = environment(FOLDER / "templates")
    filters: Mapping[str, Callable[..., str]] = {
        "docker_quote": docker_quote,
        "docker_key": docker_key,
        "copy_words": copy_words,
    }
    jinja.filters.update(filters)
    values = {name: getattr(made, name) for name in made.__slots__}
    return jinja.get_template(template).render(values)


def environment(*folders: Path) -> Environment:
    """Templates of `folders`, the first that has one of a name counts; a missing value is an error."""
    # Here, because only some verbs render and importing it takes longer than the rest of "imgkit --help".
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(folders, encoding="utf-8"),
        undefined=StrictUndefined,
        autoescape=False,  # noqa: S701 - the output is no HTML; the filters quote for where a value stands
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["sh_quote"] = shlex.quote
    return made

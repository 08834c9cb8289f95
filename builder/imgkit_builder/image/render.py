"""Recipes as Dockerfile or Singularity definition: one model, two templates, the same bytes everywhere.

Notes
-----
Docker's classic builder reads the text, so it uses no heredoc, ``RUN --mount`` or ``COPY --link``
(docs/adr/0003). Every value of a recipe is quoted for its place (``image/quoting.py``).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from imgkit_builder.image.instructions import Additions, Definition, Layers
from imgkit_builder.image.layers import layers, refuse
from imgkit_builder.image.quoting import copy_words, docker_key, docker_quote
from imgkit_builder.image.steps import steps
from imgkit_builder.recipe.model import Recipe

if TYPE_CHECKING:
    from jinja2 import Environment

TRACE = re.compile(r"\s*# (imgkit: .+|--base .+|[^/]+:\d+(?:-\d+)?(?:, [^/]+:\d+(?:-\d+)?)*)")


def dockerfile(recipe: Recipe, *, base: str | None = None, platform: str | None = None) -> str:
    """Text of the Dockerfile; `base` replaces the recipe's, `platform` appears only in a comment.

    FROM names no platform: imgkit compares it with the base before the build. ``FROM --platform`` with a
    local image of another architecture would build the wrong image.

    Raises
    ------
    UsageError : a Dockerfile cannot express a value, for example a variable with a line end.
    """
    return _fill("dockerfile.j2", layers(recipe, base=base, platform=platform))


def resolver(made: Layers, *, folder: str) -> str:
    """Text of the Dockerfile that asks a base, with `made`'s steps as questions that `folder` answers."""
    return _fill("resolver.j2", made, folder=folder)


def definition(recipe: Recipe, *, base: str | None = None, platform: str | None = None) -> str:
    """Text of a Singularity definition file for the same image.

    Build the text inside the unpacked build context; its first lines have the commands.

    Raises
    ------
    UsageError : a definition file cannot express a value; a Dockerfile can express most of them.
    """
    made = layers(recipe, base=base, platform=platform)
    return _definition(recipe, made, more=Additions(), bootstrap="docker", place=made.base.text).text


def marked_definition(
    recipe: Recipe, *, base: str, platform: str, more: Additions, bootstrap: str, place: str
) -> Definition:
    """The same with `more`, as imgkit builds it; `bootstrap` and `place` name where the runtime finds `base`.

    Raises
    ------
    UsageError : as in `definition`.
    """
    made = layers(recipe, base=base, platform=platform)
    return _definition(recipe, made, more=more, bootstrap=bootstrap, place=place)


def _definition(recipe: Recipe, made: Layers, *, more: Additions, bootstrap: str, place: str) -> Definition:
    if made.uses_secrets:
        stated = recipe.where("image", "secrets")
        refuse("a build secret", "a definition file", stated, "use --format dockerfile and imgkit build")
    for label in made.labels.entries:
        if re.search(r"\s", label.key) or label.value != label.value.strip():
            found = f"label {label.key!r}: white space in its name or around its value"
            refuse(found, "a definition file", made.labels.origin, "remove it, or use --format dockerfile")
    run = (*more.steps, *steps(made))
    text = _fill("definition.j2", made, more=more, steps=run, bootstrap=bootstrap, place=place)
    for number, line in enumerate(text.split("\n"), 1):
        # Apptainer >= 1.2 replaces {{ word }} by a build argument, and fails if there is no such argument.
        if match := re.search(r"\{\{\s*\w+\s*\}\}", line):
            refuse(match.group(), "a definition file", origin(text, number), "use --format dockerfile")
    return Definition(text=text, steps=run)


def origin(text: str, line: int) -> str:
    """The comment above line `line` (from 1) of a rendered text: ``mn5.yaml:12``.

    An instruction made of several values gives ``mn5.yaml:12-14, mn5-llm.yaml:3``. A step of imgkit's own
    gives ``imgkit: `` and its purpose. A line above all instructions gives an empty string.
    """
    for above in reversed(text.split("\n")[:line]):
        if found := TRACE.fullmatch(above):
            return found.group(1)
    return ""


def _fill(template: str, made: Layers, **further: object) -> str:
    jinja = environment("templates")
    filters: Mapping[str, Callable[..., str]] = {
        "docker_quote": docker_quote,
        "docker_key": docker_key,
        "copy_words": copy_words,
    }
    jinja.filters.update(filters)
    values = {name: getattr(made, name) for name in made.__slots__}
    return jinja.get_template(template).render(values, **further)


def environment(shipped: str, own: Path | None = None) -> Environment:
    """Templates from the folder `own`, then the shipped ones of that folder; a missing value is an error."""
    # Imported here: only some verbs render, and the import takes longer than the rest of "imgkit --help".
    from jinja2 import ChoiceLoader, FileSystemLoader, PackageLoader, StrictUndefined

    from imgkit_builder.image.sandbox import Templates

    made = Templates(
        # The second one also reads the one-file tool.
        loader=ChoiceLoader(
            [*([FileSystemLoader(own)] if own else []), PackageLoader("imgkit_recipes", shipped)]
        ),
        undefined=StrictUndefined,
        autoescape=False,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["sh_quote"] = shlex.quote
    return made

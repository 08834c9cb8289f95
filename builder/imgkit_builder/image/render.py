"""Recipes as Dockerfile or Singularity definition: one model, two templates, the same bytes everywhere.

Docker's classic builder reads the text, so it uses no heredoc, ``RUN --mount`` or ``COPY --link``
(docs/adr/0003). It expands ``$``, quotes and backslashes in ENV, LABEL, WORKDIR and COPY; in COPY even
after it has decoded its JSON. It expands nothing in RUN. Every value of a recipe is quoted for its
position.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from imgkit_builder.image.instructions import (
    INSIDE,
    NEXT,
    Additions,
    Block,
    Copy,
    Definition,
    Layers,
    Project,
    RunStep,
    Step,
)
from imgkit_builder.image.layers import layers, refuse
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
    run = (*more.steps, *_definition_steps(made))
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
        "docker_key": _docker_key,
        "copy_words": _copy_words,
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


def _definition_steps(made: Layers) -> Iterator[Step]:
    """Yield the steps of the image `made`."""
    # Brackets: without them, only the last command of several behind && would end the build when it fails.
    copied = " ".join((INSIDE, *(file.path for file in made.ca.files))) if made.ca else INSIDE
    yield _own(
        "copied files have the same modes, whatever umask copied them", f"chmod -R u=rwX,go=rX {copied}"
    )
    if made.ca:
        exported = _export(Block(origin=made.ca.origin, entries=made.ca.env))
        yield Step(origin=made.ca.origin, command=f"{made.ca.install}\n{exported}")
    if made.apt:
        yield Step(origin=made.apt.origin, command=f"({made.apt.text})")
    if made.protect:
        yield _own("every pip step below must keep the base's torch and NCCL", f"({made.protect})")
    if made.filtered_constraint:
        yield Step(origin=made.filtered_constraint.origin, command=made.filtered_constraint.text)
    if made.uv:
        yield Step(origin=made.uv.origin, command=f"({made.uv.command})")
    for pip in made.pip:
        yield Step(origin=pip.origin, command=f"({pip.command})" if pip.kept else pip.command)
    yield Step(origin=made.env.origin, command=_export(made.env))
    yield Step(origin=made.workdir.origin, command=f"mkdir -p -- {shlex.quote(made.workdir.text)}")
    for run in made.run:
        yield _run(made, run)
    yield _own(
        "no index, no dependencies; forced, because a changed wheel can have the same version",
        f"({made.install_wheel})",
    )
    for project in made.projects:
        placed = f"{_placed(project)}\n" if project.stays else ""
        yield Step(origin=project.origin, command=f"{placed}{project.command}")
    if made.projects:
        yield _own("the projects are installed", f"rm -rf {INSIDE}/project")
    for copy in made.copy:
        yield Step(origin=copy.origin, command=_placed(copy))
    if made.copy:
        yield _own("the copies are in their places", f"rm -rf {INSIDE}/copy")
    for run in made.run_after_copy:
        yield _run(made, run)


def _own(purpose: str, command: str) -> Step:
    return Step(origin=f"imgkit: {purpose}", command=command)


def _export(block: Block) -> str:
    return f"export {NEXT.join(f'{one.key}={shlex.quote(one.value)}' for one in block.entries)}"


def _run(made: Layers, step: RunStep) -> Step:
    return Step(origin=step.origin, command=f"(cd -- {shlex.quote(made.workdir.text)} && {step.posix})")


def _placed(code: Copy | Project) -> str:
    """The commands that put the content of a folder of the context into its place."""
    target = shlex.quote(code.target)
    return f"mkdir -p -- {target}\ncp -RP -- {INSIDE}/{code.member}/. {target}"


def docker_quote(value: str) -> str:
    """Double quotes for ENV, LABEL and WORKDIR, with ``$`` escaped."""
    return '"' + re.sub(r'([\\"$])', r"\\\1", value) + '"'


def _docker_key(value: str) -> str:
    """The name of a label, quoted only where it must be."""
    return value if re.fullmatch(r"[A-Za-z0-9._/-]+", value) else docker_quote(value)


def _copy_words(words: Sequence[str]) -> str:
    """The JSON form of COPY; the builder expands each word once more after decoding it."""
    return json.dumps([re.sub(r"""([\\"'$])""", r"\\\1", word) for word in words], ensure_ascii=False)

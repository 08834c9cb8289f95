"""``imgkit render``: print the Dockerfile or definition file of a recipe."""

from __future__ import annotations

import enum
from pathlib import Path

import typer

from imgkit_builder.cli.common import LARGE, complete_names, with_leave
from imgkit_entrypoints import terminal


class RenderFormat(str, enum.Enum):
    """Formats of a rendered recipe."""

    DOCKERFILE = "dockerfile"
    DEF = "def"


def verb_render(
    recipe: str = typer.Argument(
        metavar="RECIPE|FILE",
        autocompletion=complete_names,
        help="A shipped recipe (imgkit list) or a .yaml file.",
    ),
    form: RenderFormat = typer.Option(
        RenderFormat.DOCKERFILE,
        "--format",
        help="dockerfile, or def for singularity and apptainer.",
    ),
    base: str | None = typer.Option(
        None, "--base", metavar="REF", help="Base image instead of the recipe's."
    ),
    platform: str | None = typer.Option(
        None, "--platform", metavar="OS/ARCH", help="Platform to name (default: the recipe's first)."
    ),
    output: Path | None = typer.Option(
        None, "--output", "-o", metavar="FILE", help="Write to this file instead of stdout."
    ),
    context: Path | None = typer.Option(
        None, "--context", metavar="FILE", help="Also write the build context, a tar of all copied files."
    ),
    no_lock: bool = typer.Option(False, "--no-lock", help="Ignore the recipe's lock."),
    large: bool = LARGE,
) -> None:
    """Print the Dockerfile or definition file of a recipe.

    A comment above each instruction names its line in the recipe. The same
    recipe and lock give the same bytes on every machine.

    \b
    Examples:
      imgkit render mn5
      imgkit render ./mine.yaml -o Dockerfile
      imgkit render mn5 --context mn5.tar && docker build -t mn5 - < mn5.tar
      imgkit render mn5 --format def -o mn5.def
    """
    from imgkit_builder.base import files
    from imgkit_builder.cli.recipes import load_recipe
    from imgkit_builder.image import render
    from imgkit_builder.recipe import lock_follow

    loaded = load_recipe(recipe)
    if not no_lock:
        wanted = platform or loaded.image.platforms[0]
        loaded = lock_follow.follow(loaded, platform=wanted, base=base)
        base = loaded.lock.base.exact if loaded.lock else base
    make = render.dockerfile if form is RenderFormat.DOCKERFILE else render.definition
    text = make(loaded, base=base, platform=platform)
    if context is not None:
        from imgkit_builder.image.context import pack, revision
        from imgkit_builder.oci.manifest import BaseImage

        found = with_leave(
            lambda large: pack(
                loaded,
                base=BaseImage(name=base or loaded.image.base),
                platform=platform or loaded.image.platforms[0],
                revision=revision(loaded.file.parent),
                large=large,
            ),
            large=large,
        )
        with found.open() as source, files.writing(context) as target:
            while chunk := source.read(1 << 20):
                target.write(chunk)
    if output is not None:
        files.put(output, text)
    else:
        terminal.document(text)

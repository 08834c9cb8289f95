"""``imgkit build``: a recipe becomes a tested image or .sif; ``--dry-run`` prints the plan."""

from __future__ import annotations

import typer

from imgkit_builder.cli.build_options import BuildCommand, BuildOptions, refuse_others
from imgkit_builder.cli.common import complete_names

COMMAND_CLASSES = {"build": BuildCommand}
"""The verb whose options are a value."""


def verb_build(
    flags: typer.Context,
    recipe: str = typer.Argument(
        metavar="RECIPE|FILE",
        autocompletion=complete_names,
        help="A shipped recipe (imgkit list) or a .yaml file.",
    ),
) -> None:
    """Build the image of a recipe, then test it.

    A local base needs no network. The image gets its name last, so a failed build
    leaves the old image in place. The full log and the Dockerfile stay in
    $XDG_STATE_HOME/imgkit/builds.

    \b
    Examples:
      imgkit build mn5
      imgkit build ./mine.yaml --tag group/mine:1
      imgkit build ./mine.yaml --locked                    (see: imgkit lock)
      imgkit build mn5 --base imgkit.local/standin:24.03   (for tests)
      imgkit build olivia --dry-run                        (needs no Docker)
      imgkit build olivia --with apptainer                 (on a cluster: olivia.sif)
      imgkit build mn5 --with apptainer --base-from pytorch.tar
    """
    options: BuildOptions = flags.obj
    refuse_others(options)
    if options.program == "docker":
        from imgkit_builder.cli import build_image

        build_image.run(recipe, options)
    else:
        from imgkit_builder.cli import build_sif

        build_sif.run(recipe, options)

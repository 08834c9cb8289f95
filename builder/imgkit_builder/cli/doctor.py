"""``imgkit doctor``: check this machine."""

from __future__ import annotations

from typing import Literal

import typer

from imgkit_builder.cli.common import RESULT_JSON, complete_names, show
from imgkit_entrypoints.errors import EXIT_NO


def verb_doctor(
    recipe: str | None = typer.Argument(
        None, metavar="[RECIPE]", autocompletion=complete_names, help="Also check what this recipe needs."
    ),
    purpose: Literal["any", "build", "sif"] = typer.Option(
        "any",
        "--for",
        help="Task to check for. build: an engine, or build --with apptainer. sif: all but engines.",
    ),
    as_json: bool = RESULT_JSON,
) -> None:
    """Check what this machine has and lacks, and suggest fixes.

    Changes nothing. A fail (exit code 1) means that the task of --for will not work;
    a warn does not: a laptop without Singularity still builds images.

    \b
    Examples:
      imgkit doctor
      imgkit doctor mn5 --for sif      # on the cluster
      imgkit doctor olivia --for build --json
    """
    from imgkit_builder.base import checks
    from imgkit_builder.examine import doctor
    from imgkit_builder.recipe import targets

    target = targets.find(recipe) if recipe else None
    results = doctor.examine(target, purpose=purpose)
    subject = {"recipe": target.name if target else "", "for": purpose}
    show(checks.to_dict(results, **subject), *checks.table(results), as_json=as_json)
    if not checks.passed(results):
        raise typer.Exit(EXIT_NO)

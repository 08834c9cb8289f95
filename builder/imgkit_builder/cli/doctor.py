"""``imgkit doctor``: check this machine."""

from __future__ import annotations

import enum

import typer

from imgkit_builder.cli.common import RESULT_JSON, complete_names, show
from imgkit_entrypoints.errors import EXIT_NO


class Purpose(str, enum.Enum):
    """The task that the machine must be able to do."""

    ANY = "any"
    BUILD = "build"
    SIF = "sif"


def verb_doctor(
    recipe: str | None = typer.Argument(
        None, metavar="[RECIPE]", autocompletion=complete_names, help="Also check what this recipe needs."
    ),
    purpose: Purpose = typer.Option(
        Purpose.ANY,
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
    results = doctor.examine(target, purpose=purpose.value)
    subject = {"recipe": target.name if target else "", "for": purpose.value}
    show(checks.to_dict(results, **subject), *checks.table(results), as_json=as_json)
    if not checks.passed(results):
        raise typer.Exit(EXIT_NO)

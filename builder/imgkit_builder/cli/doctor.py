"""``imgkit doctor``: check this machine."""

from __future__ import annotations

from typing import Literal

import typer

from imgkit_builder.cli.common import JSON, name_argument, show_checks
from imgkit_builder.examine import doctor
from imgkit_builder.recipe import targets


def verb_doctor(
    recipe: str | None = name_argument("[RECIPE]", "Also check what this recipe needs.", None),
    purpose: Literal["any", "build", "sif"] = typer.Option(
        "any",
        "--for",
        help="Task to check for. build: an engine, or build --with apptainer. sif: all but engines.",
    ),
    as_json: bool = JSON,
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
    target = targets.find(recipe) if recipe else None
    results = doctor.examine(target, purpose=purpose)
    show_checks(results, as_json=as_json, **{"recipe": target.name if target else "", "for": purpose})

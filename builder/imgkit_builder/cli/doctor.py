"""``imgkit doctor``: check this machine, or a cluster that ssh reaches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import typer

from imgkit_builder.cli.common import HERE, JSON, name_argument, show_checks
from imgkit_builder.cli.jobs import may_ask
from imgkit_builder.recipe import targets
from imgkit_entrypoints.errors import UsageError

if TYPE_CHECKING:
    from imgkit_builder.base.checks import Check


def verb_doctor(
    recipe: str | None = name_argument("[RECIPE]", "Also check what this recipe needs.", None),
    purpose: Literal["any", "build", "sif"] = typer.Option(
        "any",
        "--for",
        help="Task to check for. build: an engine, or build --with apptainer. sif: all but engines.",
    ),
    on: str = typer.Option(
        "", metavar="NAME", help="Check this remote for what jobs need (imgkit remote list)."
    ),
    as_json: bool = JSON,
) -> None:
    """Check what this machine or a remote has and lacks, and suggest fixes.

    Here, a fail (exit code 1) means that the task of --for will not work; a warn does
    not: a laptop without Singularity still builds images. With --on, imgkit logs in
    once and checks the tools that it uses there, the scheduler and the runtime of
    RECIPE or of the remote's recipe, and imgkit's folder, its free space and quota.
    It makes the folder, and changes nothing else.

    \b
    Examples:
      imgkit doctor
      imgkit doctor --on mn5
      imgkit doctor mn5 --for sif      # on the cluster
      imgkit doctor olivia --for build --json
    """
    results: tuple[Check, ...]
    if on in ("", HERE):
        from imgkit_builder.examine import doctor

        target = targets.load_target(recipe) if recipe else None
        results = doctor.check_machine(target, purpose=purpose)
    else:
        from imgkit_builder.jobs.remote import check, config, connection

        if purpose != "any":
            raise UsageError("--for cannot be combined with --on", where="--for", hint="leave it out")
        remote = config.get_remote(on)
        recipe = recipe or remote.recipe
        target = targets.load_target(recipe) if recipe else None
        results = check.check_remote(connection.connect(remote, ask=may_ask()), target)
    context = {"recipe": target.name if target else "", "for": purpose, "on": on}
    show_checks(results, as_json=as_json, **context)

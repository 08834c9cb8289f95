"""``imgkit doctor``: check this machine, or the hosts of a job."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from imgkit_builder.cli.common import RESULT_JSON, complete_names, show
from imgkit_entrypoints.errors import EXIT_NO

if TYPE_CHECKING:
    from imgkit_builder.base.checks import Check
    from imgkit_builder.recipe.targets import Target


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
    hosts: str = typer.Option(
        "",
        metavar="A,B|./FILE",
        help="Check these hosts instead: reachable by ssh, with the same software.",
    ),
    image: str = typer.Option(
        "", metavar="PATH|REF", help="With --hosts: the image of the job (default: as imgkit run)."
    ),
    as_json: bool = RESULT_JSON,
) -> None:
    """Check what this machine has and lacks, and suggest fixes.

    Changes nothing. A fail (exit code 1) means that the task of --for will not work;
    a warn does not: a laptop without Singularity still builds images.

    \b
    Examples:
      imgkit doctor
      imgkit doctor lambda --hosts 10.0.0.1,10.0.0.2
      imgkit doctor mn5 --for sif      # on the cluster
      imgkit doctor olivia --for build --json
    """
    from imgkit_builder.base import checks
    from imgkit_builder.examine import doctor
    from imgkit_builder.job.ssh import fanout
    from imgkit_builder.recipe import targets

    target = targets.find(recipe) if recipe else None
    about: dict[str, object] = {"recipe": target.name if target else ""}
    if named := fanout.read(hosts):
        results, about["hosts"] = _of_hosts(target, named, image), named
    else:
        results, about["for"] = doctor.examine(target, purpose=purpose.value), purpose.value
    show(checks.to_dict(results, **about), *checks.table(results), as_json=as_json)
    if not checks.passed(results):
        raise typer.Exit(EXIT_NO)


def _of_hosts(target: Target | None, hosts: tuple[str, ...], image: str) -> tuple[Check, ...]:
    from imgkit_builder.base import process
    from imgkit_builder.job.ssh import doctor as nodes
    from imgkit_entrypoints.errors import UsageError

    if target is None:
        raise UsageError(
            "--hosts needs a RECIPE, for its system",
            where="RECIPE",
            hint=f"imgkit doctor lambda --hosts {','.join(hosts)}",
        )
    process.need("ssh", "apt-get install openssh-client")
    runtime = target.system.runtime
    if runtime.kind == "singularity":
        image = str(Path(image or f"{target.name}.sif").absolute())
    return nodes.examine(
        hosts,
        kind=runtime.kind,
        command=runtime.command,
        image=image or f"{target.name}:latest",
        gpus=target.system.node.gpus > 0,
    )

"""``imgkit build``: a recipe becomes a tested image or .sif; ``--dry-run`` prints the plan."""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from imgkit_builder.cli.common import (
    JSON,
    VERBOSE,
    flag_option,
    name_argument,
    next_line,
    result_lines,
    show,
    stage_seconds,
    terminable,
    with_leave,
)
from imgkit_builder.cli.job_flags import OptionsCommand
from imgkit_builder.cli.progress import reporter
from imgkit_builder.job.request import flag, flags_in
from imgkit_builder.workflow import build
from imgkit_builder.workflow.build import BuildRequest, SifBuildRequest
from imgkit_entrypoints import terminal
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.terminal import shown

if TYPE_CHECKING:
    from imgkit_builder.apptainer.build import BuiltSif
    from imgkit_builder.base.progress import Reporter
    from imgkit_builder.workflow.build import BuiltImage, ImagePlan, SifPlan

Answer = tuple[str, dict[str, Any]]
"""The result for people, and for ``--json``."""


@dataclass(frozen=True, kw_only=True)
class BuildOptions(BuildRequest, SifBuildRequest):
    """The options of ``imgkit build``: both kinds of request, and which of them counts."""

    program: Literal["docker", "apptainer"] = flag(
        "docker",
        "--with",
        help="docker: an engine makes an image. apptainer: Apptainer or Singularity makes a .sif; needs no "
        "Docker and no root.",
    )


class BuildCommand(OptionsCommand):
    """The verb ``build``, with `BuildOptions` in ``Context.obj``."""

    def owners(self, *, quiet: bool) -> list[type[Any]]:
        """Return one dataclass."""
        return [BuildOptions]

    def build(self, values: dict[type[Any], dict[str, Any]]) -> BuildOptions:
        """Return the options."""
        return BuildOptions(**values[BuildOptions])


COMMAND_CLASSES = {"build": BuildCommand}
"""The verb whose options are a value."""

NOT_WITH = {
    "docker": ("--output", "--base-from", "--tmpdir", "--runtime-command"),
    "apptainer": ("--tag", "--builder"),
}
"""Options that only the other program has."""


def verb_build(
    flags: typer.Context,
    recipe: str = name_argument("RECIPE|FILE", "A shipped recipe (imgkit list) or a .yaml file."),
    dry_run: bool = flag_option("--dry-run", "Print the plan and the Dockerfile; needs no Docker."),
    as_json: bool = JSON,
    verbose: bool = VERBOSE,
) -> None:
    """Build the image of a recipe, then test it.

    A local base needs no network. The image is tagged last, so a failed build
    leaves the old image in place. The full log and the Dockerfile stay in
    $XDG_STATE_HOME/imgkit/builds.

    \b
    Examples:
      imgkit build mn5
      imgkit build ./mine.yaml --tag group/mine:1
      imgkit build ./mine.yaml --build-arg MAX_JOBS=4      (for image.args of the recipe)
      imgkit build ./mine.yaml --locked                    (see: imgkit lock)
      imgkit build mn5 --base imgkit.local/standin:24.03   (for tests)
      imgkit build olivia --dry-run                        (needs no Docker)
      imgkit build olivia --with apptainer                 (on a cluster: olivia.sif)
      imgkit build mn5 --with apptainer --base-from pytorch.tar
    """
    options: BuildOptions = flags.obj
    for name in flags_in(options):
        if name in NOT_WITH[options.program]:
            raise UsageError(f"{name} cannot be used --with {options.program}", where=name, hint="omit it")
    run = _image if options.program == "docker" else _sif

    def attempt(large: bool) -> Answer:
        with terminable(), reporter(as_json=as_json, verbose=verbose) as report:
            return run(recipe, dataclasses.replace(options, large=large), report, dry_run=dry_run)

    text, data = with_leave(attempt, large=options.large, may_ask=not as_json)
    if as_json:
        show(data, as_json=True)
    else:
        terminal.document(text + "\n")


def _image(recipe: str, options: BuildOptions, report: Reporter, *, dry_run: bool) -> Answer:
    if dry_run:
        plan = build.plan(recipe, options, report=report)
        return _planned(plan, plan.dockerfile)
    # The next command takes the same argument, unless --tag gave the image another name.
    return _built_image(build.build(recipe, options, report=report), recipe, tag=options.tag)


def _sif(recipe: str, options: BuildOptions, report: Reporter, *, dry_run: bool) -> Answer:
    if dry_run:
        plan = build.plan_sif(recipe, options, report=report)
        return _planned(plan, plan.definition)
    built = build.build_sif(recipe, options, report=report)
    return _built_sif(built, options.output or Path(built.path.name))


def _planned(plan: ImagePlan | SifPlan, text: str) -> Answer:
    """Return the plan, as comments above the Dockerfile or definition `text`."""
    data = dataclasses.asdict(plan)
    comments = (f"# {name:13} {shown(str(value))}" for name, value in data.items() if value != text)
    return "\n".join((*comments, text.rstrip("\n"))), {"dry_run": True, **data}


def _next(recipe: str, tag: str | None, runtime: str) -> str:
    """Return the next command for an image that was built, as it is typed."""
    from imgkit_builder.workflow.names import stem

    again = shlex.quote(tag or recipe)
    if runtime == "kubernetes":
        return f"imgkit push {again} REGISTRY/{stem(tag or recipe)}:1"
    if runtime == "docker":
        named = f" --image {again}" if tag else ""
        return f"imgkit run {shlex.quote(recipe)}{named} -- dist-hello"
    return f"imgkit sif {again}     # for a cluster: imgkit save {again}"


def _built_image(built: BuiltImage, recipe: str, *, tag: str | None) -> Answer:
    from imgkit_builder.base import checks

    lines = [
        f"{built.tag}  {built.id}  {built.size_bytes / 1e6:.1f} MB  {built.platform}",
        f"next: {_next(recipe, tag, built.runtime)}",
    ]
    if built.standin:
        lines.insert(1, f"a STAND-IN: {built.base.name} has no NVIDIA software; for tests only")
    data = {
        **dataclasses.asdict(built),
        "checks": checks.to_dict(built.checks)["checks"],
    }
    return "\n".join(map(shown, lines)), data


def _built_sif(built: BuiltSif, target: Path) -> Answer:
    from imgkit_builder.base import checks

    record, base = built.record, built.base
    following = next_line(target, "dist-train")
    data = {
        "sif": built.path,
        "id": record.image_id,
        "platform": base.platform,
        "size_bytes": built.size_bytes,
        "standin": base.standin,
        "base": {"name": base.name, "id": base.id, "digest": base.digest},
        "up_to_date": built.up_to_date,
        "record": dataclasses.asdict(record),
        "labels": dict(built.labels),
        "checks": checks.to_dict(built.checks)["checks"],
        "seconds": stage_seconds(built.stages),
        "log": built.log,
        "next": following,
    }
    lines = result_lines(built, target, following)
    if base.standin:
        lines.insert(-1, f"a STAND-IN: {base.name} has no NVIDIA software; for tests only")
    return "\n".join(map(shown, lines)), data

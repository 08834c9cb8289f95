"""``imgkit build``: build and test the image or .sif of a recipe, or print the plan with ``--dry-run``."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from imgkit_builder.base.flags import flags_in, option_field
from imgkit_builder.cli.common import (
    JSON,
    MB,
    RECIPE,
    VERBOSE,
    exit_on_sigterm,
    flag_option,
    print_result,
    with_leave,
)
from imgkit_builder.cli.options import GroupedCommand
from imgkit_builder.cli.progress import reporter
from imgkit_builder.cli.sif import next_line, result_lines, show_stages
from imgkit_builder.cli.submission import SubmitOptions, refuse_without_submit, submit_job
from imgkit_builder.jobs import runtimes
from imgkit_builder.workflow import build
from imgkit_builder.workflow.build import BuildRequest, SifBuildRequest
from imgkit_builder.workflow.names import name_stem
from imgkit_entrypoints import terminal
from imgkit_entrypoints.errors import UsageError

if TYPE_CHECKING:
    from imgkit_builder.apptainer.build import BuiltSif
    from imgkit_builder.workflow.build import BuiltImage, ImagePlan, SifPlan

COMMAND_CLASSES = {"build": GroupedCommand}


@dataclass(frozen=True, kw_only=True)
class BuildOptions(BuildRequest, SifBuildRequest):
    """The options of ``imgkit build``: those of both kinds of request, and ``--with``, which selects one."""

    program: Literal["docker", "apptainer"] = option_field(
        "docker",
        "--with",
        help="docker: an engine makes an image. apptainer: Apptainer or Singularity makes a .sif; needs no "
        "Docker and no root.",
    )


NOT_WITH = {
    "docker": ("--output", "--base-from", "--tmpdir", "--runtime-command"),
    "apptainer": ("--tag", "--builder"),
}
"""The options that cannot be used with each value of ``--with``."""


def verb_build(
    recipe: str = RECIPE,
    *,
    options: BuildOptions,
    dry_run: bool = flag_option(
        "--dry-run", "Print the plan and the Dockerfile, or the job's script; needs no Docker."
    ),
    as_json: bool = JSON,
    verbose: bool = VERBOSE,
    job: SubmitOptions,
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
      imgkit build mn5 --with apptainer --submit -A bsc98 --time 1h
    """
    for name in flags_in(options):
        if name in NOT_WITH[options.program]:
            raise UsageError(f"{name} cannot be used --with {options.program}", where=name, hint="omit it")
    if job.submit:
        from imgkit_builder.jobs.conversion import prepare_build

        if options.program != "apptainer":
            message = "--submit cannot be used --with docker"
            raise UsageError(message, where="--submit", hint="--with apptainer")
        prepared = prepare_build(recipe, job.request, options, verbose=verbose)
        submit_job(prepared, job, dry_run=dry_run, as_json=as_json)
        return
    refuse_without_submit(job)
    run: Callable[..., Any]
    if options.program == "docker":
        run = build.plan if dry_run else build.build
    else:
        run = build.plan_sif if dry_run else build.build_sif

    def attempt(large: bool) -> Any:
        with exit_on_sigterm(), reporter(as_json=as_json, verbose=verbose) as report:
            return run(recipe, dataclasses.replace(options, large=large), report=report)

    result = with_leave(attempt, large=options.large, may_ask=not as_json)
    if dry_run:
        _show_plan(result, as_json=as_json)
    elif options.program == "docker":
        # The next command takes the same argument, unless --tag gave the image another name.
        _show_image(result, _next_command(recipe, options.tag, result.runtime), as_json=as_json)
    else:
        _show_sif(result, options.output or Path(result.path.name), as_json=as_json)


def _show_plan(plan: ImagePlan | SifPlan, *, as_json: bool) -> None:
    """Print the values of the plan as comments, followed by the Dockerfile or definition."""
    data = dataclasses.asdict(plan)
    if as_json:
        print_result({"dry_run": True, **data}, as_json=True)
        return
    # The last field of both plans is the Dockerfile or definition.
    *rows, (_, text) = data.items()
    comments = "".join(f"# {name:13} {terminal.escape_controls(str(value))}\n" for name, value in rows)
    terminal.print_document(f"{comments}{text.rstrip()}\n")


def _next_command(recipe: str, tag: str | None, runtime: str) -> str:
    """Return the command to type after a build, which depends on how jobs of the recipe start the image.

    Parameters
    ----------
    tag : the value of ``--tag``, or None.
    runtime : the kind of runtime of the recipe's system, such as ``singularity``.
    """
    again, system_runtime = shlex.quote(tag or recipe), runtimes.get_runtime(runtime)
    # Pods pull their image from a registry. Docker starts the image itself. The other runtimes start a file.
    if system_runtime.is_isolated:
        return f"imgkit push {again} REGISTRY/{name_stem(tag or recipe)}:1"
    if not system_runtime.image_suffix:
        named = f" --image {again}" if tag else ""
        return f"imgkit run {shlex.quote(recipe)}{named} -- dist-hello"
    return f"imgkit sif {again}     # for a cluster: imgkit save {again}"


def _show_image(built: BuiltImage, following: str, *, as_json: bool) -> None:
    """Print the image that was built, and the command to type next."""
    lines = [
        f"{built.tag}  {built.id}  {built.size_bytes / MB:.1f} MB  {built.platform}",
        *_standin_lines(built.standin, built.base.name),
        f"next: {following}",
    ]
    print_result(dataclasses.asdict(built), *lines, as_json=as_json)


def _show_sif(built: BuiltSif, target: Path, *, as_json: bool) -> None:
    """Print the .sif that was built, the seconds of each stage, and the command to type next."""
    base, following = built.base, next_line(target, "dist-train")
    data = dataclasses.asdict(built)
    del data["record"]["facts"]
    data |= {
        "sif": data.pop("path"),
        "id": built.record.image_id,
        "platform": base.platform,
        "standin": base.standin,
        "base": {"name": base.name, "id": base.id, "digest": base.digest},
        "next": following,
    }
    lines = result_lines(built, target, following)
    # Before the last line, which is the next command.
    lines[-1:-1] = _standin_lines(base.standin, base.name)
    show_stages(data, built.stages, *lines, as_json=as_json)


def _standin_lines(is_standin: bool, base: str) -> list[str]:
    """Return the warning about a base without NVIDIA software, or nothing for other bases."""
    return [f"a STAND-IN: {base} has no NVIDIA software; for tests only"] if is_standin else []

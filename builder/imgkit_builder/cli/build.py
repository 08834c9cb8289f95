"""``imgkit build``: build and test the image or .sif of a recipe. ``--dry-run`` only prints the plan."""

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
    confirm_large_code,
    exit_on_sigterm,
    flag_option,
    print_result,
)
from imgkit_builder.cli.options import GroupedCommand
from imgkit_builder.cli.progress import reporter
from imgkit_builder.cli.sif import result_lines, show_stages, sif_command
from imgkit_builder.cli.submission import SubmitOptions, refuse_without_submit, submit_job
from imgkit_builder.jobs import runtimes
from imgkit_builder.workflow import build
from imgkit_builder.workflow.build_request import BuildRequest, SifBuildRequest
from imgkit_builder.workflow.names import name_stem
from imgkit_entrypoints import terminal
from imgkit_entrypoints.errors import UsageError

if TYPE_CHECKING:
    from imgkit_builder.apptainer.build import BuiltSif
    from imgkit_builder.workflow.build import BuiltImage, ImagePlan, SifPlan

COMMAND_CLASSES = {"build": GroupedCommand}


@dataclass(frozen=True, kw_only=True)
class BuildOptions(BuildRequest, SifBuildRequest):
    """The options of ``imgkit build``: both kinds of request, and ``--with``, which selects one."""

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
    _refuse_with_program(options, submit=job.submit)
    if job.submit:
        from imgkit_builder.jobs.conversion import prepare_build

        prepared = prepare_build(recipe, job.request, options, verbose=verbose)
        submit_job(prepared, job, dry_run=dry_run, as_json=as_json)
        return
    refuse_without_submit(job)
    build_or_plan = _choose_function(options.program, dry_run=dry_run)

    def run_build(large: bool) -> Any:
        with exit_on_sigterm(), reporter(as_json=as_json, verbose=verbose) as report:
            return build_or_plan(recipe, dataclasses.replace(options, large=large), report=report)

    result = confirm_large_code(run_build, large=options.large, may_ask=not as_json)
    if dry_run:
        _show_plan(result, as_json=as_json)
    elif options.program == "docker":
        # The next command takes the same argument, unless --tag gave the image another name.
        _show_image(result, _next_command(recipe, options.tag, result.runtime), as_json=as_json)
    else:
        _show_sif(result, options.output or Path(result.path.name), as_json=as_json)


def _refuse_with_program(options: BuildOptions, *, submit: bool) -> None:
    """Raise UsageError if an option, or ``--submit``, cannot be used with the value of ``--with``."""
    for flag in flags_in(options):
        if flag in NOT_WITH[options.program]:
            raise UsageError(f"{flag} cannot be used --with {options.program}", where=flag, hint="omit it")
    if submit and options.program != "apptainer":
        message = "--submit cannot be used --with docker"
        raise UsageError(message, where="--submit", hint="--with apptainer")


def _choose_function(program: str, *, dry_run: bool) -> Callable[..., Any]:
    """Return the function that builds with `program`, the value of ``--with``, or that plans the build.

    All four functions take the recipe, the options and the reporter.
    """
    if program == "docker":
        return build.plan if dry_run else build.build
    return build.plan_sif if dry_run else build.build_sif


def _show_plan(plan: ImagePlan | SifPlan, *, as_json: bool) -> None:
    """Print the values of the plan as comments, and then the Dockerfile or definition."""
    plan_values = dataclasses.asdict(plan)
    if as_json:
        print_result({"dry_run": True, **plan_values}, as_json=True)
        return
    # The plan of an image has a Dockerfile, and that of a .sif has a definition. It is printed last.
    document = plan_values.pop("dockerfile" if "dockerfile" in plan_values else "definition")
    for name, field_value in plan_values.items():
        terminal.print_document(f"# {name:13} {terminal.escape_controls(str(field_value))}\n")
    terminal.print_document(f"{document.rstrip()}\n")


def _next_command(recipe: str, tag: str | None, runtime: str) -> str:
    """Return the command to suggest after a build: ``imgkit push``, ``imgkit sif`` or ``imgkit run``.

    The command depends on how jobs of the recipe start the image: in pods, from a file, or from Docker.

    Parameters
    ----------
    tag : the value of ``--tag``, or None.
    runtime : the kind of runtime of the recipe's system, such as ``singularity``.
    """
    image = tag or recipe
    quoted_image = shlex.quote(image)
    recipe_runtime = runtimes.get_runtime(runtime)
    if recipe_runtime.is_isolated:  # pods pull their image from a registry
        return f"imgkit push {quoted_image} REGISTRY/{name_stem(image)}:1"
    if recipe_runtime.image_suffix:  # the job starts a file, such as a .sif
        return f"imgkit sif {quoted_image}     # for a cluster: imgkit save {quoted_image}"
    # Docker starts the image itself.
    image_flag = f" --image {quoted_image}" if tag else ""
    return f"imgkit run {shlex.quote(recipe)}{image_flag} -- dist-hello"


def _show_image(built: BuiltImage, next_command: str, *, as_json: bool) -> None:
    """Print the image that was built, and the command to run next."""
    lines = [f"{built.tag}  {built.id}  {built.size_bytes / MB:.1f} MB  {built.platform}"]
    if built.standin:
        lines.append(_standin_warning(built.base.name))
    print_result(dataclasses.asdict(built), *lines, f"next: {next_command}", as_json=as_json)


def _show_sif(built: BuiltSif, target: Path, *, as_json: bool) -> None:
    """Print the .sif that was built, the seconds of each stage, and the command to run next."""
    base = built.base
    next_command = sif_command(target)
    # The JSON has all fields of `built`, with the path under another name, and with fewer values of the base.
    sif_data = dataclasses.asdict(built)
    sif_data["base"] = {"name": base.name, "id": base.id, "digest": base.digest}
    sif_data["sif"] = sif_data.pop("path")
    sif_data["id"] = built.record.image_id
    sif_data["platform"] = base.platform
    sif_data["standin"] = base.standin
    sif_data["next"] = next_command
    lines = result_lines(built, target)
    if base.standin:
        lines.append(_standin_warning(base.name))
    show_stages(sif_data, *lines, f"next:  {next_command}", as_json=as_json)


def _standin_warning(base: str) -> str:
    """Return the warning that the base image `base` is a stand-in for tests, without NVIDIA's software."""
    return f"a STAND-IN: {base} has no NVIDIA software; for tests only"

"""``imgkit sif``: convert any image to a .sif or .sqsh."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from imgkit_builder.cli.common import (
    JSON,
    MB,
    UNPACK_LIMIT,
    VERBOSE,
    exit_on_sigterm,
    flag_option,
    gigabytes_to_bytes,
    name_argument,
    output_option,
    print_result,
)
from imgkit_builder.cli.options import GroupedCommand
from imgkit_builder.cli.progress import reporter
from imgkit_builder.cli.submission import SubmitOptions, refuse_without_submit, submit_job
from imgkit_builder.jobs import quoting, runtimes
from imgkit_builder.sif.conversion import FormatName, Options
from imgkit_builder.workflow import baked
from imgkit_builder.workflow.convert import convert, plan_conversion
from imgkit_entrypoints.errors import ImgkitError

if TYPE_CHECKING:
    from imgkit_builder.apptainer.build import BuiltSif
    from imgkit_builder.sif.conversion import Converted
    from imgkit_entrypoints.system import SystemFacts

COMMAND_CLASSES = {"sif": GroupedCommand}


def verb_sif(
    image: str = name_argument(
        "ARCHIVE|RECIPE|IMAGE|OCI-DIR|-",
        "An archive from imgkit save or docker save (- for standard input), a built recipe, a local "
        "image, or an OCI folder.",
    ),
    output: Path | None = output_option("FILE", "File to write (default: NAME.sif or NAME.sqsh here)."),
    format: FormatName | None = typer.Option(
        None,
        "--format",
        help="sif: for Singularity and Apptainer. sqsh: for pyxis, enroot and Charliecloud (default: sqsh if "
        "the name of --output ends in .sqsh, else sif).",
    ),
    *,
    options: Options,
    unpack_limit: float | None = UNPACK_LIMIT,
    dry_run: bool = flag_option("--dry-run", "Print the commands, or the job's script, then exit."),
    as_json: bool = JSON,
    verbose: bool = VERBOSE,
    job: SubmitOptions,
) -> None:
    """Convert an image to a .sif for Singularity or Apptainer, and check it.

    Needs no root and, for an archive, no Docker and no Singularity. Replaces an older
    .sif atomically, and only once the new one is verified; an up-to-date .sif is left
    alone. An interrupted run leaves the old file or none. --format sqsh writes the
    squashfs that pyxis, enroot and Charliecloud start, and its checksum next to it.

    With --submit, a job does this on a node that the cluster has for such work. Where
    no file beside the archive names the cluster, --system does.

    \b
    Examples:
      imgkit sif mn5.tar
      imgkit sif mn5
      docker save mine:1 | imgkit sif - -o mine.sif
      imgkit sif mn5.tar.zst -o /scratch/mn5.sif --tmpdir /scratch/tmp
      imgkit sif mn5.tar --format sqsh
      imgkit sif mn5.tar --submit -A bsc98 --time 1h
    """
    if format is None:
        format = "sqsh" if output and output.suffix == ".sqsh" else "sif"
    request = dataclasses.replace(options, format=format, unpack_limit_bytes=gigabytes_to_bytes(unpack_limit))
    if job.submit:
        from imgkit_builder.jobs.conversion import prepare_conversion

        prepared = prepare_conversion(image, job.request, output, request, verbose=verbose)
        submit_job(prepared, job, dry_run=dry_run, as_json=as_json)
        return
    refuse_without_submit(job)
    if dry_run:
        plan = plan_conversion(image, output, request)
        data = {"dry_run": True, "file": plan.target, "commands": plan.commands}
        print_result(data, *plan.commands, as_json=as_json)
        return
    with exit_on_sigterm(), reporter(as_json=as_json, verbose=verbose) as report:
        converted = convert(image, output, request, report=report)
    _show_converted(converted, output or Path(converted.path.name), as_json=as_json)


def _show_converted(converted: Converted, target: Path, *, as_json: bool) -> None:
    """Print the file that a conversion has written, the seconds of each stage, and the command to run next.

    `target` is the path to show for the file: the value of ``--output``, or its name in the current folder.
    """
    next_command = sif_command(target) if converted.format == "sif" else _make_sqsh_command(converted.path)
    result = dataclasses.asdict(converted)
    lines = result_lines(converted, target, up_to_date=converted.up_to_date)
    show_stages(
        {"file": result.pop("path"), **result, "next": next_command},
        *lines,
        f"next:  {next_command}",
        as_json=as_json,
    )


def _make_sqsh_command(sqsh: Path) -> str:
    """Return the srun command that starts a .sqsh with pyxis.

    The command starts ``dist-train``. If imgkit did not build the image, it starts a shell instead.
    """
    command = ["dist-train"] if _read_system(sqsh) else ["--pty", "/bin/sh"]
    return shlex.join(["srun", f"--container-image={sqsh}", *command])


def _read_system(image: Path) -> SystemFacts | None:
    """Return the system that a .sif or .sqsh is for, or None if it is unknown."""
    try:
        return baked.system_facts(image)
    except (ImgkitError, OSError):
        return None


def sif_command(sif: Path) -> str:
    """Return the command to suggest after a conversion, such as ``singularity exec --nv mn5.sif dist-train``.

    The command has the options and mounts of the image's system. If imgkit did not build the image, it has no
    ``dist-train``, so the command opens a shell instead.
    """
    system = _read_system(sif)
    if system is None:
        return shlex.join(("singularity", "shell", str(sif)))
    runtime = system.runtime
    if runtimes.get_runtime(runtime.kind).image_suffix == ".sif":
        argv = [runtime.command, "exec", *runtime.options]
    else:
        argv = ["singularity", "exec"]  # the recipe's options are for another runtime, and are left out
    # A bind may contain a variable such as $SCRATCH, which the user's shell must expand.
    for bind in runtime.binds:
        argv += ["--bind", quoting.quote_with_site_variables(bind)]
    argv += [str(sif), "dist-train"]
    # `quote` does not quote such a bind a second time, because its type is ShellText.
    return " ".join(quoting.quote(argument) for argument in argv)


def show_stages(result: dict[str, Any], *lines: str, as_json: bool) -> None:
    """Print the result of a conversion or build as JSON, or as lines with the seconds of each stage.

    The JSON has the key ``seconds`` with the seconds of each stage, in place of ``stages``.

    Parameters
    ----------
    result : the JSON form of `Converted` or `BuiltSif`. It is changed.
    lines : further lines for people, which follow those of the stages.
    """
    del result["record"]["facts"]  # a long list; `imgkit sbom` prints the packages
    result["seconds"] = {}
    stage_lines = []
    total_s = 0.0
    for stage in result.pop("stages"):
        result["seconds"][stage["name"]] = round(stage["seconds"], 2)
        stage_lines.append(f"{stage['seconds']:7.1f} s  {stage['name']}")
        total_s += stage["seconds"]
    if stage_lines:
        stage_lines.append(f"{total_s:7.1f} s  in all")
    print_result(result, *stage_lines, *lines, as_json=as_json)


def result_lines(result: Converted | BuiltSif, target: Path, *, up_to_date: bool = False) -> list[str]:
    """Return the lines that describe the file `target`, which a conversion or a build has written."""
    record = result.record
    state = "  up to date" if up_to_date else ""
    summary = f"{result.size_bytes / MB:.1f} MB  {result.arch}  {record.compression}, {record.runtime}"
    lines = [f"{target}  {summary}{state}"]
    if record.image_id:
        lines.append(f"image  {record.image_id}")
    lines.append(f"root   sha256:{record.root_sha256}")
    return lines

"""``imgkit sif``: convert any image to a .sif or .sqsh."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
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
    from imgkit_builder.sif.conversion import Converted, Stage
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
    named: FormatName = "sqsh" if output and output.suffix == ".sqsh" else "sif"
    request = dataclasses.replace(
        options, format=format or named, unpack_limit_bytes=gigabytes_to_bytes(unpack_limit)
    )
    if job.submit:
        from imgkit_builder.jobs.conversion import prepare_conversion

        prepared = prepare_conversion(image, job.request, output, request, verbose=verbose)
        submit_job(prepared, job, dry_run=dry_run, as_json=as_json)
        return
    refuse_without_submit(job)
    if dry_run:
        target, commands = plan_conversion(image, output, request)
        print_result({"dry_run": True, "file": target, "commands": commands}, *commands, as_json=as_json)
        return
    with exit_on_sigterm(), reporter(as_json=as_json, verbose=verbose) as report:
        converted = convert(image, output, request, report=report)
    target = output or Path(converted.path.name)
    following = (
        next_line(target, "dist-train") if converted.format == "sif" else _start_command(converted.path)
    )
    data = dataclasses.asdict(converted)
    del data["record"]["facts"]  # long, and `imgkit sbom` lists the packages
    data = {"file": data.pop("path"), **data, "next": following}
    lines = result_lines(converted, target, following, up_to_date=converted.up_to_date)
    show_stages(data, converted.stages, *lines, as_json=as_json)


def _start_command(sqsh: Path) -> str:
    """Return the srun command that starts a .sqsh with pyxis.

    It starts ``dist-train``, or a shell if imgkit did not build the image.
    """
    command = ["dist-train"] if named_system(sqsh) else ["--pty", "/bin/sh"]
    return shlex.join(["srun", f"--container-image={sqsh}", *command])


def named_system(file: Path) -> SystemFacts | None:
    """Return the system that a .sif or .sqsh names, or None if it names none or cannot be read."""
    try:
        return baked.system_facts(file)
    except (ImgkitError, OSError):
        return None


def next_line(sif: Path, command: str) -> str:
    """Return the command that runs `command` in `sif` with the options of the system that its image is for.

    An image that imgkit did not build has no ``dist-*`` commands, so that the command opens a shell in it
    instead.
    """
    system = named_system(sif)
    if system is None:
        return shlex.join(("singularity", "shell", str(sif)))
    runtime = system.runtime
    starts_sif = runtimes.get_runtime(runtime.kind).image_suffix == ".sif"
    # The options of another runtime mean nothing to Singularity.
    program, options = (runtime.command, runtime.options) if starts_sif else ("singularity", ())
    mounts = quoting.repeat_option("--bind", map(quoting.quote_with_site_variables, runtime.binds))
    return " ".join(map(quoting.quote, (program, "exec", *options, *mounts, str(sif), command)))


def show_stages(data: Mapping[str, Any], stages: Sequence[Stage], *lines: str, as_json: bool) -> None:
    """Print `data` or `lines` as `print_result` does, with the seconds of each stage and their sum."""
    seconds = {stage.name: round(stage.seconds, 2) for stage in stages}
    rows = [f"{stage.seconds:7.1f} s  {stage.name}" for stage in stages]
    if stages:
        rows.append(f"{sum(stage.seconds for stage in stages):7.1f} s  in all")
    data = {name: value for name, value in data.items() if name != "stages"}
    print_result({**data, "seconds": seconds}, *rows, *lines, as_json=as_json)


def result_lines(
    result: Converted | BuiltSif, target: Path, following: str, *, up_to_date: bool = False
) -> list[str]:
    """Return the lines for people about the file that a conversion or a build has written to `target`.

    `following` is the command to type next.
    """
    record = result.record
    summary = f"{result.size_bytes / MB:.1f} MB  {result.arch}  {record.compression}, {record.runtime}"
    return [
        f"{target}  {summary}{'  up to date' if up_to_date else ''}",
        *([f"image  {record.image_id}"] if record.image_id else []),
        f"root   sha256:{record.root_sha256}",
        f"next:  {following}",
    ]

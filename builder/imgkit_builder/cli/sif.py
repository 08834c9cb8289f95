"""``imgkit sif``: any image to a .sif or .sqsh."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

import typer

from imgkit_builder.cli.common import (
    JSON,
    UNPACK_LIMIT,
    VERBOSE,
    gigabytes,
    name_argument,
    named_system,
    next_line,
    output_option,
    result_lines,
    show,
    show_stages,
    terminable,
)
from imgkit_builder.cli.progress import reporter
from imgkit_builder.sif.conversion import FormatName, Options
from imgkit_builder.workflow.convert import convert, plan_conversion


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
    dry_run: bool = typer.Option(False, "--dry-run", help="Print the commands, then exit."),
    as_json: bool = JSON,
    verbose: bool = VERBOSE,
) -> None:
    """Convert an image to a .sif for Singularity or Apptainer, and check it.

    Needs no root and, for an archive, no Docker and no Singularity. Replaces an older
    .sif atomically, and only once the new one is verified; an up-to-date .sif is left
    alone. An interrupted run leaves the old file or none. --format sqsh writes the
    squashfs that pyxis, enroot and Charliecloud start, and its checksum next to it.

    \b
    Examples:
      imgkit sif mn5.tar
      imgkit sif mn5
      docker save mine:1 | imgkit sif - -o mine.sif
      imgkit sif mn5.tar.zst -o /scratch/mn5.sif --tmpdir /scratch/tmp
      imgkit sif mn5.tar --format sqsh
    """
    named: FormatName = "sqsh" if output and output.suffix == ".sqsh" else "sif"
    request = dataclasses.replace(options, format=format or named, unpack_limit_bytes=gigabytes(unpack_limit))
    if dry_run:
        target, commands = plan_conversion(image, output, request)
        show({"dry_run": True, "file": target, "commands": commands}, *commands, as_json=as_json)
        return
    with terminable(), reporter(as_json=as_json, verbose=verbose) as report:
        converted = convert(image, output, request, report=report)
    target = output or Path(converted.path.name)
    following = next_line(target, "dist-train") if converted.format == "sif" else _start(converted.path)
    data = dataclasses.asdict(converted)
    del data["record"]["facts"]  # long, and `imgkit sbom` lists the packages
    data = {"file": data.pop("path"), **data, "next": following}
    lines = result_lines(converted, target, following, up_to_date=converted.up_to_date)
    show_stages(data, converted.stages, *lines, as_json=as_json)


def _start(sqsh: Path) -> str:
    """Return the command that starts a .sqsh by pyxis: training, or a shell in an image of others."""
    command = ["dist-train"] if named_system(sqsh) else ["--pty", "/bin/sh"]
    return shlex.join(["srun", f"--container-image={sqsh}", *command])

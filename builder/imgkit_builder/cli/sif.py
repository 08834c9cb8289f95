"""``imgkit sif``: any image to a .sif or .sqsh."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Literal

import typer

from imgkit_builder.cli.common import (
    JSON,
    RUNTIME,
    TMPDIR,
    UNPACK_LIMIT,
    VERBOSE,
    flag_option,
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
from imgkit_entrypoints.system import CompressionChoice


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
    writer: Literal["auto", "imgkit", "runtime"] = typer.Option(
        "auto",
        help="imgkit: write the file with mksquashfs. runtime: let Singularity or Apptainer build it from "
        "the layers, through spython. auto: imgkit if mksquashfs is available, else runtime; prints which.",
    ),
    compression: CompressionChoice = typer.Option(
        "auto",
        help="auto: runtime.compression of the system, if it states one; else gzip in a .sqsh, and in a "
        ".sif zstd if this machine can write and mount it, else gzip.",
    ),
    tmpdir: Path | None = TMPDIR,
    unpack_limit: float | None = UNPACK_LIMIT,
    force: bool = flag_option(
        "--force", "Convert even if the file is up to date; overwrite a file of another format."
    ),
    runtime: str | None = RUNTIME,
    no_test: bool = flag_option("--no-test", "Do not test the result by running it."),
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
    request = Options(
        format=format or named,
        compression=compression,
        tmpdir=tmpdir,
        unpack_limit_bytes=gigabytes(unpack_limit),
        writer=writer,
        force=force,
        runtime=runtime,
        test=not no_test,
    )
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

"""``imgkit delta`` and ``imgkit apply``: make a delta, put it into a .sif."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import typer

from imgkit_builder.cli.common import (
    JSON,
    MB,
    RUNTIME,
    TMPDIR,
    VERBOSE,
    name_argument,
    next_line,
    output_option,
    show_stages,
    terminable,
)
from imgkit_builder.cli.progress import reporter
from imgkit_builder.workflow.convert import engine_image
from imgkit_builder.workflow.names import module_line, stem, system_of


def verb_delta(
    image: str = name_argument("RECIPE|IMAGE", "A built recipe or a local image."),
    base: Path = typer.Option(..., "--against", metavar="BASE.sif", help="The .sif on the cluster."),
    output: Path | None = output_option("X.imgdelta", "File to write (default: NAME.imgdelta here)."),
    tmpdir: Path | None = TMPDIR,
    runtime: str | None = RUNTIME,
    as_json: bool = JSON,
    verbose: bool = VERBOSE,
) -> None:
    """Write the changes of an image over an older .sif: kilobytes instead of gigabytes.

    The .sif must come from imgkit sif and share its lowest layers with the image.
    imgkit exports the image from the engine once, and compares every file with the
    file manifest of the .sif.

    \b
    Examples:
      imgkit build mn5 && imgkit delta mn5 --against mn5.sif
      singularity exec --nv --overlay mn5.imgdelta:ro mn5.sif dist-train
      imgkit run mn5 -A bsc98 --qos acc_debug --delta mn5.imgdelta -- dist-train
    """
    from imgkit_builder.delta.make import local_base, make
    from imgkit_builder.sif.conversion import Options

    target = output or Path(f"{stem(image)}.imgdelta")
    with terminable(), reporter(as_json=as_json, verbose=verbose) as report, engine_image(image) as new:
        options = Options(runtime=runtime, module_hint=module_line(system_of(image)), tmpdir=tmpdir)
        written = make(new, local_base(base), target, options, report)
    following = next_line(base, "dist-env", overlay=f"{target}:ro")
    data = dataclasses.asdict(written)
    data = {"delta": data.pop("path"), "record": data.pop("delta"), **data, "next": following}
    lines = [
        f"{target}  {written.size_bytes / 1e3:.1f} kB  {written.changed} changed, {written.deleted} deleted",
        f"image  {written.delta.image_id}",
        f"over   {written.delta.base.image_id}",
        f"next:  {following}",
    ]
    show_stages(data, written.stages, *lines, as_json=as_json)


def verb_apply(
    delta: Path = typer.Argument(metavar="X.imgdelta", help="A file from imgkit delta."),
    base: Path = typer.Argument(metavar="BASE.sif", help="The .sif that it was made for; not changed."),
    output: Path = typer.Option(..., "--output", "-o", metavar="NEW.sif", help="File to write."),
    tmpdir: Path | None = TMPDIR,
    runtime: str | None = RUNTIME,
    as_json: bool = JSON,
    verbose: bool = VERBOSE,
) -> None:
    """Put a delta into a copy of its .sif: one file, which needs no --overlay.

    The new file is verified before it is renamed into place; nothing in the image
    is executed.

    \b
    Examples:
      imgkit apply mn5.imgdelta mn5.sif -o mn5-2.sif
    """
    from imgkit_builder.delta.apply import apply
    from imgkit_builder.sif.conversion import Options

    with terminable(), reporter(as_json=as_json, verbose=verbose) as report:
        applied = apply(delta, base, output, Options(runtime=runtime, tmpdir=tmpdir), report)
    data = dataclasses.asdict(applied)
    lines = [
        f"{output}  {applied.size_bytes / MB:.1f} MB, with the delta {delta.name}",
        f"image  {applied.delta.image_id}",
        f"next:  {next_line(output, 'dist-env')}",
    ]
    show_stages({"sif": data.pop("path"), **data}, applied.stages, *lines, as_json=as_json)

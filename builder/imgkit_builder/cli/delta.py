"""Deltas: make one, put it into a .sif, flatten a .sif with deltas."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from imgkit_builder.cli.common import (
    JSON,
    MB,
    RUNTIME,
    RUNTIME_VERBOSE,
    TMPDIR,
    complete_names,
    next_line,
    show,
    stage_lines,
    stage_seconds,
    terminable,
)
from imgkit_builder.cli.progress import reporter
from imgkit_builder.cli.sign import REQUIRE_SIGNATURE, require_signatures
from imgkit_builder.workflow.convert import engine_image, helper
from imgkit_builder.workflow.names import module_line, stem, system_of

if TYPE_CHECKING:
    from imgkit_builder.delta.make import Made

SCHEMA = 1


def verb_delta(
    image: str = typer.Argument(
        metavar="RECIPE|IMAGE|NEW.sif",
        autocompletion=complete_names,
        help="A built recipe, a local image, or a newer .sif.",
    ),
    base: Path = typer.Option(
        ..., metavar="BASE.sif", help="The .sif that the cluster has, with its deltas."
    ),
    output: Path | None = typer.Option(
        None, "--output", "-o", metavar="X.imgdelta", help="File to write (default: NAME.imgdelta here)."
    ),
    tmpdir: Path | None = TMPDIR,
    runtime: str | None = RUNTIME,
    as_json: bool = JSON,
    verbose: bool = RUNTIME_VERBOSE,
) -> None:
    """Write the changes of an image over an older .sif: kilobytes instead of gigabytes.

    The .sif must come from imgkit sif and share its lowest layers with the
    image. As root on the engine's machine, or if only code was copied, imgkit
    reads only the changes; otherwise the engine saves the whole image. A newer
    .sif needs no engine: imgkit compares every file of both.

    \b
    Examples:
      imgkit build mn5 && imgkit delta mn5 --base mn5.sif
      singularity exec --nv --overlay mn5.imgdelta:ro mn5.sif dist-train
      imgkit submit mn5 -A bsc98 --qos acc_debug --delta mn5.imgdelta -- dist-train
      imgkit delta olivia-2.sif --base olivia.sif
    """
    from imgkit_builder.delta.make import between, make
    from imgkit_builder.sif.conversion import Options
    from imgkit_builder.sif.image import is_sif

    newer = Path(image)
    target = output or Path(f"{stem(image).removesuffix('.sif')}.imgdelta")
    with terminable(), reporter(as_json=as_json, verbose=verbose) as report:
        if is_sif(newer):
            made = between(newer, base, target, Options(tmpdir=tmpdir, helper=helper()), report)
        else:
            with engine_image(image) as found:
                options = Options(
                    runtime=runtime,
                    module_hint=module_line(system_of(image)),
                    tmpdir=tmpdir,
                    helper=helper(found),
                )
                made = make(found, base, target, options, report)
    lines, data = _made(made, target, next_line(base, "dist-env", overlay=f"{target}:ro"))
    show(data, *lines, as_json=as_json)


def verb_apply(
    delta: Path = typer.Argument(metavar="X.imgdelta", help="A file from imgkit delta."),
    base: Path = typer.Argument(metavar="BASE.sif", help="The .sif below it; stays unchanged."),
    output: Path = typer.Option(..., "--output", "-o", metavar="NEW.sif", help="File to write."),
    require_signature: Path | None = REQUIRE_SIGNATURE,
    tmpdir: Path | None = TMPDIR,
    runtime: str | None = RUNTIME,
    as_json: bool = JSON,
    verbose: bool = RUNTIME_VERBOSE,
) -> None:
    """Put a delta into a copy of its .sif: one file, which needs no --overlay.

    Reads the delta back from the new file, then gives it its name; nothing in
    the image runs. Apply deltas in the order in which they were made; the fifth
    merges all of them into one.

    \b
    Examples:
      imgkit apply mn5.imgdelta mn5.sif -o mn5-2.sif
      imgkit apply mn5.imgdelta mn5.sif -o mn5-2.sif --require-signature trusted.asc
    """
    from imgkit_builder.delta.apply import apply
    from imgkit_builder.sif.conversion import Options

    require_signatures(require_signature, delta, base)
    with terminable(), reporter(as_json=as_json, verbose=verbose) as report:
        applied = apply(delta, base, output, Options(runtime=runtime, tmpdir=tmpdir, helper=helper()), report)
    data = {
        "schema": SCHEMA,
        "sif": str(applied.path),
        "size_bytes": applied.size_bytes,
        "merged": applied.merged,
        "deltas": [dataclasses.asdict(one) for one in applied.deltas],
        "seconds": stage_seconds(applied.stages),
    }
    merged = ", merged" if applied.merged else ""
    lines = [
        *stage_lines(applied.stages),
        f"{output}  {applied.size_bytes / MB:.1f} MB, {len(applied.deltas)} deltas{merged}",
        f"image  {applied.deltas[-1].image_id}",
        f"next:  {next_line(output, 'dist-env')}",
    ]
    show(data, *lines, as_json=as_json)


def verb_flatten(
    sif: Path = typer.Argument(metavar="X.sif", help="A .sif with deltas; stays unchanged."),
    output: Path = typer.Option(..., "--output", "-o", metavar="NEW.sif", help="File to write."),
    tmpdir: Path | None = TMPDIR,
    runtime: str | None = RUNTIME,
    as_json: bool = JSON,
    verbose: bool = RUNTIME_VERBOSE,
) -> None:
    """Merge a .sif and its deltas into one root file system, as a conversion makes it.

    \b
    Examples:
      imgkit flatten mn5-2.sif -o mn5.sif
    """
    from imgkit_builder.delta.apply import flatten
    from imgkit_builder.sif.conversion import Options

    with terminable(), reporter(as_json=as_json, verbose=verbose) as report:
        done = flatten(sif, output, Options(runtime=runtime, tmpdir=tmpdir, helper=helper()), report)
    data = {
        "schema": SCHEMA,
        "sif": str(done.path),
        "size_bytes": done.size_bytes,
        "folded": done.folded,
        "record": dataclasses.asdict(done.record),
        "seconds": stage_seconds(done.stages),
    }
    lines = [
        *stage_lines(done.stages),
        f"{output}  {done.size_bytes / MB:.1f} MB, {done.folded} deltas folded",
        f"image  {done.record.image_id}",
        f"root   sha256:{done.record.root_sha256}",
    ]
    show(data, *lines, as_json=as_json)


def _made(made: Made, target: Path, following: str) -> tuple[list[str], dict[str, Any]]:
    delta = made.delta
    data = {
        "schema": SCHEMA,
        "delta": str(made.path),
        "size_bytes": made.size_bytes,
        "changed": made.changed,
        "deleted": made.deleted,
        "way": made.way,
        "record": dataclasses.asdict(delta),
        "seconds": stage_seconds(made.stages),
        "next": following,
    }
    about = f"{made.size_bytes / 1e3:.1f} kB  {made.changed} changed, {made.deleted} deleted"
    lines = [
        *stage_lines(made.stages),
        f"{target}  {about}, read from {made.way}",
        f"image  {delta.image_id}",
        f"over   {delta.base.image_id}, {len(delta.base.deltas)} deltas",
        f"next:  {following}",
    ]
    return lines, data

"""Deltas: make one, put it into a .sif, fold a .sif with deltas into one without."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from imgkit_builder.cli.progress import reporter
from imgkit_builder.cli.sif import (
    engine_image,
    module_line,
    stage_lines,
    stage_seconds,
    stem,
    system_of,
    terminable,
)

if TYPE_CHECKING:
    from imgkit_builder.delta.make import Made

SCHEMA = 1
_MB = 1e6
_JSON = typer.Option(
    False, "--json", help="Print one JSON object on stdout, progress as JSON lines on stderr."
)
_RUNTIME = typer.Option(None, metavar="COMMAND", help="Without it singularity, else apptainer.")
_TMPDIR = typer.Option(None, metavar="DIR", help="For temporary files; without it as imgkit sif.")
_VERBOSE = typer.Option(False, "--verbose", "-v", help="Show everything the runtime says.")


def verb_delta(
    image: str = typer.Argument(metavar="RECIPE|IMAGE", help="A built recipe, or a local image."),
    base: Path = typer.Option(..., metavar="BASE.sif", help="What the cluster has, with its deltas."),
    output: Path | None = typer.Option(
        None, "--output", "-o", metavar="X.imgdelta", help="Where to write it; without it NAME.imgdelta here."
    ),
    tmpdir: Path | None = _TMPDIR,
    runtime: str | None = _RUNTIME,
    no_test: bool = typer.Option(False, "--no-test", help="Do not execute anything with the new delta."),
    as_json: bool = _JSON,
    verbose: bool = _VERBOSE,
) -> None:
    """Write what an image changes over an older .sif: kilobytes instead of gigabytes.

    The .sif must be one of imgkit sif and share its lowest layers with the
    image. As root on the engine's machine, or where only code was copied, what
    changed is read and no more; else the engine saves the whole image.

    \b
    Examples:
      imgkit build mn5 && imgkit delta mn5 --base mn5.sif
      singularity exec --nv --overlay mn5.imgdelta:ro mn5.sif dist-train
      imgkit submit mn5 -A bsc98 --qos acc_debug --delta mn5.imgdelta -- dist-train
    """
    from imgkit_builder.delta.make import make
    from imgkit_builder.sif.options import Options

    with (
        terminable(),
        reporter(as_json=as_json, verbose=verbose) as report,
        engine_image(image, report) as found,
    ):
        options = Options(
            runtime=runtime, module_hint=module_line(system_of(image)), tmpdir=tmpdir, test=not no_test
        )
        target = output or Path(f"{stem(image)}.imgdelta")
        made = make(found, base, target, options, report)
    words = ("singularity", "exec", "--overlay", f"{target}:ro", str(base), "dist-env")
    text, data = _made(made, target, shlex.join(words))
    print(json.dumps(data, indent=2) if as_json else text)


def verb_apply(
    delta: Path = typer.Argument(metavar="X.imgdelta", help="Made by imgkit delta."),
    base: Path = typer.Argument(metavar="BASE.sif", help="What it lies over; stays as it is."),
    output: Path = typer.Option(..., "--output", "-o", metavar="NEW.sif", help="Where to write both."),
    tmpdir: Path | None = _TMPDIR,
    runtime: str | None = _RUNTIME,
    no_test: bool = typer.Option(False, "--no-test", help="Do not execute anything in the new .sif."),
    as_json: bool = _JSON,
    verbose: bool = _VERBOSE,
) -> None:
    """Put a delta into a copy of its .sif: one file, which needs no --overlay.

    The new file is run once to see that the delta is there, then it gets its
    name. Deltas go on in the order in which they were made; a fifth makes one
    of them all.

    \b
    Examples:
      imgkit apply mn5.imgdelta mn5.sif -o mn5-2.sif
    """
    from imgkit_builder.delta.apply import apply
    from imgkit_builder.sif.options import Options

    with terminable(), reporter(as_json=as_json, verbose=verbose) as report:
        applied = apply(
            delta, base, output, Options(runtime=runtime, tmpdir=tmpdir, test=not no_test), report
        )
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
        f"{output}  {applied.size_bytes / _MB:.1f} MB, {len(applied.deltas)} deltas{merged}",
        f"image  {applied.deltas[-1].image_id}",
        f"next:  singularity exec {shlex.quote(str(output))} dist-env",
    ]
    print(json.dumps(data, indent=2) if as_json else "\n".join(lines))


def verb_flatten(
    sif: Path = typer.Argument(metavar="X.sif", help="A .sif with deltas in it; stays as it is."),
    output: Path = typer.Option(..., "--output", "-o", metavar="NEW.sif", help="Where to write it."),
    tmpdir: Path | None = _TMPDIR,
    runtime: str | None = _RUNTIME,
    no_test: bool = typer.Option(False, "--no-test", help="Do not execute anything in the new .sif."),
    as_json: bool = _JSON,
    verbose: bool = _VERBOSE,
) -> None:
    """Fold a .sif with deltas into one root file system, as a conversion would make it.

    \b
    Examples:
      imgkit flatten mn5-2.sif -o mn5.sif
    """
    from imgkit_builder.delta.flatten import flatten
    from imgkit_builder.sif.options import Options

    with terminable(), reporter(as_json=as_json, verbose=verbose) as report:
        done = flatten(sif, output, Options(runtime=runtime, tmpdir=tmpdir, test=not no_test), report)
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
        f"{output}  {done.size_bytes / _MB:.1f} MB, {done.folded} deltas folded",
        f"image  {done.record.image_id}",
        f"root   sha256:{done.record.root_sha256}",
    ]
    print(json.dumps(data, indent=2) if as_json else "\n".join(lines))


def _made(made: Made, target: Path, following: str) -> tuple[str, dict[str, Any]]:
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
    return "\n".join(lines), data

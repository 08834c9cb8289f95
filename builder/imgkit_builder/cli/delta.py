"""``imgkit delta`` and ``imgkit apply``: make a delta, put it into a .sif, merge the deltas of a .sif."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
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
from imgkit_builder.workflow.convert import engine_image
from imgkit_builder.workflow.names import module_line, stem, system_of
from imgkit_entrypoints.errors import UsageError

if TYPE_CHECKING:
    from imgkit_builder.base.progress import Reporter
    from imgkit_builder.delta.make import WrittenDelta
    from imgkit_builder.delta.source import ReadFrom
    from imgkit_builder.sif.conversion import Options

SCHEMA = 1
_READ: Mapping[ReadFrom, str] = {
    "export": "the engine's export",
    "sif": "both .sif files",
}


def verb_delta(
    image: str = typer.Argument(
        metavar="RECIPE|IMAGE|NEW.sif",
        autocompletion=complete_names,
        help="A built recipe, a local image, or a newer .sif.",
    ),
    base: Path = typer.Option(
        ..., "--against", metavar="BASE.sif", help="The .sif on the cluster, with its deltas."
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
    image. imgkit exports the image from the engine and compares every file. A
    newer .sif needs no engine: imgkit compares every file of both.

    \b
    Examples:
      imgkit build mn5 && imgkit delta mn5 --against mn5.sif
      singularity exec --nv --overlay mn5.imgdelta:ro mn5.sif dist-train
      imgkit run mn5 -A bsc98 --qos acc_debug --delta mn5.imgdelta -- dist-train
      imgkit delta olivia-2.sif --against olivia.sif
    """
    from imgkit_builder.delta.make import between, make
    from imgkit_builder.sif.conversion import Options
    from imgkit_builder.sif.image import is_sif

    newer = Path(image)
    target = output or Path(f"{stem(image).removesuffix('.sif')}.imgdelta")
    with terminable(), reporter(as_json=as_json, verbose=verbose) as report:
        if is_sif(newer):
            made = between(newer, base, target, Options(tmpdir=tmpdir), report)
        else:
            with engine_image(image) as found:
                options = Options(
                    runtime=runtime,
                    module_hint=module_line(system_of(image)),
                    tmpdir=tmpdir,
                )
                made = make(found, base, target, options, report)
    lines, data = _made(made, target, next_line(base, "dist-env", overlay=f"{target}:ro"))
    show(data, *lines, as_json=as_json)


def verb_apply(
    file: Path = typer.Argument(
        metavar="X.imgdelta|X.sif", help="A file from imgkit delta; with --flatten, a .sif with deltas."
    ),
    base: Path | None = typer.Argument(
        None,
        metavar="[BASE.sif]",
        show_default=False,
        help="The .sif that the delta was made for; not changed.",
    ),
    output: Path = typer.Option(..., "--output", "-o", metavar="NEW.sif", help="File to write."),
    flatten: bool = typer.Option(
        False, "--flatten", help="Merge a .sif and its deltas into one root file system; takes no BASE.sif."
    ),
    tmpdir: Path | None = TMPDIR,
    runtime: str | None = RUNTIME,
    as_json: bool = JSON,
    verbose: bool = RUNTIME_VERBOSE,
) -> None:
    """Merge a delta into a copy of its .sif: one file, which needs no --overlay.

    The new file is verified before it is renamed into place; nothing in the image
    is executed. Apply deltas in the order in which they were made; applying a
    fifth delta merges all of them.

    \b
    Examples:
      imgkit apply mn5.imgdelta mn5.sif -o mn5-2.sif
      imgkit apply --flatten mn5-2.sif -o mn5-flat.sif
    """
    from imgkit_builder.sif.conversion import Options

    _check_files(file, base, flatten=flatten)
    with terminable(), reporter(as_json=as_json, verbose=verbose) as report:
        options = Options(runtime=runtime, tmpdir=tmpdir)
        if base is None:
            lines, data = _flattened(file, output, options, report)
        else:
            lines, data = _applied(file, base, output, options, report)
    show(data, *lines, as_json=as_json)


def _check_files(file: Path, base: Path | None, *, flatten: bool) -> None:
    if flatten and base is not None:
        raise UsageError(
            "--flatten takes one file, a .sif with deltas",
            where=str(base),
            hint=f"imgkit apply {file} {base} -o NEW.sif, then: imgkit apply --flatten NEW.sif -o FLAT.sif",
        )
    if not flatten and base is None:
        raise UsageError(
            "apply needs a delta and the .sif that it was made for",
            where=str(file),
            hint=f"imgkit apply {file} BASE.sif -o NEW.sif, or merge the deltas of a .sif: --flatten",
        )


def _applied(
    delta: Path, base: Path, output: Path, options: Options, report: Reporter
) -> tuple[list[str], dict[str, Any]]:
    from imgkit_builder.delta.apply import apply

    applied = apply(delta, base, output, options, report)
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
    return lines, data


def _flattened(
    sif: Path, output: Path, options: Options, report: Reporter
) -> tuple[list[str], dict[str, Any]]:
    from imgkit_builder.delta.apply import flatten

    done = flatten(sif, output, options, report)
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
        f"{output}  {done.size_bytes / MB:.1f} MB, {done.folded} deltas merged into the root file system",
        f"image  {done.record.image_id}",
        f"root   sha256:{done.record.root_sha256}",
    ]
    return lines, data


def _made(made: WrittenDelta, target: Path, following: str) -> tuple[list[str], dict[str, Any]]:
    delta = made.delta
    data = {
        "schema": SCHEMA,
        "delta": str(made.path),
        "size_bytes": made.size_bytes,
        "changed": made.changed,
        "deleted": made.deleted,
        "read_from": made.read_from,
        "record": dataclasses.asdict(delta),
        "seconds": stage_seconds(made.stages),
        "next": following,
    }
    about = f"{made.size_bytes / 1e3:.1f} kB  {made.changed} changed, {made.deleted} deleted"
    lines = [
        *stage_lines(made.stages),
        f"{target}  {about}, read from {_READ[made.read_from]}",
        f"image  {delta.image_id}",
        f"over   {delta.base.image_id}, {len(delta.base.deltas)} deltas",
        f"next:  {following}",
    ]
    return lines, data

"""``imgkit rebuild``: build a .sif again from the lock inside it, and compare."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from imgkit_builder.cli.common import JSON, RUNTIME_VERBOSE, TMPDIR, show, terminable
from imgkit_builder.cli.progress import reporter
from imgkit_builder.workflow.rebuild import rebuild
from imgkit_entrypoints.errors import EXIT_NO

if TYPE_CHECKING:
    from imgkit_builder.examine.rebuilt import RebuiltSif

SCHEMA = 1


def verb_rebuild(
    sif: Path = typer.Argument(metavar="X.sif", help="A .sif of an image that was built from a lock."),
    recipe: Path | None = typer.Option(
        None,
        "--recipe",
        metavar="RECIPE",
        help="Recipe to take code and files from; the lock is always the one in the .sif.",
    ),
    tmpdir: Path | None = TMPDIR,
    as_json: bool = JSON,
    verbose: bool = RUNTIME_VERBOSE,
) -> None:
    """Build a .sif again from the lock inside it, and compare the two files.

    Exits with 0 if both have the same sha256, otherwise with 1, after listing the
    first files that differ, with their layer and line of the recipe. If the
    mksquashfs versions differ, file contents are compared instead. The new .sif is
    removed.

    \b
    Examples:
      imgkit rebuild mine.sif
      imgkit rebuild mine.sif --recipe mine.yaml   (a recipe that copies code)
    """
    with terminable(), reporter(as_json=as_json, verbose=verbose) as report:
        done = rebuild(sif, recipe, tmpdir=tmpdir, report=report)
    data = {"schema": SCHEMA, "sif": str(sif), "same": done.same, "tools": done.tools}
    data |= dataclasses.asdict(done.found)
    show(data, *_lines(sif, done.found, done.tools), as_json=as_json)
    if not done.same:
        raise typer.Exit(EXIT_NO)


def _lines(sif: Path, found: RebuiltSif, tools: str) -> Iterator[str]:
    if found.equal:
        yield f"{sif}  equal: a rebuild from its lock gives the same file"
        yield f"sha256 {found.rebuilt_sha256}"
        return
    if not found.different:
        yield f"{sif}  equal in every file, packed differently: {tools or 'the squashfs differs'}"
    else:
        yield f"{sif}  differs in {len(found.different) + found.more} files:"
    for one in found.different:
        place = f"layer {one.layer}" if one.layer else "no layer of the new image"
        yield f"  /{one.path}: {one.what}; {place}{f', {one.origin}' if one.origin else ''}"
    if found.more:
        yield f"  and {found.more} more"
    yield f"sha256 {found.had_sha256}"
    yield f"new    {found.rebuilt_sha256}"

"""``imgkit diff``: what is different between two images, recipes or locks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from imgkit_builder.cli.common import (
    JSON,
    UNPACK_LIMIT,
    VERBOSE,
    columns,
    complete_names,
    show,
    terminable,
)
from imgkit_builder.cli.progress import reporter
from imgkit_builder.cli.sbom import image_of
from imgkit_builder.workflow.names import RECIPE_SUFFIXES
from imgkit_entrypoints.errors import EXIT_NO, UsageError

if TYPE_CHECKING:
    from imgkit_builder.base.progress import Reporter
    from imgkit_builder.examine.differences import (
        ComparedSide,
        Differences,
        FileDifference,
        ValueDifference,
    )

SCHEMA = 1
_MARKS = {"added": "+", "removed": "-", "changed": "~", "attributes": "t"}
_OTHERS = "RECIPE|LOCK|SIF|ARCHIVE|IMAGE|OCI-DIR"


def verb_diff(
    first: str = typer.Argument(metavar="A", autocompletion=complete_names, help=_OTHERS),
    second: str = typer.Argument(metavar="B", autocompletion=complete_names, help=_OTHERS),
    platform: str | None = typer.Option(
        None, metavar="PLATFORM", help="linux/amd64 or linux/arm64, for a lock that has both."
    ),
    most: int = typer.Option(20, "-n", metavar="N", min=0, help="Show the N largest of the changed files."),
    unpack_limit: float | None = UNPACK_LIMIT,
    as_json: bool = JSON,
    verbose: bool = VERBOSE,
) -> None:
    """Show how two images, recipes or locks differ: packages, variables, files, layers.

    Executes nothing in the images. A name without a colon or slash is a recipe;
    write NAME:TAG for an image. Exit code 0 if nothing differs, 1 if something does.

    \b
    Examples:
      imgkit diff old.sif new.sif
      imgkit diff mine.lock mine.sif
      imgkit diff mn5 mn5:latest
      imgkit diff old.tar new.tar --json
    """
    from imgkit_builder.examine import differences

    with (
        terminable(),
        reporter(as_json=as_json, verbose=verbose) as report,
        _side(first, platform, report, unpack_limit) as one,
        _side(second, platform, report, unpack_limit) as other,
    ):
        report.stage(f"compare {first} with {second}")
        found = differences.compare(one, other)
        data = {"schema": SCHEMA, "a": one.name, "b": other.name, **found.to_dict()}
        lines = tuple(_lines(found, most))
    show(data, *lines, as_json=as_json)
    if not found.equal:
        raise typer.Exit(EXIT_NO)


@contextlib.contextmanager
def _side(
    name: str, platform: str | None, report: Reporter, unpack_limit: float | None
) -> Iterator[ComparedSide]:
    from imgkit_builder.examine import differences

    if name.endswith(".lock"):
        yield _of_lock(name, platform)
    elif name.endswith(RECIPE_SUFFIXES) or not (
        Path(name).exists() or ":" in name or "/" in name or "." in name
    ):
        from imgkit_builder.cli.recipes import load_recipe

        yield differences.of_recipe(name, load_recipe(name))
    else:
        with image_of(name, report, unpack_limit) as image:
            report.stage(f"list the packages of {name}")
            yield differences.of_image(image)


def _of_lock(name: str, platform: str | None) -> ComparedSide:
    from imgkit_builder.examine import differences
    from imgkit_builder.oci.platform import host_arch
    from imgkit_builder.recipe import lock_file

    lock = lock_file.read(Path(name))
    known = [one.platform for one in lock.platforms]
    wanted = platform or (known[0] if len(known) == 1 else f"linux/{host_arch()}")
    part = lock.of(wanted)
    if part is None:
        raise UsageError(
            f"the lock has nothing for {wanted}",
            where=name,
            hint=f"--platform PLATFORM; there are: {', '.join(known)}",
        )
    return differences.of_lock(name, part)


def _lines(found: Differences, most: int) -> Iterator[str]:
    if found.equal:
        yield "no differences"
    for title, values in (("base", found.base), ("packages", found.packages), ("variables", found.env or ())):
        if values:
            yield from _values(title, values)
    if found.files:
        yield from _files(found.files, most)
    if found.layers:
        yield f"layers  {len(found.layers)} differ"
        rows = [
            (f"  {one.number}", _layer(one.before, one.before_bytes), _layer(one.after, one.after_bytes))
            for one in found.layers
        ]
        yield from columns(rows)
    for sentence in found.not_compared:
        yield f"({sentence})"


def _values(title: str, values: Sequence[ValueDifference]) -> Iterator[str]:
    added, removed = sum(not one.before for one in values), sum(not one.after for one in values)
    yield f"{title}  {added} added, {removed} removed, {len(values) - added - removed} changed"
    rows = []
    for one in values:
        mark = "+" if not one.before else "-" if not one.after else "~"
        text = f"{one.before} -> {one.after}" if mark == "~" else one.before or one.after
        rows.append((f"  {mark} {one.name}", text))
    yield from columns(rows)


def _files(files: Sequence[FileDifference], most: int) -> Iterator[str]:
    counts = {how: sum(one.how == how for one in files) for how in _MARKS}
    grown = sum(one.after_bytes - one.before_bytes for one in files)
    yield (
        f"files  {counts['added']} added, {counts['removed']} removed, {counts['changed']} changed, "
        f"{counts['attributes']} with a different time, owner or mode (t); {grown / 1e6:+.1f} MB"
    )
    largest = sorted(
        files, key=lambda one: (-abs(one.after_bytes - one.before_bytes), -one.after_bytes, one.path)
    )
    rows = [
        (
            f"  {_MARKS[one.how]}",
            f"{one.before_bytes / 1e6:.3f} -> {one.after_bytes / 1e6:.3f} MB",
            one.path,
        )
        for one in largest[:most]
    ]
    yield from columns(rows) if rows else ()
    if len(files) > most:
        yield f"  and {len(files) - most} more: -n N shows more, --json all"


def _layer(digest: str, size_bytes: int) -> str:
    return f"{digest.removeprefix('sha256:')[:12]} {size_bytes / 1e6:.1f} MB" if digest else "none"

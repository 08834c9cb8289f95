"""Options and names that several verb groups share."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from imgkit_entrypoints import terminal

if TYPE_CHECKING:
    from imgkit_builder.base.progress import Reporter
    from imgkit_builder.image.members import Packed
    from imgkit_builder.recipe.problems import Problem
    from imgkit_entrypoints.errors import ImgkitError
    from imgkit_entrypoints.system import SystemFacts

Result = TypeVar("Result")

ARCHIVE_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.zst")
RECIPE_SUFFIXES = (".yaml", ".yml")

JSON: bool = typer.Option(
    False, "--json", help="Print one JSON object on stdout, progress as JSON lines on stderr."
)
RESULT_JSON: bool = typer.Option(False, "--json", help="Print one JSON object on stdout.")
"""``--json`` of verbs without progress."""
LARGE: bool = typer.Option(False, "--large", help="Pack more than 1 GB of code without a question.")
UNPACK_LIMIT: float | None = typer.Option(
    None,
    metavar="GB",
    min=0,
    help="Largest size of a compressed archive once unpacked (default: 100 times the file, at least 1).",
)
VERBOSE: bool = typer.Option(False, "--verbose", "-v", help="Show all output.")


def gigabytes(value: float | None) -> int | None:
    """Bytes of so many GB; None for None."""
    return None if value is None else int(value * 1e9)


def show(data: Mapping[str, Any], *lines: str, as_json: bool) -> None:
    """Print `data` as indented JSON, or else `lines`."""
    if as_json:
        show_text(data, "", as_json=True)
    else:
        terminal.out(*lines)


def show_text(data: Mapping[str, Any], text: str, *, as_json: bool) -> None:
    """Print `data` as indented JSON, or else `text`, whose lines are one file's or escaped."""
    terminal.document((json.dumps(data, indent=2) if as_json else text) + "\n")


def confirmed(*lines: str) -> bool:
    """Whether a person agrees; the last of `lines` is the question."""
    *before, question = map(terminal.shown, lines)
    terminal.err(*before)
    return typer.confirm(question, err=True)


def with_leave(run: Callable[[bool], Result], *, large: bool, may_ask: bool = True) -> Result:
    """What `run` returns; its argument is the leave to pack large code, which a person may still give.

    Raises
    ------
    LargeContext : the code is large, and there is nobody to ask, or the answer is no.
    """
    from imgkit_builder.image.context import LargeContext

    try:
        return run(large)
    except LargeContext as error:
        here = may_ask and sys.stdin.isatty() and sys.stderr.isatty()
        if not here or not confirmed(f"{error.where}: {error.what}. Pack all of it?"):
            raise
        return run(True)


def tell_left_out(code: Packed, report: Reporter) -> None:
    """Name the files of the recipe's code that stay out of the image."""
    if code.secret:
        report.note(
            f"not in the image, as they usually hold secrets: {', '.join(code.secret)}; a step can use "
            'one as a build secret (image.secrets); to bring one back: ignore: ["!NAME"]'
        )
    names = code.left_out
    if names:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        report.note(
            f"not in the image: {', '.join(names[:5])}{more} (git, Docker or imgkit ignores "
            'it); to bring one back: ignore: ["!NAME"]'
        )


def error_data(error: ImgkitError) -> dict[str, Any]:
    """The JSON form of `error`: ``{"schema": 1, "error": {"what", "where", "hint", "exit_code"}}``.

    The error of a recipe also has ``problems``, one entry for each.
    """
    from imgkit_builder.recipe.problems import RecipeErrors

    data: dict[str, Any] = {
        "what": error.what,
        "where": error.where,
        "hint": error.hint,
        "exit_code": error.exit_code,
    }
    if isinstance(error, RecipeErrors):
        data["problems"] = [problem_data(problem) for problem in error.problems]
    return {"schema": 1, "error": data}


def warning_lines(problems: Iterable[Problem]) -> tuple[str, ...]:
    """The lines of `problems` as warnings, each with its source."""
    return tuple(line for problem in problems for line in f"warning: {problem}".split("\n"))


def problem_data(problem: Problem) -> dict[str, Any]:
    """The JSON form of one problem of a recipe."""
    return {
        "what": problem.what,
        "where": str(problem.position),
        "hint": problem.hint or None,
        "key": problem.key,
    }


def complete_names(incomplete: str) -> list[str]:
    """Names of recipes, and files and folders, that begin with `incomplete`; the shell's completion asks."""
    from imgkit_builder.recipe import targets

    names = [name for name in targets.names() if name.startswith(incomplete)]
    suffixes = (*RECIPE_SUFFIXES, *ARCHIVE_SUFFIXES, ".sif", ".imgdelta")
    folder, _, start = incomplete.rpartition("/")
    place = Path(f"{folder}/") if "/" in incomplete else Path()
    found = sorted(path for path in place.glob("*") if path.name.startswith(start))
    folders = [f"{path}/" for path in found if path.is_dir()]
    return [*names, *folders, *(str(path) for path in found if path.name.endswith(suffixes))]


def image_name(target: str) -> str:
    """The image called `target`; a recipe's file stands for the image that imgkit build makes of it."""
    if not target.endswith(RECIPE_SUFFIXES):
        return target
    from imgkit_builder.engine import default_tag
    from imgkit_builder.recipe import targets

    return default_tag(targets.find(target))


def stem(image: str) -> str:
    """``mn5`` of ``dir/mn5.tar.gz``, ``mn5.yaml``, ``mn5:latest``; ``mine-1`` of ``host:5000/grp/mine:1``."""
    last = image.rstrip("/").rpartition("/")[2]
    for suffix in (*ARCHIVE_SUFFIXES, *RECIPE_SUFFIXES):
        if last.endswith(suffix):
            return last.removesuffix(suffix)
    name, _, version = last.partition("@")[0].partition(":")
    return name if version in ("", "latest") else f"{name}-{version}"


def system_of(image: str) -> SystemFacts | None:
    """The system of the recipe `image`, or of the shipped recipe with the image's name."""
    from imgkit_builder.recipe import targets

    if image.endswith(RECIPE_SUFFIXES):
        return targets.find(image).system
    name = image.rpartition("/")[2].partition(":")[0]
    return targets.find(name).system if name in targets.names() else None


def module_line(system: SystemFacts | None) -> str | None:
    """``module load ...`` of the system's runtime; None if it needs no module."""
    from imgkit_builder.recipe import targets

    return (targets.module_line(system) or None) if system else None


def columns(table: Sequence[Sequence[str]], *, most: int | None = None) -> Iterator[str]:
    """Yield each row of `table` as a line; every row has as many cells.

    Parameters
    ----------
    most : widest column behind the first, in characters; a longer cell sticks out.
    """
    rows = [[*map(terminal.shown, row)] for row in table]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    if most is not None:
        widths[1:] = (min(width, most) for width in widths[1:])
    for row in rows:
        yield "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()

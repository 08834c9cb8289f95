"""Options, questions and output that several verb groups share."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from imgkit_builder.base import checks
from imgkit_builder.recipe.problems import RecipeErrors
from imgkit_builder.workflow.names import ARCHIVE_SUFFIXES, RECIPE_SUFFIXES
from imgkit_entrypoints import terminal
from imgkit_entrypoints.errors import EXIT_NO, ImgkitError
from imgkit_recipes import recipe_names

if TYPE_CHECKING:
    from imgkit_builder.base.checks import Check
    from imgkit_builder.recipe.problems import Problem

Result = TypeVar("Result")
SCHEMA = 1
"""Version of the JSON that verbs print."""
HERE = "here"
"""The value of ``--on`` for this machine, where an imgkit.toml names a remote."""


def complete_names(incomplete: str) -> list[str]:
    """Return the names of recipes, files and folders that begin with `incomplete`, for the shell."""
    names = [name for name in recipe_names() if name.startswith(incomplete)]
    suffixes = (*RECIPE_SUFFIXES, *ARCHIVE_SUFFIXES, ".sif")
    folder, _, start = incomplete.rpartition("/")
    directory = Path(f"{folder}/") if "/" in incomplete else Path()
    paths = sorted(path for path in directory.glob("*") if path.name.startswith(start))
    folders = [f"{path}/" for path in paths if path.is_dir()]
    return [*names, *folders, *(str(path) for path in paths if path.name.endswith(suffixes))]


def name_argument(metavar: str, help: str, default: Any = ...) -> Any:
    """Return an argument that the shell completes with names of recipes and files."""
    return typer.Argument(default, metavar=metavar, autocompletion=complete_names, help=help)


def output_option(metavar: str, help: str) -> Any:
    """Return the option ``--output`` of a verb that writes one file or folder."""
    return typer.Option(None, "--output", "-o", metavar=metavar, help=help)


def flag_option(name: str, help: str) -> Any:
    """Return an option that takes no value."""
    return typer.Option(False, name, help=help)


JSON: bool = flag_option("--json", "Print one JSON object on stdout, progress as JSON lines on stderr.")
UNPACK_LIMIT: float | None = typer.Option(
    None,
    metavar="GB",
    min=0,
    help="Largest size of a compressed archive once unpacked (default: 100 times the file, at least 1).",
)
VERBOSE: bool = typer.Option(False, "--verbose", "-v", help="Show all output.")
MB = 1e6


def gigabytes_to_bytes(value: float | None) -> int | None:
    """Return the bytes of so many GB; None for None."""
    return None if value is None else int(value * 1e9)


def print_result(data: Mapping[str, Any], *lines: str, as_json: bool) -> None:
    """Print `data`, with the version of its schema, as indented JSON, or else `lines`."""
    if as_json:
        terminal.print_document(json.dumps({"schema": SCHEMA, **data}, indent=2, default=str) + "\n")
    else:
        terminal.print_results(*lines)


def show_checks(results: Sequence[Check], *, as_json: bool, **context: Any) -> None:
    """Print `results`, and end with exit code 1 if a check failed."""
    print_result(checks.to_dict(results, **context), *checks.table(results), as_json=as_json)
    if not checks.passed(results):
        raise typer.Exit(EXIT_NO)


def with_leave(run: Callable[[bool], Result], *, large: bool, may_ask: bool = True) -> Result:
    """Return what `run` does; its argument is the leave to pack large code, which a person may still give.

    Raises
    ------
    LargeContext : the code is large, and there is nobody to ask, or the answer is no.
    """
    # Most verbs load this module, and pack nothing.
    from imgkit_builder.image.context import LargeContext

    try:
        return run(large)
    except LargeContext as error:
        can_ask = may_ask and sys.stdin.isatty() and sys.stderr.isatty()
        question = terminal.escape_controls(f"{error.where}: {error.what}. Pack all of it?")
        if not can_ask or not typer.confirm(question, err=True):  # noqa: TID251 - the question is escaped
            raise
        return run(True)


def error_data(error: ImgkitError) -> dict[str, Any]:
    """Return the JSON form of `error`: ``{"schema": 1, "error": {"what", "where", "hint", "exit_code"}}``.

    The error of a recipe also has ``problems``, one entry for each.
    """
    data: dict[str, Any] = {
        "what": error.what,
        "where": error.where,
        "hint": error.hint,
        "exit_code": error.exit_code,
    }
    if isinstance(error, RecipeErrors):
        data["problems"] = [problem_data(problem) for problem in error.problems]
    return {"schema": SCHEMA, "error": data}


def problem_data(problem: Problem) -> dict[str, Any]:
    """Return the JSON form of one problem of a recipe."""
    return {
        "what": problem.what,
        "where": str(problem.position),
        "hint": problem.hint or None,
        "key": problem.key,
    }


def format_columns(table: Sequence[Sequence[str]], *, most: int | None = None) -> Iterator[str]:
    """Yield each row of `table` as a line; every row has as many cells.

    Parameters
    ----------
    most : widest column behind the first, in characters; a longer cell sticks out.
    """
    rows = [[*map(terminal.escape_controls, row)] for row in table]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    if most is not None:
        widths[1:] = (min(width, most) for width in widths[1:])
    for row in rows:
        yield "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Let SIGTERM, which a scheduler sends at the time limit, clean up like Ctrl-C."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

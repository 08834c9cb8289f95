"""Options, questions and output that several verbs share."""

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
from imgkit_builder.base.suffixes import ARCHIVE_SUFFIXES, RECIPE_SUFFIXES
from imgkit_builder.recipe.problems import RecipeErrors
from imgkit_entrypoints import terminal
from imgkit_entrypoints.errors import EXIT_NO, ImgkitError
from imgkit_recipes import recipe_names

if TYPE_CHECKING:
    from imgkit_builder.base.checks import Check
    from imgkit_builder.recipe.problems import Problem

Result = TypeVar("Result")
SCHEMA = 1
"""The version of the JSON format that verbs print, under the key ``schema``."""
_COMPLETED_SUFFIXES = (*RECIPE_SUFFIXES, *ARCHIVE_SUFFIXES, ".sif")
"""The suffixes of the files that the shell completes."""
HERE = "here"
"""The value of ``--on`` that means this machine. It is needed if imgkit.toml names a remote."""


def complete_names(incomplete: str) -> list[str]:
    """Return the names that the shell offers when the user presses Tab after the text `incomplete`.

    They are the names of shipped recipes, folders, recipe files, archives and .sif files that begin with this
    text.
    """
    matching_recipes = [name for name in recipe_names() if name.startswith(incomplete)]
    # For "dir/na", offer the names in "dir/" that begin with "na".
    folder, slash, start = incomplete.rpartition("/")
    folder_paths = []
    file_paths = []
    for path in sorted(Path(folder + slash).glob("*")):
        if not path.name.startswith(start):
            continue
        if path.is_dir():
            folder_paths.append(f"{path}/")
        if path.name.endswith(_COMPLETED_SUFFIXES):
            file_paths.append(str(path))
    return [*matching_recipes, *folder_paths, *file_paths]


def name_argument(metavar: str, help: str, default: Any = ...) -> Any:
    """Return an argument that the shell completes with recipes and files; see `complete_names`."""
    return typer.Argument(default, metavar=metavar, autocompletion=complete_names, help=help)


def output_option(metavar: str, help: str) -> Any:
    """Return the option ``--output`` for a verb that writes one file or folder."""
    return typer.Option(None, "--output", "-o", metavar=metavar, help=help)


def flag_option(name: str, help: str) -> Any:
    """Return an option that takes no value."""
    return typer.Option(False, name, help=help)


RECIPE: str = name_argument("RECIPE|FILE", "A shipped recipe (imgkit list) or a .yaml file.")
JOB_ID: str = typer.Argument(metavar="ID")
LAST_JOB_ID: str = typer.Argument("", metavar="[ID]", help="Job id (default: the job submitted last).")
JSON: bool = flag_option("--json", "Print one JSON object on stdout, progress as JSON lines on stderr.")
UNPACK_LIMIT: float | None = typer.Option(
    None,
    metavar="GB",
    min=0,
    help="Largest size of a compressed archive once unpacked (default: 100 times the file, at least 1).",
)
VERBOSE: bool = typer.Option(False, "--verbose", "-v", help="Show all output.")
# Bytes in a megabyte, for sizes that are printed for people.
MB = 1e6


def gigabytes_to_bytes(value: float | None) -> int | None:
    """Return `value` in bytes, where 1 GB has 10^9 bytes. Return None for None."""
    if value is None:
        return None
    return int(value * 1e9)


def print_message(text: str) -> None:
    """Print a message on stderr in the form ``imgkit: TEXT``."""
    terminal.print_messages(f"imgkit: {text}")


def print_result(data: Mapping[str, Any], *lines: str, as_json: bool) -> None:
    """Print `data` as indented JSON if `as_json` is True, otherwise print `lines`.

    The version of the schema is added to the JSON, unless `data` has a key ``schema`` itself.
    """
    if as_json:
        terminal.print_document(json.dumps({"schema": SCHEMA, **data}, indent=2, default=str) + "\n")
    else:
        terminal.print_results(*lines)


def show_checks(results: Sequence[Check], *, as_json: bool, **context: Any) -> None:
    """Print `results` as a table, or as JSON with the additional keys of `context`.

    Exit with code 1 if a check failed.
    """
    print_result(checks.to_dict(results, **context), *checks.table(results), as_json=as_json)
    if not checks.passed(results):
        raise typer.Exit(EXIT_NO)


def confirm_large_code(pack: Callable[[bool], Result], *, large: bool, may_ask: bool = True) -> Result:
    """Call `pack`, which packs or reads code, and return its result. Ask the user first if the code is large.

    Large code usually contains data by mistake, and takes long to pack.

    Parameters
    ----------
    pack : a function whose argument says whether the code may be large. If it may not, the function raises
        LargeContext for large code. It is called again if the user agrees.
    large : whether the user has already allowed large code with a flag.
    may_ask : whether the verb may ask. It asks only on a terminal.

    Raises
    ------
    LargeContext : the code is large, and the user cannot be asked or has not agreed.
    """
    # The import is here because most verbs load this module but never pack code.
    from imgkit_builder.image.context import LargeContext

    try:
        return pack(large)
    except LargeContext as error:
        if not (may_ask and sys.stdin.isatty() and sys.stderr.isatty()):
            raise
        question = terminal.escape_controls(f"{error.where}: {error.what}. Pack all of it?")
        if not typer.confirm(question, err=True):  # noqa: TID251 - the question is escaped
            raise
        return pack(True)  # from the start, because the first call has stopped early


def error_data(error: ImgkitError) -> dict[str, Any]:
    """Return the JSON form of `error`: ``{"schema": 1, "error": {"what", "where", "hint", "exit_code"}}``.

    The error of a recipe also has ``problems``, with one entry for each problem.
    """
    data: dict[str, Any] = {
        "what": error.what,
        "where": error.where,
        "hint": error.hint,
        "exit_code": error.exit_code,
    }
    if isinstance(error, RecipeErrors):  # one error for all mistakes in a recipe
        data["problems"] = [problem_data(problem) for problem in error.problems]
    return {"schema": SCHEMA, "error": data}


def problem_data(problem: Problem) -> dict[str, Any]:
    """Return the JSON form of a problem in a recipe."""
    return {
        "what": problem.what,
        "where": str(problem.position),
        "hint": problem.hint or None,
        "key": problem.key,
    }


def format_columns(table: Sequence[Sequence[str]], *, max_width: int = sys.maxsize) -> Iterator[str]:
    """Yield each row of `table` as a line of aligned columns. All rows must have the same number of cells.

    Parameters
    ----------
    max_width : the largest width of a column, in characters. A longer cell is not cut. It shifts the rest of
        its line to the right.
    """
    # Control characters could change the state of the terminal. They are replaced first, because that changes
    # the length of a cell.
    rows = [[terminal.escape_controls(cell) for cell in row] for row in table]
    widths = []
    for column in zip(*rows, strict=True):
        longest = max(len(cell) for cell in column)
        widths.append(min(longest, max_width))
    for row in rows:
        line = ""
        for cell, width in zip(row, widths, strict=True):
            line += f"{cell.ljust(width)}  "
        yield line.rstrip()


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Raise KeyboardInterrupt if the process gets SIGTERM in the block, so that it cleans up as after Ctrl-C.

    A scheduler sends SIGTERM when a job reaches its time limit.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous_handler = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous_handler)

"""Options, questions and output that several verb groups share."""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from imgkit_builder.workflow.names import ARCHIVE_SUFFIXES, RECIPE_SUFFIXES
from imgkit_entrypoints import terminal
from imgkit_entrypoints.errors import ImgkitError

if TYPE_CHECKING:
    from imgkit_builder.recipe.problems import Problem
    from imgkit_builder.sif.conversion import Stage

Result = TypeVar("Result")

JSON: bool = typer.Option(
    False, "--json", help="Print one JSON object on stdout, progress as JSON lines on stderr."
)
RESULT_JSON: bool = typer.Option(False, "--json", help="Print one JSON object on stdout.")
"""``--json`` of verbs without progress."""
LARGE: bool = typer.Option(False, "--large", help="Do not ask for confirmation above 1 GB of code.")
UNPACK_LIMIT: float | None = typer.Option(
    None,
    metavar="GB",
    min=0,
    help="Largest size of a compressed archive once unpacked (default: 100 times the file, at least 1).",
)
BASE_HELP = "Base image instead of the recipe's; current: the recipe's current_base."
VERBOSE: bool = typer.Option(False, "--verbose", "-v", help="Show all output.")
RUNTIME: str | None = typer.Option(
    None,
    "--runtime-command",
    metavar="COMMAND",
    help="Name or path of the runtime (default: singularity, else apptainer).",
)
TMPDIR: Path | None = typer.Option(
    None, metavar="DIR", help="Folder for temporary files (default: as for imgkit sif)."
)
NO_TEST: bool = typer.Option(False, "--no-test", help="Do not test the result by running it.")
RUNTIME_VERBOSE: bool = typer.Option(False, "--verbose", "-v", help="Show all output of the runtime.")
MB = 1e6


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
        can_ask = may_ask and sys.stdin.isatty() and sys.stderr.isatty()
        if not can_ask or not confirmed(f"{error.where}: {error.what}. Pack all of it?"):
            raise
        return run(True)


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
    from imgkit_recipes import recipe_names

    names = [name for name in recipe_names() if name.startswith(incomplete)]
    suffixes = (*RECIPE_SUFFIXES, *ARCHIVE_SUFFIXES, ".sif", ".imgdelta")
    folder, _, start = incomplete.rpartition("/")
    directory = Path(f"{folder}/") if "/" in incomplete else Path()
    paths = sorted(path for path in directory.glob("*") if path.name.startswith(start))
    folders = [f"{path}/" for path in paths if path.is_dir()]
    return [*names, *folders, *(str(path) for path in paths if path.name.endswith(suffixes))]


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


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM, which a scheduler sends at the time limit, clean up like Ctrl-C."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def next_line(sif: Path, command: str, *, overlay: str = "") -> str:
    """The command that runs `command` in `sif` with the options of the system that its image is for.

    An image that imgkit did not build names no system and has no ``dist-*`` commands: then it opens a shell.
    """
    from imgkit_builder.job import baked, quoting

    layer = ("--overlay", overlay) if overlay else ()
    try:
        runtime = baked.target(sif).system.runtime
    except (ImgkitError, OSError):
        return shlex.join(("singularity", "shell", *layer, str(sif)))
    on_singularity = runtime.kind == "singularity"
    program, options = (runtime.command, runtime.options) if on_singularity else ("singularity", ())
    mounts = (part for bind in runtime.binds for part in ("--bind", quoting.expanding(bind)))
    return " ".join(map(quoting.quote, (program, "exec", *options, *mounts, *layer, str(sif), command)))


def stage_seconds(stages: tuple[Stage, ...]) -> dict[str, float]:
    """Seconds per stage, for scripts."""
    return {stage.name: round(stage.seconds, 2) for stage in stages}


def stage_lines(stages: tuple[Stage, ...]) -> list[str]:
    """Seconds per stage and their sum, for people; empty if there were no stages."""
    if not stages:
        return []
    total = sum(stage.seconds for stage in stages)
    lines = [f"{stage.seconds:7.1f} s  {stage.name}" for stage in stages]
    return [*lines, f"{total:7.1f} s  in all"]

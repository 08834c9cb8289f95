"""Runs side by side: a table, and their curves over each other."""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.job.request import SubmittedJob
from imgkit_builder.project import history, measured
from imgkit_builder.project.measured import Measured
from imgkit_entrypoints.apps import drawing
from imgkit_entrypoints.apps.train import curves
from imgkit_entrypoints.errors import CheckFailed, UsageError

VALUES = ("loss", "eval_loss", "samples_per_s", "steps_per_s")
"""The numbers that are compared where the user names none."""
TITLE = "imgkit compare"
_FROM_ZERO = ("samples_per_s", "steps_per_s", "tokens_per_s")
"""Rates, whose axis begins at 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """One run, with its numbers."""

    name: str
    folder: Path
    record: SubmittedJob | None
    numbers: Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Runs, and the numbers by which they are compared."""

    runs: tuple[ComparedRun, ...]
    values: tuple[str, ...]


def compare(words: Sequence[str], values: Sequence[str]) -> Comparison:
    """Read the runs that `words` mean; without `values`, those of `VALUES` that a run has.

    Raises
    ------
    UsageError : there is no such run, one is named twice, or there are too many for one drawing.
    CheckFailed : a run has no metrics, or none of them has one of `values`.
    """
    found = [history.named(word) for word in words]
    for number, one in enumerate(found):
        if one.folder in [other.folder for other in found[:number]]:
            raise UsageError("the same run is named twice", where=one.name, hint="name each run once")
    if len(found) > curves.LOOKS:
        raise UsageError(
            f"{len(found)} runs", where="RUN", hint=f"at most {curves.LOOKS} curves look different"
        )
    runs = tuple(
        ComparedRun(name=one.name, folder=one.folder, record=one.record, numbers=measured.read(one.folder))
        for one in found
    )
    known = {name for run in runs for name in run.numbers.points}
    for value in values:
        if value not in known:
            raise CheckFailed(
                f"no run has the number {value}",
                where="--value",
                hint=f"there are: {', '.join(sorted(known))}",
            )
    chosen = values or [name for name in VALUES if name in known]
    if not chosen:
        raise CheckFailed(
            f"no run has {', '.join(VALUES)}",
            where="RUN",
            hint=f"--value NAME; there are: {', '.join(sorted(known))}",
        )
    return Comparison(runs=runs, values=tuple(dict.fromkeys(chosen)))


def grid(found: Comparison, *, short: bool = True) -> tuple[tuple[str, ...], ...]:
    """The table, its head first: last and least of each number, image, code and command."""
    first = found.values[0]
    rows = [("run", "step", *found.values, f"least {first}", "image", "code", "command")]
    for run in found.runs:
        numbers = [run.numbers.last(name) for name in found.values] + [run.numbers.least(first)]
        record = run.record
        image = record.image_id.removeprefix("sha256:") if record else ""
        code = record.code.sha256 if record and record.code else ""
        step = run.numbers.step
        rows.append(
            (
                run.name,
                "" if step is None else str(step),
                *("" if one is None else f"{one:.6g}" if short else repr(one) for one in numbers),
                image[:12] if short else image,
                code[:12] if short else code,
                shlex.join(record.command) if record else "",
            )
        )
    return tuple(rows)


def _charts(found: Comparison) -> list[curves.StepChart]:
    def chart(name: str) -> curves.StepChart:
        lines = (
            curves.StepCurve(label=run.name, points=run.numbers.points.get(name, ())) for run in found.runs
        )
        return curves.StepChart(name, tuple(lines), from_zero=name in _FROM_ZERO)

    return [chart(name) for name in found.values]


def svg(found: Comparison) -> str:
    """The curves of all runs over each other, a chart for each number."""
    return curves.document(_charts(found))


def html(found: Comparison) -> str:
    """One page with the table and the charts."""
    head, *rows = grid(found)
    figures = [
        f'<figure class="{screen}">{curves.figure(chart, width)}</figure>'
        for chart in _charts(found)
        for screen, width in (("desk", curves.WIDTH), ("phone", curves.PHONE))
    ]
    return drawing.page(TITLE, [f"<h1>{TITLE}</h1>", drawing.table(head, rows, words=True), *figures])


def table_csv(found: Comparison) -> str:
    """The table for a spreadsheet, with whole digests and numbers."""
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows(grid(found, short=False))
    return stream.getvalue()


WRITERS = {".svg": svg, ".html": html, ".csv": table_csv}

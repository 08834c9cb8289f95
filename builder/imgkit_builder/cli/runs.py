"""``imgkit runs`` and ``compare``: what ran where, and how it went."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from imgkit_builder.cli.common import RESULT_JSON, columns, show
from imgkit_builder.cli.remote import asked
from imgkit_entrypoints import terminal
from imgkit_entrypoints.errors import UsageError

if TYPE_CHECKING:
    from imgkit_builder.job.request import SubmittedJob
    from imgkit_builder.project.comparison import Comparison

SCHEMA = 1


def verb_runs(
    refresh: bool = typer.Option(
        False, "--refresh", help="Query the schedulers for jobs that have not ended."
    ),
    most: int = typer.Option(20, "-n", metavar="N", min=1, help="Show the newest N."),
    as_json: bool = RESULT_JSON,
) -> None:
    """List runs, newest first.

    The state is the last one that imgkit recorded; --refresh queries the schedulers.
    The loss is read from the run's files on this machine (imgkit fetch).

    \b
    Examples:
      imgkit runs
      imgkit runs --refresh
      imgkit runs -n 100 --json
    """
    from imgkit_builder.job import submit
    from imgkit_builder.project import history

    records = submit.records()[:most]
    if refresh:
        records, _ = asked(records)
    rows = [(one, history.numbers(one)) for one in records]
    table = [("RUN", "SUBMITTED", "STATE", "STEP", "LOSS", "IMAGE", "CODE", "COMMAND")]
    for one, numbers in rows:
        loss = numbers.last("loss")
        table.append(
            (
                one.handle,
                one.submitted[:16].replace("T", " ") or "-",
                one.state or "submitted",
                "-" if numbers.step is None else str(numbers.step),
                "-" if loss is None else f"{loss:.6g}",
                one.image_id.removeprefix("sha256:")[:12] or "-",
                one.code.sha256[:12] if one.code else "-",
                shlex.join(one.command) or "-",
            )
        )
    data = {
        "schema": SCHEMA,
        "runs": [
            {
                **_described(one),
                "submitted": one.submitted or None,
                "state": one.state or "submitted",
                "step": numbers.step,
                "loss": numbers.last("loss"),
            }
            for one, numbers in rows
        ],
    }
    lines = columns(table) if rows else ("no runs yet; imgkit run and imgkit submit start one",)
    show(data, *lines, as_json=as_json)


def _described(record: SubmittedJob) -> dict[str, Any]:
    from imgkit_builder.project import history

    folder = history.folder_of(record)
    return {
        "id": record.handle,
        "name": record.name,
        "recipe": record.recipe,
        "remote": record.remote or None,
        "image": record.image_id or None,
        "code": dataclasses.asdict(record.code) if record.code else None,
        "command": list(record.command),
        "folder": str(folder) if folder and folder.is_dir() else None,
    }


def verb_compare(
    runs: list[str] = typer.Argument(metavar="RUN...", help="Ids of jobs, or folders with a metrics.jsonl."),
    outputs: list[Path] = typer.Option(
        [], "--output", "-o", metavar="FILE", help="Write X.svg, X.html or X.csv; may be repeated."
    ),
    values: list[str] = typer.Option(
        [], "--value", metavar="NAME", help="Metric to compare (default: losses and rates)."
    ),
    as_json: bool = RESULT_JSON,
) -> None:
    """Compare runs in a table and in one plot of their curves.

    The numbers are the lines of metrics.jsonl in the run folders. imgkit fetch
    brings the folder of a job on a remote.

    \b
    Examples:
      imgkit compare 4711@mn5 4712@mn5
      imgkit compare runs/* -o curves.svg
      imgkit compare runs/a runs/b --value grad_norm -o page.html -o table.csv
    """
    from imgkit_builder.project import comparison
    from imgkit_entrypoints import files

    for output in outputs:
        if output.suffix.lower() not in comparison.WRITERS:
            raise UsageError(
                f"{output.name!r} has no known format",
                where="-o",
                hint=f"use a name that ends in {', '.join(comparison.WRITERS)}",
            )
    found = comparison.compare(runs, values)
    for output in outputs:
        text = comparison.WRITERS[output.suffix.lower()](found)
        with files.replacing(output, failed="cannot be written", hint="name a writable file") as stream:
            stream.write(text.encode())
        terminal.err(f"imgkit: wrote {output}")
    show(_compared(found), *columns(comparison.grid(found)), as_json=as_json)


def _compared(found: Comparison) -> dict[str, Any]:
    rows = [
        {
            "run": one.name,
            "folder": str(one.folder),
            "step": one.numbers.step,
            "last": {name: one.numbers.last(name) for name in found.values},
            "least": {name: one.numbers.least(name) for name in found.values},
            "image": (one.record.image_id or None) if one.record else None,
            "code": one.record.code.sha256 if one.record and one.record.code else None,
            "command": list(one.record.command) if one.record else None,
        }
        for one in found.runs
    ]
    return {"schema": SCHEMA, "values": list(found.values), "runs": rows}

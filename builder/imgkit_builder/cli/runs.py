"""``imgkit runs``: what ran where, and how it went."""

from __future__ import annotations

import dataclasses
import shlex
from typing import TYPE_CHECKING, Any

import typer

from imgkit_builder.cli.common import RESULT_JSON, columns, show
from imgkit_builder.cli.remote import asked

if TYPE_CHECKING:
    from imgkit_builder.job.request import SubmittedJob

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
        loss = numbers.loss
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
                "loss": numbers.loss,
            }
            for one, numbers in rows
        ],
    }
    lines = columns(table) if rows else ("no runs yet; imgkit run starts one",)
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

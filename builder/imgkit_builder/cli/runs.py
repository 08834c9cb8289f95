"""``imgkit runs``, and the table of submitted jobs that ``imgkit status`` prints as well."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import typer

from imgkit_builder.cli.common import JSON, format_columns, print_result
from imgkit_builder.jobs import job_status, records

if TYPE_CHECKING:
    from imgkit_builder.jobs.submitted import SubmittedJob


def verb_runs(
    limit: int = typer.Option(20, "-n", metavar="N", min=1, help="Show the newest N."),
    as_json: bool = JSON,
) -> None:
    """List runs, newest first.

    The state is the last one that imgkit recorded, or cancelled after imgkit cancel;
    imgkit status asks the schedulers.
    The loss is read from the run's files on this machine (imgkit fetch).

    \b
    Examples:
      imgkit runs
      imgkit runs -n 100 --json
    """
    jobs = [job_status.with_cancellation(record) for record in records.list_records()[:limit]]
    data = {"runs": [job_data(record) for record in jobs]}
    table_lines = jobs_table(jobs) if jobs else ("no runs yet; imgkit run starts one",)
    print_result(data, *table_lines, as_json=as_json)


def jobs_table(jobs: Sequence[SubmittedJob]) -> Iterator[str]:
    """Return the lines of a table of `jobs`. The first line has the titles."""
    titles = ("JOB", "NAME", "SUBMITTED", "STATE", "STEP", "LOSS", "IMAGE", "CODE", "COMMAND")
    return format_columns([titles, *(_make_table_row(record) for record in jobs)])


def _make_table_row(record: SubmittedJob) -> tuple[str, ...]:
    """Return the cells of a job's row in `jobs_table`. A missing value is shown as ``-``.

    The order is that of the titles in `jobs_table`. `record` is what imgkit has stored about the job.
    """
    # The last step and loss in the run's files on this machine. None if there are no such files.
    last_numbers = job_status.last_numbers(record)
    submitted_minute = record.submitted[:16]  # "2026-01-31T12:00"
    image_digest = record.image_id.removeprefix("sha256:")
    cells = (
        record.job.handle,
        record.job.name,
        submitted_minute.replace("T", " "),
        _recorded_state(record),
        "" if last_numbers.step is None else str(last_numbers.step),
        "" if last_numbers.loss is None else f"{last_numbers.loss:.6g}",
        image_digest[:12],
        record.code.sha256[:12] if record.code else "",
        shlex.join(record.command),
    )
    return tuple(cell or "-" for cell in cells)


def job_data(record: SubmittedJob) -> dict[str, Any]:
    """Return the data about a job that ``--json`` prints, with the last step and loss of its run.

    A value that is unknown is None. The folder, step and loss are known only if the run's files are on this
    machine.
    """
    folder = job_status.local_run_folder(record)
    has_folder = folder is not None and folder.is_dir()
    return {
        "id": record.job.handle,
        "name": record.job.name,
        "recipe": record.recipe,
        "remote": record.job.files_remote or None,
        "image": record.image_id or None,
        "code": dataclasses.asdict(record.code) if record.code else None,
        "command": list(record.command),
        "folder": str(folder) if has_folder else None,
        "submitted": record.submitted or None,
        "state": _recorded_state(record),
        **dataclasses.asdict(job_status.last_numbers(record)),
    }


def _recorded_state(record: SubmittedJob) -> str:
    """Return the last state of the job that imgkit has recorded.

    If imgkit has not asked for the state yet, the result is ``submitted``. If the scheduler did not print an
    id when the job was submitted, it is ``unknown``.
    """
    if record.state:
        return record.state
    return "submitted" if has_known_id(record) else "unknown"


def has_known_id(record: SubmittedJob) -> bool:
    """Return whether the id of the job is known.

    If it is not, the scheduler printed no id, and `answer` is the text that it printed.
    """
    return record.answer is None

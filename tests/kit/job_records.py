"""Submitted jobs for tests, of fields of the record and of how the scheduler finds the job."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from imgkit_builder.jobs import records
from imgkit_builder.jobs.request import CodeRecord
from imgkit_builder.jobs.submitted import QueuedJob, SubmittedJob

_OF_THE_QUEUE = {field.name for field in dataclasses.fields(QueuedJob)}


def queued_job(**fields: Any) -> QueuedJob:
    """Return job 7 of the recipe mn5 in the folder /w, with other `fields`."""
    return QueuedJob(**{"id": "7", "system": "slurm", "name": "mn5", "directory": Path("/w"), **fields})


def submitted_job(**fields: Any) -> SubmittedJob:
    """Return the record of `queued_job`; each of `fields` goes where it belongs."""
    of_the_queue = {name: fields.pop(name) for name in _OF_THE_QUEUE & fields.keys()}
    return SubmittedJob(**{"job": queued_job(**of_the_queue), "recipe": "mn5", **fields})


def full_record() -> SubmittedJob:
    """Return a record with every field, as tests/written/make.py stores it."""
    return SubmittedJob(
        job=QueuedJob(
            id="4711",
            system="slurm",
            name="mine",
            directory=Path("/home/me/work"),
            queue="acc",
            cluster="mn5",
            remote="far",
        ),
        recipe="mn5",
        code=CodeRecord(sha256="c" * 64, git="v1", uncommitted=True),
        submitted="2026-01-01T00:00:00+00:00",
        command=("dist-run", "train.py", "--lr", "0.1"),
        image_id="sha256:" + "a" * 64,
        state="succeeded",
        fetched="/home/me/runs/mine-4711",
    )


def keep_job(number: int = 1, **fields: Any) -> SubmittedJob:
    """Keep the record of a job that was submitted from the current folder, on that day of January 2026."""
    submitted = f"2026-01-0{number}T00:00:00+00:00"
    command = ("dist-hello",)
    values = {"id": str(number), "directory": Path.cwd(), "submitted": submitted, "command": command}
    record = submitted_job(**{**values, **fields})
    records.save_record(record)
    return record

"""The records of jobs that were submitted from this machine, one file each."""

from __future__ import annotations

import dataclasses
import glob
import json
import shlex
from pathlib import Path

from imgkit_builder.base import files
from imgkit_builder.jobs import quoting, systems
from imgkit_builder.jobs.submitted import QueuedJob, SubmittedJob
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import ToolFailed, UsageError

SCHEMA = 1
_OF_THE_QUEUE = tuple(field.name for field in dataclasses.fields(QueuedJob))
_DAMAGED = (OSError, ValueError, TypeError, KeyError, AttributeError, UsageError)
_NAMED_JOBS = 5
"""The last jobs that an error names."""


def keep(record: SubmittedJob) -> None:
    """Save `record`, for `find`."""
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True)
    values = dataclasses.asdict(record)
    data = {"schema": SCHEMA, **values.pop("job"), **values}  # flat, for programs that read it
    files.put(folder / f"{record.job.handle}.json", json.dumps(data, indent=2, default=str) + "\n")


def find(job_id: str) -> SubmittedJob:
    """Return the record of a job that this user submitted from this machine.

    Raises
    ------
    UsageError : there is no such record.
    ToolFailed : the job's id is unknown.
    """
    try:
        record = _read(_path(job_id))
    except _DAMAGED as error:
        if task := _find_task(job_id):
            return need_id(task)
        paths = sorted(_folder().glob("*.json"), key=lambda path: path.stat().st_mtime)
        last = ", ".join(path.stem for path in paths[-_NAMED_JOBS:])
        raise UsageError(
            f"imgkit has no record of a job {job_id!r}",
            where="ID",
            hint=f"the last jobs: {last}" if last else "imgkit run prints the id",
        ) from error
    return need_id(record)


def need_id(record: SubmittedJob) -> SubmittedJob:
    """Return `record`, if the scheduler told the job's id.

    Raises
    ------
    ToolFailed : it did not; says where the id is found.
    """
    if record.answer is None:
        return record
    job = record.job
    argv = systems.named(job.system).queue.own_jobs
    suffix = f" on {job.remote}" if job.remote else ""
    look = f"{shlex.join(argv)}{suffix}" if argv else f"the commands of {job.system}{suffix}"
    printed = repr(record.answer.strip()) if record.answer.strip() else "nothing"
    raise ToolFailed(
        f"the job is submitted, but its id is unknown: {job.system} printed {printed}",
        where=job.handle,
        hint=f"do not submit it again; {look} shows the job {job.name} with its id, "
        "by which the scheduler's own commands follow and cancel it",
    )


def newest_first() -> tuple[SubmittedJob, ...]:
    """Return all records; a damaged one is left out."""
    loaded = []
    for path in _folder().glob("*.json"):
        try:
            loaded.append(_read(path))
        except _DAMAGED:
            continue
    return tuple(sorted(loaded, key=lambda record: record.submitted, reverse=True))


def is_kept(record: SubmittedJob) -> bool:
    """Return whether a file holds `record`: that of an array's task is made from the array's."""
    return _path(record.job.handle).exists()


def is_cancelled(record: SubmittedJob) -> bool:
    """Return whether imgkit has cancelled the job, also after `record` was read."""
    try:
        return _read(_path(record.job.handle)).cancelled
    except _DAMAGED:
        return False


def _find_task(job_id: str) -> SubmittedJob | None:
    """Return the record for a task of an array job. Return None if no array has it."""
    number, _, remote = job_id.partition("@")
    for record in newest_first():
        if record.job.array and remote in ("", record.job.remote):
            task_id = systems.task_id(record.job, number)
            if task_id and quoting.is_job_id(task_id):
                task = dataclasses.replace(record.job, id=task_id, array=False)
                return dataclasses.replace(record, job=task, state="", fetched="")
    return None


def _read(path: Path) -> SubmittedJob:
    values = json_text.load(path)
    of_the_queue = {name: values.pop(name) for name in _OF_THE_QUEUE if name in values}
    record: SubmittedJob = json_text.read(SubmittedJob, {**values, "job": of_the_queue}, "record")
    job = record.job
    if not all(map(quoting.is_job_id, (job.id, *filter(None, (job.cluster, job.remote))))):
        raise ValueError(f"{job.handle!r} is not a job id")
    quoting.check("--name", job.name.removesuffix("-sif"))
    return record


def _path(job_id: str) -> Path:
    """Return the file of a record; the name of a remote may be left out where it is not needed.

    Raises
    ------
    ValueError : no job can have this id.
    """
    if not all(map(quoting.is_job_id, job_id.split("@", 1))):
        raise ValueError(f"{job_id!r} is not a job id")
    path = _folder() / f"{job_id}.json"
    if "@" in job_id or path.exists():
        return path
    matches = list(_folder().glob(f"{glob.escape(job_id)}@*.json"))
    return matches[0] if len(matches) == 1 else path


def _folder() -> Path:
    return files.state_dir() / "jobs"

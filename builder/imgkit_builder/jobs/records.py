"""Save and find the records of jobs that were submitted from this machine.

Each record is a JSON file in the folder ``jobs`` of imgkit's state folder. It is named by the job's id as
imgkit prints it, for example ``4711@mn5.json``.
"""

from __future__ import annotations

import contextlib
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

SCHEMA = 1  # version of the format of a record, for other programs that read the file
# Names of the fields of `QueuedJob`. In a file, they are at the same level as those of `SubmittedJob`.
_QUEUED_JOB_FIELDS = tuple(field.name for field in dataclasses.fields(QueuedJob))
# Errors that `_read_record` and `_record_path` raise if a record does not exist or is damaged.
_READ_ERRORS = (OSError, ValueError, TypeError, KeyError, AttributeError, UsageError)
# The error about an unknown id lists the ids of the last five jobs. The latest job comes last.
_MAX_LISTED_JOBS = 5


def save_record(record: SubmittedJob) -> None:
    """Save `record` to its file, from which `find_record` reads it. An older version is replaced.

    Raises
    ------
    OSError : the file cannot be written.
    """
    folder = _records_folder()
    folder.mkdir(parents=True, exist_ok=True)
    fields = dataclasses.asdict(record)
    job_fields = fields.pop("job")
    # The fields of the job are not nested, because that is simpler for other programs that read the file.
    data = {"schema": SCHEMA, **job_fields, **fields}
    # `default=str` writes paths as text.
    files.write_file(folder / f"{record.job.handle}.json", json.dumps(data, indent=2, default=str) + "\n")


def find_record(job_id: str) -> SubmittedJob:
    """Return the record of a job that was submitted from this machine.

    Parameters
    ----------
    job_id : ``4711`` or ``4711@REMOTE``. For one task of an array job, ``4711_3`` (Slurm) or ``4711[3]``
        (PBS). The remote can be left out if only one record has the number.

    Raises
    ------
    UsageError : no record has this id.
    ToolFailed : the scheduler printed no id at the submission, so it cannot be asked about the job.
    """
    record = None
    with contextlib.suppress(*_READ_ERRORS):
        record = _read_record(_record_path(job_id))
    if record is None:
        # A task of an array has no file of its own. Its record is derived from the record of the array.
        record = _find_task(job_id)
    if record is not None:
        refuse_unknown_id(record)
        return record
    raise _unknown_id_error(job_id)


def _unknown_id_error(job_id: str) -> UsageError:
    """Return the error for an id that no record has. The hint lists the ids of the last jobs."""
    hint = "imgkit run prints the id"
    paths = sorted(_records_folder().glob("*.json"), key=lambda path: path.stat().st_mtime)
    if paths:
        last_ids = [path.stem for path in paths[-_MAX_LISTED_JOBS:]]
        hint = f"the last jobs: {', '.join(last_ids)}"
    return UsageError(f"imgkit has no record of a job {job_id!r}", where="ID", hint=hint)


def refuse_unknown_id(record: SubmittedJob) -> None:
    """Raise ToolFailed if the scheduler printed no job id at the submission.

    imgkit cannot ask the scheduler about such a job. The hint names the scheduler's command that shows the
    id, and warns the user not to submit the job again.
    """
    if record.answer is None:
        return
    job = record.job
    answer = record.answer.strip()
    printed_text = repr(answer) if answer else "nothing"
    list_argv = systems.get_system(job.system).queue.own_jobs
    command = shlex.join(list_argv) or f"the commands of {job.system}"
    if job.remote:
        command += f" on {job.remote}"
    raise ToolFailed(
        f"the job is submitted, but its id is unknown: {job.system} printed {printed_text}",
        where=job.handle,
        hint=f"do not submit it again; {command} shows the job {job.name} with its id, "
        "by which the scheduler's own commands follow and cancel it",
    )


def list_records() -> tuple[SubmittedJob, ...]:
    """Return all records. The job that was submitted last comes first, and damaged records are left out."""
    readable_records = []
    for path in _records_folder().glob("*.json"):
        with contextlib.suppress(*_READ_ERRORS):
            readable_records.append(_read_record(path))
    return tuple(sorted(readable_records, key=lambda record: record.submitted, reverse=True))


def list_records_of_run(record: SubmittedJob) -> tuple[SubmittedJob, ...]:
    """Return the records of all jobs with the same run folder as `record`, the newest first.

    A run that was resumed has several jobs.
    """
    job = record.job
    records_of_run = []
    for saved in list_records():
        if saved.job.remote == job.remote and saved.job.run_folder == job.run_folder:
            records_of_run.append(saved)
    return tuple(records_of_run)


def has_record_file(record: SubmittedJob) -> bool:
    """Return whether `record` has a file. The record of one task of an array has none."""
    return _record_path(record.job.handle).exists()


def is_cancelled(record: SubmittedJob) -> bool:
    """Return whether imgkit has cancelled the job.

    The file is read again, because another imgkit process may have cancelled the job since `record` was read.
    """
    try:
        return _read_record(_record_path(record.job.handle)).cancelled
    except _READ_ERRORS:
        return False


def _find_task(handle: str) -> SubmittedJob | None:
    """Return a record for one task of an array job, or None if no array has this task.

    The result is a copy of the array's record, with the id of the task.

    Parameters
    ----------
    handle : ``4711_3`` or ``4711_3@REMOTE``. Without a remote, the arrays of all machines are searched. If
        several match, the one that was submitted last is used.
    """
    job_id, _, remote = handle.partition("@")
    for record in list_records():
        job = record.job
        if not job.array:
            continue
        if remote and remote != job.remote:
            continue
        task_id = systems.task_id(job, job_id)  # "" if the id is not that of a task of this array
        if quoting.is_job_id(task_id):
            task = dataclasses.replace(job, id=task_id, array=False)  # one task is an ordinary job
            # The state and the fetched folder in the record belong to the array. Nothing is known about the
            # task yet.
            return dataclasses.replace(record, job=task, state="", fetched="")
    return None


def _read_record(path: Path) -> SubmittedJob:
    """Return the record in the file `path`.

    In the file, the fields of `QueuedJob` and `SubmittedJob` are in a single JSON object.

    Raises
    ------
    OSError : the file cannot be read.
    ValueError, UsageError : the file is damaged, or contains an id or a name that no job can have.
    """
    fields = json_text.load(path)
    job_fields = {name: fields.pop(name) for name in _QUEUED_JOB_FIELDS if name in fields}
    record: SubmittedJob = json_text.build_value(SubmittedJob, {**fields, "job": job_fields}, "record")
    job = record.job
    # These values become arguments of commands and parts of paths. So a damaged file must not contain
    # arbitrary text.
    if not quoting.is_job_id(job.id):
        raise ValueError(f"{job.handle!r} is not a job id")
    for name in (job.cluster, job.remote, job.store, job.run_name):
        if name and not quoting.is_job_id(name):
            raise ValueError(f"{name!r} cannot be part of a path")
    quoting.check_flag_value("--name", job.name)
    return record


def _record_path(handle: str) -> Path:
    """Return the path of the file for the record of a job. The file need not exist.

    ``4711`` also finds the file of ``4711@REMOTE``, if this machine has no job with that number and only one
    remote has.

    Raises
    ------
    ValueError : no job can have this id.
    """
    job_id, at_sign, remote = handle.partition("@")
    if not quoting.is_job_id(job_id) or (at_sign and not quoting.is_job_id(remote)):
        raise ValueError(f"{handle!r} is not a job id")
    folder = _records_folder()
    path = folder / f"{handle}.json"
    # A handle with a remote is complete. Without one, a job of this machine takes precedence.
    if at_sign or path.exists():
        return path
    paths_on_remotes = list(folder.glob(f"{glob.escape(job_id)}@*.json"))
    if len(paths_on_remotes) == 1:
        return paths_on_remotes[0]
    return path


def _records_folder() -> Path:
    """Return the folder that contains one file for each record."""
    return files.state_dir() / "jobs"

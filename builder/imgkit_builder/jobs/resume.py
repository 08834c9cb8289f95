"""Find out from a job's record how to submit the job again in its run folder, or refuse to do so.

`to_json` writes the request into the record of a job, and `load_request` reads it from there.
`save_end_of_run` refuses a run that has not ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imgkit_builder.base.flags import declared_options
from imgkit_builder.jobs import job_status, records, systems
from imgkit_builder.jobs.job import Runner
from imgkit_builder.jobs.request import CodeRecord, JobRequest, ResumedRun
from imgkit_builder.jobs.submitted import SubmittedJob
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.launch import stop_protocol

# The clients of Kubernetes and RunAI print this about a job that does not exist: "NotFound", "does not
# exist".
_NO_SUCH_JOB = re.compile(r"not ?found|does not exist", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRequest:
    """The arguments of `submit.prepare` for a job that was submitted earlier."""

    recipe: str
    base: str
    request: JobRequest


def to_json(recipe: str | Path, request: JobRequest, base: str, *, remote: str) -> str:
    """Return the arguments of a submission as JSON text. The job can be resumed from this text in its record.

    A variable of ``--env NAME`` may be secret, so the text contains only its name. Paths on this machine are
    made absolute, because `imgkit resume` may run in another folder.

    Parameters
    ----------
    base : the base image that replaces the recipe's base image, or "".
    remote : the remote on which the job is submitted, or "" for this machine.
    """
    recipe_text = str(recipe)
    if Path(recipe).is_file():
        recipe_text = str(Path(recipe).absolute())
    paths = _absolute_paths(request, remote)
    # The flags of the system are stored separately, with the name of their class, which differs for each
    # system.
    # The run that this job itself resumes is not recorded, because the next `imgkit resume` finds it anew.
    recorded = request.changed(**paths, system_flags=(), resumed=None)
    system_flags = {type(flags).__name__: dataclasses.asdict(flags) for flags in request.system_flags}
    data = {
        "recipe": recipe_text,
        "base": base,
        "request": dataclasses.asdict(recorded),
        "system_flags": system_flags,
    }
    # `default=str` writes paths as text.
    return json.dumps(data, default=str)


def _absolute_paths(request: JobRequest, remote: str) -> dict[str, Any]:
    """Return the paths of the request on this machine as absolute paths, by the fields of the request.

    On a remote, imgkit chooses the folder of the job, and the path of the image belongs to the remote. So the
    result contains neither of them if `remote` is not empty.
    """
    container = request.container
    paths: dict[str, Any] = {"code": _absolute(container.code), "templates": _absolute(request.templates)}
    if remote:
        return paths
    paths["directory"] = request.directory.absolute()
    if container.image and Path(container.image).exists():  # otherwise it may be an image in a registry
        paths["image"] = str(Path(container.image).absolute())
    return paths


def _absolute(path: Path | None) -> Path | None:
    """Return `path` as an absolute path, or None if the flag is not given."""
    if path is None:
        return None
    return path.absolute()


def load_request(record: SubmittedJob) -> RecordedRequest:
    """Return the arguments with which a job was submitted. They are read from the job's record.

    Raises
    ------
    UsageError : the job cannot be resumed. The message says why.
    """
    _refuse_unresumable(record)
    try:
        data = json_text.parse(record.request)
        request: JobRequest = json_text.build_value(JobRequest, data["request"], "request")
        system = systems.get_system(record.job.system)
        fields = data["system_flags"].get(system.flags.__name__)
        if fields is not None:
            flags = json_text.build_value(system.flags, fields, "request")
            request = request.changed(system_flags=(flags,))
        return RecordedRequest(recipe=data["recipe"], base=data["base"], request=request)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(
            f"the record of {record.job.handle} does not say what the job asked for",
            where="ID",
            hint="another version of imgkit or another command submitted it: imgkit run ... -- COMMAND",
        ) from error


def _refuse_unresumable(record: SubmittedJob) -> None:
    """Raise UsageError for an array job, or for a system whose jobs cannot use an earlier run folder.

    A resumed run is a new job that goes on in the run folder of the earlier job. An array has many run
    folders, so no single folder can be used.
    """
    handle = record.job.handle
    if record.job.array or not records.has_record_file(record):
        raise UsageError(
            f"{handle} is an array or a task of one, which cannot be resumed",
            where="ID",
            hint="submit the tasks again: imgkit run --option=--array=3,5 ... -- COMMAND",
        )
    if not job_status.can_choose_folder(record):
        raise UsageError(
            f"{handle} is a job of {record.job.system}, whose run folder imgkit cannot choose",
            where="ID",
            hint="imgkit run ... -- dist-train --run-dir FOLDER goes on in that folder",
        )


def with_flags(recorded: JobRequest, flags: JobRequest) -> JobRequest:
    """Return the recorded request of a job, changed by the flags of `imgkit resume`.

    For example, ``--nodes 4`` replaces the recorded number of nodes. ``--env LR=0.1`` replaces only the
    variable LR, and keeps the other variables of the job.
    """
    changes: dict[str, Any] = {}
    for flag in declared_options(JobRequest):
        value = flag.value(flags)
        # A flag with its default value counts as not given. So the recorded value stays.
        if value != flag.default:
            changes[flag.field] = value
    if "env" in changes:
        changes["env"] = _merge_variables(recorded.container.env, changes["env"])
    if flags.launch.command:
        changes["command"] = flags.launch.command
    return recorded.changed(**changes)


def _merge_variables(recorded: Sequence[str], new: Sequence[str]) -> tuple[str, ...]:
    """Return the recorded values of ``--env`` that `new` does not replace, and then the values in `new`."""
    new_names = {assignment.partition("=")[0] for assignment in new}
    kept_values = [assignment for assignment in recorded if assignment.partition("=")[0] not in new_names]
    return (*kept_values, *new)


def find_run(record: SubmittedJob, run: Runner, *, same_code: bool) -> ResumedRun:
    """Return the run of a job, as a new job needs it that continues the run.

    Parameters
    ----------
    run : runs a command on the machine that has the run folder.
    same_code : whether the run goes on with its copy of the code as it is. If so, the result names this
        version of the code.
    """
    folder = record.job.run_folder
    if not same_code:
        return ResumedRun(job=record.job.handle, folder=folder)
    # If the run was resumed before, its copy may contain newer code than the record of this job names.
    answer = run(("cat", "--", str(folder / "code.json")))
    code = record.code  # stays if the file cannot be read
    with contextlib.suppress(ValueError):  # if the job has not started, the file does not exist
        code = json_text.build_value(CodeRecord, json_text.parse(answer.output), "code.json")
    return ResumedRun(job=record.job.handle, folder=folder, code=code)


def save_end_of_run(record: SubmittedJob, run: Runner, run_on_files: Runner, *, has_command: bool) -> None:
    """Save how the jobs of a run ended, and refuse to resume a run that goes on or has completed.

    Two jobs in one run folder would overwrite each other's files, so all jobs of the run must have ended. If
    the program has completed, a new job would have nothing to do, unless the user gives a new command. A
    program that a person stopped with the file ``stop`` has not completed, so its run can be resumed.

    Parameters
    ----------
    record : the record of one of the run's jobs.
    run : runs a command on the machine that submitted the job.
    run_on_files : runs a command on the machine that has the run folder.
    has_command : whether the user gives a new command, for example with more epochs.

    Raises
    ------
    UsageError : the run has not ended, or its program has completed.
    ToolFailed : the scheduler did not answer. The job may still be running.
    """
    # Every job is looked at, even after the latest: an earlier one may still run in the same folder.
    latest = None
    for job_record in records.list_records_of_run(record):
        saved_record = _save_end_of_job(job_record, run)  # raises an error if the job has not ended
        latest = latest or saved_record  # the records begin with the job that used the run folder last
    if latest is None or latest.state != "succeeded":
        return
    stop_file = latest.job.run_folder / stop_protocol.BY_PERSON
    is_stopped = latest.stopped or run_on_files(("test", "-e", str(stop_file))).returncode == 0
    if is_stopped:
        # The new submission removes the file, even if it fails afterwards. The record then still shows that
        # the run can be resumed.
        records.save_record(dataclasses.replace(latest, stopped=True))
    elif not has_command:
        raise UsageError(
            f"{latest.job.handle} completed: the program has ended well by itself",
            where="ID",
            hint=f"to go on, for example with more epochs: imgkit resume {record.job.handle} -- COMMAND",
        )


def _save_end_of_job(record: SubmittedJob, run: Runner) -> SubmittedJob | None:
    """Save the final state of a job that has ended, and return the record with that state.

    The state must be saved now, because it may be derived from a file that the resumed run removes. If the
    system does not report how jobs end, and the job was deleted, the result is None.

    Raises
    ------
    UsageError : the job has not ended, or it is unknown whether it has.
    """
    job = record.job
    handle = job.handle
    if not systems.get_system(job.system).reports_state:
        if record.cancelled or _is_deleted(record, run):
            return None
        raise UsageError(
            f"{handle} may go on: the commands of {job.system} do not report whether it has ended",
            where="ID",
            hint=f"delete it first: imgkit cancel {handle}, then imgkit resume {handle}",
        )
    report = job_status.report_job(record, run)
    if not report.has_ended:
        raise UsageError(
            f"the run goes on: {handle} is {report.record.state or 'submitted'}",
            where="ID",
            hint=f"imgkit cancel {handle} or imgkit wait {handle}, then imgkit resume {handle}",
        )
    if report.record != record:  # the state is new
        records.save_record(report.record)
    return report.record


def _is_deleted(record: SubmittedJob, run: Runner) -> bool:
    """Return whether the job's system reports that there is no such job, because it was deleted."""
    status_argv = systems.get_system(record.job.system).status_commands(record.job)[0]
    answer = run(status_argv)
    return answer.returncode != 0 and bool(_NO_SUCH_JOB.search(answer.output))

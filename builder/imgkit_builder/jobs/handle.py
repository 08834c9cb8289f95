"""The Python API for jobs: submit a command as a job, here or on a remote, and follow the job.

`run` is ``imgkit run`` as a function. It returns a `JobHandle`, which can also cancel or resume the job.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.base import process
from imgkit_builder.base.progress import Reporter, Silent
from imgkit_builder.jobs import code as code_folders
from imgkit_builder.jobs import conversion, image_source, job_status, records, resume, submit, systems
from imgkit_builder.jobs.code import CodeFolder
from imgkit_builder.jobs.job import Argv
from imgkit_builder.jobs.prepared import PreparedJob
from imgkit_builder.jobs.remote import config, connection, fetch
from imgkit_builder.jobs.remote.config import Remote
from imgkit_builder.jobs.request import JobRequest
from imgkit_builder.jobs.submitted import JobState, SubmittedJob
from imgkit_builder.jobs.transport import Ssh, Transport, VolumeStore
from imgkit_entrypoints.errors import UsageError

# The largest number of bytes that `JobHandle.logs` returns. imgkit keeps 1 KiB more of a program's output,
# which leaves space for the line about the missing part.
_MAX_LOG_BYTES = process.MOST_BYTES - 1024
# Print the end of a file. If a part of the file is left out, print a line about its size first. The arguments
# are the largest number of bytes and the path of the file.
_PRINT_END = """\
bytes=$(wc -c < "$2") || exit
if [ "$bytes" -gt "$1" ]; then
    echo "imgkit: the output has $((bytes)) bytes, of which these are the last $1"
fi
exec tail -c "$1" -- "$2"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHandle:
    """A submitted job.

    `run` returns the handle of a new job. `find_job` returns the handle of a job that was submitted earlier.
    """

    record: SubmittedJob

    @property
    def id(self) -> str:
        """The scheduler's id of the job: ``4711``, or ``4711@mn5`` for a job on the remote ``mn5``."""
        return self.record.job.handle

    def status(self) -> JobState:
        """Return the job's state.

        The scheduler is asked. If it no longer knows the job, the state is derived from the files of the run.

        Raises
        ------
        ToolFailed : the scheduler did not answer. The job may still be running.
        """
        report = job_status.report_job(self.record, job_status.scheduler_runner(self.record))
        return report.record.state

    def wait(self, timeout_s: float | None = None) -> JobState:
        """Wait until the job has ended, or for at most `timeout_s` seconds, and return the job's state.

        Raises
        ------
        UsageError : the commands of the system do not report whether a job has ended.
        ToolFailed : the scheduler did not answer a single time.
        """
        run = job_status.scheduler_runner(self.record)
        report = job_status.wait_for_job(self.record, run, limit_s=timeout_s)
        return report.record.state

    def logs(self) -> str:
        """Return the job's output so far. It is empty if there is no output yet, or if it cannot be read.

        If the output has more than 8 MiB, only its end is returned. For output in a file, the first line then
        says so.

        Raises
        ------
        UsageError : the job is an array, in which each task writes its output to another file.
        """
        follow_argv = systems.get_system(self.record.job.system).log_source(self.record.job)
        # The command of `log_source` follows the output and never ends: "tail -F FILE", or a client with the
        # flag --follow. Here, it is changed into a command that prints the output and ends.
        if follow_argv[0] == "tail":
            log_file = follow_argv[-1]
            argv: Argv = ("sh", "-c", _PRINT_END, "sh", str(_MAX_LOG_BYTES), log_file)
        else:
            argv = tuple(argument for argument in follow_argv if argument != "--follow")
        answer = job_status.scheduler_runner(self.record)(argv)
        if answer.returncode != 0:
            return ""
        return answer.output

    def fetch(self, folder: str | Path | None = None, *, checkpoints: bool = False) -> Path:
        """Copy the run folder from the job's remote, and return the path of the copy.

        A job of this machine needs no copy. Its run folder is returned, and the parameters are ignored.

        Parameters
        ----------
        folder : where the copy is written. The default is ``runs/NAME-ID`` in the current folder.
        checkpoints : whether the checkpoints of a training run are copied too.
        """
        record = self.record
        if not record.job.files_remote:
            return record.job.run_folder
        copy = Path(folder or Path("runs", record.job.run_folder.name))
        remote = job_status.connection_to(record.job.files_remote)
        fetch.fetch_run(remote, record, copy, checkpoints=checkpoints, report=Silent())
        return copy

    def resume(
        self, changes: JobRequest | None = None, *, same_code: bool = False, report: Reporter | None = None
    ) -> JobHandle:
        """Submit a job that has ended again, in the same run folder, and return the handle of the new job.

        Parameters
        ----------
        changes : a request that contains the values to change. By default, nothing is changed.
        same_code : whether the run goes on with its copy of the code as it is. If not, the current code is
            sent.
        report : receives progress and warnings.

        Raises
        ------
        UsageError : the run has not ended. Or its program has completed, and `changes` has no command.
        ImgkitError : the transfer or the submission failed.
        """
        report = report or Silent()
        read_code = functools.partial(_read_code, report=report)
        prepared = prepare_resume(self.record, changes or JobRequest(), read_code, same_code=same_code)
        transport = transport_to(remote_of(self.record), prepared)
        return _handle_of_new_job(submit.submit_job(prepared, transport, report))

    def cancel(self) -> None:
        """Cancel the job.

        Raises
        ------
        ToolFailed : the scheduler refused to cancel the job. The error quotes the scheduler's message.
        """
        answer = job_status.cancel_job(self.record, job_status.scheduler_runner(self.record))
        if answer.returncode != 0:
            raise job_status.command_failed(self.record, answer.argv, answer)


def run(
    recipe: str | Path,
    request: JobRequest,
    *,
    on: str = "",
    base: str = "",
    report: Reporter | None = None,
) -> JobHandle:
    """Submit the job of `request`, and return its handle.

    Parameters
    ----------
    recipe : a shipped name, a recipe's file, or a .sif. For a remote, it can also be an archive.
    on : the name of a remote. The image is first built and sent there. Without a name, the scheduler of this
        machine takes the job.
    base : a base image that replaces the recipe's base image, for a job on a remote.
    report : receives progress and warnings.

    Raises
    ------
    UsageError : the system cannot satisfy the request, or has no scheduler.
    ImgkitError : the build, the transfer or the submission failed.
    """
    if base and not on:
        raise UsageError("a base is for a remote", where="base", hint="name a remote: on=NAME")
    report = report or Silent()
    remote = None
    if on:
        remote = config.get_remote(on)
    code = _read_code(request, report)
    prepared = submit.prepare(recipe, request, code, remote=remote, base=base)
    record = submit.submit_job(prepared, transport_to(remote, prepared), report)
    return _handle_of_new_job(record)


def _handle_of_new_job(record: SubmittedJob) -> JobHandle:
    """Return the handle of a job that has just been submitted. Raise ToolFailed if its id is unknown."""
    records.refuse_unknown_id(record)
    return JobHandle(record=record)


def _read_code(request: JobRequest, report: Reporter) -> CodeFolder | None:
    """Read the code of the request and return it, or None if the request has no code."""
    if request.container.code is None:
        return None
    return code_folders.read_code_folder(request, large=request.container.yes, report=report)


def prepare_resume(
    record: SubmittedJob,
    changes: JobRequest,
    read_code: Callable[[JobRequest], CodeFolder | None],
    *,
    same_code: bool,
    may_ask: bool = False,
) -> PreparedJob:
    """Return a new job that goes on in the run folder of an earlier job. Nothing is sent or submitted.

    The earlier jobs of the run must have ended. Their final states are saved in their records.

    Parameters
    ----------
    record : the record of the earlier job.
    changes : a request that contains the values to change.
    read_code : reads the code of a request. It is not called if `same_code` is true.
    same_code : whether the run goes on with its copy of the code as it is.
    may_ask : whether ssh may ask a person for a password or a second factor.

    Raises
    ------
    UsageError : the job cannot be resumed.
    """
    recorded = resume.load_request(record)
    # For a job in pods, this machine asks the scheduler, and a remote has the files.
    run = job_status.scheduler_runner(record, may_ask=may_ask)
    run_on_files = job_status.runner_on(record.job.files_remote, may_ask=may_ask)
    # This raises an error if a job of the run may still be running. So it comes before anything is prepared.
    resume.save_end_of_run(record, run, run_on_files, has_command=bool(changes.launch.command))
    request = resume.with_flags(recorded.request, changes)
    code = None
    if not same_code:
        code = read_code(request)
    resumed_run = resume.find_run(record, run_on_files, same_code=same_code)
    return submit.prepare(
        recorded.recipe,
        request.changed(resumed=resumed_run),
        code,
        remote=remote_of(record),
        base=recorded.base,
    )


def remote_of(record: SubmittedJob) -> Remote | None:
    """Return the remote that has the job's files, or None if this machine has them.

    It is the remote on which the job was submitted, or the remote that stores the files of a job in pods.
    """
    name = record.job.files_remote
    if not name:
        return None
    return config.get_remote(name)


def submit_conversion(prepared: PreparedJob, *, report: Reporter | None = None) -> JobHandle:
    """Submit a job of `prepare_conversion` or `prepare_build` to the scheduler of this machine.

    Raises
    ------
    UsageError : this machine does not have the job's folder, or the files from which the image is created.
    ToolMissing, ToolFailed : this machine has no such scheduler, or the scheduler refused the job.
    """
    return _handle_of_new_job(conversion.submit_conversion(prepared, report or Silent()))


def transport_to(remote: Remote | None, prepared: PreparedJob, *, may_ask: bool = False) -> Transport:
    """Return the transport, which brings the job's files to their machine and submits the job.

    The class depends on the remote. Without a remote, it is `Transport`, and this machine submits the job.
    For most remotes it is `Ssh`, and the remote submits the job. If the remote only stores files for pods, it
    is `VolumeStore`: this machine submits the job, and the files go to the remote.

    Parameters
    ----------
    may_ask : whether ssh may ask a person for a password or a second factor.
    """
    if remote is not None and remote.pvc:
        return VolumeStore(connection.connect(remote, ask=may_ask))
    if remote is None or prepared.source is None:
        return Transport()
    remote = image_source.with_transfer_host(remote, prepared.source)
    return Ssh(connection.connect(remote, ask=may_ask))


def find_job(job_id: str) -> JobHandle:
    """Return the job with this id that was submitted from this machine.

    Raises
    ------
    UsageError : no job with this id was submitted from this machine.
    ToolFailed : the scheduler's id of the job is unknown.
    """
    return JobHandle(record=records.find_record(job_id))

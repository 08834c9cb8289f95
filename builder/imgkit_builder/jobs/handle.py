"""Run a command as a job, here or on a remote, and follow it: ``imgkit run`` as a function."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.base.progress import Reporter, Silent
from imgkit_builder.jobs import code as code_of
from imgkit_builder.jobs import history, image_source, records, submit, systems
from imgkit_builder.jobs.prepared import PreparedJob
from imgkit_builder.jobs.remote import config, connection, fetch
from imgkit_builder.jobs.remote.config import Remote
from imgkit_builder.jobs.request import JobRequest
from imgkit_builder.jobs.submitted import JobState, SubmittedJob
from imgkit_builder.jobs.transport import Local, Ssh, Transport
from imgkit_entrypoints.errors import UsageError

_MOST_LOG_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHandle:
    """A submitted job; `run` makes one, and `find_job` finds one that was submitted earlier."""

    record: SubmittedJob

    @property
    def id(self) -> str:
        """Its id, with ``@REMOTE`` if it is on one."""
        return self.record.job.handle

    def status(self) -> JobState:
        """Return the state that the scheduler reports now, or else the run folder.

        Raises
        ------
        ToolFailed : the scheduler did not answer; the job may run.
        """
        return history.report(self.record, transport_of(self.record).run).record.state

    def wait(self, timeout_s: float | None = None) -> JobState:
        """Wait until the job has ended, or for `timeout_s` seconds, and return its state then.

        Raises
        ------
        UsageError : nobody can know when a job of this system has ended.
        ToolFailed : the scheduler has not answered even once.
        """
        return history.wait(self.record, transport_of(self.record).run, limit_s=timeout_s).record.state

    def logs(self) -> str:
        """Return the output so far; empty before there is any.

        Raises
        ------
        UsageError : the job is an array, whose tasks have an output each.
        """
        argv = systems.named(self.record.job.system).log_source(self.record.job)
        if argv[0] == "tail":
            argv = ("tail", "-c", str(_MOST_LOG_BYTES), "--", argv[-1])
        else:
            argv = tuple(argument for argument in argv if argument != "--follow")
        answer = transport_of(self.record).run(argv)
        return answer.output if answer.returncode == 0 else ""

    def fetch(self, folder: str | Path | None = None, *, checkpoints: bool = False) -> Path:
        """Copy the run folder of a job on a remote to `folder`, and return it; here, return the run folder.

        Parameters
        ----------
        folder : default: ``runs/NAME-ID`` in the current folder.
        """
        record = self.record
        if not record.job.remote:
            return record.job.run_folder
        target = Path(folder or Path("runs", f"{record.job.name}-{record.job.id}"))
        fetch.fetch(_connection(record), record, target, checkpoints=checkpoints, report=Silent())
        return target

    def cancel(self) -> None:
        """End the job.

        Raises
        ------
        ToolFailed : the scheduler refused; quotes its message.
        """
        answer = history.cancel(self.record, transport_of(self.record).run)
        if answer.returncode != 0:
            raise history.command_failed(self.record, answer.argv, answer)


def run(
    recipe: str | Path,
    request: JobRequest,
    *,
    on: str = "",
    base: str = "",
    rebuild: bool = False,
    report: Reporter | None = None,
) -> JobHandle:
    """Submit the job of `request`.

    Parameters
    ----------
    recipe : a shipped name, a recipe's file, or a .sif; for a remote also an archive.
    on : a remote, to which the image is built and sent first; empty: the scheduler of this machine.
    base : with `on`, another base image than the recipe's.
    rebuild : with `on`, build again even if nothing that goes into the image has changed.
    report : receives progress and warnings.

    Raises
    ------
    UsageError : the system cannot satisfy the request, or has no scheduler.
    ImgkitError : as of the build, the transfer and the submission.
    """
    if base and not on:
        raise UsageError("a base is for a remote", where="base", hint="name a remote: on=NAME")
    report = report or Silent()
    remote = config.find(on) if on else None
    code = None
    if request.container.code is not None:
        code = code_of.read(request, large=request.container.yes, report=report)
    prepared = submit.prepare(recipe, request, code, remote=remote, base=base, rebuild=rebuild)
    record = submit.submit(prepared, transport_to(remote, prepared), report)
    return JobHandle(record=records.need_id(record))


def transport_to(
    remote: Remote | None,
    prepared: PreparedJob,
    *,
    may_ask: bool = False,
    max_bytes_per_s: float | None = None,
) -> Transport:
    """Return the way to where the job is submitted: to `remote`, or to this machine.

    Parameters
    ----------
    may_ask : whether ssh may ask a person for a password or a second factor.
    max_bytes_per_s : limit for what is sent to the remote.
    """
    if remote is None or prepared.source is None:
        return Local()
    reached = image_source.with_transfer_host(remote, prepared.source)
    return Ssh(connection.connect(reached, ask=may_ask, max_bytes_per_s=max_bytes_per_s))


def transport_of(record: SubmittedJob, *, may_ask: bool = False) -> Transport:
    """Return the way to where the job is. The parameters are those of `transport_to`."""
    if not record.job.remote:
        return Local()
    return Ssh(connection.connect(config.find(record.job.remote), ask=may_ask))


def find_job(job_id: str) -> JobHandle:
    """Return the job of that id, which was submitted from this machine.

    Raises
    ------
    UsageError : no such job was submitted from here.
    """
    return JobHandle(record=records.find(job_id))


def _connection(record: SubmittedJob) -> connection.Connection:
    return connection.connect(config.find(record.job.remote))

"""Run a command as a job, here or on a remote, and follow it: ``imgkit run`` as a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from imgkit_builder.base.progress import Reporter, Silent
from imgkit_builder.jobs.records import JobState, SubmittedJob
from imgkit_builder.jobs.request import JobRequest
from imgkit_entrypoints.errors import UsageError

if TYPE_CHECKING:
    from imgkit_builder.base.process import Finished
    from imgkit_builder.jobs.remote.connection import Connection

_MOST_LOG_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHandle:
    """A submitted job; `run` makes one, and `find_job` finds one that was submitted earlier."""

    record: SubmittedJob

    @property
    def id(self) -> str:
        """Its id, with ``@REMOTE`` if it is on one."""
        return self.record.handle

    def status(self) -> JobState:
        """Return the state that the scheduler reports now, or else the run folder.

        Raises
        ------
        ToolFailed : the scheduler did not answer; the job may run.
        """
        from imgkit_builder.jobs import history

        return history.report(self.record, runner(self.record)).record.state

    def wait(self, timeout_s: float | None = None) -> JobState:
        """Wait until the job has ended, or for `timeout_s` seconds, and return its state then.

        Raises
        ------
        UsageError : nobody can know when a job of this system has ended.
        ToolFailed : the scheduler has not answered even once.
        """
        from imgkit_builder.jobs import history

        return history.wait(self.record, runner(self.record), limit_s=timeout_s).record.state

    def logs(self) -> str:
        """Return the output so far; empty before there is any.

        Raises
        ------
        UsageError : the job is an array, whose tasks have an output each.
        """
        from imgkit_builder.jobs import systems

        argv = systems.named(self.record.system).log_source(self.record)
        if argv[0] == "tail":
            argv = ("tail", "-c", str(_MOST_LOG_BYTES), "--", argv[-1])
        else:
            argv = tuple(argument for argument in argv if argument != "--follow")
        answer = runner(self.record)(argv)
        return answer.output if answer.returncode == 0 else ""

    def fetch(self, folder: str | Path | None = None, *, checkpoints: bool = False) -> Path:
        """Copy the run folder of a job on a remote to `folder`, and return it; here, return the run folder.

        Parameters
        ----------
        folder : default: ``runs/NAME-ID`` in the current folder.
        """
        from imgkit_builder.jobs import history
        from imgkit_builder.jobs.remote import fetch

        record = self.record
        if not record.remote:
            return history.run_of(record)
        target = Path(folder or Path("runs", f"{record.name}-{record.id}"))
        fetch.fetch(_connected(record.remote), record, target, checkpoints=checkpoints, report=Silent())
        return target

    def cancel(self) -> None:
        """End the job.

        Raises
        ------
        ToolFailed : the scheduler refused; quotes its message.
        """
        from imgkit_builder.jobs import history

        answer = history.cancel(self.record, runner(self.record))
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
    from imgkit_builder.jobs import submit

    if not on:
        if base:
            raise UsageError("a base is for a remote", where="base", hint="name a remote: on=NAME")
        return JobHandle(record=submit.submit(recipe, request, report=report))
    from imgkit_builder.jobs import code as code_of
    from imgkit_builder.jobs import remote_run
    from imgkit_builder.jobs.remote import config, connection

    if request.image_flag:
        raise UsageError(
            f"a job of {request.image_flag} makes its .sif where it is submitted",
            where="on",
            hint="leave it out",
        )
    report, remote = report or Silent(), config.find(on)
    plan = remote_run.plan(str(recipe), request, remote.recipe)
    far = connection.connect(remote_run.with_transfer_host(remote, plan))
    code = None
    if plan.request.container.code is not None:  # the folder of imgkit.toml, too
        code = code_of.read(plan.request, large=request.container.yes, report=report)
    record, _ = remote_run.run(plan, far, base=base or None, code=code, report=report, rebuild=rebuild)
    submit.keep(record)
    return JobHandle(record=submit.need_id(record))


def find_job(job_id: str) -> JobHandle:
    """Return the job of that id, which was submitted from this machine.

    Raises
    ------
    UsageError : no such job was submitted from here.
    """
    from imgkit_builder.jobs import submit

    return JobHandle(record=submit.record_of(job_id))


def runner(record: SubmittedJob, *, may_ask: bool = False) -> Callable[[Sequence[str]], Finished]:
    """Return a function that runs a command where the job is.

    Parameters
    ----------
    may_ask : whether ssh may ask a person for a password or a second factor.
    """
    from imgkit_builder.base import process

    if not record.remote:
        return lambda argv: process.run(argv, check=False)
    from imgkit_builder.jobs.remote import jobs

    far = _connected(record.remote, may_ask=may_ask)
    return lambda argv: jobs.finished(far, argv)


def _connected(name: str, *, may_ask: bool = False) -> Connection:
    from imgkit_builder.jobs.remote import config, connection

    return connection.connect(config.find(name), ask=may_ask)

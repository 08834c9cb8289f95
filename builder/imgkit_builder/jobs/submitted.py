"""Describe a submitted job: how its scheduler finds it, and what imgkit records about it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from imgkit_builder.jobs.request import CodeRecord

# The state of a submitted job. It is empty until imgkit has asked the scheduler. "ended" means that the
# outcome of the job is unknown.
JobState = Literal["", "waiting", "running", "succeeded", "failed", "cancelled", "ended"]
# States of a job that has ended.
FINAL_STATES: tuple[JobState, ...] = ("succeeded", "failed", "cancelled", "ended")


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitInfo:
    """Why a job waits, and when it is expected to start.

    All fields are empty for a job that does not wait.
    """

    reason: str = ""
    """The reason in the scheduler's words, such as ``Priority``, or "" if the scheduler gives none."""
    expected_start: str = ""
    """The scheduler's estimate of the start, such as ``2026-11-28T22:40``, or "".

    It is in the local time of the scheduler's machine.
    """
    note: str = ""
    """An explanation of the reason, or a command that shows more about it, or ""."""
    change: str = ""
    """The change that the job needs in order to start, such as ``a shorter --time``.

    It is empty if the job can start as it is.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """The state of a job, as the output of a scheduler's command shows it."""

    state: JobState
    text: str
    """The part of the command's output that is shown to people."""
    code: int | None = None
    """The exit code of the job, or the highest exit code of an array's tasks.

    None means that it is not known.
    """
    wait: WaitInfo = WaitInfo()


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedJob:
    """The values that the commands of a scheduler need to find a submitted job."""

    id: str
    """The scheduler's id of the job. If `SubmittedJob.answer` is not None, imgkit has made up the id."""
    system: str
    """Name of the system that took the job."""
    name: str
    directory: Path
    queue: str = ""
    """The queue of the job. For RunAI it is the project, without which the job's name is not found."""
    cluster: str = ""
    """The cluster that Slurm has printed with the id, or "" on a site with a single cluster.

    The id is unique only on this cluster.
    """
    kind: str = ""
    """The scheduler's name for this kind of job. Some schedulers need it to find the job."""
    remote: str = ""
    """Name of the remote on which the job was submitted, or "" for this machine."""
    store: str = ""
    """Name of the remote that stores the job's files, if the job runs in pods and was submitted here.

    Or "".
    """
    run_name: str = ""
    """Name of the run folder if it cannot be derived from the job's id. Empty means ``NAME-ID``.

    The name differs if imgkit created the folder before the submission, or if the job goes on in the folder
    of an earlier job.
    """
    array: bool = False
    """Whether the job is an array. Each task has its own id, run folder and output."""
    shell_line: str = ""
    """The command line that opens a shell on a node, in a container like the job's.

    It is empty for jobs in pods.
    """

    @property
    def handle(self) -> str:
        """The id as imgkit's commands take it: ``4711``, or ``4711@REMOTE`` for a job on a remote."""
        return f"{self.id}@{self.remote}" if self.remote else self.id

    @property
    def run_folder(self) -> Path:
        """The folder into which the job writes, as a path on the machine that has its files."""
        return self.directory / "runs" / (self.run_name or f"{self.name}-{self.id}")

    @property
    def files_remote(self) -> str:
        """Name of the remote that has the job's files, or "" if this machine has them."""
        return self.remote or self.store


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedJob:
    """The record of a submitted job. imgkit saves it on this machine, and finds it by the job's id."""

    job: QueuedJob
    recipe: str
    answer: str | None = None
    """The scheduler's output at the submission if it contains no job id. None means that it contains one."""
    code: CodeRecord | None = None
    bound_entry_points: str = ""
    """Version of the entry points that were bound into the image, or "" if none were bound."""
    submitted: str = ""
    """Time of the submission in UTC: ``2026-01-31T12:00:00+00:00``."""
    command: tuple[str, ...] = ()
    memory: str = ""
    """The memory that the job requested, as a user types it, such as ``--mem 440G``.

    It is empty if the job requested none, and the scheduler decided.
    """
    image_id: str = ""
    """The image's id, or "" if it is not known."""
    state: JobState = ""
    """The state when imgkit last asked the scheduler."""
    cancelled: bool = False
    """Whether imgkit has cancelled the job.

    The exit code of a run that saves its state does not show this.
    """
    fetched: str = ""
    """The folder on this machine with the files of a run on a remote. It is empty until the first fetch."""
    request: str = ""
    """The request as `resume.to_json` writes it. If it is empty, `imgkit resume` refuses the job."""
    stopped: bool = False
    """Whether a person ended the run with the file ``stop``, and `imgkit resume` has removed this file."""

    @property
    def has_run_folder(self) -> bool:
        """Whether the job writes a run folder. A job that converts or builds an image does not."""
        return self.command[:2] not in (("imgkit", "sif"), ("imgkit", "build"))

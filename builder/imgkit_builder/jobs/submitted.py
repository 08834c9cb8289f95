"""Describe a submitted job: how its scheduler finds it, and what imgkit's record of it contains."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from imgkit_builder.jobs.request import CodeRecord

# State of a submitted job. It is empty until imgkit asks the scheduler. "ended" means that the job has ended
# with an unknown outcome.
JobState = Literal["", "waiting", "running", "succeeded", "failed", "cancelled", "ended"]
# States of a job that has ended.
FINAL_STATES: tuple[JobState, ...] = ("succeeded", "failed", "cancelled", "ended")


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitInfo:
    """Why a job waits, and until when. All fields are empty for a job that does not wait."""

    reason: str = ""
    """The reason in the scheduler's words, such as ``Priority``, or "" if the scheduler gives none."""
    expected_start: str = ""
    """The scheduler's estimate of the start, such as ``2026-11-28T22:40``, or "".

    It is in the local time of the scheduler's machine.
    """
    note: str = ""
    """What the reason means, or the command that tells more, or ""."""
    change: str = ""
    """The change without which the job never starts, such as ``a shorter --time``.

    It is empty if the job can start as it is.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """The state of a job as a scheduler's command printed it."""

    state: JobState
    text: str
    """The part of the command's output that is shown to people."""
    code: int | None = None
    """The exit code of the job, or the largest of an array's tasks. None means that it is not known."""
    wait: WaitInfo = WaitInfo()


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedJob:
    """The values by which the commands of a scheduler find a submitted job."""

    id: str
    """The scheduler's id of the job. If `SubmittedJob.answer` is not None, imgkit chose the id."""
    system: str
    """Name of the system that took the job."""
    name: str
    directory: Path
    queue: str = ""
    """The queue of the job. RunAI needs it, as the project, to find the job by its name."""
    cluster: str = ""
    """The cluster that Slurm printed with the id, or "" on a site with one cluster.

    The id is unique on this cluster only.
    """
    kind: str = ""
    """The scheduler's name for this kind of job. Some schedulers find a job only with it."""
    remote: str = ""
    """Name of the remote on which the job was submitted, or "" for this machine."""
    store: str = ""
    """Name of the remote that stores the files of a job in pods that this machine submitted, or ""."""
    run_name: str = ""
    """Name of the run folder if it does not follow from the job's id. Empty stands for ``NAME-ID``.

    imgkit made such a folder before the submission, or the job goes on in the folder of an earlier job.
    """
    array: bool = False
    """Whether the job is an array. Each task has another id, run folder and output."""
    shell_line: str = ""
    """The command line that opens a shell on a node, in a container like the job's. It is empty for pods."""

    @property
    def handle(self) -> str:
        """The id that imgkit's commands take: ``4711``, or ``4711@REMOTE`` for a job on a remote."""
        return f"{self.id}@{self.remote}" if self.remote else self.id

    @property
    def run_folder(self) -> Path:
        """The folder into which the job writes, on the machine that has its files."""
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
    """The scheduler's answer to the submission, if no job id is in it. None means that it printed an id."""
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
    """Whether imgkit has cancelled the job. The exit code of a run that saves its state does not show it."""
    fetched: str = ""
    """The folder on this machine with the files of a run on a remote. It is empty before the first fetch."""
    request: str = ""
    """The request as `resume.to_json` writes it. If it is empty, `imgkit resume` refuses the job."""
    stopped: bool = False
    """Whether `imgkit resume` has removed the ``stop`` file by which a person ended the run."""

    @property
    def has_run_folder(self) -> bool:
        """Whether the job writes a run folder. A job that converts or builds an image writes none."""
        return self.command[:2] not in (("imgkit", "sif"), ("imgkit", "build"))

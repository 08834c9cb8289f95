"""A submitted job: how its scheduler finds it, and what imgkit keeps about it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from imgkit_builder.jobs.request import CodeRecord

JobState = Literal["", "waiting", "running", "succeeded", "failed", "cancelled", "ended"]
"""State of a submitted job. Empty: not asked yet. ``ended``: it has ended, and its outcome is unknown."""
FINAL_STATES: tuple[JobState, ...] = ("succeeded", "failed", "cancelled", "ended")


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitInfo:
    """Why a job waits, and until when. All fields are empty for a job that does not wait."""

    reason: str = ""
    """The reason in the scheduler's words; empty: the scheduler gives none."""
    expected_start: str = ""
    """The scheduler's estimate in local time of its machine: ``2026-11-28T22:40``; empty: no estimate."""
    note: str = ""
    """What the reason means, or the command that tells more; empty: nothing to add."""
    change: str = ""
    """The options without which the job never starts: ``a shorter --time``; empty: it can start as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """The state of a job as a scheduler's command printed it."""

    state: JobState
    text: str
    """The part of the command's output that is shown to people."""
    code: int | None = None
    """The exit code of the job, or the largest one of an array's tasks."""
    wait: WaitInfo = WaitInfo()


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedJob:
    """The values by which the commands of a scheduler find a submitted job."""

    id: str
    """The scheduler's id of the job; or an id that imgkit chose, if `SubmittedJob.answer` is not None."""
    system: str
    """Name of the system that took the job."""
    name: str
    directory: Path
    queue: str = ""
    """The queue of the job; RunAI needs its project to find the job by its name."""
    cluster: str = ""
    """The cluster that Slurm printed with the id; ids are unique on one cluster only. Empty: no cluster."""
    kind: str = ""
    """The scheduler's name for this kind of job; some schedulers find a job only with it."""
    remote: str = ""
    """Name of the remote on which the job was submitted; empty: this machine."""
    store: str = ""
    """Name of the remote that only stores the files of a job of this machine; empty: there is none."""
    run_name: str = ""
    """Name of the run folder if it is older than the job's id; empty: ``NAME-ID``.

    imgkit made it before the submission, or the job goes on in the folder of an earlier one.
    """
    array: bool = False
    """Whether the job is an array; each task has an id, a run folder and an output of its own."""
    shell_line: str = ""
    """The command line that opens a shell on a node, in a container like the job's; empty for pods."""

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
        """Name of the remote that has the job's files; empty: this machine has them."""
        return self.remote or self.store


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedJob:
    """The record of a submitted job, by which imgkit follows the job when it knows only its id."""

    job: QueuedJob
    recipe: str
    answer: str | None = None
    """The scheduler's answer to the submission, if it has no job id; None: the scheduler printed an id."""
    code: CodeRecord | None = None
    bound_entry_points: str = ""
    """Version of the entry points that were bound into the image; empty: the image has its own."""
    submitted: str = ""
    """Time of the submission in UTC: ``2026-01-31T12:00:00+00:00``."""
    command: tuple[str, ...] = ()
    memory: str = ""
    """The memory that the job requested, as a user types it: ``--mem 440G``; empty: the scheduler decided."""
    image_id: str = ""
    """The image's id; empty: not known."""
    state: JobState = ""
    """The state when imgkit last asked."""
    cancelled: bool = False
    """Whether imgkit has cancelled the job. The exit code of a run that saves its state does not show it."""
    fetched: str = ""
    """The folder on this machine that holds the run's files; empty before the first fetch."""
    request: str = ""
    """The request as `resume.to_json` writes it; empty: `imgkit resume` cannot submit the job again."""
    stopped: bool = False
    """Whether `imgkit resume` has removed the ``stop`` file by which a person ended the run."""

    @property
    def has_run_folder(self) -> bool:
        """Whether the job writes a run folder; one that converts or builds an image does not."""
        return self.command[:2] not in (("imgkit", "sif"), ("imgkit", "build"))

"""A submitted job: how its scheduler finds it, and what imgkit keeps about it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from imgkit_builder.jobs.job import CodeRecord

JobState = Literal["", "waiting", "running", "succeeded", "failed", "cancelled", "ended"]
"""State of a submitted job. Empty: nobody has said; ``ended``: nobody knows how it ended."""
FINAL_STATES: tuple[JobState, ...] = ("succeeded", "failed", "cancelled", "ended")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """What a scheduler's command says about a job."""

    state: JobState
    text: str
    """The part of its output that people read."""
    code: int | None = None
    """The exit code of the job, or the largest one of an array's tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedJob:
    """How its scheduler finds a submitted job."""

    id: str
    """The scheduler's, or one of imgkit's own where `SubmittedJob.answer` holds none."""
    system: str
    """Name of the system that took it."""
    name: str
    directory: Path
    queue: str = ""
    """The queue that it was submitted to; some systems find a job only by both."""
    cluster: str = ""
    """The cluster that the scheduler printed with the id, which is then unique only with it."""
    kind: str = ""
    """What the scheduler calls this kind of job; some find a job only by it."""
    remote: str = ""
    """Name of the remote on which it was submitted; empty: here."""
    array: bool = False
    """Whether it is an array; each task has an id, a run folder and an output of its own."""
    shell_line: str = ""
    """The line that opens a shell on a node, in a container like the job's; empty for pods."""

    @property
    def handle(self) -> str:
        """The word for it here: its id, with the name of its remote."""
        return f"{self.id}@{self.remote}" if self.remote else self.id

    @property
    def run_folder(self) -> Path:
        """The folder in which the job itself writes, on its own machine."""
        return self.directory / "runs" / f"{self.name}-{self.id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedJob:
    """What is kept about a submitted job, so that its id is enough to follow it."""

    job: QueuedJob
    recipe: str
    answer: str | None = None
    """What the scheduler printed instead of an id; None where it printed one."""
    code: CodeRecord | None = None
    bound_entry_points: str = ""
    """Version of imgkit's entry points that were bound into the image; empty where it has its own."""
    submitted: str = ""
    """When, UTC."""
    command: tuple[str, ...] = ()
    image_id: str = ""
    """The image; empty where that is not known."""
    state: JobState = ""
    """What imgkit last knew."""
    cancelled: bool = False
    """Whether imgkit has cancelled it. A scheduler forgets that, and a run that saves ends with a code."""
    fetched: str = ""
    """The folder here that holds the run's files; empty before the first fetch."""

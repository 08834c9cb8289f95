"""The records of submitted jobs: their states, how they ended, and what their files on this machine say."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.base import process
from imgkit_builder.base.process import Finished
from imgkit_builder.job import systems
from imgkit_builder.job.request import SubmittedJob
from imgkit_builder.project import measured
from imgkit_builder.project.measured import LastNumbers
from imgkit_entrypoints.errors import ToolFailed, ToolMissing
from imgkit_entrypoints.launch import stop_protocol

FINAL = ("done", "failed", "ended")
"""States that do not change: ended well, with an error, or in a way that nobody can tell."""


def run_of(record: SubmittedJob) -> Path:
    """Return the folder in which the job itself writes, on its own machine."""
    return record.directory / "runs" / f"{record.name}-{record.id}"


def folder_of(record: SubmittedJob) -> Path | None:
    """Return the folder on this machine with the run's files; None before the first fetch."""
    if record.remote:
        return Path(record.fetched) if record.fetched else None
    return run_of(record)


def numbers(record: SubmittedJob) -> LastNumbers:
    """Return the last numbers of the run, as far as its files are on this machine."""
    folder = folder_of(record)
    return measured.tail(folder) if folder else LastNumbers()


def refresh_state(record: SubmittedJob, run: Callable[[Sequence[str]], Finished]) -> SubmittedJob:
    """Return `record` with the state that its scheduler reports now.

    Parameters
    ----------
    run : starts a command of the scheduler where the job is.

    Raises
    ------
    ToolFailed : the scheduler did not answer; the job may run.
    """
    if record.state in FINAL or record.answer is not None:
        return record
    system = systems.named(record.system)
    argv = system.alive(record)
    if not argv:
        return record
    answer = run(argv)
    text = answer.output.strip()
    if answer.returncode == 0 and text:
        # A plug-in's scheduler may print a table instead of one word.
        is_word = re.fullmatch(r"[A-Za-z_]{1,32}", text)
        return dataclasses.replace(record, state=text.lower() if is_word else "active")
    if answer.returncode != 0 and not system.gone(text):
        message, hint = process.quoted(f"{argv[0]} failed with exit code {answer.returncode}", text)
        raise ToolFailed(message, where=record.handle, hint=hint or None)
    return ending(record, run).record


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a job has ended, and the source of that."""

    record: SubmittedJob
    """The job's record, with its final state."""
    argv: tuple[str, ...] = ()
    """The scheduler's command that knew the state; empty: none did."""
    output: str = ""
    """What that command printed."""
    code: int | None = None
    """The exit code in the run folder, which counts only if the scheduler does not know how the job ended."""


def ending(record: SubmittedJob, run: Callable[[Sequence[str]], Finished]) -> Ending:
    """Return how the job of `record` has ended: by its scheduler, else by its run folder.

    Parameters
    ----------
    run : as of `refresh_state`.
    """
    system = systems.named(record.system)
    for argv in system.outcome(record):
        # Accounting is switched off, or not installed, at some sites: the next command may know.
        try:
            output = run(argv).output
        except ToolMissing:
            continue
        has_succeeded = system.succeeded(output)
        if has_succeeded is not None:
            state = "done" if has_succeeded else "failed"
            return Ending(record=dataclasses.replace(record, state=state), argv=argv, output=output)
    if record.state in ("done", "failed"):
        # An earlier look recorded it while the scheduler still knew the job.
        return Ending(record=record)
    # The tasks of an array have run folders of their own, so there is no single exit code.
    code = None
    if not record.array:
        answer = run(("cat", "--", str(run_of(record) / stop_protocol.RESULT)))
        code = stop_protocol.result_code(answer.output)
    state = "ended" if code is None else "done" if code == 0 else "failed"
    return Ending(record=dataclasses.replace(record, state=state), code=code)

"""What ran where: the records of jobs, with what their files here say."""

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
from imgkit_builder.project.measured import Measured
from imgkit_entrypoints.errors import ToolFailed, ToolMissing
from imgkit_entrypoints.launch import stop_protocol

FINAL = ("done", "failed", "ended")
"""States that do not change: ended well, with an error, or nobody knows how."""


def run_of(record: SubmittedJob) -> Path:
    """The folder in which the job itself writes, on its own machine."""
    return record.directory / "runs" / f"{record.name}-{record.id}"


def folder_of(record: SubmittedJob) -> Path | None:
    """The folder here with the run's files; None before the first fetch."""
    if record.remote:
        return Path(record.fetched) if record.fetched else None
    return run_of(record)


def numbers(record: SubmittedJob) -> Measured:
    """The last numbers of the run; none where its files are not here."""
    folder = folder_of(record)
    return measured.tail(folder) if folder else Measured(points={})


def asked(record: SubmittedJob, run: Callable[[Sequence[str]], Finished]) -> SubmittedJob:
    """`record` with the state that its system knows now; the same where that does not answer.

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
    if not (words := system.alive(record)):
        return record
    alive = run(words)
    text = alive.output.strip()
    if alive.returncode == 0 and text:
        is_word = re.fullmatch(r"[A-Za-z_]{1,32}", text)
        return dataclasses.replace(record, state=text.lower() if is_word else "active")
    if alive.returncode != 0 and not system.gone(text):
        what, hint = process.quoted(f"{words[0]} failed with exit code {alive.returncode}", text)
        raise ToolFailed(what, where=record.handle, hint=hint or None)
    return ending(record, run).record


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a job has ended, and who knew it."""

    record: SubmittedJob
    """The job's record, with its final state."""
    words: tuple[str, ...] = ()
    """The scheduler's command that knew it; empty: none did."""
    output: str = ""
    """What that command printed."""
    code: int | None = None
    """The exit code in the run folder, which counts only if the scheduler does not know how the job ended."""


def ending(record: SubmittedJob, run: Callable[[Sequence[str]], Finished]) -> Ending:
    """How the job `record`, which has ended, did so: by its scheduler, else by its run folder.

    Parameters
    ----------
    run : as of `asked`.
    """
    system = systems.named(record.system)
    for words in system.outcome(record):
        try:
            output = run(words).output
        except ToolMissing:
            continue
        if (well := system.succeeded(output)) is not None:
            state = "done" if well else "failed"
            return Ending(record=dataclasses.replace(record, state=state), words=words, output=output)
    if record.state in FINAL[:2]:  # somebody saw it while the scheduler knew it
        return Ending(record=record)
    code = None
    if not record.array:
        answer = run(("cat", "--", str(run_of(record) / stop_protocol.RESULT)))
        code = stop_protocol.result_code(answer.output)
    state = "ended" if code is None else "done" if code == 0 else "failed"
    return Ending(record=dataclasses.replace(record, state=state), code=code)

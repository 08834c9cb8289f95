"""The records of submitted jobs: their states, how they ended, and what their files on this machine say."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.base import process
from imgkit_builder.base.process import Finished
from imgkit_builder.jobs import measured, records, systems
from imgkit_builder.jobs.measured import LastNumbers
from imgkit_builder.jobs.submitted import FINAL_STATES, JobState, SubmittedJob
from imgkit_entrypoints.errors import EXIT_SAVED, ToolFailed, ToolMissing, UsageError
from imgkit_entrypoints.launch import stop_protocol


def folder_of(record: SubmittedJob) -> Path | None:
    """Return the folder on this machine with the run's files; None before the first fetch."""
    if record.job.remote:
        return Path(record.fetched) if record.fetched else None
    return record.job.run_folder


def numbers(record: SubmittedJob) -> LastNumbers:
    """Return the last numbers of the run, as far as its files are on this machine."""
    folder = folder_of(record)
    return measured.tail(folder) if folder else LastNumbers()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """What is known about a job now, and the source of that."""

    record: SubmittedJob
    """The job's record, with its state."""
    argv: tuple[str, ...] = ()
    """The scheduler's command that knew the job; empty: none did."""
    text: str = ""
    """What that command printed, as far as people read it."""
    code: int | None = None
    """The job's exit code; by its run folder if `argv` is empty."""

    @property
    def has_ended(self) -> bool:
        """Whether the job has ended."""
        return self.record.state in FINAL_STATES


def report(record: SubmittedJob, run: Callable[[Sequence[str]], Finished]) -> JobReport:
    """Return what the scheduler says about the job, or else its run folder.

    Parameters
    ----------
    run : starts a command of the scheduler where the job is.

    Raises
    ------
    ToolFailed : the scheduler did not answer; the job may run.
    """
    latest = _report(record, run)
    if latest.record.state in ("failed", "ended") and records.is_cancelled(record):
        return dataclasses.replace(latest, record=dataclasses.replace(latest.record, state="cancelled"))
    return latest


def _report(record: SubmittedJob, run: Callable[[Sequence[str]], Finished]) -> JobReport:
    if record.answer is not None:
        return JobReport(record=record)
    system = systems.named(record.job.system)
    for number, argv in enumerate(system.status_commands(record.job)):
        try:
            answer = run(argv)
        except ToolMissing:
            if number == 0 and record.state not in FINAL_STATES:
                raise
            continue  # some sites have no accounting: the next command may know
        if not system.reports_state and answer.returncode == 0:
            return JobReport(record=record, argv=argv, text=answer.output)
        status = system.parse_status(answer.output)
        is_in_queue = number == 0 and answer.returncode == 0 and bool(answer.output.strip())
        if is_in_queue or status.state in FINAL_STATES:
            now, code = dataclasses.replace(record, state=status.state), status.code
            if status.state == "failed" and code:
                # Where one task fails, srun ends the others by SIGTERM, and their code is the higher one.
                code = _code_in_run_folder(record, run) or code
            return JobReport(record=now, argv=argv, text=status.text, code=code)
        is_unknown = system.reports_state and re.search(system.queue.unknown_job, answer.output)
        may_run = number == 0 and record.state not in FINAL_STATES
        if may_run and answer.returncode != 0 and not is_unknown:
            raise command_failed(record, argv, answer)
    if record.state in FINAL_STATES and record.state != "ended":
        # An earlier look recorded it while the scheduler still knew the job.
        return JobReport(record=record)
    code = _code_in_run_folder(record, run)
    state: JobState = "ended" if code is None else "succeeded" if code == 0 else "failed"
    return JobReport(record=dataclasses.replace(record, state=state), code=code)


def _code_in_run_folder(record: SubmittedJob, run: Callable[[Sequence[str]], Finished]) -> int | None:
    """Return the exit code that the node agent of the head has written; None where there is none."""
    # The tasks of an array have run folders of their own, so there is no single exit code.
    if record.job.array:
        return None
    answer = run(("cat", "--", str(record.job.run_folder / stop_protocol.RESULT)))
    return stop_protocol.result_code(answer.output)


def cancel(record: SubmittedJob, run: Callable[[Sequence[str]], Finished]) -> Finished:
    """Run the scheduler's command that ends the job; if it succeeds, note that in the job's record."""
    answer = run(systems.named(record.job.system).cancel_command(record.job))
    # A task of an array has no record of its own.
    if answer.returncode == 0 and records.is_kept(record):
        with contextlib.suppress(OSError):  # the job is cancelled all the same
            records.keep(dataclasses.replace(record, cancelled=True))
    return answer


def command_failed(record: SubmittedJob, argv: Sequence[str], answer: Finished) -> ToolFailed:
    """Return the error for a command of the scheduler about `record`; it quotes the command's message."""
    message, hint = process.quoted(
        f"{argv[0]} failed with exit code {answer.returncode}", answer.output.strip()
    )
    return ToolFailed(message, where=record.job.handle, hint=hint or None)


_NO_RANK = re.compile(r"environment variable \w+ expected, but not set")
"""The error of torch's init_process_group in a program that no launcher has started."""
_TAIL_BYTES = 64 << 10


def failure_hints(record: SubmittedJob, run: Callable[[Sequence[str]], Finished]) -> tuple[str, ...]:
    """Return the warnings of the start that explain why the job has failed, by the end of its output."""
    hints = systems.program_starts_once(record.command)
    if not hints:
        return ()
    log_argv = systems.named(record.job.system).log_source(record.job)
    files = [argument for argument in log_argv if argument.startswith("/")]
    output = run(("tail", "-c", str(_TAIL_BYTES), "--", *files)).output
    return hints if _NO_RANK.search(output) else ()


def ending_text(report: JobReport) -> str:
    """Return the line about a job that has ended, and how to get at its files."""
    record = report.record
    failure = f"failed with exit code {report.code}" if report.code else "failed"
    if report.code == EXIT_SAVED:
        failure = f"ended with its state saved (exit code {EXIT_SAVED})"
    text = {
        "succeeded": "completed",
        "cancelled": "was cancelled",
        "ended": "has ended; neither the scheduler nor the run folder knows how",
    }.get(record.state, failure)
    by_folder = not report.argv and report.code is not None and record.state != "cancelled"
    source = ", by its run folder" if by_folder else ""
    files = (
        f"; imgkit fetch {record.job.handle}"
        if record.job.remote
        else f"; run folder: {record.job.run_folder}"
    )
    return f"{record.job.handle} {text}{source}{'' if record.job.array else files}"


POLL_S = (1.0, 1.0, 2.0, 3.0, 5.0, 10.0, 10.0, 30.0)
"""Seconds between looks at a job; the last one repeats. A login node asks no scheduler every second."""


def poll_pauses() -> Iterator[float]:
    """Yield the seconds to wait between looks at a job, without end."""
    yield from POLL_S
    yield from itertools.repeat(POLL_S[-1])


def wait(
    record: SubmittedJob, run: Callable[[Sequence[str]], Finished], *, limit_s: float | None = None
) -> JobReport:
    """Wait until the job has ended, or for `limit_s` seconds, and return what is known then.

    Raises
    ------
    UsageError : nobody can know when a job of this system has ended.
    ToolFailed : the scheduler has not answered even once.
    """
    if not systems.named(record.job.system).reports_state:
        raise UsageError(
            f"imgkit cannot ask {record.job.system} whether a job has ended",
            where=record.job.handle,
            hint=f"imgkit logs {record.job.handle} ends with the job",
        )
    end_s = math.inf if limit_s is None else time.monotonic() + limit_s
    latest = None
    for pause_s in poll_pauses():
        try:
            latest = report(record, run)
        except ToolFailed:
            if latest is None:
                raise
            # A scheduler that does not answer this time may answer the next.
        left_s = end_s - time.monotonic()
        if latest.has_ended or left_s <= 0:
            return latest
        time.sleep(min(pause_s, left_s))
    raise AssertionError("the pauses do not end")


def refresh_state(record: SubmittedJob, run: Callable[[Sequence[str]], Finished]) -> SubmittedJob:
    """Return `record` with its state now, without asking about a job that has ended.

    Raises
    ------
    ToolFailed : as `report`.
    """
    if record.state in FINAL_STATES or not systems.named(record.job.system).reports_state:
        return record
    return report(record, run).record

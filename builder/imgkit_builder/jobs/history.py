"""Report the states of submitted jobs, why they wait, and how they ended.

The scheduler is asked first. It forgets jobs some time after their end, and then the record of the job on
this machine and the files in its run folder say how it ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
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
from imgkit_builder.jobs.job import Runner
from imgkit_builder.jobs.measured import LastNumbers
from imgkit_builder.jobs.remote import config, connection
from imgkit_builder.jobs.remote import jobs as remote_jobs
from imgkit_builder.jobs.remote.connection import Connection
from imgkit_builder.jobs.submitted import FINAL_STATES, JobState, JobStatus, QueuedJob, SubmittedJob, WaitInfo
from imgkit_entrypoints.errors import EXIT_SAVED, ToolFailed, ToolMissing, UsageError
from imgkit_entrypoints.launch import gpu_use, stop_protocol
from imgkit_entrypoints.rollcall.messages import GpuUse


def scheduler_runner(record: SubmittedJob, *, may_ask: bool = False) -> Runner:
    """Return a function that runs a command on the machine where the job was submitted.

    The function returns when the command has ended. A failed command does not raise.

    Parameters
    ----------
    may_ask : whether ssh may ask a person for a password or a second factor.
    """
    return runner_on(record.job.remote, may_ask=may_ask)


def status_runner(record: SubmittedJob, *, may_ask: bool = False) -> Runner:
    """Return the same as `scheduler_runner`, for a call of `report_job` and then of `read_gpu_use`.

    Both together use one connection to a remote, unless the scheduler no longer knows the job.
    """
    if not record.job.remote:
        return scheduler_runner(record, may_ask=may_ask)
    remote = connection_to(record.job.remote, may_ask=may_ask)
    return remote_jobs.RunnerWithFile(remote, str(record.job.run_folder / stop_protocol.GPU_USE))


def runner_on(remote: str, *, may_ask: bool = False) -> Runner:
    """Return a function that runs a command on the remote of this name, or on this machine for ``""``.

    The parameter `may_ask` is that of `scheduler_runner`.
    """
    if not remote:
        return functools.partial(process.run, check=False)
    return functools.partial(remote_jobs.run_scheduler_command, connection_to(remote, may_ask=may_ask))


def connection_to(remote: str, *, may_ask: bool = False) -> Connection:
    """Return a connection to the remote of this name. ssh connects when the first command runs.

    Parameters
    ----------
    may_ask : whether ssh may ask a person for a password or a second factor.
    """
    return connection.connect(config.get_remote(remote), ask=may_ask)


def local_run_folder(record: SubmittedJob) -> Path | None:
    """Return the folder on this machine with the run's files.

    The result is None for a run on a remote whose files were not fetched yet.
    """
    if not record.job.files_remote:
        return record.job.run_folder
    if not record.fetched:
        return None
    return Path(record.fetched)


def last_numbers(record: SubmittedJob) -> LastNumbers:
    """Return the last step and loss of the run. Both are None if its files are not on this machine."""
    folder = local_run_folder(record)
    if folder is None:
        return LastNumbers()
    return measured.last_numbers(folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """The state of a job, and the scheduler's command that reported it."""

    record: SubmittedJob
    """The job's record, with its state."""
    argv: tuple[str, ...] = ()
    """The scheduler's command that knew the job. It is empty if no command knew it."""
    text: str = ""
    """The part of the command's output that is shown to people."""
    code: int | None = None
    """The job's exit code, or None if it is not known. If `argv` is empty, it is from the run folder."""
    wait: WaitInfo = dataclasses.field(default_factory=WaitInfo)

    @property
    def has_ended(self) -> bool:
        """Whether the job has ended."""
        return self.record.state in FINAL_STATES


def report_job(record: SubmittedJob, run: Runner) -> JobReport:
    """Return the state of a job, and how it ended if it has ended.

    The scheduler is asked. If it has forgotten the job, the state is from the job's record or run folder. A
    job that imgkit has cancelled counts as cancelled, whatever its exit code is.

    Parameters
    ----------
    run : runs a command on the machine of the job, to its end.

    Raises
    ------
    ToolFailed : the scheduler did not answer. The job may still run.
    """
    latest = _report_state(record, run)
    # A program that saves its state when it is cancelled ends with an exit code, which looks like a failure.
    if latest.record.state in ("failed", "ended") and records.is_cancelled(record):
        return dataclasses.replace(latest, record=dataclasses.replace(latest.record, state="cancelled"))
    return latest


def _report_state(record: SubmittedJob, run: Runner) -> JobReport:
    """Return the same as `report_job`, but do not check whether imgkit has cancelled the job."""
    if record.answer is not None:
        return JobReport(record=record)  # without an id, the scheduler cannot be asked
    system = systems.get_system(record.job.system)
    may_run = record.state not in FINAL_STATES
    for number, argv in enumerate(system.status_commands(record.job)):
        # The first command asks the queue, the others the scheduler's memory of jobs that have ended.
        asks_queue = number == 0
        try:
            answer = run(argv)
        except ToolMissing:
            if asks_queue and may_run:
                raise
            continue  # some sites have no accounting: the next command may know the job
        has_succeeded = answer.returncode == 0
        if not system.reports_state and has_succeeded:
            return JobReport(record=record, argv=argv, text=answer.output)
        status = system.parse_status(answer.output)
        is_in_queue = asks_queue and has_succeeded and bool(answer.output.strip())
        if is_in_queue or status.state in FINAL_STATES:
            return _scheduler_report(record, argv, status, run)
        # Schedulers forget a job some time after its end, and their command then fails with `unknown_job`.
        # After another failure, the job may still run.
        is_unknown_job = system.reports_state and re.search(system.queue.unknown_job, answer.output)
        if asks_queue and may_run and not has_succeeded and not is_unknown_job:
            raise command_failed(record, argv, answer)
    return _report_without_scheduler(record, run)


def _scheduler_report(record: SubmittedJob, argv: Sequence[str], status: JobStatus, run: Runner) -> JobReport:
    """Return the report of a job whose `status` the scheduler's command `argv` has printed."""
    code = status.code
    if status.state == "failed" and code:
        # Where one task fails, srun ends the others by SIGTERM, and their code is the higher one.
        code = _code_in_run_folder(record, run) or code
    current = dataclasses.replace(record, state=status.state)
    return JobReport(record=current, argv=tuple(argv), text=status.text, code=code, wait=status.wait)


def _report_without_scheduler(record: SubmittedJob, run: Runner) -> JobReport:
    """Return the report of a job that the scheduler has forgotten.

    The state is that of the record if an earlier look saved how the job ended. Otherwise it follows from the
    exit code in the run folder, and without such a code it is ``ended``.
    """
    if record.state in FINAL_STATES and record.state != "ended":
        # An earlier look recorded it while the scheduler still knew the job.
        return JobReport(record=record)
    code = _code_in_run_folder(record, run)
    state: JobState = "failed"
    if code is None:
        state = "ended"
    elif code == 0:
        state = "succeeded"
    return JobReport(record=dataclasses.replace(record, state=state), code=code)


def _code_in_run_folder(record: SubmittedJob, run: Runner) -> int | None:
    """Return the exit code that the head's node agent wrote into the run folder at the end of the run.

    The result is None if it has written none, for example because it was killed.
    """
    return stop_protocol.result_code(_file_of_run(record, stop_protocol.RESULT, run))


def read_gpu_use(record: SubmittedJob, run: Runner) -> GpuUse | None:
    """Return how much the run has used its GPUs until now.

    The result is None if no node agent has written it, as in jobs on CPUs.
    """
    return gpu_use.parse(_file_of_run(record, stop_protocol.GPU_USE, run))


def _file_of_run(record: SubmittedJob, name: str, run: Runner) -> str:
    """Return the text of a file in the job's run folder.

    If there is no such file, the result is empty or the error message of ``cat``. The caller must parse the
    text strictly.
    """
    # The tasks of an array have run folders of their own, so there is no single file.
    # `run` does not reach a remote that only stores.
    if record.job.array or record.job.store:
        return ""
    # What is there now is of the job that went on in the folder last.
    if any(newer.submitted > record.submitted for newer in records.list_records_of_run(record)):
        return ""
    return run(("cat", "--", str(record.job.run_folder / name))).output


def cancel_job(record: SubmittedJob, run: Runner) -> Finished:
    """Cancel the job by its scheduler's command, and return the result of the command.

    If the command succeeds, the job's record says from then on that imgkit has cancelled the job.
    """
    answer = run(systems.get_system(record.job.system).cancel_command(record.job))
    # A task of an array has no record of its own.
    if answer.returncode == 0 and records.has_record_file(record):
        with contextlib.suppress(OSError):  # the job is cancelled all the same
            records.save_record(dataclasses.replace(record, cancelled=True))
    return answer


def with_cancellation(record: SubmittedJob) -> SubmittedJob:
    """Return `record` with the state ``cancelled`` if imgkit has cancelled the job and its end is not known.

    The job may still need a moment to end. This function does not ask the scheduler about it.
    """
    if record.cancelled and record.state not in FINAL_STATES:
        return dataclasses.replace(record, state="cancelled")
    return record


def command_failed(record: SubmittedJob, argv: Sequence[str], answer: Finished) -> ToolFailed:
    """Return the error for a command of the scheduler that failed. It quotes the command's message."""
    message, hint = process.quote_output(
        f"{argv[0]} failed with exit code {answer.returncode}", answer.output.strip()
    )
    return ToolFailed(message, where=record.job.handle, hint=hint or None)


# The error of torch's init_process_group in a program that no launcher has started:
# "environment variable RANK expected, but not set".
_NO_RANK = re.compile(r"environment variable \w+ expected, but not set")
# What schedulers print about a job that exceeded its memory: its state, or a message in its output.
_OUT_OF_MEMORY = re.compile(
    r"OUT_OF_MEMORY"
    r"|\boom_kill event|\bexceeded memory limit"  # a step of Slurm, with and without cgroups
    r"|job killed: mem \S+ exceeded limit"  # PBS
    r"|\bOOMKilled"  # Kubernetes
)
# Exit code of a program that SIGKILL (signal 9) has ended: 128 + 9. The kernel sends it when memory runs out.
_KILLED_CODE = 137
# `failure_hints` looks for these texts in the last 64 KiB of the job's output.
_TAIL_BYTES = 64 << 10


def failure_hints(latest: JobReport, run: Runner) -> Iterator[str]:
    """Yield explanations of a job's failure, each with what the user can do.

    Two causes are recognized: the job had too little memory, or its command started no ranks. Nothing is
    yielded for an array, or if neither cause applies.
    """
    record = latest.record
    if record.job.array:
        return  # each task has an output of its own
    output = _end_of_output(record, run)
    if _OUT_OF_MEMORY.search(latest.text) or _OUT_OF_MEMORY.search(output):
        yield f"the job ran out of memory: {_memory_remedy(record)}"
    elif latest.code == _KILLED_CODE:
        yield (
            f"exit code {_KILLED_CODE}: a process was killed, most often because memory ran out: "
            f"{_memory_remedy(record)}"
        )
    if _NO_RANK.search(output):
        yield from systems.single_process_warnings(record.command)


def _end_of_output(record: SubmittedJob, run: Runner) -> str:
    """Return the last 64 KiB of the job's output, or "" if a command shows the output and no file has it."""
    log_argv = systems.get_system(record.job.system).log_source(record.job)
    log_files = [argument for argument in log_argv if argument.startswith("/")]
    if not log_files:
        return ""
    return run(("tail", "-c", str(_TAIL_BYTES), "--", *log_files)).output


def _memory_remedy(record: SubmittedJob) -> str:
    """Return the advice for a job that ran out of memory, with the size of memory that it had."""
    if record.memory:
        return f"it had {record.memory}; request more, or use fewer data workers"
    return "it stated no size, so it had the scheduler's default; add --mem SIZE, or use fewer data workers"


def ending_text(report: JobReport) -> str:
    """Return the line about how a job has ended, and where its files are.

    For example: ``4711@mn5 failed with exit code 1; imgkit resume 4711@mn5; imgkit fetch 4711@mn5``.
    """
    record = report.record
    text = f"{record.job.handle} {_outcome_text(report)}"
    if not report.argv and report.code is not None and record.state != "cancelled":
        text += ", by its run folder"
    if record.job.array:
        return text  # each task has a run folder of its own
    if record.state != "succeeded" and can_resume(record):
        text += f"; imgkit resume {record.job.handle}"
    if record.job.files_remote:
        return f"{text}; imgkit fetch {record.job.handle}"
    if not record.has_run_folder:
        return text
    return f"{text}; run folder: {record.job.run_folder}"


def can_resume(record: SubmittedJob) -> bool:
    """Return whether `imgkit resume` can submit the job again in its run folder.

    It cannot do so for arrays, for jobs whose request is not recorded, and on systems whose jobs cannot go on
    in the folder of an earlier job.
    """
    has_one_folder = not record.job.array and records.has_record_file(record)
    return has_one_folder and bool(record.request) and can_choose_folder(record)


def can_choose_folder(record: SubmittedJob) -> bool:
    """Return whether a job of this system can go on in the run folder of an earlier one."""
    return bool(record.job.store) or systems.get_system(record.job.system).abilities.resumes_jobs


def _outcome_text(report: JobReport) -> str:
    """Return how the job ended, as the predicate of a sentence: ``was cancelled``."""
    state = report.record.state
    if state == "succeeded":
        return "completed"
    if state == "cancelled":
        return "was cancelled"
    if state == "ended":
        return "has ended; neither the scheduler nor the run folder knows how"
    if report.code == EXIT_SAVED:
        return f"ended with its state saved (exit code {EXIT_SAVED})"
    if report.code:
        return f"failed with exit code {report.code}"
    return "failed"


def waiting_text(job: QueuedJob, wait: WaitInfo) -> str:
    """Return the line about a job that waits: ``waiting: Priority; expected start 2026-11-28T22:40``.

    It has the scheduler's reason and estimate, and what the user can do if the job would never start.
    """
    text = "waiting"
    if wait.reason:
        text += f": {wait.reason}"
    if wait.expected_start:
        text += f"; expected start {wait.expected_start}"
        if job.remote:
            text += f", by the clock of {job.remote}"  # which may be in another time zone
    if wait.note:
        text += f"; {wait.note}"
    if wait.change:
        text += f"; the job will not start: imgkit cancel {job.handle}, and submit it with {wait.change}"
    return text


class WaitLog:
    """Log why a job waits whenever the reason changes, and log ``running`` when such a wait is over."""

    def __init__(self, job: QueuedJob, log: Callable[[str], None]) -> None:
        self._job = job
        self._log = log
        self._state: JobState = ""
        self._logged: WaitInfo | None = None
        """What was logged last about this wait. It is None if the job does not wait or nothing was logged."""

    def update(self, state: JobState, wait: WaitInfo) -> None:
        """Log the state that the scheduler has just reported, if the user does not know it yet."""
        if state == "waiting":
            if self._is_news(wait):
                self._log(waiting_text(self._job, wait))
                self._logged = wait
        elif self._logged is not None:
            if state == "running":
                self._log("running")
            self._logged = None
        self._state = state

    def _is_news(self, wait: WaitInfo) -> bool:
        """Return whether `wait` has something that was not logged yet."""
        if self._logged is None:
            # A scheduler needs a moment to find a reason, and on an idle cluster the job has started by then.
            return bool(wait.reason) or self._state == "waiting"
        # Slurm withdraws its estimate and computes it again, so that only the first one is news.
        is_first_estimate = bool(wait.expected_start) and not self._logged.expected_start
        return wait.reason != self._logged.reason or is_first_estimate


# Seconds between two questions about a job. The last value repeats: to ask more often would load the
# scheduler.
POLL_S = (1.0, 1.0, 2.0, 3.0, 5.0, 10.0, 10.0, 30.0)


def poll_pauses() -> Iterator[float]:
    """Yield the seconds to wait between two questions about a job, without end."""
    yield from POLL_S
    yield from itertools.repeat(POLL_S[-1])


def wait_for_job(
    record: SubmittedJob,
    run: Runner,
    *,
    limit_s: float | None = None,
    log: WaitLog | None = None,
) -> JobReport:
    """Wait until the job has ended, or for `limit_s` seconds, and return the last report about it.

    Parameters
    ----------
    limit_s : the longest wait in seconds. None waits without a limit.
    log : is updated with the state of each report.

    Raises
    ------
    UsageError : the system's commands do not report whether a job has ended.
    ToolFailed : the scheduler has not answered even once.
    """
    if not systems.get_system(record.job.system).reports_state:
        raise UsageError(
            f"imgkit cannot ask {record.job.system} whether a job has ended",
            where=record.job.handle,
            hint=f"imgkit logs {record.job.handle} ends with the job",
        )
    end_s = math.inf
    if limit_s is not None:
        end_s = time.monotonic() + limit_s
    latest = None
    for pause_s in poll_pauses():
        try:
            latest = report_job(record, run)
            if log:
                log.update(latest.record.state, latest.wait)
        except ToolFailed:
            if latest is None:
                raise
            # A scheduler that does not answer this time may answer the next.
        left_s = end_s - time.monotonic()
        if latest.has_ended or left_s <= 0:
            return latest
        time.sleep(min(pause_s, left_s))
    raise AssertionError("the pauses do not end")


def refresh_state(record: SubmittedJob, run: Runner) -> SubmittedJob:
    """Return `record` with the state that the scheduler reports now.

    The scheduler is not asked about a job that has ended, or if its commands do not report states.

    Raises
    ------
    ToolFailed : the scheduler did not answer. The job may still run.
    """
    if record.state in FINAL_STATES or not systems.get_system(record.job.system).reports_state:
        return record
    return report_job(record, run).record

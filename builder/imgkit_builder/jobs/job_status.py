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
from imgkit_builder.jobs.job import Argv, Runner
from imgkit_builder.jobs.measured import LastNumbers
from imgkit_builder.jobs.remote import config, connection
from imgkit_builder.jobs.remote import jobs as remote_jobs
from imgkit_builder.jobs.remote.connection import Connection
from imgkit_builder.jobs.submitted import FINAL_STATES, JobState, JobStatus, QueuedJob, SubmittedJob, WaitInfo
from imgkit_entrypoints.errors import EXIT_SAVED, ToolFailed, ToolMissing, UsageError
from imgkit_entrypoints.launch import gpu_use, stop_protocol
from imgkit_entrypoints.rollcall.messages import GpuUse


def scheduler_runner(record: SubmittedJob, *, may_ask: bool = False) -> Runner:
    """Return a function that runs commands of a job's scheduler, such as ``("squeue", "--jobs=4711")``.

    The function runs a command on the machine where the job was submitted, this one or a remote, and returns
    when the command has ended. A failed command does not raise.

    Parameters
    ----------
    may_ask : whether ssh may ask a person for a password or a second factor.
    """
    return runner_on(record.job.remote, may_ask=may_ask)


def status_runner(record: SubmittedJob, *, may_ask: bool = False) -> Runner:
    """Return a function that runs commands on the machine of a job, for `report_job` and then `read_gpu_use`.

    On a remote, the first command also fetches the file with the use of the GPUs. So both calls together need
    only one connection, or two if the scheduler no longer knows the job.
    """
    job = record.job
    if not job.remote:
        return scheduler_runner(record)
    remote = connection_to(job.remote, may_ask=may_ask)
    return remote_jobs.RunnerWithFile(remote, str(job.run_folder / stop_protocol.GPU_USE))


def runner_on(remote: str, *, may_ask: bool = False) -> Runner:
    """Return a function that runs a command on a remote, or on this machine if the name `remote` is "".

    Parameters
    ----------
    may_ask : whether ssh may ask a person for a password or a second factor.
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
    if record.answer is not None:
        return JobReport(record=record)  # without an id, the scheduler cannot be asked
    report = _ask_scheduler(record, run) or _report_without_scheduler(record, run)
    # A program that saves its state when it is cancelled ends with an exit code, which looks like a failure.
    if report.record.state in ("failed", "ended") and records.is_cancelled(record):
        cancelled = dataclasses.replace(report.record, state="cancelled")
        return dataclasses.replace(report, record=cancelled)
    return report


def _ask_scheduler(record: SubmittedJob, run: Runner) -> JobReport | None:
    """Return what the scheduler reports about a job, or None if it has forgotten the job.

    The first command asks the queue, which has jobs that wait or run. The others ask the scheduler's history.

    Raises
    ------
    ToolFailed : the scheduler did not answer, and the job may still run.
    """
    queue_argv, *history_argvs = systems.get_system(record.job.system).status_commands(record.job)
    report = _ask_queue(record, queue_argv, run)
    if report is not None:
        return report
    for argv in history_argvs:
        try:
            answer = run(argv)
        except ToolMissing:  # some sites keep no history of jobs: the next command may know the job
            continue
        report = _read_answer(record, argv, answer, run)
        if report is not None:
            return report
    return None


def _ask_queue(record: SubmittedJob, argv: Argv, run: Runner) -> JobReport | None:
    """Return what the command `argv` reports about a job in the queue, or None if the job has left the queue.

    A command that fails says nothing about the job, unless it says that there is no such job. For a job that
    is known to have ended, a failure does not matter.

    Raises
    ------
    ToolMissing : the command is missing, and the job may still run.
    ToolFailed : the command failed for another reason than an unknown job, and the job may still run.
    """
    has_ended = record.state in FINAL_STATES
    try:
        answer = run(argv)
    except ToolMissing:
        if not has_ended:
            raise
        return None
    has_failed = answer.returncode != 0
    is_in_queue = not has_failed and answer.output.strip() != ""
    report = _read_answer(record, argv, answer, run, is_in_queue=is_in_queue)
    if report is not None or has_ended:
        return report
    if has_failed and not _is_forgotten(record, answer):
        raise command_failed(record, argv, answer)
    return None


def _is_forgotten(record: SubmittedJob, answer: Finished) -> bool:
    """Return whether the queue command of a scheduler has failed because the scheduler has no such job.

    Schedulers forget a job some time after its end.
    """
    system = systems.get_system(record.job.system)
    return system.reports_state and re.search(system.queue.unknown_job, answer.output) is not None


def _read_answer(
    record: SubmittedJob, argv: Argv, answer: Finished, run: Runner, *, is_in_queue: bool = False
) -> JobReport | None:
    """Return the report from the answer of a scheduler's command, or None if it does not know the job.

    Parameters
    ----------
    answer : the exit code and the output of the command `argv`.
    is_in_queue : whether the command has found the job in the queue. If not, the output counts only if it
        says that the job has ended, because a failed command can print anything.
    """
    system = systems.get_system(record.job.system)
    if not system.reports_state and answer.returncode == 0:
        return JobReport(record=record, argv=argv, text=answer.output)
    status = system.parse_status(answer.output)
    if is_in_queue or status.state in FINAL_STATES:
        return _scheduler_report(record, argv, status, run)
    return None


def _scheduler_report(record: SubmittedJob, argv: Argv, status: JobStatus, run: Runner) -> JobReport:
    """Return the report of a job whose `status` the scheduler's command `argv` has printed."""
    code = status.code
    if status.state == "failed" and code:
        # Where one task fails, srun ends the others by SIGTERM, and their code (143) is the higher one. The
        # run folder has the code of the task that failed.
        code = _code_in_run_folder(record, run) or code
    current = dataclasses.replace(record, state=status.state)
    return JobReport(record=current, argv=argv, text=status.text, code=code, wait=status.wait)


def _report_without_scheduler(record: SubmittedJob, run: Runner) -> JobReport:
    """Return the report of a job that the scheduler has forgotten.

    If imgkit asked the scheduler after the job had ended, the job's record has the state. Otherwise the state
    follows from the exit code in the run folder, and is ``ended`` if there is no such code.
    """
    if record.state in FINAL_STATES and record.state != "ended":
        return JobReport(record=record)
    code = _code_in_run_folder(record, run)
    state: JobState = "ended"
    if code is not None:
        state = "succeeded" if code == 0 else "failed"
    return JobReport(record=dataclasses.replace(record, state=state), code=code)


def _code_in_run_folder(record: SubmittedJob, run: Runner) -> int | None:
    """Return the exit code that the head's node agent wrote into the run folder at the end of the run.

    The result is None if it has written none, for example because it was killed.
    """
    return stop_protocol.parse_result_code(_file_of_run(record, stop_protocol.RESULT, run))


def read_gpu_use(record: SubmittedJob, run: Runner) -> GpuUse | None:
    """Return how much the run has used its GPUs until now.

    The result is None if no node agent has written it, as in jobs on CPUs.
    """
    return gpu_use.parse(_file_of_run(record, stop_protocol.GPU_USE, run))


def _file_of_run(record: SubmittedJob, name: str, run: Runner) -> str:
    """Return the text of the file `name` in the job's run folder, which may be on a remote.

    If there is no such file, the result is empty or the error message of ``cat``. So the caller must not take
    any text for the content of the file.
    """
    # Each task of an array has another run folder, so there is no single file. And `run` does not reach a
    # remote that only stores files.
    if record.job.array or record.job.store:
        return ""
    for other_record in records.list_records_of_run(record):
        if other_record.submitted > record.submitted:
            return ""  # a later job goes on in the same folder, and has replaced the file
    return run(("cat", "--", str(record.job.run_folder / name))).output


def cancel_job(record: SubmittedJob, run: Runner) -> Finished:
    """Cancel the job by its scheduler's command, and return the result of the command.

    If the command succeeds, the job's record says from then on that imgkit has cancelled the job.
    """
    answer = run(systems.get_system(record.job.system).cancel_command(record.job))
    # No record is saved for a task of an array.
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


def failure_hints(report: JobReport, run: Runner) -> Iterator[str]:
    """Yield explanations of a job's failure, each with what the user can do.

    Two causes are recognized: the job had too little memory, or its command started no ranks. Nothing is
    yielded for an array, or if neither cause applies.
    """
    record = report.record
    if record.job.array:
        return  # each task writes another file
    output = _end_of_output(record, run)
    if _OUT_OF_MEMORY.search(f"{report.text}\n{output}"):
        yield f"the job ran out of memory: {_memory_remedy(record)}"
    elif report.code == _KILLED_CODE:
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
    job = record.job
    text = f"{job.handle} {_outcome_text(report)}"
    is_from_run_folder = not report.argv and report.code is not None
    if is_from_run_folder and record.state != "cancelled":
        text += ", by its run folder"
    if job.array:
        return text  # each task has another run folder
    if record.state != "succeeded" and can_resume(record):
        text += f"; imgkit resume {job.handle}"
    if job.files_remote:
        text += f"; imgkit fetch {job.handle}"
    elif record.has_run_folder:
        text += f"; run folder: {job.run_folder}"
    return text


def can_resume(record: SubmittedJob) -> bool:
    """Return whether `imgkit resume` can submit the job again in its run folder.

    It cannot do so for arrays, for jobs whose request is not recorded, and on systems whose jobs cannot go on
    in the folder of an earlier job.
    """
    if record.job.array or not record.request or not records.has_record_file(record):
        return False
    return can_choose_folder(record)


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
    """Log why a job waits whenever the reason changes, and log ``running`` when the job starts after that."""

    def __init__(self, job: QueuedJob, log: Callable[[str], None]) -> None:
        self._job = job
        self._log = log
        self._state: JobState = ""
        self._logged: WaitInfo | None = None
        """What was logged last about this wait. It is None if the job does not wait or nothing was logged."""

    def update(self, state: JobState, wait: WaitInfo) -> None:
        """Log the state that the scheduler has just reported, if the user does not know it yet."""
        if state != "waiting":
            if state == "running" and self._logged is not None:
                self._log("running")
            self._logged = None
        elif self._is_news(wait):
            self._log(waiting_text(self._job, wait))
            self._logged = wait
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
    record: SubmittedJob, run: Runner, *, limit_s: float | None = None, log: WaitLog | None = None
) -> JobReport:
    """Wait until the job has ended, or for `limit_s` seconds, and return the last report about it.

    The scheduler is asked every few seconds, and later every 30 seconds. If it does not answer once, it is
    asked again.

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
    pauses_s = poll_pauses()
    report = _report_and_log(record, run, log)
    while not report.has_ended:
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            break
        time.sleep(min(next(pauses_s), left_s))
        with contextlib.suppress(ToolFailed):  # a scheduler that does not answer now may answer next time
            report = _report_and_log(record, run, log)
    return report


def _report_and_log(record: SubmittedJob, run: Runner, log: WaitLog | None) -> JobReport:
    """Return the report of `report_job`, after an update of `log` with its state."""
    report = report_job(record, run)
    if log:
        log.update(report.record.state, report.wait)
    return report


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

"""Report the states of submitted jobs, why they wait, and how they ended.

The scheduler is asked first. Schedulers forget a job some time after its end. Then the job's record on this
machine, or the files in its run folder, show how it ended.
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

    The commands run on the machine where the job was submitted, which is this machine or a remote. The
    function waits for the end of the command. A command that fails does not raise an exception.

    Parameters
    ----------
    may_ask : whether ssh may ask a person for a password or a second factor.
    """
    return runner_on(record.job.remote, may_ask=may_ask)


def status_runner(record: SubmittedJob, *, may_ask: bool = False) -> Runner:
    """Return a function that runs commands on a job's machine, for `report_job` and then `read_gpu_use`.

    For a job on a remote, the first command also fetches the file with the GPU use. The two calls together
    therefore need only one connection, or two if the scheduler no longer knows the job.
    """
    job = record.job
    if not job.remote:
        return scheduler_runner(record)
    remote = connection_to(job.remote, may_ask=may_ask)
    return remote_jobs.RunnerWithFile(remote, str(job.run_folder / stop_protocol.GPU_USE))


def runner_on(remote: str, *, may_ask: bool = False) -> Runner:
    """Return a function that runs commands on a remote, or on this machine if `remote` is "".

    Parameters
    ----------
    remote : the name of the remote.
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
    """Return the folder on this machine that contains the run's files.

    For a run on a remote whose files have not been fetched yet, the result is None.
    """
    if not record.job.files_remote:
        return record.job.run_folder
    if not record.fetched:
        return None
    return Path(record.fetched)


def last_numbers(record: SubmittedJob) -> LastNumbers:
    """Return the last step and loss of the run. Both are None if the run's files are not on this machine."""
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
    """The scheduler's command whose output contained the job. It is empty if no command knew the job."""
    text: str = ""
    """The part of the command's output that is shown to people."""
    code: int | None = None
    """The job's exit code, or None if it is not known.

    If `argv` is empty, the code is from the run folder.
    """
    wait: WaitInfo = dataclasses.field(default_factory=WaitInfo)

    @property
    def has_ended(self) -> bool:
        """Whether the job has ended."""
        return self.record.state in FINAL_STATES


def report_job(record: SubmittedJob, run: Runner) -> JobReport:
    """Return the state of a job, and how it ended if it has ended.

    The scheduler is asked first. If it no longer knows the job, the state is taken from the job's record or
    run folder. A job that imgkit has cancelled counts as cancelled, whatever its exit code is.

    Parameters
    ----------
    run : runs a command on the job's machine, and waits for its end.

    Raises
    ------
    ToolFailed : the scheduler did not answer. The job may still be running.
    """
    # `answer` is what the scheduler printed at the submission, if it contained no id.
    if record.answer is not None:
        return JobReport(record=record)  # without an id, the scheduler cannot be asked
    report = _ask_scheduler(record, run) or _report_without_scheduler(record, run)
    # A program that saves its state when it is cancelled ends with a non-zero exit code, which looks like a
    # failure.
    if report.record.state in ("failed", "ended") and records.is_cancelled(record):
        cancelled = dataclasses.replace(report.record, state="cancelled")
        return dataclasses.replace(report, record=cancelled)
    return report


def _ask_scheduler(record: SubmittedJob, run: Runner) -> JobReport | None:
    """Return what the scheduler reports about a job, or None if the scheduler no longer knows the job.

    The first command asks the queue, which contains jobs that wait or run. The other commands ask the
    scheduler's history.

    Raises
    ------
    ToolFailed : the scheduler did not answer, and the job may still be running.
    """
    queue_argv, *history_argvs = systems.get_system(record.job.system).status_commands(record.job)
    report = _ask_queue(record, queue_argv, run)
    if report is not None:
        return report
    for argv in history_argvs:
        # Some sites keep no history of jobs, and lack the command for it. The next command may still know the
        # job.
        try:
            answer = run(argv)
        except ToolMissing:
            continue
        report = _read_answer(record, argv, answer, run)
        if report is not None:
            return report
    return None


def _ask_queue(record: SubmittedJob, argv: Argv, run: Runner) -> JobReport | None:
    """Return the command's report about a job in the queue, or None if the job has left the queue.

    If the command fails, the state of the job is unknown, unless the message says that there is no such job.
    For a job that is known to have ended, a failure does not matter.

    Parameters
    ----------
    argv : the scheduler's command that lists jobs which wait or run.

    Raises
    ------
    ToolMissing : the command is missing, and the job may still be running.
    ToolFailed : the command failed for another reason than an unknown job, and the job may still be running.
    """
    has_ended = record.state in FINAL_STATES
    try:
        answer = run(argv)
    except ToolMissing:
        if not has_ended:
            raise
        return None
    command_has_succeeded = answer.returncode == 0
    # squeue, for example, succeeds and prints nothing about a job that has left the queue.
    is_in_queue = command_has_succeeded and answer.output.strip() != ""
    report = _read_answer(record, argv, answer, run, is_in_queue=is_in_queue)
    if report is not None:
        return report
    # The answer contains nothing about the job. An error of the command matters only if the job may be
    # running.
    if has_ended or command_has_succeeded or _says_unknown_job(record, answer):
        return None
    raise command_failed(record, argv, answer)


def _says_unknown_job(record: SubmittedJob, answer: Finished) -> bool:
    """Return whether the message of the scheduler's queue command is that there is no such job.

    Schedulers forget a job some time after its end.
    """
    system = systems.get_system(record.job.system)
    return system.reports_state and re.search(system.queue.unknown_job, answer.output) is not None


def _read_answer(
    record: SubmittedJob, argv: Argv, answer: Finished, run: Runner, *, is_in_queue: bool = False
) -> JobReport | None:
    """Return the report from the answer of a scheduler's command, or None if the answer has no such job.

    Parameters
    ----------
    answer : the exit code and the output of the command `argv`.
    is_in_queue : whether the command has found the job in the queue. If not, only a final state in the output
        counts, because a failed command can print anything.
    """
    system = systems.get_system(record.job.system)
    # A system that reports no states only prints text about the job. The record then keeps its state.
    if not system.reports_state and answer.returncode == 0:
        return JobReport(record=record, argv=argv, text=answer.output)
    status = system.parse_status(answer.output)
    if is_in_queue or status.state in FINAL_STATES:
        return _scheduler_report(record, argv, status, run)
    return None


def _scheduler_report(record: SubmittedJob, argv: Argv, status: JobStatus, run: Runner) -> JobReport:
    """Return the report of a job from `status`, which the scheduler's command `argv` has printed."""
    code = status.code
    if status.state == "failed" and code:
        # If one task fails, srun ends the other tasks by SIGTERM, and the scheduler reports their higher exit
        # code, 143. The run folder contains the code of the task that failed first.
        code = _read_exit_code(record, run) or code
    current = dataclasses.replace(record, state=status.state)
    return JobReport(record=current, argv=argv, text=status.text, code=code, wait=status.wait)


def _report_without_scheduler(record: SubmittedJob, run: Runner) -> JobReport:
    """Return the report of a job that the scheduler no longer knows.

    If imgkit has seen the end of the job, the job's record contains the final state. Otherwise, the state is
    derived from the exit code in the run folder. Without such a code, the state is ``ended``, which means an
    unknown outcome.
    """
    # "ended" means an unknown outcome. The exit code may have reached the run folder since.
    if record.state in FINAL_STATES and record.state != "ended":
        return JobReport(record=record)
    code = _read_exit_code(record, run)
    state: JobState = "ended"
    if code is not None:
        state = "succeeded" if code == 0 else "failed"
    return JobReport(record=dataclasses.replace(record, state=state), code=code)


def _read_exit_code(record: SubmittedJob, run: Runner) -> int | None:
    """Return the exit code of a run from its run folder, or None if the folder contains none.

    The node agent of the head (the node with rank 0) writes the code at the end of the run. It cannot do so
    if it is killed.
    """
    return stop_protocol.parse_result_code(_read_file_of_run(record, stop_protocol.RESULT, run))


def read_gpu_use(record: SubmittedJob, run: Runner) -> GpuUse | None:
    """Return how much the run has used its GPUs so far.

    The result is None if no node agent has written the file with this information, as in jobs on CPUs.
    """
    return gpu_use.parse(_read_file_of_run(record, stop_protocol.GPU_USE, run))


def _read_file_of_run(record: SubmittedJob, name: str, run: Runner) -> str:
    """Return the text of the file `name` in the job's run folder, which may be on a remote.

    If there is no such file, or if it belongs to a later job of the run, the result is empty or the error
    message of ``cat``. So the caller must parse the text strictly.
    """
    job = record.job
    if job.array:  # each task has its own run folder, so there is no single file
        return ""
    if job.store:  # the file is on a remote that only stores files, but `run` runs commands on this machine
        return ""
    for record_of_run in records.list_records_of_run(record):
        # A later job goes on in the same folder, and has replaced the file.
        if record_of_run.submitted > record.submitted:
            return ""
    return run(("cat", "--", str(job.run_folder / name))).output


def cancel_job(record: SubmittedJob, run: Runner) -> Finished:
    """Cancel the job by its scheduler's command, and return the result of the command.

    If the command succeeds, the job's record is updated to say that imgkit has cancelled the job.
    """
    finished = run(systems.get_system(record.job.system).cancel_command(record.job))
    # A task of an array has no record that could be updated.
    if finished.returncode == 0 and records.has_record_file(record):
        with contextlib.suppress(OSError):  # the job is cancelled even if its record cannot be updated
            records.save_record(dataclasses.replace(record, cancelled=True))
    return finished


def with_cancellation(record: SubmittedJob) -> SubmittedJob:
    """Return `record` with the state ``cancelled`` if imgkit has cancelled the job and its end is unknown.

    The job may need a moment to end. This function does not ask the scheduler about it.
    """
    if record.cancelled and record.state not in FINAL_STATES:
        return dataclasses.replace(record, state="cancelled")
    return record


def command_failed(record: SubmittedJob, argv: Sequence[str], answer: Finished) -> ToolFailed:
    """Return the error for a scheduler's command that has failed. The error quotes the command's output."""
    message, hint = process.quote_output(
        f"{argv[0]} failed with exit code {answer.returncode}", answer.output.strip()
    )
    return ToolFailed(message, where=record.job.handle, hint=hint or None)


# The error of torch's init_process_group in a program that was not started by a launcher such as torchrun:
# "environment variable RANK expected, but not set".
_NO_RANK = re.compile(r"environment variable \w+ expected, but not set")
# What schedulers report about a job that has exceeded its memory: its state, or a message in its output.
_OUT_OF_MEMORY = re.compile(
    r"OUT_OF_MEMORY"
    r"|\boom_kill event|\bexceeded memory limit"  # a step of Slurm, with and without cgroups
    r"|job killed: mem \S+ exceeded limit"  # PBS
    r"|\bOOMKilled"  # Kubernetes
)
# The exit code of a program that was ended by SIGKILL, which is signal 9: 128 + 9. The kernel sends it when
# memory runs out.
_KILLED_CODE = 137
# `failure_hints` searches the last 64 KiB of the job's output for these texts.
_TAIL_BYTES = 64 << 10


def failure_hints(report: JobReport, run: Runner) -> Iterator[str]:
    """Yield explanations of why a job failed, each with advice for the user.

    Two causes are recognized: the job ran out of memory, or its command was not started by a launcher such as
    torchrun. Nothing is yielded for an array or for other causes.
    """
    record = report.record
    # Each task of an array writes its output to another file.
    if record.job.array:
        return
    output = _read_end_of_output(record, run)
    if _OUT_OF_MEMORY.search(f"{report.text}\n{output}"):
        yield f"the job ran out of memory: {_memory_remedy(record)}"
    elif report.code == _KILLED_CODE:
        yield (
            f"exit code {_KILLED_CODE}: a process was killed, most often because memory ran out: "
            f"{_memory_remedy(record)}"
        )
    if _NO_RANK.search(output):
        yield from systems.single_process_warnings(record.command)


def _read_end_of_output(record: SubmittedJob, run: Runner) -> str:
    """Return the last 64 KiB of the job's output, or "" if the output is not in a file.

    Some systems show the output only through a command.
    """
    log_argv = systems.get_system(record.job.system).log_source(record.job)
    # The command is "tail ... FILE FILE" with absolute paths, or another program without any.
    log_files = [argument for argument in log_argv if argument.startswith("/")]
    if not log_files:
        return ""
    return run(("tail", "-c", str(_TAIL_BYTES), "--", *log_files)).output


def _memory_remedy(record: SubmittedJob) -> str:
    """Return the advice for a job that ran out of memory. It names the memory that the job had."""
    if record.memory:
        return f"it had {record.memory}; request more, or use fewer data workers"
    return "it stated no size, so it had the scheduler's default; add --mem SIZE, or use fewer data workers"


def ending_text(report: JobReport) -> str:
    """Return one line about how a job has ended and where its files are.

    For example: ``4711@mn5 failed with exit code 1; imgkit resume 4711@mn5; imgkit fetch 4711@mn5``.
    """
    record = report.record
    job = record.job
    line = f"{job.handle} {_outcome_text(report)}"
    # `argv` is the scheduler's command that knew the job. Without one, the exit code is from the run folder.
    is_from_run_folder = not report.argv and report.code is not None
    if is_from_run_folder and record.state != "cancelled":
        line += ", by its run folder"
    if job.array:
        return line  # each task has another run folder
    if record.state != "succeeded" and can_resume(record):
        line += f"; imgkit resume {job.handle}"
    if job.files_remote:
        line += f"; imgkit fetch {job.handle}"
    elif record.has_run_folder:
        line += f"; run folder: {job.run_folder}"
    return line


def can_resume(record: SubmittedJob) -> bool:
    """Return whether `imgkit resume` can submit the job again in its run folder.

    This is not possible for arrays, for jobs whose request was not recorded, and on systems whose jobs cannot
    use the folder of an earlier job.
    """
    if record.job.array or not record.request or not records.has_record_file(record):
        return False
    return can_choose_folder(record)


def can_choose_folder(record: SubmittedJob) -> bool:
    """Return whether a job on the same system can go on in the run folder of an earlier job."""
    return bool(record.job.store) or systems.get_system(record.job.system).abilities.resumes_jobs


def _outcome_text(report: JobReport) -> str:
    """Return how the job ended, as the end of a sentence: ``was cancelled``."""
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
    """Return one line about a job that waits: ``waiting: Priority; expected start 2026-11-28T22:40``.

    The line contains the scheduler's reason and its estimate of the start. If the job would never start as it
    is, the line says what the user can do.
    """
    line = "waiting"
    if wait.reason:
        line += f": {wait.reason}"
    if wait.expected_start:
        line += f"; expected start {wait.expected_start}"
        if job.remote:
            line += f", by the clock of {job.remote}"  # the remote may be in another time zone
    if wait.note:
        line += f"; {wait.note}"
    if wait.change:
        line += f"; the job will not start: imgkit cancel {job.handle}, and submit it with {wait.change}"
    return line


class WaitLog:
    """Log why a job waits, whenever the reason changes. When the job starts afterwards, log ``running``."""

    def __init__(self, job: QueuedJob, log: Callable[[str], None]) -> None:
        self._job = job
        self._log = log
        self._previous_state: JobState = ""
        """The state in the previous report, or "" before the first report."""
        self._logged_wait: WaitInfo | None = None
        """What was logged about the current wait. It is None as long as nothing about it was logged."""

    def update(self, state: JobState, wait: WaitInfo) -> None:
        """Log a report of the scheduler, unless its content has been logged already.

        Parameters
        ----------
        wait : why the job waits. It is not used for a job in another state.
        """
        waited_before = self._previous_state == "waiting"
        self._previous_state = state
        if state == "waiting":
            if self._should_log(wait, waited_before=waited_before):
                self._log(waiting_text(self._job, wait))
                self._logged_wait = wait
            return
        if state == "running" and self._logged_wait is not None:
            self._log("running")
        self._logged_wait = None  # the wait is over; a requeued job may wait again, which is then news

    def _should_log(self, wait: WaitInfo, *, waited_before: bool) -> bool:
        """Return whether `wait` contains something that has not been logged yet.

        Parameters
        ----------
        waited_before : whether the job waited in the previous report, too.
        """
        logged_wait = self._logged_wait
        if logged_wait is None:
            # A scheduler needs a moment to determine the reason. On an idle cluster, the job has started by
            # then. So a first report without a reason is not logged, but a second one is.
            return wait.reason != "" or waited_before
        if wait.reason != logged_wait.reason:
            return True
        # Slurm withdraws its estimate of the start and computes it again, many times. So only the first
        # estimate is logged.
        return wait.expected_start != "" and logged_wait.expected_start == ""


# Seconds between two questions about a job. The last value repeats. More frequent questions would load the
# scheduler.
POLL_S = (1.0, 1.0, 2.0, 3.0, 5.0, 10.0, 10.0, 30.0)


def poll_pauses() -> Iterator[float]:
    """Yield the pauses in seconds between two questions about a job. The sequence never ends."""
    yield from POLL_S
    yield from itertools.repeat(POLL_S[-1])


def wait_for_job(
    record: SubmittedJob, run: Runner, *, limit_s: float | None = None, log: WaitLog | None = None
) -> JobReport:
    """Wait until the job has ended, or for at most `limit_s` seconds, and return the last report about it.

    The scheduler is asked every few seconds at first, and every 30 seconds later. If it does not answer, it
    is asked again after the next pause.

    Parameters
    ----------
    limit_s : the longest wait in seconds. None waits without a limit.
    log : is updated with the state of each report.

    Raises
    ------
    UsageError : the commands of the system do not report whether a job has ended.
    ToolFailed : the scheduler did not answer the first question.
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
    # An error of the first question is raised. Later ones are not, because the scheduler has known the job.
    report = _report_and_log(record, run, log)
    while not report.has_ended:
        remaining_s = end_s - time.monotonic()
        if remaining_s <= 0:
            break
        time.sleep(min(next(pauses_s), remaining_s))
        with contextlib.suppress(ToolFailed):  # a scheduler that does not answer now may answer the next time
            report = _report_and_log(record, run, log)
    return report


def _report_and_log(record: SubmittedJob, run: Runner, log: WaitLog | None) -> JobReport:
    """Return the report of `report_job`, and update `log` with the state in it."""
    report = report_job(record, run)
    if log:
        log.update(report.record.state, report.wait)
    return report


def refresh_state(record: SubmittedJob, run: Runner) -> SubmittedJob:
    """Return `record` with the state that the scheduler reports now.

    If the job has ended, or if the commands of its system do not report states, the scheduler is not asked
    and the record is returned unchanged.

    Raises
    ------
    ToolFailed : the scheduler did not answer. The job may still be running.
    """
    # The scheduler has nothing new to say about a job that has ended.
    if record.state in FINAL_STATES or not systems.get_system(record.job.system).reports_state:
        return record
    return report_job(record, run).record

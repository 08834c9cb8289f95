"""``imgkit status``, ``wait``, ``logs`` and ``cancel``: follow jobs that were submitted from this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import typer

from imgkit_builder.base import process
from imgkit_builder.base.process import INTERRUPTED, Finished
from imgkit_builder.cli.common import JOB_ID, JSON, LAST_JOB_ID, flag_option, print_message, print_result
from imgkit_builder.cli.runs import has_known_id, job_data, jobs_table
from imgkit_builder.jobs import job_status, quoting, records, systems
from imgkit_builder.jobs.job_status import JobReport, WaitLog
from imgkit_builder.jobs.remote import jobs as remote_jobs
from imgkit_builder.jobs.remote.connection import Connection, Cut
from imgkit_builder.jobs.submitted import FINAL_STATES, SubmittedJob
from imgkit_entrypoints import terminal
from imgkit_entrypoints.errors import EXIT_NO, ImgkitError, ToolFailed, UsageError
from imgkit_entrypoints.launch import gpu_use


def verb_status(
    job_id: str = typer.Argument(
        "", metavar="[ID]", help="Job id (default: your jobs, here and on remotes)."
    ),
    as_json: bool = JSON,
) -> None:
    """Show a job, or all of your jobs that wait or run, here and on all remotes.

    For a job that waits, it prints the reason and the expected start; for one that has
    ended, how it ended. If the job uses GPUs, it prints how much. A task of an array job
    has a separate id: 12_3, or 12[3].

    \b
    Examples:
      imgkit status
      imgkit status 4711
      imgkit status 4711_3@mn5
    """
    if not job_id:
        _show_own_jobs(as_json=as_json)
        return
    record = records.find_record(job_id)
    run = job_status.status_runner(record, may_ask=may_ask())
    report = job_status.report_job(record, run)
    save_new_state(record, report.record)
    gpu_report = job_status.read_gpu_use(record, run)
    if as_json:
        data = _report_to_dict(report)
        if gpu_report:
            data["gpu_use"] = dataclasses.asdict(gpu_report)
        print_result(data, as_json=True)
        return
    _print_report(report)
    if gpu_report:
        terminal.print_results(gpu_use.describe(gpu_report))


def _print_report(report: JobReport) -> None:
    """Print the scheduler's output about a job, and why the job waits or how it has ended."""
    if report.argv:
        print_message(f"{_remote_prefix(report.record)}{shlex.join(report.argv)}")
        # On a terminal, this replaces control characters in the output of the scheduler.
        terminal.output_copier()(report.text.encode())
    if report.has_ended:
        terminal.print_results(job_status.ending_text(report))
    elif report.record.state == "waiting":
        terminal.print_results(job_status.waiting_text(report.record.job, report.wait))


def _show_own_jobs(*, as_json: bool) -> None:
    """Print a table of the jobs that may still wait or run, with their current states.

    If the states of some jobs are unknown, exit with the exit code of `ToolFailed`.
    """
    # A record is what imgkit has stored about a job on this machine, with its last known state. Only jobs
    # that may have changed are asked about.
    old_records = [record for record in records.list_records() if _may_be_active(record)]
    current_records, is_complete = _refresh_states(old_records)
    # `imgkit runs` shows the saved states without asking a scheduler.
    for record, current in zip(old_records, current_records, strict=True):
        save_new_state(record, current)
    table_lines = (
        jobs_table(current_records)
        if current_records
        else ("no job waits or runs; imgkit runs lists those that have ended",)
    )
    data = {"jobs": [job_data(record) for record in current_records], "complete": is_complete}
    print_result(data, *table_lines, as_json=as_json)
    if not is_complete:
        raise typer.Exit(ToolFailed.exit_code)


def _refresh_states(jobs: Iterable[SubmittedJob]) -> tuple[list[SubmittedJob], bool]:
    """Ask the schedulers for the current states of `jobs`.

    Return the jobs with these states, and whether all schedulers have answered. If a scheduler does not
    answer, a message says so, and its job keeps the last known state. A remote that cannot be reached is not
    tried again for further jobs, because each attempt would wait for ssh.
    """
    current_records = []
    unreachable_remotes = set()
    is_complete = True
    for record in jobs:
        current_record = record
        try:
            if record.job.remote not in unreachable_remotes:
                current_record = job_status.refresh_state(record, scheduler_runner(record))
        except ImgkitError as error:
            print_message(f"{record.job.handle}: {error.what}")
            is_complete = False
            # Cut means that ssh could not connect, or lost the connection.
            # Other errors, such as a failed command of a scheduler, can differ from job to job.
            if isinstance(error, Cut):
                unreachable_remotes.add(record.job.remote)
        current_records.append(current_record)
    return current_records, is_complete


def _remote_prefix(record: SubmittedJob) -> str:
    """Return ``on REMOTE: `` for a message about a command on the job's remote, or "" on this machine."""
    return f"on {record.job.remote}: " if record.job.remote else ""


def _may_be_active(record: SubmittedJob) -> bool:
    """Return whether the job may still wait or run, so that ``imgkit status`` lists it.

    Some systems do not report states, so imgkit never learns when their jobs end. Such a job is listed until
    it is cancelled, or for a week after its submission. The same applies to a job whose id the scheduler did
    not print.
    """
    if record.state in FINAL_STATES:
        return False
    if has_known_id(record) and _reports_state(record):
        return True
    week_ago = datetime.now(timezone.utc) - timedelta(days=7)
    return not record.cancelled and record.submitted >= week_ago.isoformat()


def _reports_state(record: SubmittedJob) -> bool:
    """Return whether the job's system can report if the job waits, runs or has ended."""
    try:
        return systems.get_system(record.job.system).reports_state
    except ImgkitError:  # the system's plug-in is no longer installed
        return False


def _report_to_dict(report: JobReport) -> dict[str, Any]:
    """Return the data that ``imgkit status ID --json`` and ``imgkit wait ID --json`` print.

    A value is None if it is unknown or if the job has no such value.
    """
    record = report.record
    # Each task of an array of jobs has a folder of its own.
    has_one_folder = record.has_run_folder and not record.job.array
    data: dict[str, Any] = {
        "id": record.job.handle,
        "state": record.state,
        "reason": report.wait.reason or None,
        "expected_start": report.wait.expected_start or None,
        "exit_code": report.code if report.has_ended else None,  # of the job itself
        "command": list(report.argv),
        "output": report.text,
        "folder": str(record.job.run_folder) if has_one_folder else None,
    }
    if record.code is not None:  # the folder of the job's source code
        data["code"] = dataclasses.asdict(record.code)
    return data


def save_new_state(record: SubmittedJob, current: SubmittedJob) -> None:
    """Save the record `current` if its state differs from `record`, an older record of the same job."""
    # A task of an array has no file of its own. Its record is derived from that of the array.
    if current.state != record.state and records.has_record_file(record):
        # If the folder cannot be written, only `imgkit runs` is affected: it shows an older state.
        with contextlib.suppress(OSError):
            records.save_record(current)


def may_ask() -> bool:
    """Return whether ssh can ask the user for a password or a second factor."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def connect_to(name: str) -> Connection:
    """Return a connection to the remote `name`. No command is run yet."""
    return job_status.connection_to(name, may_ask=may_ask())


def scheduler_runner(record: SubmittedJob) -> Callable[[Sequence[str]], Finished]:
    """Return a function that runs a command on the machine from which the job was submitted."""
    return job_status.scheduler_runner(record, may_ask=may_ask())


def can_follow(record: SubmittedJob) -> bool:
    """Return whether `follow_job` can show the output of the job until the job ends.

    It can do so for every job that a remote has submitted. For a job that this machine has submitted, the
    output must be in a file, and a command must report the end of the job. A job in pods has no such file.
    """
    if record.job.remote:
        return True
    system = systems.get_system(record.job.system)
    # Only a file is shown with tail. For pods, the output comes from a command of their system.
    program, *_ = system.log_source(record.job)
    has_output_file = program == "tail"
    return has_output_file and system.reports_state


def follow_job(record: SubmittedJob) -> int:
    """Show the output of the job until it ends, and return the exit code for imgkit.

    The exit code is 0 if the job succeeded or ended without a known result, and 1 if it did not succeed.
    After Ctrl-C, the exit code is `INTERRUPTED` and the job continues.
    """
    verbs = "logs|status|cancel|fetch" if record.job.remote else "logs|status|cancel"
    continue_hint = f"the job continues; imgkit {verbs} {record.job.handle}"
    print_message(f"job {record.job.handle}; Ctrl-C stops following; the job continues")
    run = scheduler_runner(record)
    try:
        report = _follow_to_end(record, run)
    except KeyboardInterrupt:
        print_message(continue_hint)
        return INTERRUPTED
    except Cut as error:
        # The connection broke, but the job did not. Say first how to follow it again.
        raise Cut(error.what, where=error.where, hint=f"{continue_hint}\n{error.hint}") from error
    save_new_state(record, report.record)  # for `imgkit runs`, which asks no scheduler
    print_message(job_status.ending_text(report))
    if report.record.state == "failed":
        for hint in job_status.failure_hints(report, run):
            print_message(hint)
    # "ended" means that the job has ended, but its result is unknown.
    return 0 if report.record.state in ("succeeded", "ended") else EXIT_NO


def _follow_to_end(record: SubmittedJob, run: Callable[[Sequence[str]], Finished]) -> JobReport:
    """Show the output of the job until it ends, and return the report about its end.

    `run` runs a command of the scheduler on the machine that submitted the job.
    """
    wait_log = job_status.WaitLog(record.job, print_message)  # prints why the job waits
    if record.job.remote:
        connection = connect_to(record.job.remote)
        # This returns only after the scheduler has reported the end of the job.
        remote_jobs.follow_output(
            connection, record, terminal.output_copier(), on_status=wait_log.update, log=print_message
        )
        return job_status.report_job(record, run)
    _show_local_output(record, run, wait_log)
    # tail can also end for another reason, so wait for the job itself.
    return job_status.wait_for_job(record, run, log=wait_log)


def _show_local_output(
    record: SubmittedJob, run: Callable[[Sequence[str]], Finished], wait_log: WaitLog
) -> None:
    """Show the output of a job on this machine until the job ends.

    ``tail`` prints the output file. It is terminated when the scheduler reports the end of the job. Changes
    of the state are printed with `wait_log`. `run` runs a command of the scheduler.
    """

    def has_ended() -> bool:
        report = job_status.report_job(record, run)
        wait_log.update(report.record.state, report.wait)
        return report.has_ended

    log_command = systems.get_system(record.job.system).log_source(record.job)  # "tail -n +1 -F FILE"
    log_file = Path(log_command[-1])
    # tail reports an error if the file does not exist yet, so wait for the file.
    if _wait_for_file(log_file, has_ended):
        process.run_attached(log_command, until=has_ended)  # calls `has_ended` in another thread
    else:
        # The job has ended. Without -f and -F, tail prints the whole output and exits.
        process.run_attached([argument for argument in log_command if argument not in ("-f", "-F")])


def _wait_for_file(file: Path, has_ended: Callable[[], bool]) -> bool:
    """Wait until `file` exists or the job has ended, and return whether the job is still running.

    `has_ended` asks the scheduler whether the job has ended. It is called before each look for the file.
    """
    pauses_s = job_status.poll_pauses()
    while not has_ended():
        if file.exists():
            return True
        time.sleep(next(pauses_s))
    return False


def verb_logs(
    job_id: str = LAST_JOB_ID,
    as_json: bool = flag_option("--json", "Print the command as one JSON object and run nothing."),
) -> None:
    """Follow a job's output until the job ends. Ctrl-C stops following; the job continues.

    \b
    Examples:
      imgkit logs
      imgkit logs 4711
      imgkit logs 4711_3@mn5
    """
    # The id is empty if the user gives none.
    record = records.find_record(job_id or last_job_id())
    log_command = systems.get_system(record.job.system).log_source(record.job)
    if as_json:
        print_result({"id": record.job.handle, "command": log_command}, as_json=True)
        return
    if can_follow(record):
        raise typer.Exit(follow_job(record))
    # This is a job in pods. Its command shows the output until the user presses Ctrl-C.
    print_message(shlex.join(log_command))
    raise typer.Exit(process.run_attached(log_command))


def last_job_id() -> str:
    """Return the id of the job that was submitted last, and print it on stderr.

    Raises
    ------
    UsageError : no job with a known id was submitted from this machine.
    """
    for record in records.list_records():
        if has_known_id(record):
            print_message(f"job {record.job.handle}, the last one")
            return record.job.handle
    raise UsageError("no job was submitted from here", where="ID", hint="imgkit run prints the id")


def verb_wait(
    job_id: str = JOB_ID,
    timeout: str = typer.Option("", metavar="TIME", help="Time to wait, for example 90m or 2h."),
    as_json: bool = JSON,
) -> None:
    """Wait until a job has ended. Ctrl-C stops waiting; the job continues.

    The exit code is 0 if the job succeeded, 1 if not, and 4 if it has not ended in
    time.

    \b
    Examples:
      imgkit wait 4711
      imgkit wait 4711@mn5 --timeout 2h --json
    """
    limit_s = quoting.parse_time_limit(timeout, where="--timeout") if timeout else None
    record = records.find_record(job_id)
    handle = record.job.handle
    # With --json, standard error must contain nothing but JSON.
    log = None if as_json else job_status.WaitLog(record.job, print_message)
    try:
        report = job_status.wait_for_job(record, scheduler_runner(record), limit_s=limit_s, log=log)
    except KeyboardInterrupt:
        print_message(f"{handle} continues; imgkit wait {handle}")
        raise typer.Exit(INTERRUPTED) from None
    save_new_state(record, report.record)  # for `imgkit runs`, which asks no scheduler
    if not report.has_ended:
        raise ToolFailed(f"{handle} has not ended after {timeout}", hint=f"imgkit wait {handle}")
    if as_json:
        print_result(_report_to_dict(report), as_json=True)
    else:
        terminal.print_results(job_status.ending_text(report))
    raise typer.Exit(0 if report.record.state == "succeeded" else EXIT_NO)


def verb_cancel(
    job_id: str = JOB_ID,
    as_json: bool = JSON,
) -> None:
    """End a job.

    \b
    Examples:
      imgkit cancel 4711
    """
    record = records.find_record(job_id)
    argv = systems.get_system(record.job.system).cancel_command(record.job)
    if not as_json:
        print_message(f"{_remote_prefix(record)}{shlex.join(argv)}")
    finished = job_status.cancel_job(record, scheduler_runner(record))
    if as_json:
        data = {"command": argv, "exit_code": finished.returncode, "output": finished.output}
        print_result(data, as_json=True)
    else:
        terminal.output_copier()(finished.output.encode())
    raise typer.Exit(finished.returncode)

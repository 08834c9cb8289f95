"""``imgkit status``, ``wait``, ``logs`` and ``cancel``: follow jobs that were submitted from here."""

from __future__ import annotations

import dataclasses
import shlex
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import typer

from imgkit_builder.base.process import INTERRUPTED
from imgkit_builder.cli.common import JSON, flag_option, show
from imgkit_builder.cli.remote import can_follow_here, connected, follow, keep_state, refreshed, runner
from imgkit_builder.cli.runs import job_data, jobs_table
from imgkit_entrypoints import terminal
from imgkit_entrypoints.errors import ImgkitError, ToolFailed, UsageError

if TYPE_CHECKING:
    from imgkit_builder.job.request import SubmittedJob
    from imgkit_builder.project.history import JobReport


def verb_status(
    job_id: str = typer.Argument(
        "", metavar="[ID]", help="Job id (default: your jobs, here and on remotes)."
    ),
    as_json: bool = JSON,
) -> None:
    """Show a job, or all of your jobs that wait or run, here and on all remotes.

    Of a job that waits, the scheduler also prints its expected start; of one that has
    ended, how it ended. A task of an array job has a separate id: 12_3, or 12[3].

    \b
    Examples:
      imgkit status
      imgkit status 4711
      imgkit status 4711_3@mn5
    """
    from imgkit_builder.job import submit
    from imgkit_builder.project import history

    if not job_id:
        _own_jobs(as_json=as_json)
        return
    record = submit.record_of(job_id)
    report = history.report(record, runner(record))
    _keep_state(record, report)
    if as_json:
        show(_reported(report), as_json=True)
        return
    if report.argv:
        terminal.err(f"imgkit: {_remote_prefix(record)}{shlex.join(report.argv)}")
        terminal.passing()(report.text.encode())
    if report.has_ended:
        terminal.out(history.ending_text(report))


def _own_jobs(*, as_json: bool) -> None:
    """Show each job that had not ended when imgkit last looked, with its state now."""
    from imgkit_builder.job import submit

    jobs, complete = refreshed([record for record in submit.records() if _may_run(record)])
    nothing = "no job waits or runs; imgkit runs lists those that have ended"
    data = {"jobs": [job_data(record) for record in jobs], "complete": complete}
    show(data, *(jobs_table(jobs) if jobs else (nothing,)), as_json=as_json)
    if not complete:
        raise typer.Exit(ToolFailed.exit_code)


def _remote_prefix(record: SubmittedJob) -> str:
    return f"on {record.remote}: " if record.remote else ""


def _may_run(record: SubmittedJob) -> bool:
    """Whether the job had not ended when imgkit last looked; where nobody can know, for a week."""
    from imgkit_builder.job import systems
    from imgkit_builder.job.request import FINAL_STATES

    if record.state in FINAL_STATES:
        return False
    try:
        reports_state = record.answer is None and systems.named(record.system).reports_state
    except ImgkitError:  # its plug-in is gone
        reports_state = False
    week_ago = datetime.now(timezone.utc) - timedelta(days=7)
    return reports_state or record.submitted >= week_ago.isoformat()


def _reported(report: JobReport) -> dict[str, Any]:
    """Return what ``imgkit status ID --json`` prints."""
    from imgkit_builder.project import history

    record = report.record
    data: dict[str, Any] = {
        "id": record.handle,
        "state": record.state,
        "exit_code": report.code if report.has_ended else None,
        "command": list(report.argv),
        "output": report.text,
        "folder": None if record.array else str(history.run_of(record)),
    }
    if record.code is not None:
        data["code"] = dataclasses.asdict(record.code)
    return data


def _keep_state(record: SubmittedJob, report: JobReport) -> None:
    """Save the state that `report` has found, if it is new."""
    if report.record.state != record.state and not _is_task(record):
        keep_state(report.record)


def _is_task(record: SubmittedJob) -> bool:
    """Whether the record is derived from that of an array job, which alone is kept."""
    from imgkit_builder.job import submit

    return record.handle not in (saved.handle for saved in submit.records())


def verb_logs(
    job_id: str = typer.Argument("", metavar="[ID]", help="Job id (default: the job submitted last)."),
    as_json: bool = flag_option("--json", "Print the command as one JSON object and run nothing."),
) -> None:
    """Follow a job's output until the job ends. Ctrl-C stops following; the job continues.

    \b
    Examples:
      imgkit logs
      imgkit logs 4711
      imgkit logs 4711_3@mn5
    """
    from imgkit_builder.base import process
    from imgkit_builder.job import submit, systems
    from imgkit_builder.project import history

    if not job_id:
        records = [record for record in submit.records() if record.answer is None]
        if not records:
            raise UsageError("no job was submitted from here", where="ID", hint="imgkit run prints the id")
        job_id = records[0].handle
        terminal.err(f"imgkit: job {job_id}, the last one")
    record = submit.record_of(job_id)
    argv = systems.named(record.system).log_source(record)
    if as_json:
        show({"id": record.handle, "command": argv}, as_json=True)
        return
    if record.remote:
        raise typer.Exit(follow(connected(record.remote), record))

    def has_ended() -> bool:
        return history.report(record, runner(record)).has_ended

    until = has_ended if can_follow_here(record) else None
    if until and until():
        argv, until = tuple(option for option in argv if option not in ("-f", "-F")), None
    terminal.err(f"imgkit: {shlex.join(argv)}")
    raise typer.Exit(process.attached(argv, until=until))


def verb_wait(
    job_id: str = typer.Argument(metavar="ID"),
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
    from imgkit_builder.job import quoting, submit
    from imgkit_builder.project import history

    limit_s = quoting.seconds(timeout, where="--timeout") if timeout else None
    record = submit.record_of(job_id)
    try:
        report = history.wait(record, runner(record), limit_s=limit_s)
    except KeyboardInterrupt:
        terminal.err(f"imgkit: {record.handle} continues; imgkit wait {record.handle}")
        raise typer.Exit(INTERRUPTED) from None
    _keep_state(record, report)
    if as_json:
        show(_reported(report), as_json=True)
    elif report.has_ended:
        terminal.out(history.ending_text(report))
    if not report.has_ended:
        raise ToolFailed(
            f"{record.handle} has not ended after {timeout}", hint=f"imgkit wait {record.handle}"
        )
    raise typer.Exit(0 if report.record.state == "succeeded" else 1)


def verb_cancel(
    job_id: str = typer.Argument(metavar="ID"),
    as_json: bool = JSON,
) -> None:
    """End a job.

    \b
    Examples:
      imgkit cancel 4711
    """
    from imgkit_builder.job import submit, systems

    record = submit.record_of(job_id)
    argv = systems.named(record.system).cancel_command(record)
    if not as_json:
        terminal.err(f"imgkit: {_remote_prefix(record)}{shlex.join(argv)}")
    answer = runner(record)(argv)
    if as_json:
        data = {"command": argv, "exit_code": answer.returncode, "output": answer.output}
        show(data, as_json=True)
    else:
        terminal.passing()(answer.output.encode())
    raise typer.Exit(answer.returncode)

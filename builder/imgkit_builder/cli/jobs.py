"""``imgkit status``, ``wait``, ``logs`` and ``cancel``: follow jobs that were submitted from here."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from imgkit_builder.base.process import INTERRUPTED
from imgkit_builder.cli.common import JSON, flag_option, show
from imgkit_builder.cli.runs import job_data, jobs_table
from imgkit_entrypoints import terminal
from imgkit_entrypoints.errors import ImgkitError, ToolFailed, UsageError

if TYPE_CHECKING:
    from imgkit_builder.base.process import Finished
    from imgkit_builder.jobs.history import JobReport
    from imgkit_builder.jobs.remote.connection import Connection
    from imgkit_builder.jobs.submitted import SubmittedJob


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
    from imgkit_builder.jobs import history, records

    if not job_id:
        _own_jobs(as_json=as_json)
        return
    record = records.find(job_id)
    report = history.report(record, runner(record))
    keep_state(record, report.record)
    if as_json:
        show(_reported(report), as_json=True)
        return
    if report.argv:
        terminal.err(f"imgkit: {_remote_prefix(record)}{shlex.join(report.argv)}")
        terminal.passing()(report.text.encode())
    if report.has_ended:
        terminal.out(history.ending_text(report))


def _own_jobs(*, as_json: bool) -> None:
    """Show each job that had not ended when imgkit last looked, with its state now.

    A remote that cannot be reached is reported once, and is not asked again.
    """
    from imgkit_builder.jobs import history, records
    from imgkit_builder.jobs.remote.connection import Cut

    jobs, silent, complete = [], set(), True
    for record in filter(_may_run, records.newest_first()):
        now = record
        try:
            if record.job.remote not in silent:
                now = history.refresh_state(record, runner(record))
        except ImgkitError as error:
            terminal.err(f"imgkit: {record.job.handle}: {error.what}")
            complete = False
            if isinstance(error, Cut):
                silent.add(record.job.remote)
        keep_state(record, now)
        jobs.append(now)
    nothing = "no job waits or runs; imgkit runs lists those that have ended"
    data = {"jobs": [job_data(record) for record in jobs], "complete": complete}
    show(data, *(jobs_table(jobs) if jobs else (nothing,)), as_json=as_json)
    if not complete:
        raise typer.Exit(ToolFailed.exit_code)


def _remote_prefix(record: SubmittedJob) -> str:
    return f"on {record.job.remote}: " if record.job.remote else ""


def _may_run(record: SubmittedJob) -> bool:
    """Return whether the job had not ended when imgkit last looked; for a week where nobody can know."""
    from imgkit_builder.jobs import systems
    from imgkit_builder.jobs.submitted import FINAL_STATES

    if record.state in FINAL_STATES:
        return False
    try:
        reports_state = record.answer is None and systems.named(record.job.system).reports_state
    except ImgkitError:  # its plug-in is gone
        reports_state = False
    week_ago = datetime.now(timezone.utc) - timedelta(days=7)
    return reports_state or record.submitted >= week_ago.isoformat()


def _reported(report: JobReport) -> dict[str, Any]:
    """Return what ``imgkit status ID --json`` prints."""

    record = report.record
    data: dict[str, Any] = {
        "id": record.job.handle,
        "state": record.state,
        "exit_code": report.code if report.has_ended else None,
        "command": list(report.argv),
        "output": report.text,
        "folder": None if record.job.array else str(record.job.run_folder),
    }
    if record.code is not None:
        data["code"] = dataclasses.asdict(record.code)
    return data


def keep_state(record: SubmittedJob, now: SubmittedJob) -> None:
    """Save the state of `record` for ``imgkit runs`` if it has changed."""
    from imgkit_builder.jobs import records

    # The record of a task is derived from that of an array job, which alone is kept.
    if now.state != record.state and records.is_kept(record):
        # A folder that cannot be written loses only that.
        with contextlib.suppress(OSError):
            records.keep(now)


def may_ask() -> bool:
    """Return whether there is a person whom ssh can ask for a password or a second factor."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def connected(name: str) -> Connection:
    """Return how to reach the remote `name`."""
    from imgkit_builder.jobs.remote import config, connection

    return connection.connect(config.find(name), ask=may_ask())


def runner(record: SubmittedJob) -> Callable[[Sequence[str]], Finished]:
    """Return what runs a command where the job is."""
    from imgkit_builder.jobs import handle

    return handle.transport_of(record, may_ask=may_ask()).run


def can_follow(record: SubmittedJob) -> bool:
    """Return whether `follow` can; a job in pods has no output until a node has pulled the image."""
    from imgkit_builder.jobs import systems

    system = systems.named(record.job.system)
    return bool(record.job.remote) or (system.reports_state and system.log_source(record.job)[0] == "tail")


def follow(record: SubmittedJob) -> int:
    """Show the job's output, here or on its remote, until it ends; return imgkit's exit code."""
    from imgkit_builder.jobs import history
    from imgkit_builder.jobs.remote import jobs
    from imgkit_builder.jobs.remote.connection import Cut

    def say(text: str) -> None:
        terminal.err(f"imgkit: {text}")

    verbs = "logs|status|cancel|fetch" if record.job.remote else "logs|status|cancel"
    back = f"the job continues; imgkit {verbs} {record.job.handle}"
    say(f"job {record.job.handle}; Ctrl-C stops following; the job continues")
    run = runner(record)
    try:
        if record.job.remote:
            jobs.follow(connected(record.job.remote), record, terminal.passing(), say)
            report = history.report(record, run)
        else:
            _attach(record, run)
            report = history.wait(record, run)
    except KeyboardInterrupt:
        say(back)
        return INTERRUPTED
    except Cut as error:
        raise Cut(error.what, where=error.where, hint=f"{back}\n{error.hint}") from error
    keep_state(record, report.record)
    say(history.ending_text(report))
    if report.record.state == "failed":
        for hint in history.failure_hints(record, run):
            say(hint)
    return 0 if report.record.state in ("succeeded", "ended") else 1


def _attach(record: SubmittedJob, run: Callable[[Sequence[str]], Finished]) -> None:
    """Show the output of a job of this machine until it ends."""
    from imgkit_builder.base import process
    from imgkit_builder.jobs import history, systems

    def has_ended() -> bool:
        return history.report(record, run).has_ended

    argv, is_over = systems.named(record.job.system).log_source(record.job), False
    for pause_s in history.poll_pauses():
        is_over = has_ended()
        if is_over or Path(argv[-1]).exists():
            break
        time.sleep(pause_s)
    if is_over:
        argv = tuple(option for option in argv if option not in ("-f", "-F"))
    process.attached(argv, until=None if is_over else has_ended)


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
    from imgkit_builder.jobs import records, systems

    if not job_id:
        with_id = [record for record in records.newest_first() if record.answer is None]
        if not with_id:
            raise UsageError("no job was submitted from here", where="ID", hint="imgkit run prints the id")
        job_id = with_id[0].job.handle
        terminal.err(f"imgkit: job {job_id}, the last one")
    record = records.find(job_id)
    argv = systems.named(record.job.system).log_source(record.job)
    if as_json:
        show({"id": record.job.handle, "command": argv}, as_json=True)
        return
    if can_follow(record):
        raise typer.Exit(follow(record))
    terminal.err(f"imgkit: {shlex.join(argv)}")
    raise typer.Exit(process.attached(argv))


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
    from imgkit_builder.jobs import history, quoting, records

    limit_s = quoting.seconds(timeout, where="--timeout") if timeout else None
    record = records.find(job_id)
    try:
        report = history.wait(record, runner(record), limit_s=limit_s)
    except KeyboardInterrupt:
        terminal.err(f"imgkit: {record.job.handle} continues; imgkit wait {record.job.handle}")
        raise typer.Exit(INTERRUPTED) from None
    keep_state(record, report.record)
    if not report.has_ended:
        raise ToolFailed(
            f"{record.job.handle} has not ended after {timeout}", hint=f"imgkit wait {record.job.handle}"
        )
    if as_json:
        show(_reported(report), as_json=True)
    else:
        terminal.out(history.ending_text(report))
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
    from imgkit_builder.jobs import history, records, systems

    record = records.find(job_id)
    argv = systems.named(record.job.system).cancel_command(record.job)
    if not as_json:
        terminal.err(f"imgkit: {_remote_prefix(record)}{shlex.join(argv)}")
    answer = history.cancel(record, runner(record))
    if as_json:
        data = {"command": argv, "exit_code": answer.returncode, "output": answer.output}
        show(data, as_json=True)
    else:
        terminal.passing()(answer.output.encode())
    raise typer.Exit(answer.returncode)

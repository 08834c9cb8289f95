"""``imgkit submit``, ``status``, ``logs`` and ``cancel``: run an image on N nodes."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shlex
import sys
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from imgkit_builder.cli.common import columns, complete_names, show, terminable
from imgkit_builder.cli.job_flags import COMMAND, JobCommand, read_code
from imgkit_builder.cli.project import (
    TRUST_FOLDER,
    project_here,
    values_data,
    values_table,
)
from imgkit_builder.cli.remote import asked, connected, follow, runner
from imgkit_entrypoints import terminal
from imgkit_entrypoints.errors import ImgkitError, ToolFailed, UsageError

if TYPE_CHECKING:
    from imgkit_builder.job.request import AnyRequest, CodeRecord, ImageJob, Job, Script, SubmittedJob
    from imgkit_builder.project.history import Ending
    from imgkit_builder.project.measured import SlowNow
    from imgkit_builder.project.toml_file import ProjectFile

COMMAND_CLASSES = {"submit": JobCommand}
"""The verb whose flags are not all in its signature."""

SCHEMA = 1

RECIPE: str = typer.Argument(
    "",
    metavar="[RECIPE|X.sif|X.sqsh]",
    autocompletion=complete_names,
    help="A shipped recipe, a recipe's file, or a .sif or .sqsh to run on its system (default: "
    "the recipe in imgkit.toml, whose other values then apply, too).",
)


def verb_submit(
    flags: typer.Context,
    recipe: str = RECIPE,
    command: list[str] = typer.Argument(None, metavar="-- COMMAND...", help="dist-... and its arguments."),
    dry_run: bool = typer.Option(
        False, "--dry-run", help="Print exactly what would be submitted, then exit."
    ),
    verbose: bool = typer.Option(
        False, "--verbose", "-v", help="With --dry-run: also show every resolved value and its source."
    ),
    trust_folder: bool = TRUST_FOLDER,
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Submit a job that runs COMMAND on N nodes, and print its id.

    Values come from the recipe's system section; flags override them. Requests
    that the cluster cannot satisfy fail now, not in the queue. Without a scheduler
    the command runs here, and imgkit exits with its exit code.

    \b
    Examples:
      imgkit submit mn5 --nodes 2 -A bsc98 --qos acc_debug --time 10m -- dist-pi
      imgkit submit mn5 -A bsc98 --qos acc_debug --time 10m --dry-run -- dist-bench
      imgkit submit mn5 -A bsc98 --qos acc_debug --time 1h --interactive
      imgkit submit mn5 -A bsc98 --qos gp_debug --time 1h --sif mn5.tar
      imgkit submit mine.sif --time 1h -- dist-bench
      imgkit submit rcp --nodes 4 --image registry.example.org/me/rcp:1 -- dist-train --steps 1000
      imgkit submit olivia-eap --nodes 2 --time 30m --pbs-start pbsdsh -- dist-hello
      imgkit submit lambda --hosts 10.0.0.1,10.0.0.2 -- dist-hello
      imgkit submit lambda --hosts 10.0.0.1,10.0.0.2 --ssh -- dist-hello
      imgkit submit cpu --nproc 2 -- dist-train --steps 100
    """
    from imgkit_builder.base import process
    from imgkit_builder.job import submit
    from imgkit_builder.job.request import Job, Request

    if verbose and not dry_run:
        raise UsageError(
            "--verbose needs --dry-run", where="--verbose", hint="imgkit submit --dry-run -v ..."
        )
    given = _given(recipe, flags, command, trusted=trust_folder)
    request = given.request
    code = read_code(request, as_json=as_json) if isinstance(request, Request) else None
    prepared = submit.prepare(given.recipe, request, code)
    job, script = prepared.job, prepared.script
    if dry_run and (foreign := submit.foreign_image(job)):  # the submission refuses it
        job = dataclasses.replace(job, warnings=(*job.warnings, f"{job.image}: {foreign.what}"))
    for warning in job.warnings:
        terminal.err(f"imgkit: {warning}")
    if dry_run:
        prepared = submit.look_into(dataclasses.replace(prepared, job=job))
        _show(prepared.job, prepared.script, given, values=verbose, as_json=as_json)
        return
    submit.before_submission(job)
    prepared = submit.look_into(prepared)
    job, script = prepared.job, prepared.script
    with terminable():
        submit.write_files(prepared)
    if script.remote:
        raise typer.Exit(_fanned_out(script))
    if script.foreground:
        terminal.err(f"imgkit: {shlex.join(script.submit)}")
        process.become(script.submit, cwd=job.directory)
    record = submit.send(job, script)
    # Printed before anything else can fail: the job exists now.
    if record.answer is None:
        show({**_described(job, script), "id": record.id}, record.id, as_json=as_json)
    try:
        submit.keep(record)
    except OSError as error:
        # The job runs all the same, so its own system answers.
        terminal.err(
            "imgkit: the job is submitted, but its record cannot be saved "
            f"({error.filename}: {error.strerror}): imgkit status, logs and cancel will not know it",
            "  -> next time: export XDG_STATE_HOME=FOLDER",
        )
        submit.need_id(record)
        return
    submit.need_id(record)
    if as_json:
        return
    if isinstance(job, Job) and job.request.interactive:
        # The comments above the command explain how to get in.
        terminal.err(*(text for text in script.text.splitlines() if text.startswith("#")))
    follow = "; ".join(f"imgkit {verb} {record.id}" for verb in ("status", "logs", "cancel"))
    terminal.err(f"imgkit: {follow}")


def _fanned_out(script: Script) -> int:
    """Run the lines of all hosts; each line of output begins with the host's name."""
    from imgkit_builder.base import process
    from imgkit_builder.job.ssh import fanout

    process.need("ssh", "apt-get install openssh-client")

    def show(host: str, text: bytes, error: bool) -> None:
        # On a terminal a carriage return ends a line of a program, and each line has its host.
        is_terminal = sys.stderr.isatty() if error else sys.stdout.isatty()
        for line in re.split(rb"\r+", text.rstrip(b"\r")) if is_terminal else (text,):
            terminal.passing(to_err=error)(f"{host}: ".encode() + line + b"\n")

    def say(text: str) -> None:
        terminal.err(f"imgkit: {text}")

    return fanout.run(script.remote, show=show, say=say, sent=script.sent, head_decides=script.head_decides)


def verb_status(
    job_id: str = typer.Argument(
        "", metavar="[ID]", help="Job id (default: your jobs, here and on remotes)."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Show a job, or all of your jobs that wait or run, here and on all remotes.

    Of a job that waits, the scheduler also prints its expected start; of one that has
    ended, how it ended. For dist-train it also lists current stragglers. A task of an
    array job has a separate id: 12_3, or 12[3].

    \b
    Examples:
      imgkit status
      imgkit status 4711
      imgkit status 4711_3@mn5
    """
    from imgkit_builder.job import submit, systems
    from imgkit_builder.project import history

    if not job_id:
        _own_jobs(as_json=as_json)
        return
    record = submit.record_of(job_id)
    run = runner(record)
    now = history.refresh_state(record, run)
    if now.state in history.FINAL:
        _ended(record, history.ending(now, run), as_json=as_json)
        return
    words = systems.named(record.system).status(record)
    _thin(words, as_json=as_json, remote=record.remote, code=record.code, slow=lambda: _slow(record))


def _own_jobs(*, as_json: bool) -> None:
    """Show each job that had not ended when imgkit last looked, with its state now."""
    from imgkit_builder.job import submit

    jobs, complete = asked([one for one in submit.records() if _may_run(one)])
    states = [one.state or ("submitted" if one.answer is None else "unknown") for one in jobs]
    rows = [
        {
            "id": one.handle,
            "name": one.name,
            "state": state,
            "submitted": one.submitted or None,
            "command": list(one.command),
        }
        for one, state in zip(jobs, states, strict=True)
    ]
    table = [("JOB", "NAME", "STATE", "SUBMITTED", "COMMAND")]
    table += [
        (one.handle, one.name, state, one.submitted[:16].replace("T", " "), shlex.join(one.command))
        for one, state in zip(jobs, states, strict=True)
    ]
    nothing = "no job waits or runs; imgkit runs lists those that have ended"
    data = {"schema": SCHEMA, "jobs": rows, "complete": complete}
    show(data, *(columns(table) if jobs else (nothing,)), as_json=as_json)
    if not complete:
        raise typer.Exit(ToolFailed.exit_code)


def _may_run(record: SubmittedJob) -> bool:
    """Whether the job had not ended when imgkit last looked; where nobody can know, for a week."""
    from imgkit_builder.job import systems
    from imgkit_builder.project import history

    if record.state in history.FINAL:
        return False
    try:
        known = record.answer is None and bool(systems.named(record.system).alive(record))
    except ImgkitError:  # its plug-in is gone
        known = False
    week_ago = datetime.now(timezone.utc) - timedelta(days=7)
    return known or record.submitted >= week_ago.isoformat()


def _ended(before: SubmittedJob, ending: Ending, *, as_json: bool) -> None:
    """Show how a job has ended, and keep that."""
    from imgkit_builder.job import submit, systems
    from imgkit_builder.project import history

    record = ending.record
    if record.state != before.state and not _is_task(record):
        with contextlib.suppress(OSError):
            submit.keep(record)
    folder = None if record.array else history.run_of(record)
    if as_json:
        data: dict[str, Any] = {"schema": SCHEMA, "command": ending.argv, "exit_code": 0}
        data |= {"output": ending.output, "state": record.state, "folder": str(folder) if folder else None}
        data |= {"code": dataclasses.asdict(record.code)} if record.code else {}
        show(data, as_json=True)
        return
    if ending.argv:
        there = f"on {record.remote}: " if record.remote else ""
        terminal.err(f"imgkit: {there}{shlex.join(ending.argv)}")
        terminal.passing()(systems.named(record.system).brief(ending.output).encode())
    why = {
        "done": "completed",
        "failed": "failed" if ending.code is None else f"failed with exit code {ending.code}",
        "ended": "has ended; neither the scheduler nor the run folder knows how",
    }[record.state]
    by = "" if ending.argv or record.state == "ended" else ", by its run folder"
    by = by if ending.code is not None else ""
    terminal.out(f"{record.handle} {why}{by}{f'; run folder: {folder}' if folder else ''}")


def _is_task(record: SubmittedJob) -> bool:
    """Whether the record is derived from that of an array job, which alone is kept."""
    from imgkit_builder.job import submit

    return record.handle not in (one.handle for one in submit.records())


def verb_logs(
    job_id: str = typer.Argument("", metavar="[ID]", help="Job id (default: the job submitted last)."),
    as_json: bool = typer.Option(
        False, "--json", help="Print the command as one JSON object and run nothing."
    ),
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
        found = [one for one in submit.records() if one.answer is None]
        if not found:
            raise UsageError("no job was submitted from here", where="ID", hint="imgkit submit prints the id")
        job_id = found[0].handle
        terminal.err(f"imgkit: job {job_id}, the last one")
    record = submit.record_of(job_id)
    system = systems.named(record.system)
    words = system.logs(record)
    if as_json:
        show({"schema": SCHEMA, "id": record.handle, "command": words}, as_json=True)
        return
    if record.remote:
        raise typer.Exit(follow(connected(record.remote), record))

    def over() -> bool:
        return history.refresh_state(record, runner(record)).state in history.FINAL

    if words[0] != "tail" or not system.alive(record):
        _thin(words, as_json=False)
    if over():
        words = tuple(word for word in words if word not in ("-f", "-F"))
        _thin(words, as_json=False)
    terminal.err(f"imgkit: {shlex.join(words)}")
    raise typer.Exit(process.attached(words, until=over))


def verb_cancel(
    job_id: str = typer.Argument(metavar="ID"),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """End a job.

    \b
    Examples:
      imgkit cancel 4711
    """
    from imgkit_builder.job import submit, systems

    record = submit.record_of(job_id)
    _thin(systems.named(record.system).cancel(record), as_json=as_json, remote=record.remote)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _GivenJob:
    """What the command line asks for, and the imgkit.toml that fills what is missing."""

    recipe: str
    flags: AnyRequest
    """The flags alone."""
    project: ProjectFile | None
    """None where a recipe was named: the file then does not count."""

    @property
    def request(self) -> AnyRequest:
        """The flags, over the file."""
        from imgkit_builder.project import origins

        return origins.under(self.flags, self.project)


def _given(recipe: str, flags: typer.Context, command: list[str] | None, *, trusted: bool) -> _GivenJob:
    from imgkit_builder.job.request import request_of

    run, image_flags = flags.obj
    argv = (*(command or ()), *flags.meta[COMMAND])
    request = request_of(dataclasses.replace(run, command=argv), image_flags)
    project = None if recipe else project_here(recipe="", trusted=trusted)
    if not recipe and not (project and project.recipe):
        raise UsageError(
            "no recipe given, and none set by an imgkit.toml here",
            where="RECIPE",
            hint="name one (imgkit list), or write the file (imgkit init --recipe RECIPE)",
        )
    return _GivenJob(recipe=recipe or (project.recipe if project else ""), flags=request, project=project)


def _show(job: Job | ImageJob, script: Script, given: _GivenJob, *, values: bool, as_json: bool) -> None:
    """Print `script` on stdout; `values` adds each value and its source, on stderr or to the JSON object."""
    from imgkit_builder.project import origins

    rows = tuple(origins.of_job(job, given.flags, given.project)) if values else ()
    if as_json:
        data = _described(job, script)
        show({**data, "values": values_data(rows)} if values else data, as_json=True)
        return
    terminal.err(*values_table(rows))
    terminal.document(script.text)


def _described(job: Job | ImageJob, script: Script) -> dict[str, Any]:
    from imgkit_builder.job.request import Job

    run: dict[str, Any] = {}
    if isinstance(job, Job):
        run = {
            "nodes": job.size.training,
            "spares": job.size.spares,
            "gpus": job.gpus,
            "cpus": job.cpus,
            "code": dataclasses.asdict(job.code) if job.code else None,
        }
    return {
        "schema": SCHEMA,
        "recipe": job.recipe.name,
        "scheduler": job.recipe.system.scheduler,
        "name": job.name,
        **run,
        "time": job.time,
        "image": job.image,
        "submit": list(script.submit),
        "script": script.text,
        "warnings": list(job.warnings),
    }


def _slow(record: SubmittedJob) -> SlowNow:
    """The ranks of the job that are slow now; None if the job writes nothing about it."""
    from imgkit_builder.project import history, measured

    if "dist-train" not in record.command:
        return None
    file = history.run_of(record) / measured.METRICS
    if not record.remote:
        return measured.slow_ranks(measured.last_lines(file))
    from imgkit_builder.remote import jobs

    found = jobs.finished(connected(record.remote), ("tail", "-n", "5", "--", str(file)))
    return measured.slow_ranks(found.output.encode())


def _thin(
    words: tuple[str, ...],
    *,
    as_json: bool,
    remote: str = "",
    code: CodeRecord | None = None,
    slow: Callable[[], SlowNow] = lambda: None,
) -> NoReturn:
    """Print the command, run it here or on `remote`, and exit with its exit code; `slow` finds slow ranks."""
    from imgkit_builder.base import process

    if not as_json:
        there = f"on {remote}: " if remote else ""
        terminal.err(f"imgkit: {there}{shlex.join(words)}")
    if not as_json and not remote:
        exit_code = process.attached(words)
        _show_slow(slow())
        raise typer.Exit(exit_code)
    if remote:
        from imgkit_builder.remote import jobs

        done = jobs.finished(connected(remote), words)
    else:
        done = process.run(words, check=False)
    data = {"schema": SCHEMA, "command": words, "exit_code": done.returncode, "output": done.output}
    if code is not None:
        data["code"] = dataclasses.asdict(code)
    if (ranks := slow()) is not None:
        data["slow"] = [dataclasses.asdict(one) for one in ranks]
    if as_json:
        show(data, as_json=True)
    else:
        terminal.passing()(done.output.encode())
        _show_slow(ranks)
    raise typer.Exit(done.returncode)


def _show_slow(ranks: SlowNow) -> None:
    for one in ranks or ():
        terminal.out(f"slow: {one.name}: {one.excess} (step {one.to_step})")

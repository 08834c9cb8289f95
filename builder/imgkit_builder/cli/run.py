"""``imgkit run`` and ``fetch``: from a recipe to a job here or on a remote, and its results back."""

from __future__ import annotations

import dataclasses
import functools
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from imgkit_builder.cli.common import (
    HERE,
    JSON,
    MB,
    columns,
    flag_option,
    name_argument,
    output_option,
    show,
    terminable,
)
from imgkit_builder.cli.job_flags import COMMAND, JobCommand, read_code
from imgkit_builder.cli.jobs import can_follow, connected, follow, may_ask
from imgkit_builder.cli.progress import reporter
from imgkit_builder.cli.project import TRUST_FOLDER, project_here, values_data, values_table
from imgkit_builder.workflow.build import BASE_HELP
from imgkit_entrypoints import terminal
from imgkit_entrypoints.errors import EXIT_NO, UsageError

if TYPE_CHECKING:
    from imgkit_builder.base.process import Finished
    from imgkit_builder.base.progress import Reporter
    from imgkit_builder.jobs.handle import JobHandle
    from imgkit_builder.jobs.job import Job, Script
    from imgkit_builder.jobs.records import SubmittedJob
    from imgkit_builder.jobs.remote.config import Remote
    from imgkit_builder.jobs.remote_run import RunPlan
    from imgkit_builder.jobs.request import JobRequest
    from imgkit_builder.jobs.scaling import ScalingRun
    from imgkit_builder.project.origins import ValueSource
    from imgkit_builder.project.toml_file import ProjectFile

COMMAND_CLASSES = {"run": JobCommand}
"""The verb whose flags are not all in its signature."""
_UNKNOWN_HERE = ("image", "directory")
"""Values that are known only after a look at the remote."""
_NOT_SCALED = ("--nodes", "--interactive", "--sif", "--build", "--base-from")
"""Flags of another kind of job, and the one that ``--scaling`` replaces."""
_NOT_ON_REMOTES = ("--interactive", "--directory", "--sif", "--build", "--base-from")
"""Flags for jobs of this machine: on a remote, imgkit chooses the folder and sends the image itself."""


def verb_run(
    flags: typer.Context,
    recipe: str = name_argument(
        "[RECIPE|X.sif|X.sqsh|ARCHIVE] -- COMMAND...",
        "Image to run (default: the recipe of imgkit.toml, or the remote's). With --on, an archive "
        "or OCI folder becomes a .sif here.",
        "",
    ),
    on: str = typer.Option(
        "",
        "--on",
        metavar="NAME",
        help="The remote (imgkit remote add; default: that of imgkit.toml), or here: this machine.",
    ),
    base: str | None = typer.Option(None, metavar="REF", help=f"With --on: {BASE_HELP}"),
    rebuild: bool = flag_option(
        "--rebuild", "With --on: build again, which looks up moved tags and packages without a version."
    ),
    detach: bool = flag_option("--detach", "Submit, print the job's id, and do not follow its output."),
    bwlimit: float | None = typer.Option(
        None, metavar="MB/s", min=0.01, help="With --on: upload bandwidth limit in MB/s."
    ),
    dry_run: bool = flag_option("--dry-run", "Print exactly what would be submitted, then exit."),
    verbose: bool = typer.Option(
        False, "--verbose", "-v", help="With --dry-run: also show every resolved value and its source."
    ),
    scaling: str = typer.Option(
        "",
        metavar="N,N,...|DIR",
        help="Run COMMAND on each of these numbers of nodes, wait, and report the parallel efficiency. DIR: "
        "wait for the jobs of an earlier report, and write it.",
    ),
    trust_folder: bool = TRUST_FOLDER,
    as_json: bool = flag_option(
        "--json", "Print one JSON object and do not follow; progress as JSON lines on stderr."
    ),
) -> None:
    """Run COMMAND in the image on N nodes, and follow its output.

    With --on, or a remote in imgkit.toml: build, upload what the cluster lacks, and
    submit there. Else the recipe's scheduler takes the job on this machine. Without a
    scheduler, the command runs here. Ctrl-C stops following; the job continues. The
    exit code is 1 if the job failed.

    Values that no flag sets come from an imgkit.toml here, or in a parent folder of
    the same git repository (imgkit init), unless RECIPE is named without --on; then
    from the recipe's system section.
    Requests that the cluster cannot satisfy fail now, not in the queue.

    \b
    Examples:
      imgkit run
      imgkit run mn5 --on mn5 --nodes 2 -A bsc98 --qos acc_debug --time 10m -- dist-train
      imgkit run --on mn5 --time 10m --code . -- dist-run /workspace/train.py
      imgkit run mine.sif --on mn5 --time 10m --detach -- dist-bench
      imgkit run mn5 -A bsc98 --qos acc_debug --time 10m --dry-run -- dist-bench
      imgkit run mn5 -A bsc98 --qos acc_debug --time 1h --interactive
      imgkit run mn5 -A bsc98 --qos gp_debug --time 1h --sif mn5.tar
      imgkit run rcp --nodes 4 --image registry.example.org/me/rcp:1 -- dist-train --steps 1000
      imgkit run lambda --hosts 10.0.0.1,10.0.0.2 -- dist-hello
      imgkit run cpu --nproc 2 -- dist-train --steps 100
      imgkit run --on mn5 --time 10m --scaling 1,2,4,8 -- dist-train --steps 500
    """
    from imgkit_builder.jobs.remote import config

    if verbose and not dry_run:
        raise UsageError("--verbose needs --dry-run", where="--verbose", hint="imgkit run --dry-run -v ...")
    # A recipe that is named for this machine is another one than the file's, and so are its values.
    reads_file = not recipe or on not in ("", HERE)
    project = project_here(recipe=recipe, trusted=trust_folder) if reads_file else None
    name = on or (project.values.remote if project else "")
    options = _Options(
        recipe=recipe,
        on=on,
        base=base,
        rebuild=rebuild,
        detach=detach,
        bwlimit=bwlimit,
        dry_run=dry_run,
        verbose=verbose,
        as_json=as_json,
        scaling=scaling,
    )
    run: JobRequest = flags.obj.changed(command=flags.meta[COMMAND])
    if not run.launch.command and re.fullmatch(r"dist-\w+|.+\.py", recipe):
        start = f"dist-run {recipe}" if recipe.endswith(".py") else recipe
        hint = f"a command follows --: imgkit run -- {start}"
        raise UsageError(f"{recipe} is a command, not a recipe", where="RECIPE", hint=hint)
    if scaling:
        raise typer.Exit(_run_sizes(options, "" if name == HERE else name, run, project))
    if name and name != HERE:
        _run_there(options, config.find(name), run, project)
    else:
        _run_here(options, run, project)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """The options of ``imgkit run`` that are not those of a job."""

    recipe: str
    on: str
    base: str | None
    rebuild: bool
    detach: bool
    bwlimit: float | None
    dry_run: bool
    verbose: bool
    as_json: bool
    scaling: str


def _run_there(options: _Options, remote: Remote, run: JobRequest, project: ProjectFile | None) -> None:
    """Build, send what `remote` lacks, submit there, and follow."""
    from imgkit_builder.base.flags import flags_in
    from imgkit_builder.jobs import remote_run
    from imgkit_builder.jobs.remote import connection
    from imgkit_builder.project import origins

    excess = [name for name in flags_in(run) if name in _NOT_ON_REMOTES]
    if excess:
        raise UsageError(
            f"{excess[0]} cannot be combined with a remote",
            where=excess[0],
            hint=f"leave it out; or, on the cluster itself, imgkit run --on {HERE} ...",
        )
    plan = remote_run.plan(options.recipe, origins.under(run, project), remote.recipe)
    script = remote_run.check(plan) if not options.dry_run else None
    if script is None:
        _show_early(options, remote, plan, run, project)
        return
    code = read_code(plan.request, as_json=options.as_json)
    source = "--on" if options.on else "imgkit.toml"
    terminal.err(
        f"imgkit: {plan.source} on {remote.name} ({source}), submitted there with {script.submit[0]}"
    )
    limit = None if options.bwlimit is None else options.bwlimit * MB
    far = connection.connect(
        remote_run.with_transfer_host(remote, plan), ask=may_ask(), max_bytes_per_s=limit
    )
    if far.unshared_reason:
        terminal.err(f"imgkit: every ssh command opens its own connection: {far.unshared_reason}")
    with terminable(), reporter(as_json=options.as_json) as report:
        record, job = remote_run.run(
            plan,
            far,
            base=options.base,
            code=code,
            report=report,
            rebuild=options.rebuild,
        )
    followed = not (options.as_json or options.detach or record.array)
    _submitted(
        record,
        {
            "id": record.handle,
            "image": job.container.image,
            "code": dataclasses.asdict(job.container.code) if job.container.code else None,
            "folder": str(job.directory),
            "name": job.name,
        },
        options,
        followed=followed,
    )
    if followed:
        raise typer.Exit(follow(record))


def _run_sizes(options: _Options, remote: str, run: JobRequest, project: ProjectFile | None) -> int:
    """Submit the jobs of ``--scaling``, or find those of the folder that it names; return the exit code."""
    from imgkit_builder.base.flags import flags_in
    from imgkit_builder.base.process import INTERRUPTED
    from imgkit_builder.jobs import scaling

    folder = Path(options.scaling)
    is_report = folder.is_dir()
    excess = [name for name in flags_in(run) if is_report or name in _NOT_SCALED]
    used: dict[str, object] = {"--bwlimit": options.bwlimit, "--verbose": options.verbose}
    used["--rebuild"] = options.rebuild
    if is_report:
        used |= {"RECIPE": options.recipe, "COMMAND": run.launch.command}
        used |= {"--detach": options.detach, "--dry-run": options.dry_run}
    excess += [name for name, value in used.items() if value]
    if excess:
        message = f"{excess[0]} cannot be combined with --scaling {options.scaling}"
        raise UsageError(message, where=excess[0], hint="leave it out")
    scaled = None
    with terminable(), reporter(as_json=options.as_json) as report:
        try:
            if not is_report:
                for created, scaled in _submit_sizes(options, remote, run, project, report):
                    folder, size = created, scaled.sizes[0]
                    report.note(f"{scaling.nodes_text(size.nodes)}: {size.job or size.state}")
            if options.dry_run:
                return 0
            if not options.detach:
                report.note(
                    f"Ctrl-C leaves the jobs; imgkit run --scaling {shlex.quote(str(folder))} goes on"
                )
            result = scaled if options.detach and scaled else scaling.finish(folder, report)
        except KeyboardInterrupt:
            if scaled or is_report:
                ids = " ".join(size.job for size in scaled.sizes if size.job) if scaled else ""
                terminal.err(f"imgkit: the jobs continue: {ids}")
            return INTERRUPTED
    lines = [*columns(scaling.table(result)), *scaling.verdict(result)]
    data = {**dataclasses.asdict(result), "folder": str(folder)}
    show(data, *([str(folder)] if options.detach else lines), as_json=options.as_json)
    if options.detach:
        terminal.err(f"imgkit: once the jobs have ended: imgkit run --scaling {folder}")
    else:
        terminal.err(f"imgkit: {folder / scaling.PAGE_FILE}, {folder / scaling.CHART_FILE}")
    return 0 if options.detach or all(size.is_complete for size in result.sizes) else EXIT_NO


def _submit_sizes(
    options: _Options, remote: str, run: JobRequest, project: ProjectFile | None, report: Reporter
) -> Iterator[tuple[Path, ScalingRun]]:
    """Check the jobs of all sizes, then submit them; a dry run prints their scripts."""
    from imgkit_builder.base import process
    from imgkit_builder.jobs import handle as jobs
    from imgkit_builder.jobs import scaling
    from imgkit_builder.jobs.remote import jobs as remote_jobs
    from imgkit_builder.project import origins

    recipe = options.recipe or (project.recipe if project and not remote else "")
    if not recipe and not remote:
        raise UsageError("no recipe given", where="RECIPE", hint="imgkit run RECIPE --scaling 1,2 -- COMMAND")
    request = origins.under(run, project)
    code = read_code(request, as_json=options.as_json)
    sizes = scaling.parse_sizes(options.scaling)
    planned = scaling.plan(recipe, request, sizes, on=remote, code=code)
    largest = planned[-1][0]
    for warning in largest.warnings if options.dry_run or not remote else ():
        report.note(warning)
    if options.dry_run:
        if options.as_json:
            show({"jobs": [_described(job, script) for job, script in planned]}, as_json=True)
            return
        for job, script in planned:
            terminal.err(f"imgkit: {scaling.nodes_text(job.allocation.nodes)}, in {job.directory}:")
            terminal.document(script.text)
        return
    run_there: Callable[[Sequence[str]], Finished] = functools.partial(process.run, check=False)
    if remote:
        far = connected(remote)
        far.login()  # may ask for a second factor, once
        run_there = functools.partial(remote_jobs.finished, far)
    scaling.refuse_unstartable(*planned[-1], run_there)

    def start(nodes: int) -> JobHandle:
        sized = request.changed(nodes=str(nodes), yes=True)  # a person has agreed to the code
        # The largest job is the first: on a remote it reports the warnings, and what is sent for all.
        stages = report if remote and nodes == largest.allocation.nodes else None
        base = options.base or ""
        return jobs.run(recipe, sized, on=remote, base=base, report=stages)

    yield from scaling.submit(planned, start)


def _show_early(
    options: _Options, remote: Remote, plan: RunPlan, run: JobRequest, project: ProjectFile | None
) -> None:
    """Print the script of a job on a remote, as far as it is known before a look there."""
    from imgkit_builder.jobs import systems
    from imgkit_builder.project import origins

    job = plan.early
    first = (
        origins.of_word("remote", remote.name, flag="--on" if options.on else "", project=project),
        origins.of_word("recipe", plan.source, flag="RECIPE" if options.recipe else "", project=project),
    )
    values = origins.of_job(job, run, project)
    resolved = {"image"} if plan.remote_image else set()
    rows = (*first, *(row for row in values if row.name not in {*_UNKNOWN_HERE} - resolved))
    script = systems.named(job.system).script(job)
    terminal.err(f"imgkit: {plan.home} stands for the folder on {remote.name}")
    _show(job, script, rows if options.verbose else (), as_json=options.as_json)


def _run_here(options: _Options, run: JobRequest, project: ProjectFile | None) -> None:
    """Submit the job to the scheduler of this machine, or start it here where there is none."""
    from imgkit_builder.base import process
    from imgkit_builder.jobs import submit
    from imgkit_builder.project import origins

    for name, value in (
        ("--base", options.base),
        ("--rebuild", options.rebuild),
        ("--bwlimit", options.bwlimit),
    ):
        if value:
            raise UsageError(f"{name} is for a remote", where=name, hint=f"imgkit run --on NAME {name} ...")
    recipe = options.recipe or (project.recipe if project else "")
    if not recipe:
        raise UsageError(
            "no recipe given, and none set by an imgkit.toml here",
            where="RECIPE",
            hint="name one (imgkit list), or write the file (imgkit init --recipe RECIPE)",
        )
    request = origins.under(run, project)
    code = None if request.image_flag else read_code(request, as_json=options.as_json)
    prepared = submit.prepare(recipe, request, code)
    job, script = prepared.job, prepared.script
    if options.dry_run and (foreign := submit.foreign_image(job)):  # the submission refuses it
        job = dataclasses.replace(job, warnings=(*job.warnings, f"{job.container.image}: {foreign.what}"))
    for warning in job.warnings:
        terminal.err(f"imgkit: {warning}")
    if options.dry_run:
        prepared = submit.look_into(dataclasses.replace(prepared, job=job))
        rows = tuple(origins.of_job(job, run, project)) if options.verbose else ()
        _show(prepared.job, prepared.script, rows, as_json=options.as_json)
        return
    if not (script.foreground or script.remote):
        process.need(script.submit[0], _without_scheduler(recipe))
        terminal.err(
            f"imgkit: {recipe} on this machine, submitted with {script.submit[0]} "
            f"(its scheduler is {job.recipe.system.scheduler})"
        )
    elif options.detach:
        terminal.err("imgkit: --detach is not used: the command runs here, and imgkit ends with it")
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
    interactive = job.request.launch.interactive
    follows = not (options.as_json or options.detach or record.array or interactive)
    followed = follows and record.answer is None and can_follow(record)
    _submitted(record, {**_described(job, script), "id": record.id}, options, followed=followed)
    if followed:
        raise typer.Exit(follow(record))
    if interactive and not options.as_json:
        # The comments above the command explain how to get in.
        terminal.err(*(text for text in script.text.splitlines() if text.startswith("#")))


def _without_scheduler(recipe: str) -> str:
    """Return what to type where the recipe's scheduler is not on PATH."""
    from imgkit_builder.jobs.remote import config

    names = config.remotes()
    fitting = [name for name, remote in names.items() if remote.recipe == recipe] or list(names)
    remote = fitting[0] if fitting else "NAME"
    added = "" if fitting else "imgkit remote add NAME USER@HOST:DIR, then "
    return (
        f"{added}imgkit run {recipe} --on {remote} ... sends the job to the cluster; "
        "on a login node, load the module of the scheduler"
    )


def _submitted(record: SubmittedJob, data: dict[str, Any], options: _Options, *, followed: bool) -> None:
    """Print the id of a job that exists now, and save its record.

    Where the job's output is followed, that output has stdout to itself, so the id is on stderr alone.
    """
    from imgkit_builder.jobs import submit

    # Printed before anything else can fail.
    if record.answer is None and not followed:
        show(data, record.handle, as_json=options.as_json)
    try:
        submit.keep(record)
    except OSError as error:
        # The job runs all the same, so its own system answers.
        terminal.err(
            f"imgkit: the job {record.handle} is submitted, but its record cannot be saved "
            f"({error.filename}: {error.strerror}): imgkit status, logs and cancel will not know it",
            "  -> next time: export XDG_STATE_HOME=FOLDER",
        )
    submit.need_id(record)
    if not options.as_json:
        # The tasks of an array have an output each.
        verbs = ("status", "cancel") if record.array else ("status", "logs", "cancel")
        terminal.err("imgkit: " + "; ".join(f"imgkit {verb} {record.handle}" for verb in verbs))


def _show(job: Job, script: Script, rows: tuple[ValueSource, ...], *, as_json: bool) -> None:
    """Print `script` on stdout; `rows` are its values and their sources, on stderr or in the JSON object."""
    if as_json:
        data = _described(job, script)
        show({**data, "values": values_data(rows)} if rows else data, as_json=True)
        return
    terminal.err(*values_table(rows))
    terminal.document(script.text)


def _described(job: Job, script: Script) -> dict[str, Any]:
    run: dict[str, Any] = {}
    if not job.makes_image:
        run = {
            "nodes": job.allocation.size.training,
            "spares": job.allocation.size.spares,
            "gpus": job.allocation.gpus,
            "cpus": job.allocation.cpus,
            "code": dataclasses.asdict(job.container.code) if job.container.code else None,
        }
    return {
        "recipe": job.recipe.name,
        "scheduler": job.recipe.system.scheduler,
        "name": job.name,
        **run,
        "time": job.allocation.time,
        "image": job.container.image,
        "submit": list(script.submit),
        "script": script.text,
        "warnings": list(job.warnings),
    }


def _fanned_out(script: Script) -> int:
    """Run the lines of all hosts; each line of output begins with the host's name."""
    from imgkit_builder.base import process
    from imgkit_builder.jobs.systems import fanout

    process.need("ssh", "apt-get install openssh-client")

    def show(host: str, text: bytes, error: bool) -> None:
        # On a terminal a carriage return ends a line of a program, and each line has its host.
        is_terminal = sys.stderr.isatty() if error else sys.stdout.isatty()
        for line in re.split(rb"\r+", text.rstrip(b"\r")) if is_terminal else (text,):
            terminal.passing(to_err=error)(f"{host}: ".encode() + line + b"\n")

    def say(text: str) -> None:
        terminal.err(f"imgkit: {text}")

    return fanout.run(script.remote, show=show, say=say, sent=script.sent, head_decides=script.head_decides)


def verb_fetch(
    job_id: str = typer.Argument(metavar="ID"),
    output: Path | None = output_option("DIR", "Folder for the run's files (default: runs/NAME-ID here)."),
    checkpoints: bool = flag_option("--checkpoints", "Also fetch the checkpoints of a training."),
    as_json: bool = JSON,
) -> None:
    """Copy a remote job's run folder here: curves, metrics and output.

    Only new and changed files are sent. Nothing is deleted on either side.

    \b
    Examples:
      imgkit fetch 4711@mn5
    """
    from imgkit_builder.jobs import submit
    from imgkit_builder.jobs.remote import fetch

    record = submit.record_of(job_id)
    if not record.remote:
        raise UsageError(f"the job {job_id} ran here", where="ID", hint=f"its files: {record.directory}/runs")
    folder = output or Path("runs", f"{record.name}-{record.id}")
    far = connected(record.remote)
    far.login()
    record = dataclasses.replace(record, fetched=str(folder.absolute()))
    with reporter(as_json=as_json) as report:
        fetched = fetch.fetch(far, record, folder, checkpoints=checkpoints, report=report)
    submit.keep(record)  # imgkit runs finds the folder
    text = f"{folder}  {len(fetched.new)} of {fetched.files} files were new, {fetched.bytes / 1e6:.1f} MB"
    data = {
        "folder": str(folder),
        "files": fetched.files,
        "new": [str(path) for path in fetched.new],
        "bytes": fetched.bytes,
    }
    show(data, text, as_json=as_json)

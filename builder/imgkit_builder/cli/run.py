"""``imgkit run`` and ``fetch``: from a recipe to a job here or on a remote, and its results back."""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from imgkit_builder.base.flags import USUAL, flag
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
    with_leave,
)
from imgkit_builder.cli.jobs import can_follow, connected, follow, may_ask
from imgkit_builder.cli.options import COMMAND, JobCommand
from imgkit_builder.cli.progress import reporter
from imgkit_builder.cli.project import project_here, values_data, values_table
from imgkit_builder.jobs import code as code_folder
from imgkit_builder.jobs.request import JobRequest, SystemFlags
from imgkit_builder.workflow.build import BASE_HELP
from imgkit_entrypoints import terminal
from imgkit_entrypoints.errors import EXIT_NO, UsageError

if TYPE_CHECKING:
    from imgkit_builder.base.progress import Reporter
    from imgkit_builder.jobs.code import CodeFolder
    from imgkit_builder.jobs.job import Job, Script
    from imgkit_builder.jobs.prepared import PreparedJob
    from imgkit_builder.jobs.remote.config import Remote
    from imgkit_builder.jobs.scaling import ScalingRun
    from imgkit_builder.jobs.submitted import SubmittedJob
    from imgkit_builder.jobs.transport import Transport
    from imgkit_builder.project.origins import ValueSource
    from imgkit_builder.project.toml_file import ProjectFile

COMMAND_CLASSES = {"run": JobCommand}
"""The verb with a command behind ``--``."""
_NOT_SCALED = ("--nodes", "--interactive", "--sif", "--build", "--base-from")
"""Flags of another kind of job, and the one that ``--scaling`` replaces."""


def verb_run(
    context: typer.Context,
    recipe: str = name_argument(
        "[RECIPE|X.sif|X.sqsh|ARCHIVE] -- COMMAND...",
        "Image to run (default: the recipe of imgkit.toml, or the remote's). With --on, an archive "
        "or OCI folder becomes a .sif here.",
        "",
    ),
    *,
    request: JobRequest,
    system_flags: tuple[SystemFlags, ...] = (),
    options: _Options,
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

    if options.verbose and not options.dry_run:
        raise UsageError("--verbose needs --dry-run", where="--verbose", hint="imgkit run --dry-run -v ...")
    # A recipe that is named for this machine is another one than the file's, and so are its values.
    reads_file = not recipe or options.on not in ("", HERE)
    project = project_here(recipe=recipe, trusted=options.trust_folder) if reads_file else None
    name = options.on or (project.values.remote if project else "")
    options = dataclasses.replace(options, recipe=recipe)
    run = request.changed(command=context.meta[COMMAND], system_flags=system_flags)
    if not run.launch.command and re.fullmatch(r"dist-\w+|.+\.py", recipe):
        start = f"dist-run {recipe}" if recipe.endswith(".py") else recipe
        hint = f"a command follows --: imgkit run -- {start}"
        raise UsageError(f"{recipe} is a command, not a recipe", where="RECIPE", hint=hint)
    remote = config.find(name) if name and name != HERE else None
    if options.scaling:
        raise typer.Exit(_run_sizes(options, remote, run, project))
    _run_job(options, remote, run, project)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """The options of ``imgkit run`` that are not those of a job."""

    recipe: str = ""
    on: str = flag(
        "",
        metavar="NAME",
        group=USUAL,
        help="The remote (imgkit remote add; default: that of imgkit.toml), or here: this machine.",
    )
    base: str | None = flag(None, metavar="REF", help=f"With --on: {BASE_HELP}")
    rebuild: bool = flag(
        False, help="With --on: build again, which looks up moved tags and packages without a version."
    )
    detach: bool = flag(False, group=USUAL, help="Submit, print the job's id, and do not follow its output.")
    bwlimit: float | None = flag(
        None, metavar="MB/s", minimum=0.01, help="With --on: upload bandwidth limit in MB/s."
    )
    dry_run: bool = flag(False, group=USUAL, help="Print exactly what would be submitted, then exit.")
    verbose: bool = flag(
        False, "--verbose", "-v", help="With --dry-run: also show every resolved value and its source."
    )
    scaling: str = flag(
        "",
        metavar="N,N,...|DIR",
        help="Run COMMAND on each of these numbers of nodes, wait, and report the parallel efficiency. DIR: "
        "wait for the jobs of an earlier report, and write it.",
    )
    trust_folder: bool = flag(
        False, help="Use the imgkit.toml here and what it names even if other users can change them."
    )
    as_json: bool = flag(
        False, "--json", help="Print one JSON object and do not follow; progress as JSON lines on stderr."
    )


def read_code(request: JobRequest, *, as_json: bool) -> CodeFolder | None:
    """Return the code of ``--code``; None without it. Large code needs a person's yes, or ``--yes``."""
    if request.container.code is None:
        return None

    def read(large: bool) -> CodeFolder:
        with reporter(as_json=as_json) as report:
            return code_folder.read(request, large=large, report=report)

    return with_leave(read, large=request.container.yes, may_ask=not as_json)


def _run_job(
    options: _Options, remote: Remote | None, flags: JobRequest, project: ProjectFile | None
) -> None:
    """Submit the job to the scheduler of the remote or of this machine, or start it here without one."""
    from imgkit_builder.base import process
    from imgkit_builder.jobs import handle, submit
    from imgkit_builder.project import origins

    request = origins.under(flags, project)
    recipe = options.recipe if remote else _recipe_here(options, project)
    code = read_code(request, as_json=options.as_json)
    prepared = submit.prepare(
        recipe, request, code, remote=remote, base=options.base or "", rebuild=options.rebuild
    )
    limit = None if options.bwlimit is None else options.bwlimit * MB
    transport = handle.transport_to(remote, prepared, may_ask=may_ask(), max_bytes_per_s=limit)
    if options.dry_run:
        _show_dry_run(options, prepared, transport, flags, project)
        return
    _announce(options, prepared, transport, recipe)
    with terminable(), reporter(as_json=options.as_json) as report:
        ready = submit.make_ready(prepared, transport, report)
        script = ready.script
        record = None if script.foreground else submit.start(ready, transport, report)
    if script.remote:
        raise typer.Exit(_fanned_out(script))
    if record is None:
        terminal.err(f"imgkit: {shlex.join(script.submit)}")
        process.become(script.submit, cwd=ready.job.directory)
    _show_submitted(record, ready, options)


def _recipe_here(options: _Options, project: ProjectFile | None) -> str:
    """Return the recipe of a job on this machine.

    Raises
    ------
    UsageError : neither the command line nor imgkit.toml names one, or an option is for remotes only.
    """
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
    return recipe


def _announce(options: _Options, prepared: PreparedJob, transport: Transport, recipe: str) -> None:
    """Say on stderr what runs where.

    Raises
    ------
    ToolMissing : the scheduler's command is not on PATH.
    """
    from imgkit_builder.base import process
    from imgkit_builder.jobs.transport import Ssh

    job, script = prepared.job, prepared.script
    if isinstance(transport, Ssh):
        assert prepared.source is not None  # noqa: S101 - the job of a remote has one
        stated_by = "--on" if options.on else "imgkit.toml"
        terminal.err(
            f"imgkit: {prepared.source.title} on {transport.name} ({stated_by}), submitted there with "
            f"{script.submit[0]}"
        )
        if reason := transport.connection.unshared_reason:
            terminal.err(f"imgkit: every ssh command opens its own connection: {reason}")
    elif not script.foreground:
        process.need(script.submit[0], _without_scheduler(recipe))
        terminal.err(
            f"imgkit: {recipe} on this machine, submitted with {script.submit[0]} "
            f"(its scheduler is {job.recipe.system.scheduler})"
        )
    elif options.detach:
        terminal.err("imgkit: --detach is not used: the command runs here, and imgkit ends with it")


def _show_dry_run(
    options: _Options,
    prepared: PreparedJob,
    transport: Transport,
    flags: JobRequest,
    project: ProjectFile | None,
) -> None:
    """Print the script, for a remote as far as it is known before a look there; -v adds all values."""
    from imgkit_builder.jobs import image_source, submit
    from imgkit_builder.jobs.runtimes import runtime_of
    from imgkit_builder.project import origins

    source = prepared.source
    if source is None:
        if foreign := runtime_of(prepared.job).arch_error(prepared.job):  # the submission refuses it
            warning = f"{prepared.job.container.image}: {foreign.what}"
            job = dataclasses.replace(prepared.job, warnings=(*prepared.job.warnings, warning))
            prepared = dataclasses.replace(prepared, job=job)
        prepared = submit.look_into(prepared, transport)
    for warning in prepared.job.warnings:
        terminal.err(f"imgkit: {warning}")
    values = list(origins.of_job(prepared.job, flags, project))
    if source is not None:
        unknown = ("directory",) if source.remote_image else ("image", "directory")
        values = [
            origins.of_word("remote", transport.name, flag="--on" if options.on else "", project=project),
            origins.of_word("recipe", source.title, flag="RECIPE" if options.recipe else "", project=project),
            *(row for row in values if row.name not in unknown),
        ]
        terminal.err(f"imgkit: {image_source.UNKNOWN_HOME} stands for the folder on {transport.name}")
    _show(prepared.job, prepared.script, values if options.verbose else (), as_json=options.as_json)


def _run_sizes(options: _Options, remote: Remote | None, run: JobRequest, project: ProjectFile | None) -> int:
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
    options: _Options, remote: Remote | None, flags: JobRequest, project: ProjectFile | None, report: Reporter
) -> Iterator[tuple[Path, ScalingRun]]:
    """Check the jobs of all sizes, then submit them; a dry run prints their scripts."""
    from imgkit_builder.jobs import handle, scaling
    from imgkit_builder.project import origins

    recipe = options.recipe or (project.recipe if project and not remote else "")
    if not recipe and not remote:
        raise UsageError("no recipe given", where="RECIPE", hint="imgkit run RECIPE --scaling 1,2 -- COMMAND")
    request = origins.under(flags, project)
    code = read_code(request, as_json=options.as_json)
    sizes = scaling.parse_sizes(options.scaling)
    planned = scaling.plan(recipe, request, sizes, code=code, remote=remote, base=options.base or "")
    if options.dry_run:
        for warning in planned[-1].job.warnings:
            report.note(warning)
        if options.as_json:
            show({"jobs": [_described(each.job, each.script) for each in planned]}, as_json=True)
            return
        for each in planned:
            nodes = scaling.nodes_text(each.job.allocation.nodes)
            terminal.err(f"imgkit: {nodes}, in {each.job.directory}:")
            terminal.document(each.script.text)
        return
    transport = handle.transport_to(remote, planned[-1], may_ask=may_ask())
    transport.login()
    yield from scaling.submit(planned, transport, report)


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


def _show_submitted(record: SubmittedJob, ready: PreparedJob, options: _Options) -> None:
    """Print the id of a job that exists now, and follow it if that is wanted and possible.

    Where the job's output is followed, that output has stdout to itself, so the id is on stderr alone.
    """
    from imgkit_builder.jobs import records

    interactive = ready.job.request.launch.interactive
    follows = not (options.as_json or options.detach or record.job.array or interactive)
    followed = follows and record.answer is None and can_follow(record)
    if record.answer is None and not followed:
        data = {**_described(ready.job, ready.script), "id": record.job.handle}
        show({**data, "folder": str(ready.job.directory)}, record.job.handle, as_json=options.as_json)
    records.need_id(record)
    if not options.as_json:
        # The tasks of an array have an output each.
        verbs = ("status", "cancel") if record.job.array else ("status", "logs", "cancel")
        terminal.err("imgkit: " + "; ".join(f"imgkit {verb} {record.job.handle}" for verb in verbs))
    if followed:
        raise typer.Exit(follow(record))
    if interactive and not options.as_json:
        # The comments above the command explain how to get in.
        terminal.err(*(text for text in ready.script.text.splitlines() if text.startswith("#")))


def _show(job: Job, script: Script, rows: Sequence[ValueSource], *, as_json: bool) -> None:
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
    from imgkit_builder.jobs import records
    from imgkit_builder.jobs.remote import fetch

    record = records.find(job_id)
    if not record.job.remote:
        raise UsageError(
            f"the job {job_id} ran here", where="ID", hint=f"its files: {record.job.directory}/runs"
        )
    folder = output or Path("runs", f"{record.job.name}-{record.job.id}")
    far = connected(record.job.remote)
    far.login()
    record = dataclasses.replace(record, fetched=str(folder.absolute()))
    with reporter(as_json=as_json) as report:
        fetched = fetch.fetch(far, record, folder, checkpoints=checkpoints, report=report)
    records.keep(record)  # imgkit runs finds the folder
    text = f"{folder}  {len(fetched.new)} of {fetched.files} files were new, {fetched.bytes / 1e6:.1f} MB"
    data = {
        "folder": str(folder),
        "files": fetched.files,
        "new": [str(path) for path in fetched.new],
        "bytes": fetched.bytes,
    }
    show(data, text, as_json=as_json)

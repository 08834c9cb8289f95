"""``imgkit run`` and ``fetch``: from here to a job on a remote, and its results back."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from imgkit_builder.cli.common import BASE_HELP, JSON, complete_names, show, terminable
from imgkit_builder.cli.job_flags import COMMAND, RemoteJobCommand, read_code
from imgkit_builder.cli.progress import reporter
from imgkit_builder.cli.project import TRUST_FOLDER, project_here, values_data, values_table
from imgkit_builder.cli.remote import connected, follow, may_ask
from imgkit_entrypoints import terminal
from imgkit_entrypoints.errors import UsageError

if TYPE_CHECKING:
    from imgkit_builder.job.request import SubmittedJob
    from imgkit_builder.project.toml_file import ProjectFile

SCHEMA = 1
_UNKNOWN_HERE = ("image", "directory")
"""Values that are known only after a look at the remote."""


COMMAND_CLASSES = {"run": RemoteJobCommand}


def verb_run(
    flags: typer.Context,
    recipe: str = typer.Argument(
        "",
        metavar="[RECIPE|X.sif|ARCHIVE] -- COMMAND...",
        autocompletion=complete_names,
        help="Image to run (default: the recipe of imgkit.toml, or the remote's). An archive or OCI folder "
        "becomes a .sif here.",
    ),
    on: str = typer.Option(
        "", "--on", metavar="NAME", help="The remote (imgkit remote add; default: that of imgkit.toml)."
    ),
    base: str | None = typer.Option(None, metavar="REF", help=BASE_HELP),
    detach: bool = typer.Option(
        False, "--detach", help="Submit, print the job's id, and do not follow its output."
    ),
    bwlimit: float | None = typer.Option(
        None, metavar="MB/s", min=0.01, help="Upload bandwidth limit in MB/s."
    ),
    whole: bool = typer.Option(
        False, "--whole", help="Send the complete .sif even if a delta over an older one would do."
    ),
    dry_run: bool = typer.Option(
        False, "--dry-run", help="Show every resolved value and its source, then exit."
    ),
    trust_folder: bool = TRUST_FOLDER,
    as_json: bool = typer.Option(
        False, "--json", help="Print one JSON object and do not follow; progress as JSON lines on stderr."
    ),
) -> None:
    """Build, upload what the cluster lacks, submit, and follow the output.

    The build is cached, and files that the cluster has are not sent again. After an
    edit only a delta over a .sif on both sides is sent; an interrupted transfer resumes.
    Ctrl-C stops following; the job continues. The exit code is 1 if the job failed.

    Values that no flag sets come from an imgkit.toml here, or in a parent folder of
    the same git repository (imgkit init).

    \b
    Examples:
      imgkit run
      imgkit run --dry-run
      imgkit run mn5 --on mn5 --nodes 2 -A bsc98 --qos acc_debug --time 10m -- dist-train
      imgkit run --on mn5 --time 10m -- dist-hello
      imgkit run --on mn5 --time 10m --code . -- dist-run /workspace/train.py
      imgkit run mine.sif --on mn5 --time 10m --detach -- dist-bench
      imgkit run mine.tar --on mn5 --time 10m -- dist-bench
      imgkit run mn5 --on mn5 --image /apps/torch.sif --time 10m -- dist-run train.py
    """
    from imgkit_builder.job import code as code_of
    from imgkit_builder.job import submit as submission
    from imgkit_builder.project import origins
    from imgkit_builder.remote import config, connection
    from imgkit_builder.workflow import remote_run

    project = project_here(recipe=recipe, trusted=trust_folder)
    given = dataclasses.replace(flags.obj, command=flags.meta[COMMAND])
    remote = config.find(on or _stated_remote(project))
    plan = remote_run.plan(recipe, given, project, remote.recipe)
    if dry_run:
        first = (
            origins.of_word("remote", remote.name, flag="--on" if on else "", project=project),
            origins.of_word("recipe", plan.source, flag="RECIPE" if recipe else "", project=project),
        )
        values = origins.of_job(plan.early, given, project)
        known = {"image"} if plan.remote_image else set()
        rows = [*first, *(one for one in values if one.name not in {*_UNKNOWN_HERE} - known)]
        show({"schema": SCHEMA, "values": values_data(rows)}, *values_table(rows), as_json=as_json)
        return
    remote_run.check(plan)
    code = read_code(plan.request, as_json=as_json)
    if code is not None:
        is_here = not (plan.recipe or plan.archive or plan.remote_image)
        code_of.refuse_unused(code, plan.target, plan.sif if is_here else None)
    for warning in plan.early.warnings:
        terminal.err(f"imgkit: {warning}")
    far = connection.connect(remote_run.with_transfer_host(remote, plan), ask=may_ask())
    if far.unshared_reason:
        terminal.err(f"imgkit: every ssh command opens its own connection: {far.unshared_reason}")
    far.login()
    with terminable(), reporter(as_json=as_json) as report:
        done = remote_run.run(
            plan,
            far,
            base=base,
            no_delta=whole,
            max_bytes_per_s=None if bwlimit is None else bwlimit * 1e6,
            code=code,
            report=report,
        )
    record, job = done.record, done.job
    _kept(record)
    submission.need_id(record)
    if as_json:
        data = {
            "schema": SCHEMA,
            "id": record.handle,
            "image": job.image,
            "delta": job.overlay or None,
            "code": dataclasses.asdict(job.code) if job.code else None,
            "folder": done.home,
            "name": job.name,
        }
        show(data, as_json=True)
        return
    if detach or record.array:  # the tasks of an array have an output each
        verb = "status" if record.array else "logs"
        terminal.out(record.handle)
        terminal.err(f"imgkit: imgkit {verb} {record.handle}")
        return
    raise typer.Exit(follow(far, record))


def _kept(record: SubmittedJob) -> None:
    from imgkit_builder.job import submit

    try:
        submit.keep(record)
    except OSError as error:
        terminal.err(
            f"imgkit: the job {record.id} is submitted, but its record cannot be saved "
            f"({error.filename}: {error.strerror})",
            "  -> next time: export XDG_STATE_HOME=FOLDER",
        )


def _stated_remote(project: ProjectFile | None) -> str:
    if project and project.values.remote:
        return project.values.remote
    from imgkit_builder.remote import config

    known = ", ".join(config.remotes())
    raise UsageError(
        "no remote given, and none set by an imgkit.toml here",
        where="--on",
        hint=f"--on NAME; there are: {known}" if known else "imgkit remote add NAME USER@HOST:DIR",
    )


def verb_fetch(
    job_id: str = typer.Argument(metavar="ID"),
    output: Path | None = typer.Option(
        None, "--output", "-o", metavar="DIR", help="Folder for the run's files (default: runs/NAME-ID here)."
    ),
    checkpoints: bool = typer.Option(
        False, "--checkpoints", help="Also fetch the checkpoints of a training."
    ),
    as_json: bool = JSON,
) -> None:
    """Copy a remote job's run folder here: curves, metrics and output.

    Only new and changed files are sent. Nothing is deleted on either side.

    \b
    Examples:
      imgkit fetch 4711@mn5
    """
    from imgkit_builder.job import submit
    from imgkit_builder.remote import fetch

    record = submit.record_of(job_id)
    if not record.remote:
        raise UsageError(f"the job {job_id} ran here", where="ID", hint=f"its files: {record.directory}/runs")
    folder = output or Path("runs", f"{record.name}-{record.id}")
    far = connected(record.remote)
    far.login()
    record = dataclasses.replace(record, fetched=str(folder.absolute()))
    with reporter(as_json=as_json) as report:
        done = fetch.fetch(far, record, folder, checkpoints=checkpoints, report=report)
    submit.keep(record)  # imgkit runs finds the folder
    text = f"{folder}  {len(done.new)} of {done.files} files were new, {done.bytes / 1e6:.1f} MB"
    data = {
        "schema": SCHEMA,
        "folder": str(folder),
        "files": done.files,
        "new": [str(path) for path in done.new],
        "bytes": done.bytes,
    }
    show(data, text, as_json=as_json)

"""``imgkit run`` and ``imgkit fetch``: run a recipe as a job, and fetch its results from a remote."""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import typer

from imgkit_builder.base.flags import USUAL, option_field
from imgkit_builder.cli.common import (
    HERE,
    JSON,
    LAST_JOB_ID,
    confirm_large_code,
    exit_on_sigterm,
    flag_option,
    name_argument,
    output_option,
    print_message,
    print_result,
)
from imgkit_builder.cli.jobs import can_follow, connect_to, follow_job, last_job_id, may_ask
from imgkit_builder.cli.options import COMMAND, JobCommand
from imgkit_builder.cli.progress import reporter
from imgkit_builder.cli.project import read_project, values_data, values_table
from imgkit_builder.jobs import code as code_folder
from imgkit_builder.jobs.request import JobRequest, SystemFlags
from imgkit_builder.workflow.build_request import BASE_HELP
from imgkit_entrypoints import terminal
from imgkit_entrypoints.errors import UsageError

if TYPE_CHECKING:
    from imgkit_builder.jobs.code import CodeFolder
    from imgkit_builder.jobs.job import Job, Script
    from imgkit_builder.jobs.prepared import PreparedJob
    from imgkit_builder.jobs.remote.config import Remote
    from imgkit_builder.jobs.remote.fetch import Fetched
    from imgkit_builder.jobs.submitted import SubmittedJob
    from imgkit_builder.jobs.transport import Transport
    from imgkit_builder.project.origins import ValueSource
    from imgkit_builder.project.toml_file import ProjectFile

COMMAND_CLASSES = {"run": JobCommand}
"""The classes of verbs that cannot use typer's default. After ``run``, a command follows ``--``."""


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
      imgkit run --on mn5 --time 10m --code . -- dist-run train.py
      imgkit run mine.sif --on mn5 --time 10m --detach -- dist-bench
      imgkit run mn5 -A bsc98 --qos acc_debug --time 10m --dry-run -- dist-bench
      imgkit run mn5 -A bsc98 --qos acc_debug --time 1h --interactive
      imgkit run rcp --nodes 4 --image registry.example.org/me/rcp:1 -- dist-train --steps 1000
      imgkit run lambda --hosts 10.0.0.1,10.0.0.2 -- dist-hello
      imgkit run cpu --nproc 2 -- dist-train --steps 100
    """
    if options.verbose and not options.dry_run:
        raise UsageError("--verbose needs --dry-run", where="--verbose", hint="imgkit run --dry-run -v ...")
    options = dataclasses.replace(options, recipe=recipe)
    flags = request.changed(command=context.meta[COMMAND], system_flags=system_flags)
    if not flags.launch.command:
        refuse_command_as_recipe(recipe)
    _run_job(options, flags)


class JobInputs(NamedTuple):
    """Everything that a job is made from: the command line, imgkit.toml, and the user's code."""

    recipe: str
    flags: JobRequest
    """The request with the values of flags only."""
    request: JobRequest
    """The request with the values of flags and of imgkit.toml."""
    code: CodeFolder | None
    remote: Remote | None
    """The remote on which the job runs. None for a job on this machine."""
    project: ProjectFile | None
    """The imgkit.toml whose values the job uses. None if it uses no such file."""


def read_inputs(options: JobOptions, flags: JobRequest) -> JobInputs:
    """Read imgkit.toml and the folder of code, and combine them with the values of the command line.

    Parameters
    ----------
    options : the options about the submission, such as ``--on``, and the argument RECIPE.
    flags : the options about the job itself, such as ``--nodes``. Other values are not set yet.

    Raises
    ------
    UsageError : there is no such remote or recipe, imgkit.toml has problems, or the code cannot be read.
    """
    from imgkit_builder.project import origins

    remote, project = _find_remote_and_project(options)
    # A flag replaces a value of imgkit.toml. The flags of lists, such as --bind, add to it.
    request = origins.fill_from_file(flags, project)
    recipe = options.recipe  # for a job on a remote, it may be empty: the remote has a default recipe
    if remote is None:
        recipe = _choose_local_recipe(options, project)
    code = read_code(request, as_json=options.as_json)
    return JobInputs(recipe=recipe, flags=flags, request=request, code=code, remote=remote, project=project)


def _find_remote_and_project(options: JobOptions) -> tuple[Remote | None, ProjectFile | None]:
    """Return the remote of a job, and the imgkit.toml whose values the job uses.

    The remote is None for a job on this machine. The file is None if there is no imgkit.toml. It is also None
    if the job runs on this machine and the command line names its recipe.
    """
    from imgkit_builder.jobs.remote import config

    # The values of imgkit.toml are meant for the recipe that it names, so they do not apply to another recipe
    # on this machine.
    names_local_recipe = options.recipe != "" and options.on in ("", HERE)
    project = None
    if not names_local_recipe:
        project = read_project(recipe=options.recipe, trusted=options.trust_folder)
    remote_name = options.on
    if not remote_name and project:
        remote_name = project.values.remote
    if remote_name in ("", HERE):  # HERE means this machine, even if imgkit.toml names a remote
        return None, project
    return config.get_remote(remote_name), project


def refuse_command_as_recipe(recipe: str, verb: str = "run") -> None:
    """Raise UsageError if the argument RECIPE is an entry point (``dist-run``) or a Python program.

    In this case the user has forgotten the ``--`` before the command.
    """
    if not re.fullmatch(r"dist-\w+|.+\.py", recipe):
        return
    command = f"dist-run {recipe}" if recipe.endswith(".py") else recipe
    raise UsageError(
        f"{recipe} is a command, not a recipe",
        where="RECIPE",
        hint=f"a command follows --: imgkit {verb} -- {command}",
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """The options of ``imgkit run`` and ``scaling`` about the submission, and the argument RECIPE.

    The options about the job itself are the fields of `JobRequest`.
    """

    recipe: str = ""
    on: str = option_field(
        "",
        metavar="NAME",
        group=USUAL,
        help="The remote (imgkit remote add; default: that of imgkit.toml), or here: this machine.",
    )
    base: str | None = option_field(None, metavar="REF", help=f"With --on: {BASE_HELP}")
    detach: bool = option_field(
        False,
        group=USUAL,
        help="Submit, print the job's id (imgkit scaling: the report's folder), and do not follow.",
    )
    dry_run: bool = option_field(False, group=USUAL, help="Print exactly what would be submitted, then exit.")
    trust_folder: bool = option_field(
        False, help="Use the imgkit.toml here and what it names even if other users can change them."
    )
    as_json: bool = option_field(
        False, "--json", help="Print one JSON object and do not follow; progress as JSON lines on stderr."
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Options(JobOptions):
    """The options of ``imgkit run`` about the submission, and the argument RECIPE."""

    verbose: bool = option_field(
        False, "--verbose", "-v", help="With --dry-run: also show every resolved value and its source."
    )


def read_code(request: JobRequest, *, as_json: bool) -> CodeFolder | None:
    """Read the folder of ``--code`` and return its description, or None if the request has no code.

    If the folder is large and ``--yes`` is not given, the user is asked whether to continue.
    """
    if request.container.code is None:
        return None

    def read_folder(large: bool) -> CodeFolder:
        with reporter(as_json=as_json) as report:
            return code_folder.read_code_folder(request, large=large, report=report)

    return confirm_large_code(read_folder, large=request.container.yes, may_ask=not as_json)


def _run_job(options: _Options, flags: JobRequest) -> None:
    """Submit the job to the remote or on this machine, and follow its output.

    Without a scheduler or queue, the job is a command, and this process is replaced by it. The exit code is
    then that of the command.

    Parameters
    ----------
    flags : the request with the values of flags only.
    """
    from imgkit_builder.jobs import handle, submit

    inputs = read_inputs(options, flags)
    remote = inputs.remote
    prepared = submit.prepare(
        inputs.recipe, inputs.request, inputs.code, remote=remote, base=options.base or ""
    )
    if options.dry_run:
        _show_dry_run(options, prepared, inputs)
        return
    if remote and prepared.script.foreground:
        _check_interactive(options)
    transport = handle.transport_to(remote, prepared, may_ask=may_ask())
    _announce_job(options, prepared, transport, inputs.recipe)
    record = None  # what imgkit stores about a submitted job; None if the job runs in the foreground
    with exit_on_sigterm(), reporter(as_json=options.as_json) as report:
        ready = submit.make_ready(prepared, transport, report)
        script = ready.script
        if not script.foreground:
            record = submit.start_job(ready, transport, report)
    # This is a job on a list of hosts (--hosts). imgkit itself starts it over ssh.
    if script.host_commands:
        raise typer.Exit(_run_on_hosts(script))
    if record is None:
        _run_in_foreground(ready, transport, remote)
    show_submitted(record, ready, detach=options.detach, as_json=options.as_json)


def _run_in_foreground(ready: PreparedJob, transport: Transport, remote: Remote | None) -> NoReturn:
    """Replace this process by the command of the job, which takes over the terminal.

    `remote` is None for a job on this machine.
    """
    from imgkit_builder.base import process

    script = ready.script
    if ready.job.is_interactive:
        _show_comments(script)
    on_remote = f"on {transport.name}: " if remote else ""
    print_message(f"{on_remote}{shlex.join(script.submit)}")
    # The job's directory exists only on the machine that runs the job.
    folder = Path() if remote else ready.job.directory
    process.replace_process(transport.foreground_argv(ready.job, script), cwd=folder)


def _check_interactive(options: _Options) -> None:
    """Refuse an interactive job on a remote if it could not use this terminal.

    Raises
    ------
    UsageError : standard input is not a terminal, or ``--detach`` or ``--json`` is given.
    """
    for flag, is_set in {"--detach": options.detach, "--json": options.as_json}.items():
        if is_set:
            message = f"{flag} cannot be combined with --interactive on a remote"
            raise UsageError(message, where=flag, hint="leave it out; or --dry-run shows the command")
    if not sys.stdin.isatty():
        raise UsageError(
            "an interactive job needs a terminal, and standard input is none",
            where="--interactive",
            hint="run this in a terminal; or leave it out: imgkit run ... -- COMMAND shows the output",
        )


def _choose_local_recipe(options: JobOptions, project: ProjectFile | None) -> str:
    """Return the recipe of a job on this machine, from the command line or from imgkit.toml.

    Raises
    ------
    UsageError : ``--base`` is given, which is for remotes only, or no recipe is named.
    """
    if options.base:
        raise UsageError("--base is for a remote", where="--base", hint="--on NAME --base ...")
    if options.recipe:
        return options.recipe
    if project and project.recipe:
        return project.recipe
    raise UsageError(
        "no recipe given, and none set by an imgkit.toml here",
        where="RECIPE",
        hint="name one (imgkit list), or write the file (imgkit init --recipe RECIPE)",
    )


def _announce_job(options: _Options, prepared: PreparedJob, transport: Transport, recipe: str) -> None:
    """Print on stderr which job will be submitted and where, because building and sending can take minutes.

    Nothing is printed for a command that runs in this terminal. If this machine submits the job, the
    scheduler's command is looked up first, so that a missing one is reported before those minutes.

    Parameters
    ----------
    transport : the way to the machine that runs the job: this machine, a remote over ssh (`Ssh`), or this
        machine with the files on a remote (`VolumeStore`).

    Raises
    ------
    ToolMissing : the scheduler's command is not on PATH.
    """
    from imgkit_builder.base import process
    from imgkit_builder.jobs.transport import Ssh, VolumeStore

    job = prepared.job
    script = prepared.script
    # Without a scheduler, the job is a command in this terminal. It ends with imgkit.
    if script.foreground and not isinstance(transport, Ssh):
        if options.detach:
            print_message("--detach is not used: the command runs here, and imgkit ends with it")
        return
    program = script.submit[0]
    # This is a job in pods. It is submitted from this machine, but its files are on a remote.
    if isinstance(transport, VolumeStore):
        process.require_program(program, "install the cluster's client, and log in with it")
        files_remote = transport.connection.remote.name
        print_message(f"{job.recipe.name}, submitted here with {program}; its files are on {files_remote}")
    elif isinstance(transport, Ssh):
        assert prepared.source is not None  # noqa: S101 - the job of a remote has one
        named_by = "--on" if options.on else "imgkit.toml"
        title = f"{prepared.source.title} on {transport.name}"
        print_message(f"{title} ({named_by}), submitted there with {program}")
        # Why ssh commands cannot share one connection. Empty if they do.
        unshared_reason = transport.connection.unshared_reason
        if unshared_reason:
            print_message(f"every ssh command opens its own connection: {unshared_reason}")
    else:
        process.require_program(program, _no_scheduler_hint(recipe))
        scheduler = job.recipe.system.scheduler
        print_message(f"{recipe} on this machine, submitted with {program} (its scheduler is {scheduler})")


def _show_dry_run(options: _Options, prepared: PreparedJob, inputs: JobInputs) -> None:
    """Print the script of the job. With ``--verbose``, also print all values and their sources.

    A source is the flag, or the line of imgkit.toml or of the recipe, that sets the value.

    imgkit does not connect to a remote for a dry run. In the script, texts such as ``/imgkit`` replace paths
    on the remote that are not known yet.
    """
    from imgkit_builder.jobs import image_source, volume

    remote = inputs.remote
    if remote is None:
        prepared = _prepare_local_dry_run(prepared)
    elif remote.pvc:  # the pods have a volume, whose folder and owner on the remote are not known yet
        uid, gid = volume.UNKNOWN_IDS.split(":")
        folder = prepared.job.directory
        print_message(f"{folder} stands for the folder on {remote.name}, {uid} and {gid} for your ids there")
    for warning in prepared.job.warnings:
        print_message(warning)
    if prepared.source is not None and remote is not None:
        print_message(f"{image_source.UNKNOWN_HOME} stands for the folder on {remote.name}")
    value_sources: Sequence[ValueSource] = ()
    if options.verbose:
        value_sources = _list_value_sources(options, prepared, inputs)
    show_script(prepared.job, prepared.script, value_sources, as_json=options.as_json)


def _list_value_sources(options: _Options, prepared: PreparedJob, inputs: JobInputs) -> list[ValueSource]:
    """Return all values of the job, each with the flag or line that sets it.

    For a job on a remote, the name of the remote and the recipe come first. Values that are only known after
    imgkit has connected to the remote are left out.
    """
    from imgkit_builder.project import origins

    remote = inputs.remote
    project = inputs.project
    value_sources = list(origins.list_value_sources(prepared.job, inputs.flags, project))
    source = prepared.source  # the recipe or file from which the image on the remote comes
    if source is None or remote is None:
        return value_sources
    # The argument RECIPE is shown as a source like a flag. "" means that it was not given.
    on_flag = "--on" if options.on else ""
    recipe_argument = "RECIPE" if options.recipe else ""
    # The directory is below a folder whose path only the remote knows. So is the image, unless the user named
    # an image on the remote by its path.
    unknown_names = ["directory"]
    if not source.remote_image:
        unknown_names.append("image")
    return [
        origins.find_value_source("remote", remote.name, flag=on_flag, project=project),
        origins.find_value_source("recipe", source.title, flag=recipe_argument, project=project),
        *(value for value in value_sources if value.name not in unknown_names),
    ]


def _prepare_local_dry_run(prepared: PreparedJob) -> PreparedJob:
    """Return a job on this machine in the form in which it would be submitted.

    If imgkit did not build the image, the entry points (``dist-run`` and others) are mounted into it. A
    submission refuses an image for another processor. Here, it only adds a warning to the job.
    """
    from imgkit_builder.jobs import submit
    from imgkit_builder.jobs.runtimes import runtime_of
    from imgkit_builder.jobs.transport import Transport

    job = prepared.job
    runtime = runtime_of(job)
    arch_error = runtime.arch_error(job)
    if arch_error is not None:
        warning = f"{job.container.image}: {arch_error.what}"
        prepared = dataclasses.replace(prepared, job=job.with_warning(warning))
    this_machine = Transport()
    return submit.bind_entry_points(prepared, this_machine)


def _no_scheduler_hint(recipe: str) -> str:
    """Return the hint for a machine that does not have the recipe's scheduler, such as a laptop.

    The hint names a remote with this recipe, or else any remote. If there is no remote, it says how to add
    one.
    """
    from imgkit_builder.jobs.remote import config

    remotes = list(config.read_remotes().values())
    matching_remotes = [remote for remote in remotes if remote.recipe == recipe]
    first_step = ""
    name = "NAME"
    if remotes:
        # A remote with this recipe is the most probable one.
        name = (matching_remotes or remotes)[0].name
    else:
        first_step = "imgkit remote add NAME USER@HOST:DIR, then "
    return (
        f"{first_step}imgkit run {recipe} --on {name} ... sends the job to the cluster; "
        "on a login node, load the module of the scheduler"
    )


def show_submitted(record: SubmittedJob, ready: PreparedJob, *, detach: bool, as_json: bool) -> None:
    """Print the id of a job that has just been submitted, and follow the job's output if possible.

    The id is printed on stdout, for scripts. If the job is followed, stdout is for its output, and the id is
    only printed on stderr. Then imgkit exits here, with the exit code of `follow_job`. For an interactive
    job, the comments of its script say what to type next.
    """
    from imgkit_builder.jobs import records

    records.refuse_unknown_id(record)
    handle = record.job.handle
    if as_json:
        data = {**script_data(ready.job, ready.script), "id": handle, "folder": str(ready.job.directory)}
        print_result(data, as_json=True)
        return
    is_interactive = ready.job.request.launch.interactive
    # The tasks of an array have separate outputs, and an interactive job has none to follow.
    has_one_output = not record.job.array and not is_interactive
    is_followed = not detach and has_one_output and can_follow(record)
    if not is_followed:
        terminal.print_results(handle)
    _print_next_commands(record)
    if is_followed:
        raise typer.Exit(follow_job(record))
    if is_interactive:
        _show_comments(ready.script)


def _print_next_commands(record: SubmittedJob) -> None:
    """Print the commands that show or cancel the job, and for an array why it is not followed."""
    handle = record.job.handle
    if record.job.array:
        print_message(f"imgkit status {handle}; imgkit cancel {handle}")
        print_message("an array is not followed: each of its tasks has an id and an output of its own")
    else:
        print_message(f"imgkit status {handle}; imgkit logs {handle}; imgkit cancel {handle}")


def _show_comments(script: Script) -> None:
    """Print the comments of an interactive job's script. They say what to type to get into the image."""
    comments = [line for line in script.text.splitlines() if line.startswith("#")]
    terminal.print_messages(*comments)


def show_script(job: Job, script: Script, values: Sequence[ValueSource], *, as_json: bool) -> None:
    """Print `script` on stdout and `values` on stderr. With `as_json`, print one JSON object on stdout.

    `values` are values of the job with the flags or lines that set them. They may be empty.
    """
    if as_json:
        data = script_data(job, script)
        if values:
            data["values"] = values_data(values)
        print_result(data, as_json=True)
        return
    # stdout has the script only, so that it can be redirected to a file.
    terminal.print_messages(*values_table(values))
    terminal.print_document(script.text)


def script_data(job: Job, script: Script) -> dict[str, Any]:
    """Return the data about a job and its script that is printed with ``--json``."""
    return {
        "recipe": job.recipe.name,
        "scheduler": job.recipe.system.scheduler,
        "name": job.name,
        "nodes": job.allocation.size.training,
        "spares": job.allocation.size.spares,
        "gpus": job.allocation.gpus,
        "cpus": job.allocation.cpus,
        "code": dataclasses.asdict(job.container.code) if job.container.code else None,
        "time": job.allocation.time,
        "image": job.container.image,
        "submit": list(script.submit),
        "script": script.text,
        "warnings": list(job.warnings),
    }


def _run_on_hosts(script: Script) -> int:
    """Run the commands of all hosts over ssh, and return the exit code of the run.

    Each line of output begins with the name of its host: ``node2: step 10``.
    """
    from imgkit_builder.base import process
    from imgkit_builder.jobs.systems import fanout

    process.require_program("ssh", "apt-get install openssh-client")
    return fanout.run_on_hosts(
        script.host_commands,
        show=_show_host_line,
        say=print_message,
        host_input=script.host_input,
        head_decides=script.head_decides,
    )


def _show_host_line(host: str, text: bytes, error: bool) -> None:
    """Print a line of a host's output or error output, such as ``node2: step 10``."""
    stream = sys.stderr if error else sys.stdout
    parts = [text]
    if stream.isatty():
        # A progress bar uses carriage returns. On a terminal, the text after one would overwrite the name of
        # the host.
        parts = re.split(rb"\r+", text.rstrip(b"\r"))
    for part in parts:
        terminal.output_copier(to_err=error)(f"{host}: ".encode() + part + b"\n")


def verb_fetch(
    job_id: str = LAST_JOB_ID,
    output: Path | None = output_option("DIR", "Folder for the run's files (default: runs/NAME-ID here)."),
    checkpoints: bool = flag_option("--checkpoints", "Also fetch the checkpoints of a training."),
    as_json: bool = JSON,
) -> None:
    """Copy a remote job's run folder here: curves, metrics and output.

    Only new and changed files are sent, and no code that the run left unchanged.
    Nothing is deleted on either side.

    \b
    Examples:
      imgkit fetch
      imgkit fetch 4711@mn5
    """
    from imgkit_builder.jobs import records
    from imgkit_builder.jobs.remote import fetch

    job_id = job_id or last_job_id()
    record = records.find_record(job_id)
    if not record.job.files_remote:
        raise UsageError(
            f"the job {job_id} ran here", where="ID", hint=f"its files: {record.job.directory}/runs"
        )
    folder = output or Path("runs", record.job.run_folder.name)
    connection = connect_to(record.job.files_remote)
    connection.login()
    record = dataclasses.replace(record, fetched=str(folder.absolute()))
    with reporter(as_json=as_json) as report:
        fetched = fetch.fetch_run(connection, record, folder, checkpoints=checkpoints, report=report)
    records.save_record(record)  # imgkit runs finds the folder
    _show_fetched(fetched, folder, as_json=as_json)


def _show_fetched(fetched: Fetched, folder: Path, *, as_json: bool) -> None:
    """Print how many files of a run were fetched into `folder`, and the command that uploads W&B's files."""
    text = f"{folder}  {len(fetched.new)} of {fetched.files} files were new, {fetched.bytes / 1e6:.1f} MB"
    data = {
        "folder": str(folder),
        "files": fetched.files,
        "new": [str(path) for path in fetched.new],
        "bytes": fetched.bytes,
    }
    lines = [text]
    if any(folder.glob("wandb/offline-run-*")):
        lines.append(f"wandb sync {shlex.quote(str(folder))}/wandb/offline-run-*")
    print_result(data, *lines, as_json=as_json)

"""``imgkit test``, ``shell`` and ``push``: verbs for an image that has been built."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Mapping

import typer

from imgkit_builder import engine as engines
from imgkit_builder.base import process
from imgkit_builder.cli.common import (
    JSON,
    VERBOSE,
    flag_option,
    name_argument,
    print_message,
    print_result,
    show_checks,
)
from imgkit_builder.cli.jobs import connect_to, scheduler_runner
from imgkit_builder.cli.options import field_option
from imgkit_builder.cli.progress import reporter
from imgkit_builder.jobs import job_status, quoting, records, systems
from imgkit_builder.jobs.submitted import FINAL_STATES, QueuedJob, SubmittedJob
from imgkit_builder.jobs.systems import JobShell
from imgkit_builder.sif.conversion import Options
from imgkit_builder.workflow.images import ShellCommand, shell_command, smoke_test
from imgkit_builder.workflow.names import image_name
from imgkit_entrypoints import terminal
from imgkit_entrypoints.errors import UsageError


def verb_test(
    image: str = name_argument("IMAGE|SIF|RECIPE", "A local image, a .sif file or a recipe."),
    as_json: bool = JSON,
    runtime: str | None = field_option(Options, "runtime"),
) -> None:
    """Run the smoke test in an image or .sif.

    Checks the architecture, Python, torch and NCCL (as in the base), new pip
    conflicts, imgkit's own files and dist-env. Exit code 1 if a check fails.

    \b
    Examples:
      imgkit test mn5
      imgkit test mn5.sif --json
    """
    with reporter(as_json=as_json) as report:
        results = smoke_test(image, runtime=runtime, report=report)
    show_checks(results, as_json=as_json, image=image)


def verb_shell(
    image: str = name_argument("[IMAGE|SIF|RECIPE]", "A local image, a .sif file or a recipe.", ""),
    host: bool = flag_option(
        "--host",
        "Share this machine's home folder and network, and the binds and variables of a .sif's recipe, as in "
        "a job.",
    ),
    job: str = typer.Option("", "--job", metavar="ID", help="Open the shell in this running job."),
    node: str = typer.Option(
        "", "--node", metavar="NAME", help="With --job: a node or pod of the job (default: the first one)."
    ),
    packages: list[str] = typer.Option(
        [], "--packages", metavar="FILE", help="File of imgkit add with packages for the .sif."
    ),
    workdir: str = typer.Option(
        "",
        metavar="/DIR",
        help="Folder of the container in which the shell starts (default: the recipe's image.workdir).",
    ),
    dry_run: bool = flag_option("--dry-run", "Print the command, then exit."),
    verbose: bool = typer.Option(
        False, "--verbose", "-v", help="First print information about the image, or with --job the command."
    ),
) -> None:
    """Open a shell in an image or .sif, without this machine's home folder and network.

    With --job, open it within a running job: under Slurm in a new container on a node
    of the job, with its image, folders and variables; in a pod in the job's
    own container.

    \b
    Examples:
      imgkit shell mn5
      imgkit shell mn5.sif --host
      imgkit shell mn5 --dry-run
      imgkit shell --job 4711@mn5 --node as01r1b07
    """
    if job and image:
        hint = f"imgkit shell --job {job}"
        raise UsageError("--job takes its image from the job", where="IMAGE", hint=hint)
    if not job and not image:
        hint = "imgkit shell mn5.sif, or imgkit shell --job ID"
        raise UsageError("no image and no job was given", where="imgkit shell", hint=hint)
    if job:
        _refuse_flags({"--host": host, "--workdir": workdir, "--packages": packages}, "--job")
        shell: JobShell | ShellCommand = _job_shell(job, node, must_run=not dry_run)
    else:
        _refuse_flags({"--node": node}, "an image")
        shell = shell_command(image, host=host, workdir=workdir, packages=packages)
        if verbose and shell.image:
            terminal.print_messages(*engines.image_facts(shell.image).lines())
    command = shlex.join(shell.argv)
    if dry_run:
        terminal.print_results(command)
        return
    print_message(shell.description)
    if verbose or not job:  # the command for a job on a remote has 1,600 characters
        print_message(command)
    program, *_ = shell.argv
    install = "sudo apt-get install docker-cli (or docker.io)"
    # Without this check, execvp would fail with an error that has no hint.
    process.require_program(program, "run this where the job was submitted" if job else install)
    os.execvp(program, shell.argv)  # noqa: S606 - an argv list, no shell; the terminal now belongs to it


def _refuse_flags(flags: Mapping[str, object], conflict: str) -> None:
    """Raise UsageError if one of `flags` is set. None of them can be combined with `conflict`."""
    for flag, value in flags.items():
        if value:
            raise UsageError(f"{flag} cannot be combined with {conflict}", where=flag, hint="leave it out")


def _job_shell(job_id: str, node: str, *, must_run: bool) -> JobShell:
    """Return the command that opens a shell in a running job.

    Parameters
    ----------
    node : the node or pod in which to open the shell, or "" for the first one.
    must_run : whether to ask the scheduler, and to refuse a job that is not running. A dry run does not.

    Raises
    ------
    UsageError : there is no such job, it is not running, or no shell can be opened in it.
    """
    if node and not quoting.is_job_id(node):
        raise UsageError(f"{node!r} cannot be the name of a node or pod", where="--node")
    record = records.find_record(job_id)
    job = record.job
    # The shell has the same value of this variable as the job itself.
    command_line = f"export IMGKIT_RUN_DIR={shlex.quote(str(job.run_folder))}; {job.shell_line}"
    # This comes first, because it refuses a system that opens no shells without a question to the scheduler.
    shell = systems.get_system(job.system).shell_command(job, command_line, node)
    if must_run:
        _refuse_idle_job(record)
    _refuse_second_container(job, shell)
    if not job.remote:
        return shell
    return dataclasses.replace(shell, argv=connect_to(job.remote).interactive(shell.argv))


def _refuse_second_container(job: QueuedJob, shell: JobShell) -> None:
    """Raise UsageError if `shell` needs a second container, and the job's runtime cannot start one."""
    # Under Slurm, a shell needs a container of its own. In a pod, it runs in the job's container.
    needs_new_container = shell.description == systems.NEW_CONTAINER
    # `job.shell_line` starts that container. It is empty if the runtime cannot start a second one.
    if needs_new_container and not job.shell_line:
        raise UsageError(
            f"no shell opens in {job.handle}: imgkit starts a second container in a job only by "
            "Singularity and Apptainer",
            where="--job",
            hint="imgkit run --interactive opens one in a job of its own",
        )


def _refuse_idle_job(record: SubmittedJob) -> None:
    """Raise UsageError if the scheduler reports that the job is waiting or has ended."""
    state = job_status.refresh_state(record, scheduler_runner(record)).state
    if state == "waiting":
        verdict = "waits"
    elif state in FINAL_STATES:
        verdict = "has ended"
    else:
        return
    hint = f"imgkit status {record.job.handle}"
    raise UsageError(f"the job {record.job.handle} {verdict}", where="--job", hint=hint)


def verb_push(
    image: str = name_argument("IMAGE|RECIPE", "The image to send."),
    ref: str | None = typer.Argument(
        None, metavar="[REF]", help="Its name in the registry: registry/group/name:tag."
    ),
    as_json: bool = JSON,
    verbose: bool = VERBOSE,
) -> None:
    """Send an image to a registry and print its digest.

    \b
    Examples:
      imgkit push mn5 ghcr.io/group/mn5:1
      imgkit push registry.example.org/group/mn5:1
    """
    local_name = image_name(image)
    target = local_name if ref is None else ref
    with reporter(as_json=as_json, verbose=verbose) as report, engines.connect() as engine:
        # An engine sends an image to the registry that is part of its name.
        if target != local_name:
            engines.add_tag(engine, local_name, target)
        digest = engines.push(engine, target, report)
    print_result({"ref": target, "digest": digest}, f"{target}  {digest}", as_json=as_json)

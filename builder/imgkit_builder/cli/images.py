"""``imgkit test``, ``shell`` and ``push``: verbs for images that were built."""

from __future__ import annotations

import os
import shlex
import shutil

import typer

from imgkit_builder import engine as engines
from imgkit_builder.cli.common import JSON, VERBOSE, flag_option, name_argument, print_result, show_checks
from imgkit_builder.cli.jobs import connect_to, scheduler_runner
from imgkit_builder.cli.options import field_option
from imgkit_builder.cli.progress import reporter
from imgkit_builder.jobs import history, quoting, records, systems
from imgkit_builder.jobs.submitted import FINAL_STATES
from imgkit_builder.sif.conversion import Options
from imgkit_builder.workflow.images import shell_command, smoke_test
from imgkit_builder.workflow.names import image_name
from imgkit_entrypoints import terminal
from imgkit_entrypoints.errors import ToolMissing, UsageError


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
    if bool(image) == bool(job):
        raise UsageError(
            "--job takes its image from the job" if job else "no image and no job was given",
            where="IMAGE" if job else "imgkit shell",
            hint=f"imgkit shell --job {job}" if job else "imgkit shell mn5.sif, or imgkit shell --job ID",
        )
    for flag, is_set, conflict in (
        ("--host", host and job, "--job"),
        ("--workdir", workdir and job, "--job"),
        ("--packages", packages and job, "--job"),
        ("--node", node and image, "an image"),
    ):
        if is_set:
            raise UsageError(f"{flag} cannot be combined with {conflict}", where=flag, hint="leave it out")
    if job:
        argv, description = _into_job(job, node, look=not dry_run)
    else:
        command = shell_command(image, host=host, workdir=workdir, packages=packages)
        argv, description = command.argv, command.reach
        if verbose and command.image:
            terminal.print_messages(*engines.image_facts(command.image).lines())
    if dry_run:
        terminal.print_results(shlex.join(argv))
        return
    terminal.print_messages(f"imgkit: {description}")
    if verbose or not job:  # the command for a job on a remote has 1,600 characters
        terminal.print_messages(f"imgkit: {shlex.join(argv)}")
    if shutil.which(argv[0]) is None:
        install = "sudo apt-get install docker-cli (or docker.io)"
        hint = "run this where the job was submitted" if job else install
        raise ToolMissing(f"the program {argv[0]!r} is not on PATH", hint=hint)
    os.execvp(argv[0], argv)  # noqa: S606 - an argv list, no shell; the terminal now belongs to that program


def _into_job(job_id: str, node: str, *, look: bool) -> tuple[tuple[str, ...], str]:
    """Return the command that opens a shell in the job, and a text about what the shell runs in.

    Parameters
    ----------
    node : the node or pod in which to open the shell, or "" for the default.
    look : ask the scheduler first whether the job runs.
    """
    if node and not quoting.is_job_id(node):
        raise UsageError(f"{node!r} cannot be the name of a node or pod", where="--node")
    record = records.find_record(job_id)
    # The shell gets this variable, as the job has it.
    line = f"export IMGKIT_RUN_DIR={shlex.quote(str(record.job.run_folder))}; {record.job.shell_line}"
    entry = systems.get_system(record.job.system).shell_command(record.job, line, node)
    state = history.refresh_state(record, scheduler_runner(record)).state if look else ""
    if state in (*FINAL_STATES, "waiting"):
        raise UsageError(
            f"the job {record.job.handle} {'waits' if state == 'waiting' else 'has ended'}",
            where="--job",
            hint=f"imgkit status {record.job.handle}",
        )
    if not record.job.shell_line and entry.description == systems.NEW_CONTAINER:
        raise UsageError(
            f"no shell opens in {record.job.handle}: imgkit starts a second container in a job only by "
            "Singularity and Apptainer",
            where="--job",
            hint="imgkit run --interactive opens one in a job of its own",
        )
    if not record.job.remote:
        return entry.argv, entry.description
    return connect_to(record.job.remote).interactive(entry.argv), entry.description


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
    name = image_name(image)
    with reporter(as_json=as_json, verbose=verbose) as report, engines.connect() as engine:
        if ref is not None:
            engines.add_tag(engine, name, ref)
        target = ref or name
        digest = engines.push(engine, target, report)
    print_result({"ref": target, "digest": digest}, f"{target}  {digest}", as_json=as_json)

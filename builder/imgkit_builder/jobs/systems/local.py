"""One machine without a scheduler: the container starts at once."""

from __future__ import annotations

from typing import NoReturn

from imgkit_builder.jobs import container, quoting
from imgkit_builder.jobs.job import Job, Script
from imgkit_builder.jobs.quoting import line
from imgkit_builder.jobs.submitted import QueuedJob
from imgkit_builder.jobs.systems import System, need_program, with_folders
from imgkit_builder.recipe.systems import SHIPPED
from imgkit_entrypoints.errors import UsageError


class ForegroundSystem(System):
    """Base of the systems whose run is the command itself: it never gets an id."""

    hides_gpus = False
    passes_names = True
    where = "on this machine"

    reports_state = False

    def status_commands(self, record: QueuedJob) -> NoReturn:
        """Raise UsageError: there is no queue."""
        raise UsageError(f"a run {self.where} has no job id", hint="it ends with its command")

    log_source = cancel_command = status_commands


class Standalone(ForegroundSystem):
    """One machine without a scheduler."""

    registration = SHIPPED["standalone"]

    def script(self, job: Job) -> Script:
        """Return the command that starts the container."""
        need_program(job)
        if job.allocation.nodes > 1:
            raise UsageError(
                f"{job.allocation.nodes} nodes, but this is one machine",
                where="--nodes",
                hint="use a recipe with a scheduler: imgkit list",
            )
        _check_gpus(job)
        argv = container.start(job, job.command) if job.command else container.shell(job)
        if job.container.runtime == "docker" and job.request.launch.interactive:
            # Only on request: docker refuses to use a pipe as a terminal.
            argv = with_options(job, argv, "--interactive", "--tty")
        argv = with_options(job, argv, *map(quoting.option, job.request.allocation.options))
        argv = with_settings(job, with_folders(job, argv))
        return Script(text=line(argv) + "\n", submit=argv, foreground=True)


SYSTEM = Standalone()


def with_options(job: Job, argv: tuple[str, ...], *options: str) -> tuple[str, ...]:
    """Return `argv`, which starts the job's container, with further options for the runtime."""
    if options and job.container.runtime == "host":
        raise UsageError(
            f"{options[0]} is an option for a container, but --runtime host has none",
            where="--option",
            hint="leave it out",
        )
    at = 3 if job.container.runtime == "singularity" else 2  # behind `run`, or `--quiet exec`
    return (*argv[:at], *options, *argv[at:])


def with_settings(job: Job, argv: tuple[str, ...]) -> tuple[str, ...]:
    """Return `argv` with the variables that a job script would export; docker's has them already."""
    if any(isinstance(argument, quoting.Shell) for argument in argv):
        # Only a shell on the node knows the variables of the site.
        return (
            "sh",
            "-c",
            "; ".join((*container.exports(job), f"exec {' '.join(map(quoting.quote, argv))}")),
        )
    if job.container.runtime == "docker":
        return argv
    has_system_variables = job.container.runtime == "host" and container.system_variables(job)
    if job.recipe.system.runtime.host_libs or job.container.env_file or has_system_variables:
        # Only a shell on the node knows the values there: a path comes before them, a default after them.
        return ("sh", "-c", "; ".join((*container.exports(job), 'exec "$@"')), "sh", *argv)
    settings = [f"{name}={value}" for name, value in job.settings.items()]
    return ("env", *settings, *argv) if settings else argv


def _check_gpus(job: Job) -> None:
    if (
        job.allocation.gpus
        and job.container.runtime != "host"
        and not set(container.options(job)) & set(container.GPU_OPTIONS)
    ):
        name = job.recipe.name
        raise UsageError(
            f"--gpus {job.allocation.gpus}, but {name} starts its container without GPUs",
            where=job.recipe.where("system", "runtime"),
            hint=f"use a recipe that extends {name} with system.runtime.options: [--gpus=all]",
        )

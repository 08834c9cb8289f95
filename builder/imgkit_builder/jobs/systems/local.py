"""A single machine without a scheduler, on which the job's container starts at once."""

from __future__ import annotations

from typing import NoReturn

from imgkit_builder.jobs import quoting
from imgkit_builder.jobs.job import Argv, Job, Script
from imgkit_builder.jobs.quoting import command_line
from imgkit_builder.jobs.runtimes import runtime_of
from imgkit_builder.jobs.submitted import QueuedJob
from imgkit_builder.jobs.systems import Abilities, System, user_options, with_folder_check
from imgkit_builder.recipe.systems import SHIPPED
from imgkit_entrypoints.errors import UsageError


class ForegroundSystem(System):
    """Base class of systems that run the command at once. They have no queue and no job ids."""

    # The command inherits the environment of this process, so no script needs the values of --env NAME. No
    # scheduler assigns GPUs, so programs see all GPUs of the machine.
    abilities = Abilities(passes_names=True, hides_gpus=False)
    reports_state = False
    code_copier = "imgkit"
    where = "on this machine"
    """Where the command runs, for error messages."""

    def status_commands(self, record: QueuedJob) -> NoReturn:
        """Raise UsageError, because there is no queue that knows the run."""
        raise UsageError(f"a run {self.where} has no job id", hint="it ends with its command")

    log_source = cancel_command = status_commands


class Standalone(ForegroundSystem):
    """A single machine without a scheduler."""

    registration = SHIPPED["standalone"]

    def script(self, job: Job) -> Script:
        """Return the command that starts the container on this machine."""
        if job.allocation.nodes > 1:
            raise UsageError(
                f"{job.allocation.nodes} nodes, but this is one machine",
                where="--nodes",
                hint="use a recipe with a scheduler: imgkit list",
            )
        _check_gpus(job)
        runtime = runtime_of(job)
        container_argv = runtime.argv(job, job.command) if job.command else runtime.shell(job)
        if job.is_interactive:
            container_argv = runtime.with_input(container_argv, is_terminal=True)
        argv = host_argv(job, runtime.with_options(container_argv, user_options(job)))
        return Script(text=f"{code_comment(job)}{command_line(argv)}\n", submit=argv, foreground=True)


SYSTEM = Standalone()


def code_comment(job: Job) -> str:
    """Return a comment line for a user who runs a printed command without ``imgkit run``.

    The comment says that the copy of the code must exist first. It is empty if the job has no code.
    """
    if job.container.code is None:
        return ""
    return f"# imgkit run first makes {job.workspace}, the run's copy of the code.\n"


_REQUIRE_CODE = (
    '[ -d "$1" ] || { echo "imgkit: node $(uname -n) has no $1, the run\'s copy of the code: all nodes need '
    'the job\'s folder (--directory), or the image the code (image.copy)" >&2; exit 2; }; shift; exec "$@"'
)
"""Shell text that runs its second and following arguments if the folder of its first argument exists.

Without this check, docker would create an empty folder, and the message of another runtime would not name the
node.
"""


def host_argv(job: Job, argv: Argv) -> Argv:
    """Return the argv that starts `argv` on a host, with the checks and variables that a job script has.

    Such a host runs no job script, so the checks and variables become part of the command.
    """
    argv = with_folder_check(job, argv)
    if job.container.code is not None and runtime_of(job).has_container:
        argv = ("sh", "-c", _REQUIRE_CODE, "sh", job.workspace, *argv)
    return _with_settings(job, argv)


def _with_settings(job: Job, argv: Argv) -> Argv:
    """Return an argv that sets the variables of a job script and then runs `argv`.

    It has one of four forms:

    * ``sh -c "export NAME=VALUE; exec ARGV"``, if the shell must expand a variable of the site in `argv`
    * ``ARGV`` alone for Docker, because it already contains the variables as options
    * ``sh -c 'export NAME=VALUE; exec "$@"' sh ARGV``, if a variable depends on the node
    * ``env NAME=VALUE ARGV`` in all other cases
    """
    # A `ShellText` is an argument in which the shell must expand a variable. So it must be part of the
    # shell's text: the shell does not expand variables in "$@".
    has_shell_text = any(isinstance(argument, quoting.ShellText) for argument in argv)
    if has_shell_text:
        command = " ".join(map(quoting.quote, argv))
        return _shell_argv(job, f"exec {command}")
    if runtime_of(job).passes_variables_as_options:
        return argv
    if _has_node_values(job):
        return (*_shell_argv(job, 'exec "$@"'), "sh", *argv)
    if not job.settings:
        return argv
    return ("env", *quoting.assignments(job.settings), *argv)


def _shell_argv(job: Job, exec_line: str) -> Argv:
    """Return the argv of a shell that sets the variables of a job script and then runs `exec_line`."""
    return ("sh", "-c", "; ".join((*runtime_of(job).exports(job), exec_line)))


def _has_node_values(job: Job) -> bool:
    """Return whether a variable of the job depends on the node, so that only a shell there can set it."""
    if job.recipe.system.runtime.host_libs:  # these folders are put before the node's own LD_LIBRARY_PATH
        return True
    if job.container.env_file:  # the file is read on the node
        return True
    runtime = runtime_of(job)
    if runtime.has_container:  # its variables of system.env are arguments of env, which are shell text
        return False
    # A variable of system.env is a default, which is used only if the node has no value of its own.
    return len(runtime.system_variables(job)) > 0


def _check_gpus(job: Job) -> None:
    """Raise UsageError if the job requests GPUs, but the recipe's options start the container without them.

    Without this check, the program would find no GPU, and might run on the CPU without a message.
    """
    if not job.allocation.gpus or runtime_of(job).passes_gpus(job):
        return
    name = job.recipe.name
    raise UsageError(
        f"--gpus {job.allocation.gpus}, but {name} starts its container without GPUs",
        where=job.recipe.where("system", "runtime"),
        hint=f"use a recipe that extends {name} with system.runtime.options: [--gpus=all]",
    )

"""Systems: everything that ``imgkit run`` knows about a scheduler, one module each, loaded by name.

What recipes need of a shipped one is in ``recipe/systems.py``. A plug-in adds one by an entry point of the
group ``imgkit.systems``: an object of a class that extends `System`.
"""

from __future__ import annotations

import abc
import importlib
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from imgkit_builder.base.flags import declared
from imgkit_builder.jobs import quoting
from imgkit_builder.jobs.job import Argv, Job, Script
from imgkit_builder.jobs.request import JobRequest, SystemFlags
from imgkit_builder.jobs.runtimes import runtime_of
from imgkit_builder.jobs.submitted import JobState, JobStatus, QueuedJob
from imgkit_builder.recipe import systems as registry
from imgkit_builder.recipe.systems import Registration, SystemFault
from imgkit_entrypoints.errors import ImgkitError, ToolFailed, UsageError

__all__ = ["Installed", "Registration", "System", "SystemFault", "installed", "named"]

MODULES: Mapping[str, str] = {
    "slurm": "slurm",
    "pbs": "pbs",
    "runai": "runai",
    "mpi": "mpi",
    "standalone": "local",
    "kubeflow": "kubeflow",
}
"""Name -> the module here that has its `SYSTEM`; no recipe names ``kubeflow``: it takes jobs of RunAI."""


NEW_CONTAINER = (
    "a new container on a node of the job, with the job's image, folders and variables; it is not "
    "the one in which the job's program runs"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobShell:
    """How one opens a shell in a running job."""

    argv: Argv
    description: str
    """What the shell runs in, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueCommands:
    """Commands of a scheduler, and what one of its messages means."""

    submit: str = ""
    """The program that queues scripts on a login node; empty: then no remote takes such jobs."""
    own_jobs: Argv = ()
    """Lists this user's jobs, for one whose id is unknown."""
    unfinished_ids: Argv = ()
    """Prints the ids of all jobs that wait or run. A word with ``{cluster}`` is left out unless the scheduler
    named a cluster.
    """
    unknown_job: str = ""
    """Pattern of Python and ``grep -E`` in the output of a failed status command: there is no such job (any
    more).
    """


class System(abc.ABC):
    """A scheduler, or the lack of one: it writes jobs and the commands about them, and runs nothing."""

    flags: type[Any] = SystemFlags
    """A `SystemFlags` dataclass with the flags that only this system has (`request.flag`)."""
    uses: tuple[str, ...] = ()
    """Flags of every job that mean something here, out of `OPTIONAL`; the others cause a warning."""
    registration: Registration = Registration()
    """What recipes need to know: aliases, runtimes, checks of the system section."""
    placement: str = ""
    """How each of several nodes detects its rank: a name that ``dist-run --scheduler`` takes. Empty: the
    node agent finds out from the variables that the scheduler or the script sets.
    """
    passes_names: bool = False
    """Whether ``--env NAME`` works: the value gets from here to the program without being in any text."""
    spares_take_over: bool = False
    """Whether nothing here ends the node agents of the other nodes when a node is lost."""
    hides_gpus: bool = True
    """Whether programs see only the GPUs that the job asked for."""
    takes_hosts: bool = False
    """Whether the user names the nodes."""
    needs_fields_for_shells: bool = True
    """Whether an interactive job must have the fields that ``system.queue.required`` names."""
    reports_state: bool = True
    """Whether `parse_status` can tell a job that runs from one that has ended."""
    queue: QueueCommands = QueueCommands()
    """The scheduler's own commands, beside those about one job."""

    @abc.abstractmethod
    def script(self, job: Job) -> Script:
        """Return the text of the submission and the command that submits it.

        Raises
        ------
        UsageError : the system takes no such job; one that makes a .sif needs a queue (`need_program`).
        """

    def check(self, job: Job, *, is_submitted: bool = False) -> Iterable[str]:
        """Yield warnings about requests that the user may not have meant.

        Raises
        ------
        UsageError : if `is_submitted`, what can only be known on the machine that submits the job now.
        """
        spares = () if self.spares_take_over else spare_waits_for_nothing(job)
        return (*program_starts_once(job.command), *part_of_nodes(job), *spares)

    def parse_job_id(self, output: str, name: str) -> str:
        """Return ``ID`` or ``ID;CLUSTER`` from the output of the submission of the job `name`; empty if none.

        The caller refuses what cannot be an id.
        """
        return (output.strip().splitlines() or [""])[-1]

    @abc.abstractmethod
    def status_commands(self, record: QueuedJob) -> tuple[Argv, ...]:
        """Return commands to run in turn until one knows the job.

        The first one prints nothing, or fails, once the job has left the queue.
        """

    def parse_status(self, output: str) -> JobStatus:
        """Return what the output of a status command says; of an array, about all of its tasks."""
        return JobStatus(state="", text=output)

    @abc.abstractmethod
    def log_source(self, record: QueuedJob) -> Argv:
        """Return the command that follows the job's output; for ``tail``, the file is the last word."""

    @abc.abstractmethod
    def cancel_command(self, record: QueuedJob) -> Argv:
        """Return the command that ends the job."""

    def shell_command(self, record: QueuedJob, line: str, node: str) -> JobShell:
        """Return the command that opens a shell in the running job.

        Parameters
        ----------
        line : opens a shell in a container like the job's, in a login shell on one of its nodes.
        node : the node or pod; empty: the first one.

        Raises
        ------
        UsageError : the system starts nothing in a running job.
        """
        raise UsageError(
            f"{record.system} starts no shell in a running job",
            where="--job",
            hint=f"on a node of the job: bash -lc {shlex.quote(line)}" if record.shell_line else None,
        )


def need_program(job: Job) -> None:
    """Raise UsageError if `job` makes a .sif, since there is no queue for it, or since pods pull images."""
    request, message = job.request, "there is no scheduler to submit this to"
    hint = "imgkit build RECIPE --with apptainer" if request.build else "imgkit sif ARCHIVE"
    if runtime_of(job).is_isolated:
        message = "pods pull their image from a registry; a .sif is of no use to them"
        hint = f"imgkit push {job.recipe.name} REGISTRY/{job.recipe.name}:1"
    if job.makes_image:
        raise UsageError(message, where=request.image_flag, hint=hint)


def worst(states: Iterable[JobState]) -> JobState:
    """Return the state of an array: running while a task is, and failed once all ended and one has failed."""
    order: tuple[JobState, ...] = ("running", "waiting", "", "failed", "cancelled", "succeeded")
    return min(states, key=order.index, default="")


def task_id(record: QueuedJob, job_id: str) -> str:
    """Return the whole id of the task `job_id` of the array `record`; empty if it is none of its tasks.

    Slurm writes ``ARRAY_INDEX``, PBS ``SEQUENCE[INDEX].SERVER``, where the server may be left out.
    """
    sequence, brackets, server = record.id.partition("[]")
    if not brackets:
        return job_id if re.fullmatch(rf"{re.escape(record.id)}_[0-9]+", job_id) else ""
    match = re.fullmatch(rf"({re.escape(sequence)}\[[0-9]+\])({re.escape(server)})?", job_id)
    return f"{match[1]}{server}" if match else ""


def need_task(record: QueuedJob, example: str) -> None:
    """Raise UsageError for an array job as a whole, which has no output and no run folder."""
    if record.array:
        raise UsageError(
            f"{record.handle} is an array job: each task has its own output and run folder",
            where="ID",
            hint=f"name a task, for example {example}; imgkit status {record.handle} lists them",
        )


def options_of(job: Job) -> Argv:
    """The options for the scheduler: the recipe's, and those of ``--option``."""
    return (*job.recipe.system.queue.options, *job.request.allocation.options)


def options_with_values(options: Mapping[str, object]) -> Argv:
    """Return ``OPTION=VALUE`` for each option whose value is neither empty nor zero."""
    return tuple(f"{option}={value}" for option, value in options.items() if value)


def user_options(job: Job) -> Argv:
    """Return the options of ``--option``; raise UsageError for one that is not one word."""
    return tuple(map(quoting.option, job.request.allocation.options))


def last_line(output: str, form: str) -> str:
    """The last line of `output` if that alone has the form of an id; else empty, as nobody knows the id."""
    *before, last = output.strip().splitlines() or [""]
    is_id = re.compile(form).fullmatch
    return last if is_id(last) and not any(line != last and is_id(line) for line in before) else ""


_HAS_FOLDERS = (
    'while [ "$1" != -- ]; do [ -e "$1" ] || { echo "imgkit: node $(uname -n) has no $1, which the job '
    'mounts (--bind, --secret-file or system.runtime.binds)" >&2; exit 2; }; shift; done; shift; exec "$@"'
)


def with_folders(job: Job, argv: Argv) -> Argv:
    """Return `argv`, which starts on a node only where that has all that it mounts.

    A runtime names no node, and docker makes an empty folder.
    """
    sources = dict.fromkeys(bind.partition(":")[0] for bind in job.container.binds)
    if not sources or not runtime_of(job).mounts_folders:
        return argv
    return ("sh", "-c", _HAS_FOLDERS, "sh", *map(quoting.expanding, sources), "--", *argv)


def program_starts_once(command: Sequence[str]) -> tuple[str, ...]:
    """Return a warning if `command` is no ``dist-...`` of the image, nor a shell that starts one."""
    if not command or any(re.search(r"\bdist-[a-z]", argument) for argument in command):
        return ()
    name, program = command[0], tuple(command[:2])
    if re.fullmatch(r"python[0-9.]*", PurePath(name).name) and len(program) == 2:
        program = program[1:]  # torchrun starts Python itself
    return (
        f"{name} starts once per node; `dist-run {shlex.join(program[:1])} ...` starts one process per GPU",
    )


def part_of_nodes(job: Job, note: str = "") -> tuple[str, ...]:
    """A warning if a job of several nodes uses only some GPUs of each."""
    nodes, gpus, all_gpus = job.allocation.nodes, job.allocation.gpus, job.recipe.system.node.gpus
    if nodes == 1 or not 0 < gpus < all_gpus:
        return ()
    return (f"{nodes} nodes with {gpus} of {all_gpus} GPUs each{note}; whole nodes are faster",)


def spare_waits_for_nothing(job: Job) -> tuple[str, ...]:
    """A warning if a spare cannot replace a node that is lost during the run."""
    if not job.allocation.size.spares:
        return ()
    return (
        f"--nodes {job.allocation.size}: on {job.recipe.title} a lost node ends the run on all nodes; a "
        "spare only replaces a node that the preflight finds bad",
    )


OPTIONAL = ("account", "queue", "qos", "time", "cpus", "stop-before")
"""Flags of every job that mean nothing on some systems."""

_OWN_NAMES = (
    *("--on", "--base", "--rebuild", "--detach", "--bwlimit", "--dry-run", "--verbose", "-v", "--scaling"),
    *("--trust-folder", "--json", "--help", "-h"),
)
"""Flags of ``imgkit run`` itself, which `cli` declares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """Every system that a recipe can name, by that name, and the errors of plug-ins that cannot be used."""

    systems: Mapping[str, System]
    errors: tuple[ImgkitError, ...]


def named(name: str) -> System:
    """The system of that name.

    Raises
    ------
    ToolFailed : a plug-in that cannot be used; names its distribution.
    UsageError : there is none; its plug-in was removed after a job was submitted by it.
    """
    if name in MODULES:
        module = importlib.import_module(f"{__name__}.{MODULES[name]}")
        system: System = module.SYSTEM
        return system
    try:
        plugin = registry.plugin(name)
    except KeyError:
        raise UsageError(
            f"no system is named {name!r}",
            where="system",
            hint=f"install the plug-in that adds it again; there are {', '.join(registry.names())}",
        ) from None
    return _checked(name, plugin, map(named, registry.SHIPPED))


def installed() -> Installed:
    """All systems. A plug-in that cannot be used is left out and its error comes back."""
    systems: dict[str, System] = {name: named(name) for name in registry.SHIPPED}
    errors = list(registry.refused())
    for name in registry.plugins():
        try:
            systems[name] = _checked(name, named(name), systems.values())
        except ToolFailed as error:
            errors.append(error)
    return Installed(systems=systems, errors=tuple(errors))


def _checked(name: str, plugin: Any, systems: Iterable[System]) -> System:
    """Return `plugin`; raise ToolFailed if imgkit cannot use it, or if a flag of it is one of `systems`."""
    from imgkit_entrypoints.schedulers.resolve import NAMES

    fault, hint = "", ""
    if not isinstance(plugin, System):
        fault, hint = "is no System", "extend the class imgkit_builder.jobs.systems.System"
    elif plugin.placement not in ("", *NAMES):
        fault, hint = f"names the placement {plugin.placement!r}", f"allowed: {', '.join(NAMES)}"
    elif unknown := [name for name in plugin.uses if name not in OPTIONAL]:
        fault, hint = f"uses {unknown[0]!r}", f"allowed: {', '.join(OPTIONAL)}"
    else:
        owners: list[type[Any]] = [JobRequest, *(system.flags for system in systems)]
        reserved = {
            *_OWN_NAMES,
            *(name for owner in owners for flag in declared(owner) for name in flag.names),
        }
        try:
            plugin.flags()
            names = [name for flag in declared(plugin.flags) for name in flag.names]
        except Exception as error:
            fault, names = f"declares flags that cannot be read: {error}", []
        if duplicates := [name for name in names if name in reserved]:
            fault, hint = f"has the flag {duplicates[0]}, which is taken", "rename its flag"
    if fault:
        raise registry.broken(registry.entry_of(name), fault, hint=hint)
    assert isinstance(plugin, System)  # noqa: S101 - for the type checker
    return plugin

"""Systems: everything that ``imgkit run`` knows about a scheduler. Each one is a module, loaded by its name.

``recipe/systems.py`` has what recipes need to know about the systems that imgkit ships. A plug-in adds a
system with an entry point of the group ``imgkit.systems``, whose object is an instance of a subclass of
`System`.
"""

from __future__ import annotations

import abc
import importlib
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Literal

from imgkit_builder.base.flags import declared_options
from imgkit_builder.jobs import quoting, runtimes
from imgkit_builder.jobs.job import Argv, Job, Script
from imgkit_builder.jobs.request import JobRequest, SystemFlags
from imgkit_builder.jobs.runtimes import runtime_of
from imgkit_builder.jobs.submitted import JobState, JobStatus, QueuedJob
from imgkit_builder.recipe import systems as registry
from imgkit_builder.recipe.systems import Registration, SystemFault
from imgkit_entrypoints.errors import ImgkitError, ToolFailed, UsageError

__all__ = ["Installed", "Registration", "System", "SystemFault", "get_system", "load_systems"]

MODULES = {
    "slurm": "slurm",
    "pbs": "pbs",
    "runai": "runai",
    "mpi": "mpi",
    "standalone": "local",
    "kubeflow": "kubeflow",
}
"""The module in this package that has the `SYSTEM` of each name.

No recipe names ``kubeflow``, which takes jobs of RunAI with another ``--format``.
"""


# The description of a shell for which the runtime starts another container: see `JobShell.description`.
NEW_CONTAINER = (
    "a new container on a node of the job, with the job's image, folders and variables; it is not "
    "the one in which the job's program runs"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobShell:
    """The command that opens a shell in a running job."""

    argv: Argv
    description: str
    """Where the shell runs, as a text for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueCommands:
    """Commands of a scheduler, and the meaning of one of its messages and of some of its options."""

    submit: str = ""
    """The program that queues scripts on a login node. It is empty if no remote takes jobs of this system."""
    own_jobs: Argv = ()
    """The command that lists this user's jobs. It is the hint for a user whose job id is unknown."""
    unfinished_ids: Argv = ()
    """The command that prints the ids of all jobs that wait or run.

    An argument with ``{cluster}`` is left out unless the job's id names a cluster.
    """
    unknown_job: str = ""
    """Regular expression for the output of a status command that failed because there is no such job.

    It must mean the same for Python and for ``grep -E``, which searches on a remote.
    """
    fields: Mapping[str, Literal["name", "qos"]] = field(default_factory=dict)
    """The field of ``system.queue`` that an option of the scheduler sets: ``{"--qos": "qos", ...}``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What a system can do for its jobs beyond starting them."""

    passes_names: bool = False
    """Whether ``--env NAME`` works: the program gets the value of this shell, which no script contains."""
    hides_gpus: bool = True
    """Whether programs see only the GPUs that the job asked for."""
    takes_hosts: bool = False
    """Whether the user names the nodes (``--hosts``), because no scheduler chooses them."""
    spares_take_over: bool = False
    """Whether the other node agents go on when a node is lost, so that a spare node can replace it."""
    resumes_jobs: bool = False
    """Whether a job can continue in the run folder of an earlier job."""


class System(abc.ABC):
    """A scheduler, or the way to start jobs without one.

    A system writes the script of a job and the commands about it, and reads their output. It runs no
    commands.
    """

    flags: type[Any] = SystemFlags
    """A `SystemFlags` dataclass with the flags that only this system has (`request.flag`)."""
    uses: tuple[str, ...] = ()
    """Flags out of `OPTIONAL` that have a meaning on this system. The others cause a warning."""
    registration: Registration = Registration()
    """What recipes need to know about the system: its aliases, its runtimes and the checks of its section."""
    placement: str = ""
    """How each of several nodes detects its rank, as a name that ``dist-run --scheduler`` takes.

    If it is empty, the node agent decides by the variables that the scheduler or the script sets.
    """
    abilities: Abilities = Abilities()
    needs_fields_for_shells: bool = True
    """Whether an interactive job must have the fields that ``system.queue.required`` names."""
    reports_state: bool = True
    """Whether `parse_status` can tell a job that runs from one that has ended."""
    code_copier: Literal["", "script", "imgkit"] = ""
    """What copies a job's code into its run folder before the start.

    With ``script``, the job's script copies it (template ``workspace.sh.j2``). With ``imgkit``, imgkit copies
    it and makes the run folder, because the run starts at once. If it is empty, jobs of this system take no
    code.
    """
    queue: QueueCommands = QueueCommands()
    """Commands of the scheduler, other than those about one job."""

    @abc.abstractmethod
    def script(self, job: Job) -> Script:
        """Return the text of the submission and the command that submits it.

        Raises
        ------
        UsageError : the system cannot run the job.
        """

    def conversion_script(self, job: Job) -> Script:
        """Return the script of a job that makes an image file on a node, and the command that submits it.

        Only systems with a queue for such jobs override this method, which refuses them.

        Raises
        ------
        UsageError : the system has no queue for such a job, or no use for such a file.
        """
        if runtimes.get_runtime(job.recipe.system.runtime.kind).is_isolated:
            message = "pods pull their image from a registry; a .sif is of no use to them"
            hint = f"imgkit push {job.recipe.name} REGISTRY/{job.recipe.name}:1"
        else:
            message = "there is no scheduler to submit this to"
            hint = f"here: {shlex.join(job.command)}"
        raise UsageError(message, where="--submit", hint=hint)

    def check(self, job: Job, *, is_submitted: bool = False) -> Iterable[str]:
        """Return warnings about requests that the user may not have meant.

        Parameters
        ----------
        is_submitted : whether this machine submits the job now. Then the check includes what depends on this
            machine, for example a program on its PATH.

        Raises
        ------
        UsageError : a check for `is_submitted` failed.
        """
        warnings = [*single_process_warnings(job.command), *partial_node_warnings(job)]
        if not self.abilities.spares_take_over:
            warnings += idle_spare_warnings(job)
        return warnings

    def parse_job_id(self, output: str, name: str) -> str:
        """Find the job's id in the `output` of the command that submitted the job `name`.

        Return ``ID``, or ``ID;CLUSTER`` where Slurm manages several clusters. The result is empty if the
        output has no id. The caller checks that the result has the form of an id.
        """
        return output.strip().rpartition("\n")[2]

    @abc.abstractmethod
    def status_commands(self, record: QueuedJob) -> tuple[Argv, ...]:
        """Return the commands that print the job's state, to be run in turn until one of them knows the job.

        The first one asks the queue. It prints nothing, or fails, once the job has left the queue.
        """

    def parse_status(self, output: str) -> JobStatus:
        """Parse the output of a status command: the job's state, and the reason of its wait.

        The states of its tasks decide about the state of an array (`array_state`).
        """
        return JobStatus(state="", text=output)

    @abc.abstractmethod
    def log_source(self, record: QueuedJob) -> Argv:
        """Return the command that follows the job's output.

        If the command is ``tail``, its last argument must be the path of the file, which remotes use.
        """

    @abc.abstractmethod
    def cancel_command(self, record: QueuedJob) -> Argv:
        """Return the command that ends the job."""

    def shell_command(self, record: QueuedJob, line: str, node: str) -> JobShell:
        """Return the command that opens a shell in the running job.

        Parameters
        ----------
        line : a command line for a login shell on a node of the job. It opens a shell in a container like the
            job's.
        node : the node or pod in which the shell opens. If it is empty, the shell opens in the first one.

        Raises
        ------
        UsageError : the system cannot start anything in a running job.
        """
        hint = None
        if record.shell_line:
            hint = f"on a node of the job: bash -lc {shlex.quote(line)}"
        raise UsageError(f"{record.system} starts no shell in a running job", where="--job", hint=hint)


def array_state(states: Iterable[JobState]) -> JobState:
    """Return the state of an array job from the states of its tasks: ``succeeded, failed`` -> ``failed``.

    An array runs while one of its tasks runs, and else waits while one waits. It has failed if all tasks have
    ended and one has failed. Without tasks, the state is unknown ("").
    """
    precedence = ("running", "waiting", "", "failed", "cancelled", "succeeded")
    return min(states, key=precedence.index, default="")


def task_id(array: QueuedJob, text: str) -> str:
    """Return the complete id of a task of an array job, or "" if the array has no such task.

    An array job runs the same script several times, and each run is a task. For Slurm, the task 3 of the
    array ``4711`` is ``4711_3``. For PBS, the task 3 of the array ``4711[].server`` is ``4711[3].server``.

    Parameters
    ----------
    text : the id as a user types it, who may leave out the server: ``4711[3]``.
    """
    sequence, brackets, server = array.id.partition("[]")
    if not brackets:
        is_slurm_task = re.fullmatch(rf"{re.escape(sequence)}_[0-9]+", text)
        return text if is_slurm_task else ""
    match = re.fullmatch(rf"({re.escape(sequence)}\[[0-9]+\])({re.escape(server)})?", text)
    if match is None:
        return ""
    return f"{match[1]}{server}"


def refuse_whole_array(record: QueuedJob, example: str) -> None:
    """Raise UsageError if `record` is an array job, for a command that needs one output or one run folder.

    An array as a whole has neither: each of its tasks has its own.

    Parameters
    ----------
    example : the id of a task, for the hint.
    """
    if record.array:
        raise UsageError(
            f"{record.handle} is an array job: each task has its own output and run folder",
            where="ID",
            hint=f"name a task, for example {example}; imgkit status {record.handle} lists them",
        )


def scheduler_options(job: Job) -> Argv:
    """Return the options for the scheduler, first from the recipe and then from ``--option``.

    Raises
    ------
    UsageError : an option is not one word, so that it cannot be a directive of a script.
    """
    return (*recipe_options(job, "options"), *user_options(job))


def recipe_options(job: Job, key: str) -> Argv:
    """Return the options for the scheduler that the recipe has under ``system.queue``.

    Parameters
    ----------
    key : the field with the options, ``options`` or ``chunk``.

    Raises
    ------
    UsageError : an option is not one word. The error names the recipe's line.
    """
    options: Argv = getattr(job.recipe.system.queue, key)
    for index, option in enumerate(options):
        quoting.check_scheduler_option(option, where=job.recipe.where("system", "queue", key, index))
    return options


def options_with_values(options: Mapping[str, object]) -> Argv:
    """Return ``OPTION=VALUE`` for each option whose value is neither empty nor zero nor None."""
    return tuple(f"{option}={value}" for option, value in options.items() if value)


def user_options(job: Job) -> Argv:
    """Return the scheduler options of ``--option``. Raise UsageError if one of them is not one word."""
    return tuple(map(quoting.check_scheduler_option, job.request.allocation.options))


def find_job_id(output: str, pattern: str) -> str:
    """Return the job's id from the output of the command that submitted it: ``welcome\\n4711`` -> ``4711``.

    Sites can print text before the id, which is in the last line. Return "" if the last line is no id. Return
    "" as well if an earlier line is another id, because nobody can tell which of them is the job's.

    Parameters
    ----------
    pattern : regular expression for a whole id.
    """
    lines = output.strip().splitlines()
    ids = {line for line in lines if re.fullmatch(pattern, line)}
    if len(ids) == 1 and lines[-1] in ids:
        return lines[-1]
    return ""


_REQUIRE_FOLDERS = (
    'while [ "$1" != -- ]; do [ -e "$1" ] || { echo "imgkit: node $(uname -n) has no $1, which the job '
    'mounts (--bind, data, --secret-file or system.runtime.binds)" >&2; exit 2; }; shift; done; '
    'shift; exec "$@"'
)
"""Shell text that runs the command after ``--`` in its arguments if all paths before it exist on the node."""


def with_folder_check(job: Job, argv: Argv) -> Argv:
    """Return an argv that runs `argv` only if the node has all paths that the job mounts.

    Without this check, a container runtime's message would not name the node, and docker would create an
    empty folder in place of a missing one.
    """
    folders = mounted_folders(job)
    if not folders:
        return argv
    return ("sh", "-c", _REQUIRE_FOLDERS, "sh", *folders, "--", *argv)


def mounted_folders(job: Job) -> tuple[str, ...]:
    """Return the paths on the nodes of ``--bind``, ``system.runtime.binds`` and the data, each once.

    The paths are shell text: the shell of a node replaces variables of the site in them, such as
    ``$SCRATCH``. The result is empty for a runtime that mounts no folders.
    """
    if not runtime_of(job).mounts_folders:
        return ()
    paths = [bind.partition(":")[0] for bind in job.container.binds]
    paths += [mount.source for mount in job.container.data]
    unique_paths = dict.fromkeys(paths)  # in order
    return tuple(map(quoting.quote_with_site_variables, unique_paths))


def single_process_warnings(command: Sequence[str]) -> tuple[str, ...]:
    """Return a warning if `command` starts only one process per node, or an empty tuple.

    It starts one process per GPU if the command or one of its arguments is a ``dist-...`` program.
    """
    if not command or re.search(r"\bdist-[a-z]", "\n".join(command)):
        return ()
    name = script = command[0]
    is_python = re.fullmatch(r"python[0-9.]*", PurePath(name).name)
    if is_python and len(command) > 1:
        script = command[1]  # dist-run starts Python itself
    return (f"{name} starts once per node; `dist-run {shlex.quote(script)} ...` starts one process per GPU",)


def partial_node_warnings(job: Job, note: str = "") -> tuple[str, ...]:
    """Return a warning, which includes `note`, if a job of several nodes uses only some GPUs of each.

    The result is an empty tuple otherwise, and for a job without GPUs.
    """
    nodes = job.allocation.nodes
    gpus = job.allocation.gpus
    gpus_of_node = job.recipe.system.node.gpus
    if nodes == 1 or not 0 < gpus < gpus_of_node:
        return ()
    return (f"{nodes} nodes with {gpus} of {gpus_of_node} GPUs each{note}; whole nodes are faster",)


def idle_spare_warnings(job: Job) -> tuple[str, ...]:
    """Return a warning if the job has spare nodes, for systems on which a lost node ends the run.

    A spare is a node beyond those that train, which usually replaces a node that is lost (``--nodes 16+1``).
    """
    if not job.allocation.size.spares:
        return ()
    return (
        f"--nodes {job.allocation.size}: on {job.recipe.title} a lost node ends the run on all nodes; a "
        "spare only replaces a node that the preflight finds bad",
    )


OPTIONAL = ("account", "queue", "qos", "time", "cpus", "mem", "mem-per-gpu", "stop-before", "group-readable")
"""Flags that all jobs accept, but that mean nothing on some systems."""

_OWN_NAMES = (
    "--on",
    "--base",
    "--detach",
    "--dry-run",
    "--verbose",
    "-v",
    "--trust-folder",
    "--json",
    "--help",
    "-h",
)
"""Flags of ``imgkit run`` itself, which `cli` declares. A plug-in cannot have flags of the same name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """All systems that a recipe can name, and the errors of plug-ins that imgkit cannot use."""

    systems: Mapping[str, System]
    errors: tuple[ImgkitError, ...]


def get_system(name: str) -> System:
    """Load the system `name` from its module here or from a plug-in, and return it.

    Raises
    ------
    ToolFailed : imgkit cannot use the plug-in; the error names its distribution.
    UsageError : no system has the name, for example because its plug-in was removed after it submitted a job.
    """
    if name in MODULES:
        module = importlib.import_module(f"{__name__}.{MODULES[name]}")
        system: System = module.SYSTEM
        return system
    try:
        plugin = registry.load_plugin(name)
    except KeyError:
        raise UsageError(
            f"no system is named {name!r}",
            where="system",
            hint=f"install the plug-in that adds it again; there are {', '.join(registry.scheduler_names())}",
        ) from None
    return _validate_plugin(name, plugin, map(get_system, registry.SHIPPED))


def load_systems() -> Installed:
    """Load all systems. Return them with the errors of the plug-ins that imgkit leaves out."""
    systems = {name: get_system(name) for name in registry.SHIPPED}
    errors = list(registry.refused_plugins())
    for name in registry.plugin_names():
        try:
            # `get_system` has compared the plug-in's flags with the shipped systems. Here they are compared
            # with the plug-ins before it, too.
            systems[name] = _validate_plugin(name, get_system(name), systems.values())
        except ToolFailed as error:
            errors.append(error)
    return Installed(systems=systems, errors=tuple(errors))


def _validate_plugin(name: str, plugin: object, systems: Iterable[System]) -> System:
    """Return `plugin`, the object that a plug-in has for the system `name`, if imgkit can use it.

    Raises
    ------
    ToolFailed : the plug-in is no `System`, declares values that imgkit does not have, or has a flag that
        imgkit or one of `systems` has already.
    """
    from imgkit_entrypoints.schedulers.resolve import NAMES

    if not isinstance(plugin, System):
        raise _plugin_error(name, "is no System", "extend the class imgkit_builder.jobs.systems.System")
    if plugin.placement not in ("", *NAMES):
        raise _plugin_error(name, f"names the placement {plugin.placement!r}", f"allowed: {', '.join(NAMES)}")
    for flag_name in plugin.uses:
        if flag_name not in OPTIONAL:
            raise _plugin_error(name, f"uses {flag_name!r}", f"allowed: {', '.join(OPTIONAL)}")
    _refuse_taken_flags(name, plugin, systems)
    return plugin


def _refuse_taken_flags(name: str, plugin: System, systems: Iterable[System]) -> None:
    """Raise ToolFailed if the plug-in that adds the system `name` has a flag of imgkit or of `systems`.

    ``imgkit run`` has the flags of all systems, so no two of them can have the same name.
    """
    try:
        plugin.flags()  # raises if a flag has no default
        flag_names = _flag_names(plugin.flags)
    except Exception as error:  # whatever the plug-in's own code raises
        raise _plugin_error(name, f"declares flags that cannot be read: {error}", "") from None
    taken_names = {*_OWN_NAMES, *_flag_names(JobRequest)}
    for system in systems:
        taken_names.update(_flag_names(system.flags))
    for flag_name in flag_names:
        if flag_name in taken_names:
            raise _plugin_error(name, f"has the flag {flag_name}, which is taken", "rename its flag")


def _flag_names(flags_class: type[Any]) -> list[str]:
    """Return the names of all flags that a dataclass declares: ``["--account", "-A"]``."""
    names: list[str] = []
    for flag in declared_options(flags_class):
        names += flag.names
    return names


def _plugin_error(name: str, problem: str, hint: str) -> ToolFailed:
    """Return the error for the plug-in that adds the system `name`.

    Parameters
    ----------
    problem : the end of a sentence about the plug-in, such as ``is no System``.
    """
    return registry.plugin_error(registry.entry_point_of(name), problem, hint=hint)

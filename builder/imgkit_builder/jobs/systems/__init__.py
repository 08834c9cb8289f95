"""Systems: what ``imgkit run`` knows about each scheduler. Each system is a module, which is loaded by name.

``recipe/systems.py`` contains what recipes need to know about the systems that imgkit ships. A plug-in adds a
system by an entry point in the group ``imgkit.systems``. The entry point leads to an instance of a subclass
of `System`.
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
"""The name of each system, and the module in this package that contains its `SYSTEM`.

No recipe names ``kubeflow``. It takes the jobs of RunAI if ``--format`` selects it.
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
    """Commands of a scheduler, and how to read one of its messages and some of its options."""

    submit: str = ""
    """The program that submits scripts on a login node.

    It is empty if jobs of this system cannot be submitted on a remote.
    """
    own_jobs: Argv = ()
    """The command that lists the jobs of this user. It is the hint if the id of a job is unknown."""
    unfinished_ids: Argv = ()
    """The command that prints the ids of all jobs that wait or run.

    An argument that contains ``{cluster}`` is left out if the job's id names no cluster.
    """
    unknown_job: str = ""
    """Regular expression for the message of a status command that there is no such job.

    It must have the same meaning in Python and in ``grep -E``, which a remote uses.
    """
    fields: Mapping[str, Literal["name", "qos"]] = field(default_factory=dict)
    """The fields of ``system.queue`` that options of the scheduler set: ``{"--qos": "qos", ...}``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What a system can do for its jobs besides starting them."""

    passes_names: bool = False
    """Whether ``--env NAME`` works.

    The program then gets the value that the variable has in this shell, and no script contains the value.
    """
    hides_gpus: bool = True
    """Whether programs see only the GPUs that the job has requested."""
    takes_hosts: bool = False
    """Whether the user names the nodes with ``--hosts``, because no scheduler chooses them."""
    spares_take_over: bool = False
    """Whether the other nodes go on when a node fails, so that a spare node can replace it."""
    resumes_jobs: bool = False
    """Whether a job can continue in the run folder of an earlier job."""


class System(abc.ABC):
    """A scheduler, or a way to start jobs without a scheduler.

    A system writes the script of a job and the commands about the job, and it parses the output of these
    commands. It does not run any commands itself.
    """

    flags: type[Any] = SystemFlags
    """A `SystemFlags` dataclass with the flags that only this system has (`request.flag`)."""
    uses: tuple[str, ...] = ()
    """The flags in `OPTIONAL` that have an effect on this system. The others cause a warning."""
    registration: Registration = Registration()
    """What recipes need to know about the system, such as its aliases and its runtimes."""
    placement: str = ""
    """How each of several nodes finds out its rank, as a value of ``dist-run --scheduler``.

    If it is empty, the node agent (imgkit's process on each node) recognizes the scheduler by the variables
    that are set.
    """
    abilities: Abilities = Abilities()
    needs_fields_for_shells: bool = True
    """Whether interactive jobs, too, must set the fields in ``system.queue.required`` of the recipe."""
    reports_state: bool = True
    """Whether `parse_status` can distinguish a running job from a job that has ended."""
    code_copier: Literal["", "script", "imgkit"] = ""
    """What copies a job's code into its run folder before the start.

    With ``script``, the job's script copies the code (template ``workspace.sh.j2``). With ``imgkit``, imgkit
    itself creates the run folder and copies the code, because the run starts at once. If it is empty, jobs of
    this system take no code.
    """
    queue: QueueCommands = QueueCommands()
    """Commands of the scheduler that are not about a single job."""

    @abc.abstractmethod
    def script(self, job: Job) -> Script:
        """Return the text of the job's script and the command that submits it.

        Raises
        ------
        UsageError : the system cannot run the job.
        """

    def conversion_script(self, job: Job) -> Script:
        """Return the script of a job that creates an image file on a node, and the command that submits it.

        The base class refuses such jobs. Only systems that have a queue for them override this method.

        Raises
        ------
        UsageError : the system has no queue for such a job, or cannot use such a file.
        """
        runs_in_pods = runtimes.get_runtime(job.recipe.system.runtime.kind).is_isolated
        if runs_in_pods:
            message = "pods pull their image from a registry; a .sif is of no use to them"
            hint = f"imgkit push {job.recipe.name} REGISTRY/{job.recipe.name}:1"
        else:
            message = "there is no scheduler to submit this to"
            hint = f"here: {shlex.join(job.command)}"
        raise UsageError(message, where="--submit", hint=hint)

    def check(self, job: Job, *, is_submitted: bool = False) -> Iterable[str]:
        """Return warnings about requests that the user may not have intended.

        Some systems override this method and check more.

        Parameters
        ----------
        is_submitted : whether this machine submits the job now. If so, some systems also check facts about
            this machine, for example a program on its PATH.

        Raises
        ------
        UsageError : a further check of a system failed.
        """
        warnings = [*single_process_warnings(job.command), *partial_node_warnings(job)]
        if not self.abilities.spares_take_over:
            warnings += idle_spare_warnings(job)
        return warnings

    def parse_job_id(self, output: str, name: str) -> str:
        """Return the job's id, which is the last line in the output of the command that submitted the job.

        Systems with another output override this method. Their result is ``ID``, ``ID;CLUSTER`` if Slurm
        manages several clusters, or empty if the output contains no id. The caller checks that the result has
        the form of an id.

        Parameters
        ----------
        output : the output of the command.
        name : the name of the job. In RunAI, it is also the id.
        """
        _, _, last_line = output.strip().rpartition("\n")
        return last_line

    @abc.abstractmethod
    def status_commands(self, record: QueuedJob) -> tuple[Argv, ...]:
        """Return the commands that print the job's state.

        They are run in order until one of them knows the job. The first command asks the queue. Once the job
        has left the queue, this command prints nothing or fails.
        """

    def parse_status(self, output: str) -> JobStatus:
        """Parse the output of a status command: the job's state, and the reason why it waits.

        For an array, the output contains one state for each task. `array_state` combines them.
        """
        return JobStatus(state="", text=output)

    @abc.abstractmethod
    def log_source(self, record: QueuedJob) -> Argv:
        """Return the command that follows the job's output.

        If this command is ``tail``, the path of the file must be its last argument, because remotes read the
        path from there.
        """

    @abc.abstractmethod
    def cancel_command(self, record: QueuedJob) -> Argv:
        """Return the command that ends the job."""

    def shell_command(self, record: QueuedJob, shell_line: str, node: str) -> JobShell:
        """Return the command that opens a shell in the running job.

        Parameters
        ----------
        shell_line : `record.shell_line` with the job's run folder: a command line for a login shell on a node
            of the job, which opens a shell in a container like the job's. It is of no use if
            `record.shell_line` is empty, because the runtime cannot start a second container.
        node : the node or pod in which the shell opens. If it is empty, the shell opens in the first one.

        Raises
        ------
        UsageError : the system cannot start anything in a running job. The hint says how to do so by hand.
        """
        hint = None
        if record.shell_line:
            hint = f"on a node of the job: bash -lc {shlex.quote(shell_line)}"
        raise UsageError(f"{record.system} starts no shell in a running job", where="--job", hint=hint)


def array_state(states: Iterable[JobState]) -> JobState:
    """Return the state of an array job from the states of its tasks: ``succeeded, failed`` -> ``failed``.

    If a task runs, the array runs. Otherwise, if a task waits, the array waits. If all tasks have ended and
    one has failed, the array has failed. Without tasks, the state is unknown ("").
    """
    precedence = ("running", "waiting", "", "failed", "cancelled", "succeeded")
    # The state that comes first in the list decides.
    return min(states, key=precedence.index, default="")


def task_id(array: QueuedJob, text: str) -> str:
    """Return the complete id of a task of an array job, or "" if the array cannot have such a task.

    An array job runs the same script several times, and each run is a task. In Slurm, task 3 of the array
    ``4711`` is ``4711_3``. In PBS, task 3 of the array ``4711[].server`` is ``4711[3].server``.

    Parameters
    ----------
    text : the id as the user types it. The server may be left out: ``4711[3]``.
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
    """Raise UsageError if `record` is an array job.

    Commands that need one output or one run folder call this function. Each task of an array has its own, and
    the array as a whole has none.

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
    """Return the options for the scheduler: those in the recipe, followed by those of ``--option``.

    Raises
    ------
    UsageError : an option contains a blank or quote, so it cannot be a directive in a script.
    """
    return (*recipe_options(job, "options"), *user_options(job))


def recipe_options(job: Job, key: str) -> Argv:
    """Return the options for the scheduler that the recipe sets under ``system.queue``.

    Parameters
    ----------
    key : the field that contains the options, ``options`` or ``chunk``.

    Raises
    ------
    UsageError : an option contains a blank or quote. The error names the line of the recipe.
    """
    options: Argv = getattr(job.recipe.system.queue, key)
    for index, option in enumerate(options):
        quoting.check_scheduler_option(option, where=job.recipe.where("system", "queue", key, index))
    return options


def options_with_values(options: Mapping[str, object]) -> Argv:
    """Return ``OPTION=VALUE`` for each option. Options with the value "", 0 or None are left out."""
    return tuple(f"{option}={value}" for option, value in options.items() if value)


def user_options(job: Job) -> Argv:
    """Return the values of ``--option``. Raise UsageError if one of them contains a blank or quote."""
    return tuple(map(quoting.check_scheduler_option, job.request.allocation.options))


def find_job_id(output: str, pattern: str) -> str:
    """Return the job's id from the output of a submission: ``welcome\\n4711`` -> ``4711``.

    Sites may print text before the id, so the id must be in the last line. The result is "" if the last line
    is not an id. It is also "" if an earlier line is another id, because it is unclear which of them is the
    job's.

    Parameters
    ----------
    output : the output of the command that submitted the job.
    pattern : regular expression for a complete id.
    """
    lines = output.strip().splitlines()
    # A set, because a site may print the same id twice.
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

    Without this check, the error message of a container runtime would not name the node. Docker would even
    create an empty folder in place of a missing one.
    """
    folders = mounted_folders(job)
    if not folders:
        return argv
    return ("sh", "-c", _REQUIRE_FOLDERS, "sh", *folders, "--", *argv)


def mounted_folders(job: Job) -> tuple[str, ...]:
    """Return the paths on the nodes that the job mounts, as shell text. Each path occurs once.

    They come from ``--bind``, ``system.runtime.binds`` and the data. As shell text, a path can contain a
    variable of the site, such as ``$SCRATCH``, which the shell of the node replaces. For a runtime that
    mounts no folders, the result is empty.
    """
    if not runtime_of(job).mounts_folders:
        return ()
    paths = [bind.partition(":")[0] for bind in job.container.binds]
    paths += [mount.source for mount in job.container.data]
    unique_paths = dict.fromkeys(paths)  # keeps the order
    return tuple(map(quoting.quote_with_site_variables, unique_paths))


def single_process_warnings(command: Sequence[str]) -> tuple[str, ...]:
    """Return a warning if `command` starts only one process per node, or an empty tuple otherwise.

    A ``dist-...`` program, as the command or in one of its arguments, starts one process per GPU. Any other
    command is assumed to start only one process.
    """
    if not command or re.search(r"\bdist-[a-z]", "\n".join(command)):
        return ()
    name = script = command[0]
    is_python = re.fullmatch(r"python[0-9.]*", PurePath(name).name)
    if is_python and len(command) > 1:
        script = command[1]  # dist-run itself starts Python
    return (f"{name} starts once per node; `dist-run {shlex.quote(script)} ...` starts one process per GPU",)


def partial_node_warnings(job: Job, note: str = "") -> tuple[str, ...]:
    """Return a warning if a job on several nodes uses only some of the GPUs of each node.

    Otherwise, and for a job without GPUs, the result is an empty tuple.

    Parameters
    ----------
    note : a text that the warning includes.
    """
    nodes = job.allocation.nodes
    gpus = job.allocation.gpus
    gpus_of_node = job.recipe.system.node.gpus
    if nodes == 1 or not 0 < gpus < gpus_of_node:
        return ()
    return (f"{nodes} nodes with {gpus} of {gpus_of_node} GPUs each{note}; whole nodes are faster",)


def idle_spare_warnings(job: Job) -> tuple[str, ...]:
    """Return a warning if the job has spare nodes, for systems on which a lost node ends the whole run.

    A spare node (``--nodes 16+1``) can replace a node that fails. On these systems, it can only replace a
    node that fails the check before the start.
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
    """All systems that a recipe can name, and the errors of plug-ins that cannot be used."""

    systems: Mapping[str, System]
    errors: tuple[ImgkitError, ...]


def get_system(name: str) -> System:
    """Load the system `name` from its module in this package, or from a plug-in, and return it.

    Raises
    ------
    ToolFailed : the plug-in cannot be used. The error names its distribution.
    UsageError : no system has this name. For example, the plug-in that submitted a job was removed
        afterwards.
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
    """Load and return all systems, with the errors of the plug-ins that cannot be used."""
    systems = {name: get_system(name) for name in registry.SHIPPED}
    errors = list(registry.refused_plugins())
    for name in registry.plugin_names():
        try:
            # `get_system` has compared the flags of the plug-in with those of the shipped systems. Here, they
            # are also compared with those of the plug-ins that were loaded before.
            systems[name] = _validate_plugin(name, get_system(name), systems.values())
        except ToolFailed as error:
            errors.append(error)
    return Installed(systems=systems, errors=tuple(errors))


def _validate_plugin(name: str, plugin: object, systems: Iterable[System]) -> System:
    """Return `plugin` if it is a system that imgkit can use.

    Parameters
    ----------
    name : the name of the system.
    plugin : the object to which the entry point of the plug-in leads.
    systems : the systems whose flags the plug-in must not repeat.

    Raises
    ------
    ToolFailed : the plug-in is no `System`, declares unknown values, or has a flag that imgkit or one of
        `systems` already has.
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
    """Raise ToolFailed if the plug-in for the system `name` has a flag of imgkit or of one of `systems`.

    ``imgkit run`` accepts the flags of all systems, so each name can be used only once.
    """
    try:
        plugin.flags()  # called only because it raises an error if a flag has no default
        flag_names = _flag_names(plugin.flags)
    except Exception as error:  # the plug-in's own code can raise anything
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
    problem : what is wrong with the plug-in, as the end of a sentence, such as ``is no System``.
    """
    return registry.plugin_error(registry.entry_point_of(name), problem, hint=hint)

"""The schedulers that ``system.scheduler`` can name: those shipped with imgkit, and those of plug-ins.

To check a recipe, imgkit needs only the `Registration` of its scheduler: aliases, container runtimes and
rules. Shipped schedulers are listed here, and plug-ins register the same data. The code that writes jobs is
in another package, which this module does not import.

A plug-in is an entry point of the group `GROUP`. The name of the entry point is the value of
``system.scheduler``. imgkit looks for plug-ins only if a recipe names a scheduler that is not shipped.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from imgkit_builder.recipe.problems import allowed_hint
from imgkit_entrypoints.errors import ImgkitError, ToolFailed
from imgkit_entrypoints.rules import Fault
from imgkit_entrypoints.system import SystemFacts

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "imgkit.systems"
"""The entry-point group of plug-ins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemFault:
    """A value in the system section of a recipe that the scheduler cannot use."""

    path: tuple[str, ...]
    """The keys below ``system``, for example ``("queue", "account")``."""
    what: str
    hint: str = ""


def _no_faults(facts: SystemFacts) -> Iterable[SystemFault]:
    return ()


_SET_BY_JOBS = ("--container-image", "--container-mounts", "--container-workdir")
"""Options of pyxis that imgkit sets in every job."""


def _check_pyxis_options(facts: SystemFacts) -> Iterator[SystemFault]:
    """Yield options of the container runtime pyxis that a recipe must not set.

    These are options that pyxis does not have, options that imgkit sets in every job, and
    ``--container-name``.
    """
    if facts.runtime.kind != "pyxis":
        return
    path = ("runtime", "options")
    for option in facts.runtime.options:
        name, _, _ = option.partition("=")
        if not name.startswith(("--container-", "--no-container-")):
            message = f"{option} is not an option of pyxis"
            yield SystemFault(path=path, what=message, hint="--container-... and --no-container-...")
        elif name in _SET_BY_JOBS:
            hint = "remove it; mounts are system.runtime.binds"
            yield SystemFault(path=path, what=f"{name} is set by each job", hint=hint)
        elif name == "--container-name":
            # With --container-name, pyxis keeps the container for later jobs.
            message = "a container with this name is started again, and the image of a later job is not"
            yield SystemFault(path=path, what=message, hint="remove --container-name")


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """What imgkit must know about a scheduler to check a recipe."""

    aliases: tuple[str, ...] = ()
    """Other common names for the scheduler, in lower case. A recipe that uses such a name gets a hint."""
    runtimes: tuple[str, ...] = ("singularity", "host")
    """The kinds of runtime that can start the program on a node with the variables of that node.

    A job with any other kind is refused.
    """
    by_podman: bool = False
    """Whether the kind docker in `runtimes` means Podman only.

    Podman's containers are processes of the job, so the scheduler can end them. Docker's containers belong to
    a service of the node.
    """
    check: Callable[[SystemFacts], Iterable[SystemFault]] = _no_faults
    """A function that yields every value in a recipe's system section that the scheduler cannot use."""
    keys: tuple[str, ...] = ()
    """The keys in `KEYS_OF_ONE_SCHEDULER` that the scheduler uses."""

    def find_faults(self, facts: SystemFacts) -> Iterator[SystemFault]:
        """Yield every value in a recipe's system section that this scheduler cannot use.

        This includes keys that only another scheduler uses, such as ``queue.node_pools`` of RunAI.
        """
        defaults = SystemFacts()
        for key, only_user in KEYS_OF_ONE_SCHEDULER.items():  # "queue.output", "Slurm"
            if key in self.keys:
                continue  # this scheduler is the one that uses the key
            get_value = operator.attrgetter(key)  # "queue.output" -> facts.queue.output
            is_set = get_value(facts) != get_value(defaults)
            if is_set:
                message = f"is not used by {facts.scheduler}"
                hint = f"remove it: only {only_user}'s jobs obey it"
                yield SystemFault(path=tuple(key.split(".")), what=message, hint=hint)
        # The rules of this scheduler alone.
        yield from self.check(facts)


_SLURM_KEYS = (
    *("partitions", "partition_list", "node.gres"),
    *("fabric.head_suffix", "queue.srun", "queue.output"),
)
_RUNAI_KEYS = ("queue.node_pools",)
KEYS_OF_ONE_SCHEDULER: Mapping[str, str] = {
    **dict.fromkeys(_SLURM_KEYS, "Slurm"),
    **dict.fromkeys(_RUNAI_KEYS, "RunAI"),
}
"""Key below ``system`` that only one scheduler uses -> that scheduler."""


SHIPPED: Mapping[str, Registration] = {
    "slurm": Registration(
        runtimes=("singularity", "docker", "pyxis", "host"),
        by_podman=True,
        check=_check_pyxis_options,
        keys=_SLURM_KEYS,
    ),
    "pbs": Registration(aliases=("torque",), runtimes=("singularity", "docker", "host")),
    "runai": Registration(runtimes=("kubernetes",), keys=_RUNAI_KEYS),
    "mpi": Registration(aliases=("openmpi", "mpirun"), runtimes=("docker", "singularity", "host")),
    "standalone": Registration(runtimes=("docker", "singularity", "host")),
}
"""The schedulers that need no plug-in, by the value of ``system.scheduler``."""


def is_podman(command: str) -> bool:
    """Return whether `command`, the program of a runtime of kind docker, is ``podman`` or ``podman-hpc``."""
    return PurePath(command).name.startswith("podman")


RESERVED = ("kubeflow",)
"""Names that neither a recipe nor a plug-in can use, because another scheduler passes jobs on to these
systems."""


def is_scheduler(name: str) -> bool:
    """Return whether `name` is the name of a shipped scheduler or a plug-in."""
    return name in SHIPPED or name in _plugins()


def find_scheduler_fault(name: str) -> Fault | None:
    """Return what is wrong with a value of ``system.scheduler``, or None if it names a scheduler."""
    if is_scheduler(name):
        return None
    return f"{name!r} is not known", allowed_hint(_resolve_alias(name), scheduler_names())


def scheduler_names() -> tuple[str, ...]:
    """Return the values that ``system.scheduler`` can have.

    Shipped schedulers come before those of plug-ins.
    """
    return (*SHIPPED, *plugin_names())


def _resolve_alias(alias: str) -> str:
    """Return the scheduler with the alias `alias`: ``torque`` -> ``pbs``.

    If no scheduler has this alias, return it unchanged.
    """
    for name in scheduler_names():
        try:
            aliases = find_registration(name).aliases
        except ToolFailed:
            continue  # a broken plug-in must not replace the message about the unknown scheduler
        if alias.lower() in aliases:
            return name
    return alias


def find_registration(name: str) -> Registration:
    """Return the registration of the scheduler `name`, which may be shipped or come from a plug-in.

    Raises
    ------
    KeyError : neither imgkit nor a plug-in has a scheduler of that name.
    ToolFailed : several plug-ins have that name, or the plug-in cannot be loaded.
    """
    if name in SHIPPED:
        return SHIPPED[name]
    registration: Registration = load_plugin(name).registration
    return registration


def load_plugin(name: str) -> Any:
    """Return the object that the plug-in `name` registers.

    Raises
    ------
    KeyError : no plug-in has that name.
    ToolFailed : several plug-ins have that name, or the plug-in cannot be loaded. The error names the
        distribution.
    """
    # If two plug-ins had the same name, the order of folders on sys.path would decide between them.
    entry, *duplicates = _plugins()[name]
    if duplicates:
        raise ToolFailed(
            f"{len(duplicates) + 1} plug-ins add a system named {name!r}",
            where=" and ".join(distribution_and_version(item) for item in (entry, *duplicates)),
            hint=f"pip uninstall {distribution_name(duplicates[0])}",
        )
    try:
        system = entry.load()
    except (Exception, SystemExit) as error:  # the code of a plug-in may raise anything
        first_line = str(error).partition("\n")[0]
        raise plugin_error(entry, f"cannot be loaded: {type(error).__name__}: {first_line}") from error
    if not isinstance(getattr(system, "registration", None), Registration):
        hint = f"{entry.value} must be an object of a class that extends System: see CONTRIBUTING.md"
        raise plugin_error(entry, "has no registration", hint=hint)
    return system


def plugin_names() -> tuple[str, ...]:
    """Return the names of the schedulers that plug-ins add."""
    return tuple(sorted(_plugins()))


def refused_plugins() -> Iterator[ImgkitError]:
    """Yield an error for each plug-in whose name imgkit itself uses. Such a plug-in is never loaded."""
    for entry in _entries():
        if entry.name in SHIPPED or entry.name in RESERVED:
            problem = "is ignored: imgkit ships a system of that name"
            yield plugin_error(entry, problem, hint="rename the entry point")


def entry_point_of(name: str) -> EntryPoint:
    """Return the entry point of the plug-in `name`."""
    return _plugins()[name][0]


def plugin_error(entry: EntryPoint, problem: str, *, hint: str = "") -> ToolFailed:
    """Return the error for a plug-in that cannot be used.

    The error names the distribution, so that the user can uninstall it.
    """
    name = distribution_name(entry)
    return ToolFailed(
        f"the plug-in for the system {entry.name!r} {problem}",
        where=distribution_and_version(entry),
        hint=hint or f"ask the authors of {name}, or remove it: pip uninstall {name}",
    )


def distribution_and_version(entry: EntryPoint) -> str:
    """Return the name and version of the distribution that contains the entry point."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value


def distribution_name(entry: EntryPoint) -> str:
    """Return the name of the distribution that contains the entry point."""
    return entry.dist.name if entry.dist else entry.value


@functools.cache
def _entries() -> tuple[EntryPoint, ...]:
    """Return all entry points of the group `GROUP`."""
    # Imported and called only when needed, because it reads the metadata of every installed distribution.
    from importlib import metadata

    return tuple(metadata.entry_points(group=GROUP))


@functools.cache
def _plugins() -> Mapping[str, tuple[EntryPoint, ...]]:
    """Return the entry points of plug-ins by name.

    If two distributions use a name, it has several entry points.
    """
    plugins: dict[str, tuple[EntryPoint, ...]] = {}
    for entry in _entries():
        # A plug-in must not replace a part of imgkit. `refused_plugins` reports those that try.
        if entry.name not in SHIPPED and entry.name not in RESERVED:
            plugins[entry.name] = (*plugins.get(entry.name, ()), entry)
    return plugins

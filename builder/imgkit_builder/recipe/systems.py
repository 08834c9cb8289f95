"""What ``system.scheduler`` can be: shipped schedulers as data, and plug-ins, which register the same data.

A recipe is checked by a scheduler's `Registration` alone: aliases, runtimes, rules. Writing jobs for it is
another package's work, which nothing here imports. A plug-in is an entry point of the group `GROUP`; its name
is the word. Nothing looks for plug-ins unless a recipe's word is not a shipped one.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from imgkit_builder.recipe import pod_versions
from imgkit_entrypoints.errors import ImgkitError, ToolFailed
from imgkit_entrypoints.system import SystemFacts

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "imgkit.systems"
"""The entry-point group of plug-ins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemFault:
    """Something in a recipe's system section that the scheduler cannot work with."""

    path: tuple[str, ...]
    """Keys below ``system``, for example ``("queue", "account")``."""
    what: str
    hint: str = ""


def _no_faults(facts: SystemFacts) -> Iterable[SystemFault]:
    return ()


def _unknown_versions(facts: SystemFacts) -> Iterator[SystemFault]:
    for key, what in pod_versions.faults(facts):
        yield SystemFault(path=("queue", key), what=what)


_SET_BY_JOBS = ("--container-image", "--container-mounts", "--container-workdir")


def _options_of_pyxis(facts: SystemFacts) -> Iterator[SystemFault]:
    """Options of another runtime, which srun refuses, and those that every job sets itself."""
    for word in facts.runtime.options if facts.runtime.kind == "pyxis" else ():
        name = word.partition("=")[0]
        if not name.startswith(("--container-", "--no-container-")):
            what, hint = f"{word} is not an option of pyxis", "--container-... and --no-container-..."
        elif name in _SET_BY_JOBS:
            what, hint = f"{name} is set by each job", "remove it; mounts are system.runtime.binds"
        elif name == "--container-name":
            what = "a container with this name is started again, and the image of a later job is not"
            hint = "remove --container-name"
        else:
            continue
        yield SystemFault(path=("runtime", "options"), what=what, hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """What reading a recipe needs to know about a scheduler."""

    aliases: tuple[str, ...] = ()
    """Other words that people use for it, in lower case; a recipe with one of them gets a hint."""
    runtimes: tuple[str, ...] = ("singularity", "host")
    """What can start the program on a node with the node's variables; a job with another is refused."""
    by_podman: bool = False
    """Whether docker among `runtimes` means Podman alone: its containers are processes of the job, which the
    scheduler ends, while those of Docker belong to a service of the node.
    """
    check: Callable[[SystemFacts], Iterable[SystemFault]] = _no_faults
    """Everything in a recipe's system section that the scheduler cannot work with."""
    keys: tuple[str, ...] = ()
    """Those of `SPECIAL` that the scheduler obeys."""

    def faults(self, facts: SystemFacts) -> Iterator[SystemFault]:
        """What `check` finds, and keys with a value that the scheduler would ignore."""
        usual = SystemFacts()
        for key in SPECIAL:
            path = tuple(key.split("."))
            if key not in self.keys and operator.attrgetter(key)(facts) != operator.attrgetter(key)(usual):
                what = f"is not used by {facts.scheduler}"
                yield SystemFault(path=path, what=what, hint="remove it: only Slurm's jobs obey it")
        yield from self.check(facts)


SPECIAL = ("partitions", "fabric.head_suffix", "queue.srun", "queue.output")
"""Keys below ``system`` that are for some schedulers only."""


SHIPPED: Mapping[str, Registration] = {
    "slurm": Registration(
        runtimes=("singularity", "docker", "pyxis", "host"),
        by_podman=True,
        check=_options_of_pyxis,
        keys=SPECIAL,
    ),
    "pbs": Registration(aliases=("torque",), runtimes=("singularity", "docker", "host")),
    "runai": Registration(runtimes=("kubernetes",), check=_unknown_versions),
    "mpi": Registration(aliases=("openmpi", "mpirun"), runtimes=("docker", "singularity", "host")),
    "standalone": Registration(runtimes=("docker", "singularity", "host")),
}
"""Word of the recipe -> the scheduler."""


def is_podman(command: str) -> bool:
    """Whether the program of a runtime of the kind docker is Podman: ``podman`` or ``podman-hpc``."""
    return PurePath(command).name.startswith("podman")


RESERVED = ("kubeflow",)
"""Names that no recipe and no plug-in can have: another scheduler hands jobs to them."""


def is_known(word: str) -> bool:
    """Whether a shipped scheduler or a plug-in has this name."""
    return word in SHIPPED or word in _plugins()


def words() -> tuple[str, ...]:
    """All words that ``system.scheduler`` can be: the shipped schedulers, then plug-ins by name."""
    return (*SHIPPED, *sorted(_plugins()))


def meant(word: str) -> str:
    """The scheduler that has `word` as an alias; `word` itself where none has."""
    for known in words():
        try:
            aliases = registration(known).aliases
        except ToolFailed:
            continue  # a broken plug-in: the message about `word` must not depend on it
        if word.lower() in aliases:
            return known
    return word


def registration(word: str) -> Registration:
    """The data of the shipped scheduler or plug-in of that name. Raises as `plugin` does."""
    if word in SHIPPED:
        return SHIPPED[word]
    found: Registration = plugin(word).registration
    return found


def plugin(word: str) -> Any:
    """The object that the plug-in `word` registers.

    Raises
    ------
    KeyError : no plug-in has that name.
    ToolFailed : it cannot be loaded; names its distribution.
    """
    first, *others = _plugins()[word]
    if others:
        raise ToolFailed(
            f"{len(others) + 1} plug-ins add a system named {word!r}",
            where=" and ".join(origin(entry) for entry in (first, *others)),
            hint=f"pip uninstall {distribution(others[0])}",
        )
    try:
        found = first.load()
    except (Exception, SystemExit) as error:  # a plug-in's own code: anything can come out of it
        reason = (str(error).splitlines() or [""])[0]
        raise broken(first, f"cannot be loaded: {type(error).__name__}: {reason}") from error
    if not isinstance(getattr(found, "registration", None), Registration):
        hint = f"{first.value} must be an object of a class that extends System: see CONTRIBUTING.md"
        raise broken(first, "has no registration", hint=hint)
    return found


def plugins() -> tuple[str, ...]:
    """Names of the schedulers that plug-ins add."""
    return tuple(sorted(_plugins()))


def refused() -> Iterator[ImgkitError]:
    """An error for each plug-in whose name is taken by imgkit; it is never loaded."""
    for entry in _entries():
        if entry.name in SHIPPED or entry.name in RESERVED:
            yield broken(
                entry, "is ignored: imgkit ships a system of that name", hint="rename the entry point"
            )


def entry_of(word: str) -> EntryPoint:
    """The entry point of the plug-in `word`."""
    return _plugins()[word][0]


def broken(entry: EntryPoint, what: str, *, hint: str = "") -> ToolFailed:
    """The error for a plug-in that cannot be used, with its distribution."""
    name = distribution(entry)
    return ToolFailed(
        f"the plug-in for the system {entry.name!r} {what}",
        where=origin(entry),
        hint=hint or f"ask the authors of {name}, or remove it: pip uninstall {name}",
    )


def origin(entry: EntryPoint) -> str:
    """``DISTRIBUTION VERSION``, which brought the entry point."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value


def distribution(entry: EntryPoint) -> str:
    """Name of the distribution that brought the entry point."""
    return entry.dist.name if entry.dist else entry.value


@functools.cache
def _entries() -> tuple[EntryPoint, ...]:
    from importlib import metadata  # reads the metadata of every installed distribution: only when needed

    return tuple(metadata.entry_points(group=GROUP))


@functools.cache
def _plugins() -> Mapping[str, tuple[EntryPoint, ...]]:
    """Plug-ins by name; more than one under a name where distributions disagree."""
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for entry in _entries():
        if entry.name not in SHIPPED and entry.name not in RESERVED:
            found[entry.name] = (*found.get(entry.name, ()), entry)
    return found

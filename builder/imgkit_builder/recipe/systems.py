"""The words that ``system.scheduler`` can be, and the system behind each: shipped ones and plug-ins.

A plug-in is an entry point of the group ``imgkit.systems``; its name is the word. A recipe needs little of
its system (`RecipeSide`); ``job/systems`` has the whole protocol. Systems load by name: a recipe imports
its own system only, and nothing looks for plug-ins unless the word is not a shipped one.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from imgkit_entrypoints.errors import ImgkitError, ToolFailed
from imgkit_entrypoints.system import SystemFacts

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "imgkit.systems"
"""The entry-point group of plug-ins."""

SHIPPED: Mapping[str, str] = {
    "slurm": "imgkit_builder.job.systems.slurm:SYSTEM",
    "pbs": "imgkit_builder.job.systems.pbs:SYSTEM",
    "runai": "imgkit_builder.job.systems.runai:SYSTEM",
    "mpi": "imgkit_builder.job.systems.mpi:SYSTEM",
    "standalone": "imgkit_builder.job.systems.local:SYSTEM",
}
"""Word of the recipe -> MODULE:OBJECT, in the form of an entry point's value."""

HELPERS: Mapping[str, str] = {"kubeflow": "imgkit_builder.job.systems.kubeflow:SYSTEM"}
"""Systems that another system hands jobs to; no recipe names them, but records of submitted jobs do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemFault:
    """Something in a recipe's system section that the system cannot work with."""

    path: tuple[str, ...]
    """Keys below ``system``, for example ``("queue", "account")``."""
    what: str
    hint: str = ""


class RecipeSide(Protocol):
    """What reading a recipe needs to know about a system."""

    aliases: tuple[str, ...]
    runtimes: tuple[Any, ...]

    def check_recipe(self, facts: SystemFacts) -> Iterable[SystemFault]:
        """Everything in `facts` that the system cannot work with."""


def is_known(word: str) -> bool:
    """Whether a shipped system or a plug-in has this name."""
    return word in SHIPPED or word in _plugins()


def words() -> tuple[str, ...]:
    """All words that ``system.scheduler`` can be: the shipped systems, then plug-ins by name."""
    return (*SHIPPED, *sorted(_plugins()))


def meant(word: str) -> str:
    """The system that has `word` as an alias; `word` itself where none has."""
    for known in words():
        try:
            side: RecipeSide = load(known)
        except ToolFailed:
            continue  # a broken plug-in: the message about `word` must not depend on it
        if word.lower() in side.aliases:
            return known
    return word


def load(word: str) -> Any:
    """The system of that name.

    Raises
    ------
    KeyError : nothing has that name.
    ToolFailed : a plug-in that cannot be loaded; names its distribution.
    """
    value = SHIPPED.get(word) or HELPERS.get(word)
    if value is not None:
        module, _, name = value.partition(":")
        return getattr(importlib.import_module(module), name)
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
    require(first, found, RecipeSide)
    return found


def require(entry: EntryPoint, found: Any, protocol: type[Any]) -> None:
    """Raise ToolFailed if `found` lacks a name of `protocol`."""
    names = (*protocol.__annotations__, *vars(protocol))
    lacking = [name for name in dict.fromkeys(names) if name[0] != "_" and not hasattr(found, name)]
    if lacking:
        raise broken(
            entry,
            f"lacks {', '.join(lacking)}",
            hint=f"{entry.value} must be an object of a class that extends imgkit_builder.job.systems.System",
        )


def plugins() -> tuple[str, ...]:
    """Names of the systems that plug-ins add."""
    return tuple(sorted(_plugins()))


def refused() -> Iterator[ImgkitError]:
    """An error for each plug-in whose name imgkit uses itself; it is never loaded."""
    for entry in _entries():
        if entry.name in SHIPPED or entry.name in HELPERS:
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
        if entry.name not in SHIPPED and entry.name not in HELPERS:
            found[entry.name] = (*found.get(entry.name, ()), entry)
    return found

"""Which launcher started this process, by the variables that it sets, and what it means when several show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.schedulers import hydra, kubernetes, manual, openmpi, pals, pbs, slurm, standalone
from imgkit_entrypoints.schedulers.environment import present
from imgkit_entrypoints.schedulers.placement import Placement, Read


class Scheduler(Protocol):
    """What each module of this package offers; besides, a `start_argv` with what its launcher needs."""

    NAME: str
    FORWARD: tuple[str, ...]

    def claims(self, env: Mapping[str, str]) -> tuple[str, ...]:
        """The variables that show this launcher; empty: not mine."""

    def place(self, env: Mapping[str, str], read: Read) -> Placement:
        """This process' node; WrongStart where only one process of several nodes was started."""

    def per_node_command(self, command: Sequence[str], *, nnodes: int, env: Mapping[str, str]) -> str:
        """What to type instead."""


SHOWING: tuple[str, ...] = ("slurm", "pbs")
"""The recipes' schedulers that show in every job; the others do not in one of a single node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Two launchers whose variables are seen together for a known reason: the first one places the
    process.
    """

    first: str
    second: str
    unless: tuple[str, ...] = ()
    """Any of these set means that the second really is at work too."""


LAUNCHERS: tuple[Scheduler, ...] = (slurm, pals, pbs, openmpi, hydra, kubernetes)
BY_NAME: Mapping[str, Scheduler] = {module.NAME: module for module in (*LAUNCHERS, manual, standalone)}

# What recipes and users call them -> the modules that may be meant.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "runai": ("kubeflow",),
    "kubernetes": ("kubeflow",),
    "mpi": ("openmpi", "pals", "hydra"),  # PALS sets PMI_* too
}
NAMES: tuple[str, ...] = tuple(sorted((*BY_NAME, *ALIASES)))
"""All that ``--scheduler`` takes."""

OVERLAPS: tuple[Overlap, ...] = (
    # Slurm's Cray plugin sets PALS_*, its pmi2 and pmix plugins PMI_*, in steps of its own.
    Overlap(first="slurm", second="pals"),
    Overlap(first="slurm", second="hydra", unless=hydra.OWN),
    Overlap(first="pals", second="hydra", unless=hydra.OWN),
    # mpiexec inside a PBS job is the right way to start there: it knows of ranks, PBS only of the job.
    Overlap(first="pals", second="pbs"),
    Overlap(first="openmpi", second="pbs"),
    Overlap(first="hydra", second="pbs"),
    # RANK, WORLD_SIZE and MASTER_ADDR alone are torch's own names, exported by many a job script.
    *(
        Overlap(first=module.NAME, second="kubeflow", unless=kubernetes.OWN)
        for module in (slurm, pals, pbs, openmpi, hydra)
    ),
)


def claimants(env: Mapping[str, str]) -> list[Scheduler]:
    """The launchers that show, without those that a known overlap explains."""
    found = [module for module in LAUNCHERS if module.claims(env)]
    names = {module.NAME for module in found}
    explained: set[str] = set()
    for overlap in OVERLAPS:  # in this order: what is explained away explains nothing further down
        if overlap.first in names - explained and not present(env, *overlap.unless):
            explained.add(overlap.second)
    return [module for module in found if module.NAME not in explained]


def named(name: str, env: Mapping[str, str]) -> Scheduler:
    """The module that ``--scheduler`` means.

    Raises
    ------
    NoPlan : its variables are not set.
    """
    meant = [BY_NAME[each] for each in ALIASES.get(name, (name,))]
    if meant[0] in (manual, standalone):
        return meant[0]
    claiming = [module for module in meant if module.claims(env)]
    if not claiming:
        others = ", ".join(module.NAME for module in LAUNCHERS if module.claims(env))
        raise NoPlan(
            f"none of {name}'s variables is set",
            where="--scheduler",
            hint=f"those of {others} are: leave --scheduler out"
            if others
            else "was this started by it, and without --cleanenv or --containall?",
        )
    return claiming[0]


def claims(env: Mapping[str, str]) -> tuple[str, ...]:
    """The variables by which launchers show, of each launcher one."""
    return tuple(shown[0] for module in LAUNCHERS if (shown := module.claims(env)))


def unseen(name: str, env: Mapping[str, str]) -> str:
    """What is odd where `name`, the recipe's scheduler, should show and no launcher does; else empty."""
    if name not in SHOWING or claims(env):
        return ""
    return f"the recipe says {name}, and no variable of a scheduler is set here"


def refuse_two(claimants: Sequence[Scheduler], env: Mapping[str, str]) -> NoReturn:
    shown = [f"{module.NAME} ({', '.join(module.claims(env)[:3])})" for module in claimants]
    flags = " or ".join(f"--scheduler {module.NAME}" for module in claimants)
    raise NoPlan(
        f"{' and '.join(shown)} both seem to have started this process",
        where=", ".join(module.claims(env)[0] for module in claimants),
        hint=f"say which one counts: {flags} (or IMGKIT_SCHEDULER); each alone on its node: --scheduler "
        f"standalone",
    )

"""All launchers, the one whose variables show that it started this process, and the refusal of two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.schedulers import hydra, kubernetes, manual, openmpi, pals, pbs, slurm, standalone
from imgkit_entrypoints.schedulers.environment import present
from imgkit_entrypoints.schedulers.placement import Placement, Read


class Scheduler(Protocol):
    """The interface of a launcher's module; each also has a `start_argv` with arguments of its own."""

    NAME: str
    FORWARD: tuple[str, ...]

    def claims(self, env: Mapping[str, str]) -> tuple[str, ...]:
        """Variables that show this launcher; empty if it did not start this process."""

    def place(self, env: Mapping[str, str], read: Read) -> Placement:
        """Node of this process; raises WrongStart where only one node of several was started."""

    def per_node_command(self, command: Sequence[str], *, nnodes: int, env: Mapping[str, str]) -> str:
        """Command that starts one process on each node."""


SHOWING: tuple[str, ...] = ("slurm", "pbs")
"""Schedulers of recipes that show in every job; the others do not show in a job of one node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Two launchers whose variables appear together for a known reason: the first one places the process."""

    first: str
    second: str
    unless: tuple[str, ...] = ()
    """If any of these is set, the second launcher really is at work too."""


LAUNCHERS: tuple[Scheduler, ...] = (slurm, pals, pbs, openmpi, hydra, kubernetes)
BY_NAME: Mapping[str, Scheduler] = {module.NAME: module for module in (*LAUNCHERS, manual, standalone)}

# Name in recipes and flags -> the modules that it may mean.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "runai": ("kubeflow",),
    "kubernetes": ("kubeflow",),
    "mpi": ("openmpi", "pals", "hydra"),  # PALS sets PMI_* too
}
NAMES: tuple[str, ...] = tuple(sorted((*BY_NAME, *ALIASES)))
"""All values of ``--scheduler``."""

OVERLAPS: tuple[Overlap, ...] = (
    # In its own steps, Slurm's Cray plugin sets PALS_*, and its pmi2 and pmix plugins set PMI_*.
    Overlap(first="slurm", second="pals"),
    Overlap(first="slurm", second="hydra", unless=hydra.OWN),
    Overlap(first="pals", second="hydra", unless=hydra.OWN),
    # mpiexec is the right way to start inside a PBS job: it knows the ranks, PBS knows only the job.
    Overlap(first="pals", second="pbs"),
    Overlap(first="openmpi", second="pbs"),
    Overlap(first="hydra", second="pbs"),
    # RANK, WORLD_SIZE and MASTER_ADDR alone are torch's own names, which many job scripts export.
    *(
        Overlap(first=module.NAME, second="kubeflow", unless=kubernetes.OWN)
        for module in (slurm, pals, pbs, openmpi, hydra)
    ),
)


def claimants(env: Mapping[str, str]) -> list[Scheduler]:
    """Launchers that show, without those that a known overlap explains."""
    found = [module for module in LAUNCHERS if module.claims(env)]
    names = {module.NAME for module in found}
    explained: set[str] = set()
    for overlap in OVERLAPS:  # the order matters: an explained launcher explains no other
        if overlap.first in names - explained and not present(env, *overlap.unless):
            explained.add(overlap.second)
    return [module for module in found if module.NAME not in explained]


def named(name: str, env: Mapping[str, str]) -> Scheduler:
    """Module that ``--scheduler`` names.

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
            hint=f"the variables of {others} are set: leave --scheduler out"
            if others
            else f"start it with {name}, and the container without --cleanenv and --containall",
        )
    return claiming[0]


def claims(env: Mapping[str, str]) -> tuple[str, ...]:
    """One variable of each launcher that shows."""
    return tuple(shown[0] for module in LAUNCHERS if (shown := module.claims(env)))


def unseen(name: str, env: Mapping[str, str]) -> str:
    """One clause if `name`, the recipe's scheduler, should show and no launcher does; else empty."""
    if name not in SHOWING or claims(env):
        return ""
    return f"the recipe says {name}, but no scheduler variable is set here"


def refuse_two(claimants: Sequence[Scheduler], env: Mapping[str, str]) -> NoReturn:
    """Raise the NoPlan that names both launchers and the flag that decides."""
    shown = [f"{module.NAME} ({', '.join(module.claims(env)[:3])})" for module in claimants]
    flags = " or ".join(f"--scheduler {module.NAME}" for module in claimants)
    raise NoPlan(
        f"{' and '.join(shown)} both seem to have started this process",
        where=", ".join(module.claims(env)[0] for module in claimants),
        hint=f"choose one: {flags} (or set IMGKIT_SCHEDULER). For a separate run on each node: --scheduler "
        "standalone",
    )

"""Flags, environment and launcher resolved to one `Placement`, and the refusals where they disagree.

Every launcher's module is pure: environment and files come in as arguments. Two launchers that show at
once are refused, unless a known overlap explains it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import NoReturn, Protocol

from imgkit_entrypoints.errors import NoPlan, UsageError
from imgkit_entrypoints.schedulers import kubernetes, manual, pbs, slurm, standalone
from imgkit_entrypoints.schedulers.mpi import HYDRA, HYDRA_OWN, OPENMPI, PALS
from imgkit_entrypoints.schedulers.placement import (
    Direct,
    Placement,
    PlacementRequest,
    Read,
    WrongStart,
    hostname,
    number,
    port_in,
    present,
    short,
    size_in,
)


def place(
    request: PlacementRequest, env: Mapping[str, str], read: Read, *, head_suffix: str = ""
) -> Placement:
    """Find the place of this process from flags, the environment and sometimes a file.

    Order: a torchrun worker is refused; the flag ``--scheduler``; complete flags (``--nnodes --node-rank
    --head``); the one launcher whose variables are set; IMGKIT_NODES; this machine alone.

    Parameters
    ----------
    head_suffix : ends the head's name if it comes from Slurm's list of nodes (``fabric.head_suffix``).

    Raises
    ------
    NoPlan : no placement can be right; the hint says what to start instead.
    UsageError : a flag that no environment makes right.
    """
    request = _with_variables(request, env)
    _check_flags(request)
    _refuse_nesting(env)
    resolved_env = _as_environment(request, env)
    claimants = _claimants(resolved_env)
    if request.scheduler:
        found = _place_by(_named(request.scheduler, resolved_env), request, resolved_env, read)
    elif _complete(request):
        found = manual.place(resolved_env, read)
        _compare_rank(claimants, found, resolved_env, read)
    elif len(claimants) > 1:
        _refuse_two(claimants[:2], resolved_env)
    else:
        module = claimants[0] if claimants else manual if manual.claims(resolved_env) else standalone
        found = _place_by(module, request, resolved_env, read)
    _check_host(found, read)
    return _applied(_on_fast_network(found, head_suffix), request, env)


def _on_fast_network(found: Placement, suffix: str) -> Placement:
    """`found` with the head's name on the fast network, unless somebody has named the head or the hosts."""
    listed_by = found.source.get("hosts", "")
    if not suffix or not found.head or listed_by not in slurm.FIELDS["hosts"]:
        return found
    if found.source["head"] != listed_by:
        return found
    name, dot, domain = found.head.partition(".")
    source = {**found.source, "head": f"{listed_by}, with the system's fabric.head_suffix {suffix!r}"}
    return dataclasses.replace(found, head=f"{name}{suffix}{dot}{domain}", source=source)


def warnings(
    found: Placement, request: PlacementRequest, env: Mapping[str, str], *, recipe: str
) -> tuple[str, ...]:
    """Describe what is odd about `found`, though no error, in an image for the scheduler `recipe`."""
    alone = found.scheduler == standalone.NAME and found.direct is None
    if not alone or request.scheduler or request.nnodes:
        return ()
    text = unseen(recipe, env)
    meant = (
        "only this machine is used. In a job, start the container without --cleanenv. To use one machine on "
        "purpose: --nnodes 1"
    )
    return (f"{text}: {meant}",) if text else ()


def _refuse_nesting(env: Mapping[str, str]) -> None:
    if env.get("TORCHELASTIC_RUN_ID"):
        raise NoPlan(
            "this process is already a torchrun worker: a node agent here would start all workers again in "
            "each of them",
            where=f"TORCHELASTIC_RUN_ID={env['TORCHELASTIC_RUN_ID']}",
            hint="start the program itself here, or start this command outside torchrun. To start a separate "
            "run on purpose: env -u TORCHELASTIC_RUN_ID -u RANK -u LOCAL_RANK -u WORLD_SIZE COMMAND",
        )


def _place_by(module: Scheduler, request: PlacementRequest, env: Mapping[str, str], read: Read) -> Placement:
    try:
        return module.place(env, read)
    except WrongStart as error:
        if request.nnodes == 1:
            return standalone.alone()
        typed = _typed_on_host(request.command, env, read)
        command = module.per_node_command(typed, nnodes=error.nnodes, env=env)
        hint = f"start it once per node:\n{command}\n(or, to use this node alone: --nnodes 1)"
        raise NoPlan(error.what, where=error.where, hint=hint) from None


def _typed_on_host(command: Sequence[str], env: Mapping[str, str], read: Read) -> tuple[str, ...]:
    """The command as it is typed on the host: the argv that starts this container, then `command`."""
    for runtime in ("apptainer", "singularity"):
        image = env.get(f"{runtime.upper()}_CONTAINER")
        if image:
            # Without squashfuse the runtime unpacks the .sif into a temporary folder, which the first names.
            name = env.get(f"{runtime.upper()}_NAME") or PurePath(image).name
            image = image if PurePath(image).name == name else name
            binds = env.get(f"{runtime.upper()}_BIND")
            return (
                *(runtime, "exec"),
                *(("--nv",) if read("/proc/driver/nvidia/version") is not None else ()),
                *(("--bind", binds) if binds else ()),
                *(image, *command),
            )
    return tuple(command)


def _compare_rank(
    claimants: Sequence[Scheduler], found: Placement, env: Mapping[str, str], read: Read
) -> None:
    """Refuse a rank that the shell of the job script filled in, which is 0 on every node.

    ``srun dist-run --node-rank $SLURM_NODEID`` is such a line: the script's shell expands it, not the task.
    """
    for module in claimants:
        try:
            other = module.place(env, read)
        except NoPlan:
            continue  # ssh, for example, started this process: the flags are the only source
        if other.nnodes == found.nnodes and other.node_rank != found.node_rank and other.direct is None:
            name = other.source.get("node_rank", "")
            raise NoPlan(
                f"--node-rank is {found.node_rank}, but {module.NAME} says that this is node "
                f"{other.node_rank} ({name})",
                where="--node-rank",
                hint=f"leave out --nnodes, --node-rank and --head: the shell of a job script expands ${name} "
                "before srun or mpiexec starts the nodes. To override the launcher: --scheduler manual",
            )


def _check_host(found: Placement, read: Read) -> None:
    """Refuse a host list in another order than the ranks: the other nodes would wait at the wrong host."""
    own = short(hostname(read))
    places = [index for index, host in enumerate(found.hosts) if own and short(host) == own]
    if found.nnodes > 1 and len(places) == 1 and places[0] != found.node_rank:
        source = found.source.get("hosts", "")
        rank_from = found.source.get("node_rank", "")
        raise NoPlan(
            f"this is node {found.node_rank} according to {rank_from}, but {own} is host {places[0]} of "
            f"{source}",
            where=f"{source}: {', '.join(found.hosts[:8])}",
            hint="list the hosts in the order of their ranks: awk '!s[$0]++' keeps the order, sort does not",
        )


# Field of `PlacementRequest` -> the variable that the modules read; `_as_environment` writes flags there.
_VARIABLES: Mapping[str, str] = {
    "nnodes": "IMGKIT_NNODES",
    "node_rank": "IMGKIT_NODE_RANK",
    "head": "IMGKIT_HEAD",
    "port": "IMGKIT_PORT",
    "direct": "IMGKIT_DIRECT",
}


def _with_variables(request: PlacementRequest, env: Mapping[str, str]) -> PlacementRequest:
    """Fill in the ``IMGKIT_*`` variables where no flag is given.

    Raises
    ------
    NoPlan : a variable cannot be parsed.
    """
    node_rank, direct = request.node_rank, request.direct
    if node_rank is None and env.get("IMGKIT_NODE_RANK"):
        node_rank = number(env, "IMGKIT_NODE_RANK")
    if direct is None and env.get("IMGKIT_DIRECT"):
        direct = env["IMGKIT_DIRECT"].lower() not in ("0", "false", "no", "off")
    return dataclasses.replace(
        request,
        scheduler=request.scheduler or env.get("IMGKIT_SCHEDULER"),
        size=request.size or size_in(env, "IMGKIT_NNODES"),
        node_rank=node_rank,
        head=request.head or env.get("IMGKIT_HEAD"),
        port=port_in(env, "IMGKIT_PORT") if request.port is None else request.port,
        direct=direct,
    )


def _check_flags(request: PlacementRequest) -> None:
    """Refuse flags that no environment makes right.

    Raises
    ------
    UsageError : names the flag and the values that it takes.
    """
    if request.scheduler and request.scheduler not in NAMES:
        raise UsageError(
            f"unknown scheduler {request.scheduler!r}",
            where="--scheduler",
            hint=f"one of: {', '.join(NAMES)}",
        )
    if request.port is not None and not 1 <= request.port <= 65535:
        raise UsageError(
            f"{request.port} is not a port", where="--port", hint="give a number from 1 to 65535"
        )


def _as_environment(request: PlacementRequest, env: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment with every flag written as its variable, and no variable that was not parsed."""
    resolved_env = {name: value for name, value in env.items() if name not in _VARIABLES.values()}
    for field, name in _VARIABLES.items():
        value = getattr(request, field)
        if value is not None and value != "":
            resolved_env[name] = str(int(value)) if isinstance(value, (bool, int)) else value
    return resolved_env


def _complete(request: PlacementRequest) -> bool:
    """Return whether the flags say everything about this node, so that no launcher is asked."""
    several = request.nnodes is not None and request.nnodes > 1
    return several and request.node_rank is not None and request.head is not None


def _applied(found: Placement, request: PlacementRequest, env: Mapping[str, str]) -> Placement:
    """Return the placement with the requested port and spares, and with sources under the user's names.

    Raises
    ------
    NoPlan : a flag contradicts what was found.
    """
    _compare_flags(found, request)
    port, source = found.port, dict(found.source)
    if request.port is not None:
        port, source["port"] = request.port, _VARIABLES["port"]
    for field, name in source.items():
        for flag, variable in _VARIABLES.items():
            if name == variable and not env.get(variable):
                source[field] = f"--{flag.replace('_', '-')}"
    return dataclasses.replace(
        found,
        port=port,
        direct=_direct_of(found, request),
        size=request.size if request.size and request.size.spares else None,
        source={field: name for field, name in source.items() if name},
    )


def _compare_flags(found: Placement, request: PlacementRequest) -> None:
    """Refuse a flag that differs from the launcher: neither may win silently."""
    size = request.size
    if size and not size.training <= found.nnodes <= size.started:
        raise NoPlan(
            f"--nnodes is {size}, but {found.scheduler} started {found.nnodes}",
            where=found.source.get("nnodes", "--nnodes"),
            hint=f"leave --nnodes out, or start the command on {size.started} nodes. For a separate run on "
            "each node: --scheduler standalone",
        )
    if request.node_rank is not None and request.node_rank != found.node_rank:
        raise NoPlan(
            f"--node-rank is {request.node_rank}, but {found.scheduler} says that this is node "
            f"{found.node_rank}",
            where=found.source.get("node_rank", "--node-rank"),
            hint="leave --node-rank out. To override the launcher: --scheduler manual with --nnodes, "
            "--node-rank and --head",
        )


def _direct_of(found: Placement, request: PlacementRequest) -> Direct | None:
    if request.direct is False and found.direct is not None:
        raise NoPlan(
            f"{found.direct.local_world_size} processes were started on this node, but direct mode is "
            "switched off",
            where=found.source.get("nnodes", found.scheduler),
            hint=BY_NAME[found.scheduler].per_node_command(request.command, nnodes=found.nnodes, env={}),
        )
    if request.direct and found.direct is None:
        return Direct(rank=found.node_rank, local_rank=0, world_size=found.nnodes, local_world_size=1)
    return found.direct


class Scheduler(Protocol):
    """The interface of a launcher's module; each also has a `start_argv` with arguments of its own."""

    @property
    def NAME(self) -> str:
        """Name of the launcher, a value of ``--scheduler``."""

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


LAUNCHERS: tuple[Scheduler, ...] = (slurm, PALS, pbs, OPENMPI, HYDRA, kubernetes)
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
    Overlap(first="slurm", second="hydra", unless=HYDRA_OWN),
    Overlap(first="pals", second="hydra", unless=HYDRA_OWN),
    # mpiexec is the right way to start inside a PBS job: it knows the ranks, PBS knows only the job.
    Overlap(first="pals", second="pbs"),
    Overlap(first="openmpi", second="pbs"),
    Overlap(first="hydra", second="pbs"),
    # RANK, WORLD_SIZE and MASTER_ADDR alone are torch's own names, which many job scripts export.
    *(
        Overlap(first=module.NAME, second="kubeflow", unless=kubernetes.OWN)
        for module in (slurm, PALS, pbs, OPENMPI, HYDRA)
    ),
)


def _claimants(env: Mapping[str, str]) -> list[Scheduler]:
    """Launchers that show, without those that a known overlap explains."""
    found = [module for module in LAUNCHERS if module.claims(env)]
    names = {module.NAME for module in found}
    explained: set[str] = set()
    for overlap in OVERLAPS:  # the order matters: an explained launcher explains no other
        if overlap.first in names - explained and not present(env, *overlap.unless):
            explained.add(overlap.second)
    return [module for module in found if module.NAME not in explained]


def _named(name: str, env: Mapping[str, str]) -> Scheduler:
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


def _refuse_two(claimants: Sequence[Scheduler], env: Mapping[str, str]) -> NoReturn:
    """Raise the NoPlan that names both launchers and the flag that decides."""
    shown = [f"{module.NAME} ({', '.join(module.claims(env)[:3])})" for module in claimants]
    flags = " or ".join(f"--scheduler {module.NAME}" for module in claimants)
    raise NoPlan(
        f"{' and '.join(shown)} both seem to have started this process",
        where=", ".join(module.claims(env)[0] for module in claimants),
        hint=f"choose one: {flags} (or set IMGKIT_SCHEDULER). For a separate run on each node: --scheduler "
        "standalone",
    )

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

from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.schedulers import kubernetes, manual, pbs, slurm, standalone
from imgkit_entrypoints.schedulers.environment import Environment, Read, short_host
from imgkit_entrypoints.schedulers.mpi import HYDRA, HYDRA_OWN, OPENMPI, PALS
from imgkit_entrypoints.schedulers.placement import Direct, Placement, PlacementRequest, WrongStart


def find_placement(
    request: PlacementRequest, env: Mapping[str, str], read: Read, *, head_suffix: str = ""
) -> Placement:
    """Find the position of this process from flags, the environment and sometimes a file.

    Order: a torchrun worker is refused; the flag ``--scheduler``; complete flags (``--nnodes --node-rank
    --head``); the one launcher whose variables are set; IMGKIT_NODES; this machine alone.

    Parameters
    ----------
    head_suffix : ends the head's name if it comes from Slurm's list of nodes (``fabric.head_suffix``).

    Raises
    ------
    NoPlan : no placement can be right; the hint says what to start instead.
    """
    resolved_env = _as_environment(request, Environment(env, read))
    try:
        placement = _requested_placement(request, resolved_env)
    except NoPlan as error:
        if error.where and error.where in resolved_env:  # the modules read flags as variables
            error.where = _flags_from_variables(env).get(error.where, error.where)
        raise
    return _apply_request(request, _on_fast_network(placement, head_suffix), env)


def _requested_placement(request: PlacementRequest, resolved_env: Environment) -> Placement:
    """Return the placement by the module that `find_placement` names first."""
    _refuse_nesting(resolved_env)
    claimants = _find_launchers(resolved_env)
    if request.scheduler:
        placement = _placement_by(_get_scheduler(request.scheduler, resolved_env), request, resolved_env)
    elif request.nnodes and request.nnodes > 1 and request.node_rank is not None and request.head is not None:
        # The flags say everything about this node, so that no launcher is asked.
        placement = manual.find_placement(resolved_env)
        _compare_rank(claimants, placement, resolved_env)
    elif len(claimants) > 1:
        _refuse_two(claimants[:2], resolved_env)
    else:
        module = claimants[0] if claimants else manual if manual.claims(resolved_env) else standalone
        placement = _placement_by(module, request, resolved_env)
    _check_host(placement, resolved_env)
    return placement


def _on_fast_network(placement: Placement, suffix: str) -> Placement:
    """Give the head its name on the fast network, unless somebody has named the head or the hosts."""
    hosts_from = placement.source.get("hosts", "")
    if not suffix or not placement.head or hosts_from not in slurm.FIELDS["hosts"]:
        return placement
    if placement.source["head"] != hosts_from:
        return placement
    name, dot, domain = placement.head.partition(".")
    source = {**placement.source, "head": f"{hosts_from}, with the system's fabric.head_suffix {suffix!r}"}
    return dataclasses.replace(placement, head=f"{name}{suffix}{dot}{domain}", source=source)


def placement_warnings(
    placement: Placement, request: PlacementRequest, env: Mapping[str, str], *, recipe: str
) -> tuple[str, ...]:
    """Describe what is odd about a placement, though no error, in an image for the scheduler `recipe`."""
    is_alone = placement.scheduler == standalone.NAME and placement.direct is None
    text = missing_launcher_clause(recipe, env)
    if not text or not is_alone or request.scheduler or request.nnodes:
        return ()
    return (
        f"{text}: only this machine is used. In a job, start the container without --cleanenv. To use one "
        "machine on purpose: --nnodes 1",
    )


def _refuse_nesting(env: Environment) -> None:
    # Only torchrun sets these two. RANK and LOCAL_RANK are in pods as well.
    where = env.quote("TORCHELASTIC_RUN_ID", "GROUP_RANK")
    if where:
        raise NoPlan(
            "this process is already a torchrun worker: a node agent here would start all workers again in "
            "each of them",
            where=where,
            hint="start the program itself here, or start this command outside torchrun. To start a separate "
            "run on purpose: env -u TORCHELASTIC_RUN_ID -u GROUP_RANK -u RANK -u LOCAL_RANK -u WORLD_SIZE "
            "COMMAND",
        )


def _placement_by(module: Scheduler, request: PlacementRequest, env: Environment) -> Placement:
    try:
        return module.find_placement(env)
    except WrongStart as error:
        if request.nnodes == 1:
            return standalone.single_node()
        host_command = _command_on_host(request.command, env)
        command = module.per_node_command(host_command, nnodes=error.nnodes, env=env)
        hint = f"start it once per node:\n{command}\n(or, to use this node alone: --nnodes 1)"
        raise NoPlan(error.what, where=error.where, hint=hint) from None


def _command_on_host(command: Sequence[str], env: Environment) -> tuple[str, ...]:
    """Return the command as it is typed on the host: the argv that starts this container, then `command`."""
    for runtime in ("apptainer", "singularity"):
        image = env.get(f"{runtime.upper()}_CONTAINER")
        if image:
            # Without squashfuse the runtime unpacks the .sif into a temporary folder, which the first names.
            name = env.get(f"{runtime.upper()}_NAME") or PurePath(image).name
            image = image if PurePath(image).name == name else name
            binds = env.get(f"{runtime.upper()}_BIND")
            options = ["--nv"] if env.read("/proc/driver/nvidia/version") is not None else []
            options += ["--bind", binds] if binds else []
            return (runtime, "exec", *options, image, *command)
    return tuple(command)


def _compare_rank(claimants: Sequence[Scheduler], placement: Placement, env: Environment) -> None:
    """Refuse a rank that the shell of the job script filled in, which is 0 on every node.

    ``srun dist-run --node-rank $SLURM_NODEID`` is such a line: the script's shell expands it, not the task.
    """
    for module in claimants:
        try:
            launched = module.find_placement(env)
        except NoPlan:
            continue  # ssh, for example, started this process: the flags are the only source
        is_same_run = launched.nnodes == placement.nnodes and launched.direct is None
        if is_same_run and launched.node_rank != placement.node_rank:
            name = launched.source.get("node_rank", "")
            raise NoPlan(
                f"--node-rank is {placement.node_rank}, but {module.NAME} says that this is node "
                f"{launched.node_rank}",
                where=name,
                hint=f"leave out --nnodes, --node-rank and --head: the shell of a job script expands ${name} "
                "before srun or mpiexec starts the nodes. To override the launcher: --scheduler manual",
            )


def _check_host(placement: Placement, env: Environment) -> None:
    """Refuse a host list in another order than the ranks: the other nodes would wait at the wrong host."""
    position = env.position_in(placement.hosts)
    if placement.nnodes > 1 and position not in (None, placement.node_rank):
        source, rank_from = (placement.source.get(field, "") for field in ("hosts", "node_rank"))
        raise NoPlan(
            f"this is node {placement.node_rank} according to {rank_from}, "
            f"but {short_host(env.hostname())} is host {position} of {source}",
            where=f"{source}: {', '.join(placement.hosts[:8])}",
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


def _as_environment(request: PlacementRequest, env: Environment) -> Environment:
    """Return the environment with every flag written as its variable."""
    variables = dict(env)
    for field, name in _VARIABLES.items():
        value = getattr(request, field)
        if value is not None and value is not False:
            variables[name] = str(int(value)) if isinstance(value, (bool, int)) else value
    return Environment(variables, env.read)


def _flags_from_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the flag that each variable of `_VARIABLES` stands for, if it is not itself set."""
    return {name: f"--{field.replace('_', '-')}" for field, name in _VARIABLES.items() if not env.get(name)}


def _apply_request(request: PlacementRequest, placement: Placement, env: Mapping[str, str]) -> Placement:
    """Return the placement with the requested port and spares, and with sources under the user's names.

    Raises
    ------
    NoPlan : a flag contradicts the launcher.
    """
    _compare_flags(placement, request)
    port, direct, source = placement.port, placement.direct, dict(placement.source)
    if request.port is not None:
        port, source["port"] = request.port, _VARIABLES["port"]
    if request.direct and direct is None:
        nnodes = placement.nnodes
        direct = Direct(rank=placement.node_rank, local_rank=0, world_size=nnodes, local_world_size=1)
    flags = _flags_from_variables(env)
    return dataclasses.replace(
        placement,
        port=port,
        direct=direct,
        size=request.size if request.size and request.size.spares else None,
        source={field: flags.get(name, name) for field, name in source.items() if name},
    )


def _compare_flags(placement: Placement, request: PlacementRequest) -> None:
    """Refuse a flag that differs from the launcher: neither may win silently."""
    size, scheduler = request.size, placement.scheduler
    if size and not size.training <= placement.nnodes <= size.started:
        raise NoPlan(
            f"--nnodes is {size}, but {scheduler} started {placement.nnodes}",
            where=placement.source.get("nnodes", "--nnodes"),
            hint=f"leave --nnodes out, or start the command on {size.started} nodes. For a separate run on "
            "each node: --scheduler standalone",
        )
    if request.node_rank not in (None, placement.node_rank):
        raise NoPlan(
            f"--node-rank is {request.node_rank}, but {scheduler} says that this is node "
            f"{placement.node_rank}",
            where=placement.source.get("node_rank", "--node-rank"),
            hint="leave --node-rank out. To override the launcher: --scheduler manual with --nnodes, "
            "--node-rank and --head",
        )


class Scheduler(Protocol):
    """The interface of a launcher's module; some also have a `start_argv` with arguments of its own."""

    @property
    def NAME(self) -> str:
        """Name of the launcher, a value of ``--scheduler``."""

    def claims(self, env: Environment) -> tuple[str, ...]:
        """Return the variables that show this launcher; empty if it did not start this process."""

    def find_placement(self, env: Environment) -> Placement:
        """Return the node of this process; raise WrongStart where only one node of several was started."""

    def per_node_command(self, command: Sequence[str], *, nnodes: int, env: Environment) -> str:
        """Return the command that starts one process on each node."""


SHOWING: tuple[str, ...] = ("slurm", "pbs")
"""Schedulers of recipes that show in every job; the others do not show in a job of one node."""


@dataclass(frozen=True, slots=True)
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
    Overlap("slurm", "pals"),
    Overlap("slurm", "hydra", unless=HYDRA_OWN),
    Overlap("pals", "hydra", unless=HYDRA_OWN),
    # mpiexec is the right way to start inside a PBS job: it knows the ranks, PBS knows only the job.
    *(Overlap(name, "pbs") for name in ("pals", "openmpi", "hydra")),
    # RANK, WORLD_SIZE and MASTER_ADDR alone are torch's own names, which many job scripts export.
    *(
        Overlap(module.NAME, "kubeflow", unless=kubernetes.OWN)
        for module in (slurm, PALS, pbs, OPENMPI, HYDRA)
    ),
)


def _find_launchers(env: Environment) -> list[Scheduler]:
    """Return the launchers that show, without those that a known overlap explains."""
    claimants = {module.NAME: module for module in LAUNCHERS if module.claims(env)}
    for overlap in OVERLAPS:  # the order matters: an explained launcher explains no other
        if overlap.first in claimants and not env.present(*overlap.unless):
            claimants.pop(overlap.second, None)
    return list(claimants.values())


def _get_scheduler(name: str, env: Environment) -> Scheduler:
    """Return the module that ``--scheduler`` names.

    Raises
    ------
    NoPlan : its variables are not set.
    """
    modules = [BY_NAME[module_name] for module_name in ALIASES.get(name, (name,))]
    if modules[0] in (manual, standalone):
        return modules[0]
    claimants = [module for module in modules if module.claims(env)]
    if not claimants:
        hint = f"start it with {name}, and the container without --cleanenv and --containall"
        if names := ", ".join(module.NAME for module in LAUNCHERS if module.claims(env)):
            hint = f"the variables of {names} are set: leave --scheduler out"
        raise NoPlan(f"none of {name}'s variables is set", where="--scheduler", hint=hint)
    return claimants[0]


def launcher_variables(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return one variable of each launcher that shows."""
    return tuple(name for module in LAUNCHERS for name in module.claims(Environment(env))[:1])


def missing_launcher_clause(name: str, env: Mapping[str, str]) -> str:
    """Return one clause if `name`, the recipe's scheduler, should show and no launcher does; else empty."""
    if name not in SHOWING or launcher_variables(env):
        return ""
    return f"the recipe says {name}, but no scheduler variable is set here"


def _refuse_two(claimants: Sequence[Scheduler], env: Environment) -> NoReturn:
    """Raise the NoPlan that names both launchers and the flag that decides."""
    names = [f"{module.NAME} ({', '.join(module.claims(env)[:3])})" for module in claimants]
    flags = " or ".join(f"--scheduler {module.NAME}" for module in claimants)
    raise NoPlan(
        f"{' and '.join(names)} both seem to have started this process",
        where=", ".join(module.claims(env)[0] for module in claimants),
        hint=f"choose one: {flags} (or set IMGKIT_SCHEDULER). For a separate run on each node: --scheduler "
        "standalone",
    )

"""Find the `Placement` of this process from flags, variables and the launcher, and refuse contradictions.

The modules of the launchers are pure: the environment and a function that reads files are arguments. A
launcher is recognized by the variables that it sets (`Scheduler.claims`). If two launchers are recognized at
the same time, that is an error, unless a known overlap explains it (`OVERLAPS`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Protocol

from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.schedulers import kubernetes, manual, pbs, slurm, standalone
from imgkit_entrypoints.schedulers.environment import Environment, Read, short_host
from imgkit_entrypoints.schedulers.mpi import HYDRA, HYDRA_OWN, OPENMPI, PALS
from imgkit_entrypoints.schedulers.placement import Direct, Placement, PlacementRequest, WrongStart


def find_placement(
    request: PlacementRequest, env: Mapping[str, str], read: Read, *, head_suffix: str = ""
) -> Placement:
    """Return the placement of this process: which node of the run this is, and where the other nodes are.

    A worker of torchrun is refused. Otherwise, the first of these sources that exists is used:

    * the flag ``--scheduler``,
    * the flags ``--nnodes --node-rank --head``, if all are given,
    * the launcher whose variables are set,
    * IMGKIT_NODES or IMGKIT_NNODES.

    If there is none of them, the run uses only this machine.

    Parameters
    ----------
    read : returns the text of a file, or None if it cannot be read.
    head_suffix : the recipe's ``fabric.head_suffix``. It is added to the head's name if the name comes from
        Slurm's list of nodes.

    Raises
    ------
    NoPlan : no placement can be right. The hint says what to start instead.
    """
    # The modules of the launchers read flags as variables.
    env_with_flags = _convert_flags(request, Environment(env, read))
    try:
        placement = _detect_placement(request, env_with_flags)
    except NoPlan as error:
        # If the user has typed a flag, the error should name the flag, and not its variable.
        if error.where and error.where in env_with_flags:
            error.where = _find_flags_by_variable(env).get(error.where, error.where)
        raise
    return _apply_request(_put_head_on_fast_network(placement, head_suffix), request, env)


def _detect_placement(request: PlacementRequest, env: Environment) -> Placement:
    """Return the placement from the first source that exists.

    The order is: the flag ``--scheduler``, flags that fully describe this node, the launcher whose variables
    are set, variables that list or count several nodes, and otherwise only this machine. Each module of a
    launcher, such as Slurm's, finds the placement in the variables of that launcher.

    Raises
    ------
    NoPlan : no placement can be right, or two launchers are recognized.
    """
    _refuse_nesting(env)
    # If one launcher is known to set the variables of another, the other one is left out here.
    launchers = _find_launchers(env)
    if request.scheduler:
        placement = _ask_launcher(_get_scheduler(request.scheduler, env), request, env)
    elif request.describes_node:
        # The flags say everything about this node, so no launcher needs to be asked.
        placement = manual.find_placement(env)
        _refuse_other_rank(launchers, placement, env)
    elif len(launchers) > 1:
        raise _make_conflict_error(launchers[:2], env)
    elif launchers:
        placement = _ask_launcher(launchers[0], request, env)
    elif manual.claims(env):  # IMGKIT_NNODES or a list of hosts requests several nodes
        placement = _ask_launcher(manual, request, env)
    else:
        placement = _ask_launcher(standalone, request, env)
    _refuse_wrong_order(placement, env)
    return placement


def _put_head_on_fast_network(placement: Placement, suffix: str) -> Placement:
    """Return the placement with the head's name on the fast network.

    With the suffix ``-ib``, ``n1`` becomes ``n1-ib``. Only a name from Slurm's own list is changed. A head or
    a list of hosts from the user stays unchanged.
    """
    hosts_from = placement.source.get("hosts", "")
    if not suffix or not placement.head or hosts_from not in slurm.FIELDS["hosts"]:
        return placement
    if placement.source["head"] != hosts_from:  # the user has named the head
        return placement
    name, dot, domain = placement.head.partition(".")
    source = {**placement.source, "head": f"{hosts_from}, with the system's fabric.head_suffix {suffix!r}"}
    return dataclasses.replace(placement, head=f"{name}{suffix}{dot}{domain}", source=source)


def placement_warnings(
    placement: Placement, request: PlacementRequest, env: Mapping[str, str], *, recipe: str
) -> tuple[str, ...]:
    """Return warnings about a placement that is unusual, but not an error.

    For example, an image that was built for Slurm is started without any variable of Slurm.

    Parameters
    ----------
    recipe : the scheduler for which the image was built. Empty if there is none.
    """
    is_alone = placement.scheduler == standalone.NAME and placement.direct is None
    is_requested = bool(request.scheduler or request.nnodes)
    if not is_alone or is_requested:
        return ()
    clause = missing_launcher_clause(recipe, env)  # "the recipe says slurm, but no scheduler variable ..."
    if not clause:
        return ()
    return (
        f"{clause}: only this machine is used. In a job, start the container without --cleanenv. To use one "
        "machine on purpose: --nnodes 1",
    )


def _refuse_nesting(env: Environment) -> None:
    """Raise NoPlan if this process is already a worker of torchrun.

    Otherwise, the node agent in each worker would start all workers again.
    """
    # Only torchrun sets these two variables. RANK and LOCAL_RANK are no evidence, since pods have them as
    # well.
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


def _ask_launcher(module: Scheduler, request: PlacementRequest, env: Environment) -> Placement:
    """Return the placement that `module`, the module of a launcher, finds.

    If the command was started on only one of several nodes, and the user gave ``--nnodes 1``, the run uses
    only this node.

    Raises
    ------
    NoPlan : only one of several nodes was started. The hint is the line that starts all of them.
    """
    try:
        return module.find_placement(env)
    except WrongStart as error:
        if request.nnodes == 1:
            return standalone.single_node()
        host_command = _build_host_command(request.command, env)
        command = module.per_node_command(host_command, nnodes=error.nnodes, env=env)
        hint = f"start it once per node:\n{command}\n(or, to use this node alone: --nnodes 1)"
        raise NoPlan(error.what, where=error.where, hint=hint) from None


def _build_host_command(command: Sequence[str], env: Environment) -> tuple[str, ...]:
    """Return the argv that the user has to type on the host to run `command` in this container.

    An example is ``apptainer exec --nv image.sif dist-run train.py``. Outside of a container of Singularity
    or Apptainer, return `command` unchanged.
    """
    for runtime in ("apptainer", "singularity"):
        image = env.get(f"{runtime.upper()}_CONTAINER")
        if not image:
            continue
        # Without squashfuse, the runtime unpacks the .sif into a temporary folder. *_CONTAINER is then the
        # path of that folder, but *_NAME is still the name of the .sif.
        name = env.get(f"{runtime.upper()}_NAME")
        # The name has no folder, so the command works only in the folder of the .sif.
        if name and name != PurePath(image).name:
            image = name
        options = []
        if env.read("/proc/driver/nvidia/version") is not None:  # the host has an NVIDIA driver
            options.append("--nv")
        binds = env.get(f"{runtime.upper()}_BIND")
        if binds:
            options += ["--bind", binds]
        return (runtime, "exec", *options, image, *command)
    return tuple(command)


def _refuse_other_rank(launchers: Sequence[Scheduler], placement: Placement, env: Environment) -> None:
    """Raise NoPlan if ``--node-rank`` differs from the rank that a launcher has given this process.

    In ``srun dist-run --node-rank $SLURM_NODEID``, the shell of the job script expands the variable before
    the tasks start. The flag is then 0 on every node, and the nodes would not find each other.
    """
    for module in launchers:
        try:
            launched = module.find_placement(env)
        except NoPlan:
            continue  # the launcher has not started this process, but ssh, for example
        # With several processes on each node (direct mode), or on another number of nodes, the user has
        # deliberately started another run within the job.
        is_other_run = launched.direct is not None or launched.nnodes != placement.nnodes
        if is_other_run or launched.node_rank == placement.node_rank:
            continue
        variable = launched.source.get("node_rank", "")
        raise NoPlan(
            f"--node-rank is {placement.node_rank}, but {module.NAME} says that this is node "
            f"{launched.node_rank}",
            where=variable,
            hint=f"leave out --nnodes, --node-rank and --head: the shell of a job script expands ${variable} "
            "before srun or mpiexec starts the nodes. To override the launcher: --scheduler manual",
        )


def _refuse_wrong_order(placement: Placement, env: Environment) -> None:
    """Raise NoPlan if the order of the list of hosts differs from the order of the ranks.

    All nodes take the first host in the list for node 0, so they would connect to the wrong host.
    """
    position = env.find_position(placement.hosts)  # of this host in the list, or None if it is not there
    if placement.nnodes == 1 or position in (None, placement.node_rank):
        return
    hosts_from = placement.source.get("hosts", "")
    rank_from = placement.source.get("node_rank", "")
    raise NoPlan(
        f"this is node {placement.node_rank} according to {rank_from}, "
        f"but {short_host(env.hostname())} is host {position} of {hosts_from}",
        where=f"{hosts_from}: {', '.join(placement.hosts[:8])}",
        hint="list the hosts in the order of their ranks: awk '!s[$0]++' keeps the order, sort does not",
    )


# The variables that the modules of the launchers read instead of the fields of `PlacementRequest`.
_FLAG_VARIABLES: Mapping[str, str] = {
    "nnodes": "IMGKIT_NNODES",
    "node_rank": "IMGKIT_NODE_RANK",
    "head": "IMGKIT_HEAD",
    "port": "IMGKIT_PORT",
    "direct": "IMGKIT_DIRECT",
}


def _convert_flags(request: PlacementRequest, env: Environment) -> Environment:
    """Return the environment with each flag as a variable: ``--node-rank 2`` becomes IMGKIT_NODE_RANK=2.

    The modules of the launchers then only have to read variables.
    """
    variables = dict(env)
    for field, name in _FLAG_VARIABLES.items():
        value = getattr(request, field)
        # None and False mean that the flag is not given, so a variable of the user stays.
        if value is True:
            variables[name] = "1"
        elif value is not None and value is not False:
            variables[name] = str(value)
    return Environment(variables, env.read)


def _find_flags_by_variable(env: Mapping[str, str]) -> dict[str, str]:
    """Return the flags that belong to variables in `_FLAG_VARIABLES`, such as ``--head`` for IMGKIT_HEAD.

    Variables that are set in `env` are left out, because the user has set the variable and not the flag.
    """
    flags = {}
    for field, name in _FLAG_VARIABLES.items():
        if not env.get(name):
            flags[name] = f"--{field.replace('_', '-')}"
    return flags


def _apply_request(placement: Placement, request: PlacementRequest, env: Mapping[str, str]) -> Placement:
    """Return the placement with the port, the spares and the direct rank that the user has requested.

    Spares are nodes that wait to replace a lost node. In direct mode, the launcher has started every rank
    itself, without torchrun.

    Raises
    ------
    NoPlan : a flag contradicts the launcher.
    """
    _refuse_contradictions(placement, request)
    source = dict(placement.source)  # the variable from which each field was read
    port = placement.port
    if request.port is not None:
        port = request.port
        source["port"] = _FLAG_VARIABLES["port"]
    direct = placement.direct
    if request.direct and direct is None:
        # The launcher has started one process on each node, so each node is a rank.
        direct = Direct(
            rank=placement.node_rank, local_rank=0, world_size=placement.nnodes, local_world_size=1
        )
    size = None
    if request.size and request.size.spares:  # without spares, `nnodes` is the whole size
        size = request.size
    named_source = _name_flags(source, _find_flags_by_variable(env))
    return dataclasses.replace(placement, port=port, direct=direct, size=size, source=named_source)


def _name_flags(source: Mapping[str, str], flags: Mapping[str, str]) -> dict[str, str]:
    """Return the source of each field with flags instead of the variables as which they were read.

    For example, ``{"head": "IMGKIT_HEAD"}`` becomes ``{"head": "--head"}``. Fields without a source are left
    out.

    Parameters
    ----------
    flags : the flags by variable. If a variable has none here, the variable itself is the source.
    """
    named_source = {}
    for field, variable in source.items():
        if variable:
            named_source[field] = flags.get(variable, variable)
    return named_source


def _refuse_contradictions(placement: Placement, request: PlacementRequest) -> None:
    """Raise NoPlan if a flag contradicts what the launcher has started.

    One of the two is a mistake. If imgkit silently chose one of them, it could start a wrong run.
    """
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
    """The interface of a launcher's module. Most modules also have a `start_argv`, with various arguments."""

    @property
    def NAME(self) -> str:
        """Return the name of the launcher, which is a value of ``--scheduler``."""

    def claims(self, env: Environment) -> tuple[str, ...]:
        """Return the variables that show this launcher, or () if it has not started this process."""

    def find_placement(self, env: Environment) -> Placement:
        """Return the placement of this process.

        Raises
        ------
        WrongStart : only one of several nodes was started.
        NoPlan : the variables contradict each other.
        """

    def per_node_command(self, command: Sequence[str], *, nnodes: int, env: Environment) -> str:
        """Return the line that starts `command` once on each node."""


ALWAYS_SHOWING: tuple[str, ...] = ("slurm", "pbs")
"""Schedulers that set variables in every job. Other schedulers set none in a job of one node."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """Two launchers whose variables are set at the same time for a known reason. The first one is used."""

    first: str
    second: str
    unless: tuple[str, ...] = ()
    """Variables that show that the second launcher has really started the process. That is an error then."""


# Launchers that are recognized by their variables. If none is, `manual` or `standalone` is used.
LAUNCHERS: tuple[Scheduler, ...] = (slurm, PALS, pbs, OPENMPI, HYDRA, kubernetes)
BY_NAME: Mapping[str, Scheduler] = {module.NAME: module for module in (*LAUNCHERS, manual, standalone)}

# Further names in recipes and flags, each with the launchers that it stands for.
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
    # In a PBS job, mpiexec usually starts the processes. It sets the ranks, while PBS only describes the job.
    *(Overlap(name, "pbs") for name in ("pals", "openmpi", "hydra")),
    # RANK, WORLD_SIZE and MASTER_ADDR are torch's own names, which many job scripts export. If another
    # launcher is recognized, they only show a pod together with a variable that only operators set.
    *(
        Overlap(module.NAME, "kubeflow", unless=kubernetes.OWN)
        for module in (slurm, PALS, pbs, OPENMPI, HYDRA)
    ),
)


def _find_launchers(env: Environment) -> list[Scheduler]:
    """Return the launchers whose variables are set, except those that a known overlap explains."""
    launchers = {module.NAME: module for module in LAUNCHERS if module.claims(env)}
    # The order of the table matters, because a launcher that was removed cannot explain another one.
    for overlap in OVERLAPS:
        if overlap.first in launchers and not env.find_set(*overlap.unless):
            launchers.pop(overlap.second, None)
    return list(launchers.values())


def _get_scheduler(name: str, env: Environment) -> Scheduler:
    """Return the module of the launcher that ``--scheduler`` names.

    A name such as ``mpi`` may stand for several modules. In this case, return the first module whose
    variables are set.

    Raises
    ------
    NoPlan : the variables of that launcher are not set.
    """
    if name in (manual.NAME, standalone.NAME):  # no variable shows these two
        return BY_NAME[name]
    for module_name in ALIASES.get(name, (name,)):
        if BY_NAME[module_name].claims(env):
            return BY_NAME[module_name]
    other_names = ", ".join(module.NAME for module in LAUNCHERS if module.claims(env))
    hint = f"start it with {name}, and the container without --cleanenv and --containall"
    if other_names:
        hint = f"the variables of {other_names} are set: leave --scheduler out"
    raise NoPlan(f"none of {name}'s variables is set", where="--scheduler", hint=hint)


def launcher_variables(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return one variable of each launcher that is recognized, as evidence of a job."""
    variables = []
    for module in LAUNCHERS:
        names = module.claims(Environment(env))
        if names:
            variables.append(names[0])
    return tuple(variables)


def missing_launcher_clause(name: str, env: Mapping[str, str]) -> str:
    """Return a clause for a warning if no launcher is recognized, although the recipe expects one.

    `name` is the scheduler in the recipe. Return "" if there is no reason for a warning.
    """
    if name not in ALWAYS_SHOWING or launcher_variables(env):
        return ""
    return f"the recipe says {name}, but no scheduler variable is set here"


def _make_conflict_error(launchers: Sequence[Scheduler], env: Environment) -> NoPlan:
    """Return the error about two launchers whose variables are set at the same time.

    Either of them may have started this process. The error names both, and the flags that choose one of them.
    """
    names = [f"{module.NAME} ({', '.join(module.claims(env)[:3])})" for module in launchers]
    flags = " or ".join(f"--scheduler {module.NAME}" for module in launchers)
    return NoPlan(
        f"{' and '.join(names)} both seem to have started this process",
        where=", ".join(module.claims(env)[0] for module in launchers),
        hint=f"choose one: {flags} (or set IMGKIT_SCHEDULER). For a separate run on each node: --scheduler "
        "standalone",
    )

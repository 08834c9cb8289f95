"""One node without a launcher, such as a workstation, an interactive session or a single pod."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.schedulers.environment import Environment, unique_names
from imgkit_entrypoints.schedulers.placement import Direct, Placement

NAME = "standalone"
# If all three are set, some launcher has started this process as one rank.
RANK_VARIABLES: tuple[str, ...] = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


def claims(env: Environment) -> tuple[str, ...]:
    """Return (), because no variable shows this module. It is used if no launcher is recognized."""
    return ()


def find_placement(env: Environment) -> Placement:
    """Return the placement of a process that no known launcher has started, which is only this machine.

    With ``--direct``, return the rank that an unknown launcher has set in torch's variables.

    Raises
    ------
    NoPlan : the process is already one rank of several, or belongs to an LSF job with several hosts.
    """
    is_rank = env.has_all(RANK_VARIABLES)
    if is_rank and env.read_number("WORLD_SIZE", least=1) > 1:
        return _find_direct_placement(env)
    _refuse_lsf_job(env)
    return single_node()


def _refuse_lsf_job(env: Environment) -> None:
    """Raise NoPlan in an LSF job on several hosts, because LSF is not supported.

    An LSF job on one host is the same as a run on this machine.
    """
    host_file = env.get("LSB_DJOB_HOSTFILE")  # it has a line for each slot, so hosts occur several times
    host_lines = env.read(host_file) if host_file else None
    hosts = unique_names((host_lines or "").split())
    if len(hosts) <= 1:
        return
    raise NoPlan(
        f"this is an LSF job on {len(hosts)} hosts ({', '.join(hosts[:8])}): LSF is not supported",
        where="LSB_DJOB_HOSTFILE",
        hint=f"on each host, give --nnodes {len(hosts)} --node-rank RANK --head {hosts[0]}. To use this "
        "host alone: --scheduler standalone",
    )


def single_node() -> Placement:
    """Return the placement of a run on this machine alone."""
    return Placement(scheduler=NAME, nnodes=1, node_rank=0)


def per_node_command(command: Sequence[str], *, nnodes: int, env: Environment) -> str:
    """Return the line that starts `command`, which is the command itself."""
    return shlex.join(command)


def _find_direct_placement(env: Environment) -> Placement:
    """Return the placement of a rank that an unknown launcher has started, from torch's variables.

    Raises
    ------
    NoPlan : ``--direct`` is not given, a variable is missing, or the nodes have different numbers of ranks.
    """
    if env.get("IMGKIT_DIRECT") != "1":
        raise NoPlan(
            "this process is already one rank of several: a node agent here would start workers for each",
            where=env.quote(*RANK_VARIABLES),
            hint="start the command once per node. To run the program as this rank: --direct. To use this "
            f"machine alone, where the variables are left over: unset {' '.join(RANK_VARIABLES)}",
        )
    ranks = _read_ranks(env)
    nnodes, uneven = divmod(ranks.world_size, ranks.local_world_size)
    head = env.get("MASTER_ADDR", "") if nnodes > 1 else ""
    if uneven or (nnodes > 1 and not head):
        raise NoPlan(
            "--direct needs the same number of ranks on every node, and MASTER_ADDR on several nodes",
            where=f"WORLD_SIZE={ranks.world_size}, LOCAL_WORLD_SIZE={ranks.local_world_size}",
        )
    return Placement(
        scheduler=NAME,
        nnodes=nnodes,
        node_rank=ranks.rank // ranks.local_world_size,
        head=head,
        port=env.read_port("MASTER_PORT"),
        source={"nnodes": "WORLD_SIZE, LOCAL_WORLD_SIZE", "node_rank": "RANK", "head": "MASTER_ADDR"},
        direct=ranks,
    )


def _read_ranks(env: Environment) -> Direct:
    """Return the rank of this process from torch's variables.

    Raises
    ------
    NoPlan : a variable is missing, or a rank is not below the number of ranks.
    """
    where = env.quote(*RANK_VARIABLES)
    if not env.get("LOCAL_WORLD_SIZE"):
        raise NoPlan("--direct also needs LOCAL_WORLD_SIZE", where=where)
    ranks = Direct(
        rank=env.read_number("RANK"),
        local_rank=env.read_number("LOCAL_RANK"),
        world_size=env.read_number("WORLD_SIZE"),
        local_world_size=env.read_number("LOCAL_WORLD_SIZE", least=1),
    )
    if ranks.rank >= ranks.world_size or ranks.local_rank >= ranks.local_world_size:
        raise NoPlan("RANK must be below WORLD_SIZE, and LOCAL_RANK below LOCAL_WORLD_SIZE", where=where)
    return ranks

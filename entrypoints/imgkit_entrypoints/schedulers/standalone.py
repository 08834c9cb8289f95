"""One node and no launcher: a workstation, an interactive session, a single pod."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.schedulers.placement import Direct, Placement, Read, number, port_in, present, unique

NAME = "standalone"
WORKER: tuple[str, ...] = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


def claims(env: Mapping[str, str]) -> tuple[str, ...]:
    """No variable shows it: it remains where no launcher shows."""
    return ()


def place(env: Mapping[str, str], read: Read) -> Placement:
    """This machine alone.

    Raises
    ------
    NoPlan : the process is already one rank of several, or an unsupported launcher has several hosts.
    """
    direct = None
    if present(env, *WORKER) == WORKER and number(env, "WORLD_SIZE", least=1) > 1:
        direct = _worker(env)
    hosts = unique((read(env["LSB_DJOB_HOSTFILE"]) or "").split()) if env.get("LSB_DJOB_HOSTFILE") else ()
    if len(hosts) > 1 and direct is None:
        raise NoPlan(
            f"this is an LSF job on {len(hosts)} hosts ({', '.join(hosts[:8])}): LSF is not supported",
            where="LSB_DJOB_HOSTFILE",
            hint=f"on each host, give --nnodes {len(hosts)} --node-rank RANK --head {hosts[0]}. To use this "
            "host alone: --scheduler standalone",
        )
    return alone() if direct is None else _ranks(direct, env)


def alone() -> Placement:
    """One node, with no other node to find."""
    return Placement(
        scheduler=NAME, nnodes=1, node_rank=0, hosts=(), head="", port=None, job_id="", source={}
    )


def start_argv(command: Sequence[str]) -> tuple[str, ...]:
    """Words of the command itself."""
    return tuple(command)


def per_node_command(command: Sequence[str], *, nnodes: int, env: Mapping[str, str]) -> str:
    """The command itself."""
    return shlex.join(start_argv(command))


def _worker(env: Mapping[str, str]) -> Direct:
    """Rank that an unknown launcher gave; it is used only with --direct."""
    where = ", ".join(f"{name}={env[name]}" for name in WORKER)
    if env.get("IMGKIT_DIRECT") != "1":
        raise NoPlan(
            "this process is already one rank of several: a node agent here would start workers for each",
            where=where,
            hint="start the command once per node. To run the program as this rank: --direct. If the "
            f"variables are left over: unset {' '.join(WORKER)}",
        )
    if not present(env, "LOCAL_WORLD_SIZE"):
        raise NoPlan("--direct also needs LOCAL_WORLD_SIZE", where=where)
    ranks = Direct(
        rank=number(env, "RANK"),
        local_rank=number(env, "LOCAL_RANK"),
        world_size=number(env, "WORLD_SIZE"),
        local_world_size=number(env, "LOCAL_WORLD_SIZE", least=1),
    )
    if ranks.rank >= ranks.world_size or ranks.local_rank >= ranks.local_world_size:
        raise NoPlan("RANK must be below WORLD_SIZE, and LOCAL_RANK below LOCAL_WORLD_SIZE", where=where)
    return ranks


def _ranks(direct: Direct, env: Mapping[str, str]) -> Placement:
    """Node of a rank, where every node has the same number of ranks."""
    nnodes, uneven = divmod(direct.world_size, direct.local_world_size)
    head = env.get("MASTER_ADDR", "") if nnodes > 1 else ""
    if uneven or (nnodes > 1 and not head):
        raise NoPlan(
            "--direct needs the same number of ranks on every node, and MASTER_ADDR on several nodes",
            where=f"WORLD_SIZE={direct.world_size}, LOCAL_WORLD_SIZE={direct.local_world_size}",
        )
    return Placement(
        scheduler=NAME,
        nnodes=nnodes,
        node_rank=direct.rank // direct.local_world_size,
        hosts=(),
        head=head,
        port=port_in(env, "MASTER_PORT"),
        job_id="",
        source={"nnodes": "WORLD_SIZE, LOCAL_WORLD_SIZE", "node_rank": "RANK", "head": "MASTER_ADDR"},
        direct=direct,
    )

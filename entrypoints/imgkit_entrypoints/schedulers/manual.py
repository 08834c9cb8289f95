"""Nodes started by hand: the same command on each, with its node rank and the address of node 0."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.schedulers.placement import (
    NODES,
    Placement,
    Read,
    Size,
    first,
    given_nodes,
    head_of,
    hostname,
    number,
    port_in,
    present,
    short,
)

NAME = "manual"

FIELDS: Mapping[str, tuple[str, ...]] = {
    "nnodes": ("IMGKIT_NNODES", NODES),
    "node_rank": ("IMGKIT_NODE_RANK",),
    "head": ("IMGKIT_HEAD", NODES, "MASTER_ADDR"),
    "hosts": (NODES,),
}


def claims(env: Mapping[str, str]) -> tuple[str, ...]:
    """Variables, or flags written as variables, that ask for several nodes."""
    several = env.get("IMGKIT_NNODES", "1") != "1"
    return (*(("IMGKIT_NNODES",) if several else ()), *present(env, NODES))


def place(env: Mapping[str, str], read: Read) -> Placement:
    """Node that the user says this is.

    Raises
    ------
    NoPlan : something is missing; the message names everything that is missing.
    """
    hosts = given_nodes(env)
    nnodes_from = first(env, FIELDS["nnodes"])
    nnodes = number(env, nnodes_from, least=1) if nnodes_from == "IMGKIT_NNODES" else max(1, len(hosts))
    if hosts and len(hosts) != nnodes and nnodes > 1:
        raise NoPlan(f"--nnodes is {nnodes}, but {NODES} lists {len(hosts)} hosts", where=NODES)
    hosts = hosts if len(hosts) == nnodes else ()
    node_rank, rank_from = _node_rank(env, read, hosts) if nnodes > 1 else (0, nnodes_from)
    head, head_from = head_of(env, nnodes, hosts, NODES, "MASTER_ADDR")
    missing = [
        *(["--node-rank RANK"] if node_rank is None else []),
        *(["--head HOST"] if nnodes > 1 and not head else []),
    ]
    if node_rank is None or missing:
        verb = "is" if len(missing) == 1 else "are"
        raise NoPlan(
            f"{' and '.join(missing)} {verb} missing for a run on {nnodes} nodes",
            where=nnodes_from,
            hint=f"on each node, give --nnodes {nnodes} --node-rank RANK --head HOST; RANK is 0 on HOST, and "
            "counts up on the others",
        )
    if node_rank >= nnodes:
        raise NoPlan(
            f"--node-rank {node_rank} is not below --nnodes {nnodes}",
            where=rank_from,
            hint=f"node ranks are 0 to {nnodes - 1}; HOST of --head has 0",
        )
    port = port_in(env, "MASTER_PORT") if head_from == "MASTER_ADDR" else None
    return Placement(
        scheduler=NAME,
        nnodes=nnodes,
        node_rank=node_rank,
        hosts=hosts,
        head=head,
        port=port,
        job_id="",
        source={
            "nnodes": nnodes_from,
            "node_rank": rank_from,
            "hosts": NODES if hosts else "",
            "head": head_from,
            "port": "MASTER_PORT" if port is not None else "",
        },
    )


def start_argv(
    command: Sequence[str], *, nnodes: int | Size, node_rank: int | str, head: str, port: int | None = None
) -> tuple[str, ...]:
    """Words for one node. The options follow the command's name: words after a script are the script's."""
    words = list(command)
    at = next((index for index, word in enumerate(words) if PurePath(word).name.startswith("dist-")), 0)
    options = ["--nnodes", str(nnodes), "--node-rank", str(node_rank), "--head", head]
    options += [] if port is None else ["--port", str(port)]
    return (*words[: at + 1], *options, *words[at + 1 :])


def per_node_command(command: Sequence[str], *, nnodes: int, env: Mapping[str, str]) -> str:
    """Line for each node; the user fills in RANK and HOST."""
    head = env.get("IMGKIT_HEAD") or "HOST"
    return shlex.join(start_argv(command, nnodes=nnodes, node_rank="RANK", head=head))


def _node_rank(env: Mapping[str, str], read: Read, hosts: tuple[str, ...]) -> tuple[int | None, str]:
    if present(env, "IMGKIT_NODE_RANK"):
        return number(env, "IMGKIT_NODE_RANK"), "IMGKIT_NODE_RANK"
    own = short(hostname(read))
    places = [index for index, host in enumerate(hosts) if own and short(host) == own]
    return (places[0], "hostname") if len(places) == 1 else (None, "")

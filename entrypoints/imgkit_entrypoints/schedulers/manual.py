"""Nodes that the user starts by hand, with the same command on each node.

The command contains the node rank and the address of node 0. The flags are read as variables: ``--nnodes`` as
IMGKIT_NNODES, ``--node-rank`` as IMGKIT_NODE_RANK and ``--head`` as IMGKIT_HEAD (resolve.py).
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import PurePath

from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.schedulers.environment import NODES, Environment, HostList
from imgkit_entrypoints.schedulers.placement import Placement, Size

NAME = "manual"


def claims(env: Environment) -> tuple[str, ...]:
    """Return the variables that request several nodes. Flags count as their variables."""
    if env.get("IMGKIT_NNODES", "1") == "1":
        return env.find_set(NODES)
    return ("IMGKIT_NNODES", *env.find_set(NODES))


def find_placement(env: Environment) -> Placement:
    """Return the placement that the user's flags and variables describe, without a launcher.

    Raises
    ------
    NoPlan : a flag is missing or contradicts another. The message names all missing flags.
    """
    listed_hosts = env.requested_nodes()
    nnodes, nnodes_from = max(1, len(listed_hosts)), env.find_first_set((NODES,))
    if env.get("IMGKIT_NNODES"):
        nnodes, nnodes_from = env.read_number("IMGKIT_NNODES", least=1), "IMGKIT_NNODES"
    hosts = _choose_hosts(listed_hosts, nnodes)
    node_rank, rank_from = env.find_node_rank(nnodes, nnodes_from, hosts, "IMGKIT_NODE_RANK")
    head, head_from = env.find_head(nnodes, hosts, "MASTER_ADDR")
    missing = []
    if node_rank is None:
        missing.append("--node-rank RANK")
    if nnodes > 1 and not head:
        missing.append("--head HOST")
    if node_rank is None or missing:
        raise _make_missing_error(missing, nnodes, nnodes_from)
    if node_rank >= nnodes:
        raise NoPlan(
            f"{node_rank} is not below --nnodes {nnodes}",
            where=rank_from,
            hint=f"node ranks are 0 to {nnodes - 1}; HOST of --head has 0",
        )
    # MASTER_PORT belongs to MASTER_ADDR, so it is only used if the head comes from there.
    port = env.read_port("MASTER_PORT") if head_from == "MASTER_ADDR" else None
    source = {
        "nnodes": nnodes_from,
        "node_rank": rank_from,
        "head": head_from,
        "hosts": hosts.variable,
        "port": "" if port is None else "MASTER_PORT",
    }
    return Placement(
        scheduler=NAME,
        nnodes=nnodes,
        node_rank=node_rank,
        hosts=hosts.names,
        head=head,
        port=port,
        source=source,
    )


def _choose_hosts(listed_hosts: tuple[str, ...], nnodes: int) -> HostList:
    """Return the hosts of the run, which are those in IMGKIT_NODES, or an empty list if there are none.

    With ``--nnodes 1``, the variable may still list several hosts, which do not belong to this run.

    Raises
    ------
    NoPlan : the variable lists another number of hosts than the `nnodes` nodes of the run.
    """
    if len(listed_hosts) == nnodes:
        return HostList(listed_hosts, NODES)
    if listed_hosts and nnodes > 1:
        raise NoPlan(
            f"{len(listed_hosts)} hosts ({', '.join(listed_hosts[:8])}), but --nnodes is {nnodes}",
            where=NODES,
            hint=f"leave --nnodes out, or list the {nnodes} hosts in the order of their ranks",
        )
    return HostList()


def _make_missing_error(flags: Sequence[str], nnodes: int, nnodes_from: str) -> NoPlan:
    """Return the error for missing flags. `nnodes_from` is the variable with the number of nodes."""
    verb = "is" if len(flags) == 1 else "are"
    return NoPlan(
        f"{' and '.join(flags)} {verb} missing for a run on {nnodes} nodes",
        where=nnodes_from,
        hint=f"on each node, give --nnodes {nnodes} --node-rank RANK --head HOST; RANK is 0 on HOST, and "
        "counts up on the others",
    )


def start_argv(
    command: Sequence[str], *, nnodes: int | Size, node_rank: int | str, head: str, port: str | int = ""
) -> tuple[str, ...]:
    """Return the argv that starts `command` on one of several nodes, with the flags that describe the node.

    The flags are inserted after the name ``dist-*``, because arguments after a script belong to the script.
    For example, ``dist-run train.py`` becomes ``dist-run --nnodes 2 --node-rank 0 --head n1 train.py``.
    """
    options = ["--nnodes", str(nnodes), "--node-rank", str(node_rank), "--head", head]
    if port:
        options += ["--port", str(port)]
    # The command may begin with a container runtime: "apptainer exec image.sif dist-run ...". If no argument
    # is a dist-* command, the flags follow the first word.
    end = 1
    for position, arg in enumerate(command, start=1):
        if PurePath(arg).name.startswith("dist-"):
            end = position
            break
    return (*command[:end], *options, *command[end:])


def per_node_command(command: Sequence[str], *, nnodes: int, env: Environment) -> str:
    """Return the line that the user types on each node.

    The user has to replace RANK, and also HOST if the head is unknown.
    """
    head = env.get("IMGKIT_HEAD") or "HOST"
    return shlex.join(start_argv(command, nnodes=nnodes, node_rank="RANK", head=head))

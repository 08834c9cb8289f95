"""Flags and ``IMGKIT_*`` variables: what they ask for, and whether a placement agrees with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from imgkit_entrypoints.errors import NoPlan, UsageError
from imgkit_entrypoints.schedulers.environment import number, port_in, size_in
from imgkit_entrypoints.schedulers.launchers import BY_NAME, NAMES
from imgkit_entrypoints.schedulers.placement import Direct, Placement, Wanted

# Field of `Wanted` -> the variable that the modules read; `as_environment` writes flags there.
_VARIABLES: Mapping[str, str] = {
    "nnodes": "IMGKIT_NNODES",
    "node_rank": "IMGKIT_NODE_RANK",
    "head": "IMGKIT_HEAD",
    "port": "IMGKIT_PORT",
    "direct": "IMGKIT_DIRECT",
}


def with_variables(wanted: Wanted, env: Mapping[str, str]) -> Wanted:
    """Fill in the ``IMGKIT_*`` variables where no flag is given.

    Raises
    ------
    NoPlan : a variable cannot be parsed.
    """
    node_rank, direct = wanted.node_rank, wanted.direct
    if node_rank is None and env.get("IMGKIT_NODE_RANK"):
        node_rank = number(env, "IMGKIT_NODE_RANK")
    if direct is None and env.get("IMGKIT_DIRECT"):
        direct = env["IMGKIT_DIRECT"].lower() not in ("0", "false", "no", "off")
    return dataclasses.replace(
        wanted,
        scheduler=wanted.scheduler or env.get("IMGKIT_SCHEDULER"),
        size=wanted.size or size_in(env, "IMGKIT_NNODES"),
        node_rank=node_rank,
        head=wanted.head or env.get("IMGKIT_HEAD"),
        port=port_in(env, "IMGKIT_PORT") if wanted.port is None else wanted.port,
        direct=direct,
    )


def check(wanted: Wanted) -> None:
    """Refuse flags that no environment makes right.

    Raises
    ------
    UsageError : names the flag and the values that it takes.
    """
    if wanted.scheduler and wanted.scheduler not in NAMES:
        raise UsageError(
            f"unknown scheduler {wanted.scheduler!r}", where="--scheduler", hint=f"one of: {', '.join(NAMES)}"
        )
    if wanted.port is not None and not 1 <= wanted.port <= 65535:
        raise UsageError(f"{wanted.port} is not a port", where="--port", hint="give a number from 1 to 65535")


def as_environment(wanted: Wanted, env: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment with every flag written as its variable, and no variable that was not parsed."""
    asked = {name: value for name, value in env.items() if name not in _VARIABLES.values()}
    for field, name in _VARIABLES.items():
        value = getattr(wanted, field)
        if value is not None and value != "":
            asked[name] = str(int(value)) if isinstance(value, (bool, int)) else value
    return asked


def complete(wanted: Wanted) -> bool:
    """True if the flags say everything about this node, so that no launcher need be asked."""
    several = wanted.nnodes is not None and wanted.nnodes > 1
    return several and wanted.node_rank is not None and wanted.head is not None


def applied(found: Placement, wanted: Wanted, env: Mapping[str, str]) -> Placement:
    """Return the placement with the requested port and range, and with sources under the user's names.

    Raises
    ------
    NoPlan : a flag contradicts what was found.
    """
    _compare(found, wanted)
    port, source = found.port, dict(found.source)
    if wanted.port is not None:
        port, source["port"] = wanted.port, _VARIABLES["port"]
    for field, name in source.items():
        for asked, variable in _VARIABLES.items():
            if name == variable and not env.get(variable):
                source[field] = f"--{asked.replace('_', '-')}"
    return dataclasses.replace(
        found,
        port=port,
        direct=_direct(found, wanted),
        size=found.size if wanted.size is None else None if wanted.size.fixed else wanted.size,
        source={field: name for field, name in source.items() if name},
    )


def _compare(found: Placement, wanted: Wanted) -> None:
    """Refuse a flag that differs from the launcher: neither may win silently."""
    size = wanted.size
    if size and not size.least <= found.nnodes <= size.started:
        raise NoPlan(
            f"--nnodes is {size}, but {found.scheduler} started {found.nnodes}",
            where=found.source.get("nnodes", "--nnodes"),
            hint=f"leave --nnodes out, or start the command on {size.started} nodes. For a separate run on "
            "each node: --scheduler standalone",
        )
    if wanted.node_rank is not None and wanted.node_rank != found.node_rank:
        raise NoPlan(
            f"--node-rank is {wanted.node_rank}, but {found.scheduler} says that this is node "
            f"{found.node_rank}",
            where=found.source.get("node_rank", "--node-rank"),
            hint="leave --node-rank out. To override the launcher: --scheduler manual with --nnodes, "
            "--node-rank and --head",
        )


def _direct(found: Placement, wanted: Wanted) -> Direct | None:
    if wanted.direct is False and found.direct is not None:
        raise NoPlan(
            f"{found.direct.local_world_size} processes were started on this node, but direct mode is "
            "switched off",
            where=found.source.get("nnodes", found.scheduler),
            hint=BY_NAME[found.scheduler].per_node_command(wanted.command, nnodes=found.nnodes, env={}),
        )
    if wanted.direct and found.direct is None:
        return Direct(rank=found.node_rank, local_rank=0, world_size=found.nnodes, local_world_size=1)
    return found.direct

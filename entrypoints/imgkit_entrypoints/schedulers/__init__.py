"""From the environment to a `Placement`: one module per launcher, and the rules for when several seem to be
at work.

Order: a torchrun worker is refused; the flag ``--scheduler``; complete flags (``--nnodes --node-rank
--head``); the one launcher whose variables are set; IMGKIT_NODES; this machine alone. Every module is pure:
environment and files come in as arguments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from imgkit_entrypoints.errors import NoPlan, UsageError
from imgkit_entrypoints.schedulers import launchers, manual, standalone
from imgkit_entrypoints.schedulers.environment import hostname, node_range, number, port_in, short
from imgkit_entrypoints.schedulers.launchers import BY_NAME, NAMES, Scheduler, claims, unseen
from imgkit_entrypoints.schedulers.placement import Direct, Placement, Read, Wanted, WrongStart

__all__ = ["NAMES", "Scheduler", "claims", "place", "unseen", "warnings"]


# Field of `Wanted` -> the variable under which modules read it; `place` writes flags there.
_VARIABLES: Mapping[str, str] = {
    "nnodes": "IMGKIT_NNODES",
    "node_rank": "IMGKIT_NODE_RANK",
    "head": "IMGKIT_HEAD",
    "port": "IMGKIT_PORT",
    "direct": "IMGKIT_DIRECT",
}


def place(wanted: Wanted, env: Mapping[str, str], read: Read) -> Placement:
    """Where this process stands, from flags, the environment and, rarely, a file.

    Raises
    ------
    NoPlan : no placement can be right; the hint is what to start instead.
    UsageError : a flag that no environment makes right.
    """
    wanted = _filled(wanted, env)
    _check_flags(wanted)
    _refuse_nesting(env)
    asked = _asked(wanted, env)
    claimants = launchers.claimants(asked)
    if wanted.scheduler:
        module = launchers.named(wanted.scheduler, asked)
        found = _place_by(module, wanted, asked, read)
    elif _complete(wanted, asked):
        found = manual.place(asked, read)
        _hold_against(claimants, found, asked, read)
    elif len(claimants) > 1:
        launchers.refuse_two(claimants[:2], asked)
    else:
        module = claimants[0] if claimants else manual if manual.claims(asked) else standalone
        found = _place_by(module, wanted, asked, read)
    _check_host(found, read)
    return _with_flags(found, wanted, env)


def warnings(found: Placement, wanted: Wanted, env: Mapping[str, str], *, recipe: str) -> tuple[str, ...]:
    """What is odd about `found` where the image's recipe is for the scheduler `recipe`, but no error."""
    alone = found.scheduler == standalone.NAME and found.direct is None
    if not alone or wanted.scheduler or wanted.nnodes:
        return ()
    text = unseen(recipe, env)
    meant = "this machine alone; in a job, start the container without --cleanenv (if meant: --nnodes 1)"
    return (f"{text}: {meant}",) if text else ()


def _filled(wanted: Wanted, env: Mapping[str, str]) -> Wanted:
    """What is asked for, with the ``IMGKIT_*`` variables where no flag is given."""
    least, most = wanted.min_nnodes, wanted.nnodes
    if most is None:
        least, most = node_range(env, "IMGKIT_NNODES")
    node_rank, direct = wanted.node_rank, wanted.direct
    if node_rank is None and env.get("IMGKIT_NODE_RANK"):
        node_rank = number(env, "IMGKIT_NODE_RANK")
    if direct is None and env.get("IMGKIT_DIRECT"):
        direct = env["IMGKIT_DIRECT"].lower() not in ("0", "false", "no", "off")
    return dataclasses.replace(
        wanted,
        scheduler=wanted.scheduler or env.get("IMGKIT_SCHEDULER"),
        min_nnodes=least,
        nnodes=most,
        node_rank=node_rank,
        head=wanted.head or env.get("IMGKIT_HEAD"),
        port=port_in(env, "IMGKIT_PORT") if wanted.port is None else wanted.port,
        direct=direct,
    )


def _check_flags(wanted: Wanted) -> None:
    if wanted.scheduler and wanted.scheduler not in NAMES:
        raise UsageError(
            f"unknown scheduler {wanted.scheduler!r}", where="--scheduler", hint=f"one of: {', '.join(NAMES)}"
        )
    if wanted.nnodes is not None and wanted.nnodes < 1:
        raise UsageError(f"{wanted.nnodes} nodes", where="--nnodes", hint="a number from 1")
    if wanted.min_nnodes is not None and not 1 <= wanted.min_nnodes <= (wanted.nnodes or 0):
        raise UsageError(
            f"{wanted.min_nnodes}:{wanted.nnodes} is no range", where="--nnodes", hint="MIN:MAX, MIN from 1"
        )
    if wanted.port is not None and not 1 <= wanted.port <= 65535:
        raise UsageError(f"{wanted.port} is no port", where="--port", hint="1 to 65535")


def _refuse_nesting(env: Mapping[str, str]) -> None:
    if env.get("TORCHELASTIC_RUN_ID"):
        raise NoPlan(
            "this process is a torchrun worker already: a launcher here would start all workers once more "
            "in each",
            where=f"TORCHELASTIC_RUN_ID={env['TORCHELASTIC_RUN_ID']}",
            hint="start the program itself here, or this command outside of torchrun; to start a run of its "
            "own on "
            "purpose: env -u TORCHELASTIC_RUN_ID -u RANK -u LOCAL_RANK -u WORLD_SIZE COMMAND",
        )


def _asked(wanted: Wanted, env: Mapping[str, str]) -> Mapping[str, str]:
    """The environment with the flags written as their variables, and none that was not parsed."""
    asked = {name: value for name, value in env.items() if name not in _VARIABLES.values()}
    for field, name in _VARIABLES.items():
        value = getattr(wanted, field)
        if value is not None and value != "":
            asked[name] = str(int(value)) if isinstance(value, (bool, int)) else value
    return asked


def _place_by(module: Scheduler, wanted: Wanted, env: Mapping[str, str], read: Read) -> Placement:
    try:
        return module.place(env, read)
    except WrongStart as error:
        if wanted.nnodes == 1:
            return standalone.alone()
        command = module.per_node_command(outside(wanted.command, env, read), nnodes=error.nnodes, env=env)
        hint = f"{command}\n     (or, for this node alone: --nnodes 1)"
        raise NoPlan(error.what, where=error.where, hint=f"start it once per node:\n     {hint}") from None


def outside(command: Sequence[str], env: Mapping[str, str], read: Read) -> tuple[str, ...]:
    """The command as it is typed on the host: in front of it, how this container was started."""
    for runtime in ("apptainer", "singularity"):
        image = env.get(f"{runtime.upper()}_CONTAINER")
        if image:
            binds = env.get(f"{runtime.upper()}_BIND")
            return (
                *(runtime, "exec"),
                *(("--nv",) if read("/proc/driver/nvidia/version") is not None else ()),
                *(("--bind", binds) if binds else ()),
                *(image, *command),
            )
    return tuple(command)


def _complete(wanted: Wanted, env: Mapping[str, str]) -> bool:
    """Whether the flags say all about this node, so that no launcher need be asked."""
    several = wanted.nnodes is not None and wanted.nnodes > 1
    return several and wanted.node_rank is not None and wanted.head is not None


def _hold_against(
    claimants: Sequence[Scheduler], found: Placement, env: Mapping[str, str], read: Read
) -> None:
    """Catch a rank that the shell of the job script filled in, which is 0 on every node.

    ``srun dist-run --node-rank $SLURM_NODEID`` is such a line: the script's shell expands it, not the task.
    """
    for module in claimants:
        try:
            other = module.place(env, read)
        except NoPlan:
            continue  # started past this launcher, by ssh for example: the flags are all there is
        if other.nnodes == found.nnodes and other.node_rank != found.node_rank and other.direct is None:
            name = other.source.get("node_rank", "")
            raise NoPlan(
                f"--node-rank says {found.node_rank}, {module.NAME} says {other.node_rank} ({name})",
                where="--node-rank",
                hint=f"leave --nnodes, --node-rank and --head out (a ${name} in a job script is filled in "
                "before the nodes are reached); to insist: --scheduler manual",
            )


def _check_host(found: Placement, read: Read) -> None:
    """Refuse a list of hosts in another order than the ranks: the others would wait at the wrong host."""
    own = short(hostname(read))
    places = [index for index, host in enumerate(found.hosts) if own and short(host) == own]
    if found.nnodes > 1 and len(places) == 1 and places[0] != found.node_rank:
        source = found.source.get("hosts", "")
        raise NoPlan(
            f"this is node {found.node_rank} by {found.source.get('node_rank', '')}, and {own} is host "
            f"{places[0]} of "
            f"{source}",
            where=f"{source}: {', '.join(found.hosts[:8])}",
            hint="list the hosts in the order of their ranks: awk '!s[$0]++' keeps it, sort does not",
        )


def _with_flags(found: Placement, wanted: Wanted, env: Mapping[str, str]) -> Placement:
    """The placement with port and range as asked, and the sources under the names that the user gave."""
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
        min_nnodes=found.min_nnodes if wanted.min_nnodes is None else wanted.min_nnodes,
        source={field: name for field, name in source.items() if name},
    )


def _compare(found: Placement, wanted: Wanted) -> None:
    """Hold flags against what was found: neither may win in silence."""
    least = wanted.nnodes if wanted.min_nnodes is None else wanted.min_nnodes
    if wanted.nnodes is not None and least is not None and not least <= found.nnodes <= wanted.nnodes:
        asked = str(wanted.nnodes) if wanted.min_nnodes is None else f"{least}:{wanted.nnodes}"
        raise NoPlan(
            f"--nnodes {asked}, and {found.scheduler} started {found.nnodes}",
            where=found.source.get("nnodes", "--nnodes"),
            hint=f"leave --nnodes out, or start it on {wanted.nnodes}; a separate run on each node: "
            "--scheduler standalone",
        )
    if wanted.node_rank is not None and wanted.node_rank != found.node_rank:
        raise NoPlan(
            f"--node-rank {wanted.node_rank}, and by {found.scheduler} this is node {found.node_rank}",
            where=found.source.get("node_rank", "--node-rank"),
            hint="leave --node-rank out; to insist: --scheduler manual with --nnodes, --node-rank and --head",
        )


def _direct(found: Placement, wanted: Wanted) -> Direct | None:
    if wanted.direct is False and found.direct is not None:
        raise NoPlan(
            f"{found.direct.local_world_size} processes were started on this node, and --direct is switched "
            f"off",
            where=found.source.get("nnodes", found.scheduler),
            hint=BY_NAME[found.scheduler].per_node_command(wanted.command, nnodes=found.nnodes, env={}),
        )
    if wanted.direct and found.direct is None:
        return Direct(rank=found.node_rank, local_rank=0, world_size=found.nnodes, local_world_size=1)
    return found.direct

"""Flags, environment and launcher resolved to one `Placement`, and the refusals where they disagree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.schedulers import flags, launchers, manual, standalone
from imgkit_entrypoints.schedulers.environment import hostname, short
from imgkit_entrypoints.schedulers.launchers import Scheduler
from imgkit_entrypoints.schedulers.placement import Placement, Read, Wanted, WrongStart


def place(wanted: Wanted, env: Mapping[str, str], read: Read) -> Placement:
    """Find the place of this process from flags, the environment and sometimes a file.

    Order: a torchrun worker is refused; the flag ``--scheduler``; complete flags (``--nnodes --node-rank
    --head``); the one launcher whose variables are set; IMGKIT_NODES; this machine alone.

    Raises
    ------
    NoPlan : no placement can be right; the hint says what to start instead.
    UsageError : a flag that no environment makes right.
    """
    wanted = flags.with_variables(wanted, env)
    flags.check(wanted)
    _refuse_nesting(env)
    asked = flags.as_environment(wanted, env)
    claimants = launchers.claimants(asked)
    if wanted.scheduler:
        found = _place_by(launchers.named(wanted.scheduler, asked), wanted, asked, read)
    elif flags.complete(wanted):
        found = manual.place(asked, read)
        _compare_rank(claimants, found, asked, read)
    elif len(claimants) > 1:
        launchers.refuse_two(claimants[:2], asked)
    else:
        module = claimants[0] if claimants else manual if manual.claims(asked) else standalone
        found = _place_by(module, wanted, asked, read)
    _check_host(found, read)
    return flags.applied(found, wanted, env)


def warnings(found: Placement, wanted: Wanted, env: Mapping[str, str], *, recipe: str) -> tuple[str, ...]:
    """Describe what is odd about `found`, though no error, in an image for the scheduler `recipe`."""
    alone = found.scheduler == standalone.NAME and found.direct is None
    if not alone or wanted.scheduler or wanted.nnodes:
        return ()
    text = launchers.unseen(recipe, env)
    meant = (
        "only this machine is used. In a job, start the container without --cleanenv. To use one machine on "
        "purpose: --nnodes 1"
    )
    return (f"{text}: {meant}",) if text else ()


def _refuse_nesting(env: Mapping[str, str]) -> None:
    if env.get("TORCHELASTIC_RUN_ID"):
        raise NoPlan(
            "this process is already a torchrun worker: a launcher here would start all workers again in "
            "each of them",
            where=f"TORCHELASTIC_RUN_ID={env['TORCHELASTIC_RUN_ID']}",
            hint="start the program itself here, or start this command outside torchrun. To start a separate "
            "run on purpose: env -u TORCHELASTIC_RUN_ID -u RANK -u LOCAL_RANK -u WORLD_SIZE COMMAND",
        )


def _place_by(module: Scheduler, wanted: Wanted, env: Mapping[str, str], read: Read) -> Placement:
    try:
        return module.place(env, read)
    except WrongStart as error:
        if wanted.nnodes == 1:
            return standalone.alone()
        typed = _typed_on_host(wanted.command, env, read)
        command = module.per_node_command(typed, nnodes=error.nnodes, env=env)
        hint = f"start it once per node:\n{command}\n(or, to use this node alone: --nnodes 1)"
        raise NoPlan(error.what, where=error.where, hint=hint) from None


def _typed_on_host(command: Sequence[str], env: Mapping[str, str], read: Read) -> tuple[str, ...]:
    """The command as it is typed on the host: the words that start this container, then `command`."""
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

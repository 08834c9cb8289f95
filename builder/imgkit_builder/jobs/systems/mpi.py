"""Hosts without a scheduler: mpirun, or one ssh command per host, which ``submit`` runs all at once."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import secrets
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from imgkit_builder.base.flags import flag
from imgkit_builder.jobs.job import Argv, Job, Script, SentInput
from imgkit_builder.jobs.quoting import line, repeat_option
from imgkit_builder.jobs.request import SystemFlags
from imgkit_builder.jobs.runtimes import runtime_of
from imgkit_builder.jobs.systems import (
    fanout,
    local,
    need_program,
    part_of_nodes,
    program_starts_once,
    spare_waits_for_nothing,
    user_options,
    with_folders,
)
from imgkit_builder.recipe.systems import SHIPPED
from imgkit_entrypoints.cli.commands import COMMANDS
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.schedulers import manual
from imgkit_entrypoints.schedulers.mpi import OPENMPI
from imgkit_entrypoints.schedulers.placement import FIRST_PORT, PORTS

MASTER_PORT = 29500
"""torchrun's default, for the user's own programs. Launchers of imgkit agree on a free port."""
FORWARD = (
    *(*OPENMPI.fields.rank, *OPENMPI.fields.world_size),
    *(*OPENMPI.fields.local_rank, *OPENMPI.fields.local_world_size, *OPENMPI.fields.job_id),
    *("IMGKIT_NODES", "MASTER_ADDR", "MASTER_PORT"),
)
"""Variables that docker passes into the container; other runtimes pass all of mpirun's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MpiFlags(SystemFlags):
    """Flags that only hosts without a scheduler have."""

    hosts: str = flag(
        "", metavar="A,B|./FILE", help="MPI, ssh: the nodes, the head first; or a file with one per line."
    )
    direct: bool = flag(False, help="MPI: mpirun starts every rank itself, without torchrun.")
    ssh: bool = flag(False, help="Start the hosts by ssh, without mpirun.")
    names: tuple[str, ...] = field(default=(), init=False)
    """The hosts of `hosts`; a file is read once."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", fanout.read(self.hosts))

    @property
    def default_nodes(self) -> int:
        """One node for each host."""
        return len(self.names) or 1


class Mpi(local.ForegroundSystem):
    """Hosts that mpirun or ssh reaches."""

    flags = MpiFlags
    registration = SHIPPED["mpi"]
    takes_hosts = True
    where = "over ssh"

    def check(self, job: Job, *, is_submitted: bool = False) -> Iterator[str]:
        """Yield warnings about requests that the user may not have meant.

        Raises
        ------
        UsageError : if `is_submitted`, an order of hosts that mpirun would change.
        """
        flags = job.flags(MpiFlags)
        if is_submitted and not flags.ssh:
            _check_order(flags.names)
        if not flags.direct:
            yield from program_starts_once(job.command)
        yield from part_of_nodes(job)
        if not flags.ssh:
            yield from spare_waits_for_nothing(job)

    def script(self, job: Job) -> Script:
        """Return the ``mpirun`` line, or one ``ssh`` line for each host."""
        need_program(job)
        _check(job)
        if job.is_interactive and not job.command:
            return _shell(job)
        return _by_ssh(job) if job.flags(MpiFlags).ssh else _by_mpirun(job)


SYSTEM = Mpi()


def _hosts(job: Job) -> tuple[str, ...]:
    return job.flags(MpiFlags).names


def _check(job: Job) -> None:
    flags, nodes = job.flags(MpiFlags), job.allocation.nodes
    hosts = flags.names
    if len(hosts) != nodes and (hosts or nodes > 1 or flags.ssh):
        message, hint = (
            f"{nodes} nodes, but 0 hosts",
            "--hosts A,B, the head first, or --hosts ./FILE",
        )
        if hosts:
            message = f"{nodes} nodes, but {len(hosts)} hosts: {', '.join(hosts)}"
            hint = "leave --nodes out: it is the number of hosts"
        raise UsageError(message, where="--hosts", hint=hint)
    if flags.direct and flags.ssh:
        message, hint = "--direct cannot be combined with --ssh", "mpirun starts the ranks: omit --ssh"
        raise UsageError(message, where="--direct", hint=hint)
    unusable = [host for host in hosts if "@" in host or ":" in host]
    if unusable and not flags.ssh:
        raise UsageError(
            f"mpirun cannot use {unusable[0]!r}: it reads slots after a colon, and has no syntax for a user",
            where="--hosts",
            hint="give it a name in ~/.ssh/config and /etc/hosts, or use --ssh",
        )


def _check_order(hosts: Sequence[str]) -> None:
    # Open MPI 4.1 puts its own host first, wherever that stands in -H or in a hostfile.
    local_host = next((host for host in hosts if fanout.is_here(host)), "")
    if local_host and local_host != hosts[0]:
        own_first = ",".join((local_host, *(host for host in hosts if host != local_host)))
        raise UsageError(
            f"this is {local_host}: mpirun gives rank 0 to its own host, not to {hosts[0]}",
            where="--hosts",
            hint=f"--hosts {own_first}, or start it on {hosts[0]}",
        )


def _by_mpirun(job: Job) -> Script:
    hosts, runtime = _hosts(job), runtime_of(job)
    forward, nodes = _forward(job), job.allocation.nodes
    options = (
        *repeat_option("-x", job.container.names),
        *job.recipe.system.queue.options,
        *user_options(job),
    )
    if not runtime.has_container:
        options = ("-x", "PATH", *options)  # ssh sets another one on the other hosts, without the venv
    start = with_folders(job, runtime.argv(job, job.command, forward=FORWARD))
    command = local.with_settings(job, start)
    if job.flags(MpiFlags).direct:
        ranks = _ranks(job)
        where = ("-H", ",".join(f"{host}:{ranks}" for host in hosts)) if hosts else ()
        argv: Argv = (
            *("mpirun", "-np", str(nodes * ranks), "--map-by", "slot", "--bind-to", "none"),
            *repeat_option("-x", (f"{name}={value}" for name, value in forward.items())),
            *(*where, *options, *command),
        )
    else:
        where = ("-H", ",".join(hosts)) if hosts else ()
        argv = OPENMPI.start_argv(command, nnodes=nodes, forward=forward, options=(*where, *options))
    notes = (
        f"# On {hosts[0]}, or on none of them: mpirun gives rank 0 to its own host.\n" if nodes > 1 else ""
    )
    if not runtime.serves_image:
        notes += "# To save and end: kill -USR1 this mpirun; Ctrl-C leaves programs one second.\n"
    return Script(text=notes + line(argv) + "\n", submit=argv, foreground=True)


def _forward(job: Job) -> Mapping[str, str]:
    """Variables that mpirun sets on all nodes; the user's own values override them."""
    hosts = _hosts(job) or ("127.0.0.1",)
    if job.allocation.nodes == 1 and not job.flags(MpiFlags).direct:
        return {}
    rendezvous = {"IMGKIT_NODES": ",".join(hosts), "MASTER_ADDR": hosts[0], "MASTER_PORT": str(MASTER_PORT)}
    return {name: job.container.env.get(name, value) for name, value in rendezvous.items()}


def _ranks(job: Job) -> int:
    return job.request.launch.nproc or job.allocation.gpus or 1


def _by_ssh(job: Job) -> Script:
    hosts = _hosts(job)
    rows = [
        f"# {job.recipe.title}, by imgkit: one command per host, each in its own terminal; or from here: "
        "imgkit run"
    ]
    if job.container.names:
        rows.append(
            f"# imgkit run also sends the values of {', '.join(job.container.names)}; these lines do not."
        )
    remote = []
    # A run by hand has no job id, from which a port could follow: two runs on one head would meet, and a
    # stranger would know where.
    port = job.container.env.get("IMGKIT_PORT") or str(FIRST_PORT + secrets.randbelow(PORTS - 1))
    for rank, host in enumerate(hosts):
        command = _node_command(job, rank, port)
        rows.append(line(("ssh", "-t", host, _remote(job, _started(job, command)))))
        remote.append((host, _remote(job, _guarded(job, command))))
    if not job.allocation.size.spares and (program := _torch_program(job.command)):
        rows.append("# The same by PyTorch's own launcher:")
        for rank, host in enumerate(hosts):
            launch = _torch_launch(job, program, rank)
            argv = _started(dataclasses.replace(job, command=launch), launch)
            rows.append(f"# {shlex.join(('ssh', '-t', host, _remote(job, argv)))}")
    return Script(
        text="\n".join(rows) + "\n",
        submit=(),
        foreground=True,
        remote=tuple(remote),
        sent=_sent(job),
        head_decides=job.outlives_nodes,
    )


def _node_command(job: Job, rank: int, port: str) -> Argv:
    """The command with its place in flags, or in variables if it is the user's own program."""
    hosts = _hosts(job)
    if len(hosts) == 1:
        return job.command
    head = _head(job)
    if _starts_node_agent(job):
        return manual.start_argv(
            job.command, nnodes=job.allocation.size, node_rank=rank, head=head, port=port
        )
    placement = {
        "IMGKIT_NNODES": job.allocation.size,
        "IMGKIT_NODE_RANK": rank,
        "IMGKIT_HEAD": head,
        "IMGKIT_PORT": port,
        "MASTER_ADDR": head,
    }
    return ("env", *(f"{name}={value}" for name, value in placement.items()), *job.command)


def _starts_node_agent(job: Job) -> bool:
    return job.runs_entry_point and job.command[0] != "dist-env"


def _head(job: Job) -> str:
    return _hosts(job)[0].rpartition("@")[2]


def _started(job: Job, command: Argv) -> Argv:
    return local.with_settings(job, with_folders(job, runtime_of(job).argv(job, command)))


def _guarded(job: Job, command: Argv) -> Argv:
    """The words for `fanout`. The guard is innermost: it ends when the container's input does."""
    sent, runtime = _sent(job), runtime_of(job)
    if not runtime.has_container:
        return fanout.guarded(_started(job, command), sent)
    argv = runtime.argv(job, fanout.guarded(command, sent))
    argv = runtime.with_options(argv, *runtime.input_options)
    return local.with_settings(job, with_folders(job, argv))


def _sent(job: Job) -> SentInput:
    """What goes through the input of each ssh; only a node agent expects a secret on its own input."""
    return SentInput(secret=job.makes_secret and _starts_node_agent(job), names=job.container.names)


def _remote(job: Job, argv: Argv) -> str:
    """One line for the shell of a host, because ssh joins words with blanks."""
    if runtime_of(job).environment_by_options:
        return shlex.join(argv)
    return f"cd {shlex.quote(str(job.directory))} && exec {shlex.join(argv)}"


def _torch_program(command: Argv) -> Argv:
    """The program as ``torch.distributed.launch`` takes it; empty if that is unknown."""
    from imgkit_entrypoints.cli import options

    name, *arguments = command
    program = next((each for each in COMMANDS if each.name == name), None)
    if program is None or {"-h", "--help", "--version"} & set(arguments):
        return ()
    if program.app is None:
        # Options of dist-run before the program mean nothing to torch.
        return (
            tuple(arguments) if name == "dist-run" and arguments and not arguments[0].startswith("-") else ()
        )
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            _, rest = options.launch_parser(program, {}).parse_known_args(arguments)
    except SystemExit:
        return ()
    return ("-m", program.app, *rest)


def _torch_launch(job: Job, program: Argv, rank: int) -> Argv:
    return (
        *("python3", "-m", "torch.distributed.launch", "--use-env", f"--nproc_per_node={_ranks(job)}"),
        *(f"--nnodes={job.allocation.nodes}", f"--node_rank={rank}"),
        *(f"--master_addr={_head(job)}", f"--master_port={MASTER_PORT}", *program),
    )


def _shell(job: Job) -> Script:
    """A shell in the container on one host, or here."""
    if not _hosts(job):
        return local.SYSTEM.script(job)
    if job.allocation.nodes > 1:
        raise UsageError(
            f"a shell on {job.allocation.nodes} hosts",
            where="--interactive",
            hint="name one host, or a command for all",
        )
    if job.container.names:
        raise UsageError(
            f"ssh -t passes no value of {job.container.names[0]} to a shell",
            where="--env",
            hint="--env-file FILE, a file of mode 600 on the host",
        )
    runtime = runtime_of(job)
    shell = runtime.with_options(runtime.shell(job), *runtime.terminal_options)
    argv = ("ssh", "-t", _hosts(job)[0], _remote(job, local.with_settings(job, with_folders(job, shell))))
    return Script(text=line(argv) + "\n", submit=argv, foreground=True)

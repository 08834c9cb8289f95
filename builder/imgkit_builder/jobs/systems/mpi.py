"""Hosts without a scheduler. The job is started by mpirun, or by one ssh command for each host.

With ``--mpi-start ranks``, mpirun starts each rank. Otherwise, a node agent (imgkit's process on each node)
is started on each host, and starts the ranks there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import secrets
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from imgkit_builder.base.flags import option_field
from imgkit_builder.jobs.job import Argv, HostCommand, HostInput, Job, Script
from imgkit_builder.jobs.quoting import assignments, command_line, repeat_option
from imgkit_builder.jobs.request import SystemFlags
from imgkit_builder.jobs.runtimes import runtime_of
from imgkit_builder.jobs.systems import (
    fanout,
    idle_spare_warnings,
    local,
    partial_node_warnings,
    single_process_warnings,
    user_options,
)
from imgkit_builder.recipe.systems import SHIPPED
from imgkit_entrypoints.cli.commands import COMMANDS, Command
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.schedulers import manual
from imgkit_entrypoints.schedulers.mpi import OPENMPI
from imgkit_entrypoints.schedulers.placement import FIRST_PORT, PORTS

MASTER_PORT = 29500
"""The default port of torchrun, for programs of the user.

The node agents of imgkit agree on a free port instead.
"""
DOCKER_FORWARD = (
    *OPENMPI.fields.rank,
    *OPENMPI.fields.world_size,
    *OPENMPI.fields.local_rank,
    *OPENMPI.fields.local_world_size,
    *OPENMPI.fields.job_id,
    "IMGKIT_NODES",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""Variables of mpirun that docker must be told to pass into the container.

Other runtimes pass all of them.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MpiFlags(SystemFlags):
    """Flags that only hosts without a scheduler have."""

    hosts: str = option_field(
        "", metavar="A,B|./FILE", help="MPI, ssh: the nodes, the head first; or a file with one per line."
    )
    mpi_start: Literal["agents", "ranks", "ssh"] = option_field(
        "agents",
        help="MPI: what starts on the hosts: agents, by mpirun; ranks, by mpirun and without torchrun; or "
        "ssh: agents, without mpirun.",
    )
    host_names: tuple[str, ...] = field(default=(), init=False)
    """The hosts that `hosts` lists. They are parsed here so that a file is read only once."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "host_names", fanout.parse_hosts(self.hosts))

    @property
    def default_nodes(self) -> int:
        """The number of nodes without ``--nodes``: one for each host, or 1 without hosts."""
        return len(self.host_names) or 1


class Mpi(local.ForegroundSystem):
    """Hosts that mpirun or ssh can reach."""

    flags = MpiFlags
    registration = SHIPPED["mpi"]
    abilities = dataclasses.replace(local.ForegroundSystem.abilities, takes_hosts=True)
    where = "over ssh"

    def check(self, job: Job, *, is_submitted: bool = False) -> Iterator[str]:
        """Yield warnings about requests that the user may not have intended.

        ``--mpi-start`` is ``agents`` (mpirun starts a node agent on each host), ``ranks`` (mpirun starts each
        process) or ``ssh`` (ssh starts the node agents).

        Raises
        ------
        UsageError : with `is_submitted`, mpirun would start rank 0 on another host than the first one.
        """
        mpi_start = job.flags(MpiFlags).mpi_start
        uses_mpirun = mpi_start != "ssh"
        if is_submitted and uses_mpirun:
            _refuse_other_head(_hosts(job))
        if mpi_start != "ranks":  # with "ranks", mpirun itself starts all processes of a node
            yield from single_process_warnings(job.command)
        yield from partial_node_warnings(job)
        if uses_mpirun:  # mpirun ends the run on all nodes when one is lost
            yield from idle_spare_warnings(job)

    def script(self, job: Job) -> Script:
        """Return the ``mpirun`` command of the job, or one ``ssh`` command for each host."""
        _check_hosts(job)
        if job.is_interactive and not job.command:
            return _interactive_script(job)
        if job.flags(MpiFlags).mpi_start == "ssh":
            return _ssh_script(job)
        return _mpirun_script(job)


SYSTEM = Mpi()


def _hosts(job: Job) -> tuple[str, ...]:
    """Return the hosts of ``--hosts``. The first one is the head, where rank 0 runs.

    For a job on this machine, the result is empty.
    """
    return job.flags(MpiFlags).host_names


def _check_hosts(job: Job) -> None:
    """Check that ``--hosts`` names one host for each node, in a form that the job's starter accepts.

    The starter is mpirun or ssh (``--mpi-start``).

    Raises
    ------
    UsageError : the number of hosts differs from the number of nodes, or mpirun cannot use a host.
    """
    hosts = _hosts(job)
    nodes = job.allocation.nodes
    uses_ssh = job.flags(MpiFlags).mpi_start == "ssh"
    # Without hosts, mpirun starts one node on this machine. ssh always needs a host.
    is_local = not hosts and nodes == 1 and not uses_ssh
    if not is_local and len(hosts) != nodes:
        raise _host_count_error(hosts, nodes)
    if uses_ssh:
        return
    for host in hosts:
        if "@" in host or ":" in host:  # USER@HOST or an IPv6 address
            raise UsageError(
                f"mpirun cannot use {host!r}: it reads slots after a colon, and has no syntax for a user",
                where="--hosts",
                hint="give it a name in ~/.ssh/config and /etc/hosts, or use --mpi-start ssh",
            )


def _host_count_error(hosts: Sequence[str], nodes: int) -> UsageError:
    """Return the error for a job whose number of hosts is not its number of nodes."""
    if not hosts:
        return UsageError(
            f"{nodes} nodes, but 0 hosts",
            where="--hosts",
            hint="--hosts A,B, the head first, or --hosts ./FILE",
        )
    return UsageError(
        f"{nodes} nodes, but {len(hosts)} hosts: {', '.join(hosts)}",
        where="--hosts",
        hint="leave --nodes out: it is the number of hosts",
    )


def _refuse_other_head(hosts: Sequence[str]) -> None:
    """Raise UsageError if this machine is one of the hosts, but not the first one.

    All ranks connect to the first host, where they expect rank 0. But Open MPI 4.1 starts rank 0 on the
    machine where mpirun itself runs, whatever its position in the list of hosts is.
    """
    local_host = _find_local_host(hosts)
    if not local_host or local_host == hosts[0]:
        return
    other_hosts = [host for host in hosts if host != local_host]
    raise UsageError(
        f"this is {local_host}: mpirun gives rank 0 to its own host, not to {hosts[0]}",
        where="--hosts",
        hint=f"--hosts {','.join((local_host, *other_hosts))}, or start it on {hosts[0]}",
    )


def _find_local_host(hosts: Sequence[str]) -> str:
    """Return the first of `hosts` that is this machine, or "" if none of them is."""
    for host in hosts:
        if fanout.is_this_machine(host):
            return host
    return ""


def _mpirun_script(job: Job) -> Script:
    """Return a script with the ``mpirun`` command. Comments above it help a user who runs it by hand."""
    argv = _mpirun_argv(job)
    comments = local.code_comment(job)
    if job.allocation.nodes > 1:
        head = _hosts(job)[0]
        comments += f"# On {head}, or on none of them: mpirun gives rank 0 to its own host.\n"
    # mpirun passes the signal on to all processes. If one of them serves the files of the image, as with
    # Singularity, it must not get the signal.
    if not runtime_of(job).serves_image:
        comments += "# To save and end: kill -USR1 this mpirun; Ctrl-C leaves programs one second.\n"
    return Script(text=comments + command_line(argv) + "\n", submit=argv, foreground=True)


def _mpirun_argv(job: Job) -> Argv:
    """Return the ``mpirun`` command. It starts a node agent on each host, or each rank (``--mpi-start``)."""
    nodes = job.allocation.nodes
    # mpirun sets the rendezvous variables on each host. There, docker passes on those of `DOCKER_FORWARD`.
    rendezvous_variables = _rendezvous_variables(job)
    options = _mpirun_options(job)
    command = local.host_argv(job, runtime_of(job).argv(job, job.command, forward=DOCKER_FORWARD))
    if job.flags(MpiFlags).mpi_start != "ranks":
        return OPENMPI.start_argv(command, nnodes=nodes, forward=rendezvous_variables, options=options)
    # mpirun starts every rank. With "--bind-to none", it does not bind the ranks to CPUs.
    rank_count = nodes * _processes_per_node(job)
    mpirun = ("mpirun", "-np", str(rank_count), "--map-by", "slot", "--bind-to", "none")
    return (*mpirun, *repeat_option("-x", assignments(rendezvous_variables)), *options, *command)


def _mpirun_options(job: Job) -> Argv:
    """Return the options of mpirun: the hosts, variables, and the options of the recipe and the user."""
    hosts = list(_hosts(job))
    if job.flags(MpiFlags).mpi_start == "ranks":
        # For example "node1:4,node2:4". mpirun fills all slots of a host before it starts ranks on the next
        # one.
        hosts = [f"{host}:{_processes_per_node(job)}" for host in hosts]
    options = ["-H", ",".join(hosts)] if hosts else []
    if not runtime_of(job).has_container:
        # On other hosts, ssh sets a PATH that does not contain the virtual environment.
        options += ("-x", "PATH")
    return (
        *options,
        *repeat_option("-x", job.container.names),
        *job.recipe.system.queue.options,
        *user_options(job),
    )


def _rendezvous_variables(job: Job) -> Mapping[str, str]:
    """Return the variables by which the nodes find each other. mpirun sets them on all nodes.

    Node agents read IMGKIT_NODES, and programs of the user the other two. A value from the user replaces
    imgkit's own value. If mpirun starts only one node agent, no other node has to be found, and the result is
    empty.
    """
    # With "ranks", mpirun starts several processes even on one node, and these must find each other.
    starts_one_agent = job.allocation.nodes == 1 and job.flags(MpiFlags).mpi_start != "ranks"
    if starts_one_agent:
        return {}
    hosts = _hosts(job) or ("127.0.0.1",)  # without --hosts, all ranks are on this machine
    rendezvous = {"IMGKIT_NODES": ",".join(hosts), "MASTER_ADDR": hosts[0], "MASTER_PORT": str(MASTER_PORT)}
    # `container.env` has the user's values, from --env.
    return {name: job.container.env.get(name, value) for name, value in rendezvous.items()}


def _processes_per_node(job: Job) -> int:
    """Return the number of processes on each node.

    It is the value of ``--nproc``, or otherwise one process for each GPU, or 1 without GPUs.
    """
    return job.request.launch.nproc or job.allocation.gpus or 1


def _ssh_script(job: Job) -> Script:
    """Return a script with one command for each host.

    The text of the script shows the commands as ``ssh`` lines, which a user can type in several terminals.
    ``imgkit run`` uses `Script.host_commands` instead. These start a guard around the command, a shell script
    on the host that ends the command when imgkit ends (`fanout`).
    """
    port = _choose_port(job)  # only once, because all hosts must get the same port
    ssh_lines = []
    guarded_commands = []
    for rank, host in enumerate(_hosts(job)):
        command = _node_command(job, rank, port)
        # What a user types needs no guard: Ctrl-C in the terminal ends it.
        ssh_argv = ("ssh", "-t", host, _remote_line(job, _node_argv(job, command)))
        ssh_lines.append(command_line(ssh_argv))
        guarded_line = _remote_line(job, _guarded_node_argv(job, command))
        guarded_commands.append(HostCommand(host, guarded_line))
    lines = (*_ssh_comments(job), *ssh_lines, *_torch_comments(job))
    return Script(
        text="\n".join(lines) + "\n",
        submit=(),
        foreground=True,
        host_commands=tuple(guarded_commands),
        host_input=_ssh_input(job),
        # With spare nodes, the run goes on when another host than the head fails. So the run ends with the
        # command of the head. Otherwise, it ends when the command of any host fails.
        head_decides=job.outlives_nodes,
    )


def _choose_port(job: Job) -> str:
    """Return the port of the head to which the other hosts connect. The user can set it as IMGKIT_PORT."""
    # A run by hand has no job id from which a port could be computed. A fixed port would let two runs with
    # the same head connect to each other, and other users would know it. So the port is random.
    return job.container.env.get("IMGKIT_PORT") or str(FIRST_PORT + secrets.randbelow(PORTS - 1))


def _ssh_comments(job: Job) -> list[str]:
    """Return the comment lines above the ``ssh`` lines of a script."""
    lines = [
        f"# {job.recipe.title}, by imgkit: one command per host, each in its own terminal; or from here: "
        "imgkit run",
        *local.code_comment(job).splitlines(),
    ]
    names = ", ".join(job.container.names)
    if names:
        lines.append(f"# imgkit run also sends the values of {names}; these lines do not.")
    return lines


def _torch_comments(job: Job) -> list[str]:
    """Return comment lines that show how to start the job with ``torch.distributed.launch``.

    This is PyTorch's own launcher. If it cannot start the job, for example because of spare nodes, the result
    is empty.
    """
    program = _program_for_torch(job.command)
    if not program or job.allocation.size.spares:
        return []
    lines = ["# The same by PyTorch's own launcher:"]
    for rank, host in enumerate(_hosts(job)):
        launch = _torch_launch(job, program, rank)
        # The command of the job decides which variables of the system it gets, so it is replaced as well.
        node_argv = _node_argv(dataclasses.replace(job, command=launch), launch)
        ssh_argv = ("ssh", "-t", host, _remote_line(job, node_argv))
        lines.append(f"# {shlex.join(ssh_argv)}")
    return lines


def _node_command(job: Job, rank: int, port: str) -> Argv:
    """Return the job's command for one host, with its node rank and the address of the head.

    The head is the first host, to which all others connect. A node agent gets these values as flags, and a
    program of the user as variables. A job on a single host needs no such values.

    Parameters
    ----------
    rank : the index of the host in the list of hosts.
    port : the port on the head to which the other hosts connect.
    """
    hosts = _hosts(job)
    if len(hosts) == 1:  # there is no other host to find
        return job.command
    head = _head_host(job)
    if _starts_node_agent(job):
        return manual.start_argv(
            job.command, nnodes=job.allocation.size, node_rank=rank, head=head, port=port
        )
    variables = {
        "IMGKIT_NNODES": job.allocation.size,
        "IMGKIT_NODE_RANK": rank,
        "IMGKIT_HEAD": head,
        "IMGKIT_PORT": port,
        "MASTER_ADDR": head,
    }
    return ("env", *assignments(variables), *job.command)


def _starts_node_agent(job: Job) -> bool:
    """Return whether the job's command starts a node agent (imgkit's process on each node).

    All ``dist-...`` commands except ``dist-env`` do so.
    """
    return job.runs_entry_point and job.command[0] != "dist-env"


def _head_host(job: Job) -> str:
    """Return the name of the first host without the ``USER@``."""
    return _hosts(job)[0].rpartition("@")[2]


def _node_argv(job: Job, command: Argv) -> Argv:
    """Return the argv that starts `command` on a host.

    If the job has a container, it starts in the container.
    """
    return local.host_argv(job, runtime_of(job).argv(job, command))


def _guarded_node_argv(job: Job, command: Argv) -> Argv:
    """Return the argv that starts `command` on a host under a guard, which ends it when ssh ends.

    The guard is a shell script that reads its standard input. At the end of the input, it ends `command`. The
    guard must run inside the container, because a container may outlive the program that has started it.
    """
    host_input = _ssh_input(job)
    runtime = runtime_of(job)
    if not runtime.has_container:
        return fanout.guard_command(_node_argv(job, command), host_input)
    container_argv = runtime.argv(job, fanout.guard_command(command, host_input))
    return local.host_argv(job, runtime.with_input(container_argv, is_terminal=False))


def _ssh_input(job: Job) -> HostInput:
    """Return the values that imgkit sends to each host through the standard input of ssh.

    Only node agents expect a secret there, so it is sent only to them.
    """
    return HostInput(secret=job.makes_secret and _starts_node_agent(job), names=job.container.names)


def _remote_line(job: Job, argv: Argv) -> str:
    """Return `argv` as a single line for the shell of a host.

    The line is quoted here, because ssh would join several arguments with blanks. It first changes to the
    job's folder, unless an option of the runtime sets the working directory.
    """
    if runtime_of(job).passes_variables_as_options:
        return shlex.join(argv)
    return f"cd {shlex.quote(str(job.directory))} && exec {shlex.join(argv)}"


def _program_for_torch(command: Argv) -> Argv:
    """Return the arguments by which ``torch.distributed.launch`` starts the program of `command`.

    ``dist-run train.py --lr 1`` -> ``train.py --lr 1``, and ``dist-train --lr 1`` -> ``-m MODULE --lr 1``.
    The result is empty if torch cannot start the program. There are three such cases: `command` is not one of
    imgkit's ``dist-...`` commands, it only prints its help or version, or it has options of ``dist-run``,
    which torch does not know.
    """
    name, *arguments = command
    if {"-h", "--help", "--version"} & set(arguments):  # it starts no workers
        return ()
    if name == "dist-run" and arguments and not arguments[0].startswith("-"):
        return tuple(arguments)
    for entry_point in COMMANDS:
        if entry_point.name == name and entry_point.app is not None:
            return _torch_app(entry_point, arguments)
    return ()


def _torch_app(entry_point: Command, arguments: Sequence[str]) -> Argv:
    """Return the module of a ``dist-...`` program, and its arguments without those for the node agent.

    If the program does not accept the arguments, the result is empty.
    """
    from imgkit_entrypoints.cli import options

    parser = options.launch_parser(entry_point, {})
    try:
        # argparse prints a message and ends the process if it does not accept the arguments. Both are
        # prevented here.
        with contextlib.redirect_stderr(io.StringIO()):
            _, app_arguments = parser.parse_known_args(arguments)
    except SystemExit:
        return ()
    return ("-m", str(entry_point.app), *app_arguments)


def _torch_launch(job: Job, program: Argv, rank: int) -> Argv:
    """Return the command by which PyTorch's launcher starts `program` on the host with node rank `rank`."""
    options = (
        "--use-env",
        f"--nproc_per_node={_processes_per_node(job)}",
        f"--nnodes={job.allocation.nodes}",
        f"--node_rank={rank}",
        f"--master_addr={_head_host(job)}",
        f"--master_port={MASTER_PORT}",
    )
    return ("python3", "-m", "torch.distributed.launch", *options, *program)


def _interactive_script(job: Job) -> Script:
    """Return the script of an interactive job: a shell in the container on a single host, over ``ssh -t``.

    Without ``--hosts``, the shell opens on this machine.

    Raises
    ------
    UsageError : the job has several hosts, or a variable whose value ssh cannot pass to a shell.
    """
    hosts = _hosts(job)
    if not hosts:
        return local.SYSTEM.script(job)
    if job.allocation.nodes > 1:
        raise UsageError(
            f"a shell on {job.allocation.nodes} hosts",
            where="--interactive",
            hint="name one host, or a command for all",
        )
    variables_of_this_shell = job.container.names  # those of --env NAME
    if variables_of_this_shell:
        raise UsageError(
            f"ssh -t passes no value of {variables_of_this_shell[0]} to a shell",
            where="--env",
            hint="--env-file FILE, a file of mode 600 on the host",
        )
    runtime = runtime_of(job)
    shell = runtime.with_input(runtime.shell(job), is_terminal=True)
    argv = ("ssh", "-t", hosts[0], _remote_line(job, local.host_argv(job, shell)))
    return Script(text=f"{local.code_comment(job)}{command_line(argv)}\n", submit=argv, foreground=True)

"""The command line of ``ci/lab/cluster``."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn

import virtual_cluster
from virtual_cluster import execution, faults, lifecycle
from virtual_cluster.keeper import switch_port
from virtual_cluster.programs import ClusterError
from virtual_cluster.state import LOGIN, ClusterConfig, SlurmConfig, find_cluster, require_cluster
from virtual_cluster.wire import run_wire

USAGE = """\
cluster up 3                   login node and node1..node3, with Slurm and sshd
cluster exec node1 -- CMD      run CMD on a node (--user: as the cluster's user)
cluster srun|sbatch|... ARGS   the Slurm command, on the login node
cluster pods -- CMD            CMD on all nodes at once, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as
                               a pod operator sets them
cluster fault KIND NODE [ARG]  break something (see `cluster fault --help`)
cluster status | down

Needs root, Linux >= 5.8 and iproute2; for Slurm without --debian: slurmctld slurmd slurm-client munge; for
ssh and mpirun: openssh-server (names of Debian packages).

Changes: the folder of --state, and processes with namespaces of their own. `up --debian` and `fetch` unpack
packages into /var/cache/imgkit-lab/{slurm,mpi}-SUITE as well (ci/lab/unpack).
Undo: `cluster down`. The packages stay for the next time; remove their folders by hand.
"""
DEFAULT_STATE = "/tmp/virtual-cluster"
SLURM_COMMANDS = (
    "sbatch",
    "srun",
    "salloc",
    "squeue",
    "sinfo",
    "scancel",
    "scontrol",
    "sattach",
    "sbcast",
)
VERBS = ("up", "exec", "pods", "fault", "down", "status", "fetch")
DOWN = 3
"""Exit status of `status` if no cluster is up."""


class CommandLine(NamedTuple):
    """The arguments of `cluster`, and the command to run on nodes."""

    args: list[str]
    command: list[str]


def split_command(argv: Sequence[str]) -> CommandLine:
    """Split off the command to run on a node, which follows ``--`` and which argparse must not read.

    A command of Slurm needs no ``exec login --`` before it: ``["--user", "srun", "hostname"]`` is short for
    ``["exec", "--user", "login", "--", "srun", "hostname"]``.
    """
    args, command = list(argv), []
    if "--" in args:
        end = args.index("--")
        args, command = args[:end], args[end + 1 :]
    verbs = [arg for arg in args if arg in VERBS or arg in SLURM_COMMANDS]
    if not verbs or verbs[0] not in SLURM_COMMANDS:
        return CommandLine(args, command)
    start = args.index(verbs[0])
    options, slurm_command = args[:start], args[start:]
    if command:
        slurm_command += ["--", *command]
    user_option = ["--user"] if "--user" in options else []
    other_options = [option for option in options if option != "--user"]
    return CommandLine([*other_options, "exec", *user_option, LOGIN], slurm_command)


def main(argv: Sequence[str]) -> int:
    """Do what the command line asks for, and return the exit status."""
    parser = make_parser()
    args, command = split_command(argv)
    options = parser.parse_args(args)
    options.state = Path(options.state).absolute()
    options.command = command
    if options.verb in ("exec", "pods") and not command:
        parser.error("no command: cluster exec NODE -- CMD")
    signal.signal(signal.SIGTERM, _exit_at_signal)  # so that `up` cleans up
    try:
        status: int = options.run(options)
    except ClusterError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return status


def _exit_at_signal(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all verbs. The function that runs a verb is its default for ``run``."""
    parser = argparse.ArgumentParser(
        prog="cluster",
        description=f"{USAGE}\n{virtual_cluster.__doc__}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--state",
        default=os.environ.get("CLUSTER_STATE", DEFAULT_STATE),
        help="state directory (default %(default)s, or $CLUSTER_STATE)",
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    _add_up(verbs.add_parser("up", help="bring a cluster up (again)"))
    fetch = verbs.add_parser("fetch", help="fetch what `up --debian` needs, unless it is there")
    fetch.add_argument("suite", help="a Debian release: trixie, sid")
    fetch.add_argument("name", choices=lifecycle.PACKAGE_SETS, nargs="?", default="slurm")
    fetch.set_defaults(run=_fetch)
    run = verbs.add_parser("exec", help="run a command on a node")
    run.add_argument("--user", action="store_true", help="as the cluster's ordinary user")
    run.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    run.add_argument("--clean-env", action="store_true", help="no variable of the caller's")
    run.add_argument("--cwd", default="")
    run.add_argument("node")
    run.set_defaults(run=_exec)
    pods = verbs.add_parser("pods", help="run a command on all compute nodes")
    pods.add_argument("--user", action="store_true")
    pods.add_argument("--number", type=int, default=0)
    pods.add_argument("--port", type=int, default=29400)
    pods.set_defaults(run=_pods)
    fault = verbs.add_parser(
        "fault",
        help="break something",
        epilog=faults.HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    fault.add_argument("kind", choices=faults.FAULTS)
    fault.add_argument("node")
    fault.add_argument("value", nargs="?")
    fault.set_defaults(run=_fault)
    verbs.add_parser("down").set_defaults(run=_down)
    verbs.add_parser("status").set_defaults(run=_status)
    wire = verbs.add_parser("_wire")  # `fault delay` starts it
    wire.add_argument("node")
    wire.add_argument("milliseconds", type=float)
    wire.add_argument("ready", type=int)
    wire.set_defaults(run=_wire)
    return parser


def _add_up(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `up`."""
    parser.add_argument("nodes", type=int)
    parser.add_argument("--prefix", default="node")
    parser.add_argument("--gpus", type=int, default=4, help="pretended GPUs per node (Slurm gres)")
    parser.add_argument("--cpus", type=int, default=16, help="pretended processors per node")
    parser.add_argument("--memory", type=int, default=64000, help="pretended MiB per node")
    parser.add_argument(
        "--limit-memory", action="store_true", help="memory is a resource; end jobs that exceed theirs"
    )
    parser.add_argument("--partitions", default="batch,debug")
    parser.add_argument("--user", default="researcher", help="name of the cluster's ordinary user")
    parser.add_argument("--uid", type=int, default=20777)
    parser.add_argument(
        "--private", action="append", default=[], metavar="DIR", help="an empty DIR of its own on every node"
    )
    parser.add_argument(
        "--node-timeout", type=int, default=10, help="seconds until Slurm calls a silent node down"
    )
    parser.add_argument(
        "--die-with", type=int, default=0, metavar="PID", help="go down when this process ends"
    )
    parser.add_argument(
        "--debian", default="", metavar="SUITE", help="the Slurm (or MPI) of this Debian release"
    )
    parser.add_argument("--no-slurm", action="store_true")
    parser.add_argument("--no-ssh", action="store_true")
    parser.set_defaults(run=_up)


def _up(options: argparse.Namespace) -> int:
    lifecycle.require_root()
    release = ""
    if options.debian:
        release = lifecycle.unpack_release(options.debian, "mpi" if options.no_slurm else "slurm")
    slurm = None
    if not options.no_slurm and (release or lifecycle.have_slurm()):
        slurm = SlurmConfig(
            gpus=options.gpus,
            cpus=options.cpus,
            memory_mib=options.memory,
            limit_memory=options.limit_memory,
            partitions=tuple(options.partitions.split(",")),
            node_timeout_s=options.node_timeout,
        )
    config = ClusterConfig(
        state=options.state,
        nodes=options.nodes,
        prefix=options.prefix,
        user=options.user,
        uid=options.uid,
        private=tuple(options.private),
        die_with=options.die_with,
        release=release,
        slurm=slurm,
        has_ssh=not options.no_ssh and lifecycle.have_ssh(),
    )
    lifecycle.bring_up(config)
    return 0


def _fetch(options: argparse.Namespace) -> int:
    lifecycle.unpack_release(options.suite, options.name)
    return 0


def _exec(options: argparse.Namespace) -> int:
    cluster = require_cluster(options.state)
    env = {} if options.clean_env else dict(os.environ)
    for pair in options.env:
        name, _, value = pair.partition("=")
        env[name] = value
    command = execution.NodeCommand(
        node=options.node,
        argv=options.command,
        env=env,
        user=cluster.config.user if options.user else "",
        cwd=options.cwd,
    )
    return execution.run_on_node(cluster, command)


def _pods(options: argparse.Namespace) -> int:
    return execution.run_pods(
        require_cluster(options.state),
        options.command,
        number=options.number,
        port=options.port,
        as_user=options.user,
    )


def _fault(options: argparse.Namespace) -> int:
    faults.cause_fault(options.state, options.kind, options.node, options.value)
    return 0


def _down(options: argparse.Namespace) -> int:
    lifecycle.take_down(options.state)
    return 0


def _status(options: argparse.Namespace) -> int:
    cluster = find_cluster(options.state)
    if cluster is None:
        print("down")
        return DOWN
    print(json.dumps(lifecycle.describe(cluster), indent=1))
    return 0


def _wire(options: argparse.Namespace) -> int:
    cluster = require_cluster(options.state)
    run_wire(cluster, options.node, switch_port(options.node), options.milliseconds / 1000, options.ready)
    return 0

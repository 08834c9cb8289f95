"""The verbs up, down, status and fetch."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from virtual_cluster.keeper import READY, become_keeper
from virtual_cluster.programs import ClusterError, have_programs, wait_for
from virtual_cluster.shared_files import write_shared_files
from virtual_cluster.state import (
    COMMAND,
    LOGIN,
    Cluster,
    ClusterConfig,
    cluster_argv,
    find_cluster,
    make_folder,
    remove_folder,
)

MAX_NODES = 64
SLURM_PROGRAMS = ("slurmctld", "slurmd", "munged", "srun")
SSH_PROGRAMS = ("sshd", "ssh", "ssh-keygen")
STOP_LIMIT_S = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageSet:
    """Packages of another Debian release."""

    packages: str
    """Their names, with commas."""
    last_file: str
    """The file that ci/lab/unpack looks for: where it exists, all packages are unpacked."""


PACKAGE_SETS = {
    "slurm": PackageSet(packages="slurmctld,slurmd,slurm-client,munge", last_file="usr/sbin/slurmd"),
    "mpi": PackageSet(packages="openmpi-bin,mpich", last_file="usr/bin/mpiexec.hydra"),
}


def unpack_release(suite: str, name: str) -> str:
    """Return the root folder of a package set of another release, which is fetched at its first use."""
    package_set = PACKAGE_SETS[name]
    unpack = COMMAND.parent / "unpack"
    argv = [str(unpack), suite, name, package_set.packages, package_set.last_file]
    result = subprocess.run(argv, capture_output=True, text=True)
    sys.stderr.write(result.stderr)
    if result.returncode:
        reason = result.stderr.strip().splitlines()[-1]
        raise ClusterError(f"Debian {suite}'s {name} is not here: {reason}")
    return result.stdout.strip()


def require_root() -> None:
    """Raise ClusterError if this user cannot bring a cluster up."""
    if os.geteuid() != 0:
        raise ClusterError("needs root")


def bring_up(config: ClusterConfig) -> None:
    """Bring a cluster up, after taking down another one in the same folder."""
    running = find_cluster(config.state)
    if running and running.config.nodes == config.nodes and set(running.nodes) == set(config.node_names):
        print(f"already up: {config.nodes} nodes")
        return
    take_down(config.state)
    _check_config(config)
    start = time.monotonic()
    make_folder(config.state)
    keeper_pid = 0
    try:
        write_shared_files(config)
        keeper_pid, report = _fork_keeper(config)
        _check_report(config.state, report)
        if config.slurm:
            wait_for(lambda: _are_slurm_nodes_idle(config), 30, "idle Slurm nodes")
    except BaseException:  # an interrupt, too
        if keeper_pid:
            _end_child(keeper_pid)
        remove_folder(config.state)
        raise
    print(f"up: {config.nodes} nodes ({_describe_services(config)}) in {time.monotonic() - start:.1f} s")


def _check_config(config: ClusterConfig) -> None:
    """Raise ClusterError if such a cluster cannot be."""
    if not 1 <= config.nodes <= MAX_NODES:
        raise ClusterError(f"1 to {MAX_NODES} nodes")
    for folder in config.private:
        path = Path(folder).resolve()
        if not path.is_dir() or config.state.is_relative_to(path):
            raise ClusterError(f"--private {path}: not a directory, or the state directory lies in it")


def _fork_keeper(config: ClusterConfig) -> tuple[int, int]:
    """Start the keeper, and return its pid and the descriptor with its report."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        become_keeper(config, write)
    os.close(write)
    return pid, read


def _check_report(state: Path, report_fd: int) -> None:
    """Wait for the keeper's report. Raise ClusterError with the logs if the cluster did not come up."""
    with os.fdopen(report_fd, "rb") as pipe:
        report = pipe.read()
    if report == READY:
        return
    texts = [report.decode()]
    for file in sorted((state / "log").iterdir()):
        text = file.read_text(errors="replace")
        if text:
            texts.append(f"--- {file.name}\n{text[-1500:]}")
    raise ClusterError("\n".join(texts))


def _end_child(pid: int) -> None:
    """End a child of this process. Nobody has waited for it yet, so the pid is still the child's."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _are_slurm_nodes_idle(config: ClusterConfig) -> bool:
    """Return True if Slurm could start a job on every node."""
    sinfo = ("sinfo", "-h", "-N", "-o", "%N %t")
    result = subprocess.run(
        cluster_argv(config.state, "exec", LOGIN, "--", *sinfo),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    return parse_node_states(result.stdout) == dict.fromkeys(config.compute_nodes, "idle")


def parse_node_states(text: str) -> dict[str, str]:
    """Return the states in lines of sinfo, such as ``node1 idle``; a node in two partitions has two lines."""
    states = {}
    for line in text.splitlines():
        fields = line.split()
        if len(fields) == 2:
            node, state = fields
            states[node] = state
    return states


def _describe_services(config: ClusterConfig) -> str:
    """Return ``slurm+ssh``, ``slurm``, ``ssh`` or ``bare``."""
    services = []
    if config.slurm:
        services.append("slurm")
    if config.has_ssh:
        services.append("ssh")
    return "+".join(services) or "bare"


def have_slurm() -> bool:
    """Return True if this machine has a Slurm of its own."""
    return have_programs(*SLURM_PROGRAMS)


def have_ssh() -> bool:
    """Return True if this machine has ssh and its server."""
    return have_programs(*SSH_PROGRAMS)


def take_down(state: Path) -> None:
    """End a cluster if one is up, and remove its folder."""
    cluster = find_cluster(state)
    if cluster:
        cluster.keeper.end(signal.SIGTERM, signal.SIGKILL, seconds=STOP_LIMIT_S)  # the nodes die with it
        with contextlib.suppress(ChildProcessError):
            os.waitpid(cluster.keeper.pid, 0)  # where this process has started it
    remove_folder(state)


def describe(cluster: Cluster) -> dict[str, object]:
    """Return what `status` prints."""
    config = cluster.config
    nodes = {
        name: {"address": config.address(name), "up": name in cluster.nodes} for name in config.node_names
    }
    return {
        "state": str(config.state),
        "nodes": nodes,
        "user": config.user,
        "slurm": config.slurm is not None,
        "ssh": config.has_ssh,
    }

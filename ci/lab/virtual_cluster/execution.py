"""The verbs exec and pods: commands on nodes."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from virtual_cluster.kernel import NODE_NAMESPACES, PR_SET_PDEATHSIG, prctl, setns
from virtual_cluster.node import DAEMON_PATH
from virtual_cluster.programs import ClusterError
from virtual_cluster.state import Cluster, cluster_argv

FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
COMMAND_NOT_FOUND = 127


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCommand:
    """A command to run on a node."""

    node: str
    argv: Sequence[str]
    env: Mapping[str, str]
    user: str = ""
    """The user to become; empty for root."""
    cwd: str = ""
    """Empty for the caller's folder, or the user's home folder if the user may not enter that."""


def run_on_node(cluster: Cluster, command: NodeCommand) -> int:
    """Run a command on a node in the foreground, and return its exit status as a shell does."""
    first_process = cluster.first_process(command.node)
    folder = command.cwd or str(Path.cwd())
    fd = os.pidfd_open(first_process.pid)
    if not first_process.is_alive():
        raise ClusterError(f"{command.node} is not up")
    setns(fd, NODE_NAMESPACES)  # the pid namespace holds for children only
    os.close(fd)
    child = os.fork()
    if child == 0:
        _become_command(command, folder)

    def forward_signal(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in FORWARDED_SIGNALS:
        signal.signal(number, forward_signal)
    _, status = os.waitpid(child, 0)
    return shell_status(os.waitstatus_to_exitcode(status))


def _become_command(command: NodeCommand, folder: str) -> NoReturn:
    """Replace this process, which is in the node's namespaces, by a command."""
    argv = command.argv
    env = {"PATH": DAEMON_PATH, **command.env, "HOSTNAME": command.node}
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # no orphans when the caller is killed
        if command.user:
            user = pwd.getpwnam(command.user)
            _become_user(user)
            env |= {"HOME": user.pw_dir, "USER": command.user, "LOGNAME": command.user}
            if not command.cwd and not os.access(folder, os.X_OK):
                folder = user.pw_dir
        os.chdir(folder)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and so would the command
            signal.signal(number, signal.SIG_DFL)
        os.execvpe(argv[0], list(argv), env)  # noqa: S606
    except OSError as error:
        print(f"cluster: {command.node}: {argv[0]}: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(COMMAND_NOT_FOUND)


def _become_user(user: pwd.struct_passwd) -> None:
    """Change to an ordinary user, for good."""
    os.initgroups(user.pw_name, user.pw_gid)
    os.setresgid(user.pw_gid, user.pw_gid, user.pw_gid)
    os.setresuid(user.pw_uid, user.pw_uid, user.pw_uid)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the change of user has cleared it


def shell_status(code: int) -> int:
    """Return an exit status as a shell does: ``-9`` of a process that SIGKILL has ended is 137."""
    return code if code >= 0 else 128 - code


def pod_environment(rank: int, nodes: Sequence[str], port: int) -> dict[str, str]:
    """Return the variables that a training operator sets in the pod of a rank."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(nodes)),
        "MASTER_ADDR": nodes[0],
        "MASTER_PORT": str(port),
        "POD_NAME": f"pod-{rank}",
    }


def run_pods(cluster: Cluster, argv: Sequence[str], *, number: int, port: int, as_user: bool) -> int:
    """Run one copy of a command on each compute node, as a training operator starts pods.

    Returns the highest exit status.

    Parameters
    ----------
    number : how many nodes; 0 for all that are up
    port : the value of MASTER_PORT
    as_user : run it as the cluster's ordinary user
    """
    nodes = [name for name in cluster.config.compute_nodes if name in cluster.nodes]
    if number:
        nodes = nodes[:number]
    user_option = ["--user"] if as_user else []
    pods = {}
    for rank, node in enumerate(nodes):
        env_options = [f"--env={name}={value}" for name, value in pod_environment(rank, nodes, port).items()]
        pods[node] = _start_pod(cluster.config.state, [*user_option, *env_options, node, "--", *argv])
    codes = _wait_for_pods(pods)
    return max(shell_status(code) for code in codes)


def _wait_for_pods(pods: Mapping[str, subprocess.Popen[bytes]]) -> list[int]:
    """Print what the pods of all nodes print, and return their exit codes."""
    threads = [threading.Thread(target=_copy_output, args=pod, daemon=True) for pod in pods.items()]
    for thread in threads:
        thread.start()
    try:
        codes = [pod.wait() for pod in pods.values()]
    finally:
        for pod in pods.values():
            pod.kill()  # nothing happens to one that has ended
    for thread in threads:
        thread.join(2)
    return codes


def _start_pod(state: Path, args: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start ``cluster exec``, which dies with this process."""
    return subprocess.Popen(
        cluster_argv(state, "exec", *args),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
    )


def _copy_output(node: str, pod: subprocess.Popen[bytes]) -> None:
    """Print the lines of a pod, each with its node's name before it."""
    for line in pod.stdout or ():
        sys.stdout.buffer.write(f"[{node}] ".encode() + line)
        sys.stdout.buffer.flush()

"""The keeper: a daemon that is the parent of all nodes. The switch is in its network namespace."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

from virtual_cluster.kernel import (
    CLONE_NEWNET,
    CLONE_NEWNS,
    NODE_NAMESPACES,
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    close_descriptors,
    make_mounts_private,
    prctl,
    unshare,
)
from virtual_cluster.node import run_node
from virtual_cluster.programs import ClusterError, identify, run_tool
from virtual_cluster.state import Cluster, ClusterConfig, remove_folder, write_cluster

READY = b"+"
"""What a node reports to the keeper, and the keeper to `up`, when all is up; else it is an error's text."""

BOOTED = "ok"
"""The keeper's answer to a request to boot a node; else it is an error's text."""

BOOT_LIMIT_S = 40
STOP_LIMIT_S = 5


def switch_port(node: str) -> str:
    """Return the name of a node's network interface on the switch; the other end is the node's eth0."""
    return f"p-{node}"


class Keeper:
    """Starts nodes, notices their end, and boots those again whose names the socket ``control`` gets."""

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        self.pids: dict[str, int] = {}
        """The first process of each node that is up."""

    def run(self, report: int) -> None:
        """Bring all nodes up, say so on the descriptor `report`, and serve requests."""
        prctl(PR_SET_CHILD_SUBREAPER, 1)  # a node's parent, which exits at once, leaves it to the keeper
        prctl(PR_SET_PDEATHSIG, 0)
        unshare(CLONE_NEWNS | CLONE_NEWNET)
        make_mounts_private()
        _make_switch()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as control:
            control.bind(str(self.config.state / "control"))
            control.listen(8)
            self._save()
            # All nodes boot side by side.
            ready = {name: self.boot(name) for name in self.config.node_names}
            for name, fd in ready.items():
                self._wait_until_up(name, fd)
            os.write(report, READY)
            os.close(report)
            self._serve(control)

    def boot(self, name: str) -> int:
        """Start a node, and return the descriptor on which it reports that it is up."""
        go_read, go_write = os.pipe()
        ready_read, ready_write = os.pipe()
        pid_read, pid_write = os.pipe()
        parent = os.fork()
        if parent == 0:
            self._become_node(name, go_read, ready_write, pid_write)
        for fd in (go_read, ready_write, pid_write):
            os.close(fd)
        os.waitpid(parent, 0)  # the node is now the keeper's own child
        answer = os.read(pid_read, 4)
        os.close(pid_read)
        if len(answer) != 4:
            raise ClusterError(f"{name} could not be started; see {self.config.state}/log/keeper.log")
        (pid,) = struct.unpack("i", answer)
        self.pids[name] = pid
        self._save()
        _plug_in(name, pid)
        os.write(go_write, b"+")
        os.close(go_write)
        return ready_read

    def _become_node(self, name: str, go: int, ready: int, pid_write: int) -> NoReturn:
        """Enter new namespaces, and fork the process that is the first in them."""
        try:
            os.setsid()
            unshare(NODE_NAMESPACES)
            make_mounts_private()
            child = os.fork()
            if child:
                os.write(pid_write, struct.pack("i", child))
                os._exit(0)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            close_descriptors(keep={0, 1, 2, go, ready})
            run_node(self.config, name, go, ready)
        except BaseException as error:  # this process must never return into the keeper's code
            print(f"{name}: {error!r}", file=sys.stderr, flush=True)
        os._exit(1)

    def _wait_until_up(self, name: str, ready: int) -> None:
        """Wait until a node that boots reports that it is up."""
        is_reported = bool(select.select([ready], [], [], BOOT_LIMIT_S)[0])
        if not is_reported or os.read(ready, 1) != READY:
            raise ClusterError(f"{name} did not come up; see {self.config.state}/log")
        os.close(ready)

    def _save(self) -> None:
        """Write to disk which nodes are up."""
        nodes = {name: identify(pid) for name, pid in self.pids.items()}
        write_cluster(Cluster(config=self.config, keeper=identify(os.getpid()), nodes=nodes))

    def _serve(self, control: socket.socket) -> None:
        """Boot nodes on request, until the process ends with which the cluster is to go down."""
        watched: list[socket.socket | int] = [control]
        guardian = None
        if self.config.die_with:
            try:
                guardian = os.pidfd_open(self.config.die_with)
            except OSError:  # it has ended already
                return
            watched.append(guardian)
        while True:
            # Nodes that have ended are noticed once a second.
            readable = select.select(watched, [], [], 1.0)[0]
            self._reap()
            if guardian in readable:
                return
            if control in readable:
                link = control.accept()[0]
                with link, contextlib.suppress(OSError):  # who asked may have gone
                    node = link.recv(4096).decode()
                    link.sendall(self._boot_again(node).encode())

    def _boot_again(self, node: str) -> str:
        """Start a node that has ended. Returns ``ok`` or the error's text."""
        if node in self.pids:
            return BOOTED
        try:
            self._wait_until_up(node, self.boot(node))
        except (ClusterError, OSError) as error:
            return str(error)
        return BOOTED

    def _reap(self) -> None:
        """Collect children that have ended, and write to disk which nodes are down."""
        ended_pids = set()
        with contextlib.suppress(ChildProcessError):  # there is no child any more
            while True:
                pid, _ = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                ended_pids.add(pid)
        if ended_pids.intersection(self.pids.values()):
            self._forget(ended_pids)
            self._save()

    def _forget(self, ended_pids: set[int]) -> None:
        """Drop nodes whose first process has ended."""
        self.pids = {name: pid for name, pid in self.pids.items() if pid not in ended_pids}

    def stop(self) -> None:
        """End all nodes."""
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + STOP_LIMIT_S
        while self.pids and time.monotonic() < deadline:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid:
                self._forget({pid})
            else:
                time.sleep(0.01)


def _make_switch() -> None:
    """Make the bridge to which all nodes are plugged in."""
    run_tool("ip", "link", "add", "switch", "type", "bridge", "forward_delay", "0", "stp_state", "0")
    run_tool("ip", "link", "set", "switch", "up")
    run_tool("ip", "link", "set", "lo", "up")
    # A bridge must not run its frames through the machine's IP filters.
    with contextlib.suppress(OSError):
        Path("/proc/sys/net/bridge/bridge-nf-call-iptables").write_text("0")


def _plug_in(node: str, pid: int) -> None:
    """Connect a node with the switch."""
    port = switch_port(node)
    run_tool("ip", "link", "del", port, check=False)  # that of a node that was up before
    run_tool("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", pid)
    run_tool("ip", "link", "set", port, "master", "switch", "up")


def become_keeper(config: ClusterConfig, report: int) -> NoReturn:
    """Be the keeper, in a process that `up` has forked off.

    Parameters
    ----------
    report : a descriptor that gets `READY` when the cluster is up, or an error's text
    """
    _become_daemon(config.state / "log/keeper.log", report)
    keeper = Keeper(config)
    has_failed = False
    try:
        keeper.run(report)
    except SystemExit:  # SIGTERM
        pass
    except BaseException as error:
        has_failed = True
        print(repr(error), file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):
            os.write(report, str(error).encode())
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    keeper.stop()
    if not has_failed:  # `up` reads the logs
        remove_folder(config.state)
    os._exit(int(has_failed))


def _become_daemon(log_file: Path, report: int) -> None:
    """Leave the caller's session, folder, terminal and open files. SIGTERM raises SystemExit from now on."""
    os.setsid()
    os.chdir("/")
    os.umask(0o022)
    null = os.open(os.devnull, os.O_RDWR)
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    close_descriptors(keep={0, 1, 2, report})
    signal.signal(signal.SIGTERM, _exit_at_signal)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _exit_at_signal(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)

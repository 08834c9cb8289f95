"""The verb fault: break a node or its network, as hardware does, and mend it.

Faults of the network are on the switch's side of a node's cable where they can be, so that the node does not
see them.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from virtual_cluster.keeper import BOOTED, switch_port
from virtual_cluster.kernel import network_of
from virtual_cluster.programs import ClusterError, find_program, run_tool, wait_for
from virtual_cluster.state import Cluster, require_cluster
from virtual_cluster.wire import start_wire, stop_wire

HELP = """kinds of fault:
  cut NODE          frames to and from the node vanish, its link stays up (dead switch)
  unplug NODE       the node's link goes down (carrier lost)
  loss NODE PCT     this share of the node's frames vanishes (nft)
  rate NODE KBIT    the node's link is this slow in both directions (tc tbf)
  delay NODE MS     every frame to and from the node is held this long
                    (tc netem, or a userspace wire where the kernel has none)
  hole NODE BYTES   packets to and from the node that are longer than this vanish,
                    and nobody reports it (a path MTU black hole; nft)
  refuse NODE PORT  connections to this TCP port of the node are reset (nft)
  block NODE PORT   connections to this TCP port of the node are dropped (nft);
                    also a range of ports: 32768-60999
  heal NODE         undo all of the above
  kill NODE [TEXT]  SIGKILL the node's processes, its daemons left out
                    (with TEXT: all those whose command line has TEXT in it)
  freeze NODE / thaw NODE   SIGSTOP / SIGCONT all processes of the node
  crash NODE        the node is gone at once, as if it had lost power
  boot NODE         start it again
"""

DAEMONS = ("munged", "slurmd", "slurmctld", "slurmstepd", "sshd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The node that a fault is for."""

    cluster: Cluster
    node: str

    @property
    def state(self) -> Path:
        """Return the cluster's folder."""
        return self.cluster.config.state

    @property
    def port(self) -> str:
        """Return the node's network interface on the switch."""
        return switch_port(self.node)

    @property
    def bridge_table(self) -> str:
        """Return the name of the nft table with rules for the node's frames."""
        return f"faults-{self.node}"

    @property
    def node_pid(self) -> int:
        """Return a process in the node's namespaces."""
        return self.cluster.first_process(self.node).pid

    @property
    def switch_pid(self) -> int:
        """Return a process in the switch's network namespace."""
        return self.cluster.keeper.pid


def cause_fault(state: Path, kind: str, node: str, value: str | None) -> None:
    """Cause a fault of a cluster that is up. `value` is the last argument in `HELP`."""
    cluster = require_cluster(state)
    if node not in cluster.config.node_names:
        raise ClusterError(f"no node {node}")
    if kind in NEED_VALUE and value is None:
        raise ClusterError(f"fault {kind} {node} needs a value; see: cluster fault --help")
    target = Target(cluster=cluster, node=node)
    if kind != "boot":
        cluster.first_process(node)  # raises an error if the node is not up
    FAULTS[kind](target, value or "")


# --- the network, at the switch ----------------------------------------------


def cut(target: Target, value: str) -> None:
    """Take the node's port from the switch. Its link stays up."""
    with network_of(target.switch_pid):
        run_tool("ip", "link", "set", target.port, "nomaster")


def unplug(target: Target, value: str) -> None:
    """Take the node's link down."""
    with network_of(target.switch_pid):
        run_tool("ip", "link", "set", target.port, "down")


def lose_frames(target: Target, percent: str) -> None:
    """Drop a share of the node's frames."""
    per_mille = int(float(percent) * 10)
    _drop_frames(target, f"numgen random mod 1000 < {per_mille}")


def drop_long_packets(target: Target, size_bytes: str) -> None:
    """Drop the node's packets that are longer than a size."""
    _drop_frames(target, f"meta length > {int(size_bytes)}")


def _drop_frames(target: Target, condition: str) -> None:
    """Drop the frames to and from the node that fulfil a condition of nft."""
    table = ("bridge", target.bridge_table)
    with network_of(target.switch_pid):
        run_tool("nft", "add", "table", *table)
        run_tool("nft", "add", "chain", *table, "f", "{ type filter hook forward priority 0 ; }")
        for side in ("iifname", "oifname"):
            run_tool("nft", "add", "rule", *table, "f", side, target.port, condition, "drop")


def limit_rate(target: Target, kbit: str) -> None:
    """Make the node's link slow, at both of its ends: each end limits what it sends."""
    bucket = ("root", "tbf", "rate", f"{kbit}kbit", "burst", "32kb", "latency", "400ms")
    with network_of(target.switch_pid):
        run_tool("tc", "qdisc", "replace", "dev", target.port, *bucket)
    with network_of(target.node_pid):
        run_tool("tc", "qdisc", "replace", "dev", "eth0", *bucket)


def delay_frames(target: Target, milliseconds: str) -> None:
    """Hold each frame for some time."""
    argv = ["tc", "qdisc", "replace", "dev", target.port, "root", "netem", "delay", f"{milliseconds}ms"]
    with network_of(target.switch_pid):
        has_netem = subprocess.run(argv, capture_output=True).returncode == 0
    if not has_netem:  # a kernel that was built without it
        start_wire(target.cluster, target.node, float(milliseconds))


# --- the network, at the node ------------------------------------------------


def refuse_connections(target: Target, port: str) -> None:
    """Reset new connections to a TCP port of the node."""
    _filter_connections(target, port, "reject", "with", "tcp", "reset")


def block_connections(target: Target, port: str) -> None:
    """Drop new connections to a TCP port of the node."""
    _filter_connections(target, port, "drop")


def _filter_connections(target: Target, port: str, *verdict: str) -> None:
    """Add a rule to the node's firewall for the first packet of connections to a TCP port."""
    table = ("inet", "faults")
    with network_of(target.node_pid):
        run_tool("nft", "add", "table", *table)
        run_tool("nft", "add", "chain", *table, "in", "{ type filter hook input priority 0 ; }")
        first_packet = "tcp flags & (syn|ack) == syn tcp dport"
        run_tool("nft", "add", "rule", *table, "in", first_packet, port, *verdict)


def heal(target: Target, value: str) -> None:
    """Undo all faults of the node's network."""
    has_nft = find_program("nft") is not None
    with network_of(target.node_pid):
        if has_nft:
            run_tool("nft", "delete", "table", "inet", "faults", check=False)
        run_tool("tc", "qdisc", "del", "dev", "eth0", "root", check=False)
    stop_wire(target.state, target.node)
    with network_of(target.switch_pid):
        run_tool("ip", "link", "set", target.port, "master", "switch", "up")
        run_tool("tc", "qdisc", "del", "dev", target.port, "root", check=False)
        if has_nft:
            run_tool("nft", "delete", "table", "bridge", target.bridge_table, check=False)


# --- processes ---------------------------------------------------------------


def kill(target: Target, text: str) -> None:
    """Kill the node's processes: those with `text` in their command lines, or all but daemons."""
    victims = [pid for pid, argv in _node_processes(target) if is_victim(argv, text)]
    _signal_all(target, "kill", signal.SIGKILL, victims)


def is_victim(argv: str, text: str) -> bool:
    """Return True if the fault ``kill`` is for a process.

    Parameters
    ----------
    argv : the command line as in /proc: ``"/usr/sbin/sshd\\0-D\\0"``, or a title such as ``"sshd: me@notty"``
    text : what the command line must contain; empty for all processes but daemons
    """
    if text:
        return text in argv.replace("\0", " ")
    program = argv.partition("\0")[0].partition(":")[0].strip()
    return Path(program).name not in DAEMONS


def freeze(target: Target, value: str) -> None:
    """Stop all processes of the node."""
    _signal_all(target, "freeze", signal.SIGSTOP, [pid for pid, _ in _node_processes(target)])


def thaw(target: Target, value: str) -> None:
    """Let all processes of the node go on."""
    _signal_all(target, "thaw", signal.SIGCONT, [pid for pid, _ in _node_processes(target)])


def _signal_all(target: Target, kind: str, number: signal.Signals, pids: list[int]) -> None:
    """Send a signal to processes, and print how many still ran."""
    count = 0
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
        count += 1
    print(f"{kind}: {count} processes of {target.node}")


def _node_processes(target: Target) -> Iterator[tuple[int, str]]:
    """Yield pid and command line of the processes in the node's pid namespace, but not of the first one."""
    first_pid = target.node_pid
    namespace = Path(f"/proc/{first_pid}/ns/pid").stat().st_ino
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == first_pid:
            continue
        try:
            if (folder / "ns/pid").stat().st_ino == namespace:
                yield int(folder.name), (folder / "cmdline").read_text(errors="replace")
        except OSError:  # it has ended
            continue


def crash(target: Target, value: str) -> None:
    """End the node at once. The cable goes first: a machine without power sends no farewell."""
    cut(target, value)
    stop_wire(target.state, target.node)
    target.cluster.first_process(target.node).end(signal.SIGKILL, seconds=5)
    wait_for(lambda: target.node not in require_cluster(target.state).nodes, 5, "the keeper's notice")


def boot(target: Target, value: str) -> None:
    """Ask the keeper to start a node that has crashed."""
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(str(target.state / "control"))
        link.sendall(target.node.encode())
        answer = link.recv(4096).decode()
    if answer != BOOTED:
        raise ClusterError(answer)


FAULTS: dict[str, Callable[[Target, str], None]] = {
    "cut": cut,
    "unplug": unplug,
    "loss": lose_frames,
    "hole": drop_long_packets,
    "rate": limit_rate,
    "delay": delay_frames,
    "refuse": refuse_connections,
    "block": block_connections,
    "heal": heal,
    "kill": kill,
    "freeze": freeze,
    "thaw": thaw,
    "crash": crash,
    "boot": boot,
}

NEED_VALUE = ("loss", "hole", "rate", "delay", "refuse", "block")

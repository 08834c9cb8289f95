"""The roll call: the nodes of a run meet before torchrun starts.

Node 0 listens (`_Head`) and the others call it (join.py). The head names every node that never joins, refuses
nodes with different software on all nodes at once, lets the nodes test the network between them (probe.py),
and hands out a free port for torchrun. The connections stay open (session.py).

A run with spares (``--nnodes N+S``) starts with N+S nodes, or with N or more once no further one has joined
for `LAST_CALL_S`. The head numbers those that are there anew, since torchrun allows no gaps. Nobody joins
after the start.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import resource
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from imgkit_entrypoints import files
from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.rollcall import messages, ports, probe, session
from imgkit_entrypoints.rollcall.join import Meeting, join
from imgkit_entrypoints.rollcall.messages import JoinRequest, NodeInfo
from imgkit_entrypoints.rollcall.server import MAX_STRANGERS, HeadConnection, Server
from imgkit_entrypoints.rollcall.session import HeadSession, Session, node_name
from imgkit_entrypoints.schedulers import hostlist
from imgkit_entrypoints.schedulers.placement import Placement

# Time between two lines in the log about the nodes that are missing.
PROGRESS_S = 10.0
# Time between two looks at nodes that have joined and are waiting.
LOOK_S = 0.5
# Characters of the names of missing nodes in one message; beyond, it names the first `MAX_SHOWN` of them.
MAX_NAMES = 400
MAX_SHOWN = 32
# Time that a run with spares waits for one more after the last node has joined.
#
# Nodes of one job start seconds apart, and pods as far apart as their images take to pull. So a shorter wait
# would leave nodes out, and a longer one costs every run in which a node is missing.
LAST_CALL_S = 30.0


def meet(
    placement: Placement,
    node: NodeInfo,
    *,
    timeout_s: float,
    log: Callable[[str], None],
    stop_reason: Callable[[], str] = lambda: "",
    secret: bytes | None = None,
    all_reach_head: bool = False,
) -> Session:
    """Meet all nodes of `placement` within `timeout_s` seconds from this node's own start.

    The placement of the result counts the nodes that are there, also where `placement` has spares.

    Parameters
    ----------
    stop_reason : called about twice a second; a text that it returns ends the roll call everywhere.
    secret : the run's secret, which every node proves (connection.py); None: names alone are enough.
    all_reach_head : every node has to connect to the head's address in the network of the data.

    Raises
    ------
    NoPlan : a node did not join or never answered, the nodes run different software, the network between two
    nodes loses data, a port is busy, or the limit of open files is too low.
    """
    if placement.nnodes == 1:
        # A container without a network cannot resolve the host's name.
        alone = dataclasses.replace(placement, head="127.0.0.1")
        return HeadSession(alone, ports.any_free(), nodes={0: node})
    with probe.open_port(node.address, node.interface) as open_port:
        meeting = Meeting(placement, node, open_port, timeout_s, log, stop_reason, secret, all_reach_head)
        if placement.node_rank != 0:
            return join(meeting)
        head = _Head(meeting)
        try:
            return head.gather()
        except BaseException as error:
            if isinstance(error, NoPlan):
                head.server.send_all(refusal(error))
            head.server.close(session.LINGER_S)
            raise


class _Head:
    """The head until all nodes have joined."""

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting
        self.placement = meeting.placement
        self.nodes = {0: meeting.node}
        self.probe_ports = {0: meeting.open_port.offer}
        raise_file_limit(self.placement.nnodes)
        self.server = Server(
            self._listen(), job_id=self.placement.job_id, secret=meeting.secret, log=meeting.log
        )
        self._last_look = self._last_join = time.monotonic()

    def gather(self) -> HeadSession:
        """Wait for all nodes, compare them, and hand out their ranks."""
        start = time.monotonic()
        self._wait_for_nodes(start)
        warnings = compare_software(self.placement, self.nodes)
        failures, crowded = probe.probe_all(
            self.probe_ports,
            self.server,
            self.meeting.open_port,
            all_reach_head=self.meeting.all_reach_head,
        )
        if failures:
            raise probe.refusal(failures, self.probe_ports, self._name)
        if crowded:
            names = ", ".join(self._name(rank) for rank in crowded[:MAX_GROUPS])
            warnings += (f"strangers connect to the ports of the network test; no result from {names}",)
        port = self._torchrun_port()
        # Numbers without gaps: some nodes of a run with spares may be missing.
        numbers = {rank: number for number, rank in enumerate(sorted(self.nodes))}
        self.server.renumber(numbers)
        nodes = {number: self.nodes[rank] for rank, number in numbers.items()}
        self._send_starts(nodes)
        self.meeting.log(f"roll call: {self._present()} in {time.monotonic() - start:.1f} s")
        placement = self.placement.numbered(len(nodes), 0)
        if self.meeting.all_reach_head and None not in self.probe_ports.values():
            placement = dataclasses.replace(placement, head=nodes[0].address)
        return HeadSession(placement, port, warnings, self.server, nodes)

    def _wait_for_nodes(self, start: float) -> None:
        """Wait until the run can start, and log now and then which nodes are missing.

        Raises
        ------
        NoPlan : the time is over, a node must not join, or this node was asked to stop.
        """
        last_log = start
        end = start + self.meeting.timeout_s
        while not self._can_start(end):
            if time.monotonic() >= end:
                raise self._incomplete_error()
            reason = self.meeting.stop_reason()
            if reason:
                raise NoPlan(f"stopped during the roll call: {self._name(0)} got {reason}")
            if time.monotonic() - last_log >= PROGRESS_S:
                last_log = time.monotonic()
                self.meeting.log(f"roll call: {self._present()}, waiting for {self._missing()}")
            self._receive()

    def _send_starts(self, nodes: Mapping[int, NodeInfo]) -> None:
        """Send each node the start of the run, with its number among the nodes of its host."""
        nodes_of_host = collections.Counter([nodes[0].host])
        for number in range(1, len(nodes)):
            host = nodes[number].host
            start = messages.RunStart(nnodes=len(nodes), node_rank=number, host_index=nodes_of_host[host])
            self.server.send(number, start)
            nodes_of_host[host] += 1

    def _listen(self) -> socket.socket:
        port = self.meeting.port
        try:
            return ports.listen(port, backlog=self.placement.nnodes)
        except OSError as error:
            raise NoPlan(
                f"port {port}, where the nodes of this run meet, is busy on the head",
                where=f"{self.placement.head or self.meeting.node.host}:{port} ({error.strerror})",
                hint=f"to see who listens there: ss -ltnp sport = {port}. If it is this very command, it was "
                "started twice on this host (pbsdsh starts it once per line of the node file); else give all "
                f"nodes the same free port, for example: --port {ports.first_free(port) or 29500}",
            ) from error

    def _can_start(self, end: float) -> bool:
        """Return whether all nodes are there, or enough of them and nobody waits for more."""
        present = len(self.nodes)
        size = self.placement.size
        if present == self.placement.nnodes:
            return True
        if not size or present < size.training:
            return False
        return time.monotonic() >= min(end, self._last_join + LAST_CALL_S)

    def _incomplete_error(self) -> NoPlan:
        """Return the error that names the nodes that have not joined in time."""
        reports = "".join(f"; {text}" for text in self.server.reports[:4])
        return NoPlan(
            f"{self._missing()} did not join; {self._present()} after {self.meeting.timeout_s:g} s{reports}",
            where=f"roll call on {self.meeting.node.host}:{self.meeting.port}",
            hint="start this command once on every node of the job. If it was, read its output; check that "
            f"the node reaches {self.placement.head} (--head NAME, firewall). Late nodes: --rollcall-timeout",
        )

    def _receive(self) -> None:
        """Wait a moment and read what has arrived; now and then, look for nodes that have gone."""
        self.server.receive(LOOK_S, missing=self.placement.nnodes - len(self.nodes))
        if time.monotonic() - self._last_look >= LOOK_S:
            self._last_look = time.monotonic()
            lost_after_s = session.LOST_AFTER_S
            beat_s = session.beat_s(lost_after_s)
            self.server.beat(messages.Heartbeat(), beat_s=beat_s, lost_after_s=lost_after_s)
        self._forget_lost()
        while self.server.joining:
            peer, request = self.server.joining.pop(0)
            self._add(peer, request)

    def _forget_lost(self) -> None:
        """Count nodes out whose connection is over. They may join again."""
        while self.server.lost:
            rank, reason = self.server.lost.popitem()
            self.meeting.log(f"roll call: {self._name(rank)} joined and disconnected ({reason})")
            del self.nodes[rank], self.probe_ports[rank]

    def _add(self, peer: HeadConnection, request: JoinRequest) -> None:
        """Count a node in.

        Raises
        ------
        NoPlan : the node belongs to another layout of this run, or to a second start of it.
        """
        rank = request.node_rank
        nnodes = request.nnodes
        node = request.node
        # A node that calls again may have gone a moment ago: read what it sent, and the end of it.
        for _ in range(3):
            if rank in self.server:
                self.server.receive()
        self._forget_lost()
        previous = self.nodes.get(rank)
        # In any case, so that a refusal reaches it: a second node of a rank under a number that no node has.
        self.server.add(rank if previous is None else -1, peer)
        if nnodes != self.placement.nnodes or not 0 < rank < nnodes:
            raise NoPlan(
                f"{node.host} joins as node {rank + 1} of {nnodes}, but the head expects "
                f"{self.placement.nnodes} nodes",
                hint="give the same --nnodes everywhere, and each node its own --node-rank",
            )
        if previous is not None:
            raise NoPlan(
                f"{previous.host} and {node.host} both join as node {rank + 1} of {nnodes}",
                hint="start this command once per node, each with its own node rank",
            )
        self.nodes[rank] = node
        self.probe_ports[rank] = request.probe
        # The time of a run with spares begins anew.
        self._last_join = time.monotonic()
        # Shows the node that the head, and no other service, took its call.
        self.server.send(rank, messages.Heartbeat())

    def _torchrun_port(self) -> int:
        port = self.placement.port
        if port is None:
            return ports.next_free(self.meeting.port)
        if not ports.is_free(port):
            raise NoPlan(
                f"torchrun's port {port} is busy on the head",
                hint=f"to see who listens there: ss -ltnp sport = {port}. Give every node the same other "
                "--port, or leave --port out",
            )
        return port

    def _name(self, rank: int) -> str:
        node = self.nodes.get(rank)
        return node_name(self.placement, rank, node.host if node else "")

    def _missing(self) -> str:
        """Return a text on the missing nodes: "nodes 1-2,5 of 8 (node[01-02,05])"."""
        ranks = [rank for rank in range(self.placement.nnodes) if rank not in self.nodes]
        text = self._names(ranks)
        if len(text) > MAX_NAMES:
            text = f"{self._names(ranks[:MAX_SHOWN])} and {len(ranks) - MAX_SHOWN} more"
        return text

    def _names(self, ranks: list[int]) -> str:
        if len(ranks) == 1:
            return self._name(ranks[0])
        numbers = hostlist.number_ranges(str(rank + 1) for rank in ranks)
        text = f"nodes {numbers} of {self.placement.nnodes}"
        hosts = [self.placement.hosts[rank] for rank in ranks if rank < len(self.placement.hosts)]
        if len(hosts) < len(ranks):  # the scheduler has not named all hosts
            return text
        return f"{text} ({hostlist.fold_hosts(hosts)})"

    def _present(self) -> str:
        return f"{len(self.nodes)}/{self.placement.nnodes} present"


def refusal(error: NoPlan) -> messages.Refused:
    """Return the message that raises `error` on another node."""
    return messages.Refused(what=error.what, where=error.where, hint=error.hint)


MANIFEST = "opt/imgkit/manifest.json"
# Groups of different nodes that one message names: it must fit into a line.
MAX_GROUPS = 8


def read_software(*, torch: str, nccl: str, root: Path = Path("/")) -> messages.Software:
    """Return the software of this image."""
    try:
        image = hashlib.sha256(files.read_bytes(root / MANIFEST)).hexdigest()[:12]
    except OSError:
        image = ""
    return messages.Software(image=image, torch=torch, nccl=nccl)


def compare_software(placement: Placement, nodes: Mapping[int, NodeInfo]) -> tuple[str, ...]:
    """Refuse nodes with different software, and return warnings of differences that torchrun supports.

    Raises
    ------
    NoPlan : the nodes run different images, torch or NCCL, or a run with spares has different workers.
    """

    def find_difference(label: str, value_of: Callable[[NodeInfo], str]) -> str:
        """Return "torch 2.3 on node 1 of 2 (a), 2.4 on node 2 of 2 (b)". It is empty if all are the same."""
        names: dict[str, list[str]] = {}
        for rank, node in sorted(nodes.items()):
            value = value_of(node) or "none"
            names.setdefault(value, []).append(node_name(placement, rank, node.host))
        if len(names) < 2:
            return ""
        groups = []
        for value, (first_name, *more_names) in names.items():
            group = f"{value} on {first_name}"
            if more_names:
                group += f" and {len(more_names)} more"
            groups.append(group)
        text = f"{label} " + ", ".join(groups[:MAX_GROUPS])
        if len(groups) > MAX_GROUPS:
            text += f" and {len(groups) - MAX_GROUPS} more"
        return text

    software = [
        find_difference("image", lambda node: node.software.image),
        find_difference("torch", lambda node: node.software.torch),
        find_difference("NCCL", lambda node: node.software.nccl),
    ]
    if any(software):
        raise NoPlan(
            "the nodes do not run the same software: " + "; ".join(text for text in software if text),
            hint="start the same .sif on every node; compare: sha256sum IMAGE.sif, dist-env --json",
        )
    workers = find_difference("workers per node", lambda node: str(node.nproc))
    if workers and placement.size is not None:
        raise NoPlan(
            f"the nodes differ in {workers}: an attempt without one of them would have another batch",
            where=f"--nnodes {placement.size}",
            hint="give the same --nproc to all nodes, or leave out the spares",
        )
    gpus = find_difference("GPU", lambda node: node.gpu)
    return tuple(f"the nodes differ in {text}" for text in (workers, gpus) if text)


# Descriptors for the node agent itself: those that it had at its start, pipes to its children, files.
AGENT_FILES = 128


def raise_file_limit(nnodes: int) -> None:
    """Raise this process' soft limit of open files for a run of `nnodes`.

    The program gets the old limit back (launch/guard.py): some programs close every number up to the limit.

    Raises
    ------
    NoPlan : the hard limit is too low for the nodes.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = nnodes + MAX_STRANGERS + AGENT_FILES
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise NoPlan(
            f"the head of {nnodes} nodes needs {needed} open files; its limit is {hard}",
            where="ulimit -Hn",
            hint=f"raise it on the head: ulimit -n {needed} in a shell of root, nofile in "
            f"/etc/security/limits.conf, or docker run --ulimit nofile={needed}",
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))

"""The roll call: the nodes of a run meet before torchrun starts.

Node 0 listens (`_RollCallHead`) and the others call it (join.py). The head names every node that never
joins, refuses nodes with different software on all nodes at once, lets the nodes test the network between
them (probe.py), and hands out a free port for torchrun. The connections stay open (session.py).

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
from imgkit_entrypoints.errors import NoPlan, join_names
from imgkit_entrypoints.rollcall import messages, ports, probe, session
from imgkit_entrypoints.rollcall.join import RollCall, join
from imgkit_entrypoints.rollcall.messages import JoinRequest, NodeInfo, Refused
from imgkit_entrypoints.rollcall.server import MAX_STRANGERS, HeadConnection, Server
from imgkit_entrypoints.rollcall.session import HeadSession, Session, node_name
from imgkit_entrypoints.schedulers import hostlist
from imgkit_entrypoints.schedulers.placement import Placement

# Time between two lines in the log about the nodes that are missing.
PROGRESS_S = 10.0
# Time between two checks of the nodes that have joined and are waiting.
CHECK_S = 0.5
# Characters of the names of missing nodes in one message; beyond, it names the first `MAX_SHOWN` of them.
MAX_NAMES = 400
MAX_SHOWN = 32
# Time that a run with spares waits for one more after the last node has joined.
#
# Nodes of one job start seconds apart, and pods as far apart as their images take to pull. So a shorter wait
# would leave nodes out, and a longer one costs every run in which a node is missing.
LAST_CALL_S = 30.0


def meet_nodes(
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

    The placement of the result counts the nodes that have joined, which may be fewer in a run with spares.

    Parameters
    ----------
    stop_reason : called about twice a second. A text that it returns ends the roll call on all nodes.
    secret : the run's secret, which every node proves (connection.py). With None, the job id is enough.
    all_reach_head : True if every node has to connect to the head's address in the network of the data.

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
        roll_call = RollCall(placement, node, open_port, timeout_s, log, stop_reason, secret, all_reach_head)
        if placement.node_rank != 0:
            return join(roll_call)
        head = _RollCallHead(roll_call)
        try:
            return head.start_run()
        except BaseException as error:
            if isinstance(error, NoPlan):  # the other nodes print the same error
                head.server.send_all(Refused.from_error(error))
            head.server.close(session.LINGER_S)
            raise


class _RollCallHead:
    """The head until all nodes have joined."""

    def __init__(self, roll_call: RollCall) -> None:
        self.roll_call = roll_call
        self.placement = roll_call.placement
        self.nodes = {0: roll_call.node}
        """What each node that has joined has said about itself, by rank."""
        self.probe_ports = {0: roll_call.open_port.offer}
        raise_file_limit(self.placement.nnodes)
        self.server = Server(
            self._listen(), job_id=self.placement.job_id, secret=roll_call.secret, log=roll_call.log
        )
        self._last_beat = self._last_join = time.monotonic()

    def start_run(self) -> HeadSession:
        """Wait for all nodes, compare them, and start the run on all of them.

        Raises
        ------
        NoPlan : see `meet_nodes`.
        """
        start = time.monotonic()
        self._wait_for_nodes(start)
        warnings = [*compare_software(self.placement, self.nodes), *self._test_network()]
        port = self._torchrun_port()
        # In a run with spares some nodes may be missing, and torchrun allows no gaps. So nodes 0, 2 and 3 get
        # the numbers 0, 1 and 2.
        numbers = {rank: number for number, rank in enumerate(sorted(self.nodes))}
        self.server.renumber(numbers)
        nodes = {number: self.nodes[rank] for rank, number in numbers.items()}
        self._send_starts(nodes)
        self.roll_call.log(f"roll call: {self._present_count()} in {time.monotonic() - start:.1f} s")
        placement = self.placement.numbered(len(nodes), 0)
        if self.roll_call.all_reach_head and None not in self.probe_ports.values():
            placement = dataclasses.replace(placement, head=nodes[0].address)
        return HeadSession(placement, port, warnings, self.server, nodes)

    def _test_network(self) -> tuple[str, ...]:
        """Let the nodes test the network between them, and return warnings.

        Raises
        ------
        NoPlan : a node cannot reach another node.
        """
        test = probe.probe_all(
            self.probe_ports,
            self.server,
            self.roll_call.open_port,
            all_reach_head=self.roll_call.all_reach_head,
        )
        if test.failures:
            raise probe.network_error(test.failures, self.probe_ports, self._node_name)
        if not test.untested:
            return ()
        names = ", ".join(self._node_name(rank) for rank in test.untested[:MAX_GROUPS])
        return (f"strangers connect to the ports of the network test; no result from {names}",)

    def _wait_for_nodes(self, start: float) -> None:
        """Wait until the run can start, and log now and then which nodes are missing.

        Raises
        ------
        NoPlan : the time is over, a node asks to join that does not belong to this run, or this node was
            asked to stop.
        """
        last_log = start
        deadline = start + self.roll_call.timeout_s
        while not self._can_start(deadline):
            if time.monotonic() >= deadline:
                raise self._incomplete_error()
            reason = self.roll_call.stop_reason()
            if reason:
                raise NoPlan(f"stopped during the roll call: {self._node_name(0)} got {reason}")
            if time.monotonic() - last_log >= PROGRESS_S:
                last_log = time.monotonic()
                self.roll_call.log(f"roll call: {self._present_count()}, waiting for {self._missing_nodes()}")
            self._receive_requests()

    def _send_starts(self, nodes: Mapping[int, NodeInfo]) -> None:
        """Send each node but the head the start of the run.

        The message also has the number of the node among those on its host, which is 0 unless this command
        was started several times there.
        """
        node_counts: collections.Counter[str] = collections.Counter()
        for number, node in sorted(nodes.items()):
            host_index = node_counts[node.host]
            node_counts[node.host] += 1
            if number > 0:  # the head itself needs no message
                start = messages.RunStart(nnodes=len(nodes), node_rank=number, host_index=host_index)
                self.server.send(number, start)

    def _listen(self) -> socket.socket:
        """Open the port on which the head waits for the other nodes.

        Raises
        ------
        NoPlan : the port is busy.
        """
        port = self.roll_call.port
        try:
            return ports.listen(port, backlog=self.placement.nnodes)
        except OSError as error:
            raise NoPlan(
                f"port {port}, where the nodes of this run meet, is busy on the head",
                where=f"{self.placement.head or self.roll_call.node.host}:{port} ({error.strerror})",
                hint=f"to see who listens there: ss -ltnp sport = {port}. If it is this very command, it was "
                "started twice on this host (pbsdsh starts it once per line of the node file); else give all "
                f"nodes the same free port, for example: --port {ports.first_free(port) or 29500}",
            ) from error

    def _can_start(self, deadline: float) -> bool:
        """Return whether the run can start: all nodes have joined, or enough of them in a run with spares.

        A spare is a node beyond those that the training needs. Once enough nodes are there, the head waits
        `LAST_CALL_S` seconds after the last one for further ones, but not beyond the deadline.
        """
        size = self.placement.size
        if len(self.nodes) == self.placement.nnodes:
            return True
        if not size or len(self.nodes) < size.training:  # a run without spares needs every node
            return False
        return time.monotonic() >= min(deadline, self._last_join + LAST_CALL_S)

    def _incomplete_error(self) -> NoPlan:
        """Return the error that names the nodes that have not joined in time."""
        reports = "".join(f"; {text}" for text in self.server.reports[:4])
        timeout_s = self.roll_call.timeout_s
        return NoPlan(
            f"{self._missing_nodes()} did not join; {self._present_count()} after {timeout_s:g} s{reports}",
            where=f"roll call on {self.roll_call.node.host}:{self.roll_call.port}",
            hint="start this command once on every node of the job. If it was, read its output; check that "
            f"the node reaches {self.placement.head} (--head NAME, firewall). Late nodes: --rollcall-timeout",
        )

    def _receive_requests(self) -> None:
        """Wait a moment, add the nodes that ask to join, and forget nodes whose connection is over."""
        self.server.receive(CHECK_S, missing=self.placement.nnodes - len(self.nodes))
        if time.monotonic() - self._last_beat >= CHECK_S:
            self._last_beat = time.monotonic()
            self.server.send_heartbeats(
                messages.Heartbeat(),
                beat_s=session.beat_s(session.LOST_AFTER_S),
                lost_after_s=session.LOST_AFTER_S,
            )
        self._remove_lost_nodes()
        while self.server.joining:
            peer, request = self.server.joining.pop(0)
            self._add_node(peer, request)

    def _remove_lost_nodes(self) -> None:
        """Remove the nodes whose connection is over. They may join again."""
        while self.server.lost:
            rank, reason = self.server.lost.popitem()
            self.roll_call.log(f"roll call: {self._node_name(rank)} joined and disconnected ({reason})")
            del self.nodes[rank], self.probe_ports[rank]

    def _add_node(self, peer: HeadConnection, request: JoinRequest) -> None:
        """Add a node that asks to join.

        Raises
        ------
        NoPlan : the node expects another number of nodes, or another node has its rank already.
        """
        rank = request.node_rank
        # The node of this rank may call again because it was restarted. Then its old connection has ended,
        # which the head notices when it reads from it.
        for _ in range(3):
            if rank in self.server:
                self.server.receive()
        self._remove_lost_nodes()
        previous = self.nodes.get(rank)
        # `meet_nodes` sends a refusal to all nodes that were added, so add this one before the checks. If
        # another node has its rank, it gets the number -1, which no node has.
        self.server.add_node(rank if previous is None else -1, peer)
        self._refuse_other_layout(request, previous)
        self.nodes[rank] = request.node
        self.probe_ports[rank] = request.probe
        self._last_join = time.monotonic()
        # The heartbeat shows the node that the head, and no other service, took its call.
        self.server.send(rank, messages.Heartbeat())

    def _refuse_other_layout(self, request: JoinRequest, previous: NodeInfo | None) -> None:
        """Raise NoPlan if a node asks for a rank that does not exist, or that another node has.

        Parameters
        ----------
        previous : the node that has joined with this rank, or None.
        """
        rank, nnodes, host = request.node_rank, request.nnodes, request.node.host
        if nnodes != self.placement.nnodes or not 0 < rank < nnodes:
            raise NoPlan(
                f"{host} joins as node {rank + 1} of {nnodes}, but the head expects "
                f"{self.placement.nnodes} nodes",
                hint="give the same --nnodes everywhere, and each node its own --node-rank",
            )
        if previous is not None:
            raise NoPlan(
                f"{previous.host} and {host} both join as node {rank + 1} of {nnodes}",
                hint="start this command once per node, each with its own node rank",
            )

    def _torchrun_port(self) -> int:
        """Return a free port for torchrun: the port that the user has named, or the next free one.

        Raises
        ------
        NoPlan : the user's port is busy, or no port is free.
        """
        port = self.placement.port
        if port is None:
            return ports.next_free(self.roll_call.port)
        if not ports.is_free(port):
            raise NoPlan(
                f"torchrun's port {port} is busy on the head",
                hint=f"to see who listens there: ss -ltnp sport = {port}. Give every node the same other "
                "--port, or leave --port out",
            )
        return port

    def _node_name(self, rank: int) -> str:
        node = self.nodes.get(rank)
        return node_name(self.placement, rank, node.host if node else "")

    def _missing_nodes(self) -> str:
        """Return the names of the missing nodes, such as ``nodes 1-2,5 of 8 (node[01-02,05])``."""
        ranks = [rank for rank in range(self.placement.nnodes) if rank not in self.nodes]
        names = self._node_names(ranks)
        if len(names) <= MAX_NAMES:
            return names
        return f"{self._node_names(ranks[:MAX_SHOWN])} and {len(ranks) - MAX_SHOWN} more"

    def _node_names(self, ranks: list[int]) -> str:
        """Return the names of some nodes in one text: ``nodes 1-2,5 of 8 (node[01-02,05])``."""
        if len(ranks) == 1:
            return self._node_name(ranks[0])
        numbers = hostlist.number_ranges(str(rank + 1) for rank in ranks)
        text = f"nodes {numbers} of {self.placement.nnodes}"
        hosts = [self.placement.hosts[rank] for rank in ranks if rank < len(self.placement.hosts)]
        if len(hosts) < len(ranks):  # the scheduler has not named all hosts
            return text
        return f"{text} ({hostlist.fold_hosts(hosts)})"

    def _present_count(self) -> str:
        return f"{len(self.nodes)}/{self.placement.nnodes} present"


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
    """Refuse nodes with different software, and return warnings about differences that torchrun supports.

    Raises
    ------
    NoPlan : the nodes run different images, torch or NCCL, or a run with spares has different workers.
    """
    named_nodes = {node_name(placement, rank, node.host): node for rank, node in sorted(nodes.items())}
    image = _find_difference("image", named_nodes, lambda node: node.software.image)
    torch = _find_difference("torch", named_nodes, lambda node: node.software.torch)
    nccl = _find_difference("NCCL", named_nodes, lambda node: node.software.nccl)
    workers = _find_difference("workers per node", named_nodes, lambda node: str(node.nproc))
    gpu = _find_difference("GPU", named_nodes, lambda node: node.gpu)
    software = [difference for difference in (image, torch, nccl) if difference]
    if software:
        raise NoPlan(
            f"the nodes do not run the same software: {'; '.join(software)}",
            hint="start the same .sif on every node; compare: sha256sum IMAGE.sif, dist-env --json",
        )
    if workers and placement.size is not None:
        raise NoPlan(
            f"the nodes differ in {workers}: an attempt without one of them would have another batch",
            where=f"--nnodes {placement.size}",
            hint="give the same --nproc to all nodes, or leave out the spares",
        )
    return tuple(f"the nodes differ in {text}" for text in (workers, gpu) if text)


def _find_difference(
    label: str, named_nodes: Mapping[str, NodeInfo], read_value: Callable[[NodeInfo], str]
) -> str:
    """Return how a value differs between nodes, or "" if it is the same on all of them.

    An example is ``torch 2.3 on node 1 of 2 (n1), 2.4 on node 2 of 2 (n2)``.

    Parameters
    ----------
    named_nodes : the nodes by name.
    read_value : returns the value of one node.
    """
    names_by_value: dict[str, list[str]] = {}
    for name, node in named_nodes.items():
        names_by_value.setdefault(read_value(node) or "none", []).append(name)
    if len(names_by_value) < 2:
        return ""
    groups = [f"{value} on {join_names(names, 1)}" for value, names in names_by_value.items()]
    return f"{label} {join_names(groups, MAX_GROUPS)}"


# Descriptors for the node agent itself: those that it had at its start, pipes to its children, files.
AGENT_FILES = 128


def raise_file_limit(nnodes: int) -> None:
    """Raise this process' soft limit of open files, since the head has a connection to each of `nnodes`.

    The user's program gets the old limit back (launch/guard.py), since some programs close every number up to
    the limit.

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

"""The roll call, in which the nodes of a run meet before torchrun starts.

The head (the node with rank 0) listens (`_RollCallHead`), and the other nodes connect to it (join.py). The
head reports every node that never joins. If nodes run different software, it refuses the run on all of them.
It lets the nodes test the network between them (probe.py), and chooses a free port for torchrun. The
connections stay open after the roll call (session.py).

A run with spares (``--nnodes N+S``) starts with N+S nodes. It starts with fewer nodes, but at least N, if no
further node has joined for `LAST_CALL_S` seconds. The head then numbers the present nodes anew, because
torchrun allows no gaps. No node can join after the start.
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

# Seconds between two messages about the nodes that are missing.
PROGRESS_S = 10.0
# Seconds between two checks of the nodes that have joined and are waiting.
CHECK_S = 0.5
# Largest number of characters for the names of missing nodes in one message. If they need more, the message
# names only the first `MAX_NAMED_NODES` nodes.
MAX_NAMES_CHARACTERS = 400
MAX_NAMED_NODES = 32
# Number of times that the head reads the old connection of a node that has restarted. The first read may only
# return earlier data, and the next ones the end of the connection.
END_READS = 3
# Stands for the rank of a node whose rank another node has already. It is no rank of a run.
NO_RANK = -1
# Seconds that a run with spares waits for a further node after the last one has joined.
#
# The nodes of a job start seconds apart. Pods may start further apart, since each node pulls the image first.
# A shorter wait would exclude such nodes. A longer wait would delay every run in which a node is missing.
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
    """Meet all nodes of `placement`, and return the session that connects them during the run.

    All nodes must have joined within `timeout_s` seconds after this node has called this function. The
    placement in the session contains only the nodes that have joined. In a run with spares, these may be
    fewer than requested.

    Parameters
    ----------
    stop_reason : called about twice a second. If it returns a text, the roll call ends on all nodes.
    secret : the run's secret, which every node has to prove (connection.py). With None, the job id is enough.
    all_reach_head : True if every node must be able to connect to the head's address on the data network.

    Raises
    ------
    NoPlan : a node did not join, or the head did not answer. The nodes run different software. The network
        between two nodes loses data. A port is busy. The limit of open files is too low.
    """
    if placement.nnodes == 1:
        # A container without a network cannot resolve the host's name.
        alone = dataclasses.replace(placement, head="127.0.0.1")
        return HeadSession(alone, ports.any_free(), nodes={0: node})
    with probe.open_port(node.address, node.interface) as open_port:
        roll_call = RollCall(placement, node, open_port, timeout_s, log, stop_reason, secret, all_reach_head)
        if placement.node_rank != 0:
            return join(roll_call)
        return _lead(roll_call)


def _lead(roll_call: RollCall) -> HeadSession:
    """Lead the roll call on the head (the node with rank 0), and return its session.

    If the run cannot start, the other nodes get the same error, and the connections are closed.
    """
    head = _RollCallHead(roll_call)
    try:
        return head.start_run()
    except BaseException as error:
        # The other nodes should print the same error. On any other error or interrupt, only close the
        # connections.
        if isinstance(error, NoPlan):
            head.server.send_all(Refused.from_error(error))
        head.server.close(session.LINGER_S)
        raise


class _RollCallHead:
    """The head's side of the roll call, until all nodes have joined. The head is the node with rank 0."""

    def __init__(self, roll_call: RollCall) -> None:
        self.roll_call = roll_call
        self.placement = roll_call.placement
        self.nodes = {0: roll_call.node}
        """The description that each node has sent when it joined, by rank."""
        self.probe_ports = {0: roll_call.open_port.offer}
        raise_file_limit(self.placement.nnodes)
        self.server = Server(
            self._listen(), job_id=self.placement.job_id, secret=roll_call.secret, log=roll_call.log
        )
        self._last_beat = self._last_join = time.monotonic()

    def start_run(self) -> HeadSession:
        """Wait for all nodes, compare them, and start the run on all of them. Return the head's session.

        Raises
        ------
        NoPlan : see `meet_nodes`.
        """
        start = time.monotonic()
        # All checks come before `_send_starts`. Until then, an error reaches all nodes as a refusal
        # (`_lead`).
        self._wait_for_nodes(start)
        warnings = [*compare_software(self.placement, self.nodes), *self._test_network()]
        port = self._choose_torchrun_port()
        nodes = self._renumber_nodes()  # before `_send_starts`, which uses the new numbers
        self._send_starts(nodes)
        self.roll_call.log(f"roll call: {self._count_present()} in {time.monotonic() - start:.1f} s")
        placement = self.placement.numbered(nnodes=len(nodes), node_rank=0)
        all_nodes_have_ports = None not in self.probe_ports.values()
        if self.roll_call.all_reach_head and all_nodes_have_ports:
            # All nodes have just reached the head by this address in the network test, so the run uses it.
            placement = dataclasses.replace(placement, head=nodes[0].address)
        return HeadSession(placement, port, warnings, self.server, nodes)

    def _renumber_nodes(self) -> dict[int, NodeInfo]:
        """Give the nodes new numbers without gaps in the server, and return the nodes by these numbers.

        In a run with spares, some nodes may be missing, but torchrun allows no gaps in the ranks. So nodes 0,
        2 and 3, for example, get the numbers 0, 1 and 2.
        """
        new_numbers = {rank: number for number, rank in enumerate(sorted(self.nodes))}
        self.server.renumber(new_numbers)
        return {number: self.nodes[rank] for rank, number in new_numbers.items()}

    def _test_network(self) -> tuple[str, ...]:
        """Let the nodes test the network between them, and return warnings about missing results.

        Return () if every node has a result.

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
        """Wait until the run can start. From time to time, log which nodes are missing.

        `start` is the time at which the roll call began, on the monotonic clock. In a run with spares (nodes
        that replace lost ones), some nodes may be missing at the end.

        Raises
        ------
        NoPlan : nodes are still missing after the time limit, a node asks to join that does not belong to
            this run, or this node was asked to stop.
        """
        last_log = start
        deadline = start + self.roll_call.timeout_s
        while not self._can_start(deadline):
            if time.monotonic() >= deadline:
                raise self._make_incomplete_error()
            reason = self.roll_call.stop_reason()
            if reason:
                raise NoPlan(f"stopped during the roll call: {self._node_name(0)} got {reason}")
            if time.monotonic() - last_log >= PROGRESS_S:
                last_log = time.monotonic()
                self.roll_call.log(f"roll call: {self._count_present()}, waiting for {self._name_missing()}")
            self._receive_requests()

    def _send_starts(self, nodes: Mapping[int, NodeInfo]) -> None:
        """Tell each node except the head that the run starts, with its number in the run.

        `nodes` contains the nodes by their new numbers. The head has number 0.
        The message also contains the node's index among the nodes on the same host. The index is 0 unless
        this command was started several times on one host.
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
        """Return whether the run can start, because all nodes have joined or there are enough of them.

        Enough nodes are only sufficient in a run with spares, which are nodes beyond those that the training
        needs. In this case, the head still waits for further nodes, until none has joined for `LAST_CALL_S`
        seconds. It waits no longer than until the deadline.
        """
        size = self.placement.size
        if len(self.nodes) == self.placement.nnodes:
            return True
        if not size or len(self.nodes) < size.training:  # a run without spares needs every node
            return False
        return time.monotonic() >= min(deadline, self._last_join + LAST_CALL_S)

    def _make_incomplete_error(self) -> NoPlan:
        """Return the error about nodes that have not joined in time. It names these nodes."""
        reports = "".join(f"; {stranger_report}" for stranger_report in self.server.reports[:4])
        timeout_s = self.roll_call.timeout_s
        return NoPlan(
            f"{self._name_missing()} did not join; {self._count_present()} after {timeout_s:g} s{reports}",
            where=f"roll call on {self.roll_call.node.host}:{self.roll_call.port}",
            hint="start this command once on every node of the job. If it was, read its output; check that "
            f"the node reaches {self.placement.head} (--head NAME, firewall). Late nodes: --rollcall-timeout",
        )

    def _receive_requests(self) -> None:
        """Wait a moment for messages, then add the nodes that ask to join and remove those that are gone.

        Nodes that have joined get heartbeats, so that they know that the head still waits.
        """
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
        """Remove the nodes whose connections have ended. They may join again."""
        while self.server.lost:
            rank, reason = self.server.lost.popitem()
            self.roll_call.log(f"roll call: {self._node_name(rank)} joined and disconnected ({reason})")
            del self.nodes[rank], self.probe_ports[rank]

    def _add_node(self, peer: HeadConnection, request: JoinRequest) -> None:
        """Add a node that asks to join. If it was restarted, it replaces its earlier self.

        Raises
        ------
        NoPlan : the node expects another number of nodes, or another node has its rank already.
        """
        rank = request.node_rank
        self._drop_ended_connection(rank)
        previous = self.nodes.get(rank)
        # If a check fails, `_lead` sends the error to all nodes that were added. So add this node before
        # the checks.
        self.server.add_node(rank if previous is None else NO_RANK, peer)
        self._refuse_other_layout(request, previous)
        self.nodes[rank] = request.node
        self.probe_ports[rank] = request.probe
        self._last_join = time.monotonic()
        # The heartbeat shows the node that it has reached the head, and not some other service.
        self.server.send(rank, messages.Heartbeat())

    def _drop_ended_connection(self, rank: int) -> None:
        """Remove the node with rank `rank` if its connection has ended, as when the node was restarted.

        The head only notices the end when it reads from the connection. Each read may also return messages of
        other nodes, which need no reaction before the start.
        """
        for _ in range(END_READS):
            if rank in self.server:  # `receive` removes the node once it reads the end
                self.server.receive()
        self._remove_lost_nodes()

    def _refuse_other_layout(self, request: JoinRequest, previous: NodeInfo | None) -> None:
        """Raise NoPlan if a node requests a rank that does not exist, or that another node already has.

        Parameters
        ----------
        previous : the node that has already joined with this rank, or None.
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

    def _choose_torchrun_port(self) -> int:
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

    def _name_missing(self) -> str:
        """Return the names of the missing nodes, such as ``nodes 1-2,5 of 8 (node[01-02,05])``.

        If the names are too long for a message, only the first nodes are named.
        """
        ranks = [rank for rank in range(self.placement.nnodes) if rank not in self.nodes]
        names = self._describe_nodes(ranks)
        if len(names) <= MAX_NAMES_CHARACTERS:
            return names
        return f"{self._describe_nodes(ranks[:MAX_NAMED_NODES])} and {len(ranks) - MAX_NAMED_NODES} more"

    def _describe_nodes(self, ranks: list[int]) -> str:
        """Return the names of nodes as one text, such as ``nodes 1-2,5 of 8 (node[01-02,05])``.

        Users count nodes from 1, while `ranks` count from 0.
        """
        if len(ranks) == 1:
            return self._node_name(ranks[0])
        node_numbers = hostlist.number_ranges(str(rank + 1) for rank in ranks)
        numbered_nodes = f"nodes {node_numbers} of {self.placement.nnodes}"
        hosts = [self.placement.hosts[rank] for rank in ranks if rank < len(self.placement.hosts)]
        if len(hosts) < len(ranks):  # the scheduler has not named all hosts
            return numbered_nodes
        return f"{numbered_nodes} ({hostlist.fold_hosts(hosts)})"

    def _count_present(self) -> str:
        return f"{len(self.nodes)}/{self.placement.nnodes} present"


MANIFEST = "opt/imgkit/manifest.json"
# Largest number of groups of nodes that one message names, so that the message fits into a line.
MAX_GROUPS = 8


def read_software(*, torch: str, nccl: str, root: Path = Path("/")) -> messages.Software:
    """Return the versions of the software in this image: a digest of its manifest, torch and NCCL."""
    try:
        image = hashlib.sha256(files.read_bytes(root / MANIFEST)).hexdigest()[:12]
    except OSError:
        image = ""
    return messages.Software(image=image, torch=torch, nccl=nccl)


def compare_software(placement: Placement, nodes: Mapping[int, NodeInfo]) -> tuple[str, ...]:
    """Raise an error if the nodes run different software, and return warnings about other differences.

    torchrun supports different GPUs and different numbers of workers, so these only lead to warnings. Return
    () if there are no differences. `nodes` contains the description that each node has sent when it joined,
    by rank.

    Raises
    ------
    NoPlan : the nodes run different images, torch or NCCL. Or the run has spares, and the nodes have
        different numbers of workers.
    """
    named_nodes = {node_name(placement, rank, node.host): node for rank, node in sorted(nodes.items())}
    image = _find_difference("image", named_nodes, lambda node: node.software.image)
    torch = _find_difference("torch", named_nodes, lambda node: node.software.torch)
    nccl = _find_difference("NCCL", named_nodes, lambda node: node.software.nccl)
    workers = _find_difference("workers per node", named_nodes, lambda node: str(node.nproc))
    gpu = _find_difference("GPU", named_nodes, lambda node: node.gpu)
    # Each result is a text for the user, or "" if all nodes have the same value. Different images, or
    # different versions of torch or NCCL, need not work together.
    software = [difference for difference in (image, torch, nccl) if difference]
    if software:
        raise NoPlan(
            f"the nodes do not run the same software: {'; '.join(software)}",
            hint="start the same .sif on every node; compare: sha256sum IMAGE.sif, dist-env --json",
        )
    # `size` is set in a run with spares, which are nodes that replace lost ones.
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
    """Return a text about a value that differs between nodes, or "" if it is the same on all of them.

    An example is ``torch 2.3 on node 1 of 2 (n1), 2.4 on node 2 of 2 (n2)``.

    Parameters
    ----------
    label : name of the value in the text.
    named_nodes : the nodes by name, in the order of their ranks.
    read_value : returns the value of one node.
    """
    names_by_value: dict[str, list[str]] = {}
    for name, node in named_nodes.items():
        names_by_value.setdefault(read_value(node) or "none", []).append(name)  # "none" in the message
    if len(names_by_value) < 2:
        return ""
    groups = [f"{value} on {join_names(names, 1)}" for value, names in names_by_value.items()]
    return f"{label} {join_names(groups, MAX_GROUPS)}"


# Number of descriptors that the node agent itself needs: those from its start, pipes to its children, and
# files.
AGENT_FILES = 128


def raise_file_limit(nnodes: int) -> None:
    """Raise the soft limit of open files of this process, because the head has a connection to each node.

    `nnodes` is the number of nodes. The user's program gets the old limit back (launch/guard.py), because
    some programs close every descriptor up to the limit.

    Raises
    ------
    NoPlan : the hard limit is too low for the nodes.
    """
    # `MAX_STRANGERS` connections may not belong to the run, and the node agent itself needs `AGENT_FILES`. A
    # process may raise its soft limit up to the hard limit. Only root can raise the hard limit.
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

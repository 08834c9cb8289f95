"""Test the network between pairs of nodes during the roll call, before torchrun depends on the network.

Each node opens a port on the address that carries its data. The kernel chooses the port number, as it does
for NCCL and Gloo. Up to three other nodes connect to that port and send bursts of data of growing size. The
kernels acknowledge the data, without any process. So a busy node delays nothing, and a burst without an
acknowledgment means lost packets.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.rollcall import ports
from imgkit_entrypoints.rollcall.messages import ProbeFailure, ProbePort, ProbeReport, ProbeRequest
from imgkit_entrypoints.rollcall.server import Server

# Sizes of the bursts in bytes. They are smaller and larger than the packets of tunnels, Ethernet and jumbo
# frames.
SIZES = (64, 1200, 1400, 2000, 4000, 9000)
# Node rank of the head, the node that leads the test.
HEAD = 0
# Sizes of headers in bytes. That of TCP includes the time stamps that Linux adds.
TCP_HEADER_BYTES = 32
ICMP_HEADER_BYTES = 8
# Largest number of nodes that connect to one node.
PARTNERS = 3
# Size of the receive buffer, which holds the largest burst several times. By default, the kernel would keep
# megabytes for each connection.
BUFFER_BYTES = 65536
# Longest time in seconds for one connection or one burst. Linux repeats a lost SYN after 1 and 3 seconds.
STEP_S = 3.5
# Longest time in seconds for all tests of a node. A test that is unfinished by then counts as passed.
LIMIT_S = 6.0
# Further seconds in which the nodes' reports can reach the head.
ANSWER_S = 2.0
# Seconds in which the head notices that a node has just ended.
SETTLE_S = 0.2
# Seconds between two checks of whether a burst has arrived.
TICK_S = 0.001


class PairFailure(NamedTuple):
    """A failed test of the network from one node to another."""

    sender: int
    """Node rank of the node that could not connect or send."""
    failure: ProbeFailure


class NetworkTest(NamedTuple):
    """The result of the network test between all nodes."""

    failures: list[PairFailure]
    untested: list[int]
    """Ranks of nodes without a result, because other programs have connected to their ports."""


class OpenPort:
    """The port that this node opens for the network test.

    `offer` contains what other nodes need to connect to the port. It is None if this node takes no part in
    the test.
    """

    def __init__(self, offer: ProbePort | None, listener: socket.socket) -> None:
        self.offer = offer
        self._listener = listener
        self._accepted: list[socket.socket] = []

    def is_crowded(self, limit: int = PARTNERS) -> bool:
        """Return whether more than `limit` connections have arrived. A test of this port then proves nothing.

        Anyone on the network can connect to the port. If a stranger opens enough connections, they fill the
        kernel's queue, and connections of other nodes fail.
        """
        self.accept_callers(limit)
        return len(self._accepted) > limit

    def accept_callers(self, limit: int) -> None:
        """Accept the connections in the kernel's queue, until there are more than `limit` in total."""
        with contextlib.suppress(OSError):  # the queue is empty
            while len(self._accepted) <= limit:
                sock, _ = self._listener.accept()
                self._accepted.append(sock)  # it stays open, since a partner may still be sending

    def close(self) -> None:
        """Close the port and all accepted connections."""
        for sock in (self._listener, *self._accepted):
            sock.close()


@contextlib.contextmanager
def open_port(address: str, interface: str) -> Iterator[OpenPort]:
    """Open a port of this node on `address` for the network test, until the ``with`` block ends.

    In the test, the nodes send data to each other's ports. If `address` is empty or cannot be used, no port
    is opened. The `offer` of the result is then None, and the node takes no part in the test.
    """
    listener = socket.socket(_choose_family(address))
    listener.setblocking(False)
    offer = None
    if address:
        with contextlib.suppress(OSError):  # any error means that the address cannot be used
            # Nobody reads the data that other nodes send, so the kernel keeps it for each connection. This
            # limits how much memory a stranger can fill.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
            listener.bind((address, 0))  # 0: the kernel chooses the port
            listener.listen(ports.BACKLOG)  # in a large run, many nodes may connect to the head
            _, port, *_ = listener.getsockname()
            offer = ProbePort(address=address, interface=interface, port=port)
    with contextlib.closing(OpenPort(offer, listener)) as opened:
        yield opened


def _choose_family(address: str) -> socket.AddressFamily:
    """Return the family of an IPv6 or IPv4 address. An empty address counts as IPv4."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def probe_all(
    offers: Mapping[int, ProbePort | None],
    server: Server,
    head_port: OpenPort,
    *,
    all_reach_head: bool = False,
) -> NetworkTest:
    """Let every node test the network to its partners, and return the result. Only the head calls this.

    The head is the node with rank 0. Failed tests are ignored if one of their two nodes has ended in the
    meantime, or has a crowded port. A port is crowded if other programs have connected to it, because
    partners may then not get through. A node that sends no report is not a failure either, unless it must
    test the head.

    Parameters
    ----------
    offers : the ports of the nodes, by node rank. None for a node that takes no part.
    head_port : the port of the head itself.
    all_reach_head : True if every node must test the head as well, and must report the result.
    """
    results = _ProbeResults(_choose_targets(offers, all_reach_head=all_reach_head))
    max_callers = PARTNERS  # largest number of nodes that test the head; more connections come from strangers
    if all_reach_head and offers.get(HEAD):
        max_callers += len(results.waiting)
    for rank in results.waiting:
        server.send(rank, ProbeRequest(targets=tuple(results.targets[rank].items())))
    # The other nodes test their partners in the meantime, so the deadline begins before the head's own test.
    deadline = time.monotonic() + LIMIT_S + ANSWER_S
    for failure in probe_targets(results.targets.get(HEAD, {})):
        results.failures.append(PairFailure(HEAD, failure))
    results.collect(server, head_port, max_callers, deadline)
    if all_reach_head:
        results.add_silent_nodes()
    if results.failures:
        # If a node has ended during the test, the head notices it only a moment later. Failed tests of such a
        # node say nothing about the network, so wait until `server.lost` is complete.
        settle_end = time.monotonic() + SETTLE_S
        while time.monotonic() < settle_end:
            server.receive(settle_end - time.monotonic())
    if head_port.is_crowded(max_callers) and not all_reach_head:
        results.crowded.append(HEAD)
    failures = results.failures_without({*results.crowded, *server.lost})
    return NetworkTest(failures, results.crowded)


class _ProbeResults:
    """Collects the results of the network tests of all nodes. Only the head uses it.

    Parameters
    ----------
    targets : the ports that each node tests, by the rank of the testing node and the rank of the target.
    """

    def __init__(self, targets: dict[int, dict[int, ProbePort]]) -> None:
        self.targets = targets
        self.waiting = targets.keys() - {HEAD}
        """Ranks of the nodes whose reports are still missing."""
        self.failures: list[PairFailure] = []
        self.crowded: list[int] = []
        """Ranks of the nodes to whose ports strangers have connected."""

    def collect(self, server: Server, head_port: OpenPort, max_callers: int, deadline: float) -> None:
        """Wait until all nodes have sent their reports or are lost, but not beyond the deadline.

        Meanwhile, accept the connections of other nodes to the head's port, since the kernel's queue may hold
        only 128. Ranks stay in `waiting` if their reports are missing at the deadline.
        """
        while self.waiting and time.monotonic() < deadline:
            for rank, report in server.receive(deadline - time.monotonic()):
                # Other messages are heartbeats. A second report of a node is ignored.
                if isinstance(report, ProbeReport) and rank in self.waiting:
                    self.add(rank, report)
            self.waiting -= server.lost.keys()
            head_port.accept_callers(max_callers)

    def add(self, rank: int, report: ProbeReport) -> None:
        """Add a node's report. Results of tests that the head has not requested are ignored."""
        self.waiting.remove(rank)
        if report.is_crowded:
            self.crowded.append(rank)
        for failure in report.failures:
            if failure.target in self.targets[rank]:
                self.failures.append(PairFailure(rank, failure))

    def add_silent_nodes(self) -> None:
        """Add a failure for each node that had to test the head and has not sent a report."""
        silence = ProbeFailure(target=HEAD, size=0, arrived=0, packet=0, reason="no report of this test")
        for rank in self.waiting:
            if HEAD in self.targets[rank]:
                self.failures.append(PairFailure(rank, silence))

    def failures_without(self, ranks: set[int]) -> list[PairFailure]:
        """Return the failed tests, except those from or to a node in `ranks`."""
        return [pair for pair in self.failures if ranks.isdisjoint((pair.sender, pair.failure.target))]


def _choose_targets(
    offers: Mapping[int, ProbePort | None], *, all_reach_head: bool
) -> dict[int, dict[int, ProbePort]]:
    """Return the ports that each node tests, such as ``{0: {1: the port of node 1, ...}, ...}``.

    Nodes that have opened no port take no part.

    Parameters
    ----------
    offers : the ports that the nodes have opened for the test, by node rank. None for a node without a port.
    all_reach_head : True if every node must test the head (the node with rank 0) as well.
    """
    # The order decides which nodes are neighbors. It must be that of the ranks, and not of the arrival.
    ports_by_rank = {rank: offer for rank, offer in sorted(offers.items()) if offer}
    ranks = tuple(ports_by_rank)  # without gaps, so that a node that takes no part is nobody's partner
    targets = {}
    for position, rank in enumerate(ranks):
        targets[rank] = {partner: ports_by_rank[partner] for partner in choose_partners(position, ranks)}
        # With the head as a further target, each node tests up to four others.
        if all_reach_head and HEAD in ports_by_rank and rank != HEAD:
            targets[rank][HEAD] = ports_by_rank[HEAD]
    return targets


def choose_partners(position: int, ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the nodes that the node at `position` in `ranks` tests: both neighbors and the node opposite.

    Of 8 nodes, node 0 tests the nodes 1, 7 and 4. In this way, no node gets connections from many others.
    """
    partners: list[int] = []
    for step in (1, -1, len(ranks) // 2):
        rank = ranks[(position + step) % len(ranks)]
        if rank != ranks[position] and rank not in partners:
            partners.append(rank)
    return tuple(partners)


def run_request(request: ProbeRequest, open_port: OpenPort) -> ProbeReport:
    """Test the nodes that the head has chosen, and return the report for the head."""
    failures = tuple(probe_targets(dict(request.targets)))
    return ProbeReport(failures=failures, is_crowded=open_port.is_crowded())


def probe_targets(targets: Mapping[int, ProbePort]) -> list[ProbeFailure]:
    """Test all `targets` at the same time, each in a thread, and return the tests that failed.

    Parameters
    ----------
    targets : the ports to test, by the ranks of their nodes.
    """
    # The threads append to this list. No lock is needed, since `append` is atomic.
    failures: list[ProbeFailure] = []
    deadline = time.monotonic() + LIMIT_S

    def probe_port(target: int, offer: ProbePort) -> None:
        failure = _probe_port(target, offer, deadline)
        if failure and time.monotonic() < deadline:  # an unfinished test counts as passed
            failures.append(failure)

    threads = [threading.Thread(target=probe_port, args=item) for item in targets.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


def _probe_port(target: int, offer: ProbePort, deadline: float) -> ProbeFailure | None:
    """Connect to the node `target`, and send it bursts of growing size.

    Return the failure, or None if all bursts have arrived. A burst is a number of bytes that is sent at once.
    The next burst is sent after the previous one has arrived. If only large bursts fail, the network drops
    large packets.

    Parameters
    ----------
    target : node rank of the tested node.
    offer : the port that the tested node has opened.
    deadline : end of all tests of this node, on the monotonic clock.
    """
    # After an error, these are the burst that failed, the last one that arrived, and the largest segment of
    # TCP, all in bytes. If `size` stays 0, the connection itself has failed.
    size = arrived = segment = 0
    try:
        with socket.socket(_choose_family(offer.address)) as sock:
            sock.settimeout(max(TICK_S, min(STEP_S, deadline - time.monotonic())))
            sock.connect((offer.address, offer.port))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # send each burst at once
            segment = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
            for size in SIZES:
                sock.sendall(bytes(size))
                _wait_for_arrival(sock, min(deadline, time.monotonic() + STEP_S))
                arrived = size
    except OSError as error:
        reason = error.strerror or str(error)
        if isinstance(error, TimeoutError):
            reason = f"no answer within {STEP_S:g} s"
        # A packet carries at most one segment, so `packet` is the size of the largest packet that failed.
        packet = min(size, segment) + _count_header_bytes(offer.address)
        return ProbeFailure(target=target, size=size, arrived=arrived, packet=packet, reason=reason)
    return None


def _wait_for_arrival(sock: socket.socket, deadline: float) -> None:
    """Wait until the kernel of the other node has acknowledged every byte, even if no process reads them.

    If this kernel cannot tell, return at once.

    Raises
    ------
    TimeoutError : the deadline has passed.
    OSError : the connection has failed.
    """
    while True:
        # Asking for the error also clears it. Without this, a failed connection would look like a slow one.
        error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        try:
            # On a socket, Linux calls this request SIOCOUTQ (linux/sockios.h). Its result is the number of
            # bytes that are not acknowledged yet, as a C int.
            (unsent,) = struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))
        except OSError:  # this kernel does not support the request, so the burst counts as arrived
            return
        if unsent == 0:
            return
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(TICK_S)


def _count_header_bytes(address: str) -> int:
    """Return the size in bytes of the IP and TCP headers of a packet to an IPv6 or IPv4 address."""
    return TCP_HEADER_BYTES + (40 if ":" in address else 20)


def network_error(
    failures: Sequence[PairFailure], offers: Mapping[int, ProbePort | None], name: Callable[[int], str]
) -> NoPlan:
    """Return the error about one failed pair of nodes, with the likely cause and a command to run.

    The message is short enough for the smallest packets, because the other nodes have to receive it over the
    network that has just failed.

    Parameters
    ----------
    failures : the failed tests. The message describes one of them and counts the others.
    offers : the ports of the nodes, by node rank.
    name : returns the name of a node for messages, given its rank.
    """
    # Describe the smallest burst that failed. If there are several, describe the first pair of nodes.
    sender, failure = min(failures, key=lambda pair: (pair.failure.size, pair.sender, pair.failure.target))
    sender_offer, offer = offers[sender], offers[failure.target]
    assert sender_offer and offer  # noqa: S101, PT018 - only nodes with an offer take part
    sender_name, target_name = name(sender), name(failure.target)
    problem = _describe_failure(failure, sender_name, target_name, offer.port)
    if len(failures) > 1:
        problem += f" (other failing pairs of nodes: {len(failures) - 1})"
    if failure.size > SIZES[0]:  # a smaller burst has arrived, so large packets are lost
        hint = _make_mtu_hint(failure, offer)
    else:  # there was no connection, or the smallest burst has not arrived
        hint = _make_firewall_hint(sender_offer, offer, target_name)
    return NoPlan(
        problem,
        where=f"{offer.address}:{offer.port}",
        hint=f"{hint}. To start without this test: --no-network-test",
    )


def _describe_failure(failure: ProbeFailure, sender_name: str, target_name: str, port: int) -> str:
    """Return what the sender could not do: connect to the target's port, or send data to the target.

    A burst is a number of bytes that is sent at once. Bursts grow from one to the next.
    """
    if failure.size == 0:  # there was no connection, so no burst was sent
        return f"{sender_name} cannot connect to {target_name} on port {port}: {failure.reason}"
    if failure.size <= SIZES[0]:  # even the smallest burst has failed, so its size is not the cause
        return f"{sender_name} connects to {target_name}, but port {port} gets no data: {failure.reason}"
    return (
        f"{sender_name} cannot send {failure.size} B at once to {target_name}: {failure.arrived} B "
        f"arrive, {failure.size} B do not"
    )


def _make_mtu_hint(failure: ProbeFailure, offer: ProbePort) -> str:
    """Return the hint for a network that loses large packets.

    It contains a ping whose packets are as large as the ones that were lost, and an MTU with which packets
    are as small as the largest ones that have arrived.
    """
    header_bytes = _count_header_bytes(offer.address)  # IP and TCP
    ping_header_bytes = header_bytes - TCP_HEADER_BYTES + ICMP_HEADER_BYTES  # IP and ICMP
    ping_payload_bytes = failure.packet - ping_header_bytes
    mtu_bytes = failure.arrived + header_bytes
    return (
        f"a path MTU black hole: a switch or tunnel drops packets of {failure.packet} B without a report. "
        f"To see it: ping -c 3 -M do -s {ping_payload_bytes} {offer.address}. Raise the MTU of the path, or "
        f"lower it on all nodes: sudo ip link set dev {offer.interface} mtu {mtu_bytes}"
    )


def _make_firewall_hint(sender: ProbePort, target: ProbePort, target_name: str) -> str:
    """Return the hint for a node to which another node cannot connect."""
    if sender.address == target.address:
        return (
            f"both nodes have the address {target.address}, which is that of a container's own network. "
            "Start the containers in the host's network (docker: --network host)"
        )
    return (
        "NCCL and Gloo use the ports of /proc/sys/net/ipv4/ip_local_port_range, so a firewall must let "
        f"the nodes connect on all of them. On {target_name}: sudo ufw allow from {sender.address}. If "
        f"{target.interface} is the wrong network, name another: NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME"
    )

"""The network between a few pairs of nodes, tested in the roll call before torchrun depends on it.

Each node opens a port on the address that carries its data; the kernel chooses it, as it does for NCCL and
Gloo. Up to three other nodes connect there and send bursts of growing size. The kernels answer, and no
process does: a busy node delays nothing, and an unanswered burst means lost packets.
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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.rollcall import ports
from imgkit_entrypoints.rollcall.messages import ProbeFailure, ProbePort, ProbeReport, ProbeRequest
from imgkit_entrypoints.rollcall.server import Server

# Bytes of the bursts, on both sides of the packet sizes of tunnels, Ethernet and jumbo frames.
SIZES = (64, 1200, 1400, 2000, 4000, 9000)
# Node rank of the head.
HEAD = 0
# Most nodes that connect to one node.
PARTNERS = 3
# Room for the largest burst several times. The kernel's own limit is megabytes for each connection.
BUFFER_BYTES = 65536
# Limit for one connection or one burst. Linux repeats a lost SYN after 1 and 3 seconds.
STEP_S = 3.5
# Limit for all tests of a node; an unfinished test counts as passed.
LIMIT_S = 6.0
# Further time for the nodes' reports to reach the head.
ANSWER_S = 2.0
# Time in which a node that has just ended is noticed.
SETTLE_S = 0.2
# Time between two looks at whether a burst has arrived.
TICK_S = 0.001


class PairFailure(NamedTuple):
    """A failed test of the network from one node to another."""

    sender: int
    """Node rank of the node that could not connect or send."""
    failure: ProbeFailure


class NetworkTest(NamedTuple):
    """The result of the test between all nodes."""

    failures: list[PairFailure]
    untested: list[int]
    """Ranks of nodes without a result, since other programs have connected to their ports."""


class OpenPort:
    """The port that a node opens for the test.

    `offer` is what other nodes need to connect to it, or None if the node takes no part in the test.
    """

    def __init__(self, offer: ProbePort | None, listener: socket.socket) -> None:
        self.offer = offer
        self._listener = listener
        self._accepted: list[socket.socket] = []

    def is_crowded(self, limit: int = PARTNERS) -> bool:
        """Return whether more than `limit` connections have come, so that a test of this port proves nothing.

        Anybody on the network may connect. Enough connections of a stranger fill the kernel's queue, so that
        connections of other nodes fail.
        """
        self.accept_callers(limit)
        return len(self._accepted) > limit

    def accept_callers(self, limit: int) -> None:
        """Accept the connections that wait, until there are more than `limit` in all."""
        with contextlib.suppress(OSError):  # none waits any more
            while len(self._accepted) <= limit:
                sock, _ = self._listener.accept()
                self._accepted.append(sock)  # it stays open, since a partner may still be sending

    def close(self) -> None:
        """Close everything."""
        for sock in (self._listener, *self._accepted):
            sock.close()


@contextlib.contextmanager
def open_port(address: str, interface: str) -> Iterator[OpenPort]:
    """Open a port of this node on `address` until the ``with`` block ends.

    If `address` is empty or cannot be used, no port is opened: the `offer` of the result is None, and the
    node takes no part in the test.
    """
    listener = socket.socket(_family(address))
    listener.setblocking(False)
    offer = None
    with contextlib.suppress(OSError):
        # The kernel keeps what a stranger sends here, since nobody reads it.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        if address:
            listener.bind((address, 0))
            listener.listen(ports.BACKLOG)  # in a large run, many nodes may connect to the head
            _, port, *_ = listener.getsockname()
            offer = ProbePort(address=address, interface=interface, port=port)
    with contextlib.closing(OpenPort(offer, listener)) as opened:
        yield opened


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def probe_all(
    offers: Mapping[int, ProbePort | None],
    server: Server,
    head_port: OpenPort,
    *,
    all_reach_head: bool = False,
) -> NetworkTest:
    """Let every node test the network to its partners, and return the result. The head calls this.

    Tests of a node that ends meanwhile or never reports do not count, nor do tests of a node whose port is
    crowded: other programs have connected to it, so that partners may not get through. With
    `all_reach_head`, every node tests the head as well, and has to report success.
    """
    results = _ProbeResults(_choose_targets(offers, all_reach_head=all_reach_head))
    max_callers = PARTNERS
    if all_reach_head and offers.get(HEAD):
        max_callers += len(results.waiting)
    for rank in results.waiting:
        server.send(rank, ProbeRequest(targets=tuple(results.targets[rank].items())))
    # The head tests its own partners while the others test theirs.
    deadline = time.monotonic() + LIMIT_S + ANSWER_S
    for failure in probe_targets(results.targets.get(HEAD, {})):
        results.failures.append(PairFailure(HEAD, failure))
    results.collect(server, head_port, max_callers, deadline)
    if all_reach_head:
        results.add_silent_nodes()
    if results.failures:
        # If a node has ended during the test, the head notices it a moment later. Then failed tests from and
        # to this node say nothing about the network.
        settle_end = time.monotonic() + SETTLE_S
        while time.monotonic() < settle_end:
            server.receive(settle_end - time.monotonic())
    if head_port.is_crowded(max_callers) and not all_reach_head:
        results.crowded.append(HEAD)
    failures = results.failures_without({*results.crowded, *server.lost})
    return NetworkTest(failures, results.crowded)


class _ProbeResults:
    """What the head knows about the tests of all nodes.

    Parameters
    ----------
    targets : the ports that each node tests, by the ranks of both nodes.
    """

    def __init__(self, targets: dict[int, dict[int, ProbePort]]) -> None:
        self.targets = targets
        self.waiting = targets.keys() - {HEAD}
        """Nodes whose report may still come."""
        self.failures: list[PairFailure] = []
        self.crowded: list[int] = []
        """Nodes to whose ports strangers have connected."""

    def collect(self, server: Server, head_port: OpenPort, max_callers: int, deadline: float) -> None:
        """Wait until all nodes have reported or are lost, at most until the deadline.

        Meanwhile, accept the connections of other nodes, since the kernel's queue may hold only 128.
        """
        while self.waiting and time.monotonic() < deadline:
            for rank, message in server.receive(deadline - time.monotonic()):
                if isinstance(message, ProbeReport) and rank in self.waiting:
                    self.add(rank, message)
            self.waiting -= server.lost.keys()
            head_port.accept_callers(max_callers)

    def add(self, rank: int, report: ProbeReport) -> None:
        """Add a node's report, without tests for which the head has not asked."""
        self.waiting.remove(rank)
        if report.is_crowded:
            self.crowded.append(rank)
        for failure in report.failures:
            if failure.target in self.targets[rank]:
                self.failures.append(PairFailure(rank, failure))

    def add_silent_nodes(self) -> None:
        """Add a failure for each node that was to test the head and has not reported."""
        silence = ProbeFailure(target=HEAD, size=0, arrived=0, packet=0, reason="no report of this test")
        for rank in self.waiting:
            if HEAD in self.targets[rank]:
                self.failures.append(PairFailure(rank, silence))

    def failures_without(self, ranks: Collection[int]) -> list[PairFailure]:
        """Return the failed tests without those from or to a node in `ranks`."""
        counted = []
        for pair in self.failures:
            if pair.sender not in ranks and pair.failure.target not in ranks:
                counted.append(pair)
        return counted


def _choose_targets(
    offers: Mapping[int, ProbePort | None], *, all_reach_head: bool
) -> dict[int, dict[int, ProbePort]]:
    """Return the ports that each node tests: ``{0: {1: the port of node 1, ...}, ...}``.

    Nodes without a port take no part.
    """
    ports_by_rank = {rank: offer for rank, offer in sorted(offers.items()) if offer}
    ranks = tuple(ports_by_rank)
    targets = {}
    for position, rank in enumerate(ranks):
        targets[rank] = {partner: ports_by_rank[partner] for partner in choose_partners(position, ranks)}
        if all_reach_head and HEAD in ports_by_rank and rank != HEAD:
            targets[rank][HEAD] = ports_by_rank[HEAD]
    return targets


def choose_partners(position: int, ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the nodes that the node at `position` in `ranks` tests: both neighbours and the node across.

    Of 8 nodes, node 0 tests the nodes 1, 7 and 4. In this way no node gets connections from many others.
    """
    partners: list[int] = []
    for step in (1, -1, len(ranks) // 2):
        rank = ranks[(position + step) % len(ranks)]
        if rank != ranks[position] and rank not in partners:
            partners.append(rank)
    return tuple(partners)


def run_request(request: ProbeRequest, open_port: OpenPort) -> ProbeReport:
    """Test the partners that the head has named, and return the report for the head."""
    failures = tuple(probe_targets(dict(request.targets)))
    return ProbeReport(failures=failures, is_crowded=open_port.is_crowded())


def probe_targets(targets: Mapping[int, ProbePort]) -> list[ProbeFailure]:
    """Test all `targets` at once, each in a thread, and return the failed tests.

    Parameters
    ----------
    targets : the ports to test, by the ranks of their nodes.
    """
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
    """Connect to the node `target` and send it all bursts. Return the failure, or None if all have arrived.

    A burst is a number of bytes that is sent at once. The next one is sent after it has arrived. If small
    bursts arrive and large ones do not, the network drops large packets.
    """
    size = arrived = segment = 0  # a failure with the size 0 means that there was no connection
    try:
        with socket.socket(_family(offer.address)) as sock:
            sock.settimeout(max(TICK_S, min(STEP_S, deadline - time.monotonic())))
            sock.connect((offer.address, offer.port))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            segment = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
            for size in SIZES:
                sock.sendall(bytes(size))
                _wait_for_arrival(sock, min(deadline, time.monotonic() + STEP_S))
                arrived = size
    except OSError as error:
        reason = error.strerror or str(error)
        if isinstance(error, TimeoutError):
            reason = f"no answer within {STEP_S:g} s"
        return ProbeFailure(
            target=target,
            size=size,
            arrived=arrived,
            packet=min(size, segment) + _headers_bytes(offer.address),
            reason=reason,
        )
    return None


def _wait_for_arrival(sock: socket.socket, deadline: float) -> None:
    """Wait until the kernel of the other node has acknowledged every byte; its process need not read them.

    Raises
    ------
    TimeoutError : the deadline is over. OSError : the connection has failed.
    """
    while True:
        error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        try:
            # Linux calls it SIOCOUTQ (linux/sockios.h): the bytes that are not acknowledged, as a C int.
            (unsent,) = struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))
        except OSError:  # this kernel does not tell
            return
        if unsent == 0:
            return
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(TICK_S)


def _headers_bytes(address: str) -> int:
    """Return the size of the headers of IP and of TCP, with the time stamps that Linux adds."""
    return 72 if ":" in address else 52


def network_error(
    failures: Sequence[PairFailure], offers: Mapping[int, ProbePort | None], name: Callable[[int], str]
) -> NoPlan:
    """Return the error about one failed pair of nodes, with the likely cause and the command to run.

    The error stays short, below the smallest packets: the other nodes have to receive it over the very
    network that failed.
    """
    # The smallest burst that failed, and of these the first pair of nodes.
    sender, failure = min(failures, key=lambda pair: (pair.failure.size, pair.sender, pair.failure.target))
    sender_offer, offer = offers[sender], offers[failure.target]
    assert sender_offer and offer  # noqa: S101, PT018 - only nodes with an offer take part
    sender_name, target_name = name(sender), name(failure.target)
    hint = _firewall_hint(sender_offer, offer, target_name)
    if failure.size > SIZES[0]:
        problem = (
            f"{sender_name} cannot send {failure.size} B at once to {target_name}: {failure.arrived} B "
            f"arrive, {failure.size} B do not"
        )
        hint = _mtu_hint(failure, offer)
    elif failure.size:
        problem = (
            f"{sender_name} connects to {target_name}, but port {offer.port} gets no data: {failure.reason}"
        )
    else:
        problem = f"{sender_name} cannot connect to {target_name} on port {offer.port}: {failure.reason}"
    if len(failures) > 1:
        problem += f" (other failing pairs of nodes: {len(failures) - 1})"
    return NoPlan(
        problem,
        where=f"{offer.address}:{offer.port}",
        hint=f"{hint}. To start without this test: --no-network-test",
    )


def _mtu_hint(failure: ProbeFailure, offer: ProbePort) -> str:
    """Return what to do about a network that carries only small packets."""
    headers = _headers_bytes(offer.address)
    # Ping has ICMP's 8 bytes in place of TCP's 32, so 24 more are left for its payload.
    payload = failure.packet - headers + 24
    # The MTU in the hint is the largest burst that has arrived, with its headers.
    return (
        f"a path MTU black hole: a switch or tunnel drops packets of {failure.packet} B without a report. "
        f"To see it: ping -c 3 -M do -s {payload} {offer.address}. Raise the MTU of the path, or lower "
        f"it on all nodes: sudo ip link set dev {offer.interface} mtu {failure.arrived + headers}"
    )


def _firewall_hint(sender: ProbePort, target: ProbePort, target_name: str) -> str:
    """Return what to do about a node to which another node cannot connect."""
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

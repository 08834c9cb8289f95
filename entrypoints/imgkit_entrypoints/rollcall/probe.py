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
from collections.abc import Callable, Iterator, Mapping, Sequence

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


Failure = tuple[int, ProbeFailure]
"""The node that could not send, and how."""


class OpenPort:
    """The port that a node opens for the test; `offer` is None where it takes no part."""

    def __init__(self, offer: ProbePort | None, listener: socket.socket) -> None:
        self.offer = offer
        self._listener = listener
        self._accepted: list[socket.socket] = []

    def is_crowded(self, limit: int = PARTNERS) -> bool:
        """Return whether more than `limit` have connected so far: a test of this port then proves nothing.

        Anybody on the network may connect. Enough connections of a stranger fill the kernel's queue, so that
        those of other nodes fail.
        """
        self.accept_callers(limit)
        return len(self._accepted) > limit

    def accept_callers(self, limit: int) -> None:
        """Accept the connections that wait, until there are more than `limit` in all."""
        with contextlib.suppress(OSError):
            while len(self._accepted) <= limit:
                # Stays open: a partner may still be sending.
                sock, _ = self._listener.accept()
                self._accepted.append(sock)

    def close(self) -> None:
        """Close everything."""
        for sock in (self._listener, *self._accepted):
            sock.close()


@contextlib.contextmanager
def open_port(address: str, interface: str) -> Iterator[OpenPort]:
    """Open this node's port for the time of the context. Without an address of its own, it opens none."""
    listener = socket.socket(_family(address))
    offer = None
    listener.setblocking(False)
    with contextlib.suppress(OSError):
        # The kernel keeps what a stranger sends here, since nobody reads it.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        if address:
            listener.bind((address, 0))
            listener.listen(ports.BACKLOG)  # of a large run, many may connect to the head
            offer = ProbePort(address=address, interface=interface, port=listener.getsockname()[1])
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
) -> tuple[list[Failure], list[int]]:
    """Let every node test its partners, and return what failed, and which nodes' ports are crowded.

    This is the head's side. A node that ends meanwhile proves nothing about the network, and neither does one
    that never reports, or one with a crowded port. With `all_reach_head`, every node tests the head as well,
    and has to report success.
    """
    targets = _choose_targets(offers)
    waiting = targets.keys() - {HEAD}
    max_callers = PARTNERS
    head_offer = offers.get(HEAD)
    if all_reach_head and head_offer:
        max_callers += len(waiting)
        for rank in waiting:
            targets[rank][HEAD] = head_offer
    for rank in waiting:
        server.send(rank, ProbeRequest(targets=tuple(targets[rank].items())))
    # The head tests its own partners while the others test theirs.
    deadline = time.monotonic() + LIMIT_S + ANSWER_S
    failures: list[Failure] = [(HEAD, failure) for failure in probe_targets(targets.get(HEAD, {}))]
    crowded: list[int] = []
    while waiting and time.monotonic() < deadline:
        for rank, message in server.receive(deadline - time.monotonic()):
            if not isinstance(message, ProbeReport) or rank not in waiting:
                continue
            waiting.remove(rank)
            if message.is_crowded:
                crowded.append(rank)
            for failure in message.failures:
                if failure.target in targets[rank]:
                    failures.append((rank, failure))
        waiting -= server.lost.keys()
        head_port.accept_callers(max_callers)  # the kernel's queue may hold only 128
    if all_reach_head:
        silence = ProbeFailure(target=HEAD, size=0, arrived=0, packet=0, reason="no report of this test")
        failures += [(rank, silence) for rank in waiting if HEAD in targets[rank]]
    # A node that has ended in the test is lost a moment later, and then explains a failure.
    settle_end = time.monotonic() + SETTLE_S
    while failures and time.monotonic() < settle_end:
        server.receive(settle_end - time.monotonic())
    if head_port.is_crowded(max_callers) and not all_reach_head:
        crowded.append(HEAD)
    excluded = {*crowded, *server.lost}
    counted = []
    for rank, failure in failures:
        if rank not in excluded and failure.target not in excluded:
            counted.append((rank, failure))
    return counted, crowded


def _choose_targets(offers: Mapping[int, ProbePort | None]) -> dict[int, dict[int, ProbePort]]:
    """Return the ports that each node tests, by the ranks of both; nodes without a port take no part."""
    ports_by_rank = {rank: offer for rank, offer in sorted(offers.items()) if offer}
    ranks = tuple(ports_by_rank)
    targets = {}
    for position, rank in enumerate(ranks):
        targets[rank] = {partner: ports_by_rank[partner] for partner in choose_partners(position, ranks)}
    return targets


def choose_partners(position: int, ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the nodes that the one at `position` tests: its neighbours and the one across.

    No node hears from many.
    """
    chosen: list[int] = []
    for step in (1, -1, len(ranks) // 2):
        rank = ranks[(position + step) % len(ranks)]
        if rank != ranks[position] and rank not in chosen:
            chosen.append(rank)
    return tuple(chosen)


def run_request(request: ProbeRequest, open_port: OpenPort) -> ProbeReport:
    """Test the partners that the head has named, and return what failed."""
    failures = tuple(probe_targets(dict(request.targets)))
    return ProbeReport(failures=failures, is_crowded=open_port.is_crowded())


def probe_targets(targets: Mapping[int, ProbePort]) -> list[ProbeFailure]:
    """Test all `targets` at once, and return what failed."""
    failures: list[ProbeFailure] = []
    deadline = time.monotonic() + LIMIT_S

    def probe_port(target: int, offer: ProbePort) -> None:
        failure = _probe_port(target, offer, deadline)
        if failure and time.monotonic() < deadline:
            failures.append(failure)

    threads = [threading.Thread(target=probe_port, args=item) for item in targets.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


def _probe_port(target: int, offer: ProbePort, deadline: float) -> ProbeFailure | None:
    """Connect and send the bursts, each after the one before has arrived."""
    size = arrived = segment = 0
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
    """Wait until the other kernel has acknowledged every byte (SIOCOUTQ of linux/sockios.h)."""
    while True:
        error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        try:
            (unsent,) = struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))
        except OSError:
            # This kernel does not tell.
            return
        if unsent == 0:
            return
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(TICK_S)


def _headers_bytes(address: str) -> int:
    """Return the headers of IP and of TCP, with the time stamps that Linux adds."""
    return 72 if ":" in address else 52


def refusal(
    failures: Sequence[Failure], offers: Mapping[int, ProbePort | None], name: Callable[[int], str]
) -> NoPlan:
    """Return the error that names the first failed pair, the likely cause and the command.

    It stays below the smallest packets: the other nodes have to hear it over the very network that failed.
    """
    # The smallest burst that failed, and of those the first pair of nodes.
    sender, first = min(failures, key=lambda failure: (failure[1].size, failure[0], failure[1].target))
    source_offer = offers[sender]
    offer = offers[first.target]
    assert source_offer and offer  # noqa: S101, PT018 - only nodes with an offer take part
    source = name(sender)
    target = name(first.target)
    headers = _headers_bytes(offer.address)
    if first.size > SIZES[0]:
        # Ping has ICMP's 8 bytes in place of TCP's 32, so 24 more are left for its payload.
        payload = first.packet - headers + 24
        problem = (
            f"{source} cannot send {first.size} B at once to {target}: {first.arrived} B arrive, "
            f"{first.size} B do not"
        )
        hint = (
            f"a path MTU black hole: a switch or tunnel drops packets of {first.packet} B without a report. "
            f"To see it: ping -c 3 -M do -s {payload} {offer.address}. Raise the MTU of the path, or lower "
            f"it on all nodes: sudo ip link set dev {offer.interface} mtu {first.arrived + headers}"
        )
    else:
        problem = f"{source} cannot connect to {target} on port {offer.port}: {first.reason}"
        if first.size:
            problem = f"{source} connects to {target}, but port {offer.port} gets no data: {first.reason}"
        hint = (
            "NCCL and Gloo use the ports of /proc/sys/net/ipv4/ip_local_port_range, so a firewall must let "
            f"the nodes connect on all of them. On {target}: sudo ufw allow from {source_offer.address}. If "
            f"{offer.interface} is the wrong network, name another: NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME"
        )
        if source_offer.address == offer.address:
            hint = (
                f"both nodes have the address {offer.address}, which is that of a container's own network. "
                "Start the containers in the host's network (docker: --network host)"
            )
    if len(failures) > 1:
        problem += f" (other failing pairs of nodes: {len(failures) - 1})"
    return NoPlan(
        problem,
        where=f"{offer.address}:{offer.port}",
        hint=f"{hint}. To start without this test: --no-network-test",
    )

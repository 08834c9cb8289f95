"""The network between a few pairs of nodes, tested in the roll call before torchrun depends on it.

Each node opens two ports on the address that carries its data; the kernel chooses them, as it does for NCCL
and Gloo. Up to three other nodes connect there and send bursts of growing size. The kernels answer, and no
process does: a busy node delays nothing, and an unanswered burst means lost packets.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct
import termios
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace

from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.rollcall.head_roll import Links
from imgkit_entrypoints.rollcall.messages import Failure, Offer, Probed, ProbeOrder

SIZES = (64, 1200, 1400, 2000, 4000, 9000)
"""Bytes of the bursts, on both sides of the packet sizes of tunnels, Ethernet and jumbo frames."""
PORTS = 2
PARTNERS = 3
"""Most nodes that connect to one node."""
BUFFER_BYTES = 65536
"""Room for the largest burst several times. The kernel's own limit is megabytes for each connection."""
STEP_S = 3.5
"""Limit for one connection or one burst. Linux repeats a lost SYN after 1 and 3 seconds."""
LIMIT_S = 6.0
"""Limit for all tests of a node; an unfinished test counts as passed."""
ANSWER_S = 2.0
"""Further time for the nodes' reports to reach the head."""
SETTLE_S = 0.2
"""Time in which a node that has just ended is noticed."""
TICK_S = 0.001


class OpenPorts:
    """The ports that a node opens for the test; closed ones where it takes no part."""

    def __init__(self, offer: Offer | None, listeners: Sequence[socket.socket]) -> None:
        self.offer = offer
        self._listeners = listeners
        self._accepted: list[socket.socket] = []

    def crowded(self) -> bool:
        """Return whether strangers have connected as well: a test of these ports then proves nothing.

        Only the `PARTNERS` connect here. Enough connections of a stranger, which anybody on the network
        may open, fill the kernel's queue, so that the partners' fail.
        """
        for listener in self._listeners:
            for _ in range(PARTNERS + 1):
                with contextlib.suppress(OSError):
                    self._accepted.append(listener.accept()[0])  # kept: a partner may still be sending
        return len(self._accepted) > PARTNERS * len(self._listeners)

    def close(self) -> None:
        """Close everything."""
        for one in (*self._listeners, *self._accepted):
            one.close()


@contextlib.contextmanager
def offering(address: str, interface: str) -> Iterator[OpenPorts]:
    """Open this node's ports for the time of the context; none without an address, or if it is not ours."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.ExitStack() as stack:
        listeners: list[socket.socket] = []
        with contextlib.suppress(OSError):
            for _ in range(PORTS if address else 0):
                listener = stack.enter_context(socket.socket(family))
                # The kernel keeps what a stranger sends here, since nobody reads it.
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
                listener.bind((address, 0))
                listener.listen()
                listener.setblocking(False)
                listeners.append(listener)
        ports = tuple(item.getsockname()[1] for item in listeners)
        offer = Offer(address=address, interface=interface, ports=ports) if ports else None
        with contextlib.closing(OpenPorts(offer, listeners)) as opened:
            yield opened


def between_all(
    offered: Mapping[int, Offer | None], links: Links, own: OpenPorts
) -> tuple[list[Failure], list[int]]:
    """Let every node test its partners, and return what failed, and which nodes' ports are crowded.

    The head's side. A node that ends meanwhile proves nothing about the network, and neither does one that
    never reports, or one with crowded ports.
    """
    offers = {rank: offer for rank, offer in sorted(offered.items()) if offer}
    ranks = tuple(offers)
    targets = {
        rank: {other: offers[other] for other in partners(place, ranks)} for place, rank in enumerate(ranks)
    }
    waited = {rank for rank in targets if rank}
    for rank in waited:
        links.send(rank, ProbeOrder(targets=tuple(targets[rank].items())))
    end = time.monotonic() + LIMIT_S + ANSWER_S
    found = list(attempt(0, targets.get(0, {})))
    crowded = []
    while waited and (left := end - time.monotonic()) > 0:
        turn = links.hear(left)
        for rank, message in turn.heard:
            if isinstance(message, Probed) and rank in waited:
                failures = (replace(one, source=rank) for one in message.failures)
                found += [one for one in failures if one.target in targets[rank]]
                crowded += [rank] if message.crowded else []
                waited.remove(rank)
        waited.difference_update(turn.gone)
    settled = time.monotonic() + SETTLE_S
    while found and (left := settled - time.monotonic()) > 0:
        links.hear(left)
    crowded += [0] if own.crowded() else []
    left_out = {*crowded, *(rank for rank, link in links.items() if link.why)}
    return [one for one in found if not left_out & {one.source, one.target}], crowded


def partners(place: int, ranks: Sequence[int]) -> tuple[int, ...]:
    """Nodes that the node at `place` tests: its neighbours and the one across. No node hears from many."""
    found = (ranks[(place + step) % len(ranks)] for step in (1, -1, len(ranks) // 2))
    return tuple(other for other in dict.fromkeys(found) if other != ranks[place])


def report(rank: int, order: ProbeOrder, own: OpenPorts) -> Probed:
    """Test the partners that the head has named, and return what failed."""
    return Probed(failures=attempt(rank, dict(order.targets)), crowded=own.crowded())


def attempt(rank: int, targets: Mapping[int, Offer]) -> tuple[Failure, ...]:
    """Test all `targets` at once from node `rank`, and return what failed."""
    running = [
        _steps(rank, target, offer.address, port, SIZES if position == 0 else SIZES[:1])
        for target, offer in targets.items()
        for position, port in enumerate(offer.ports)
    ]
    found: list[Failure] = []
    end = time.monotonic() + LIMIT_S
    while running and time.monotonic() < end:
        for one in list(running):
            try:
                next(one)
            except StopIteration as stop:
                running.remove(one)
                found += [stop.value] if stop.value else []
        time.sleep(TICK_S if running else 0)
    for one in running:
        one.close()
    return tuple(found)


_Steps = Generator[None, None, "Failure | None"]


def _steps(rank: int, target: int, address: str, port: int, sizes: Sequence[int]) -> _Steps:
    """Connect and send the bursts, each after the one before has arrived; yields while it has to wait."""
    size = arrived = segment = 0
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as connection:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if (error := connection.connect_ex((address, port))) not in (0, errno.EINPROGRESS):
                raise OSError(error, os.strerror(error))
            yield from _until(connection, _connected)
            segment = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
            for size in sizes:
                connection.send(bytes(size))
                yield from _until(connection, _answered)
                arrived = size
    except OSError as error:
        return Failure(
            source=rank,
            target=target,
            port=port,
            size=size,
            arrived=arrived,
            packet=min(size, segment) + _headers_bytes(address),
            why=error.strerror or str(error),
        )
    return None


def _headers_bytes(address: str) -> int:
    """Headers of IP and of TCP, with the time stamps that Linux adds."""
    return 72 if ":" in address else 52


def _until(connection: socket.socket, good: Callable[[socket.socket], bool]) -> Iterator[None]:
    end = time.monotonic() + STEP_S
    while True:
        if error := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(error, os.strerror(error))
        if good(connection):
            return
        if time.monotonic() > end:
            raise TimeoutError(f"no answer within {STEP_S:g} s")
        yield


def _connected(connection: socket.socket) -> bool:
    try:
        connection.getpeername()
    except OSError:
        return False
    return True


def _answered(connection: socket.socket) -> bool:
    """Return whether the other kernel has acknowledged every byte (SIOCOUTQ of linux/sockios.h)."""
    try:
        (left,) = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))
    except OSError:
        return True  # this kernel does not tell
    return bool(left == 0)


def refusal(
    failures: Sequence[Failure], offers: Mapping[int, Offer | None], name: Callable[[int], str]
) -> NoPlan:
    """Return the error that names the first failed pair, the likely cause and the command.

    It stays below the smallest packets: the other nodes have to hear it over the very network that failed.
    """
    first = min(failures, key=lambda one: (one.size, one.source, one.target))
    caller, offer = offers[first.source], offers[first.target]
    assert caller is not None and offer is not None  # noqa: S101, PT018 - only nodes with an offer take part
    source, target = name(first.source), name(first.target)
    others = len({(one.source, one.target) for one in failures}) - 1
    more = f" (other failing pairs of nodes: {others})" if others else ""
    where = f"{offer.address}:{first.port}"
    again = "To start without this test: --no-network-test"
    if first.size > SIZES[0]:
        headers = _headers_bytes(offer.address)
        payload = first.packet - headers + 24  # ping has ICMP's 8 bytes in place of TCP's 32
        return NoPlan(
            f"{source} cannot send {first.size} B at once to {target}: {first.arrived} B arrive, "
            f"{first.size} B do not{more}",
            where=where,
            hint=f"a path MTU black hole: a switch or tunnel drops packets of {first.packet} B without a "
            f"report. To see it: ping -c 3 -M do -s {payload} {offer.address}. Raise the MTU of the path, or "
            f"lower it on all nodes: sudo ip link set dev {offer.interface} mtu {first.arrived + headers}. "
            f"{again}",
        )
    same = {one.port for one in failures if (one.source, one.target) == (first.source, first.target)}
    ports = " and ".join(map(str, sorted(same)))
    what = f"{source} cannot connect to {target} on port {ports}: {first.why}{more}"
    if first.size:
        what = f"{source} connects to {target}, but port {ports} gets no data: {first.why}{more}"
    if caller.address == offer.address:
        hint = (
            f"both nodes have the address {offer.address}, which is that of a container's own network. Start "
            "the containers in the host's network (docker: --network host)"
        )
    else:
        hint = (
            "NCCL and Gloo use the ports of /proc/sys/net/ipv4/ip_local_port_range, so a firewall must let "
            f"the nodes connect on all of them. On {target}: sudo ufw allow from {caller.address}. If "
            f"{offer.interface} is the wrong network, name another: NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME"
        )
    return NoPlan(what, where=where, hint=f"{hint}. {again}")

"""The session after the roll call: heartbeats, reports and orders between the node agents.

The head (`HeadSession`) has a connection to each of the others (`MemberSession`), which know nobody else. It
knows nodes by their number in the roll call, which never changes; the head is 0.
"""

from __future__ import annotations

import dataclasses
import secrets
import select
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from imgkit_entrypoints.rollcall import messages, ports
from imgkit_entrypoints.rollcall.connection import Connection
from imgkit_entrypoints.rollcall.messages import (
    AttemptEnded,
    AttemptStart,
    Event,
    Message,
    NodeInfo,
    Order,
    Positions,
)
from imgkit_entrypoints.rollcall.server import Server

if TYPE_CHECKING:
    from imgkit_entrypoints.schedulers.placement import Placement

# Longest time between two messages of a node.
BEAT_S = 5.0
# Silence after which a node counts as lost.
LOST_AFTER_S = 30.0
# Time in which the other end can read the last messages.
LINGER_S = 2.0
# Time that messages wait for more where `MANY` nodes beat: to wake costs more than to read a message.
READ_PAUSE_S = 0.25
MANY = 1000
# The same among strangers, whose flood must not take the processors of the workers.
STRANGERS_PAUSE_S = 0.2
# Looks at all nodes in the time of a heartbeat, so that one is late by a fifth of that at most.
LOOKS_PER_BEAT = 5


def beat_s(lost_after_s: float) -> float:
    """Return the time between two heartbeats where a node counts as lost after `lost_after_s` seconds."""
    return min(BEAT_S, lost_after_s / 4)


def node_name(placement: Placement, rank: int, host: str = "") -> str:
    """Return a node as users know it, counted from 1: "node 2 of 2 (as07r3b13)"."""
    if not host and rank < len(placement.hosts):
        host = placement.hosts[rank]
    if not host and rank == 0:
        host = placement.head
    name = f"node {rank + 1} of {placement.nnodes}"
    return f"{name} ({host})" if host else name


class Readable(Protocol):
    """Anything with a descriptor to wait for."""

    def fileno(self) -> int:
        """Return the descriptor, or a negative number if it is closed."""


def wait(sources: Iterable[Readable], seconds: float) -> list[Readable]:
    """Wait up to `seconds` until one of `sources` has something to read, and return those that have."""
    # select.select would end at descriptor 1023, and an epoll costs more for a few.
    poll = select.poll()
    by_descriptor = {source.fileno(): source for source in sources if source.fileno() >= 0}
    for descriptor in by_descriptor:
        poll.register(descriptor, select.POLLIN)
    return [by_descriptor[descriptor] for descriptor, _ in poll.poll(max(0.0, seconds) * 1000)]


class _Session:
    """What the sessions of the head and of the other nodes have in common."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        """The node's place in the run that has started: without the nodes that did not join."""
        self.host_index = 0
        """Number of this node agent among those of its host; a second one is rare."""
        self.lost_after_s = LOST_AFTER_S
        """Silence after which a node counts as lost."""
        self.positions: Positions | None = None
        """Positions of this node's workers (launch/watchdog.py); every heartbeat carries them."""
        self.run_positions: Positions | None = None
        """Positions of the workers of all nodes, as far as heartbeats have brought them."""
        self.phase = messages.STARTING
        """How far torchrun of this node is (`messages.PHASES`); a change goes to the head at once."""
        self._hosts: Mapping[int, str] = {}

    def node_name(self, rank: int, host: str = "") -> str:
        """Return a node as users know it."""
        return node_name(self.placement, rank, host or self._hosts.get(rank, ""))


class ReportedFailure(NamedTuple):
    """A failed worker that a node has reported to the head."""

    at: float
    """Time of the failure on the head's monotonic clock."""
    number: int
    """Number of the node."""
    failure: messages.RankFailure


class HeadSession(_Session):
    """The session of the head, also of the only node of a run: it starts attempts and hears how they end.

    Parameters
    ----------
    port : torchrun's port, free on the head when it was handed out.
    server : it listens to the end, or a command started twice on a host would begin a second run.
    nodes : what each node has said of itself, by number.
    """

    def __init__(
        self,
        placement: Placement,
        port: int,
        warnings: Sequence[str] = (),
        server: Server | None = None,
        nodes: Mapping[int, NodeInfo] | None = None,
    ) -> None:
        super().__init__(placement)
        self._nodes = nodes or {}
        self._hosts = {number: node.host for number, node in self._nodes.items()}
        self.port = port
        self.warnings = tuple(warnings)
        self.attempt = 1
        """Reports of another attempt do not count."""
        self.reports: dict[int, AttemptEnded] = {}
        """Nodes on which the attempt is over."""
        self.measurements: dict[int, messages.MeasureResult] = {}
        """What each node has measured last."""
        self.gpu_uses: dict[int, messages.GpuUse] = {}
        """How much the GPUs of each node were used until now."""
        self.failures: list[ReportedFailure] = []
        """Failed workers of this attempt."""
        self.previous_failures: list[ReportedFailure] = []
        """Failed workers of the attempt before."""
        self._server = server or Server()
        self.lost: Mapping[int, str] = self._server.lost
        """Nodes that are lost, and why."""
        self._token = secrets.token_hex(4)
        self._members: Collection[int] = range(placement.nnodes)
        self._events: list[Event] = []
        self._has_news = False
        """A node has reported the end of its attempt or what it has measured, or it is lost."""
        self._phases: dict[int, str] = {}
        self._positions: dict[int, Positions] = {}
        self._stopping: set[tuple[int, bool]] = set()
        """Nodes that were asked to stop, each with whether for a requeue."""
        self._next_read = self._next_beat = time.monotonic()
        self._read_pause_s = READ_PAUSE_S * min(1.0, placement.nnodes / MANY)

    @property
    def alive(self) -> tuple[int, ...]:
        """Return the numbers of the nodes that are not lost, in order."""
        return tuple(number for number in range(self.placement.nnodes) if number not in self.lost)

    @property
    def phases(self) -> Mapping[int, str]:
        """Return how far torchrun is on each node of this attempt, by number."""
        phases = {**self._phases, 0: self.phase}
        return {number: phases.get(number, messages.STARTING) for number in self._members}

    def host(self, number: int) -> str:
        """Return the name of a node's host, or an empty text where it is not known."""
        return self._hosts.get(number, "")

    def wait(self, sources: Collection[Readable], seconds: float) -> None:
        """Wait up to `seconds` until one of `sources` has something to read or an event may be there."""
        deadline = time.monotonic() + seconds
        while not self._events and not self._has_news:
            ready = self._wait_once(sources, deadline)
            if self._server in ready or time.monotonic() >= self._next_beat:
                self._receive_messages()
            if any(source in ready for source in sources) or time.monotonic() >= deadline:
                return

    def _wait_once(self, sources: Collection[Readable], deadline: float) -> list[Readable]:
        """Wait for `sources` and the other nodes until the next heartbeat. Return what has something to read.

        Until `_next_read`, the other nodes are left out. Their messages wait, so that one read takes many.
        """
        now = time.monotonic()
        wake_up = min(deadline, self._next_beat)
        if now < self._next_read:
            return wait(sources, min(wake_up, self._next_read) - now)
        return wait([*sources, self._server], wake_up - now)

    def poll(self) -> list[Event]:
        """Read messages, send heartbeats, and return the events since the last call.

        This never blocks, and has to be called about once a second.
        """
        self._receive_messages()
        events, self._events = self._events, []
        self._has_news = False
        return events

    def report(self, message: Message) -> None:
        """Handle a report of the head's own agent in the same way as the reports of other nodes."""
        self._handle(0, message)

    def send(self, number: int, order: Order) -> None:
        """Send an order to one node, if it is not lost."""
        if number == 0:
            self._events.append(order)
        else:
            self._server.send(number, order)

    def send_all(self, order: Order) -> None:
        """Send an order to all nodes, the head included."""
        self._server.send_all(order)
        self._events.append(order)

    def start_attempt(self, attempt: int, ranks: Mapping[int, int]) -> None:
        """Send all nodes the order to start an attempt: one start of the workers on all nodes.

        Nodes that take no part get the order too, without a node rank: they wait as spares.

        Parameters
        ----------
        ranks : the node ranks of the nodes that take part, by number.

        Raises
        ------
        NoPlan : no port is free.
        """
        if attempt > 1:
            self.port = ports.next_free(self.port)  # workers of the attempt before may still use its port
        self._forget_attempt()
        self.attempt = attempt
        self._members = tuple(ranks)
        order = AttemptStart(
            attempt=attempt,
            nnodes=len(ranks),
            node_rank=None,
            port=self.port,
            second_port=ports.next_free(self.port),
            head=self.placement.head,
            world_size=sum(self._nodes[number].nproc for number in ranks if number in self._nodes),
            token=self._token,
        )
        for number in self.alive:
            self.send(number, dataclasses.replace(order, node_rank=ranks.get(number)))

    def _forget_attempt(self) -> None:
        """Remove the reports of an attempt that has ended, so that they do not count in the next one."""
        self.previous_failures, self.failures = self.failures, []
        self.reports = {}
        self._phases = {}
        self._positions = {}
        self.run_positions = None

    def close(self) -> None:
        """Close all connections. The other nodes have `LINGER_S` seconds to read the last message."""
        self._server.close(LINGER_S)

    def _receive_messages(self) -> None:
        """React to the messages that have arrived, and send heartbeats (signs of life) when it is time."""
        lost_before = len(self.lost)
        for number, message in self._server.receive():
            self._handle(number, message)
        while self._server.joining:
            self._refuse_late_node()
        now = time.monotonic()
        self._next_read = now + self._read_pause_s
        # Connections that may not belong to the run must not wake this process all the time.
        if self._server.has_strangers:
            self._next_read = now + STRANGERS_PAUSE_S
        if now >= self._next_beat:
            self._next_beat = now + beat_s(self.lost_after_s) / LOOKS_PER_BEAT
            self._send_heartbeats()
        self._has_news |= len(self.lost) > lost_before

    def _send_heartbeats(self) -> None:
        """Send heartbeats with the positions (steps) of the slowest and of the furthest worker of the run."""
        positions = list(self._positions.values())
        if self.positions:
            positions.append(self.positions)
        self.run_positions = None
        if positions:
            slowest, furthest = zip(*positions, strict=True)
            self.run_positions = min(slowest), max(furthest)
        heartbeat = messages.Heartbeat(positions=self.run_positions)
        self._server.send_heartbeats(
            heartbeat, beat_s=beat_s(self.lost_after_s), lost_after_s=self.lost_after_s
        )

    def _handle(self, number: int, message: Message) -> None:
        """Handle a node's message.

        Of each kind of message, one of each node is kept. Otherwise a node could fill the head's memory.
        """
        match message:
            case messages.Heartbeat():
                self._phases[number] = message.phase
                self._positions.pop(number, None)
                if message.positions:
                    self._positions[number] = message.positions
            case messages.MeasureResult():
                self.measurements[number] = message
                self._has_news = True
            case messages.GpuUse():
                self.gpu_uses[number] = message
            case AttemptEnded():
                self._handle_attempt_end(number, message)
            case messages.StopOrder():
                self._forward_stop(number, message)

    def _handle_attempt_end(self, number: int, report: AttemptEnded) -> None:
        """Keep a node's report about the end of the current attempt, and the failure in it.

        A report about an earlier attempt, and a second report of the same node, do not count.
        """
        if report.attempt != self.attempt or number in self.reports:
            return
        self.reports[number] = report
        self._has_news = True
        if report.failure is not None:
            # The clocks of two nodes differ, so the report says how long ago the failure was.
            failed_at = time.monotonic() - report.failure.age_ms / 1000
            self.failures.append(ReportedFailure(failed_at, number, report.failure))

    def _forward_stop(self, number: int, message: messages.StopOrder) -> None:
        """Send the stop of a node to all other nodes. The node itself has been stopped by its own agent."""
        if (number, message.requeue) in self._stopping:
            return
        self._stopping.add((number, message.requeue))
        order = dataclasses.replace(message, node=self.node_name(number))
        self._server.send_all(order, except_rank=number)
        if number != 0:
            self._events.append(order)

    def _refuse_late_node(self) -> None:
        """Refuse a node that asks to join after the start of the run, when the nodes are numbered already."""
        if self.placement.size:
            problem = f"the run has started with {self.placement.nnodes} nodes, and no node can join it later"
            hint = "start it with the others: the head waits 30 s for one more than it has"
        else:
            problem = "all nodes of this run have joined already"
            hint = "it may be started twice on this host: pbsdsh starts it once per line of the node file"
        peer, _ = self._server.joining.pop()
        self._server.refuse(peer, messages.Refused(what=problem, where=self.host(0), hint=hint))


class MemberSession(_Session):
    """The session of any node but the head. Its methods are like those of `HeadSession`.

    Parameters
    ----------
    lines : messages that the head has sent after the start of the run, as lines of JSON.
    """

    def __init__(
        self,
        placement: Placement,
        connection: Connection,
        lines: Sequence[bytes] = (),
        *,
        host_index: int = 0,
    ) -> None:
        super().__init__(placement)
        self.host_index = host_index
        self._connection = connection
        self._lines = list(lines)
        self._is_over = False
        self._reported_phase = messages.STARTING

    def wait(self, sources: Collection[Readable], seconds: float) -> None:
        """Wait up to `seconds` until one of `sources` has something to read or an event may be there."""
        if self._is_over:
            wait(sources, seconds)
        elif not self._lines:
            wait([*sources, self._connection], seconds)

    def poll(self) -> list[Event]:
        """Read messages, send a heartbeat when it is time, and return the events since the last call.

        If the connection is over, the last event is `HeadLost`, and later calls return none.
        """
        if self._is_over:
            return []
        self._lines += self._connection.receive_lines()
        events = self._read_events()
        self._send_heartbeat()
        loss_reason = self._loss_reason()
        if loss_reason and not self._is_over:
            self._is_over = True
            events.append(messages.HeadLost(node=self.node_name(0), reason=loss_reason))
        if self._is_over:
            self._connection.close()
        return events

    def _send_heartbeat(self) -> None:
        """Send the head a heartbeat if it is time or torchrun's phase has changed."""
        is_due = time.monotonic() - self._connection.last_sent >= beat_s(self.lost_after_s)
        if is_due or self.phase != self._reported_phase:
            self._reported_phase = self.phase
            self._connection.send(messages.Heartbeat(positions=self.positions, phase=self.phase))

    def _loss_reason(self) -> str:
        """Return why the head counts as lost. Empty while it does not."""
        if self._connection.error:
            return self._connection.error
        if time.monotonic() - self._connection.last_received > self.lost_after_s:
            return f"no heartbeat for {self.lost_after_s:g} s"
        return ""

    def report(self, message: Message) -> None:
        """Send the head a report of this node's agent."""
        self._connection.send(message)

    def close(self) -> None:
        """Close the connection. The head has `LINGER_S` seconds to read the last message."""
        if not self._is_over:
            self._connection.close(LINGER_S)

    def _read_events(self) -> list[Event]:
        """Return the head's orders in the lines that have arrived.

        The order that ends the preflight (the test of the nodes before the first attempt) is the last one
        that a call returns. Later lines wait for the next call.
        """
        events: list[Event] = []
        while self._lines:
            message = self._connection.decode(self._lines.pop(0))
            if message is None:
                break
            if isinstance(message, messages.Heartbeat):
                self.run_positions = message.positions
            elif isinstance(message, Order):
                events.append(message)
            if isinstance(message, messages.EndRun):
                self._is_over = True
            if isinstance(message, messages.PreflightEnd):
                break  # the preflight takes only its own events, and what follows belongs to the attempts
        return events


Session = HeadSession | MemberSession

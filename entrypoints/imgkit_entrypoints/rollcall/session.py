"""The session of a node after the roll call: heartbeats, reports and orders between the node agents.

The head, which is node 0, has a connection to every other node (`HeadSession`). The other nodes are only
connected to the head (`MemberSession`). The head identifies nodes by their numbers from the roll call, which
never change.
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
from imgkit_entrypoints.rollcall.server import HeadConnection, Server

if TYPE_CHECKING:
    from imgkit_entrypoints.schedulers.placement import Placement

# Longest time in seconds between two messages of a node.
BEAT_S = 5.0
# Seconds without a message after which a node is lost.
LOST_AFTER_S = 30.0
# Seconds in which the other end can read the last messages.
LINGER_S = 2.0
# Seconds for which the head lets messages collect before it reads them, in a run with `MANY` or more nodes.
# Waking the process costs more than reading a message. With fewer nodes, the time is shorter in proportion.
READ_PAUSE_S = 0.25
MANY = 1000
# The same time while there are strangers, which may not belong to the run. A flood of their connections must
# not take processor time from the workers.
STRANGERS_PAUSE_S = 0.2
# Number of checks of all nodes in the time between two heartbeats. A heartbeat is late by at most a fifth of
# that time.
LOOKS_PER_BEAT = 5


def beat_s(lost_after_s: float) -> float:
    """Return the seconds between two heartbeats of a node.

    After `lost_after_s` seconds without a heartbeat, a node is lost. So several heartbeats must fit into that
    time.
    """
    return min(BEAT_S, lost_after_s / 4)


def node_name(placement: Placement, rank: int, host: str = "") -> str:
    """Return the name of a node as users know it, counted from 1, such as "node 2 of 2 (as07r3b13)"."""
    if not host and rank < len(placement.hosts):
        host = placement.hosts[rank]
    if not host and rank == 0:
        host = placement.head
    name = f"node {rank + 1} of {placement.nnodes}"
    return f"{name} ({host})" if host else name


class Readable(Protocol):
    """Anything with a descriptor for which `wait_readable` can wait."""

    def fileno(self) -> int:
        """Return the descriptor, or a negative number if it is closed."""


def wait_readable(sources: Iterable[Readable], seconds: float) -> list[Readable]:
    """Wait up to `seconds` until one of `sources` has data to read, and return the sources that have."""
    # select.select supports descriptors only up to 1023, and epoll costs more for a few descriptors.
    poll = select.poll()
    by_descriptor = {source.fileno(): source for source in sources if source.fileno() >= 0}
    for descriptor in by_descriptor:
        poll.register(descriptor, select.POLLIN)
    return [by_descriptor[descriptor] for descriptor, _ in poll.poll(max(0.0, seconds) * 1000)]


class _Session:
    """The common part of the sessions of the head and of the other nodes."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        """The nodes of the run that have joined, and the rank of this node among them."""
        self.host_index = 0
        """Index of this node agent among those on the same host. It is 0 if there is only one."""
        self.lost_after_s = LOST_AFTER_S
        """Seconds without a message after which a node is lost."""
        self.positions: Positions | None = None
        """Positions of this node's slowest and furthest worker (launch/watchdog.py), sent in heartbeats."""
        self.run_positions: Positions | None = None
        """Positions of the slowest and the furthest worker of the run, as known from heartbeats."""
        self.phase = messages.STARTING
        """Phase of torchrun on this node (`messages.PHASES`). A change is sent to the head at once."""
        self._hosts: Mapping[int, str] = {}

    def node_name(self, rank: int, host: str = "") -> str:
        """Return the name of a node as users know it, such as "node 2 of 2 (as07r3b13)"."""
        return node_name(self.placement, rank, host or self._hosts.get(rank, ""))


class ReportedFailure(NamedTuple):
    """A failed worker that a node has reported to the head."""

    at: float
    """Time of the failure on the head's monotonic clock."""
    number: int
    """Number of the node from the roll call."""
    failure: messages.RankFailure


class HeadSession(_Session):
    """The session of the head (node 0), which starts attempts and receives the reports about their ends.

    The only node of a run has such a session as well.

    Parameters
    ----------
    placement : the nodes that have joined.
    port : torchrun's port, which was free when it was chosen.
    warnings : the warnings from the roll call.
    server : the connections to the other nodes. It listens until the end. Otherwise, if the command was
        started twice on a host, the second one would begin another run.
    nodes : the descriptions that the nodes have sent when they joined, by number.
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
        """Number of the current attempt. Reports of other attempts are ignored."""
        self.reports: dict[int, AttemptEnded] = {}
        """Reports of the nodes on which the attempt is over, by number."""
        self.measurements: dict[int, messages.MeasureResult] = {}
        """The latest measurement of each node, by number."""
        self.gpu_uses: dict[int, messages.GpuUse] = {}
        """GPU use of each node so far, by number."""
        self.failures: list[ReportedFailure] = []
        """Failed workers of the current attempt."""
        self.previous_failures: list[ReportedFailure] = []
        """Failed workers of the previous attempt."""
        self._server = server or Server()
        self.lost: Mapping[int, str] = self._server.lost
        """Reason for each lost node, by number."""
        self._token = secrets.token_hex(4)
        self._training_numbers: Collection[int] = range(placement.nnodes)
        self._events: list[Event] = []
        self._has_new_reports = False
        """True if a node has reported the end of its attempt or a measurement, or was lost, since `poll`."""
        self._phases: dict[int, str] = {}
        self._positions_of_others: dict[int, Positions] = {}
        """Positions of the workers of each other node, by number, from its latest heartbeat."""
        self._forwarded_stops: set[tuple[int, bool]] = set()
        """Stop orders that were forwarded, as pairs of the node and of `requeue`."""
        self._next_read_at = self._next_beat_check_at = time.monotonic()

    @property
    def alive(self) -> tuple[int, ...]:
        """Return the numbers of the nodes that are not lost, in order."""
        return tuple(number for number in range(self.placement.nnodes) if number not in self.lost)

    @property
    def phases(self) -> Mapping[int, str]:
        """Return the phase of torchrun on each node of the current attempt, by number."""
        phases = {**self._phases, 0: self.phase}
        return {number: phases.get(number, messages.STARTING) for number in self._training_numbers}

    def host(self, number: int) -> str:
        """Return the host name of a node, or "" if it is unknown."""
        return self._hosts.get(number, "")

    def wait(self, sources: Collection[Readable], seconds: float) -> None:
        """Wait up to `seconds` until one of `sources` has data to read, or until there may be an event."""
        deadline = time.monotonic() + seconds
        # With an event or a new report, the caller has work to do, so there is no wait.
        while not self._events and not self._has_new_reports:
            ready = self._wait_once(sources, deadline)
            are_heartbeats_due = time.monotonic() >= self._next_beat_check_at
            if self._server in ready or are_heartbeats_due:
                self._receive_messages()  # this may add events and reports, and sends heartbeats
            has_source_data = any(source in ready for source in sources)
            if has_source_data or time.monotonic() >= deadline:
                return

    def _wait_once(self, sources: Collection[Readable], deadline: float) -> list[Readable]:
        """Wait for data from `sources` and the other nodes, but only until the next heartbeat is due.

        Return the sources that have data to read. Until `_next_read_at`, which `_receive_messages` sets after
        each read, the other nodes are ignored. So their messages collect, and one read gets many of them.
        """
        now = time.monotonic()
        wake_up_at = min(deadline, self._next_beat_check_at)
        if now < self._next_read_at:
            return wait_readable(sources, min(wake_up_at, self._next_read_at) - now)
        return wait_readable([*sources, self._server], wake_up_at - now)

    def poll(self) -> list[Event]:
        """Read messages, send heartbeats, and return the events since the last call.

        This method never blocks. Call it about once a second.
        """
        self._receive_messages()
        events, self._events = self._events, []
        self._has_new_reports = False
        return events

    def report(self, message: Message) -> None:
        """Handle a report of the head's own agent in the same way as reports from other nodes."""
        self._handle(0, message)

    def send(self, number: int, order: Order) -> None:
        """Send an order to one node. If the node is lost, do nothing."""
        if number == 0:
            self._events.append(order)
        else:
            self._server.send(number, order)

    def send_all(self, order: Order) -> None:
        """Send an order to all nodes, including the head itself."""
        self._server.send_all(order)
        self._events.append(order)

    def start_attempt(self, attempt: int, ranks: Mapping[int, int]) -> None:
        """Order all nodes to start an attempt, which is one start of the workers on all nodes.

        Nodes that take no part also get the order, but without a node rank. They wait as spares, to replace
        lost nodes later.

        Parameters
        ----------
        ranks : the node ranks of the nodes that take part, by number.

        Raises
        ------
        NoPlan : no port is free.
        """
        if attempt > 1:
            # Workers of the previous attempt may still use the old port.
            self.port = ports.next_free(self.port)
        # Both come before the order is sent, so that reports about the new attempt are accepted and kept.
        self._forget_attempt()
        self.attempt = attempt
        self._training_numbers = tuple(ranks)
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
        """Remove the reports of an attempt that has ended, so that they do not affect the next attempt."""
        self.previous_failures, self.failures = self.failures, []
        self.reports = {}
        self._phases = {}
        self._positions_of_others = {}
        self.run_positions = None

    def close(self) -> None:
        """Close all connections. The other nodes have `LINGER_S` seconds to read the last messages."""
        self._server.close(LINGER_S)

    def _receive_messages(self) -> None:
        """Handle the messages that have arrived, and send heartbeats (signs of life) if they are due."""
        lost_before = len(self.lost)  # `receive` and `_send_heartbeats` add lost nodes to `lost`
        for number, message in self._server.receive():
            self._handle(number, message)
        while self._server.joining:
            peer, _ = self._server.joining.pop()
            self._refuse_late_node(peer)
        now = time.monotonic()
        self._next_read_at = now + self._choose_read_pause_s()
        if now >= self._next_beat_check_at:
            # A node gets a heartbeat only if it is due, so there are several checks in the time between two.
            self._next_beat_check_at = now + beat_s(self.lost_after_s) / LOOKS_PER_BEAT
            self._send_heartbeats()
        self._has_new_reports |= len(self.lost) > lost_before

    def _choose_read_pause_s(self) -> float:
        """Return for how many seconds messages collect before the next read.

        Waking this process costs more than reading a message, so the pause grows with the number of nodes.
        Strangers, which are connections that may not belong to the run, must not wake it all the time.
        """
        if self._server.has_strangers:
            return STRANGERS_PAUSE_S
        return READ_PAUSE_S * min(1.0, self.placement.nnodes / MANY)

    def _send_heartbeats(self) -> None:
        """Send heartbeats with the positions (steps) of the slowest and the furthest worker of the run."""
        node_positions = list(self._positions_of_others.values())
        if self.positions:  # those of the workers on this node
            node_positions.append(self.positions)
        self.run_positions = None
        if node_positions:
            slowest, furthest = zip(*node_positions, strict=True)
            self.run_positions = min(slowest), max(furthest)
        heartbeat = messages.Heartbeat(positions=self.run_positions)
        self._server.send_heartbeats(
            heartbeat, beat_s=beat_s(self.lost_after_s), lost_after_s=self.lost_after_s
        )

    def _handle(self, number: int, message: Message) -> None:
        """Handle a message from node `number`.

        Only the latest message of each kind is kept for each node. Otherwise, a node could fill the head's
        memory.
        """
        match message:
            case messages.Heartbeat():
                self._phases[number] = message.phase
                self._positions_of_others.pop(number, None)
                if message.positions:
                    self._positions_of_others[number] = message.positions
            case messages.MeasureResult():
                self.measurements[number] = message
                self._has_new_reports = True
            case messages.GpuUse():
                self.gpu_uses[number] = message
            case AttemptEnded():
                self._record_attempt_end(number, message)
            case messages.StopOrder():
                self._forward_stop(number, message)

    def _record_attempt_end(self, number: int, report: AttemptEnded) -> None:
        """Record a node's report about the end of the current attempt, and the failure in the report.

        Reports about earlier attempts are ignored, and so is a second report of the same node.
        """
        if report.attempt != self.attempt or number in self.reports:
            return
        self.reports[number] = report
        self._has_new_reports = True
        if report.failure is not None:
            # The clocks of two nodes differ, so the report says how long ago the failure was.
            failed_at = time.monotonic() - report.failure.age_ms / 1000
            self.failures.append(ReportedFailure(failed_at, number, report.failure))

    def _forward_stop(self, number: int, message: messages.StopOrder) -> None:
        """Forward a node's stop order to all other nodes. That node has already been stopped by its agent."""
        stop = (number, message.requeue)
        if stop in self._forwarded_stops:
            return
        self._forwarded_stops.add(stop)
        order = dataclasses.replace(message, node=self.node_name(number))
        self._server.send_all(order, except_rank=number)
        if number != 0:  # 0: the head's own agent has reported the stop, and reacts to it by itself
            self._events.append(order)

    def _refuse_late_node(self, peer: HeadConnection) -> None:
        """Refuse a node that asks to join after the start of the run, since nodes are already numbered."""
        has_spares = self.placement.size is not None  # such a run may have started without all its nodes
        if has_spares:
            problem = f"the run has started with {self.placement.nnodes} nodes, and no node can join it later"
            # 30 s is `gather.LAST_CALL_S`.
            hint = "start it with the others: the head waits 30 s for one more than it has"
        else:
            problem = "all nodes of this run have joined already"
            hint = "it may be started twice on this host: pbsdsh starts it once per line of the node file"
        self._server.refuse(peer, messages.Refused(what=problem, where=self.host(0), hint=hint))


class MemberSession(_Session):
    """The session of a node that is not the head. Its methods correspond to those of `HeadSession`.

    Parameters
    ----------
    lines : messages that the head has already sent after the start of the run, as lines of JSON.
    host_index : index of this node agent among those on the same host.
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
        """Wait up to `seconds` until one of `sources` has data to read, or until there may be an event."""
        if self._is_over:
            wait_readable(sources, seconds)
        elif not self._lines:  # with lines that were not handled yet, there are events already
            wait_readable([*sources, self._connection], seconds)

    def poll(self) -> list[Event]:
        """Read messages, send a heartbeat if it is due, and return the events since the last call.

        If the head is lost, the last event is `HeadLost`. After that, or after the head has ended the run,
        later calls return no events.
        """
        if self._is_over:
            return []
        self._lines += self._connection.receive_lines()
        events = self._read_events()  # before the loss is noticed, since the last orders of the head count
        self._send_heartbeat()
        loss_reason = self._find_loss_reason()
        has_run_ended = any(isinstance(event, messages.EndRun) for event in events)
        # After the end of the run, the head closes the connection, which is no loss.
        if loss_reason and not has_run_ended:
            events.append(messages.HeadLost(node=self.node_name(0), reason=loss_reason))
        if loss_reason or has_run_ended:
            self._is_over = True
            self._connection.close()
        return events

    def _send_heartbeat(self) -> None:
        """Send a heartbeat to the head if it is due, or if torchrun's phase has changed."""
        is_due = time.monotonic() - self._connection.last_sent >= beat_s(self.lost_after_s)
        if is_due or self.phase != self._reported_phase:
            self._reported_phase = self.phase
            self._connection.send(messages.Heartbeat(positions=self.positions, phase=self.phase))

    def _find_loss_reason(self) -> str:
        """Return why the head is lost, or "" if it is not."""
        if self._connection.error:
            return self._connection.error
        if time.monotonic() - self._connection.last_received > self.lost_after_s:
            return f"no heartbeat for {self.lost_after_s:g} s"
        return ""

    def report(self, message: Message) -> None:
        """Send a report of this node's agent to the head."""
        self._connection.send(message)

    def close(self) -> None:
        """Close the connection. The head has `LINGER_S` seconds to read the last message."""
        if not self._is_over:
            self._connection.close(LINGER_S)

    def _read_events(self) -> list[Event]:
        """Return the head's orders in the lines that have arrived.

        The order that ends the preflight (the test of the nodes before the first attempt) is the last order
        that one call returns. Later lines stay for the next call.
        """
        events: list[Event] = []
        while self._lines:
            message = self._connection.decode(self._lines.pop(0))
            if message is None:  # no message of imgkit: `decode` has set the connection's error
                break
            # Heartbeats are no events. They carry the positions (steps) of the slowest and furthest worker.
            if isinstance(message, messages.Heartbeat):
                self.run_positions = message.positions
            elif isinstance(message, Order):
                events.append(message)
            if isinstance(message, messages.PreflightEnd):
                # The preflight drops events of other kinds. An order to start the first attempt may follow
                # at once, and must stay for the code that handles attempts.
                break
        return events


Session = HeadSession | MemberSession

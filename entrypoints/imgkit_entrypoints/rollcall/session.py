"""The session after the roll call: heartbeats, events and the closing barrier between the node agents.

The head (`HeadSession`) has a connection to each of the others (`MemberSession`), which know nobody else. It
knows nodes by their number in the roll call, which never changes; the head is 0.
"""

from __future__ import annotations

import dataclasses
import select
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from imgkit_entrypoints.errors import EXIT_SAVED
from imgkit_entrypoints.rollcall import messages, ports
from imgkit_entrypoints.rollcall.connection import Connection, NodeConnections
from imgkit_entrypoints.rollcall.messages import AttemptEnded, AttemptStart, Event, FromHead, Positions

if TYPE_CHECKING:
    from imgkit_entrypoints.rollcall.strangers import Strangers
    from imgkit_entrypoints.schedulers.placement import Placement

# Longest time between two messages of a node.
BEAT_S = 5.0
LOST_AFTER_S = 30.0
# Time in which the other end can read the last messages.
LINGER_S = 2.0
# Time that messages wait for more where `MANY` nodes beat: to wake costs more than to read a message.
READ_PAUSE_S = 0.25
MANY = 1000
# Time between two looks at strangers during the run, whose workers need the processors.
STRANGERS_PAUSE_S = 0.2
LOOKS_PER_BEAT = 5


def beat_s(lost_after_s: float) -> float:
    """Return the time between two heartbeats where a node counts as lost after `lost_after_s` seconds."""
    return min(BEAT_S, lost_after_s / 4)


def node_name(placement: Placement, rank: int, host: str = "") -> str:
    """Return a node as users know it, counted from 1: "node 2 of 2 (as07r3b13)"."""
    name = host or (placement.hosts[rank] if rank < len(placement.hosts) else "")
    if not name and rank == 0:
        name = placement.head
    return f"node {rank + 1} of {placement.nnodes}" + (f" ({name})" if name else "")


class Readable(Protocol):
    """Anything with a descriptor to wait for."""

    def fileno(self) -> int:
        """Return the descriptor; negative: closed."""


def wait(sources: Iterable[Readable], seconds: float) -> list[Readable]:
    """Wait up to `seconds` until one of `sources` has something to read; return those that have."""
    # select.select would end at descriptor 1023, and an epoll costs more for a few.
    poll = select.poll()
    by_descriptor = {source.fileno(): source for source in sources if source.fileno() >= 0}
    for descriptor in by_descriptor:
        poll.register(descriptor, select.POLLIN)
    return [by_descriptor[descriptor] for descriptor, _ in poll.poll(max(0.0, seconds) * 1000)]


class _Session:
    """What the sessions of the head and of the other nodes have in common."""

    def __init__(
        self, placement: Placement, port: int, warnings: Sequence[str], *, can_restart: bool = False
    ) -> None:
        self.placement = placement
        """The node's place in the run that has started: without the nodes that did not join."""
        self.port = port
        """Torchrun's port, free on the head when it was handed out."""
        self.warnings = tuple(warnings)
        self.can_restart = can_restart
        """The head starts each attempt by `AttemptStart`, may start another one after a failure, and ends the
        run by `AllDone` with one code for all nodes. False: the only attempt has all nodes, and the first
        failure ends it."""
        self.lost_after_s = LOST_AFTER_S
        """Silence after which a node counts as lost."""
        self.attempt = 1
        """Messages about another attempt do not count."""
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


class HeadSession(_Session):
    """The session of the head, also of the only node of a run: it starts attempts and hears how they end.

    Parameters
    ----------
    hosts : host names by number.
    strangers : the listener, open to the end, or a command started twice on a host would begin a second run.
    """

    def __init__(
        self,
        placement: Placement,
        port: int,
        warnings: Sequence[str] = (),
        *,
        connections: NodeConnections | None = None,
        hosts: Mapping[int, str] | None = None,
        strangers: Strangers | None = None,
        can_restart: bool = False,
    ) -> None:
        super().__init__(placement, port, warnings, can_restart=can_restart)
        self.reports: dict[int, AttemptEnded] = {}
        """Nodes on which the attempt is over."""
        self.lost: dict[int, str] = {}
        """Nodes that are lost, and why."""
        self.measurements: list[tuple[int, messages.MeasureResult]] = []
        """What nodes have measured, with their numbers, until somebody takes it away."""
        self.failures: list[tuple[float, int, messages.RankFailure]] = []
        """Failed workers of this attempt: when, on this node's clock, the node's number, and its report."""
        self.previous_failures: list[tuple[float, int, messages.RankFailure]] = []
        """Those of the attempt before."""
        self._connections, self._strangers = connections or NodeConnections(), strangers
        self._hosts = hosts or {}
        self._members: Collection[int] = range(placement.nnodes)
        self._events: list[Event] = []
        self._has_news = False
        """A node has reported the end of its attempt or what it has measured, or it is lost."""
        self._phases: dict[int, str] = {}
        self._positions: dict[int, Positions] = {}
        self._requested: set[tuple[int, int]] = set()
        """Numbers of nodes with the stage that they have been asked to measure."""
        self._stopping: set[int] = set()
        """Nodes that were asked to stop."""
        self._has_ended = False
        self._next_look = time.monotonic()
        self._next_reads: dict[Readable, float] = {self._connections: 0.0}
        """Times before which nobody waits for nodes and for strangers."""
        if strangers:
            self._next_reads[strangers] = 0.0

    @property
    def alive(self) -> tuple[int, ...]:
        """Numbers of the nodes that are there, in order."""
        return tuple(number for number in range(self.placement.nnodes) if number not in self.lost)

    @property
    def phases(self) -> Mapping[int, str]:
        """How far torchrun is on each node of this attempt, by number."""
        phases = {**self._phases, 0: self.phase}
        return {number: phases.get(number, messages.STARTING) for number in self._members}

    def host(self, number: int) -> str:
        """Return the name of a node's host; empty where it is not known."""
        return self._hosts.get(number, "")

    def wait(self, sources: Collection[Readable], seconds: float) -> None:
        """Return when one of `sources` has something to read, an event may be there, or after `seconds`."""
        end = time.monotonic() + seconds
        while not self._events and not self._has_news:
            now = time.monotonic()
            watched = [source for source, due in self._next_reads.items() if due <= now]
            wake_times = [due for due in self._next_reads.values() if due > now]
            ready = wait([*sources, *watched], min(end, self._next_look, *wake_times) - now)
            self._take(has_strangers=self._strangers in ready)
            if any(source in ready for source in sources) or time.monotonic() >= end:
                return

    def poll(self) -> list[Event]:
        """Read, beat, and return the events since the last call; never blocks; due about once a second."""
        self._take()
        events, self._events, self._has_news = self._events, [], False
        return events

    def ask_stop(self, reason: str, *, requeue: bool = True) -> None:
        """Tell all other nodes that this one was asked to stop."""
        self._connections.send_all(messages.StopOrder(node=self.node_name(0), reason=reason, requeue=requeue))

    def report_end(self, report: AttemptEnded) -> None:
        """Report the end of this node's part of the attempt; `AllDone` or `AttemptStart` follows."""
        self._end_attempt_of(0, report)

    def report_measurement(self, measurement: messages.MeasureResult) -> None:
        """Report what this node has measured in a stage of the preflight."""
        self.measurements.append((0, measurement))

    def start_attempt(self, attempt: int, ranks: Mapping[int, int]) -> None:
        """Start an attempt: `ranks` are the node ranks of those that take part, by number.

        Raises
        ------
        NoPlan : no port is free.
        """
        if attempt > 1:
            self.port = ports.next_free(self.port)
        self.attempt, self.reports, self._members = attempt, {}, tuple(ranks)
        self.previous_failures, self.failures = self.failures, []
        self._phases, self._positions, self.run_positions = {}, {}, None
        for number in self.alive:
            rank = ranks.get(number)
            start = AttemptStart(attempt=attempt, nnodes=len(ranks), node_rank=rank, port=self.port)
            self._send(number, start)

    def end_attempt(self, reason: str) -> None:
        """End the attempt's workers on all nodes."""
        for number in self.alive:
            self._send(number, messages.EndAttempt(attempt=self.attempt, reason=reason))

    def end_run(self, code: int) -> None:
        """End the run on all nodes, with this exit code."""
        for number in self.alive:
            self._send(number, messages.AllDone(codes=(code,)))

    def request_measurement(self, number: int, request: messages.MeasureRequest) -> None:
        """Have a node measure a stage of the preflight; one that is lost gets nothing."""
        if number not in self.lost:
            self._requested.add((number, request.stage))
            self._send(number, request)

    def end_preflight(self, outcome: messages.PreflightEnd | messages.Refused) -> None:
        """Tell all other nodes how the preflight has ended."""
        self._connections.send_all(outcome)

    def close(self) -> None:
        """Leave; the others have a moment to read the last message."""
        if self._strangers:
            self._strangers.close()
        self._connections.close(LINGER_S)

    def _send(self, number: int, event: Event) -> None:
        """Send an event to one node."""
        if number == 0:
            self._events.append(event)
        else:
            self._connections.send(number, event)

    def _announce(self, event: Event, *, but: int | None = None) -> None:
        """Send an event to all nodes, the head included."""
        self._connections.send_all(event, but=but)
        self._events.append(event)

    def _take(self, *, has_strangers: bool = False) -> None:
        """React to what has arrived, and look at all nodes when it is time."""
        now = time.monotonic()
        is_look_due = now >= self._next_look
        if received := self._connections.receive():
            self._next_reads[self._connections] = now + READ_PAUSE_S * min(1.0, self.placement.nnodes / MANY)
        for number, message in received:
            self._handle(number, message)
        if self._strangers and (has_strangers or is_look_due):
            self._next_reads[self._strangers] = now + (STRANGERS_PAUSE_S if has_strangers else 0.0)
            self._refuse_late_nodes(self._strangers)
        if is_look_due:
            self._next_look = now + beat_s(self.lost_after_s) / LOOKS_PER_BEAT
            self._beat()
        for number, reason in self._connections.take_closed():
            self._lose(number, reason)
        if len(self.reports) == self.placement.nnodes and not self._has_ended and not self.can_restart:
            self._has_ended = True
            codes = tuple(report.code for _, report in sorted(self.reports.items(), key=lambda item: item[0]))
            self._announce(messages.AllDone(codes=codes))

    def _beat(self) -> None:
        positions = [*self._positions.values(), *([self.positions] if self.positions else [])]
        self.run_positions = (min(map(min, positions)), max(map(max, positions))) if positions else None
        self._connections.beat(
            messages.Heartbeat(positions=self.run_positions),
            beat_s=beat_s(self.lost_after_s),
            lost_after_s=self.lost_after_s,
            finished=() if self.can_restart else self.reports,
        )

    def _handle(self, number: int, message: messages.FromNode) -> None:
        """Take a node's message; drop a second one of its kind, by which it could fill the memory of all."""
        if isinstance(message, messages.Heartbeat):
            self._phases[number] = message.phase
            self._positions.pop(number, None)
            if message.positions:
                self._positions[number] = message.positions
        elif isinstance(message, messages.MeasureResult):
            if (number, message.stage) in self._requested:
                self._requested.remove((number, message.stage))
                self.measurements.append((number, message))
                self._has_news = True
        elif isinstance(message, AttemptEnded):
            if message.attempt == self.attempt and number not in self.reports:
                self._end_attempt_of(number, message)
        elif isinstance(message, messages.StopOrder) and number not in self._stopping:
            self._stopping.add(number)
            self._announce(dataclasses.replace(message, node=self.node_name(number)), but=number)

    def _end_attempt_of(self, number: int, report: AttemptEnded) -> None:
        self.reports[number], self._has_news = report, True
        failure = report.failure
        if failure:
            self.failures.append((time.monotonic() - failure.age_ms / 1000, number, failure))
        if report.code not in (0, EXIT_SAVED) and not self.can_restart:
            failed = messages.NodeFailed(
                node=self.node_name(number),
                code=report.code,
                rank=failure.rank if failure else None,
                is_head=number == 0,
            )
            self._connections.send_all(failed, but=number)
            if number != 0:
                self._events.append(failed)

    def _lose(self, number: int, reason: str) -> None:
        """Take leave of a node; in a run of one attempt, one that is done may go."""
        self.lost[number], self._has_news = reason, True
        if number not in self.reports and not self.can_restart:
            self._announce(messages.NodeLost(node=self.node_name(number), reason=reason))

    def _refuse_late_nodes(self, strangers: Strangers) -> None:
        problem = "all nodes of this run have joined already"
        hint = "it may be started twice on this host: pbsdsh starts it once per line of the node file"
        if self.placement.size:
            problem = f"the run has started with {self.placement.nnodes} nodes, and no node can join it later"
            hint = "start it with the others: the head waits 30 s for one more than it has"
        for connection, _ in strangers.joining_nodes():
            strangers.refuse(connection, messages.Refused(what=problem, where=self.host(0), hint=hint))


class MemberSession(_Session):
    """The session of any node but the head; its methods are those of `HeadSession`."""

    def __init__(
        self, placement: Placement, connection: Connection[FromHead], start: messages.RunStart
    ) -> None:
        super().__init__(placement, start.port, start.warnings, can_restart=start.can_restart)
        self._connection = connection
        self._is_over = False
        self._has_head_failed = False
        self._reported_phase = messages.STARTING
        self._next_attempt = 1

    def wait(self, sources: Collection[Readable], seconds: float) -> None:
        """Return when one of `sources` has something to read, an event may be there, or after `seconds`."""
        if self._is_over:
            wait(sources, seconds)
        else:
            wait([*sources, self._connection], 0.0 if self._connection.has_line else seconds)

    def poll(self) -> list[Event]:
        """Read, beat, and return the events since the last call."""
        if self._is_over:
            return []
        events, now, connection = self._read_events(), time.monotonic(), self._connection
        if now - connection.last_sent >= beat_s(self.lost_after_s) or self.phase != self._reported_phase:
            self._reported_phase = self.phase
            connection.send(messages.Heartbeat(positions=self.positions, phase=self.phase))
        if not self._is_over and (connection.error or now - connection.last_received > self.lost_after_s):
            self._is_over = True
            reason = connection.error or f"no heartbeat for {self.lost_after_s:g} s"
            # A head that has failed leaves, as other failed nodes do.
            if self._has_head_failed:
                events.append(messages.AllDone(codes=()))
            else:
                events.append(messages.NodeLost(node=self.node_name(0), reason=reason))
        if self._is_over:
            connection.close()
        return events

    def ask_stop(self, reason: str, *, requeue: bool = True) -> None:
        """Tell all other nodes that this one was asked to stop."""
        self._connection.send(messages.StopOrder(reason=reason, requeue=requeue))

    def report_end(self, report: AttemptEnded) -> None:
        """Report the end of this node's part of the attempt."""
        self._connection.send(report)

    def report_measurement(self, measurement: messages.MeasureResult) -> None:
        """Report what this node has measured in a stage of the preflight."""
        self._connection.send(measurement)

    def close(self) -> None:
        """Leave; the head has a moment to read the last message."""
        if not self._is_over:
            self._connection.close(LINGER_S)

    def _read_events(self) -> list[Event]:
        events: list[Event] = []
        for message in self._connection.receive():
            if isinstance(message, messages.Heartbeat):
                self.run_positions = message.positions
                continue
            if isinstance(message, messages.ProbeRequest | messages.RunStart):
                continue
            if isinstance(message, AttemptStart):
                if message.attempt < self._next_attempt:
                    continue
                self.attempt, self._next_attempt = message.attempt, message.attempt + 1
            elif isinstance(message, messages.EndAttempt) and message.attempt != self.attempt:
                continue
            self._is_over |= isinstance(message, messages.AllDone)
            self._has_head_failed |= isinstance(message, messages.NodeFailed) and message.is_head
            events.append(message)
            if isinstance(message, messages.PreflightEnd):
                # What follows belongs to the attempts.
                break
        return events


Session = HeadSession | MemberSession

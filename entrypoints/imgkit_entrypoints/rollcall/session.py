"""The session after the roll call: heartbeat, events and the closing barrier between a run's node agents."""

from __future__ import annotations

import platform
import select
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from imgkit_entrypoints.rollcall import ports
from imgkit_entrypoints.rollcall.messages import (
    STARTING,
    AllDone,
    AttemptEnded,
    Beat,
    EndAttempt,
    Failed,
    FromHead,
    Judged,
    Lost,
    Measure,
    Measured,
    NodeStop,
    RankFailure,
    Refused,
    Span,
    Start,
    StopOrder,
)

if TYPE_CHECKING:  # the only node of a run starts sooner without them
    from imgkit_entrypoints.rollcall.link import Link
    from imgkit_entrypoints.schedulers.placement import Placement

BEAT_S = 5.0
LOST_S = 30.0
LINGER_S = 2.0
Event = Start | EndAttempt | Lost | Failed | StopOrder | AllDone | Measure | Judged | Refused
"""Messages of the head that the node agent reacts to, or the same on the head itself."""

_PASSED_ON = (Lost, Failed, StopOrder, AllDone, Measure, Judged, Refused)
"""Those that count whatever the attempt."""


def beat_s(lost_s: float) -> float:
    """Return the time between two beats where a node counts as lost after `lost_s` seconds of silence."""
    return min(BEAT_S, lost_s / 4)


def node_name(place: Placement, rank: int, host: str = "") -> str:
    """Return a node as users know it: "node 1 of 2 (as07r3b13)"."""
    name = host or (place.hosts[rank] if rank < len(place.hosts) else "")
    if not name and rank == 0:
        name = place.head
    return f"node {rank} of {place.nnodes}" + (f" ({name})" if name else "")


class Readable(Protocol):
    """Anything with a descriptor to wait for."""

    def fileno(self) -> int:
        """The descriptor; negative: closed."""


def wait(sources: Iterable[Readable], seconds: float) -> None:
    """Return when one of `sources` has something to read, or after `seconds`."""
    waiting = select.poll()  # select.select would end at descriptor 1023, and an epoll costs more for a few
    for source in sources:
        if source.fileno() >= 0:
            waiting.register(source.fileno(), select.POLLIN)
    waiting.poll(max(0.0, seconds) * 1000)


class Roll(ABC):
    """The open connections of one node after a roll call."""

    def __init__(
        self, place: Placement, port: int, warnings: Sequence[str], *, elastic: bool = False
    ) -> None:
        self.place = place
        """The node's place in the run that has started: without the nodes that did not join."""
        self.port = port
        """Torchrun's port, free on the head when it was handed out."""
        self.warnings = tuple(warnings)
        self.elastic = elastic
        """The head starts each attempt by `Start`, and ends the run by `AllDone` with one code for all nodes.

        False: the only attempt has all nodes, and the first failure ends it."""
        self.lost_s = LOST_S
        """Silence after which a node counts as lost."""
        self.attempt = 1
        """Messages about another attempt do not count."""
        self.span: Span | None = None
        """Places of this node's workers (launch/watchdog.py); every beat carries them."""
        self.phase = STARTING
        """How far torchrun of this node is (`messages.PHASES`); a change goes to the head at once."""

    @property
    @abstractmethod
    def everyone(self) -> Span | None:
        """Places of the workers of all nodes, as far as beats have arrived."""

    @abstractmethod
    def wait(self, sources: Iterable[Readable], seconds: float) -> None:
        """Return when one of `sources` has something to read, an event may be there, or after `seconds`."""

    @abstractmethod
    def tick(self) -> list[Event]:
        """Read, beat, and return the events since the last call; never blocks; due about once a second."""

    @abstractmethod
    def ask_stop(self, reason: str, *, requeue: bool = True) -> None:
        """Tell all other nodes that this one was asked to stop."""

    @abstractmethod
    def ended(self, report: AttemptEnded) -> None:
        """This node's part of the attempt is over; `AllDone` or `Start` follows when all have said so."""

    @abstractmethod
    def measured(self, found: Measured) -> None:
        """This node has measured a stage of the preflight."""

    @abstractmethod
    def close(self) -> None:
        """Leave; the others have a moment to read the last message."""

    def node(self, rank: int, host: str = "") -> str:
        """Return node `rank` as users know it."""
        return node_name(self.place, rank, host)


class LeadingRoll(Roll):
    """The roll of the head, which starts attempts and hears how they end. It knows nodes by their number in
    the roll call, which never changes; the head is 0."""

    reports: dict[int, AttemptEnded]
    """Nodes on which the attempt is over."""
    gone: dict[int, str]
    """Nodes that are lost, and why."""
    answers: list[tuple[int, Measured]]
    """What nodes have measured, with their numbers, until somebody takes it away."""
    failures: list[tuple[float, int, RankFailure]]
    """Failed workers of this attempt: when, on this node's clock, the node's number, and its report."""
    earlier: list[tuple[float, int, RankFailure]]
    """Those of the attempt before."""

    def __init__(
        self, place: Placement, port: int, warnings: Sequence[str], *, elastic: bool = False
    ) -> None:
        super().__init__(place, port, warnings, elastic=elastic)
        self.reports, self.gone, self.answers = {}, {}, []
        self.failures, self.earlier = [], []
        self._events: list[Event] = []
        self._members: Collection[int] = range(place.nnodes)
        self._phases: dict[int, str] = {}
        """Phases of the other nodes."""
        self._measuring: set[tuple[int, int]] = set()
        """Numbers of nodes with the stage that they have been asked to measure."""

    @property
    def alive(self) -> tuple[int, ...]:
        """Numbers of the nodes that are there, in order."""
        return tuple(number for number in range(self.place.nnodes) if number not in self.gone)

    @property
    def phases(self) -> Mapping[int, str]:
        """How far torchrun is on each node of this attempt, by number."""
        known = {**self._phases, 0: self.phase}
        return {number: known.get(number, STARTING) for number in self._members}

    def start(self, attempt: int, ranks: Mapping[int, int]) -> None:
        """Start an attempt: `ranks` are the node ranks of those that take part, by number.

        Raises
        ------
        NoPlan : no port is free.
        """
        if attempt > 1:
            self.port = ports.next_free(self.port)
        self.attempt, self.reports, self._members = attempt, {}, tuple(ranks)
        self.earlier, self.failures = self.failures, []
        self._phases.clear()
        for number in self.alive:
            rank = ranks.get(number)
            self._tell(number, Start(attempt=attempt, nnodes=len(ranks), node_rank=rank, port=self.port))

    def end_attempt(self, why: str) -> None:
        """End the attempt's workers on all nodes."""
        for number in self.alive:
            self._tell(number, EndAttempt(attempt=self.attempt, why=why))

    def over(self, code: int) -> None:
        """End the run on all nodes, with this exit code."""
        for number in self.alive:
            self._tell(number, AllDone(codes=(code,)))

    def measure(self, number: int, order: Measure) -> None:
        """Have a node measure a stage of the preflight; one that is gone gets nothing."""
        if number not in self.gone:
            self._measuring.add((number, order.stage))
            self._tell(number, order)

    def judged(self, said: Judged | Refused) -> None:
        """Tell all other nodes how the preflight has ended."""
        for number in self.alive[1:]:
            self._tell(number, said)

    def measured(self, found: Measured) -> None:
        self.answers.append((0, found))

    def note(self, number: int, report: AttemptEnded) -> None:
        """Keep the report of a node."""
        self.reports[number] = report
        if report.failure:
            self.failures.append((time.monotonic() - report.failure.age_ms / 1000, number, report.failure))

    def host(self, number: int) -> str:
        """Return the name of a node's host."""
        return platform.node()

    def named(self, number: int) -> str:
        """Return a node as users know it."""
        return self.node(number)

    @abstractmethod
    def _tell(self, number: int, message: Start | EndAttempt | AllDone | Measure | Judged | Refused) -> None:
        """Send a message to one node; the head's own becomes an event."""


class LoneRoll(LeadingRoll):
    """The only node of a run, which has nobody to meet."""

    def __init__(self, place: Placement, *, elastic: bool = False) -> None:
        super().__init__(place, ports.any_free(), (), elastic=elastic)

    @property
    def everyone(self) -> Span | None:
        return self.span

    def wait(self, sources: Iterable[Readable], seconds: float) -> None:
        wait(sources, 0.0 if self._events else seconds)

    def close(self) -> None:
        pass

    def ask_stop(self, reason: str, *, requeue: bool = True) -> None:
        pass

    def ended(self, report: AttemptEnded) -> None:
        self.note(0, report)
        if not self.elastic:
            self._events.append(AllDone(codes=(report.code,)))

    def tick(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _tell(self, number: int, message: Start | EndAttempt | AllDone | Measure | Judged | Refused) -> None:
        self._events.append(message)


class MemberRoll(Roll):
    """Any node but 0: it talks to the head only."""

    def __init__(
        self,
        place: Placement,
        port: int,
        warnings: Sequence[str],
        *,
        link: Link[FromHead],
        unread: Sequence[FromHead],
        elastic: bool = False,
    ) -> None:
        super().__init__(place, port, warnings, elastic=elastic)
        self._link = link
        self._unread = list(unread)
        self._over = False
        self._head_failed = False
        self._everyone: Span | None = None
        self._told_phase = STARTING
        self._next = 1
        """Number of the attempt that may start."""

    @property
    def everyone(self) -> Span | None:
        return self._everyone

    def wait(self, sources: Iterable[Readable], seconds: float) -> None:
        wait(sources if self._over else [*sources, self._link], seconds)

    def close(self) -> None:
        if not self._over:
            self._link.close(LINGER_S)

    def ask_stop(self, reason: str, *, requeue: bool = True) -> None:
        self._link.send(NodeStop(reason=reason, requeue=requeue))

    def ended(self, report: AttemptEnded) -> None:
        self._link.send(report)

    def measured(self, found: Measured) -> None:
        self._link.send(found)

    def tick(self) -> list[Event]:
        if self._over:
            return []
        events: list[Event] = []
        messages, self._unread = [*self._unread, *self._link.receive()], []
        for position, message in enumerate(messages):
            if isinstance(message, Beat):
                self._everyone = message.span
            elif isinstance(message, _PASSED_ON) or self._counts(message):
                self._over |= isinstance(message, AllDone)
                self._head_failed |= isinstance(message, Failed) and message.head
                events.append(message)  # type: ignore[arg-type]
            if isinstance(message, Judged):  # what follows belongs to the attempts
                self._unread = messages[position + 1 :]
                break
        now = time.monotonic()
        if now - self._link.sent >= beat_s(self.lost_s) or self.phase != self._told_phase:
            self._told_phase = self.phase
            self._link.send(Beat(span=self.span, phase=self.phase))
        if not self._over and (self._link.why or now - self._link.heard > self.lost_s):
            self._over = True
            if self._head_failed:  # and has left, as failed nodes do
                return [*events, AllDone(codes=())]
            why = self._link.why or f"no heartbeat for {self.lost_s:g} s"
            events.append(Lost(node=self.node(0), why=why))
        if self._over:
            self._link.close()
        return events

    def _counts(self, message: FromHead) -> bool:
        """Whether a message starts the next attempt or ends the current one."""
        if isinstance(message, Start) and message.attempt >= self._next:
            self.attempt, self._next = message.attempt, message.attempt + 1
            return True
        return isinstance(message, EndAttempt) and message.attempt == self.attempt

"""The head's side of the session: it hears all nodes and passes everything on."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from imgkit_entrypoints.errors import EXIT_SAVED
from imgkit_entrypoints.rollcall import session
from imgkit_entrypoints.rollcall.links import Links, Turn
from imgkit_entrypoints.rollcall.messages import (
    AllDone,
    AttemptEnded,
    Beat,
    EndAttempt,
    Failed,
    FromNode,
    Judged,
    Lost,
    Measure,
    Measured,
    Refused,
    Span,
    Start,
    StopAsked,
    StopWanted,
)
from imgkit_entrypoints.rollcall.session import Event, LeadingRoll, Readable
from imgkit_entrypoints.rollcall.strangers import Strangers
from imgkit_entrypoints.schedulers.placement import Placement

LULL_S = 0.25
"""Time that messages wait for company where `MANY` nodes beat: to wake costs more than to read a message."""
MANY = 1000
STRANGERS_S = 0.2
"""Time between two looks at strangers during the run, whose workers need the processors."""
LOOKS = 5
"""Looks at all nodes within the time between two beats."""


class HeadRoll(LeadingRoll):
    """Node 0 of several."""

    def __init__(
        self,
        place: Placement,
        port: int,
        warnings: Sequence[str],
        *,
        links: Links,
        hosts: Mapping[int, str],
        strangers: Strangers,
        elastic: bool = False,
    ) -> None:
        super().__init__(place, port, warnings, elastic=elastic)
        self._links, self._hosts = links, hosts
        self._news = False
        """A node has reported the end of its attempt or what it has measured, or it is lost."""
        # Open to the end, or a command started twice on a host would begin a second run of this job.
        self._strangers, self._next_strangers = strangers, 0.0
        self._closed = False
        self._stopping: set[int] = set()
        """Nodes that were asked to stop."""
        self._spans: dict[int, Span] = {}
        self._others: Span | None = None
        self._next_look = time.monotonic()
        self._lull_s = LULL_S * min(1.0, place.nnodes / MANY)

    @property
    def everyone(self) -> Span | None:
        return _around([span for span in (self.span, self._others) if span])

    def wait(self, sources: Iterable[Readable], seconds: float) -> None:
        sources, end = tuple(sources), time.monotonic() + seconds
        while not self._events and not self._news:
            now = time.monotonic()
            calm = now < self._next_strangers
            until = min(end, self._next_look, *((self._next_strangers,) if calm else ()))
            with self._links.watching(sources if calm else (self._strangers, *sources)):
                turn = self._links.hear(max(0.0, until - now))
            self._take(turn)
            if set(turn.others) - {self._strangers} or time.monotonic() >= end:
                return
            if turn.heard and not self._events and not self._news:
                session.wait(sources, min(self._lull_s, end - time.monotonic()))

    def tick(self) -> list[Event]:
        self._take(self._links.hear(0.0))
        events, self._events, self._news = self._events, [], False
        return events

    def ask_stop(self, reason: str, *, requeue: bool = True) -> None:
        self._links.send_all(StopAsked(node=self.node(0, self._hosts[0]), reason=reason, requeue=requeue))

    def start(self, attempt: int, ranks: Mapping[int, int]) -> None:
        self._spans.clear()
        self._others = None
        super().start(attempt, ranks)

    def host(self, number: int) -> str:
        return self._hosts[number]

    def named(self, number: int) -> str:
        return self.node(number, self._hosts[number])

    def ended(self, report: AttemptEnded) -> None:
        self.reports[0] = report
        if report.code not in (0, EXIT_SAVED) and not self.elastic:
            self._links.send_all(Failed(node=self.named(0), code=report.code, head=True))

    def _tell(self, number: int, message: Start | EndAttempt | AllDone | Measure | Judged | Refused) -> None:
        if number == 0:
            self._events.append(message)
        else:
            self._links.send(number, message)

    def close(self) -> None:
        self._strangers.close()
        self._links.close(session.LINGER_S)

    def _take(self, turn: Turn) -> None:
        """React to what has arrived, and look at all nodes when it is time."""
        for rank, message in turn.heard:
            self._heard(rank, message)
        for rank in turn.gone:
            self._gone(rank)
        now = time.monotonic()
        look = now >= self._next_look
        if self._strangers in turn.others:
            self._next_strangers = now + STRANGERS_S
        if look or self._strangers in turn.others:
            self._refuse_late()
        if look:
            self._next_look = now + session.beat_s(self.lost_s) / LOOKS
            self._others = _around(self._spans.values())
            for rank in self._links.look(now, Beat(span=self.everyone), self.lost_s):
                self._gone(rank)
        if len(self.reports) == self.place.nnodes and not self._closed and not self.elastic:
            self._closed = True
            over = AllDone(codes=tuple(self.reports[rank].code for rank in sorted(self.reports)))
            self._links.send_all(over)
            self._events.append(over)

    def _heard(self, rank: int, message: FromNode) -> None:
        """Take a node's message; drop a second one of its kind, by which it could fill the memory of all."""
        event: Event
        if isinstance(message, Beat):
            self._phases[rank] = message.phase
            if message.span is None:
                self._spans.pop(rank, None)
            else:
                self._spans[rank] = message.span
            return
        name = self.named(rank)
        if isinstance(message, AttemptEnded):
            if message.attempt != self.attempt or rank in self.reports:
                return
            self.reports[rank], self._news = message, True
            if message.code in (0, EXIT_SAVED) or self.elastic:
                return
            event = Failed(node=name, code=message.code)
        elif isinstance(message, Measured):
            if (order := (rank, message.stage)) in self._measuring:
                self._measuring.remove(order)
                self.answers.append((rank, message))
                self._news = True
            return
        elif isinstance(message, StopWanted) and rank not in self._stopping:
            self._stopping.add(rank)
            event = StopAsked(node=name, reason=message.reason, requeue=message.requeue)
        else:
            return
        self._links.send_all(event, but=rank)
        self._events.append(event)

    def _gone(self, rank: int) -> None:
        """Take leave of a node that has closed its link or is silent.

        In a run of one attempt, a node that is done may be silent, and may go.
        """
        link = self._links[rank]
        done = rank in self.reports and not self.elastic
        if done and not link.why:
            return
        why = link.why or f"no sign of life for {self.lost_s:g} s"
        self._links.drop(rank)
        self.gone[rank], self._news = why, True
        if not done and not self.elastic:
            lost = Lost(node=self.named(rank), why=why)
            self._links.send_all(lost)
            self._events.append(lost)

    def _refuse_late(self) -> None:
        """Refuse further callers: each is late, or one too many."""
        what = "all nodes of this run had called before this process did"
        hint = "it may be started twice on this host: pbsdsh starts it once per line of the node file"
        if self.place.size:
            what = f"the run has started with {self.place.nnodes} nodes, and no node can join it later"
            hint = "start it with the others: the head waits for MAX nodes, or 30 s for one more than it has"
        for link, _ in self._strangers.callers():
            self._strangers.dismiss(link, Refused(what=what, where=self._hosts[0], hint=hint))


def _around(spans: Iterable[Span]) -> Span | None:
    """Return the slowest and the furthest place of all."""
    lows, highs = zip(*spans, strict=True) if (spans := tuple(spans)) else ((), ())
    return (min(lows), max(highs)) if lows else None

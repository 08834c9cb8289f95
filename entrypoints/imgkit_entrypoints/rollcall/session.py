"""The session after the roll call: heartbeat, events and the closing barrier between a run's launchers."""

from __future__ import annotations

import selectors
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from imgkit_entrypoints.errors import EXIT_SAVED
from imgkit_entrypoints.rollcall import ports
from imgkit_entrypoints.rollcall.messages import (
    AllDone,
    Beat,
    Failed,
    FromHead,
    FromNode,
    Lost,
    NodeDone,
    Refused,
    Span,
    StopAsked,
    StopWanted,
)

if TYPE_CHECKING:  # the only node of a run starts sooner without them
    from imgkit_entrypoints.rollcall.link import Link
    from imgkit_entrypoints.rollcall.strangers import Strangers
    from imgkit_entrypoints.schedulers.placement import Placement

BEAT_S = 5.0
LOST_S = 30.0
LINGER_S = 2.0
Event = Lost | Failed | StopAsked | AllDone
"""Messages of the head that the launcher reacts to, or the same on the head itself."""


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
    # select.select would end at descriptor 1023.
    with selectors.DefaultSelector() as selector:
        for source in sources:
            if source.fileno() >= 0:
                selector.register(source.fileno(), selectors.EVENT_READ)
        selector.select(seconds)


class Roll(ABC):
    """The open connections of one node after a roll call."""

    def __init__(self, place: Placement, port: int, warnings: Sequence[str]) -> None:
        self.place = place
        """The node's place in the run that has started: without the nodes of a range that never called."""
        self.port = port
        """Torchrun's port, free on the head when it was handed out."""
        self.warnings = tuple(warnings)
        self.span: Span | None = None
        """Places of this node's workers (launch/hang_watch.py); every beat carries them."""

    @property
    @abstractmethod
    def everyone(self) -> Span | None:
        """Places of the workers of all nodes, as far as beats have arrived."""

    @abstractmethod
    def links(self) -> Sequence[Link[FromNode] | Link[FromHead]]:
        """Links to wait for before the next `tick`; call `tick` at least once a second."""

    @abstractmethod
    def tick(self) -> list[Event]:
        """Read, beat, and return the events since the last call; never blocks."""

    @abstractmethod
    def ask_stop(self, reason: str, *, requeue: bool = True) -> None:
        """Tell all other nodes that this one was asked to stop."""

    @abstractmethod
    def done(self, code: int) -> None:
        """This node's run is over with `code`; `AllDone` follows when all nodes have said so."""

    def close(self) -> None:
        """Leave; the others have a moment to read the last message."""
        end = time.monotonic() + LINGER_S
        for link in self.links():
            link.close(max(0.0, end - time.monotonic()))

    def node(self, rank: int, host: str = "") -> str:
        """Return node `rank` as users know it."""
        return node_name(self.place, rank, host)


class LoneRoll(Roll):
    """The only node of a run, which has nobody to meet."""

    def __init__(self, place: Placement) -> None:
        super().__init__(place, ports.any_free(), ())
        self._code: int | None = None

    @property
    def everyone(self) -> Span | None:
        return None

    def links(self) -> Sequence[Link[FromNode]]:
        return ()

    def ask_stop(self, reason: str, *, requeue: bool = True) -> None:
        pass

    def done(self, code: int) -> None:
        self._code = code

    def tick(self) -> list[Event]:
        return [] if self._code is None else [AllDone(codes=(self._code,))]


class HeadRoll(Roll):
    """Node 0: it hears all nodes and passes everything on."""

    def __init__(
        self,
        place: Placement,
        port: int,
        warnings: Sequence[str],
        *,
        links: Mapping[int, Link[FromNode]],
        hosts: Mapping[int, str],
        strangers: Strangers,
    ) -> None:
        super().__init__(place, port, warnings)
        self._links, self._hosts = dict(links), hosts
        # Open to the end, or a command started twice on a host would begin a second run of this job.
        self._strangers = strangers
        self._codes: dict[int, int] = {}
        self._closed = False
        self._spans: dict[int, Span | None] = {}

    @property
    def everyone(self) -> Span | None:
        spans = [span for span in (self.span, *self._spans.values()) if span]
        return (min(low for low, _ in spans), max(high for _, high in spans)) if spans else None

    def links(self) -> Sequence[Link[FromNode]]:
        return tuple(self._links.values())

    def ask_stop(self, reason: str, *, requeue: bool = True) -> None:
        self._tell(StopAsked(node=self.node(0, self._hosts[0]), reason=reason, requeue=requeue))

    def done(self, code: int) -> None:
        self._codes[0] = code
        if code not in (0, EXIT_SAVED):
            self._tell(Failed(node=self.node(0, self._hosts[0]), code=code, head=True))

    def close(self) -> None:
        self._strangers.close()
        super().close()

    def _refuse_late(self) -> None:
        """Refuse further callers: each is late, or one too many."""
        what = "all nodes of this run had called before this process did"
        hint = "it may be started twice on this host: pbsdsh starts it once per line of the node file"
        if self.place.min_nnodes is not None:
            what = f"the run has started with {self.place.nnodes} nodes, and no node can join it later"
            hint = "start it with the others: the head waits for MAX nodes, or 30 s for one more than it has"
        for link, _ in self._strangers.callers():
            self._strangers.dismiss(link, Refused(what=what, where=self._hosts[0], hint=hint))

    def tick(self) -> list[Event]:
        events: list[Event] = []
        self._refuse_late()
        now = time.monotonic()
        for rank, link in list(self._links.items()):
            name = self.node(rank, self._hosts[rank])
            for message in link.receive():
                events += self._heard(rank, name, message)
            if now - link.sent >= BEAT_S:
                link.send(Beat(span=self.everyone))
            silent = now - link.heard > LOST_S
            if link.why or (silent and rank not in self._codes):
                del self._links[rank]
                link.close()
                if rank not in self._codes:
                    lost = Lost(node=name, why=link.why or f"no sign of life for {LOST_S:g} s")
                    events.append(lost)
                    self._tell(lost)
        if len(self._codes) == self.place.nnodes and not self._closed:
            self._closed = True
            codes = tuple(self._codes[rank] for rank in sorted(self._codes))
            over = AllDone(codes=codes)
            self._tell(over)
            events.append(over)
        return events

    def _heard(self, rank: int, name: str, message: FromNode) -> list[Event]:
        event: Event
        if isinstance(message, Beat):
            self._spans[rank] = message.span
            return []
        if isinstance(message, NodeDone):
            self._codes[rank] = message.code
            if message.code in (0, EXIT_SAVED):
                return []
            event = Failed(node=name, code=message.code)
        elif isinstance(message, StopWanted):
            event = StopAsked(node=name, reason=message.reason, requeue=message.requeue)
        else:
            return []
        self._tell(event, but=rank)
        return [event]

    def _tell(self, message: Event, but: int | None = None) -> None:
        for rank, link in self._links.items():
            if rank != but:
                link.send(message)


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
    ) -> None:
        super().__init__(place, port, warnings)
        self._link = link
        self._unread = list(unread)
        self._over = False
        self._head_failed = False
        self._everyone: Span | None = None

    @property
    def everyone(self) -> Span | None:
        return self._everyone

    def links(self) -> Sequence[Link[FromHead]]:
        return () if self._over else (self._link,)

    def ask_stop(self, reason: str, *, requeue: bool = True) -> None:
        self._link.send(StopWanted(reason=reason, requeue=requeue))

    def done(self, code: int) -> None:
        self._link.send(NodeDone(code=code))

    def tick(self) -> list[Event]:
        if self._over:
            return []
        events: list[Event] = []
        for message in (*self._unread, *self._link.receive()):
            if isinstance(message, Beat):
                self._everyone = message.span
            elif isinstance(message, Lost | Failed | StopAsked | AllDone):
                self._over |= isinstance(message, AllDone)
                self._head_failed |= isinstance(message, Failed) and message.head
                events.append(message)
        self._unread = []
        now = time.monotonic()
        if now - self._link.sent >= BEAT_S:
            self._link.send(Beat(span=self.span))
        if not self._over and (self._link.why or now - self._link.heard > LOST_S):
            self._over = True
            if self._head_failed:  # and has left, as failed nodes do
                return [*events, AllDone(codes=())]
            why = self._link.why or f"no sign of life for {LOST_S:g} s"
            events.append(Lost(node=self.node(0), why=why))
        if self._over:
            self._link.close()
        return events

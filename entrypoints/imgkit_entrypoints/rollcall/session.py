"""The session after the roll call: heartbeat, events and the closing barrier between a run's launchers."""

from __future__ import annotations

import select
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from imgkit_entrypoints.rollcall import ports
from imgkit_entrypoints.rollcall.messages import (
    AllDone,
    Beat,
    Failed,
    FromHead,
    Lost,
    NodeDone,
    Span,
    StopAsked,
    StopWanted,
)

if TYPE_CHECKING:  # the only node of a run starts sooner without them
    from imgkit_entrypoints.rollcall.link import Link
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
    waiting = select.poll()  # select.select would end at descriptor 1023, and an epoll costs more for a few
    for source in sources:
        if source.fileno() >= 0:
            waiting.register(source.fileno(), select.POLLIN)
    waiting.poll(max(0.0, seconds) * 1000)


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
    def wait(self, sources: Iterable[Readable], seconds: float) -> None:
        """Return when one of `sources` has something to read, an event may be there, or after `seconds`."""

    @abstractmethod
    def tick(self) -> list[Event]:
        """Read, beat, and return the events since the last call; never blocks; due about once a second."""

    @abstractmethod
    def ask_stop(self, reason: str, *, requeue: bool = True) -> None:
        """Tell all other nodes that this one was asked to stop."""

    @abstractmethod
    def done(self, code: int) -> None:
        """This node's run is over with `code`; `AllDone` follows when all nodes have said so."""

    @abstractmethod
    def close(self) -> None:
        """Leave; the others have a moment to read the last message."""

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

    def wait(self, sources: Iterable[Readable], seconds: float) -> None:
        wait(sources, seconds)

    def close(self) -> None:
        pass

    def ask_stop(self, reason: str, *, requeue: bool = True) -> None:
        pass

    def done(self, code: int) -> None:
        self._code = code

    def tick(self) -> list[Event]:
        return [] if self._code is None else [AllDone(codes=(self._code,))]


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

    def wait(self, sources: Iterable[Readable], seconds: float) -> None:
        wait(sources if self._over else [*sources, self._link], seconds)

    def close(self) -> None:
        if not self._over:
            self._link.close(LINGER_S)

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

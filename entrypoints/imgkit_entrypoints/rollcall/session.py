"""The session after the roll call: heartbeat, events and the closing barrier between a run's launchers."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from imgkit_entrypoints.errors import EXIT_SAVED
from imgkit_entrypoints.rollcall.link import Link

BEAT_S = 5.0
LOST_S = 30.0
LINGER_S = 2.0
Span = tuple[int, int]
"""Places of the slowest and of the furthest worker, as the hang watch counts them."""


class Place(Protocol):
    """The parts of a Placement that the roll call reads."""

    @property
    def nnodes(self) -> int: ...
    @property
    def node_rank(self) -> int: ...
    @property
    def hosts(self) -> tuple[str, ...]: ...
    @property
    def head(self) -> str: ...
    @property
    def port(self) -> int | None: ...
    @property
    def job_id(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A node is gone, and has not said why."""

    node: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A node has ended with a code that is neither 0 nor 85."""

    node: str
    code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAsked:
    """A node was asked to stop, so all are."""

    node: str
    reason: str
    requeue: bool = True
    """The run is to go on later; False: a person wants it to stay ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllDone:
    """All nodes are done."""

    codes: tuple[int, ...]
    """Exit codes by node rank; empty if the head has failed and left, since only the head knows them all."""


Event = Lost | Failed | StopAsked | AllDone


def node_name(place: Place, rank: int, host: str = "") -> str:
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

    def __init__(self, place: Place, port: int | None, warnings: Sequence[str]) -> None:
        self.place = place
        self.port = port
        """Torchrun's port, free on the head when it was handed out; None: torchrun finds one itself."""
        self.warnings = tuple(warnings)
        self.span: Span | None = None
        """Places of this node's workers (launch/hang_watch.py); every beat carries them."""

    @property
    @abstractmethod
    def everyone(self) -> Span | None:
        """Places of the workers of all nodes, as far as beats have arrived."""

    @abstractmethod
    def links(self) -> Sequence[Link]:
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
    """A node that has nobody to meet: the only one, or one of an elastic run."""

    def __init__(self, place: Place) -> None:
        super().__init__(place, None, ())
        self._code: int | None = None

    @property
    def everyone(self) -> Span | None:
        return None

    def links(self) -> Sequence[Link]:
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
        place: Place,
        port: int,
        warnings: Sequence[str],
        *,
        links: Mapping[int, Link],
        hosts: Mapping[int, str],
        listener: socket.socket,
    ) -> None:
        super().__init__(place, port, warnings)
        self._links, self._hosts = dict(links), hosts
        # Open to the end, or a command started twice on a host would begin a second run of this job.
        self._listener = listener
        self._late: list[Link] = []
        self._codes: dict[int, int] = {}
        self._closed = False
        self._spans: dict[int, Span | None] = {}

    @property
    def everyone(self) -> Span | None:
        spans = [span for span in (self.span, *self._spans.values()) if span]
        return (min(low for low, _ in spans), max(high for _, high in spans)) if spans else None

    def links(self) -> Sequence[Link]:
        return tuple(self._links.values())

    def ask_stop(self, reason: str, *, requeue: bool = True) -> None:
        stop = {"node": self.node(0, self._hosts[0]), "reason": reason}
        self._tell({"stop": stop, "requeue": requeue})

    def done(self, code: int) -> None:
        self._codes[0] = code
        if code not in (0, EXIT_SAVED):
            self._tell({"failed": {"node": self.node(0, self._hosts[0]), "code": code}, "head": True})

    def close(self) -> None:
        self._listener.close()
        for link in self._late:
            link.close()
        super().close()

    def _refuse_late(self) -> None:
        """Refuse further callers: each is one too many."""
        with contextlib.suppress(OSError):
            while True:
                self._late.append(Link(self._listener.accept()[0]))
        for link in list(self._late):
            if link.receive():
                what = "all nodes of this run had called before this process did"
                hint = "it may be started twice on this host: pbsdsh starts it once per line of the node file"
                link.send({"refused": {"what": what, "where": self._hosts[0], "hint": hint}})
            if link.why or time.monotonic() - link.heard > LINGER_S:
                self._late.remove(link)
                link.close()

    def tick(self) -> list[Event]:
        events: list[Event] = []
        self._refuse_late()
        now = time.monotonic()
        for rank, link in list(self._links.items()):
            name = self.node(rank, self._hosts[rank])
            for message in link.receive():
                events += self._heard(rank, name, message)
            if now - link.sent >= BEAT_S:
                link.send({"beat": self.everyone})
            silent = now - link.heard > LOST_S
            if link.why or (silent and rank not in self._codes):
                del self._links[rank]
                link.close()
                if rank not in self._codes:
                    why = link.why or f"no sign of life for {LOST_S:g} s"
                    events.append(Lost(node=name, why=why))
                    self._tell({"lost": {"node": name, "why": why}})
        if len(self._codes) == self.place.nnodes and not self._closed:
            self._closed = True
            codes = tuple(self._codes[rank] for rank in sorted(self._codes))
            self._tell({"closed": {"codes": codes}})
            events.append(AllDone(codes=codes))
        return events

    def _heard(self, rank: int, name: str, message: Mapping[str, Any]) -> list[Event]:
        if "beat" in message:
            self._spans[rank] = _span(message["beat"])
        if "done" in message:
            code = self._codes[rank] = int(message["done"])
            if code in (0, EXIT_SAVED):
                return []
            self._tell({"failed": {"node": name, "code": code}}, but=rank)
            return [Failed(node=name, code=code)]
        if "stop" in message:
            requeue = bool(message.get("requeue", True))
            self._tell({"stop": {"node": name, "reason": message["stop"]}, "requeue": requeue}, but=rank)
            return [StopAsked(node=name, reason=str(message["stop"]), requeue=requeue)]
        return []

    def _tell(self, message: dict[str, Any], but: int | None = None) -> None:
        for rank, link in self._links.items():
            if rank != but:
                link.send(message)


class MemberRoll(Roll):
    """Any node but 0: it talks to the head only."""

    def __init__(
        self,
        place: Place,
        port: int,
        warnings: Sequence[str],
        *,
        link: Link,
        unread: Sequence[Mapping[str, Any]],
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

    def links(self) -> Sequence[Link]:
        return () if self._over else (self._link,)

    def ask_stop(self, reason: str, *, requeue: bool = True) -> None:
        self._link.send({"stop": reason, "requeue": requeue})

    def done(self, code: int) -> None:
        self._link.send({"done": code})

    def tick(self) -> list[Event]:
        if self._over:
            return []
        events: list[Event] = []
        for message in (*self._unread, *self._link.receive()):
            if "closed" in message:
                self._over = True
                events.append(AllDone(codes=tuple(map(int, message["closed"]["codes"]))))
            elif "failed" in message:
                self._head_failed |= bool(message.get("head"))
                events.append(Failed(node=message["failed"]["node"], code=int(message["failed"]["code"])))
            elif "lost" in message:
                events.append(Lost(**message["lost"]))
            elif "stop" in message:
                requeue = bool(message.get("requeue", True))
                events.append(StopAsked(**message["stop"], requeue=requeue))
            elif "beat" in message:
                self._everyone = _span(message["beat"])
        self._unread = []
        now = time.monotonic()
        if now - self._link.sent >= BEAT_S:
            self._link.send({"beat": self.span})
        if not self._over and (self._link.why or now - self._link.heard > LOST_S):
            self._over = True
            if self._head_failed:  # and has left, as failed nodes do
                return [*events, AllDone(codes=())]
            why = self._link.why or f"no sign of life for {LOST_S:g} s"
            events.append(Lost(node=self.node(0), why=why))
        if self._over:
            self._link.close()
        return events


def _span(said: Any) -> Span | None:
    return (int(said[0]), int(said[1])) if isinstance(said, list) else None

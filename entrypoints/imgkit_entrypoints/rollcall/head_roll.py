"""The head's side of the session: its links to all nodes, its listener, and the roll that uses both.

`Links` holds all connections on one epoll from the first call to the end. A message costs work for its
own link. Once in a while `look` passes over all links: it beats, and finds nodes that are silent. A node
that reads slowly or not at all delays nobody: what it has not taken waits here. `Strangers` holds the
connections that have not yet shown that they belong to the run.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import time
from collections.abc import Callable, Collection, ItemsView, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from imgkit_entrypoints.errors import EXIT_SAVED
from imgkit_entrypoints.rollcall import messages, session
from imgkit_entrypoints.rollcall.link import (
    FOREIGN,
    LONGEST,
    LONGEST_UNPROVEN,
    OPEN_HEAD,
    HeadProof,
    Link,
    close_all,
    wants_proof,
)
from imgkit_entrypoints.rollcall.messages import (
    AllDone,
    AttemptEnded,
    Beat,
    Call,
    EndAttempt,
    Failed,
    FromHead,
    FromNode,
    Judged,
    Lost,
    Measure,
    Measured,
    NodeStop,
    Refused,
    Span,
    Start,
    StopOrder,
)
from imgkit_entrypoints.rollcall.session import Event, LeadingRoll, Readable
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
        self._links.send_all(StopOrder(node=self.node(0, self._hosts[0]), reason=reason, requeue=requeue))

    def start(self, attempt: int, ranks: Mapping[int, int]) -> None:
        self._spans.clear()
        self._others = None
        super().start(attempt, ranks)

    def host(self, number: int) -> str:
        return self._hosts[number]

    def named(self, number: int) -> str:
        return self.node(number, self._hosts[number])

    def ended(self, report: AttemptEnded) -> None:
        self.note(0, report)
        if report.code not in (0, EXIT_SAVED) and not self.elastic:
            rank = report.failure.rank if report.failure else None
            self._links.send_all(Failed(node=self.named(0), code=report.code, rank=rank, head=True))

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
            self.note(rank, message)
            self._news = True
            if message.code in (0, EXIT_SAVED) or self.elastic:
                return
            failed = message.failure.rank if message.failure else None
            event = Failed(node=name, code=message.code, rank=failed)
        elif isinstance(message, Measured):
            if (order := (rank, message.stage)) in self._measuring:
                self._measuring.remove(order)
                self.answers.append((rank, message))
                self._news = True
            return
        elif isinstance(message, NodeStop) and rank not in self._stopping:
            self._stopping.add(rank)
            event = StopOrder(node=name, reason=message.reason, requeue=message.requeue)
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
        why = link.why or f"no heartbeat for {self.lost_s:g} s"
        self._links.drop(rank)
        self.gone[rank], self._news = why, True
        if not done and not self.elastic:
            lost = Lost(node=self.named(rank), why=why)
            self._links.send_all(lost)
            self._events.append(lost)

    def _refuse_late(self) -> None:
        """Refuse further callers: each is late, or one too many."""
        what = "all nodes of this run have joined already"
        hint = "it may be started twice on this host: pbsdsh starts it once per line of the node file"
        if self.place.size:
            what = f"the run has started with {self.place.nnodes} nodes, and no node can join it later"
            hint = "start it with the others: the head waits 30 s for one more than it has"
        for link, _ in self._strangers.callers():
            self._strangers.dismiss(link, Refused(what=what, where=self._hosts[0], hint=hint))


def _around(spans: Iterable[Span]) -> Span | None:
    """Return the slowest and the furthest place of all."""
    lows, highs = zip(*spans, strict=True) if (spans := tuple(spans)) else ((), ())
    return (min(lows), max(highs)) if lows else None


_READ, _BOTH = selectors.EVENT_READ, selectors.EVENT_READ | selectors.EVENT_WRITE


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one wait has brought."""

    heard: Collection[tuple[int, FromNode]]
    """Node ranks with their messages, in the order of arrival from each node."""
    gone: Collection[int]
    """Nodes whose link is over; `Link.why` says why, and `drop` closes it."""
    others: Collection[object]
    """Watched sources that have something to read."""


class Links:
    """Links by node rank."""

    def __init__(self) -> None:
        self._links: dict[int, Link[FromNode]] = {}
        self._selector = selectors.DefaultSelector()
        self._full: set[int] = set()
        """Nodes that have not yet taken all that was sent."""
        self._over: set[int] = set()
        """Nodes whose link is over, and no longer on the epoll."""

    def __contains__(self, rank: object) -> bool:
        return rank in self._links

    def __getitem__(self, rank: int) -> Link[FromNode]:
        return self._links[rank]

    def items(self) -> ItemsView[int, Link[FromNode]]:
        """All links with their node ranks."""
        return self._links.items()

    def values(self) -> Collection[Link[FromNode]]:
        """All links."""
        return self._links.values()

    def add(self, rank: int, link: Link[FromNode]) -> None:
        """Wait for this link, too."""
        self._links[rank] = link
        self._selector.register(link, _READ, rank)

    def drop(self, rank: int) -> None:
        """Close a link."""
        link = self._links.pop(rank)
        if rank not in self._over:
            self._selector.unregister(link)
        self._over.discard(rank)
        self._full.discard(rank)
        link.close()

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Give each link the new number of its node."""
        self._links = {numbers[rank]: link for rank, link in self._links.items()}
        self._full = {numbers[rank] for rank in self._full}
        self._over = {numbers[rank] for rank in self._over}
        for rank, link in self._links.items():
            if rank not in self._over:
                self._selector.modify(link, _BOTH if rank in self._full else _READ, rank)

    @contextlib.contextmanager
    def watching(self, sources: Iterable[Readable]) -> Iterator[None]:
        """Wait for `sources` as well within this context."""
        watched = [source for source in sources if source.fileno() >= 0]
        for source in watched:
            self._selector.register(source, _READ, None)
        try:
            yield
        finally:
            for source in watched:
                self._selector.unregister(source)

    def hear(self, seconds: float) -> Turn:
        """Wait up to `seconds` for anything, and read what is there."""
        heard: list[tuple[int, FromNode]] = []
        gone: list[int] = []
        others: list[object] = []
        for key, _ in self._selector.select(seconds):
            rank = key.data
            if rank is None:
                others.append(key.fileobj)
                continue
            link = self._links[rank]
            for message in link.receive():
                heard.append((rank, message))
            if link.why:
                self._selector.unregister(link)
                self._over.add(rank)
                gone.append(rank)
            elif rank in self._full or link.unsent:
                self._mark(rank, link)
        return Turn(heard=heard, gone=gone, others=others)

    def look(self, now: float, beat: Beat, lost_s: float | None = None) -> list[int]:
        """Send `beat` where one is due; return the nodes that are gone: cut off, or silent for `lost_s`."""
        lost_s = session.LOST_S if lost_s is None else lost_s
        beat_s = session.beat_s(lost_s)
        due: list[int] = []
        gone: list[int] = []
        for rank, link in self._links.items():
            if link.why or now - link.heard > lost_s:
                gone.append(rank)
            elif now - link.sent >= beat_s and not link.unsent:
                due.append(rank)
        text = messages.line(beat)
        for rank in due:
            self._send(rank, text)
        return gone

    def send(self, rank: int, message: FromHead) -> None:
        """Send a message to one node."""
        self._send(rank, messages.line(message))

    def send_all(self, message: FromHead, *, but: int | None = None) -> None:
        """Send a message to all nodes, or to all but one."""
        text = messages.line(message)
        for rank in self._links:
            if rank != but:
                self._send(rank, text)

    def close(self, linger_s: float) -> None:
        """Close all links; the nodes have up to `linger_s` seconds together to read the last messages."""
        close_all(self._links.values(), linger_s)
        self._links.clear()
        self._selector.close()

    def _send(self, rank: int, text: bytes) -> None:
        link = self._links[rank]
        link.send_text(text)
        if link.unsent:
            self._mark(rank, link)

    def _mark(self, rank: int, link: Link[FromNode]) -> None:
        """Wait for room in the network exactly while something waits for it."""
        if link.unsent == (rank in self._full) or rank in self._over:
            return
        if link.unsent:
            self._full.add(rank)
        else:
            self._full.discard(rank)
        self._selector.modify(link, _BOTH if link.unsent else _READ, rank)


MOST = 256
"""Strangers at a time. Each missing node of the run may hold one connection more."""
PATIENCE_S = 5.0
"""Time in which a connection must show that it belongs to the run."""
PAUSE_S = 0.2
"""Time without new connections after the system had no descriptor for one."""
ACCEPTED = 256
"""Connections accepted in one turn, so that no flood keeps the head from its nodes."""
REPORTS = 16
"""Lines in the log about strangers; a flood must not fill the disk."""
SHOWN = 4
"""Those of them that the error repeats when nodes are missing."""


@dataclass(slots=True, kw_only=True)
class _Stranger:
    link: Link[FromNode]
    address: str
    since: float
    proof: HeadProof | None = None
    leaving: bool = False
    """It has its refusal, and has until its time is over to read it."""


class Strangers:
    """The head's listener with all connections that are not part of the run; nothing here blocks.

    Parameters
    ----------
    run : the job id.
    secret : None: a call with the right job id is enough.
    most : connections at a time, besides those of missing nodes.
    say : takes the few lines about connections that were refused.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        run: str,
        secret: bytes | None,
        say: Callable[[str], None],
        most: int = MOST,
    ) -> None:
        self._listener, self._run, self._secret, self._say, self._most = listener, run, secret, say, most
        self._known: dict[int, _Stranger] = {}  # by descriptor, oldest first
        self._said: dict[str, None] = {}
        self._paused_until = 0.0
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def fileno(self) -> int:
        """Descriptor that is readable when `callers` has something to do."""
        return self._selector.fileno()

    @property
    def refused(self) -> tuple[str, ...]:
        """The first lines about callers that were not counted."""
        return tuple(self._said)[:SHOWN]

    def callers(self, missing: int = 0) -> list[tuple[Link[FromNode], Call]]:
        """Return the nodes of the run that have called since the last turn; `missing` nodes have not yet."""
        now = time.monotonic()
        if self._paused_until and now >= self._paused_until:
            self._paused_until = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ)
        found = []
        for key, _ in self._selector.select(0):
            if key.fileobj is self._listener:
                self._accept(self._most + missing)
            elif (stranger := self._known.get(key.fd)) and (call := self._hear(stranger)):
                self._forget(stranger)
                stranger.link.longest = LONGEST
                found.append((stranger.link, call))
        while self._known and now - (oldest := next(iter(self._known.values()))).since > PATIENCE_S:
            if not oldest.leaving:
                self._report(oldest, "did not join as a node of this run")
            self._close(oldest)
        return found

    def dismiss(self, link: Link[FromNode], refusal: Refused) -> None:
        """Refuse a caller; it has a moment to read why, and nobody waits for it."""
        stranger = _Stranger(link=link, address="", since=time.monotonic())
        self._know(stranger)
        self._dismiss(stranger, refusal)

    def _accept(self, most: int) -> None:
        for turn in range(ACCEPTED):
            try:
                connection, address = self._listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    if turn == 0:  # else one has just come in, and nobody may be waiting
                        self._make_room(len(self._known) - 1)
                    self._selector.unregister(self._listener)  # it stays readable, and would wake us for ever
                    self._paused_until = time.monotonic() + PAUSE_S
                elif error.errno not in (errno.EAGAIN, errno.EWOULDBLOCK):
                    continue  # this one has gone again (ECONNABORTED)
                return
            self._make_room(most - 1)
            link = Link(connection, messages.from_node, longest=LONGEST_UNPROVEN)
            host = address[0].removeprefix("::ffff:")  # an IPv4 address, as a listener for both sees it
            self._know(_Stranger(link=link, address=host, since=time.monotonic()))

    def _make_room(self, left: int) -> None:
        """Close the oldest strangers beyond `left`."""
        while len(self._known) > max(left, 0):
            self._close(next(iter(self._known.values())))

    def _hear(self, stranger: _Stranger) -> Call | None:
        """Return the call of `stranger` if it belongs to the run; close the connection if it does not."""
        link = stranger.link
        link.fill()
        while (line := link.next_line()) is not None and not stranger.leaving:
            if self._secret is not None and stranger.proof is None:
                self._answer(stranger, line, self._secret)
            elif (call := self._call(stranger, line)) is not None:
                return call
        if link.why:
            if stranger.leaving:
                pass  # reported when it was refused
            elif stranger.proof:
                told = f"claimed to be node {stranger.proof.node_rank} without proving the secret"
                self._report(stranger, told)
            elif link.why == FOREIGN:
                self._report(stranger, "sent something other than an imgkit roll call")
            self._close(stranger)
        return None

    def _answer(self, stranger: _Stranger, line: bytes, secret: bytes) -> None:
        """Prove the secret to a caller that wants it."""
        link = stranger.link
        if line.startswith(b"{"):  # imgkit without a secret; the answer is the same for all of them
            self._report(stranger, "connected without a secret")
            what = "the head requires a secret, and this node has none"
            self._dismiss(
                stranger,
                Refused(what=what, hint="pass the same --secret-file to both, or share one home folder"),
            )
            return
        try:
            proof = stranger.proof = HeadProof(secret, self._run, line)
        except ValueError:
            link.why = FOREIGN
            return
        link.send_line(proof.answer)
        link.seal(incoming=proof.from_node, outgoing=proof.from_head)

    def _call(self, stranger: _Stranger, line: bytes) -> Call | None:
        """Return the call in the first line after the proof, or in an open start in the first line of all."""
        link = stranger.link
        if self._secret is None and wants_proof(line):
            self._report(stranger, "connected with a secret, and this node has none")
            link.send_line(OPEN_HEAD)
            self._leave(stranger)
            return None
        call = link.opened(line)
        if not isinstance(call, Call) or (stranger.proof and stranger.proof.node_rank != call.node_rank):
            link.why = link.why or FOREIGN
            return None
        if call.job != self._run:
            # The head's job id stays here: in an open start, who knows it can call as a node.
            what = f"{call.caller.host} belongs to job {call.job!r}, the head to another"
            self._report(stranger, what)
            self._dismiss(stranger, Refused(what=what))
            return None
        return call

    def _dismiss(self, stranger: _Stranger, refusal: Refused) -> None:
        stranger.link.send(refusal)
        self._leave(stranger)

    def _leave(self, stranger: _Stranger) -> None:
        stranger.leaving = True
        stranger.link.shut()

    def _report(self, stranger: _Stranger, what: str) -> None:
        """Say once what a stranger did."""
        text = f"{stranger.address} {what}"
        if text not in self._said and len(self._said) <= REPORTS:
            self._said[text] = None
            last = "; further ones are not reported" if len(self._said) > REPORTS else ""
            self._say(f"roll call: {text}; ignored{last}")

    def _know(self, stranger: _Stranger) -> None:
        self._known[stranger.link.fileno()] = stranger
        self._selector.register(stranger.link, selectors.EVENT_READ)

    def _forget(self, stranger: _Stranger) -> None:
        del self._known[stranger.link.fileno()]
        self._selector.unregister(stranger.link)

    def _close(self, stranger: _Stranger) -> None:
        self._forget(stranger)
        stranger.link.close()

    def close(self) -> None:
        """Close the listener and every connection that is left."""
        for stranger in list(self._known.values()):
            self._close(stranger)
        self._selector.close()
        self._listener.close()

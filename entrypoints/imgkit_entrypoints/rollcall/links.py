"""The head's links to all nodes, on one epoll from the first call to the end.

A message costs work for its own link. Once in a while `look` passes over all links: it beats, and finds nodes
that are silent. A node that reads slowly or not at all delays nobody: what it has not taken waits here.
"""

from __future__ import annotations

import contextlib
import selectors
from collections.abc import Collection, ItemsView, Iterable, Iterator, Mapping
from dataclasses import dataclass

from imgkit_entrypoints.rollcall import messages, session
from imgkit_entrypoints.rollcall.link import Link, close_all
from imgkit_entrypoints.rollcall.messages import Beat, FromHead, FromNode
from imgkit_entrypoints.rollcall.session import Readable

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

"""The head's listener, and the connections that have not yet shown that they belong to the run."""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from imgkit_entrypoints.rollcall import reader
from imgkit_entrypoints.rollcall.link import FOREIGN, LONGEST, Link
from imgkit_entrypoints.rollcall.messages import Call, FromNode, Refused
from imgkit_entrypoints.rollcall.proof import LONGEST_UNPROVEN, OPEN_HEAD, HeadProof, wants_proof

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
                self._report(oldest, "did not call as a node of this run")
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
            link = Link(connection, reader.from_node, longest=LONGEST_UNPROVEN)
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
                told = f"called as node {stranger.proof.node_rank} and did not prove the secret"
                self._report(stranger, told)
            elif link.why == FOREIGN:
                self._report(stranger, "sent what is no roll call of imgkit")
            self._close(stranger)
        return None

    def _answer(self, stranger: _Stranger, line: bytes, secret: bytes) -> None:
        """Prove the secret to a caller that wants it."""
        link = stranger.link
        if line.startswith(b"{"):  # imgkit without a secret; the answer is the same for all of them
            self._report(stranger, "called without a secret")
            what = "the head wants a secret, and this node has none"
            self._dismiss(stranger, Refused(what=what, hint="give both the same --secret-file, or one home"))
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
            self._report(stranger, "called with a secret, and this node has none")
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
            self._say(f"roll call: {text}; not counted{last}")

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

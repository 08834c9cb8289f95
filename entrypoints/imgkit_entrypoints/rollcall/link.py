"""One non-blocking connection, one message a line; and the proof that both ends know the run's secret.

With a secret, each message is signed, and the first lines are the proof::

    node   imgkit-call RANK NONCE          16 random bytes of the node, in hexadecimal
    head   imgkit-head NONCE MAC           16 random bytes of the head; the node checks MAC first
    node   MAC {"job": ..., ...}           the node's proof is the MAC of its first message
    both   MAC {"beat": null}              and so on, each message with its own

A MAC is HMAC-SHA256 in hexadecimal. Its key follows from the secret, the job id, the node's rank, both
nonces and the direction, and it covers the number of the line in this direction and the line itself. So a
line that was recorded in another start, on another connection or in the other direction is refused, and
so is one that is repeated, left out or moved. Before a proof the head parses nothing but the shape of the
first line. It answers a stranger with a nonce and a MAC of fresh random bytes, and closes on anything
else.

The proof hides nothing: who can read the packets on the way can read the messages.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import re
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, Generic, TypeVar

from imgkit_entrypoints.rollcall import messages
from imgkit_entrypoints.rollcall.messages import Message

LONGEST = 64 * 1024
"""Bytes of one line; a longer one comes from another program. The codes of 4,096 nodes need 20 KiB."""
FOREIGN = "it sent something other than a message of imgkit's roll call"
UNPROVEN = "it sent a line without the proof of this run's secret"

_BOTH = selectors.EVENT_READ | selectors.EVENT_WRITE

Heard = TypeVar("Heard")


class Link(Generic[Heard]):
    """A connected socket as a pair of message queues; it never blocks, and never raises if the peer fails.

    Parameters
    ----------
    read : turns a line into a message, and raises ValueError for any other line (messages.py).
    longest : bytes of the longest line to accept.
    """

    def __init__(
        self, connection: socket.socket, read: Callable[[bytes], Heard], *, longest: int = LONGEST
    ) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.heard = self.sent = time.monotonic()
        """Times of the last whole line in and of the last message out."""
        self.why = ""
        """Why the connection is over; empty while it is open."""
        self.longest = longest
        self._read = read
        self._seals: tuple[Seal, Seal] | None = None
        self._inbox = b""
        self._lines: deque[bytes] = deque()
        self._outbox = b""
        self._ended = False
        self._left: int | None = None
        """Bytes that the peer may still send after `shut`; None before."""

    def fileno(self) -> int:
        """Descriptor to wait for."""
        return self.socket.fileno()

    def seal(self, *, incoming: Seal, outgoing: Seal) -> None:
        """Sign each message from now on, and accept signed ones only."""
        self._seals = (incoming, outgoing)

    @property
    def unsent(self) -> bool:
        """Whether something still waits for room in the network."""
        return bool(self._outbox) and not self.why

    def send(self, message: Message) -> None:
        """Queue `message` and send as much as the network takes now."""
        self.send_text(messages.line(message))

    def send_text(self, text: bytes) -> None:
        """Send the text of a message (`messages.line`)."""
        self.send_line(self._seals[1].sign(text) if self._seals else text)

    def send_line(self, line: bytes) -> None:
        """Queue a line as it is, and send as much as the network takes now."""
        self.sent = time.monotonic()
        self._outbox += line + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send as much of the queue as the network takes now."""
        if self.why:
            return
        try:
            while self._outbox:
                self._outbox = self._outbox[self.socket.send(self._outbox) :]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self.why = f"the connection broke: {error.strerror or error}"

    def receive(self) -> list[Heard]:
        """Return the whole messages since the last call; sets `why` when the peer is gone or sends others."""
        self.fill()
        found = []
        while (message := self.next_message()) is not None:
            found.append(message)
        return found

    def fill(self) -> None:
        """Read what has arrived, up to about two of the longest lines; `next_line` takes it from there."""
        if self._outbox:
            self.flush()
        taken, drained = 0, False
        while not drained and not self.why and not self._ended and taken <= self.longest:
            try:
                data = self.socket.recv(self.longest + 1)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self.why = f"the connection broke: {error.strerror or error}"
                return
            self._ended = not data
            taken += len(data)
            drained = len(data) <= self.longest  # less than there was room for
            if self._left is not None:
                self._left -= len(data)
                self.why = FOREIGN if self._left < 0 else ""
                continue
            *lines, self._inbox = (self._inbox + data).split(b"\n")
            if lines:
                self.heard = time.monotonic()
                self._lines.extend(lines)

    def next_line(self) -> bytes | None:
        """Return the next line that has arrived; None, perhaps with `why`, if there is none."""
        if self._lines and not self.why:
            line = self._lines.popleft()
            if len(line) <= self.longest:
                return line
            self.why = FOREIGN
        if not self.why and len(self._inbox) > self.longest:
            self.why = FOREIGN
        if not self.why and self._ended:
            self.why = "it closed the connection"
        return None

    def next_message(self) -> Heard | None:
        """Return the next message that has arrived; None, perhaps with `why`, if there is none."""
        line = self.next_line()
        return None if line is None else self.opened(line)

    def opened(self, line: bytes) -> Heard | None:
        """Return the message in a line; None and `why` if it is none, or not from the other end."""
        opened = self._seals[0].opened(line) if self._seals else line
        if opened is None:
            self.why = UNPROVEN
            return None
        try:
            return self._read(opened)
        except ValueError:
            self.why = FOREIGN
            return None

    def shut(self) -> None:
        """Announce the end, once everything is sent; the peer closes when it has read all.

        What it sends from now on is thrown away, and more than one of the longest lines ends the connection.
        """
        if self._left is None:
            self._left, self._inbox = self.longest, b""
            self._lines.clear()
        self.flush()
        with contextlib.suppress(OSError):
            if not self._outbox and not self.why:
                self.socket.shutdown(socket.SHUT_WR)

    def close(self, linger_s: float = 0.0) -> None:
        """Close; the peer has up to `linger_s` seconds to read the last messages."""
        close_all([self], linger_s)


def close_all(links: Collection[Link[Any]], linger_s: float = 0.0) -> None:
    """Close `links`; their peers have up to `linger_s` seconds together to read the last messages.

    A close with unread input sends a reset, which can overtake the last message.
    """
    end = time.monotonic() + linger_s
    for link in links:
        link.shut()
    with selectors.DefaultSelector() as waiting:
        for link in links if linger_s else ():
            if not link.why:
                waiting.register(link, _BOTH if link.unsent else selectors.EVENT_READ, link)
        while waiting.get_map() and (left := end - time.monotonic()) > 0:
            for key, _ in waiting.select(left):
                one: Link[Any] = key.data
                one.receive()
                if one.why:
                    waiting.unregister(one)
                elif key.events == _BOTH and not one.unsent:
                    one.shut()
                    waiting.modify(one, selectors.EVENT_READ, one)
    for link in links:
        link.socket.close()


NONCE_BYTES = 16
LONGEST_UNPROVEN = 4096
"""Bytes that the head reads of a connection before it has proved the secret."""
OPEN_HEAD = b"imgkit-open"
"""Answer of a head without a secret to a call with a proof. The node believes nothing but its failure."""
_DIGEST = "sha256"
_MAC_CHARACTERS = 2 * hashlib.sha256().digest_size
_CALL = re.compile(rb"imgkit-call (\d{1,7}) ([0-9a-f]{32})")
_ANSWER = re.compile(rb"(imgkit-head ([0-9a-f]{32})) ([0-9a-f]{64})")


def wants_proof(line: bytes) -> bool:
    """Return whether this is the first line of a node that has a secret."""
    return _CALL.fullmatch(line) is not None


class Seal:
    """One direction of a link: it signs or checks line after line."""

    def __init__(self, key: bytes) -> None:
        self._keyed = hmac.new(key, digestmod=_DIGEST)
        self._count = 0

    def mac(self, line: bytes) -> bytes:
        """Return the MAC of the next line of this direction."""
        mac = self._keyed.copy()  # less than half the time of a new one, and a head makes thousands
        mac.update(self._count.to_bytes(8, "big") + line)
        self._count += 1
        return mac.hexdigest().encode()

    def sign(self, line: bytes) -> bytes:
        """Return the next line with its MAC in front."""
        return self.mac(line) + b" " + line

    def opened(self, signed: bytes) -> bytes | None:
        """Return the next line without its MAC; None if the MAC is wrong."""
        mac, line = signed[:_MAC_CHARACTERS], signed[_MAC_CHARACTERS + 1 :]
        return line if hmac.compare_digest(mac, self.mac(line)) else None


class HeadProof:
    """The head's side of one connection: its answer to a call, and the two seals after it."""

    def __init__(self, secret: bytes, run: str, call: bytes) -> None:
        """Read the first line of a connection.

        Raises
        ------
        ValueError : it is no call with a proof.
        """
        found = _CALL.fullmatch(call)
        if found is None:
            raise ValueError("it is not a call with a proof")
        self.node_rank = int(found[1])
        nonce = os.urandom(NONCE_BYTES).hex()
        self.from_head, self.from_node = _seals(secret, run, self.node_rank, found[2].decode(), nonce)
        line = f"imgkit-head {nonce}".encode()
        self.answer = line + b" " + self.from_head.mac(line)


class NodeProof:
    """A node's side of one connection: its call, and the two seals once the head has proved itself."""

    def __init__(self, secret: bytes, run: str, node_rank: int) -> None:
        self._secret, self._run, self._node_rank = secret, run, node_rank
        self._nonce = os.urandom(NONCE_BYTES).hex()
        self.call = f"imgkit-call {node_rank} {self._nonce}".encode()

    def seals(self, answer: bytes) -> tuple[Seal, Seal] | None:
        """Return the seals from the head and from the node; None if the answer does not prove the secret."""
        found = _ANSWER.fullmatch(answer)
        if found is None:
            return None
        head, node = _seals(self._secret, self._run, self._node_rank, self._nonce, found[2].decode())
        return (head, node) if hmac.compare_digest(found[3], head.mac(found[1])) else None


def _seals(secret: bytes, run: str, rank: int, node_nonce: str, head_nonce: str) -> tuple[Seal, Seal]:
    """Return the seals of the lines from the head and from the node."""
    context = json.dumps(["imgkit roll call", run, rank, node_nonce, head_nonce]).encode()
    head, node = (hmac.digest(secret, context + end, _DIGEST) for end in (b" from the head", b" from a node"))
    return Seal(head), Seal(node)

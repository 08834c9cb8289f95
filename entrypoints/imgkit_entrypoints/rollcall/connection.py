"""Non-blocking connections with one message a line, and the handshake by which both ends prove the secret.

With a secret, the first lines are a challenge and response in both directions::

    node   imgkit-join RANK NONCE              16 random bytes of the node, in hexadecimal
    head   imgkit-head NONCE MAC               16 random bytes of the head; the node checks MAC first
    node   MAC {"type": "JoinRequest", ...}    and then plain lines in both directions

A MAC is HMAC-SHA256 in hexadecimal, with the secret as key. It covers the sender, the job id, the node's rank
and both nonces, and the node's covers its request to join as well. So a handshake that was recorded counts in
no other start, on no other connection and in no other direction. Before it, the head parses nothing but the
shape of the first line. It answers a stranger with a nonce and a MAC of fresh random bytes, and closes on
anything else.

The handshake authenticates a connection once, and hides nothing: who controls the network on the way can read
and change the lines after it, as those of torch's store, gloo and NCCL (SECURITY.md).
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import re
import selectors
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from imgkit_entrypoints.rollcall import messages
from imgkit_entrypoints.rollcall.messages import FromHead, FromNode, Heartbeat, Message

# A longer line comes from another program. The exit codes of 4,096 nodes need 20 KiB.
MAX_LINE_BYTES = 64 * 1024
FOREIGN = "it sent something other than a message of imgkit's roll call"
# Time between two tries to send the rest while connections close.
_FLUSH_S = 0.05

Received = TypeVar("Received")


class Connection(Generic[Received]):
    """A connected socket as a pair of message queues; it never blocks, and never raises if the peer fails.

    Parameters
    ----------
    decode : turns a line into a message, and raises ValueError for any other line (messages.py).
    max_line_bytes : length of the longest line to accept.
    """

    def __init__(
        self,
        sock: socket.socket,
        decode: Callable[[bytes], Received],
        *,
        max_line_bytes: int = MAX_LINE_BYTES,
    ) -> None:
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = sock
        self.max_line_bytes = max_line_bytes
        self.last_received = self.last_sent = time.monotonic()
        """Times of the last whole line in and of the last message out."""
        self.error = ""
        """Why the connection is over; empty while it is open."""
        self._decode = decode
        self._input = bytearray()
        self._output = b""
        self._discard_left: int | None = None
        """Bytes that the peer may still send after `finish`; None before."""

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self.socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Return whether something still waits for room in the network."""
        return bool(self._output) and not self.error

    def send(self, message: Message) -> None:
        """Queue `message` and send as much as the network takes now."""
        self.send_line(messages.encode(message))

    def send_line(self, line: bytes) -> None:
        """Queue a line as it is, and send as much as the network takes now."""
        self.last_sent = time.monotonic()
        self._output += line + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send as much of the queue as the network takes now."""
        try:
            while self._output and not self.error:
                self._output = self._output[self.socket.send(self._output) :]
        except BlockingIOError:
            pass
        except OSError as error:
            self.error = f"the connection broke: {error.strerror or error}"

    @property
    def has_line(self) -> bool:
        """Return whether a line has arrived that nobody has taken yet."""
        return b"\n" in self._input

    def receive(self) -> Iterator[Received]:
        """Yield the messages that have arrived, and set `error` if the peer is gone or sent anything else.

        One call reads as much as the longest line; if more has arrived, the socket stays readable.
        """
        line = self.receive_line()
        while line is not None and (message := self.decode(line)) is not None:
            yield message
            line = self._next_line()

    def receive_line(self) -> bytes | None:
        """Return the next line that has arrived; None, perhaps with `error`, if there is none."""
        self._read()
        return self._next_line()

    def decode(self, line: bytes) -> Received | None:
        """Return the message in a line; None, with `error`, if it is none."""
        try:
            return self._decode(line)
        except ValueError:
            self.error = FOREIGN
            return None

    def finish(self) -> None:
        """Announce the end, once everything is sent; the peer closes when it has read all.

        What it sends from now on is discarded, and more than one of the longest lines ends the connection.
        """
        if self._discard_left is None:
            self._discard_left = self.max_line_bytes
            self._input.clear()
        self.flush()
        if not self._output and not self.error:
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_WR)

    def close(self, linger_s: float = 0.0) -> None:
        """Close; the peer has up to `linger_s` seconds to read the last messages."""
        close_all([self], linger_s)

    def _read(self) -> None:
        if self._output:
            self.flush()
        if self.error or self.has_line:
            return
        try:
            data = self.socket.recv(self.max_line_bytes + 1)
        except BlockingIOError:
            return
        except ConnectionResetError:
            # A process that is killed with unread input resets its connections.
            data = b""
        except OSError as error:
            self.error = f"the connection broke: {error.strerror or error}"
            return
        if not data:
            self.error = "it closed the connection"
        elif self._discard_left is None:
            self._input += data
        else:
            self._discard_left -= len(data)
            self.error = FOREIGN if self._discard_left < 0 else ""

    def _next_line(self) -> bytes | None:
        length = self._input.find(b"\n")
        if max(length, len(self._input) if length < 0 else 0) > self.max_line_bytes:
            self.error = FOREIGN
        if self.error or length < 0:
            return None
        line = bytes(self._input[:length])
        del self._input[: length + 1]
        self.last_received = time.monotonic()
        return line


def close_all(connections: Collection[Connection[Any]], linger_s: float = 0.0) -> None:
    """Close `connections`; their peers have up to `linger_s` seconds together to read the last messages.

    A close with unread input sends a reset, which can overtake the last message.
    """
    for connection in connections:
        connection.finish()
    if linger_s:
        _await_ends({connection for connection in connections if not connection.error}, linger_s)
    for connection in connections:
        connection.socket.close()


def _await_ends(connections: set[Connection[Any]], seconds: float) -> None:
    """Send the rest, and wait up to `seconds` until all peers have closed their ends."""
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ, connection)
        while connections and (left_s := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(min(left_s, _FLUSH_S)):
                key.data.receive_line()
                if key.data.error:
                    selector.unregister(key.data)
                    connections.remove(key.data)
            for connection in connections:
                if connection.has_unsent:
                    connection.finish()


class NodeConnections:
    """The head's connections to all nodes by node rank, on one epoll.

    A message costs work for its own connection only. A node that reads slowly or not at all delays nobody:
    what it has not taken waits here until the next turn.
    """

    def __init__(self) -> None:
        self.closed: dict[int, str] = {}
        """Nodes whose connection is over, and why, until `take_closed`."""
        self._connections: dict[int, Connection[FromNode]] = {}
        self._unsent: set[Connection[FromNode]] = set()
        self._selector = selectors.DefaultSelector()

    def fileno(self) -> int:
        """Return the descriptor that is readable when `receive` has something to do."""
        return self._selector.fileno()

    def __contains__(self, rank: object) -> bool:
        return rank in self._connections

    def add(self, rank: int, connection: Connection[FromNode]) -> None:
        """Take over the connection of a node."""
        connection.max_line_bytes = MAX_LINE_BYTES
        self._connections[rank] = connection
        self._selector.register(connection, selectors.EVENT_READ, rank)

    def drop(self, rank: int) -> None:
        """Close the connection of a node."""
        connection = self._connections.pop(rank)
        self._unsent.discard(connection)
        self._selector.unregister(connection)
        connection.close()

    def renumber(self, ranks: Mapping[int, int]) -> None:
        """Give each node its new rank."""
        self._connections = {ranks[rank]: connection for rank, connection in self._connections.items()}
        self.closed = {ranks[rank]: reason for rank, reason in self.closed.items()}
        for rank, connection in self._connections.items():
            self._selector.modify(connection, selectors.EVENT_READ, rank)

    def take_closed(self) -> list[tuple[int, str]]:
        """Return the nodes whose connection is over since the last call, and why."""
        closed, self.closed = self.closed, {}
        return list(closed.items())

    def receive(self, seconds: float = 0.0) -> list[tuple[int, FromNode]]:
        """Wait up to `seconds` for anything; return node ranks with their messages in order."""
        received = []
        for key, _ in self._selector.select(seconds):
            connection = self._connections[key.data]
            received += [(key.data, message) for message in connection.receive()]
            if connection.error:
                self.closed[key.data] = connection.error
                self.drop(key.data)
        for connection in list(self._unsent):
            connection.flush()
            if not connection.has_unsent:
                self._unsent.remove(connection)
        return received

    def beat(
        self, heartbeat: Heartbeat, *, beat_s: float, lost_after_s: float, finished: Collection[int] = ()
    ) -> None:
        """Send `heartbeat` where nothing was sent for `beat_s`, and close what is silent for `lost_after_s`.

        Parameters
        ----------
        finished : nodes that may be silent.
        """
        now, line = time.monotonic(), messages.encode(heartbeat)
        for rank, connection in list(self._connections.items()):
            if now - connection.last_received > lost_after_s and rank not in finished:
                self.closed[rank] = f"no heartbeat for {lost_after_s:g} s"
                self.drop(rank)
            elif now - connection.last_sent >= beat_s and not connection.has_unsent:
                self._send(connection, line)

    def send(self, rank: int, message: FromHead) -> None:
        """Send a message to one node, if it is there."""
        if connection := self._connections.get(rank):
            self._send(connection, messages.encode(message))

    def send_all(self, message: FromHead, *, but: int | None = None) -> None:
        """Send a message to all nodes, or to all but one."""
        line = messages.encode(message)
        for rank, connection in self._connections.items():
            if rank != but:
                self._send(connection, line)

    def close(self, linger_s: float) -> None:
        """Close all; the nodes have up to `linger_s` seconds together to read the last messages."""
        close_all(self._connections.values(), linger_s)
        self._connections.clear()
        self._selector.close()

    def _send(self, connection: Connection[FromNode], line: bytes) -> None:
        connection.send_line(line)
        if connection.has_unsent:
            self._unsent.add(connection)


# Bytes that the head reads of a connection before it belongs to the run.
MAX_HANDSHAKE_BYTES = 4096
# Answer of a head without a secret to a node that has one. The node believes nothing but its failure.
OPEN_HEAD = b"imgkit-open"
_OPENING = re.compile(rb"imgkit-join (\d{1,7}) ([0-9a-f]{32})")
_ANSWER = re.compile(rb"imgkit-head ([0-9a-f]{32}) ([0-9a-f]{64})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Handshake:
    """What both ends know of the handshake of one connection."""

    secret: bytes
    job_id: str
    node_rank: int
    node_nonce: str = field(default_factory=lambda: os.urandom(16).hex())
    head_nonce: str = ""

    @property
    def opening(self) -> bytes:
        """The node's first line."""
        return f"imgkit-join {self.node_rank} {self.node_nonce}".encode()

    @classmethod
    def accept(cls, secret: bytes, job_id: str, opening: bytes) -> Handshake | None:
        """Return the head's handshake with a node that has sent `opening`; None if that is no opening."""
        match = _OPENING.fullmatch(opening)
        if match is None:
            return None
        return cls(
            secret=secret,
            job_id=job_id,
            node_rank=int(match[1]),
            node_nonce=match[2].decode(),
            head_nonce=os.urandom(16).hex(),
        )

    @property
    def answer(self) -> bytes:
        """The head's first line."""
        return f"imgkit-head {self.head_nonce} ".encode() + self._mac("head", b"")

    def confirm(self, answer: bytes) -> Handshake | None:
        """Return the node's handshake with the head that has sent `answer`; None if that proves no secret."""
        match = _ANSWER.fullmatch(answer)
        if match is None:
            return None
        confirmed = replace(self, head_nonce=match[1].decode())
        return confirmed if hmac.compare_digest(answer, confirmed.answer) else None

    def sign(self, request: bytes) -> bytes:
        """Return the node's second line, which holds `request`."""
        return self._mac("node", request) + b" " + request

    def verify(self, line: bytes) -> bytes | None:
        """Return the request in the node's second line; None if that proves no secret."""
        request = line.partition(b" ")[2]
        return request if hmac.compare_digest(line, self.sign(request)) else None

    def _mac(self, sender: str, request: bytes) -> bytes:
        context = ["imgkit roll call", sender, self.job_id, self.node_rank, self.node_nonce, self.head_nonce]
        return hmac.digest(self.secret, json.dumps(context).encode() + request, "sha256").hex().encode()

"""Non-blocking connections that carry one message per line, and the handshake that opens them.

In the handshake, both ends prove that they know the secret of the run. The first lines are a challenge and a
    response in
each direction::

    node   imgkit-join RANK NONCE              16 random bytes of the node, in hexadecimal
    head   imgkit-head NONCE MAC               16 random bytes of the head; the node checks MAC first
    node   MAC {"type": "JoinRequest", ...}    and then plain lines in both directions

The head is the node with rank 0. A MAC is an HMAC-SHA256 in hexadecimal, with the secret as key. It covers
the sender, the job id, the node's rank and both nonces. The node's MAC also covers its request to join. So a
recorded handshake is useless for another start, another connection or the other direction.

Before the handshake, the head only checks the shape of the first line. If the shape is right, the head
answers with a fresh nonce and its MAC, even to a stranger. It closes the connection if anything unexpected
arrives.

The handshake authenticates a connection once, but encrypts nothing. Whoever controls the network between the
nodes can read and change the lines after the handshake. The same is true for the data of torch's store, gloo
and NCCL (SECURITY.md).
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import re
import socket
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

from imgkit_entrypoints.rollcall import messages
from imgkit_entrypoints.rollcall.messages import Message

# The longest message is a failure with its traceback, of 40 KiB. A longer line can only come from another
# program.
MAX_LINE_BYTES = 64 * 1024
FOREIGN = "it sent something other than a message of imgkit's roll call"


class Connection:
    """A connected socket that sends and receives messages.

    The methods do not block, except `close` with a time and `wait_for_end`. They raise no error if the peer
    fails. The reason is in `error` instead.
    """

    def __init__(self, sock: socket.socket, *, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = sock
        self.max_line_bytes = max_line_bytes
        self.last_received = self.last_sent = time.monotonic()
        """Times at which the last complete line arrived and the last message was sent."""
        self.error = ""
        """Why the connection is over. Empty while the connection is open."""
        self._input = bytearray()
        self._output = b""

    def fileno(self) -> int:
        """Return the descriptor of the socket, so that `select` can wait for the connection."""
        return self.socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Return whether the queue contains data that the network could not take yet."""
        return bool(self._output) and not self.error

    def send(self, message: Message) -> None:
        """Queue a message, and send as much of the queue as the network accepts now."""
        self.send_line(messages.encode(message))

    def send_line(self, line: bytes) -> None:
        """Queue a line without encoding it, and send as much of the queue as the network accepts now."""
        self.last_sent = time.monotonic()
        self._output += line + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send as much of the queue as the network accepts now."""
        try:
            while self._output and not self.error:
                self._output = self._output[self.socket.send(self._output) :]
        except BlockingIOError:  # the network accepts nothing more now, so the rest stays in the queue
            pass
        except OSError as error:
            self.error = f"the connection broke: {error.strerror or error}"

    def receive(self) -> Iterator[Message]:
        """Yield the messages that have arrived.

        If the peer is gone, or has sent something that is not a message, set `error`.
        """
        for line in self.receive_lines():
            message = self.decode(line)
            if message is None:
                return
            yield message

    def receive_lines(self) -> Iterator[bytes]:
        """Yield the complete lines that have arrived. If the peer is gone, set `error`.

        One call reads about as many bytes as the longest line may have. If more data has arrived, the socket
        stays readable. The end of the connection is only read once no data is left, so an earlier call has
        yielded the last lines. If the caller stops early, the remaining lines stay for the next call, but are
        dropped if that call reads the end.
        """
        self._read()
        while not self.error:
            length = self._input.find(b"\n")
            if length < 0:
                return
            line = bytes(self._input[:length])
            del self._input[: length + 1]
            self.last_received = time.monotonic()
            yield line

    def decode(self, line: bytes) -> Message | None:
        """Return the message in a line. If the line is not a message, set `error` and return None."""
        try:
            return messages.decode(line)
        except ValueError:
            self.error = FOREIGN
            return None

    def end_sending(self) -> None:
        """Send the rest of the queue. If all of it could be sent, tell the peer that nothing more follows.

        The peer closes its end once it has read everything.
        """
        self.flush()
        if not self._output:
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_WR)

    def close(self, linger_s: float = 0.0) -> None:
        """Close the connection, after the peer has had up to `linger_s` seconds to read the last messages."""
        close_all([self], linger_s)

    def wait_for_end(self, deadline: float) -> None:
        """Send the rest of the queue, and wait until the peer has closed its end, or until the deadline.

        If this end closed first, with input that it has not read, the peer could lose the last messages.
        """
        with contextlib.suppress(OSError):
            self.socket.settimeout(max(0.0, deadline - time.monotonic()))
            self.socket.sendall(self._output)
            self.socket.shutdown(socket.SHUT_WR)
            # Discard what still arrives. recv returns nothing once the peer has closed its end.
            while self.socket.recv(MAX_LINE_BYTES):
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return
                self.socket.settimeout(left_s)

    def _read(self) -> None:
        """Send the queue, and append the data that has arrived to the input. Do not wait for data.

        If the connection is over, set `error`.
        """
        self.flush()
        if self.error:
            return
        try:
            # One byte more than the longest line, so that a longer line can be recognized.
            received = self.socket.recv(self.max_line_bytes + 1)
        except BlockingIOError:
            return
        # If a process is killed before it has read its input, the kernel resets its connections. For us, that
        # is the same as a closed connection.
        except ConnectionResetError:
            received = b""
        except OSError as error:
            self.error = f"the connection broke: {error.strerror or error}"
            return
        self._input += received
        if not received:
            self.error = "it closed the connection"
        elif self._has_long_line():
            self.error = FOREIGN

    def _has_long_line(self) -> bool:
        """Return whether a line of the input is too long. An incomplete last line counts as well."""
        if len(self._input) <= self.max_line_bytes:
            return False
        return max(map(len, self._input.split(b"\n"))) > self.max_line_bytes


def close_all(connections: Collection[Connection], linger_s: float = 0.0) -> None:
    """Close connections, after their peers have had time to read the last messages.

    All peers together have up to `linger_s` seconds. Closing a connection with unread input would send a
    reset, which can overtake the last message.
    """
    # First end all connections, so that all peers read at the same time.
    for connection in connections:
        connection.end_sending()
    deadline = time.monotonic() + linger_s
    for connection in connections:
        if linger_s and not connection.error:
            connection.wait_for_end(deadline)
        connection.socket.close()


# The first lines of both ends: "imgkit-join 12 5f1c..." and "imgkit-head 5f1c... 9a02...".
_OPENING = re.compile(rb"imgkit-join (\d{1,7}) ([0-9a-f]{32})")
_ANSWER = re.compile(rb"imgkit-head ([0-9a-f]{32}) ([0-9a-f]{64})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Handshake:
    """The state of the handshake of one connection, at one of its ends.

    In the handshake, a node and the head (the node with rank 0) prove that they know the secret. The node
    creates its state with a new nonce, and `confirm` adds the head's nonce. The head creates its state with
    `accept`.
    """

    secret: bytes
    job_id: str
    node_rank: int
    node_nonce: str = field(default_factory=lambda: os.urandom(16).hex())
    head_nonce: str = ""

    @property
    def opening(self) -> bytes:
        """Return the first line, which the node sends. It contains the node's rank and nonce."""
        return f"imgkit-join {self.node_rank} {self.node_nonce}".encode()

    @classmethod
    def accept(cls, secret: bytes, job_id: str, opening: bytes) -> Handshake | None:
        """Return the head's state of the handshake with a node whose first line is `opening`.

        Return None if the line has another format.
        """
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
        """Return the head's answer to the first line. It contains the head's nonce and its proof."""
        return f"imgkit-head {self.head_nonce} ".encode() + self._mac("head", b"")

    def confirm(self, answer: bytes) -> Handshake | None:
        """Return the node's state of the handshake after the head's `answer`.

        Return None if the answer does not prove that the head knows the secret.
        """
        match = _ANSWER.fullmatch(answer)
        if match is None:
            return None
        confirmed = replace(self, head_nonce=match[1].decode())
        if not hmac.compare_digest(answer, confirmed.answer):
            return None
        return confirmed

    def sign(self, request: bytes) -> bytes:
        """Return the node's second line, which contains the proof of the secret and `request`."""
        return self._mac("node", request) + b" " + request

    def verify(self, line: bytes) -> bytes | None:
        """Return the request that the node's second line contains.

        Return None if the line does not prove that the node knows the secret.
        """
        _, _, request = line.partition(b" ")
        if not hmac.compare_digest(line, self.sign(request)):
            return None
        return request

    def _mac(self, sender: str, request: bytes) -> bytes:
        """Return the proof that `sender` knows the secret and has sent `request` on this connection."""
        context = ["imgkit roll call", sender, self.job_id, self.node_rank, self.node_nonce, self.head_nonce]
        return hmac.digest(self.secret, json.dumps(context).encode() + request, "sha256").hex().encode()

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
import socket
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

from imgkit_entrypoints.rollcall import messages
from imgkit_entrypoints.rollcall.messages import Message

# A longer line comes from another program. A failure with its traceback needs 40 KiB.
MAX_LINE_BYTES = 64 * 1024
FOREIGN = "it sent something other than a message of imgkit's roll call"


class Connection:
    """A connected socket as a pair of message queues.

    Its methods never block, but for `close` with a time, and never raise if the peer fails: `error` says why.
    """

    def __init__(self, sock: socket.socket, *, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = sock
        self.max_line_bytes = max_line_bytes
        self.last_received = self.last_sent = time.monotonic()
        """Times of the last whole line in and of the last message out."""
        self.error = ""
        """Why the connection is over. It is empty while it is open."""
        self._input = bytearray()
        self._output = b""

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self.socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Return whether something still waits for room in the network."""
        return bool(self._output) and not self.error

    def send(self, message: Message) -> None:
        """Queue a message, and send as much as the network takes now."""
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

    def receive(self) -> Iterator[Message]:
        """Yield the messages that have arrived, and set `error` if the peer is gone or sent anything else."""
        for line in self.receive_lines():
            message = self.decode(line)
            if message is None:
                return
            yield message

    def receive_lines(self) -> Iterator[bytes]:
        """Yield the whole lines that have arrived, and set `error` if the peer is gone.

        One call reads as much as the longest line; if more has arrived, the socket stays readable.
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
        """Return the message in a line. If it is no message, set `error` and return None."""
        try:
            return messages.decode(line)
        except ValueError:
            self.error = FOREIGN
            return None

    def end_sending(self) -> None:
        """Send the rest of the queue, and announce the end of sending if all of it could be sent.

        The peer closes its end when it has read everything.
        """
        self.flush()
        if not self._output:
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_WR)

    def close(self, linger_s: float = 0.0) -> None:
        """Close the connection. The peer has up to `linger_s` seconds to read the last messages."""
        close_all([self], linger_s)

    def wait_for_end(self, deadline: float) -> None:
        """Send the rest, and wait until the peer has closed its end, at most until the deadline.

        If this end closed first, with unread input, the peer could lose the last messages.
        """
        with contextlib.suppress(OSError):
            self.socket.settimeout(max(0.0, deadline - time.monotonic()))
            self.socket.sendall(self._output)
            self.socket.shutdown(socket.SHUT_WR)
            # Drop what still arrives, until recv returns nothing: the peer has closed its end.
            while self.socket.recv(MAX_LINE_BYTES):
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return
                self.socket.settimeout(left_s)

    def _read(self) -> None:
        """Send the queue, and add what has arrived to the input. Set `error` if the connection is over."""
        self.flush()
        if self.error:
            return
        try:
            data = self.socket.recv(self.max_line_bytes + 1)
        except BlockingIOError:
            return
        except ConnectionResetError:  # a process that is killed with unread input resets its connections
            data = b""
        except OSError as error:
            self.error = f"the connection broke: {error.strerror or error}"
            return
        self._input += data
        if not data:
            self.error = "it closed the connection"
        elif self._has_long_line():
            self.error = FOREIGN

    def _has_long_line(self) -> bool:
        """Return whether a line of the input is too long, also one that has not arrived as a whole."""
        if len(self._input) <= self.max_line_bytes:
            return False
        return max(map(len, self._input.split(b"\n"))) > self.max_line_bytes


def close_all(connections: Collection[Connection], linger_s: float = 0.0) -> None:
    """Close connections. Their peers have up to `linger_s` seconds together to read the last messages.

    A close with unread input sends a reset, which can overtake the last message.
    """
    for connection in connections:
        connection.end_sending()
    deadline = time.monotonic() + linger_s
    for connection in connections:
        if linger_s and not connection.error:
            connection.wait_for_end(deadline)
        connection.socket.close()


# "imgkit-join 12 5f1c..." and "imgkit-head 5f1c... 9a02...", as the top of this module shows them.
_OPENING = re.compile(rb"imgkit-join (\d{1,7}) ([0-9a-f]{32})")
_ANSWER = re.compile(rb"imgkit-head ([0-9a-f]{32}) ([0-9a-f]{64})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Handshake:
    """The handshake of one connection, as one end knows it.

    The node makes it with a nonce of its own, and `confirm` adds the head's. The head makes it by `accept`.
    """

    secret: bytes
    job_id: str
    node_rank: int
    node_nonce: str = field(default_factory=lambda: os.urandom(16).hex())
    head_nonce: str = ""

    @property
    def opening(self) -> bytes:
        """Return the node's first line."""
        return f"imgkit-join {self.node_rank} {self.node_nonce}".encode()

    @classmethod
    def accept(cls, secret: bytes, job_id: str, opening: bytes) -> Handshake | None:
        """Return the head's handshake with a node whose first line is `opening`, or None for another line."""
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
        """Return the head's first line."""
        return f"imgkit-head {self.head_nonce} ".encode() + self._mac("head", b"")

    def confirm(self, answer: bytes) -> Handshake | None:
        """Return the node's handshake with the head that sent `answer`.

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
        """Return the node's second line, which holds `request`."""
        return self._mac("node", request) + b" " + request

    def verify(self, line: bytes) -> bytes | None:
        """Return the request in the node's second line.

        Return None if the line does not prove that the node knows the secret.
        """
        _, _, request = line.partition(b" ")
        if not hmac.compare_digest(line, self.sign(request)):
            return None
        return request

    def _mac(self, sender: str, request: bytes) -> bytes:
        """Return the proof that `sender` knows the secret, and has sent `request` on this connection."""
        context = ["imgkit roll call", sender, self.job_id, self.node_rank, self.node_nonce, self.head_nonce]
        return hmac.digest(self.secret, json.dumps(context).encode() + request, "sha256").hex().encode()

"""One non-blocking connection that carries one message a line."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from imgkit_entrypoints.rollcall import messages
from imgkit_entrypoints.rollcall.messages import Message

if TYPE_CHECKING:
    from imgkit_entrypoints.rollcall.proof import Seal

LONGEST = 64 * 1024
"""Bytes of one line; a longer one comes from another program. The codes of 4,096 nodes need 20 KiB."""
FOREIGN = "it sent what is no message of imgkit's roll call"
UNPROVEN = "it sent a line without the proof of this run's secret"

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
        """Times of the last bytes in and of the last message out."""
        self.why = ""
        """Why the connection is over; empty while it is open."""
        self.longest = longest
        self._read = read
        self._seals: tuple[Seal, Seal] | None = None
        self._inbox = b""
        self._lines: deque[bytes] = deque()
        self._outbox = b""
        self._ended = False

    def fileno(self) -> int:
        """Descriptor to wait for."""
        return self.socket.fileno()

    def seal(self, *, incoming: Seal, outgoing: Seal) -> None:
        """Sign each message from now on, and accept signed ones only (proof.py)."""
        self._seals = (incoming, outgoing)

    def send(self, message: Message) -> None:
        """Queue `message` and send as much as the network takes now."""
        line = messages.line(message)
        self.send_line(self._seals[1].sign(line) if self._seals else line)

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
        self.flush()
        taken = 0
        while not self.why and not self._ended and taken <= self.longest:
            try:
                data = self.socket.recv(self.longest + 1)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self.why = f"the connection broke: {error.strerror or error}"
                return
            self.heard = time.monotonic()
            self._ended = not data
            taken += len(data)
            *lines, self._inbox = (self._inbox + data).split(b"\n")
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
        """Announce the end, once everything is sent; the peer closes when it has read all."""
        self.flush()
        with contextlib.suppress(OSError):
            if not self._outbox and not self.why:
                self.socket.shutdown(socket.SHUT_WR)

    def close(self, linger_s: float = 0.0) -> None:
        """Close; the peer has up to `linger_s` seconds to read the last messages.

        A close with unread input sends a reset, which can overtake the last message.
        """
        end = time.monotonic() + linger_s
        self.shut()
        while not self.why and (left := end - time.monotonic()) > 0:
            waiting = select.poll()  # select.select would end at descriptor 1023
            waiting.register(self.socket, select.POLLIN | (select.POLLOUT if self._outbox else 0))
            waiting.poll(left * 1000)
            self.receive()
        self.socket.close()

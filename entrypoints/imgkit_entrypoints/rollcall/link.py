"""One non-blocking connection that carries one JSON object a line."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from typing import Any

from imgkit_entrypoints import json_text

LONGEST = 64 * 1024
"""Bytes of one line; a longer one comes from another program."""


class Link:
    """A connected socket as a pair of message queues; it never blocks, and never raises if the peer fails."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.heard = self.sent = time.monotonic()
        """Times of the last bytes in and of the last message out."""
        self.why = ""
        """Why the connection is over; empty while it is open."""
        self._inbox = b""
        self._outbox = b""

    def fileno(self) -> int:
        """Descriptor to wait for."""
        return self.socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Queue `message` and send as much as the network takes now."""
        self.sent = time.monotonic()
        self._outbox += json.dumps(message).encode() + b"\n"
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

    def receive(self) -> list[dict[str, Any]]:
        """Return the whole messages since the last call; sets `why` when the peer is gone."""
        self.flush()
        eof = False
        while not self.why and not eof:
            try:
                data = self.socket.recv(65536)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                self.why = f"the connection broke: {error.strerror or error}"
                break
            eof = not data
            self._inbox += data
            self.heard = time.monotonic()
            if len(self._inbox) > LONGEST:
                break
        *lines, self._inbox = self._inbox.split(b"\n")
        messages = []
        for line in lines:
            try:
                message = json_text.parse(line)
            except ValueError:
                message = None
            if not isinstance(message, dict):
                self.why = "it is no roll call of imgkit"
                break
            messages.append(message)
        if len(self._inbox) > LONGEST:
            self.why = "it is no roll call of imgkit"
        if eof and not self.why:
            self.why = "it closed the connection"
        return messages

    def close(self, linger_s: float = 0.0) -> None:
        """Close; the peer has up to `linger_s` seconds to read the last messages.

        A close with unread input sends a reset, which can overtake the last message.
        """
        end = time.monotonic() + linger_s
        self.flush()
        with contextlib.suppress(OSError):
            if not self._outbox and not self.why:
                self.socket.shutdown(socket.SHUT_WR)
        while not self.why and (left := end - time.monotonic()) > 0:
            waiting = select.poll()  # select.select would end at descriptor 1023
            waiting.register(self.socket, select.POLLIN | (select.POLLOUT if self._outbox else 0))
            waiting.poll(left * 1000)
            self.receive()
        self.socket.close()

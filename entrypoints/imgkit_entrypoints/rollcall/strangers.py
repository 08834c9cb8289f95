"""The head's listener, and the connections that have not yet shown that they belong to the run.

A stranger has a descriptor of the head, `MAX_HANDSHAKE_BYTES` of memory and `MAX_WAIT_S` seconds. There are
at most `MAX_STRANGERS` of them, and one more for each node that has not joined yet. The oldest is closed
first; a node calls again. Nothing here blocks.
"""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from imgkit_entrypoints.rollcall import messages
from imgkit_entrypoints.rollcall.connection import (
    FOREIGN,
    MAX_HANDSHAKE_BYTES,
    OPEN_HEAD,
    Connection,
    Handshake,
)
from imgkit_entrypoints.rollcall.messages import FromNode, JoinRequest, Refused

MAX_STRANGERS = 64
# Time in which a connection must show that it belongs to the run.
MAX_WAIT_S = 5.0
# Time without new connections after the system had no descriptor for one.
PAUSE_S = 0.2
# Connections accepted in one turn, so that no flood keeps the head from its nodes.
ACCEPTED = 256
# Lines in the log about strangers; a flood must not fill the disk.
MAX_REPORTS = 16
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(slots=True, kw_only=True, eq=False)
class _Stranger:
    connection: Connection[FromNode]
    address: str
    since: float
    handshake: Handshake | None = None
    is_refused: bool = False
    """It has its refusal, and has until its time is over to read it."""


class Strangers:
    """All connections to the head that are not part of the run.

    Parameters
    ----------
    secret : None: a request to join with the right job id is enough.
    log : takes the few lines about connections that were refused.
    """

    def __init__(
        self, listener: socket.socket, *, job_id: str, secret: bytes | None, log: Callable[[str], None]
    ) -> None:
        self.reports: list[str] = []
        """Lines about connections that were not counted."""
        self._listener, self._job_id, self._secret, self._log = listener, job_id, secret, log
        # By descriptor, the oldest first.
        self._strangers: dict[int, _Stranger] = {}
        self._paused_until = 0.0
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def fileno(self) -> int:
        """Return the descriptor that is readable when `joining_nodes` has something to do."""
        return self._selector.fileno()

    def joining_nodes(self, missing: int = 0) -> list[tuple[Connection[FromNode], JoinRequest]]:
        """Return the nodes of the run that have asked to join since the last turn.

        Parameters
        ----------
        missing : nodes that have not joined yet.
        """
        now = time.monotonic()
        if self._paused_until and now >= self._paused_until:
            self._paused_until = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ)
        nodes = []
        for key, _ in self._selector.select(0):
            stranger = self._strangers.get(key.fd)
            if key.fileobj is self._listener:
                self._accept(MAX_STRANGERS + missing)
            elif stranger and (request := self._read(stranger)):
                self._forget(stranger)
                nodes.append((stranger.connection, request))
        while self._strangers and now - (oldest := self._oldest()).since > MAX_WAIT_S:
            if not oldest.is_refused:
                self._report(oldest, "did not join as a node of this run")
            self._close(oldest)
        return nodes

    def refuse(self, connection: Connection[FromNode], refusal: Refused) -> None:
        """Refuse a node that has asked to join; it has a moment to read why, and nobody waits for it."""
        stranger = self._add(connection, "")
        self._refuse(stranger, messages.encode(refusal))

    def close(self) -> None:
        """Close the listener and every connection that is left."""
        for stranger in list(self._strangers.values()):
            self._close(stranger)
        self._selector.close()
        self._listener.close()

    def _accept(self, most: int) -> None:
        for _ in range(ACCEPTED):
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in NO_DESCRIPTOR:
                    # This connection is gone again (ECONNABORTED).
                    continue
                if self._strangers:
                    self._close(self._oldest())
                # The listener stays readable, and would wake the head for ever.
                self._selector.unregister(self._listener)
                self._paused_until = time.monotonic() + PAUSE_S
                return
            if len(self._strangers) >= most:
                self._close(self._oldest())
            connection = Connection(sock, messages.from_node, max_line_bytes=MAX_HANDSHAKE_BYTES)
            # A listener for IPv4 and IPv6 sees an IPv4 address with this prefix.
            self._add(connection, address[0].removeprefix("::ffff:"))

    def _read(self, stranger: _Stranger) -> JoinRequest | None:
        """Return the request of a node of the run; close the connection of anything else."""
        connection = stranger.connection
        if stranger.is_refused:
            # What it sends is discarded.
            connection.receive_line()
        while not stranger.is_refused and (line := connection.receive_line()) is not None:
            if self._secret is not None and stranger.handshake is None:
                self._answer(stranger, line, self._secret)
            elif (request := self._request(stranger, line)) is not None:
                return request
        if connection.error:
            if stranger.handshake:
                claimed = f"claimed to be node {stranger.handshake.node_rank} without proving the secret"
                self._report(stranger, claimed)
            elif connection.error == FOREIGN and not stranger.is_refused:
                self._report(stranger, "sent something other than an imgkit roll call")
            self._close(stranger)
        return None

    def _answer(self, stranger: _Stranger, line: bytes, secret: bytes) -> None:
        """Prove the secret to a node that has one."""
        if line.startswith(b"{"):
            # A node without a secret; the answer is the same for all of them.
            self._report(stranger, "connected without a secret")
            refusal = Refused(
                what="the head requires a secret, and this node has none",
                hint="pass the same --secret-file to both, or share one home folder",
            )
            self._refuse(stranger, messages.encode(refusal))
            return
        stranger.handshake = Handshake.accept(secret, self._job_id, line)
        if stranger.handshake:
            stranger.connection.send_line(stranger.handshake.answer)
        else:
            stranger.connection.error = FOREIGN

    def _request(self, stranger: _Stranger, line: bytes) -> JoinRequest | None:
        """Return the request in the line after the answer, or without a secret in the first line of all."""
        connection, handshake = stranger.connection, stranger.handshake
        if handshake is None and line.startswith(b"imgkit-join "):
            self._report(stranger, "connected with a secret, and this node has none")
            self._refuse(stranger, OPEN_HEAD)
            return None
        verified = handshake.verify(line) if handshake else line
        request = None if verified is None else connection.decode(verified)
        if not isinstance(request, JoinRequest) or (handshake and handshake.node_rank != request.node_rank):
            connection.error = FOREIGN
            return None
        if request.job != self._job_id:
            # The head's job id stays secret: in a start without a secret, who knows it can join as a node.
            problem = f"{request.node.host} belongs to job {request.job!r}, the head to another"
            self._report(stranger, problem)
            self._refuse(stranger, messages.encode(Refused(what=problem)))
            return None
        return request

    def _refuse(self, stranger: _Stranger, line: bytes) -> None:
        stranger.handshake, stranger.is_refused = None, True
        stranger.connection.send_line(line)
        stranger.connection.finish()

    def _report(self, stranger: _Stranger, problem: str) -> None:
        """Log once what a stranger did."""
        text = f"{stranger.address} {problem}"
        if text not in self.reports and len(self.reports) <= MAX_REPORTS:
            self.reports.append(text)
            end = "; further ones are not reported" if len(self.reports) > MAX_REPORTS else ""
            self._log(f"roll call: {text}; ignored{end}")

    def _add(self, connection: Connection[FromNode], address: str) -> _Stranger:
        stranger = _Stranger(connection=connection, address=address, since=time.monotonic())
        self._strangers[connection.fileno()] = stranger
        self._selector.register(connection, selectors.EVENT_READ)
        return stranger

    def _oldest(self) -> _Stranger:
        return next(iter(self._strangers.values()))

    def _forget(self, stranger: _Stranger) -> None:
        del self._strangers[stranger.connection.fileno()]
        self._selector.unregister(stranger.connection)

    def _close(self, stranger: _Stranger) -> None:
        self._forget(stranger)
        stranger.connection.close()

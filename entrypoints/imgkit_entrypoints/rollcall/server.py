"""The head's listener and all connections to it. One epoll waits for all of them.

The head is the node with rank 0. A new connection is a stranger until it has shown that it belongs to the
run. After that, it is a node. To limit what strangers can do, each of them gets one descriptor of the head,
`MAX_HANDSHAKE_BYTES` of memory and `MAX_WAIT_S` seconds. There are at most `MAX_STRANGERS` of them, and one
more for each node that has not joined yet. If there are too many, the oldest is closed. If that was a node,
it connects again.

A message only causes work for its own connection. A node that reads slowly or not at all delays no other
node, because data that it has not accepted waits in a queue.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Mapping

from imgkit_entrypoints.rollcall import messages
from imgkit_entrypoints.rollcall.connection import FOREIGN, MAX_LINE_BYTES, Connection, Handshake, close_all
from imgkit_entrypoints.rollcall.messages import Heartbeat, JoinRequest, Message, Refused

MAX_STRANGERS = 64
MAX_HANDSHAKE_BYTES = 4096
# Seconds in which a connection must show that it belongs to the run.
MAX_WAIT_S = 5.0
# Seconds that the head waits if the system has no descriptor for a new connection.
PAUSE_S = 0.05
# Largest number of connections that are accepted at once, so that a flood cannot keep the head from its
# nodes.
MAX_ACCEPTED = 256
# Largest number of lines in the log about strangers, so that a flood cannot fill the disk.
MAX_REPORTS = 16


class HeadConnection(Connection):
    """A connection to the head, from a node or from a stranger, which may not belong to the run."""

    def __init__(self, sock: socket.socket, address: str) -> None:
        super().__init__(sock, max_line_bytes=MAX_HANDSHAKE_BYTES)
        self.address = address
        self.since = time.monotonic()
        self.rank: int | None = None
        """Node rank of the peer. None for a stranger, and for a node that has only asked to join."""
        self.handshake: Handshake | None = None
        self.is_refused = False
        """True if the peer was refused. The connection stays open for a while, so that it can read why."""


class Server:
    """The listener of the head, the connections to its nodes, and connections of strangers.

    Parameters
    ----------
    listener : the socket on which the head listens. None if the run has no other nodes.
    secret : the secret that nodes have to prove. With None, a request to join with the right job id is
        enough.
    log : prints the few lines about connections that were refused.
    """

    def __init__(
        self,
        listener: socket.socket | None = None,
        *,
        job_id: str = "",
        secret: bytes | None = None,
        log: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.joining: list[tuple[HeadConnection, JoinRequest]] = []
        """Nodes that have asked to join. The caller removes each of them, and adds or refuses it."""
        self.lost: dict[int, str] = {}
        """Reason for each node whose connection is over, by node rank."""
        self.reports: list[str] = []
        """Lines about connections that do not belong to the run."""
        self._listener = listener
        self._job_id = job_id
        self._secret = secret
        self._log = log
        self._nodes: dict[int, HeadConnection] = {}
        self._peers_with_unsent: set[HeadConnection] = set()
        # A dict is used as an ordered set here. The oldest connection comes first.
        self._strangers: dict[HeadConnection, None] = {}
        self._selector = selectors.DefaultSelector()
        if listener:
            self._selector.register(listener, selectors.EVENT_READ)

    def fileno(self) -> int:
        """Return the descriptor that is readable when `receive` has something to do."""
        return self._selector.fileno()

    @property
    def has_strangers(self) -> bool:
        """Return whether there are connections that have not shown yet that they belong to the run."""
        return bool(self._strangers)

    def __contains__(self, rank: object) -> bool:
        return rank in self._nodes

    def receive(self, seconds: float = 0.0, *, missing: int = 0) -> list[tuple[int, Message]]:
        """Wait up to `seconds` for data, and return the messages of nodes with their ranks, in order.

        New connections are accepted as well. Each is a stranger until it has shown that it belongs to the
        run. If it does not do so in time, it is closed.

        Parameters
        ----------
        missing : number of nodes that have not joined yet. The head accepts as many connections in addition
            to `MAX_STRANGERS`.
        """
        received: list[tuple[int, Message]] = []
        for key, _ in self._selector.select(seconds):
            # `data` is None for the listener, and otherwise the connection. A peer is in `_strangers`, or has
            # joined as a node and so has a rank.
            peer: HeadConnection | None = key.data
            if peer is None:  # the listener
                self._accept_strangers(MAX_STRANGERS + missing)
            elif peer in self._strangers:
                self._read_stranger(peer)
            elif peer.rank is not None:
                # Read before the error is checked: the last messages of a lost node still count.
                received += [(peer.rank, message) for message in peer.receive()]
                if peer.error:
                    self._close_lost_node(peer, peer.error)
        self._flush_unsent()
        self._close_late_strangers()
        return received

    def _flush_unsent(self) -> None:
        """Send the data that waits because a node could not accept it earlier."""
        for peer in list(self._peers_with_unsent):
            peer.flush()
            if not peer.has_unsent:
                self._peers_with_unsent.remove(peer)

    def _close_late_strangers(self) -> None:
        """Close the connections that have not shown within `MAX_WAIT_S` that they belong to the run.

        The oldest connections come first in `_strangers`. So the loop ends at the first connection that has
        time left.
        """
        now = time.monotonic()
        for peer in list(self._strangers):
            if now - peer.since <= MAX_WAIT_S:
                return
            if not peer.is_refused:
                self._log_stranger(peer, "did not join as a node of this run")
            self._close_stranger(peer)

    def add_node(self, rank: int, peer: HeadConnection) -> None:
        """Accept a peer that has asked to join as the node with rank `rank`."""
        peer.max_line_bytes = MAX_LINE_BYTES
        peer.rank = rank
        self._nodes[rank] = peer
        self._selector.register(peer, selectors.EVENT_READ, peer)

    def refuse(self, peer: HeadConnection, refusal: Refused) -> None:
        """Refuse a peer that has asked to join. It has `MAX_WAIT_S` seconds to read the reason.

        Nobody waits for it in the meantime.
        """
        peer.since = time.monotonic()
        self._add_stranger(peer)
        self._send_refusal(peer, refusal)

    def renumber(self, new_ranks: Mapping[int, int]) -> None:
        """Give each node a new rank. The keys of `new_ranks` are the old ranks.

        The head calls this once, after the roll call. If some nodes are missing, their ranks are gaps, which
        the new ranks do not have.
        """
        self._nodes = {new_ranks[old_rank]: peer for old_rank, peer in self._nodes.items()}
        self.lost = {new_ranks[old_rank]: reason for old_rank, reason in self.lost.items()}
        for rank, peer in self._nodes.items():
            peer.rank = rank

    def send_heartbeats(self, heartbeat: Heartbeat, *, beat_s: float, lost_after_s: float) -> None:
        """Send a heartbeat (a sign of life) to each node that has received nothing for `beat_s` seconds.

        A node that has sent nothing for `lost_after_s` seconds is lost, and its connection is closed. The
        reason is then in `lost`. All nodes get the same heartbeat, so it is encoded only once.
        """
        now = time.monotonic()
        line = messages.encode(heartbeat)
        for peer in list(self._nodes.values()):
            if now - peer.last_received > lost_after_s:
                self._close_lost_node(peer, f"no heartbeat for {lost_after_s:g} s")
            # A node that reads slowly gets no further heartbeats, so that its queue does not grow.
            elif now - peer.last_sent >= beat_s and not peer.has_unsent:
                self._send_line(peer, line)

    def send(self, rank: int, message: Message) -> None:
        """Send a message to one node. If the node is not connected, do nothing."""
        peer = self._nodes.get(rank)
        if peer is not None:
            self._send_line(peer, messages.encode(message))

    def send_all(self, message: Message, *, except_rank: int | None = None) -> None:
        """Send a message to all nodes except the node `except_rank`."""
        line = messages.encode(message)
        for rank, peer in self._nodes.items():
            if rank != except_rank:
                self._send_line(peer, line)

    def close(self, linger_s: float) -> None:
        """Close all connections. The nodes together have `linger_s` seconds to read the last messages."""
        if self._listener:
            self._listener.close()
        close_all([*(peer for peer, _ in self.joining), *self._strangers])
        close_all(self._nodes.values(), linger_s)
        self._nodes.clear()
        self._selector.close()

    def _send_line(self, peer: HeadConnection, line: bytes) -> None:
        peer.send_line(line)
        if peer.has_unsent:
            self._peers_with_unsent.add(peer)

    def _close_lost_node(self, peer: HeadConnection, reason: str) -> None:
        """Close the connection of a node, and record the reason in `lost`."""
        assert peer.rank is not None  # noqa: S101 - it is a node
        self.lost[peer.rank] = reason
        del self._nodes[peer.rank]
        self._peers_with_unsent.discard(peer)
        self._selector.unregister(peer)
        peer.close()

    def _accept_strangers(self, max_strangers: int) -> None:
        """Accept the connections in the kernel's queue as strangers, which may not belong to the run.

        If there are more than `max_strangers`, the oldest is closed. Otherwise a flood of connections could
        use up the head's descriptors.
        """
        assert self._listener is not None  # noqa: S101 - only an event of the listener leads here
        for _ in range(MAX_ACCEPTED):  # the limit leaves time for other work, even during a flood
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # no descriptor is left, or the connection has already ended
                self._close_oldest_stranger()
                # The listener stays readable. Without a pause, it would wake the head again and again.
                time.sleep(PAUSE_S)
                return
            if len(self._strangers) >= max_strangers:
                self._close_oldest_stranger()
            # On a listener for both IPv4 and IPv6, IPv4 addresses have this prefix.
            self._add_stranger(HeadConnection(sock, address[0].removeprefix("::ffff:")))

    def _add_stranger(self, peer: HeadConnection) -> None:
        self._strangers[peer] = None
        self._selector.register(peer, selectors.EVENT_READ, peer)

    def _close_oldest_stranger(self) -> None:
        peer = next(iter(self._strangers), None)
        if peer is not None:
            self._close_stranger(peer)

    def _close_stranger(self, peer: HeadConnection) -> None:
        del self._strangers[peer]
        self._selector.unregister(peer)
        peer.close()

    def _read_stranger(self, peer: HeadConnection) -> None:
        """Read data from a stranger, which is a connection that may not belong to the run.

        A valid request to join is appended to `joining`. If anything else arrives, the connection is closed.
        With a secret, the first line opens the handshake, and the request follows it.
        """
        for line in peer.receive_lines():
            if peer.is_refused:  # ignore what the peer sends until its connection is closed
                continue
            if self._secret is not None and peer.handshake is None:
                self._answer_handshake(peer, line, self._secret)
                continue
            request = self._read_or_refuse_request(peer, line)
            if request is not None:
                # The caller adds the node. Until then, lines after the request stay in the connection.
                del self._strangers[peer]
                self._selector.unregister(peer)
                self.joining.append((peer, request))
                return
        if peer.error:
            self._log_failed_join(peer)
            self._close_stranger(peer)

    def _log_failed_join(self, peer: HeadConnection) -> None:
        """Log why a connection that has ended did not join, unless it was refused or has sent nothing."""
        if peer.is_refused:
            return
        if peer.handshake:
            self._log_stranger(
                peer, f"claimed to be node {peer.handshake.node_rank} without proving the secret"
            )
        elif peer.error == FOREIGN:
            self._log_stranger(peer, "sent something other than an imgkit roll call")

    def _answer_handshake(self, peer: HeadConnection, line: bytes, secret: bytes) -> None:
        """Answer the first line of a connection. The answer proves that the head knows the run's secret."""
        if line.startswith(b"{"):
            # The line is JSON, as a node without a secret sends it. Refuse every such node with the same
            # message.
            problem = "the head requires a secret, and this node has none"
            hint = "pass the same --secret-file to both, or share one home folder"
            self._send_refusal(peer, Refused(what=problem, hint=hint))
            return
        peer.handshake = Handshake.accept(secret, self._job_id, line)
        if peer.handshake:
            peer.send_line(peer.handshake.answer)
        else:
            peer.error = FOREIGN

    def _read_or_refuse_request(self, peer: HeadConnection, line: bytes) -> JoinRequest | None:
        """Return the request to join in a line. If there is none, refuse the peer or set its error.

        In both cases, return None. A refused peer learns the reason. The caller closes a peer with an error,
        which gets no answer, because it may be a stranger.

        Without a secret, the request is the first line. With a secret, it follows the head's answer to the
        handshake, and is signed with the secret.
        """
        if peer.handshake is None and line.startswith(b"imgkit-join "):
            self._send_refusal(peer, Refused(what="this node has a secret, and the head starts without one"))
            return None
        request = _decode_request(peer, line)
        if request is None:
            peer.error = FOREIGN
            return None
        if request.job != self._job_id:
            # Do not tell the peer the head's job id. In a run without a secret, the job id is enough to join.
            problem = f"{request.node.host} belongs to job {request.job!r}, the head to another"
            self._send_refusal(peer, Refused(what=problem))
            return None
        return request

    def _send_refusal(self, peer: HeadConnection, refusal: Refused) -> None:
        self._log_stranger(peer, f"was refused: {refusal.what}")
        peer.is_refused = True
        peer.send(refusal)
        peer.end_sending()

    def _log_stranger(self, peer: HeadConnection, problem: str) -> None:
        """Log what a connection that does not belong to the run has done. Each text is logged only once.

        After `MAX_REPORTS` texts, nothing more is logged, so that a flood of connections cannot fill the
        disk.
        """
        report = f"{peer.address} {problem}"
        if report in self.reports or len(self.reports) > MAX_REPORTS:
            return
        self.reports.append(report)
        if len(self.reports) > MAX_REPORTS:
            self._log(f"roll call: {report}; ignored; further ones are not reported")
        else:
            self._log(f"roll call: {report}; ignored")


def _decode_request(peer: HeadConnection, line: bytes) -> JoinRequest | None:
    """Return the request to join in a line, or None if the line is no request that `peer` may send.

    After a handshake, the request must be signed with the secret, and must be for the rank that the peer has
    named in the handshake.
    """
    handshake = peer.handshake
    unsigned_line = handshake.verify(line) if handshake else line
    if unsigned_line is None:  # the signature is wrong, so nothing of the line may be used
        return None
    request = peer.decode(unsigned_line)
    if not isinstance(request, JoinRequest):
        return None
    if handshake and handshake.node_rank != request.node_rank:
        return None
    return request

"""The side of any node but the head in the roll call, until the head sends the start."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.rollcall import messages, ports, probe, session
from imgkit_entrypoints.rollcall.connection import Connection, Handshake
from imgkit_entrypoints.rollcall.session import MemberSession, node_name, wait
from imgkit_entrypoints.schedulers.placement import Placement

# Limit for one connection to the head.
CONNECT_S = 5.0
# Time between two calls, and between two looks at what the head has sent.
RETRY_S = 0.5
# Time between two lines in the log about the head that does not answer.
PROGRESS_S = 10.0
# Time that a node gives the head to prove itself before it calls again.
PROOF_S = 10.0


@dataclass(frozen=True, slots=True)
class Meeting:
    """What one node knows about a roll call (`gather.meet`)."""

    placement: Placement
    node: messages.NodeInfo
    open_port: probe.OpenPort
    timeout_s: float
    log: Callable[[str], None]
    stop_reason: Callable[[], str]
    secret: bytes | None
    all_reach_head: bool = False
    """Every node has to connect to the head's address in the network of the data."""

    @property
    def port(self) -> int:
        """Return the port on which the head listens."""
        return ports.rollcall_port(self.placement.job_id, self.placement.port)

    @property
    def address(self) -> str:
        """Return the head's address with the port, for messages."""
        return f"{self.placement.head}:{self.port}"

    def check_stop(self) -> None:
        """Raise NoPlan if this node was asked to stop."""
        reason = self.stop_reason()
        if reason:
            raise NoPlan(f"stopped during the roll call by {reason}")


def join(meeting: Meeting) -> MemberSession:
    """Call the head again and again until it starts the run or refuses it.

    Raises
    ------
    NoPlan : the head refuses this node or the run or does not answer, or this node was asked to stop.
    """
    address = (meeting.placement.head, meeting.port)
    reason = call_error = ""
    last_log = time.monotonic()
    deadline = last_log + meeting.timeout_s
    while True:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise _no_answer_error(meeting, reason)
        meeting.check_stop()
        try:
            connection = Connection(socket.create_connection(address, timeout=min(CONNECT_S, left_s)))
        except OSError as error:  # not started yet, or a pod whose name does not resolve yet
            reason = f"{error.strerror or error}"
        else:
            member = None
            try:
                if _send_request(meeting, connection, deadline):
                    member = _wait_for_start(meeting, connection, deadline)
            finally:
                if member is None:
                    connection.close()
            if member is not None:
                return member
            # The last call before the deadline may leave the head no time for an answer. Then the error of an
            # earlier call says more.
            if not call_error or time.monotonic() < deadline:
                call_error = connection.error or call_error
            reason = call_error or "it does not answer the call"
        if time.monotonic() - last_log >= PROGRESS_S:
            last_log = time.monotonic()
            meeting.log(f"roll call: waiting for the head {meeting.address} ({reason})")
        time.sleep(RETRY_S)


def _no_answer_error(meeting: Meeting, reason: str) -> NoPlan:
    """Return the error for a head that has not answered in time, with the reason why the last call failed."""
    placement = meeting.placement
    name = node_name(placement, placement.node_rank, meeting.node.host)
    return NoPlan(
        f"the head ({placement.head}) did not answer {name} within {meeting.timeout_s:g} s: {reason}",
        where=meeting.address,
        hint="check that this command runs on the head, and that this name leads there (--head). The "
        "head's output says whether its port was busy. For nodes that start late: --rollcall-timeout",
    )


def _send_request(meeting: Meeting, connection: Connection, deadline: float) -> bool:
    """Send the request to join, after a handshake if the run has a secret.

    Return False if the head does not prove that it knows the secret.
    """
    placement = meeting.placement
    request = messages.encode(
        messages.JoinRequest(
            job=placement.job_id,
            node_rank=placement.node_rank,
            nnodes=placement.nnodes,
            node=meeting.node,
            probe=meeting.open_port.offer,
        )
    )
    if meeting.secret is not None:
        handshake = _shake_hands(meeting, connection, meeting.secret, deadline)
        if handshake is None:
            return False
        request = handshake.sign(request)
    connection.send_line(request)
    return True


def _wait_for_start(meeting: Meeting, connection: Connection, deadline: float) -> MemberSession | None:
    """Obey the head until it starts the run, and return the session. Return None if the head is silent.

    Raises
    ------
    NoPlan : the head refuses this node or the run.
    """
    while True:
        lines = _wait_for_lines(meeting, connection, deadline)
        if not lines:
            return None
        # The head has answered. From now on it sends heartbeats while it waits for other nodes, so it counts
        # as lost only if these stop.
        deadline = time.monotonic() + session.LOST_AFTER_S
        while lines:
            message = connection.decode(lines.pop(0))
            if message is None:
                break
            if isinstance(message, messages.Refused):
                raise NoPlan(message.what, where=message.where, hint=message.hint)
            if isinstance(message, messages.ProbeRequest):
                connection.send(probe.run_request(message, meeting.open_port))
            elif isinstance(message, messages.RunStart):
                placement = meeting.placement.numbered(message.nnodes, message.node_rank)
                return MemberSession(placement, connection, lines, host_index=message.host_index)
        if time.monotonic() - connection.last_sent >= session.BEAT_S:
            connection.send(messages.Heartbeat())


def _shake_hands(
    meeting: Meeting, connection: Connection, secret: bytes, deadline: float
) -> Handshake | None:
    """Let the head prove that it knows the run's secret, and return the handshake, which signs the request.

    If its answer is wrong or does not come within `PROOF_S`, set the connection's error and return None.
    """
    placement = meeting.placement
    handshake = Handshake(secret=secret, job_id=placement.job_id, node_rank=placement.node_rank)
    connection.send_line(handshake.opening)
    answers = _wait_for_lines(meeting, connection, min(deadline, time.monotonic() + PROOF_S))
    if answers:
        confirmed = handshake.confirm(answers[0])
        if confirmed is not None:
            return confirmed
        problem = "its answer is not a valid proof"
    else:
        problem = connection.error or "it is silent"
    connection.error = (
        f"another program answers at {meeting.address} and does not know this run's secret "
        f"({problem}); if it is the head, give both the same --secret-file"
    )
    return None


def _wait_for_lines(meeting: Meeting, connection: Connection, deadline: float) -> list[bytes]:
    """Return the next lines, or an empty list at the deadline or at the end of the connection."""
    lines = list(connection.receive_lines())
    while not lines and not connection.error and time.monotonic() < deadline:
        meeting.check_stop()
        wait([connection], RETRY_S)
        lines = list(connection.receive_lines())
    return lines

"""The side of the roll call on every node except the head, until the head starts the run.

The head is the node with rank 0. Every other node connects to it and asks to join.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.rollcall import messages, ports, probe, session
from imgkit_entrypoints.rollcall.connection import Connection, Handshake
from imgkit_entrypoints.rollcall.session import MemberSession, node_name, wait_readable
from imgkit_entrypoints.schedulers.placement import Placement

# Longest time in seconds for one attempt to connect to the head.
CONNECT_S = 5.0
# Seconds between two attempts to connect, and between two checks for messages from the head.
RETRY_S = 0.5
# Seconds between two messages to the user while the head does not answer.
PROGRESS_S = 10.0
# Seconds in which the head must prove that it knows the secret. Then the node connects again.
PROOF_S = 10.0


@dataclass(frozen=True, slots=True)
class RollCall:
    """The data of one node for a roll call. `gather.meet_nodes` describes the fields."""

    placement: Placement
    node: messages.NodeInfo
    open_port: probe.OpenPort
    timeout_s: float
    log: Callable[[str], None]
    stop_reason: Callable[[], str]
    secret: bytes | None
    all_reach_head: bool = False
    """True if every node must be able to connect to the head's address on the data network."""

    @property
    def port(self) -> int:
        """Return the port on which the head listens for the other nodes."""
        return ports.rollcall_port(self.placement.job_id, self.placement.port)

    @property
    def address(self) -> str:
        """Return the head's address and port, such as ``n1:24711``, for messages."""
        return f"{self.placement.head}:{self.port}"

    def refuse_if_stopped(self) -> None:
        """Raise NoPlan if this node was asked to stop."""
        reason = self.stop_reason()
        if reason:
            raise NoPlan(f"stopped during the roll call by {reason}")


def join(roll_call: RollCall) -> MemberSession:
    """Connect to the head again and again, until it starts the run, and return the session for the run.

    Every node except the head (the node with rank 0) calls this. The head may start later than this node, so
    a failed connection is no error until `roll_call.timeout_s` seconds have passed.

    Raises
    ------
    NoPlan : the head does not answer, or refuses this node or the whole run, or this node was asked to stop.
    """
    address = (roll_call.placement.head, roll_call.port)
    # `reason` is what the user reads. `call_error` is the latest error after a connection was made.
    reason = call_error = ""
    last_log = time.monotonic()
    deadline = last_log + roll_call.timeout_s
    while True:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise _make_no_answer_error(roll_call, reason)
        roll_call.refuse_if_stopped()
        try:
            connection = Connection(socket.create_connection(address, timeout=min(CONNECT_S, left_s)))
        except OSError as error:  # the head has not started yet, or the name of its pod does not resolve yet
            reason = f"{error.strerror or error}"
        else:
            member = _request_start(roll_call, connection, deadline)
            if member is not None:
                return member
            # Shortly before the deadline, the head may have too little time to answer. The error of an
            # earlier attempt then says more than that of the last one.
            if not call_error or time.monotonic() < deadline:
                call_error = connection.error or call_error
            reason = call_error or "it does not answer the call"
        if time.monotonic() - last_log >= PROGRESS_S:
            last_log = time.monotonic()
            roll_call.log(f"roll call: waiting for the head {roll_call.address} ({reason})")
        time.sleep(RETRY_S)


def _request_start(roll_call: RollCall, connection: Connection, deadline: float) -> MemberSession | None:
    """Ask the head to let this node join, and return the session once the run starts.

    If the head does not answer, or does not prove that it knows the secret, close the connection and return
    None. The caller then connects again. The reason is in `connection.error`, if it is known.

    Raises
    ------
    NoPlan : the head refuses this node or the whole run, or this node was asked to stop.
    """
    member = None
    try:
        if _send_request(roll_call, connection, deadline):
            member = _wait_for_start(roll_call, connection, deadline)
    finally:
        if member is None:
            connection.close()
    return member


def _make_no_answer_error(roll_call: RollCall, reason: str) -> NoPlan:
    """Return the error about a head that has not answered in time.

    `reason` says why this node could not join, such as ``Connection refused``.
    """
    placement = roll_call.placement
    name = node_name(placement, placement.node_rank, roll_call.node.host)
    return NoPlan(
        f"the head ({placement.head}) did not answer {name} within {roll_call.timeout_s:g} s: {reason}",
        where=roll_call.address,
        hint="check that this command runs on the head, and that this name leads there (--head). The "
        "head's output says whether its port was busy. For nodes that start late: --rollcall-timeout",
    )


def _send_request(roll_call: RollCall, connection: Connection, deadline: float) -> bool:
    """Send the request to join. If the run has a secret, do the handshake first.

    Return False if the head does not prove that it knows the secret. The request is then not sent.
    """
    placement = roll_call.placement
    request = messages.encode(
        messages.JoinRequest(
            job=placement.job_id,
            node_rank=placement.node_rank,
            nnodes=placement.nnodes,
            node=roll_call.node,
            probe=roll_call.open_port.offer,
        )
    )
    # The head must prove itself first, because the request would tell a stranger about this job.
    if roll_call.secret is not None:
        handshake = _shake_hands(roll_call, connection, roll_call.secret, deadline)
        if handshake is None:
            return False
        request = handshake.sign(request)
    connection.send_line(request)
    return True


def _wait_for_start(roll_call: RollCall, connection: Connection, deadline: float) -> MemberSession | None:
    """Follow the head's requests until it starts the run, and return the session.

    `deadline` is the time until which the head must send its first message. Return None if the head stops
    answering.

    Raises
    ------
    NoPlan : the head refuses this node or the whole run, or this node was asked to stop.
    """
    while True:
        lines = _wait_for_lines(roll_call, connection, deadline)
        if not lines:
            return None
        # The head has answered. While it waits for other nodes, it sends heartbeats (signs of life), so it is
        # lost only if these stop.
        deadline = time.monotonic() + session.LOST_AFTER_S
        while lines:
            message = connection.decode(lines.pop(0))
            if message is None:  # the error of the connection ends the wait in the next round
                break
            start = _handle_message(roll_call, connection, message)
            if start is not None:
                run_placement = roll_call.placement.numbered(start.nnodes, start.node_rank)
                # `lines` now contains the messages after the start, which belong to the session.
                return MemberSession(run_placement, connection, lines, host_index=start.host_index)
        if time.monotonic() - connection.last_sent >= session.BEAT_S:
            connection.send(messages.Heartbeat())


def _handle_message(
    roll_call: RollCall, connection: Connection, message: messages.Message
) -> messages.RunStart | None:
    """React to one message of the head. Return the message if it starts the run, and None otherwise.

    Heartbeats need no reaction.

    Raises
    ------
    NoPlan : the head refuses this node or the whole run.
    """
    match message:
        case messages.Refused():
            raise NoPlan(message.what, where=message.where, hint=message.hint)
        case messages.ProbeRequest():  # the network test, which takes some seconds
            connection.send(probe.run_request(message, roll_call.open_port))
        case messages.RunStart():
            return message
    return None


def _shake_hands(
    roll_call: RollCall, connection: Connection, secret: bytes, deadline: float
) -> Handshake | None:
    """Let the head prove that it knows the run's secret, and return the state of the handshake.

    The caller signs the request to join with it. If the head's answer is wrong, or does not arrive within
    `PROOF_S` seconds, set the connection's error and return None.
    """
    placement = roll_call.placement
    handshake = Handshake(secret=secret, job_id=placement.job_id, node_rank=placement.node_rank)
    connection.send_line(handshake.opening)
    answers = _wait_for_lines(roll_call, connection, min(deadline, time.monotonic() + PROOF_S))
    if answers:
        confirmed = handshake.confirm(answers[0])
        if confirmed is not None:
            return confirmed
        problem = "its answer is not a valid proof"
    else:
        problem = connection.error or "it is silent"
    connection.error = (
        f"another program answers at {roll_call.address} and does not know this run's secret "
        f"({problem}); if it is the head, give both the same --secret-file"
    )
    return None


def _wait_for_lines(roll_call: RollCall, connection: Connection, deadline: float) -> list[bytes]:
    """Return the next lines from the head.

    The result is empty if the deadline has passed or the connection has ended. In the second case,
    `connection.error` contains the reason.

    Raises
    ------
    NoPlan : this node was asked to stop.
    """
    lines = list(connection.receive_lines())
    while not lines and not connection.error and time.monotonic() < deadline:
        roll_call.refuse_if_stopped()
        wait_readable([connection], RETRY_S)
        lines = list(connection.receive_lines())
    return lines

"""The side of any node but the head in the roll call, until the head sends the start."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.rollcall import messages, ports, probe, session
from imgkit_entrypoints.rollcall.connection import (
    MAX_HANDSHAKE_BYTES,
    MAX_LINE_BYTES,
    OPEN_HEAD,
    Connection,
    Handshake,
)
from imgkit_entrypoints.rollcall.messages import (
    FromHead,
    Heartbeat,
    JoinRequest,
    NodeInfo,
    ProbeRequest,
    Refused,
    RunStart,
)
from imgkit_entrypoints.rollcall.probe import OpenPorts
from imgkit_entrypoints.rollcall.session import MemberSession, node_name, wait
from imgkit_entrypoints.schedulers.placement import Placement

CONNECT_S = 5.0
RETRY_S = 0.5
PROGRESS_S = 10.0
"""Time between two lines in the log about the head that does not answer."""
PROOF_S = 10.0
"""Time that a node gives the head to prove itself before it calls again."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """What one node knows of a roll call (`gather.meet`)."""

    placement: Placement
    node: NodeInfo
    open_ports: OpenPorts
    timeout_s: float
    log: Callable[[str], None]
    stop_reason: Callable[[], str]
    secret: bytes | None

    @property
    def port(self) -> int:
        """The port on which the head listens."""
        return ports.rollcall_port(self.placement.job_id, self.placement.port)

    @property
    def address(self) -> str:
        """The head's address."""
        return f"{self.placement.head}:{self.port}"


def join(meeting: Meeting) -> MemberSession:
    """Call the head again and again until it starts the run or refuses it."""
    placement = meeting.placement
    reason = answer_error = ""
    progress = time.monotonic()
    deadline = progress + meeting.timeout_s
    while (left_s := deadline - time.monotonic()) > 0:
        _check_stop(meeting)
        try:
            sock = socket.create_connection((placement.head, meeting.port), timeout=min(CONNECT_S, left_s))
        except OSError as error:  # not started yet, or a pod whose name does not resolve yet
            reason = f"{error.strerror or error}"
        else:
            connection = Connection(sock, messages.from_head)
            try:
                if joined := _call(meeting, connection, deadline):
                    return joined
            except NoPlan:
                connection.close()
                raise
            if not answer_error or time.monotonic() < deadline:  # a last call may have no time for an answer
                answer_error = connection.error or answer_error
            reason = answer_error or "it does not answer the call"
            connection.close()
        if time.monotonic() - progress >= PROGRESS_S:
            progress = time.monotonic()
            meeting.log(f"roll call: waiting for the head {meeting.address} ({reason})")
        time.sleep(RETRY_S)
    name = node_name(placement, placement.node_rank, meeting.node.host)
    raise NoPlan(
        f"the head ({placement.head}) did not answer {name} within {meeting.timeout_s:g} s: {reason}",
        where=meeting.address,
        hint="check that this command runs on the head, and that this name leads there (--head). The "
        "head's output says whether its port was busy. For nodes that start late: --rollcall-timeout",
    )


def _check_stop(meeting: Meeting) -> None:
    if reason := meeting.stop_reason():
        raise NoPlan(f"stopped during the roll call by {reason}")


def _call(meeting: Meeting, connection: Connection[FromHead], deadline: float) -> MemberSession | None:
    """Return the session once the head sends the start; None if another call may help."""
    placement = meeting.placement
    request = messages.encode(
        JoinRequest(
            job=placement.job_id,
            node_rank=placement.node_rank,
            nnodes=placement.nnodes,
            node=meeting.node,
            probe=meeting.open_ports.offer,
        )
    )
    if meeting.secret is not None:
        handshake = Handshake(secret=meeting.secret, job_id=placement.job_id, node_rank=placement.node_rank)
        confirmed = _shake_hands(meeting, connection, handshake, deadline)
        if confirmed is None:
            return None
        request = confirmed.sign(request)
    connection.send_line(request)
    return _await_start(meeting, connection, deadline)


def _shake_hands(
    meeting: Meeting, connection: Connection[FromHead], handshake: Handshake, deadline: float
) -> Handshake | None:
    """Return the handshake once the head has proved the secret; else set `connection.error`."""
    connection.max_line_bytes = MAX_HANDSHAKE_BYTES
    connection.send_line(handshake.opening)
    end, answer = min(deadline, time.monotonic() + PROOF_S), None
    while not connection.error and answer is None and time.monotonic() < end:
        _check_stop(meeting)
        wait([connection], RETRY_S)
        answer = connection.receive_line()
    confirmed = handshake.confirm(answer) if answer else None
    connection.max_line_bytes = MAX_LINE_BYTES
    if confirmed is None:
        detail = "its answer is not a valid proof" if answer else connection.error or "it is silent"
        detail = "it starts without a secret" if answer == OPEN_HEAD else detail
        connection.error = (
            f"another program answers at {meeting.address} and does not know this run's secret ({detail}); "
            "if it is the head, give both the same --secret-file"
        )
    return confirmed


def _await_start(meeting: Meeting, connection: Connection[FromHead], deadline: float) -> MemberSession | None:
    """Return the session once the head sends the start; None if it does not answer or is gone."""
    has_answered = False
    while not connection.error and time.monotonic() < (
        connection.last_received + session.LOST_AFTER_S if has_answered else deadline
    ):
        _check_stop(meeting)
        wait([connection], RETRY_S)
        received = connection.receive()
        has_answered = has_answered or bool(received)
        for position, message in enumerate(received):
            if isinstance(message, Refused):
                raise NoPlan(message.what, where=message.where, hint=message.hint)
            if isinstance(message, ProbeRequest):
                report = probe.run_request(meeting.placement.node_rank, message, meeting.open_ports)
                connection.send(report)
            elif isinstance(message, RunStart):
                return MemberSession(
                    meeting.placement.numbered(message.nnodes, message.node_rank),
                    message.port,
                    message.warnings,
                    connection=connection,
                    unread=received[position + 1 :],
                    can_restart=message.can_restart,
                )
        if time.monotonic() - connection.last_sent >= session.BEAT_S:
            connection.send(Heartbeat())
    return None

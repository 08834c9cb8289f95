"""Starts with a secret, among strangers that want to be a node, the head, or in the way."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from rollcall_nodes import CallThread, close, end_run, hear, heard_until_closed, meet, stranger

from imgkit_entrypoints.rollcall import join, messages
from imgkit_entrypoints.rollcall.connection import Handshake
from imgkit_entrypoints.rollcall.messages import JoinRequest, NodeInfo, StopOrder
from imgkit_entrypoints.schedulers.placement import Placement, job_port

SECRET, OTHER = os.urandom(32), os.urandom(32)
CALL = b"imgkit-join 1 " + b"00" * 16 + b"\n"
ANSWER = re.compile(rb"imgkit-head [0-9a-f]{32} [0-9a-f]{64}\n")


class Relay(threading.Thread):
    """A stranger on the way between nodes and the head, who records everything."""

    def __init__(self, placement: Placement, head: CallThread) -> None:
        super().__init__(daemon=True)
        self.listener = socket.create_server(("127.0.0.2", 0))
        self.head = head
        self.from_node = self.from_head = b""
        self.start()

    def run(self) -> None:
        """Carry one connection."""
        node, _ = self.listener.accept()
        head = stranger(self.head.placement)
        back = threading.Thread(target=self.carry_back, args=(head, node), daemon=True)
        back.start()
        while data := node.recv(4096):
            self.from_node += data
            head.sendall(data)
        head.close()

    def carry_back(self, head: socket.socket, node: socket.socket) -> None:
        """Carry what the head says."""
        with contextlib.suppress(OSError):  # the start is over
            while data := head.recv(4096):
                self.from_head += data
                node.sendall(data)


@pytest.fixture
def recorded(placement: Placement, monkeypatch: pytest.MonkeyPatch) -> tuple[bytes, bytes]:
    """Everything that a node and the head said to each other in a start of the same job."""
    head = CallThread(placement, 0, secret=SECRET)
    relay = Relay(placement, head)
    straight = socket.create_connection

    def relayed(address: tuple[str, int], timeout: float) -> socket.socket:
        via = relay.listener.getsockname() if address[0] == "relay" else address
        return straight(via, timeout=timeout)

    with monkeypatch.context() as patch:
        patch.setattr(join.socket, "create_connection", relayed)
        node = CallThread(replace(placement, head="relay"), 1, secret=SECRET)
        rolls = [head.roll(), node.roll()]
    rolls[1].report(StopOrder(reason="SIGTERM"))
    hear(rolls, lambda seen: bool(seen[0]))
    close(rolls)
    return relay.from_node, relay.from_head


def test_same_secret_meets(placement: Placement) -> None:
    rolls = meet(replace(placement, nnodes=3), secret=SECRET)
    rolls[1].report(StopOrder(reason="SIGUSR1"))
    expected = StopOrder(node="node 2 of 3 (as07r3b13)", reason="SIGUSR1")
    assert hear(rolls, lambda seen: bool(seen[0] and seen[2])) == [[expected], [], [expected]]
    end_run(rolls)


def test_other_secret_is_not_counted(placement: Placement) -> None:
    head, node = (
        CallThread(placement, 0, secret=SECRET, timeout_s=2.5),
        CallThread(placement, 1, secret=OTHER, timeout_s=2.0),
    )
    assert "another program answers at 127.0.0.1:" in node.refusal()
    assert "does not know this run's secret (its answer is not a valid proof)" in node.refusal()
    assert "the same --secret-file" in node.refusal()
    assert "127.0.0.1 claimed to be node 1 without proving the secret" in head.refusal()
    assert "node 2 of 2 (as07r3b13) did not join" in head.refusal()


def test_node_without_secret_is_refused(placement: Placement) -> None:
    head, node = CallThread(placement, 0, secret=SECRET, timeout_s=2.5), CallThread(placement, 1)
    assert "the head requires a secret, and this node has none" in node.refusal()
    assert "--secret-file" in node.refusal()
    assert "127.0.0.1 was refused: the head requires a secret, and this node has none" in head.refusal()


def test_head_without_secret_is_named(placement: Placement) -> None:
    head = CallThread(placement, 0, timeout_s=2.5)
    node = CallThread(placement, 1, secret=SECRET, timeout_s=2.0)
    assert "give both the same --secret-file" in node.refusal()
    assert "127.0.0.1 was refused: this node has a secret, and the head starts without one" in head.refusal()


@pytest.mark.parametrize(
    "first",
    [
        b"GET / HTTP/1.0\r\n\r\n",
        b"\xff" * 5000,
        b"imgkit-join 1 00\n",
        b"imgkit-join -1 " + b"0" * 32 + b"\n",
    ],
)
def test_stranger_hears_nothing(placement: Placement, first: bytes) -> None:
    head = CallThread(placement, 0, secret=SECRET)
    with stranger(placement) as connection:
        connection.sendall(first)
        assert heard_until_closed(connection) == b""
    close([head.roll() for head in (head, CallThread(placement, 1, secret=SECRET))])


@pytest.mark.parametrize(
    "forged", [b"", b"{}\n", b"0" * 64 + b' {"stop": "x"}\n', b"x" * 5000, b'{"job": "%s"}\n']
)
def test_stranger_learns_a_nonce_and_changes_nothing(placement: Placement, forged: bytes) -> None:
    head = CallThread(placement, 0, secret=SECRET)
    answers = []
    for _ in range(2):
        with stranger(placement) as connection:
            connection.sendall(CALL)
            answers.append(connection.recv(4096))
            with contextlib.suppress(OSError):  # the head has closed it already
                connection.sendall(forged)
                connection.shutdown(socket.SHUT_WR)
            assert heard_until_closed(connection) == b""
    assert all(ANSWER.fullmatch(answer) for answer in answers)
    assert answers[0] != answers[1]
    close([head.roll() for head in (head, CallThread(placement, 1, secret=SECRET))])


def test_early_impostor_is_refused_and_the_node_gets_in(placement: Placement) -> None:
    head = CallThread(placement, 0, secret=SECRET)
    request = JoinRequest(job=placement.job_id, node_rank=1, nnodes=2, node=NodeInfo(host="evil"))
    for first in (b"", CALL):
        with stranger(placement) as connection:
            connection.sendall(first + messages.encode(request) + b"\n")
            assert b"RunStart" not in heard_until_closed(connection)
    rolls = [call.roll() for call in (head, CallThread(placement, 1, secret=SECRET))]
    assert rolls[0].node_name(1) == "node 2 of 2 (as07r3b13)"
    close(rolls)


def test_proof_is_bound_to_the_rank(placement: Placement) -> None:
    placement = replace(placement, nnodes=3)
    head = CallThread(placement, 0, secret=SECRET)
    with stranger(placement) as connection:
        handshake = Handshake(secret=SECRET, job_id=placement.job_id, node_rank=1)
        connection.sendall(handshake.opening + b"\n")
        confirmed = handshake.confirm(connection.recv(4096).rstrip(b"\n"))
        assert confirmed
        request = JoinRequest(job=placement.job_id, node_rank=2, nnodes=3, node=NodeInfo(host="as"))
        connection.sendall(confirmed.sign(messages.encode(request)) + b"\n")
        assert heard_until_closed(connection) == b""
    close([head.roll() for head in (head, *(CallThread(placement, rank, secret=SECRET) for rank in (1, 2)))])


def test_recorded_node_is_refused_in_the_next_start(
    placement: Placement, recorded: tuple[bytes, bytes]
) -> None:
    node_bytes, _ = recorded
    assert b'"node_rank": 1' in node_bytes
    assert b'"reason": "SIGTERM"' in node_bytes
    head = CallThread(placement, 0, secret=SECRET)
    with stranger(placement) as connection:
        connection.sendall(node_bytes)
        assert ANSWER.fullmatch(heard_until_closed(connection))
    rolls = [call.roll() for call in (head, CallThread(placement, 1, secret=SECRET))]
    with stranger(placement) as connection:
        connection.sendall(node_bytes)
        assert hear(rolls, lambda _: False, within_s=0.3) == [[], []]
    close(rolls)


def test_recorded_head_is_not_believed(placement: Placement, recorded: tuple[bytes, bytes]) -> None:
    _, head_bytes = recorded
    assert b"RunStart" in head_bytes
    with socket.create_server(("127.0.0.1", job_port(placement.job_id))) as squatter:
        threading.Thread(target=serve, args=(squatter, head_bytes), daemon=True).start()
        text = CallThread(placement, 1, secret=SECRET, timeout_s=2.0).refusal()
    assert "does not know this run's secret (its answer is not a valid proof)" in text


def test_answer_of_the_head_sent_back_proves_nothing() -> None:
    head = Handshake.accept(SECRET, "job", CALL.strip())
    assert head
    mac = head.answer.rpartition(b" ")[2]
    assert head.verify(mac + b" ") is None


def test_request_counts_on_its_own_connection_alone() -> None:
    node = Handshake(secret=SECRET, job_id="job", node_rank=1)
    head = Handshake.accept(SECRET, "job", node.opening)
    assert head
    confirmed = node.confirm(head.answer)
    assert confirmed
    assert head.verify(confirmed.sign(b"a")) == b"a"
    assert head.verify(confirmed.sign(b"a").replace(b" a", b" b")) is None
    next_head = Handshake.accept(SECRET, "job", node.opening)
    assert next_head
    assert next_head.verify(confirmed.sign(b"a")) is None


@pytest.mark.parametrize("change", ["secret", "job", "rank", "nonce", "head"])
def test_proof_depends_on_everything(change: str) -> None:
    node = Handshake(
        secret=OTHER if change == "secret" else SECRET, job_id="a" if change == "job" else "b", node_rank=1
    )
    opening = node.opening.replace(b" 1 ", b" 2 ") if change == "rank" else node.opening
    head = Handshake.accept(SECRET, "b", CALL.strip() if change == "nonce" else opening)
    assert head
    answer = head.answer
    if change == "head":
        answer = answer.replace(answer[12:14], b"00" if answer[12:14] != b"00" else b"11", 1)
    assert node.confirm(answer) is None


def serve(squatter: socket.socket, answer: bytes) -> None:
    """Answer every call with the same bytes."""
    try:
        while True:
            connection, _ = squatter.accept()
            connection.recv(4096)
            connection.sendall(answer)
    except OSError:
        return  # the test is over


@pytest.fixture(
    params=[b"", b"220 mail ready\r\n", b'{"type": "Refused", "what": "\\u001b[31mgo away"}\n', b"x" * 9000]
)
def squatter(placement: Placement, request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    """Another program on the head's port."""
    with socket.create_server(("127.0.0.1", job_port(placement.job_id))) as listener:
        threading.Thread(target=serve, args=(listener, request.param), daemon=True).start()
        yield listener


def test_squatter_is_named(placement: Placement, squatter: socket.socket) -> None:
    text = CallThread(placement, 1, secret=SECRET, timeout_s=2.0).refusal()
    assert f"another program answers at 127.0.0.1:{job_port(placement.job_id)} and does not know" in text
    assert "\x1b" not in text
    assert "go away" not in text


def test_last_call_without_time_for_an_answer_keeps_the_reason(placement: Placement) -> None:
    with socket.create_server(("127.0.0.1", job_port(placement.job_id))) as listener:
        node = CallThread(placement, 1, secret=SECRET, timeout_s=1.5)
        connection, _ = listener.accept()
        connection.sendall(b"220 mail ready\r\n")
        text = node.refusal()  # the listener accepts the later calls, and nobody answers them
    connection.close()
    assert "its answer is not a valid proof" in text


def test_node_outlasts_a_squatter(placement: Placement) -> None:
    with socket.create_server(("127.0.0.1", job_port(placement.job_id))) as listener:
        node = CallThread(placement, 1, secret=SECRET)
        connection, _ = listener.accept()
        connection.sendall(b"220 mail ready\r\n")
    connection.close()
    close([call.roll() for call in (CallThread(placement, 0, secret=SECRET), node)])

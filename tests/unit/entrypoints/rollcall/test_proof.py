"""Starts with a secret, among strangers that want to be a node, the head, or in the way."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
from dataclasses import replace

import pytest
from rollcall_nodes import (
    CallThread,
    close,
    hear,
    heard_until_closed,
    squatting,
    start_others,
    stranger,
)

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


def test_other_secret_is_not_counted(placement):
    head, node = (
        CallThread(placement, 0, secret=SECRET, timeout_s=2.5),
        CallThread(placement, 1, secret=OTHER, timeout_s=2.0),
    )
    assert "another program answers at 127.0.0.1:" in node.refusal()
    assert "does not know this run's secret (its answer is not a valid proof)" in node.refusal()
    assert "the same --secret-file" in node.refusal()
    assert "127.0.0.1 claimed to be node 1 without proving the secret" in head.refusal()
    assert "node 2 of 2 (as07r3b13) did not join" in head.refusal()


NEEDED = "the head requires a secret, and this node has none"
ALONE = "this node has a secret, and the head starts without one"


@pytest.mark.parametrize(
    ("of_head", "of_node", "told", "logged"),
    [
        (SECRET, None, NEEDED, NEEDED),
        (None, SECRET, "give both the same --secret-file", ALONE),
    ],
    ids=["node", "head"],
)
def test_start_with_one_secret_is_refused(placement, of_head, of_node, told, logged):
    head = CallThread(placement, 0, secret=of_head, timeout_s=2.5)
    node = CallThread(placement, 1, secret=of_node, timeout_s=2.0)
    assert told in node.refusal()
    assert "--secret-file" in node.refusal()
    assert f"127.0.0.1 was refused: {logged}" in head.refusal()


@pytest.mark.parametrize(
    "first",
    [
        b"GET / HTTP/1.0\r\n\r\n",
        b"\xff" * 5000,
        b"imgkit-join 1 00\n",
        b"imgkit-join -1 " + b"0" * 32 + b"\n",
    ],
)
def test_stranger_hears_nothing(placement, first):
    head = CallThread(placement, 0, secret=SECRET)
    with stranger(placement) as connection:
        connection.sendall(first)
        assert heard_until_closed(connection) == b""
    close(start_others(head))


@pytest.mark.parametrize(
    "forged", [b"", b"{}\n", b"0" * 64 + b' {"stop": "x"}\n', b"x" * 5000, b'{"job": "%s"}\n']
)
def test_stranger_learns_a_nonce_and_changes_nothing(placement, forged):
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
    close(start_others(head))


def test_early_impostor_is_refused_and_the_node_gets_in(placement):
    head = CallThread(placement, 0, secret=SECRET)
    request = JoinRequest(job=placement.job_id, node_rank=1, nnodes=2, node=NodeInfo(host="evil"))
    for first in (b"", CALL):
        with stranger(placement) as connection:
            connection.sendall(first + messages.encode(request) + b"\n")
            assert b"RunStart" not in heard_until_closed(connection)
    rolls = start_others(head)
    assert rolls[0].node_name(1) == "node 2 of 2 (as07r3b13)"
    close(rolls)


def test_proof_is_bound_to_the_rank(placement):
    placement = replace(placement, nnodes=3)
    head = CallThread(placement, 0, secret=SECRET)
    with stranger(placement) as connection:
        handshake = Handshake(secret=SECRET, job_id=placement.job_id, node_rank=1)
        connection.sendall(handshake.opening + b"\n")
        confirmed = handshake.confirm(connection.recv(4096).rstrip(b"\n"))
        request = JoinRequest(job=placement.job_id, node_rank=2, nnodes=3, node=NodeInfo(host="as"))
        connection.sendall(confirmed.sign(messages.encode(request)) + b"\n")
        assert heard_until_closed(connection) == b""
    close(start_others(head, 1, 2))


def test_recorded_node_is_refused_in_the_next_start(placement, recorded):
    node_bytes, _ = recorded
    assert b'"node_rank": 1' in node_bytes
    assert b'"reason": "SIGTERM"' in node_bytes
    head = CallThread(placement, 0, secret=SECRET)
    with stranger(placement) as connection:
        connection.sendall(node_bytes)
        assert ANSWER.fullmatch(heard_until_closed(connection))
    rolls = start_others(head)
    with stranger(placement) as connection:
        connection.sendall(node_bytes)
        assert hear(rolls, lambda _: False, within_s=0.3) == [[], []]
    close(rolls)


def test_recorded_head_is_not_believed(placement, recorded):
    _, head_bytes = recorded
    assert b"RunStart" in head_bytes
    with squatting(placement, head_bytes):
        text = CallThread(placement, 1, secret=SECRET, timeout_s=2.0).refusal()
    assert "does not know this run's secret (its answer is not a valid proof)" in text


def test_request_counts_on_its_own_connection_alone():
    node = Handshake(secret=SECRET, job_id="job", node_rank=1)
    head, next_head = (Handshake.accept(SECRET, "job", node.opening) for _ in range(2))
    signed = node.confirm(head.answer).sign(b"a")
    assert head.verify(signed) == b"a"
    assert head.verify(signed.replace(b" a", b" b")) is None
    assert next_head.verify(signed) is None


def test_answer_of_the_head_sent_back_proves_nothing():
    head = Handshake.accept(SECRET, "job", CALL.strip())
    mac = head.answer.rpartition(b" ")[2]
    assert head.verify(mac + b" ") is None


@pytest.mark.parametrize("change", ["secret", "job", "rank", "nonce", "head"])
def test_proof_depends_on_everything(change):
    secret, job_id = (OTHER if change == "secret" else SECRET), ("a" if change == "job" else "b")
    node = Handshake(secret=secret, job_id=job_id, node_rank=1)
    opening = {"rank": node.opening.replace(b" 1 ", b" 2 "), "nonce": CALL.strip()}.get(change, node.opening)
    answer = Handshake.accept(SECRET, "b", opening).answer
    if change == "head":
        answer = answer.replace(answer[12:14], b"00" if answer[12:14] != b"00" else b"11", 1)
    assert node.confirm(answer) is None


@pytest.mark.parametrize(
    "answer",
    [b"", b"220 mail ready\r\n", b'{"type": "Refused", "what": "\\u001b[31mgo away"}\n', b"x" * 9000],
)
def test_squatter_is_named(placement, answer):
    with squatting(placement, answer):
        text = CallThread(placement, 1, secret=SECRET, timeout_s=2.0).refusal()
    assert f"another program answers at 127.0.0.1:{job_port(placement.job_id)} and does not know" in text
    assert "\x1b" not in text
    assert "go away" not in text


def test_last_call_without_time_for_an_answer_keeps_the_reason(placement):
    with squatting(placement) as listener:
        node = CallThread(placement, 1, secret=SECRET, timeout_s=1.5)
        connection, _ = listener.accept()
        connection.sendall(b"220 mail ready\r\n")
        text = node.refusal()  # the listener accepts the later calls, and nobody answers them
    connection.close()
    assert "its answer is not a valid proof" in text


def test_node_outlasts_a_squatter(placement):
    with squatting(placement) as listener:
        node = CallThread(placement, 1, secret=SECRET)
        connection, _ = listener.accept()
        connection.sendall(b"220 mail ready\r\n")
    connection.close()
    close([call.roll() for call in (CallThread(placement, 0, secret=SECRET), node)])

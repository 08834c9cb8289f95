"""The head's nodes on one epoll, over real sockets: no node costs or delays another one."""

from __future__ import annotations

import contextlib
import resource
import socket
import struct
import time
from collections.abc import Callable, Iterator

import pytest
from rollcall_nodes import kept_file_limit

from imgkit_entrypoints.rollcall import messages, session
from imgkit_entrypoints.rollcall.connection import Connection
from imgkit_entrypoints.rollcall.messages import AttemptEnded, Heartbeat, Message, StopOrder
from imgkit_entrypoints.rollcall.server import HeadConnection, Server

LARGE = StopOrder(node="node 1 of 4", reason="x" * 60_000)
LINE = messages.encode(AttemptEnded(code=0)) + b"\n"
Received = list[tuple[int, Message]]


class Nodes:
    """The other ends of the connections."""

    def __init__(self, count: int) -> None:
        self.server = Server()
        self.ends: dict[int, socket.socket] = {}
        for rank in range(1, count + 1):
            end, head_end = socket.socketpair()
            end.settimeout(60)
            self.ends[rank] = end
            self.server.add_node(rank, HeadConnection(head_end, ""))

    def receive_until(self, condition: Callable[[], object]) -> Received:
        """Return what arrives until the condition holds."""
        received: Received = []
        deadline = time.monotonic() + 60
        while not condition() and not received:
            received += self.server.receive(0.1)
            assert time.monotonic() < deadline
        return received

    def receive_one(self) -> Received:
        """Return the next messages."""
        return self.receive_until(lambda: False)

    def silent(self) -> list[int]:
        """Return the nodes that count as lost after the usual time."""
        self.server.send_heartbeats(Heartbeat(), beat_s=60, lost_after_s=session.LOST_AFTER_S)
        return list(self.server.lost)

    def read(self, rank: int, size: int) -> bytes:
        """Read `size` bytes as one node, while the head goes on."""
        data = b""
        while len(data) < size:
            self.server.receive()
            with contextlib.suppress(BlockingIOError):
                data += self.ends[rank].recv(size - len(data), socket.MSG_DONTWAIT)
        return data

    def close(self) -> None:
        """Close everything."""
        self.server.close(0.0)
        for end in self.ends.values():
            end.close()


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with contextlib.closing(Nodes(3)) as nodes:
        yield nodes


def test_message_costs_work_for_its_own_connection(monkeypatch):
    with kept_file_limit():
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        with contextlib.closing(Nodes(min(4096, hard // 2 - 200))) as nodes:
            readers: list[Connection] = []
            receive = Connection.receive

            def counted(connection: Connection) -> Iterator[Message]:
                readers.append(connection)
                return receive(connection)

            monkeypatch.setattr(Connection, "receive", counted)
            for rank in (7, 300):
                nodes.ends[rank].sendall(LINE)
            received = sorted(nodes.server.receive(10.0), key=lambda item: item[0])
            assert received == [(7, AttemptEnded(code=0)), (300, AttemptEnded(code=0))]
            assert len(readers) == 2


def test_mute_node_delays_nobody(nodes):
    for _ in range(20):
        nodes.server.send_all(LARGE)
        for rank in (2, 3):
            assert nodes.read(rank, 60_000)
        nodes.ends[2].sendall(LINE)
        assert nodes.receive_one() == [(2, AttemptEnded(code=0))]


def test_slow_node_gets_everything_in_order(nodes):
    sent = [StopOrder(node=str(number), reason="x" * 60_000) for number in range(20)]
    for message in sent:
        nodes.server.send(1, message)
    expected = b"".join(messages.encode(message) + b"\n" for message in sent)
    assert nodes.read(1, len(expected)) == expected
    assert nodes.server.receive() == []


def test_full_connection_does_not_wake_the_head(nodes):
    for _ in range(20):
        nodes.server.send(1, LARGE)
    assert session.wait_readable([nodes.server], 0.01) == []


def test_closed_connection_is_reported_once(nodes):
    nodes.ends[2].sendall(LINE)
    nodes.ends[2].close()
    assert nodes.receive_one() == [(2, AttemptEnded(code=0))]
    nodes.receive_until(lambda: nodes.server.lost)
    assert nodes.server.lost == {2: "it closed the connection"}
    assert 2 not in nodes.server
    nodes.server.lost.clear()
    nodes.server.send(2, Heartbeat())
    assert nodes.server.receive(0.01) == []
    assert nodes.server.lost == {}


@pytest.mark.parametrize("is_reset", [False, True], ids=["unread input", "reset while the head sends"])
def test_process_that_ends_has_closed_its_connection(nodes, is_reset):
    with socket.create_server(("127.0.0.1", 0)) as server:
        end = socket.create_connection(server.getsockname())
        nodes.server.add_node(4, HeadConnection(server.accept()[0], ""))
    if is_reset:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.close()
        nodes.server.send_all(LARGE)
    else:
        nodes.server.send(4, Heartbeat())
        assert session.wait_readable([end], 10)
        end.close()
    nodes.receive_until(lambda: nodes.server.lost)
    assert list(nodes.server.lost) == [4]
    assert is_reset or nodes.server.lost == {4: "it closed the connection"}


@pytest.mark.parametrize("data", [b"", b"{"], ids=["half-open", "a byte now and then"])
def test_node_without_a_whole_line_is_silent(nodes, data):
    for connection in nodes.server._nodes.values():
        connection.last_received -= session.LOST_AFTER_S + 1
    nodes.ends[2].sendall(data * 10)
    for rank in (1, 3):
        nodes.ends[rank].sendall(LINE)
    received = nodes.receive_one() + nodes.server.receive()
    assert {rank for rank, _ in received} == {1, 3}
    assert nodes.silent() == [2]


def test_connection_stays_with_its_node_under_a_new_number(nodes):
    nodes.ends[1].close()
    nodes.receive_until(lambda: nodes.server.lost)
    nodes.server.renumber({1: 1, 2: 3, 3: 2})
    assert list(nodes.server.lost) == [1]
    nodes.ends[2].sendall(LINE)
    assert nodes.receive_one() == [(3, AttemptEnded(code=0))]
    nodes.server.send(2, StopOrder(reason="it is node 3 on the other end"))
    assert b"node 3" in nodes.ends[3].recv(4096)


def test_message_in_many_pieces_arrives_whole(nodes):
    for byte in LINE + LINE[:-1]:
        nodes.ends[1].sendall(bytes([byte]))
        nodes.server.receive(0.0)
    nodes.ends[1].sendall(LINE[-1:] + LINE)
    assert nodes.receive_one() == [(1, AttemptEnded(code=0))] * 2


def test_last_message_reaches_all_beside_a_mute_node(nodes):
    for _ in range(20):
        nodes.server.send(1, LARGE)
    nodes.server.send_all(StopOrder(node="head", reason="over"))
    nodes.server.close(0.2)
    for rank in (2, 3):
        assert b"over" in nodes.ends[rank].recv(4096)
        assert nodes.ends[rank].recv(1) == b""

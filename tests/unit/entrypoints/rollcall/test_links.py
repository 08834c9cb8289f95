"""The head's links on one epoll, over real sockets: work per message, and no node that delays another."""

from __future__ import annotations

import contextlib
import resource
import socket
import struct
import time
from collections.abc import Callable, Iterator

import pytest

from imgkit_entrypoints.launch.agent import kept_file_limit
from imgkit_entrypoints.rollcall import messages, session
from imgkit_entrypoints.rollcall.head_roll import Links, Turn
from imgkit_entrypoints.rollcall.link import Link
from imgkit_entrypoints.rollcall.messages import AttemptEnded, Beat, FromNode, StopOrder

LARGE = StopOrder(node="node 0 of 4", reason="x" * 60_000)
LINE = messages.line(AttemptEnded(code=0)) + b"\n"


class Nodes:
    """The other ends of the links."""

    def __init__(self, count: int) -> None:
        self.links = Links()
        self.ends: dict[int, socket.socket] = {}
        for rank in range(1, count + 1):
            end, mine = socket.socketpair()
            end.settimeout(60)
            self.ends[rank] = end
            self.links.add(rank, Link(mine, messages.from_node))

    def until(self, good: Callable[[Turn], bool]) -> Turn:
        """Wait for a turn."""
        end = time.monotonic() + 60
        while not good(turn := self.links.hear(1.0)):
            assert time.monotonic() < end
        return turn

    def read(self, rank: int, size: int) -> bytes:
        """Read `size` bytes as one node, while the head goes on."""
        found = b""
        while len(found) < size:
            self.links.hear(0)
            with contextlib.suppress(BlockingIOError):
                found += self.ends[rank].recv(size - len(found), socket.MSG_DONTWAIT)
        return found

    def close(self) -> None:
        """Close everything."""
        self.links.close(0.0)
        for end in self.ends.values():
            end.close()


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with contextlib.closing(Nodes(3)) as found:
        yield found


def test_message_costs_work_for_its_own_link(monkeypatch: pytest.MonkeyPatch) -> None:
    with kept_file_limit():
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        with contextlib.closing(Nodes(min(4096, hard // 2 - 200))) as nodes:
            read: list[Link[FromNode]] = []
            receive = Link.receive

            def counted(link: Link[FromNode]) -> list[FromNode]:
                read.append(link)
                return receive(link)

            monkeypatch.setattr(Link, "receive", counted)
            for rank in (7, 300):
                nodes.ends[rank].sendall(LINE)
            turn = nodes.until(lambda turn: len(read) == 2)
            assert sorted(turn.heard) == [(7, AttemptEnded(code=0)), (300, AttemptEnded(code=0))]
            assert sorted(map(id, read)) == sorted(id(nodes.links[rank]) for rank in (7, 300))


def test_mute_node_delays_nobody(nodes: Nodes) -> None:
    for _ in range(20):
        nodes.links.send_all(LARGE)
        for rank in (2, 3):
            assert nodes.read(rank, 60_000)
        nodes.ends[2].sendall(LINE)
        assert nodes.until(lambda turn: bool(turn.heard)).heard == [(2, AttemptEnded(code=0))]
    assert nodes.links[1].unsent


def test_slow_node_gets_everything_in_order(nodes: Nodes) -> None:
    sent = [StopOrder(node=str(number), reason="x" * 60_000) for number in range(20)]
    for message in sent:
        nodes.links.send(1, message)
    assert nodes.links[1].unsent
    expected = b"".join(messages.line(message) + b"\n" for message in sent)
    assert nodes.read(1, len(expected)) == expected
    assert not nodes.links[1].unsent
    assert nodes.links.hear(0) == Turn(heard=[], gone=[], others=[])


def test_full_link_does_not_wake_the_head(nodes: Nodes) -> None:
    for _ in range(20):
        nodes.links.send(1, LARGE)
    assert nodes.links.hear(0.01) == Turn(heard=[], gone=[], others=[])


def test_closed_link_is_gone_once(nodes: Nodes) -> None:
    nodes.ends[2].sendall(LINE)
    nodes.ends[2].close()
    heard = nodes.until(lambda turn: bool(turn.gone))
    assert heard.gone == [2]
    assert nodes.links[2].why == "it closed the connection"
    assert nodes.links.hear(0.01).gone == []
    assert nodes.links.look(time.monotonic(), Beat()) == [2]
    nodes.links.drop(2)
    assert nodes.links.look(time.monotonic(), Beat()) == []


def test_reset_while_the_head_sends_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.closing(Nodes(1)) as nodes:
        end = socket.create_connection(server.getsockname())
        nodes.links.add(2, Link(server.accept()[0], messages.from_node))
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.close()
        nodes.links.send_all(LARGE)
        assert nodes.until(lambda turn: bool(turn.gone)).gone == [2]


@pytest.mark.parametrize("said", [b"", b"{"], ids=["half-open", "a byte now and then"])
def test_node_without_a_whole_line_is_silent(nodes: Nodes, said: bytes) -> None:
    for rank in (2, 3):
        nodes.links[rank].heard -= session.LOST_S + 1
    nodes.ends[2].sendall(said * 10)
    nodes.ends[3].sendall(LINE)
    assert nodes.until(lambda turn: bool(turn.heard)).heard == [(3, AttemptEnded(code=0))]
    nodes.links.hear(0.01)
    assert nodes.links.look(time.monotonic(), Beat()) == [2]


def test_link_keeps_its_place_under_a_new_number(nodes: Nodes) -> None:
    nodes.ends[1].close()
    nodes.until(lambda turn: turn.gone == [1])
    nodes.links.send(3, LARGE)
    nodes.links.renumber({1: 1, 2: 3, 3: 2})
    nodes.ends[2].sendall(LINE)
    assert nodes.until(lambda turn: bool(turn.heard)).heard == [(3, AttemptEnded(code=0))]
    assert nodes.links.look(time.monotonic(), Beat()) == [1]


def test_watched_source_ends_the_wait(nodes: Nodes) -> None:
    one, other = socket.socketpair()
    with one, other:
        other.sendall(b"x")
        with nodes.links.watching([one]):
            assert nodes.links.hear(60).others == [one]
        assert nodes.links.hear(0).others == []


def test_last_message_reaches_all_beside_a_mute_node(nodes: Nodes) -> None:
    for _ in range(20):
        nodes.links.send(1, LARGE)
    nodes.links.send_all(StopOrder(node="head", reason="over"))
    nodes.links.close(0.2)
    for rank in (2, 3):
        assert b"over" in nodes.ends[rank].recv(4096)
        assert nodes.ends[rank].recv(1) == b""

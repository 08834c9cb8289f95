"""The test of the network between nodes, over real sockets of this machine."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import pytest
from rollcall_nodes import CallThread, head_placement, stranger

from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.rollcall import gather, messages, probe, session
from imgkit_entrypoints.rollcall.messages import JoinRequest, NodeInfo, ProbeFailure, ProbePort, ProbeReport
from imgkit_entrypoints.rollcall.probe import OpenPort, PairFailure
from imgkit_entrypoints.schedulers.placement import Placement

HERE = "127.0.0.1"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "STEP_S", 0.3)


@pytest.fixture
def narrow() -> Iterator[ProbePort]:
    """A listener whose receive buffer fills up: a large burst stays unanswered, as in a black hole."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        listener.bind((HERE, 0))
        listener.listen()
        yield ProbePort(address=HERE, interface="lo", port=listener.getsockname()[1])


@pytest.fixture
def closed() -> ProbePort:
    """A port at which nobody listens any more."""
    with socket.create_server((HERE, 0)) as listener:
        return ProbePort(address=HERE, interface="lo", port=listener.getsockname()[1])


def node_placements(nnodes: int, request: str) -> list[Placement]:
    hosts = tuple(f"host{rank}" for rank in range(nnodes))
    first = Placement(
        scheduler="manual", nnodes=nnodes, node_rank=0, hosts=hosts, head=HERE, port=None,
        job_id=f"{os.getpid()} {request}", source={},
    )  # fmt: skip
    return [replace(first, node_rank=rank) for rank in range(nnodes)]


def meet(
    placements: list[Placement],
    addresses: list[str],
    interfaces: Sequence[str] = (),
    *,
    all_reach_head: bool = False,
) -> list[object]:
    """Each node's roll, or the text of its refusal."""
    results: list[object] = [None] * len(placements)

    def call(rank: int) -> None:
        interface = interfaces[rank] if interfaces else "lo"
        me = NodeInfo(host=f"host{rank}", address=addresses[rank], interface=interface)
        try:
            results[rank] = gather.meet_nodes(
                placements[rank], me, timeout_s=20, log=lambda _: None, all_reach_head=all_reach_head
            )
        except NoPlan as error:
            results[rank] = str(error)

    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(len(placements))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    for roll in results:
        if isinstance(roll, session.Session):
            roll.close()
    return results


def test_good_network_passes_every_size():
    with probe.open_port(HERE, "lo") as opened:
        assert opened.offer is not None
        assert probe.probe_targets({1: opened.offer}) == []
        assert not opened.is_crowded()


def test_each_bad_node_is_a_failure(narrow, closed):
    unreachable = ProbePort(address="255.255.255.255", interface="eth0", port=40000)
    failures = probe.probe_targets({1: narrow, 2: closed, 3: unreachable})
    dropped, refused, unrouted = sorted(failures, key=lambda failure: failure.target)
    assert (dropped.target, dropped.reason) == (1, "no answer within 0.3 s")
    assert 0 < dropped.arrived < dropped.size <= max(probe.SIZES)
    assert (refused.target, refused.size, refused.arrived) == (2, 0, 0)
    assert refused.reason == "Connection refused"
    assert (unrouted.target, unrouted.size) == (3, 0)
    assert unrouted.reason


@pytest.mark.parametrize("address", ["", "192.0.2.1", "no address"])
def test_foreign_address_takes_no_part(address):
    with probe.open_port(address, "eth0") as opened:
        assert opened.offer is None


@pytest.mark.parametrize("nnodes", [2, 3, 4, 5, 64, 1000])
def test_no_node_hears_from_many(nnodes):
    ranks = tuple(range(nnodes))
    pairs = [(rank, partner) for rank in ranks for partner in probe.choose_partners(rank, ranks)]
    heard = [sum(partner == rank for _, partner in pairs) for rank in ranks] if nnodes <= 64 else [3]
    assert all(rank != partner for rank, partner in pairs)
    assert max(heard) <= 3
    assert min(heard) >= min(nnodes - 1, 2)


@pytest.mark.parametrize("address", [HERE, ""], ids=["all", "one without an address"])
def test_nodes_that_reach_each_other_start(request, address):
    rolls = meet(node_placements(3, request.node.name), [HERE, address, HERE])
    assert all(isinstance(roll, session.Session) for roll in rolls)


def test_failing_pair_is_named_on_every_node(request, narrow, monkeypatch):
    real = probe.open_port

    def offering(address: str, interface: str) -> AbstractContextManager[OpenPort]:
        if interface == "narrow":
            return nullcontext(OpenPort(narrow, socket.socket()))
        return real(address, interface)

    monkeypatch.setattr(probe, "open_port", offering)
    texts = meet(node_placements(3, request.node.name), [HERE] * 3, ["lo", "lo", "narrow"])
    assert len(set(texts)) == 1
    assert "cannot send" in str(texts[0])
    assert "to node 3 of 3 (host2)" in str(texts[0])
    assert "--no-network-test" in str(texts[0])


@pytest.mark.parametrize(("all_reach_head", "callers"), [(True, 5), (False, 3)])
def test_every_node_connects_to_the_head_of_commands_per_node(request, monkeypatch, all_reach_head, callers):
    real, counts = probe.open_port, dict[str, int]()

    @contextmanager
    def counting(address: str, interface: str) -> Iterator[OpenPort]:
        with real(address, interface) as opened:
            yield opened
            counts[threading.current_thread().name] = len(opened._accepted)

    monkeypatch.setattr(probe, "open_port", counting)
    placements = node_placements(6, f"{request.node.name}")
    rolls = meet(placements, [HERE] * 6, all_reach_head=all_reach_head)
    assert all(isinstance(roll, session.Session) for roll in rolls)
    assert max(counts.values()) == callers


def test_node_without_a_test_of_the_head_is_refused(request, monkeypatch):
    monkeypatch.setattr(probe, "ANSWER_S", -probe.LIMIT_S)
    texts = meet(node_placements(2, request.node.name), [HERE] * 2, all_reach_head=True)
    assert "node 2 of 2 (host1) cannot connect to node 1 of 2 (host0) on port" in str(texts[1])
    assert ": no report of this test\n" in str(texts[1])


def test_stranger_in_the_test_ports_does_not_refuse_the_start(request, monkeypatch):
    real, crowd = probe.open_port, []

    @contextmanager
    def crowded(address: str, interface: str) -> Iterator[OpenPort]:
        with real(address, interface) as opened:
            assert opened.offer is not None
            for _ in range(200 if interface == "crowded" else 0):  # more than the kernel queues
                connection = socket.socket()
                connection.setblocking(False)
                connection.connect_ex((HERE, opened.offer.port))
                crowd.append(connection)
            yield opened

    monkeypatch.setattr(probe, "open_port", crowded)
    rolls = meet(node_placements(3, request.node.name), [HERE] * 3, ["lo", "lo", "crowded"])
    for connection in crowd:
        connection.close()
    assert all(isinstance(roll, session.Session) for roll in rolls), rolls
    assert "no result from node 3 of 3 (host2)" in rolls[0].warnings[-1]  # type: ignore[attr-defined]


@pytest.mark.parametrize("ends", [True, False])
def test_head_blames_the_way_to_a_node_that_has_not_ended(closed, ends):
    head = CallThread(head_placement(), 0, address=HERE, interface="lo")
    me = NodeInfo(host="host1")
    joining = JoinRequest(job=head.placement.job_id, node_rank=1, nnodes=2, node=me, probe=closed)
    with stranger(head.placement) as node:
        node.sendall(messages.encode(joining) + b"\n")
        heard = b""
        while b'"ProbeRequest"' not in heard:
            heard += node.recv(4096)
        if not ends:
            node.sendall(messages.encode(ProbeReport(failures=())) + b"\n")
            text = "node 1 of 2 (as07r3b12) cannot connect to node 2 of 2 (host1) on port "
            assert f"{text}{closed.port}: Connection refused" in head.refusal()
            return
    roll = head.roll()
    roll.poll()
    assert list(roll.lost) == [1]
    roll.close()


HOLE = ProbeFailure(target=0, size=2000, arrived=1400, packet=1500, reason="no answer within 3.5 s")
WALL = ProbeFailure(target=0, size=0, arrived=0, packet=52, reason="Connection refused")
OFFERS = {rank: ProbePort(address=f"10.0.0.{rank}", interface="eth0", port=40001) for rank in range(3)}


def name(rank: int) -> str:
    return f"node {rank + 1} of 3 (host{rank})"


@pytest.mark.parametrize(
    ("pairs", "offers", "problems", "hints"),
    [
        (
            [PairFailure(1, HOLE), PairFailure(2, HOLE)],
            OFFERS,
            [
                "node 2 of 3 (host1) cannot send 2000 B at once to node 1 of 3 (host0): 1400 B arrive",
                "(other failing pairs of nodes: 1)",
            ],
            [
                "drops packets of 1500 B",
                "ping -c 3 -M do -s 1472 10.0.0.0",
                "ip link set dev eth0 mtu 1452",
            ],
        ),
        (
            [PairFailure(2, HOLE), PairFailure(1, WALL)],
            OFFERS,
            ["cannot connect to node 1 of 3 (host0) on port 40001: Connection refused"],
            ["sudo ufw allow from 10.0.0.1"],
        ),
        (
            [PairFailure(1, WALL)],
            dict.fromkeys(range(3), replace(OFFERS[0], address="172.17.0.2")),
            [],
            ["both nodes have the address 172.17.0.2"],
        ),
        (
            [PairFailure(1, replace(WALL, size=64))],
            OFFERS,
            ["connects to node 1 of 3 (host0), but port 40001 gets no data"],
            [],
        ),
    ],
    ids=["black hole", "firewall", "one address for two nodes", "connection without data"],
)
def test_failed_pair_is_refused_with_what_helps(pairs, offers, problems, hints):
    error = probe.network_error(pairs, offers, name)
    assert [text for text in problems if text not in error.what] == []
    assert [text for text in hints if text not in str(error.hint)] == []


def test_refusal_fits_into_a_small_packet():
    long = "x" * 60
    for failure in (HOLE, WALL):
        error = probe.network_error(
            [PairFailure(1, failure)] * 50, OFFERS, lambda rank: f"node {rank} of 1000 ({long}.{long})"
        )
        assert len(json.dumps([error.what, error.where, error.hint])) < probe.SIZES[1]

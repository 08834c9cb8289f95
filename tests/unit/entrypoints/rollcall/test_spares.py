"""A run with spares, ``--nnodes N+S``: who is there starts, numbered without gaps; nobody joins later."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from rollcall_nodes import CallThread, close, end_run, head_placement, hear, stranger

from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.rollcall import gather, messages, probe
from imgkit_entrypoints.rollcall.join import RollCall
from imgkit_entrypoints.rollcall.messages import (
    AttemptEnded,
    AttemptStart,
    JoinRequest,
    NodeInfo,
    ProbePort,
    StopOrder,
)
from imgkit_entrypoints.rollcall.session import Session
from imgkit_entrypoints.schedulers.placement import Placement, Size

NEVER_S = 3600.0


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "LAST_CALL_S", 0.5)


@pytest.fixture
def placement() -> Placement:
    """Two nodes and a spare."""
    return replace(head_placement(), nnodes=3, size=Size(training=2, spares=1))


def start_ranks(placement: Placement, *ranks: int, **options: object) -> list[Session]:
    calls = [CallThread(placement, rank, **{"timeout_s": NEVER_S, **options}) for rank in ranks]
    return [call.roll() for call in calls]


def numbers(rolls: list[Session]) -> list[tuple[int, int]]:
    return [(roll.placement.node_rank, roll.placement.nnodes) for roll in rolls]


@pytest.mark.parametrize(
    ("ranks", "timeout_s"), [((0, 1, 2), NEVER_S), ((0, 1), 2.0)], ids=["all are there", "the time is over"]
)
def test_start_waits_no_longer_than_it_must(placement, monkeypatch, ranks, timeout_s):
    monkeypatch.setattr(gather, "LAST_CALL_S", NEVER_S)
    rolls = start_ranks(placement, *ranks, timeout_s=timeout_s)
    assert numbers(rolls) == [(rank, len(ranks)) for rank in ranks]
    close(rolls)


@pytest.mark.parametrize("secret", [None, bytes(32)], ids=["open", "with a secret"])
def test_missing_node_leaves_no_gap(placement, secret):
    rolls = start_ranks(placement, 0, 2, secret=secret)
    assert numbers(rolls) == [(0, 2), (1, 2)]
    close(rolls)


def test_head_starts_alone_where_one_is_enough(placement):
    rolls = start_ranks(replace(placement, size=Size(training=1, spares=2)), 0)
    assert numbers(rolls) == [(0, 1)]
    end_run(rolls)


def test_each_call_gives_the_next_node_time(placement, monkeypatch):
    monkeypatch.setattr(gather, "LAST_CALL_S", 60.0)
    placement = replace(placement, size=Size(training=1, spares=2))
    me, end = NodeInfo(host="as07r3b12"), time.monotonic() + NEVER_S
    with probe.open_port("", "") as opened:
        head = gather._RollCallHead(RollCall(placement, me, opened, NEVER_S, print, str, None))
        head._last_join -= 100
        assert head._can_start(end)
        member = CallThread(placement, 1)
        while len(head.nodes) < 2:
            head._receive_requests()
        assert not head._can_start(end)
        head.server.send_all(messages.Refused.from_error(NoPlan("over")))
        head.server.close(1.0)
    assert "over" in member.refusal()


def test_too_few_nodes_are_named(placement):
    text = CallThread(placement, 0, timeout_s=0.8).refusal()
    assert "nodes 2-3 of 3 (as07r3b[13-14]) did not join; 1/3 present after 0.8 s" in text


def test_node_that_calls_and_goes_is_not_counted(placement):
    head = CallThread(placement, 0)
    me = NodeInfo(host="as07r3b13")
    offer = ProbePort(address="127.0.0.1", interface="lo", port=9)
    call = JoinRequest(job=placement.job_id, node_rank=1, nnodes=3, node=me, probe=offer)
    with stranger(placement) as connection:
        connection.sendall(messages.encode(call) + b"\n")
        assert b"Heartbeat" in connection.recv(100), "it is counted"
    end = time.monotonic() + 10
    while not any("node 2 of 3 (as07r3b13) joined and disconnected" in text for text in head.log_lines):
        assert time.monotonic() < end
        time.sleep(0.01)
    rolls = [CallThread(placement, 2).roll(), head.roll()][::-1]
    assert numbers(rolls) == [(0, 2), (1, 2)]
    close(rolls)


def test_late_node_reads_that_it_cannot_join(placement):
    rolls = start_ranks(placement, 0, 1)
    late = CallThread(placement, 2)
    hear(rolls, lambda _: not late.is_alive())
    assert "the run has started with 2 nodes, and no node can join it later" in late.refusal()
    close(rolls)


def test_losses_bear_the_numbers_of_the_start(placement):
    rolls = start_ranks(placement, 0, 2)
    head = rolls[0]
    rolls[1]._connection.close()
    hear([head], lambda _: bool(head.lost))
    assert [head.node_name(number) for number in head.lost] == ["node 2 of 2 (as07r3b14)"]
    close([head])


@pytest.fixture
def elastic(placement: Placement) -> Iterator[list[Session]]:
    """The rolls of a run of three nodes, whose head starts attempts."""
    rolls = start_ranks(placement, 0, 1, 2)
    yield rolls
    close(rolls)


def test_each_node_gets_its_own_rank_and_spares_none(elastic):
    elastic[0].start_attempt(1, {0: 0, 2: 1})
    events = hear(elastic, all)
    assert [[(type(order), order.node_rank, order.nnodes) for order in seen] for seen in events] == [
        [(AttemptStart, rank, 2)] for rank in (0, None, 1)
    ]


def test_words_about_an_earlier_attempt_do_not_count(elastic):
    head, node, _ = elastic
    for attempt in (1, 2):
        head.start_attempt(attempt, {0: 0, 1: 1})
    hear(elastic, all)
    node.report(AttemptEnded(code=0, attempt=2, position=9))
    node.report(AttemptEnded(code=7, attempt=1))
    node.report(StopOrder(reason="the last word"))
    hear([head], lambda events: bool(events[0]))
    assert head.reports == {1: AttemptEnded(code=0, attempt=2, position=9)}

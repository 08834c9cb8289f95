"""Which ranks are stragglers: limits, few ranks, unknown times, looks in a row, and what the log says."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from imgkit_entrypoints.apps.train import stragglers
from imgkit_entrypoints.apps.train.stragglers import RankOnNode, Stragglers, find_usual_work

USUAL = (0.100, 0.101, 0.099, 0.100)
SLOW = (0.100, 0.101, 0.131, 0.100)


def make_tracker(ranks: int = 4) -> tuple[Stragglers, list[str]]:
    """Return a tracker of ranks, two to a node, and the list of its messages."""
    messages: list[str] = []
    rank_nodes = [RankOnNode(node=f"node{rank // 2}", local_rank=rank % 2) for rank in range(ranks)]
    return Stragglers(rank_nodes, messages.append), messages


def looks(tracker: Stragglers, *each: Sequence[float], after: int = 0) -> None:
    for number, own_s in enumerate(each, start=1):
        tracker.judge(after + 10 * number, own_s)


def over(own_s: Sequence[float]) -> list[int]:
    limit_s = find_usual_work(own_s)[1]
    return [rank for rank, work_s in enumerate(own_s) if work_s > limit_s]


@pytest.mark.parametrize(
    ("own_s", "slow"),
    [
        ((0.1, 0.1, 0.1, 0.1221), [3]),  # no deviation at all: 20 % decide
        ((0.1, 0.1, 0.1, 0.1199), []),
        ((0.1, 0.11, 0.09, 0.12, 0.155), []),  # 41 % more, but ranks deviate by 10 % anyway
        ((0.1, 0.11, 0.09, 0.12, 0.165), [4]),
        ((0.1, 0.1, 0.2, 0.2), []),  # two halves: nobody knows which is usual
        ((0.0100, 0.0105, 0.0100, 0.0109), []),
        ((0.0004, 0.0004, 0.0004, 0.0012), []),  # a millisecond lost at most
        ((0.0004, 0.0004, 0.0004, 0.0015), [3]),
    ],
)
def test_four_ranks_compare_with_their_median(own_s: Sequence[float], slow: list[int]) -> None:
    assert over(own_s) == slow


@pytest.mark.parametrize(
    ("own_s", "slow"),
    [
        ((0.1, 0.119), []),
        ((0.1, 0.121), [1]),
        ((0.2, 0.1, 0.2), [0, 2]),
        ((0.1, math.nan, 0.13), [2]),
        ((0.1, 0.1, 0.13, math.inf), [2]),  # three of the four are known
    ],
)
def test_fewer_ranks_compare_with_the_fastest(own_s: Sequence[float], slow: list[int]) -> None:
    assert [rank for rank in over(own_s) if math.isfinite(own_s[rank])] == slow


@pytest.mark.parametrize("own_s", [(), (0.1,), (0.0, 0.0), (0.1, math.nan), (-1.0, 0.0, math.nan, 0.1)])
def test_nothing_known_accuses_nobody(own_s: Sequence[float]) -> None:
    assert over(own_s) == []


def test_third_look_names_the_rank_once() -> None:
    tracker, messages = make_tracker()
    looks(tracker, SLOW, SLOW)
    assert (tracker.current_rows(), messages) == ([], [])
    looks(tracker, SLOW, SLOW, SLOW, after=20)
    assert messages == [
        "rank 2 on node1 (local rank 0) is a straggler: its own work takes 131 ms a step,"
        " not 100 ms, the median of all ranks (step 30); check node1 with dist-doctor"
    ]
    assert [(row["rank"], row["node"], row["own_work_s"]) for row in tracker.current_rows()] == [
        (2, "node1", 0.131)
    ]


def test_two_looks_and_a_usual_one_name_nobody() -> None:
    tracker, messages = make_tracker()
    looks(tracker, *(SLOW, SLOW, USUAL) * 5)
    assert (tracker.current_rows(), tracker.all_rows(), messages) == ([], [], [])


def test_look_without_times_changes_nothing() -> None:
    tracker, messages = make_tracker()
    looks(tracker, SLOW, SLOW, (0.0,) * 4, SLOW)
    assert len(messages) == 1


def test_recovery_takes_three_looks_too() -> None:
    tracker, messages = make_tracker()
    looks(tracker, SLOW, SLOW, SLOW, USUAL, USUAL, SLOW, USUAL, USUAL)
    assert len(tracker.current_rows()) == 1
    looks(tracker, USUAL, after=80)
    assert tracker.current_rows() == []
    assert messages[1:] == ["rank 2 on node1 (local rank 0) is as fast as the others again (step 90)"]
    assert [(row["from_step"], row["to_step"], row["times"]) for row in tracker.all_rows()] == [(10, 60, 1)]


def test_rank_that_relapses_stays_one_row() -> None:
    tracker, messages = make_tracker()
    looks(tracker, *(SLOW, SLOW, SLOW, USUAL, USUAL, USUAL) * 2)
    assert len(messages) == 4
    assert [(row["rank"], row["times"], row["from_step"]) for row in tracker.all_rows()] == [(2, 2, 10)]


def test_rank_that_relapses_again_and_again_is_not_printed() -> None:
    tracker, messages = make_tracker()
    looks(tracker, *(SLOW, SLOW, SLOW, USUAL, USUAL, USUAL) * 9)
    assert len(messages) == 2 * stragglers.MAX_REPORTS
    assert tracker.all_rows()[0]["times"] == 9


def test_equally_slow_ranks_accuse_nobody() -> None:
    tracker, messages = make_tracker()
    looks(tracker, USUAL, USUAL, *[tuple(3 * value for value in USUAL)] * 5)
    assert (tracker.current_rows(), messages) == ([], [])


def test_line_of_few_ranks_names_the_fastest() -> None:
    tracker, messages = make_tracker(2)
    looks(tracker, *[(0.1, 4.56)] * 3)
    assert "takes 4560 ms a step, not 100 ms, as that of the fastest (step 30)" in messages[0]


def test_many_slow_ranks_do_not_flood_the_log() -> None:
    tracker, messages = make_tracker(40)
    own_s = [0.1] * 28 + [0.2] * 12
    looks(tracker, own_s, own_s, own_s)
    assert len(messages) == stragglers.LINES + 1
    assert messages[-1] == "4 more ranks became stragglers or recovered at step 30"
    assert len(tracker.current_rows()) == 12

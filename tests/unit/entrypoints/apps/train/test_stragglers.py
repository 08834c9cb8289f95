"""Which ranks are stragglers: limits, few ranks, unknown times, looks in a row, and what the log says."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from imgkit_entrypoints.apps.train import stragglers
from imgkit_entrypoints.apps.train.stragglers import RankOnNode, Stragglers, find_usual_work

USUAL = (0.100, 0.101, 0.099, 0.100)
SLOW = (0.100, 0.101, 0.131, 0.100)
NOTHING = (0.0,) * 4


def make_tracker(ranks: int = 4) -> tuple[Stragglers, list[str]]:
    """Return a tracker of ranks, two to a node, and the list of its messages."""
    messages: list[str] = []
    rank_nodes = [RankOnNode(node=f"node{rank // 2}", local_rank=rank % 2) for rank in range(ranks)]
    return Stragglers(rank_nodes, messages.append), messages


def looks(tracker: Stragglers, *each: Sequence[float], after: int = 0) -> None:
    for number, own_s in enumerate(each, start=1):
        tracker.compare_ranks(after + 10 * number, own_s)


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
        # Fewer than four compare with the fastest.
        ((0.1, 0.119), []),
        ((0.1, 0.121), [1]),
        ((0.2, 0.1, 0.2), [0, 2]),
        ((0.1, math.nan, 0.13), [2]),
        ((0.1, 0.1, 0.13, math.inf), [2]),  # three of the four are known
        # Nothing is known.
        ((), []),
        ((0.1,), []),
        ((0.0, 0.0), []),
        ((0.1, math.nan), []),
        ((-1.0, 0.0, math.nan, 0.1), []),
    ],
)
def test_ranks_compare_with_their_median_or_the_fastest_of_few(own_s, slow):
    limit_s = find_usual_work(own_s).limit_s
    assert [rank for rank, work_s in enumerate(own_s) if limit_s < work_s < math.inf] == slow


def test_third_look_names_the_rank_once():
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


@pytest.mark.parametrize(
    ("each", "reports", "rows"),
    # Rows are the first and last step in which the rank was slow, and the times that it was named.
    [
        ((SLOW, SLOW, USUAL) * 5, 0, []),
        ((SLOW, SLOW, NOTHING, SLOW), 1, [(10, 40, 1)]),
        ((USUAL, USUAL, *[tuple(3 * value for value in USUAL)] * 5), 0, []),
        ((SLOW, SLOW, SLOW, USUAL, USUAL, SLOW, USUAL, USUAL), 1, [(10, 60, 1)]),
        ((SLOW, SLOW, SLOW, USUAL, USUAL, USUAL) * 2, 4, [(10, 90, 2)]),
        ((SLOW, SLOW, SLOW, USUAL, USUAL, USUAL) * 9, 2 * stragglers.MAX_REPORTS, [(10, 510, 9)]),
    ],
    ids=["two in a row", "times unknown in between", "all slow", "slow again", "relapse", "many relapses"],
)
def test_three_looks_in_a_row_name_or_clear_a_rank(each, reports, rows):
    tracker, messages = make_tracker()
    looks(tracker, *each)
    assert len(messages) == reports
    assert [(row["from_step"], row["to_step"], row["times"]) for row in tracker.all_rows()] == rows
    assert {row["rank"] for row in tracker.all_rows()} <= {2}
    assert len(tracker.current_rows()) == reports % 2


def test_rank_that_recovers_is_reported():
    tracker, messages = make_tracker()
    looks(tracker, *[SLOW] * 3, *[USUAL] * 3)
    assert messages[1:] == ["rank 2 on node1 (local rank 0) is as fast as the others again (step 60)"]
    assert tracker.current_rows() == []


def test_line_of_few_ranks_names_the_fastest():
    tracker, messages = make_tracker(2)
    looks(tracker, *[(0.1, 4.56)] * 3)
    assert "takes 4560 ms a step, not 100 ms, as that of the fastest (step 30)" in messages[0]


def test_many_slow_ranks_do_not_flood_the_log():
    tracker, messages = make_tracker(40)
    own_s = [0.1] * 28 + [0.2] * 12
    looks(tracker, own_s, own_s, own_s)
    assert len(messages) == stragglers.LINES + 1
    assert messages[-1] == "4 more ranks became stragglers or recovered at step 30"
    assert len(tracker.current_rows()) == 12

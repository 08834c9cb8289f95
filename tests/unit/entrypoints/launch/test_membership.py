"""Who takes part in the next attempt, and whether there is one."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imgkit_entrypoints.launch.attempts import FailedAttempt, assign_ranks, describe_cause, end_reason


def failed(position: int | None = None, after_s: float = 1000.0) -> FailedAttempt:
    return FailedAttempt(cause="lost node 1", position=position, after_s=after_s)


def test_first_attempt_leaves_the_last_nodes_in_reserve() -> None:
    assert assign_ranks([0, 1, 2], 2, {}) == {0: 0, 1: 1}


def test_spare_takes_the_rank_of_the_lost_node() -> None:
    before = assign_ranks(range(5), 4, {})
    assert assign_ranks([0, 2, 3, 4], 4, before) == {0: 0, 4: 1, 2: 2, 3: 3}


def test_lost_spare_changes_nothing() -> None:
    assert assign_ranks([0, 1], 2, {0: 0, 1: 1}) == {0: 0, 1: 1}


def test_node_that_is_left_out_leaves_its_rank_to_the_spare() -> None:
    assert assign_ranks([0, 2], 2, {}) == {0: 0, 2: 1}


@pytest.mark.parametrize(("alive", "nnodes"), [([0], 2), ([0, 1], 4), ([], 1)])
def test_too_few_nodes_are_no_attempt(alive: list[int], nnodes: int) -> None:
    assert assign_ranks(alive, nnodes, {}) == {}


@given(st.integers(1, 9), st.integers(0, 3), st.data())
def test_ranks_are_whole_and_kept_over_any_losses(nnodes: int, spares: int, data: st.DataObject) -> None:
    alive = list(range(nnodes + spares))
    before: Mapping[int, int] = {}
    while ranks := assign_ranks(alive, nnodes, before):
        assert sorted(ranks.values()) == list(range(nnodes))
        assert ranks[0] == 0
        for number, rank in before.items():
            if number in alive:
                assert ranks[number] == rank
        before = ranks
        if len(alive) == 1:
            break
        alive.remove(data.draw(st.sampled_from(alive[1:])))


def test_first_failure_is_survived() -> None:
    assert end_reason([failed(65, 1.0)], 3) == ""


def test_more_failures_than_allowed_end_the_run() -> None:
    assert "--max-failures 1: the run survives 1 failure" in end_reason([failed(65), failed(99)], 1)
    assert end_reason([failed(65)], 0) == "--max-failures 0"


@pytest.mark.parametrize("positions", [(65, 65), (65, 66), (66, 65), (66, 66)], ids=str)
def test_same_step_twice_in_a_row_ends_the_run(positions: tuple[int, int]) -> None:
    assert "at step 33" in end_reason([failed(9), *map(failed, positions)], 9)


def test_same_step_after_another_one_is_survived() -> None:
    assert end_reason([failed(65), failed(90), failed(65)], 9) == ""


def test_two_quick_failures_without_progress_end_the_run() -> None:
    assert "5 s and 7 s after the start" in end_reason([failed(-1, 5.0), failed(None, 7.0)], 9)


@pytest.mark.parametrize(
    "second", [failed(None, 61.0), failed(10, 5.0)], ids=["later than a minute", "with progress"]
)
def test_other_second_failure_is_survived(second: FailedAttempt) -> None:
    assert end_reason([failed(-1, 5.0), second], 9) == ""


def test_lost_node_explains_the_failures_of_others() -> None:
    assert (
        describe_cause({"node 1": "it closed the connection"}, {"node 0": 1})
        == "lost node 1: it closed the connection"
    )


def test_signal_of_an_exit_code_is_named() -> None:
    assert describe_cause({}, {"node 1": 137}) == "node 1 ended with exit code 137 (SIGKILL)"
    assert describe_cause({}, {"node 1": 7, "node 0": 1}) == "node 1 ended with exit code 7"

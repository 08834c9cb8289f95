"""The number of batches, launches and iterations: several batches at every size, and no jumps."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imgkit_entrypoints.apps.bench import sizes
from imgkit_entrypoints.apps.bench.sizes import Counts

GUESSES = st.lists(st.floats(0.0, 1e7), min_size=2, max_size=20)


def planned(size: int = 8, **changed: Any) -> Counts:
    arguments: dict[str, Any] = {"fitting": 500.0, "iters": None, "previous": None}
    return sizes.plan_counts(size, **(arguments | changed))


@given(st.floats(0.0, 1e9), st.none() | st.integers(1, 10**6))
def test_every_size_has_five_batches(fitting: float, iters: int | None) -> None:
    counts = planned(fitting=fitting, iters=iters)
    assert counts.batches >= 5
    assert counts.launches >= 1


@given(GUESSES)
def test_wild_guesses_make_no_jumps(guesses: list[float]) -> None:
    previous, totals = None, []
    for power, fitting in enumerate(guesses):
        previous = planned(8 << power, fitting=fitting, previous=previous)
        totals.append(previous.total)
    for before, after in itertools.pairwise(totals):
        assert max(before, after) <= 2 * min(before, after) + 50  # batches are whole


def test_larger_steps_of_the_size_may_lower_the_count() -> None:
    previous = planned(8, fitting=1000.0)
    assert planned(8 * 128, fitting=1.0, previous=previous).total < previous.total / 50


@pytest.mark.parametrize(("iters", "total"), [(2, 5), (50, 50), (7, 10), (2000, 2000)])
def test_given_iterations_are_kept_in_whole_batches(iters: int, total: int) -> None:
    assert planned(iters=iters).total == total


@pytest.mark.parametrize(("iters", "verified"), [(2, 20), (50, 50), (2000, 200)])
def test_at_least_twenty_iterations_are_verified(iters: int, verified: int) -> None:
    assert planned(iters=iters).verified == verified


def test_slow_guess_does_not_starve_the_next_sizes() -> None:
    previous = planned(8, fitting=5.0)
    for power in range(1, 9):
        previous = planned(8 << power, fitting=800.0, previous=previous)
    assert previous.total >= 800

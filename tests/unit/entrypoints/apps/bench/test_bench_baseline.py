"""Regressions against a saved run: both conditions, and everything that is not compared."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imgkit_entrypoints.apps.bench import baseline, record
from imgkit_entrypoints.apps.bench.record import BenchRun, Result, World
from imgkit_entrypoints.errors import UsageError

TIMES = st.lists(st.floats(1.0, 1e6), min_size=6, max_size=40)
TOLERANCES = st.floats(0.0, 0.9)


def result(times: Sequence[float] = (), size: int = 1 << 20, **changed: Any) -> Result:
    time_us = statistics.median(times) if times else 100.0
    algbw = size / time_us / 1e3
    made = Result(
        op="all_reduce",
        size_bytes=size,
        dtype="fp32",
        group="world",
        timing="iteration" if times else "batched",
        iterations=max(1, len(times)),
        time_us=time_us,
        algbw_GBps=algbw,
        busbw_GBps=algbw,
        wrong=0,
        times_us=tuple(times),
    )
    return dataclasses.replace(made, **changed)


def run(*results: Result, where: str = "new.json", **changed: Any) -> BenchRun:
    made = BenchRun(
        where=where,
        version="0.3.0",
        complete=True,
        started="2026-11-21T15:00:00+00:00",
        command=("dist-bench",),
        world=World(ranks=8, nodes=2, ranks_per_node=4, hosts=("a", "b"), backend="nccl", device="cuda"),
        fingerprint={"torch": "2.3.0", "nccl": "2.20.5"},
        line_rate_Gbps=None,
        results=results,
        sentences=(),
    )
    return dataclasses.replace(made, **changed)


def judged(now: Sequence[float], then: Sequence[float], tolerance: float) -> baseline.Change:
    (change,) = baseline.compare(run(result(now)), run(result(then), where="old.json"), tolerance).changes
    return change


def around(middle: float, share: float) -> list[float]:
    """Twenty times, evenly from -share to +share."""
    return [middle * (1 + share * (index - 9.5) / 9.5) for index in range(20)]


@given(TIMES, TOLERANCES)
def test_same_times_never_regress(times: list[float], tolerance: float) -> None:
    assert not judged(times, times, tolerance).regressed


@given(TIMES, TIMES, TOLERANCES)
def test_faster_median_never_regresses(one: list[float], other: list[float], tolerance: float) -> None:
    now, then = sorted((one, other), key=statistics.median)
    assert not judged(now, then, tolerance).regressed


@given(TIMES, TIMES, TOLERANCES)
def test_regression_needs_both_conditions(now: list[float], then: list[float], tolerance: float) -> None:
    change = judged(now, then, tolerance)
    worse = statistics.median(then) / statistics.median(now) < 1 - tolerance
    apart = change.new_us.low > change.old_us.high
    assert change.regressed == (worse and apart)


@given(TIMES, TIMES, TOLERANCES, TOLERANCES)
def test_more_tolerance_finds_no_more(now: list[float], then: list[float], one: float, other: float) -> None:
    strict, lax = sorted((one, other))
    assert judged(now, then, strict).regressed or not judged(now, then, lax).regressed


@given(TIMES.flatmap(lambda times: st.tuples(st.just(times), st.permutations(times))))
def test_order_of_iterations_does_not_matter(both: tuple[list[float], list[float]]) -> None:
    times, shuffled = both
    assert record.spread(times) == record.spread(shuffled)


@given(TIMES)
def test_spread_holds_all_but_two_tenths(times: list[float]) -> None:
    spread = record.spread(times)
    assert min(times) <= spread.low <= spread.median <= spread.high <= max(times)
    outside = [time for time in times if not spread.low <= time <= spread.high]
    assert len(outside) <= len(times) / 5


@given(TIMES, TIMES, TOLERANCES)
def test_slower_median_is_regressed_or_undecided(
    now: list[float], then: list[float], tolerance: float
) -> None:
    change = judged(now, then, tolerance)
    assert change.regressed + change.undecided == (change.ratio < 1 - tolerance)


def test_undecided_sizes_are_told() -> None:
    found = baseline.compare(run(result(around(130, 0.5))), run(result(around(100, 0.5))), 0.1)
    assert found.regressions == ()
    assert "undecided at 1 of 1 sizes: slower by more than 10%" in found.sentences[1]


def test_outliers_do_not_widen_the_spread() -> None:
    calm = around(100, 0.02)
    assert judged(around(130, 0.02), [*calm[:18], 3000.0, 4000.0], 0.1).regressed


def test_slower_beyond_the_spread_regresses() -> None:
    change = judged(around(130, 0.02), around(100, 0.02), 0.1)
    assert change.regressed
    assert change.ratio == pytest.approx(1 / 1.3)


def test_noise_alone_is_no_regression() -> None:
    assert not judged(around(130, 0.2), around(100, 0.2), 0.1).regressed


def test_slow_phase_of_a_run_is_no_regression() -> None:
    then = around(100, 0.01)
    assert not judged([*then[:8], *around(300, 0.01)[:12]], then, 0.1).regressed


def test_small_but_certain_loss_is_tolerated() -> None:
    assert not judged(around(105, 0.001), around(100, 0.001), 0.1).regressed


def test_sentences_name_the_worst_first() -> None:
    old = run(result(around(100, 0.01)), result(around(100, 0.01), size=1 << 26), where="old.json")
    new = run(result(around(150, 0.01)), result(around(300, 0.01), size=1 << 26))
    first, worst, other = baseline.compare(new, old, 0.1).sentences
    assert "at 2 of 2 sizes" in first
    assert worst.startswith("all_reduce fp32 64MiB")
    assert "67% slower" in worst
    assert "33% slower" in other


def test_sentence_says_when_nothing_regressed() -> None:
    verdict = baseline.compare(run(result(around(90, 0.01))), run(result(around(100, 0.01))), 0.1)
    assert verdict.regressions == ()
    assert verdict.sentences == (
        "no regression: none of 1 sizes is slower than the baseline by more than 10% and beyond the "
        "spread of both runs",
    )


def test_blindness_by_noise_is_told() -> None:
    noisy = run(result([*[100.0] * 10, *[500.0] * 10]))
    verdict = baseline.compare(noisy, noisy, 0.1)
    assert verdict.visible == pytest.approx(5)
    assert "only a run at least 5 times slower" in verdict.sentences[-1]


def test_sizes_without_partner_are_counted() -> None:
    new = run(result(around(100, 0.1)), result(around(100, 0.1), size=64))
    old = run(result(around(100, 0.1)), result(around(100, 0.1), size=128))
    verdict = baseline.compare(new, old, 0.1)
    assert (len(verdict.changes), verdict.not_compared) == (1, 2)
    assert verdict.sentences[-1].startswith("2 results")


@pytest.mark.parametrize("changed", [{"dtype": "bf16"}, {"group": "node"}, {"op": "broadcast"}])
def test_other_types_and_groups_are_not_compared(changed: dict[str, str]) -> None:
    times = around(100, 0.1)
    with pytest.raises(UsageError, match="no op, size, type and group in common"):
        baseline.compare(run(result(times)), run(result(times, **changed)), 0.1)


def test_other_nodes_of_the_kind_are_welcome() -> None:
    new = run(result(around(100, 0.1)))
    elsewhere = dataclasses.replace(new.world, hosts=("x", "y"))
    assert baseline.compare(new, dataclasses.replace(new, world=elsewhere), 0.1).changes


def test_other_fingerprint_is_refused_by_name() -> None:
    times = around(100, 0.1)
    old = run(
        result(times), where="old.json", fingerprint={"torch": "2.3.0", "nccl": "2.27.7", "gpu": "H100"}
    )
    with pytest.raises(UsageError) as caught:
        baseline.compare(run(result(times)), old, 0.1)
    assert "gpu: H100 then, unknown now; nccl: 2.27.7 then, 2.20.5 now" in str(caught.value)
    assert "torch" not in caught.value.what


def test_other_number_of_ranks_is_refused() -> None:
    new = run(result(around(100, 0.1)))
    old = dataclasses.replace(new, world=dataclasses.replace(new.world, ranks=16, ranks_per_node=8))
    with pytest.raises(UsageError, match="ranks: 16 then, 8 now"):
        baseline.compare(new, old, 0.1)


@pytest.mark.parametrize("mixed", ["new", "old"])
def test_different_timings_are_never_compared(mixed: str) -> None:
    batched, iteration = run(result(), where="a.json"), run(result(around(100, 0.1)), where="b.json")
    new, old = (batched, iteration) if mixed == "new" else (iteration, batched)
    with pytest.raises(UsageError, match=r"only batched times, b\.json has times per iteration") as caught:
        baseline.compare(new, old, 0.1)
    assert caught.value.where == "a.json"


def test_batched_times_beside_are_passed_over() -> None:
    both = run(result(), result(around(100, 0.1)))
    verdict = baseline.compare(both, both, 0.1)
    assert (len(verdict.changes), verdict.not_compared) == (1, 0)


def test_batched_times_alone_are_refused() -> None:
    with pytest.raises(UsageError, match="which have no spread"):
        baseline.compare(run(result()), run(result()), 0.1)


def test_few_iterations_are_refused() -> None:
    short = [100.0] * (baseline.LEAST_TIMES - 1)
    with pytest.raises(UsageError, match="fewer than 6 iterations"):
        baseline.compare(run(result(short)), run(result(around(100, 0.1))), 0.1)


def test_baseline_with_wrong_values_is_refused() -> None:
    old = run(result(around(100, 0.1), wrong=3), where="old.json")
    with pytest.raises(UsageError, match="3 wrong elements in all_reduce"):
        baseline.compare(run(result(around(100, 0.1))), old, 0.1)

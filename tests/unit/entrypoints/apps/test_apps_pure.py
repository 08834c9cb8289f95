"""Decisions of the apps without torch: parts, weights, texts, options."""

from __future__ import annotations

import argparse
import gc
import itertools
import math

import pytest

from imgkit_entrypoints.apps import hello, pi
from imgkit_entrypoints.apps.share import share
from imgkit_entrypoints.arguments import add_options

WORLD_SIZES = range(1, 9)


def plain_pi(intervals: int, world_size: int) -> float:
    """The trapezoid rule in plain Python, divided as among the workers."""
    total = 0.0
    for rank in range(world_size):
        first, end = share(intervals + 1, rank, world_size)
        total += math.fsum(4.0 / (1.0 + (i / intervals) ** 2) for i in range(first, end))
        total -= pi.excess_of_ends(first, end, intervals)
    return total / intervals


def test_import_keeps_the_garbage_collector() -> None:
    assert gc.isenabled()  # it rests in processes that run an app


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("total", [0, 1, 7, 100_000_001])
def test_no_point_is_lost_or_doubled(total: int, world_size: int) -> None:
    parts = [share(total, rank, world_size) for rank in range(world_size)]
    assert parts[0][0] == 0
    assert parts[-1][1] == total
    assert all(before[1] == after[0] for before, after in itertools.pairwise(parts))
    sizes = [end - first for first, end in parts]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_end_points_count_half_once(world_size: int) -> None:
    halves = [pi.excess_of_ends(*share(101, rank, world_size), 100) for rank in range(world_size)]
    assert sum(halves) == 3.0  # half of f(0) = 4 and half of f(1) = 2
    assert halves[0] >= 2.0


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("intervals", [1, 2, 3, 1000])
def test_error_is_the_trapezoid_rules(intervals: int, world_size: int) -> None:
    value = plain_pi(intervals, world_size)
    assert abs(value - math.pi) <= pi.tolerance(intervals)
    # The error is not smaller either: a loose bound would hide a rule with wrong ends.
    assert value == pytest.approx(math.pi - 1 / (6 * intervals**2), abs=0.03 / intervals**4 + 1e-12)


def test_tolerance_is_tight_at_the_default() -> None:
    assert pi.tolerance(100_000_000) < 1.1e-12


def work(rank: int, seconds: float) -> pi.Work:
    return pi.Work(rank=rank, host=f"n{rank}", points=1000, seconds=seconds)


def test_efficiency_compares_with_one_alone() -> None:
    lines = pi.format_report(math.pi, 2000, [work(0, 1.0), work(1, 1.25)], 1.25, work(0, 1.0))
    assert lines[0].startswith("pi = 3.14159265358979")
    assert "rank 1 on n1: 1000 terms in 1.250 s, 8.000e+02 terms/s" in lines
    assert "parallel efficiency 80% of 2 x" in lines[-1]


def test_many_ranks_are_summed_up() -> None:
    lines = pi.format_report(math.pi, 10, [work(rank, 1.0 + rank) for rank in range(64)], 64.0, work(0, 1.0))
    assert [line.split()[1] for line in lines[1:4]] == ["63", "31", "0"]
    assert len(lines) == 6


def test_rank_without_points_does_not_divide_by_zero() -> None:
    idle = pi.Work(rank=0, host="n0", points=0, seconds=0.1)
    assert "nan" in pi.format_report(3.0, 1, [idle, work(1, 1.0)], 1.0, idle)[-1]


def test_table_shows_every_rank() -> None:
    peers = [
        hello.Peer(rank=0, host="as07r3b13", device="cuda:0, NVIDIA H100"),
        hello.Peer(rank=10, host="n", device="cpu", seconds=12.34e-6),
    ]
    assert hello.format_table(peers) == [
        "rank  host       device                  latency",
        "   0  as07r3b13  cuda:0, NVIDIA H100           -",
        "  10  n          cpu                     12.3 us",
    ]


def test_bad_number_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, pi.OPTIONS)
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(["--intervals", "1e8"])
    assert caught.value.code == 2
    assert "--intervals" in capsys.readouterr().err

"""What is measured, without torch: options, sizes, counts of batches and iterations, nodes of the ranks."""

from __future__ import annotations

import argparse
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imgkit_entrypoints.apps.bench import collectives, machine, options, sizes
from imgkit_entrypoints.apps.bench.machine import RankNode
from imgkit_entrypoints.apps.bench.options import Requirement
from imgkit_entrypoints.apps.bench.sizes import Counts
from imgkit_entrypoints.errors import UsageError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4G", 4 << 30),
        ("4GiB", 4 << 30),
        ("4GB", 4_000_000_000),
        ("64k", 65536),
        ("1.5M", 1572864),
        ("8", 8),
    ],
)
def test_sizes_are_binary_unless_they_say_b(text, value):
    assert sizes.parse_size(text) == value


@pytest.mark.parametrize("text", ["", "0", "-4K", "4X", "4 Mi", "0.3K", "4K,1M", "1e6", "4iB"])
def test_odd_sizes_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size"):
        sizes.parse_size(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [(4 << 30, "4GiB (4.29GB)"), (4_000_000_000, "3.73GiB (4GB)"), (8, "8B"), (9 << 20, "9MiB (9.44MB)")],
)
def test_sizes_are_written_both_ways(value, text):
    assert sizes.format_size(value) == text


def test_sweep_ends_at_the_last_size():
    assert list(sizes.iterate_sizes(8, 64, 2)) == [8, 16, 32, 64]
    assert list(sizes.iterate_sizes(8, 60, 4)) == [8, 32]


@pytest.mark.parametrize(
    ("args", "field", "value"),
    [
        ("", "collectives", ("all_reduce",)),
        ("", "min_bytes", 8),
        ("", "max_bytes", None),
        ("", "verify", True),
        ("", "output_paths", {}),
        ("all", "collectives", collectives.NAMES),
        ("--size 4GB", "min_bytes", 4_000_000_000),
        ("--size 4GB", "max_bytes", 4_000_000_000),
        ("--min 4K --max 4M --factor 4 --seconds 1 --timeout 9", "timeout_s", 9),
        ("all_gather --size 64K --dtype bf16 --iters 5 --no-verify --line-rate 200", "line_rate_Gbps", 200.0),
        ("--save a.json --csv a.csv", "output_paths", {"--save": "a.json", "--csv": "a.csv"}),
    ],
)
def test_options_reach_the_run(args, field, value):
    assert getattr(options.read_options(args.split()), field) == value


@pytest.mark.parametrize(
    ("text", "requirement"),
    [
        ("80%", Requirement(percent=80.0)),
        ("12.5 %", Requirement(percent=12.5)),
        ("300", Requirement(GBps=300.0)),
        ("300GBps", Requirement(GBps=300.0)),
    ],
)
def test_percent_and_busbw_can_be_required(text, requirement):
    assert options.parse_requirement(text) == requirement


@pytest.mark.parametrize("text", ["", "0", "0%", "-5%", "300Gbps", "300GB", "fast", "%"])
def test_other_requirements_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="neither a percentage of the expected busbw"):
        options.parse_requirement(text)


def plan(
    size: int = 8, *, fitting: float = 500.0, iters: int | None = None, previous: Counts | None = None
) -> Counts:
    return sizes.plan_counts(size, fitting, iters=iters, previous=previous)


@given(st.floats(0.0, 1e9), st.none() | st.integers(1, 10**6))
def test_every_size_has_five_batches(fitting, iters):
    counts = plan(fitting=fitting, iters=iters)
    assert counts.batches >= 5
    assert counts.launches >= 1


@given(st.lists(st.floats(0.0, 1e7), min_size=2, max_size=20))
def test_wild_guesses_make_no_jumps(guesses):
    previous, totals = None, []
    for power, fitting in enumerate(guesses):
        previous = plan(8 << power, fitting=fitting, previous=previous)
        totals.append(previous.total)
    for before, after in itertools.pairwise(totals):
        assert max(before, after) <= 2 * min(before, after) + 50  # batches are whole


def test_larger_steps_of_the_size_may_lower_the_count():
    previous = plan(8, fitting=1000.0)
    assert plan(8 * 128, fitting=1.0, previous=previous).total < previous.total / 50


@pytest.mark.parametrize(
    ("iters", "total", "verified"), [(2, 5, 20), (50, 50, 50), (7, 10, 20), (2000, 2000, 200)]
)
def test_given_iterations_are_kept_in_whole_batches_and_twenty_verified(iters, total, verified):
    counts = plan(iters=iters)
    assert (counts.total, counts.verified) == (total, verified)


def test_slow_guess_does_not_starve_the_next_sizes():
    previous = plan(8, fitting=5.0)
    for power in range(1, 9):
        previous = plan(8 << power, fitting=800.0, previous=previous)
    assert previous.total >= 800


def names(*rank_nodes: tuple[str, str]) -> tuple[str, ...]:
    return machine.node_names([RankNode(number=number, host=host) for number, host in rank_nodes])


def test_ranks_of_a_node_share_its_name_and_nodes_of_one_name_stay_apart():
    even = names(("0", "a"), ("0", "a"), ("1", "b"), ("1", "b"))
    assert even == ("a", "a", "b", "b")
    assert machine.ranks_per_node(even) == 2
    assert names(("0", "pod"), ("1", "pod")) == ("pod (node 0)", "pod (node 1)")


def test_uneven_nodes_are_refused_with_the_option_that_helps():
    with pytest.raises(UsageError, match="different numbers of ranks: 2 on a, 1 on b") as caught:
        machine.ranks_per_node(["a", "a", "b"])
    assert (caught.value.hint or "").startswith("--nproc 1 ")

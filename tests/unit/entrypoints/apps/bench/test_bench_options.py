"""Sizes and options of dist-bench, read without torch."""

from __future__ import annotations

import argparse

import pytest

from imgkit_entrypoints.apps.bench import collectives, options, sizes
from imgkit_entrypoints.apps.bench.options import Requirement


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
def test_sizes_are_binary_unless_they_say_b(text: str, value: int) -> None:
    assert sizes.parse_size(text) == value


@pytest.mark.parametrize("text", ["", "0", "-4K", "4X", "4 Mi", "0.3K", "4K,1M", "1e6", "4iB"])
def test_odd_sizes_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size"):
        sizes.parse_size(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [(4 << 30, "4GiB (4.29GB)"), (4_000_000_000, "3.73GiB (4GB)"), (8, "8B"), (9 << 20, "9MiB (9.44MB)")],
)
def test_sizes_are_written_both_ways(value: int, text: str) -> None:
    assert sizes.format_size(value) == text


def test_sweep_ends_at_the_last_size() -> None:
    assert list(sizes.iterate_sizes(8, 64, 2)) == [8, 16, 32, 64]
    assert list(sizes.iterate_sizes(8, 60, 4)) == [8, 32]


def test_defaults_are_all_reduce_from_8_bytes() -> None:
    config = options.read_options([])
    assert (config.collectives, config.min_bytes, config.max_bytes) == (("all_reduce",), 8, None)
    assert config.verify
    assert config.output_paths == {}


@pytest.mark.parametrize(
    ("args", "field", "value"),
    [
        ("all", "collectives", collectives.NAMES),
        ("--size 4GB", "min_bytes", 4_000_000_000),
        ("--size 4GB", "max_bytes", 4_000_000_000),
        ("--min 4K --max 4M --factor 4 --seconds 1 --timeout 9", "timeout_s", 9),
        ("all_gather --size 64K --dtype bf16 --iters 5 --no-verify --line-rate 200", "line_rate_Gbps", 200.0),
        ("--save a.json --csv a.csv", "output_paths", {"--save": "a.json", "--csv": "a.csv"}),
    ],
)
def test_options_reach_the_run(args: str, field: str, value: object) -> None:
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
def test_percent_and_busbw_can_be_required(text: str, requirement: Requirement) -> None:
    assert options.parse_requirement(text) == requirement


@pytest.mark.parametrize("text", ["", "0", "0%", "-5%", "300Gbps", "300GB", "fast", "%"])
def test_other_requirements_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="neither a percentage of the expected busbw"):
        options.parse_requirement(text)

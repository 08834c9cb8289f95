"""Sizes and options of dist-bench, read without torch."""

from __future__ import annotations

import argparse

import pytest

from imgkit_entrypoints.apps.bench import options, sizes
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
def test_sizes_are_binary_unless_they_say_b(text: str, value: int) -> None:
    assert sizes.size(text) == value


@pytest.mark.parametrize("text", ["", "0", "-4K", "4X", "4 Mi", "0.3K", "4K,1M", "1e6", "4iB"])
def test_odd_sizes_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size"):
        sizes.size(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [(4 << 30, "4GiB (4.29GB)"), (4_000_000_000, "3.73GiB (4GB)"), (8, "8B"), (9 << 20, "9MiB (9.44MB)")],
)
def test_sizes_are_written_both_ways(value: int, text: str) -> None:
    assert sizes.both(value) == text


def test_sweep_ends_at_the_last_size() -> None:
    assert list(sizes.swept(8, 64, 2)) == [8, 16, 32, 64]
    assert list(sizes.swept(8, 60, 4)) == [8, 32]


def test_defaults_are_all_reduce_from_8_bytes() -> None:
    found = options.read([])
    assert (found.ops, found.least_bytes, found.most_bytes) == (("all_reduce",), 8, None)
    assert found.verify


def test_all_means_nine_collectives() -> None:
    assert len(options.read(["all"]).ops) == 9


def test_matrix_is_of_nodes_unless_it_says_rails() -> None:
    assert [options.read(words).matrix for words in ([], ["--matrix"], ["--matrix", "rails"])] == [
        "",
        "nodes",
        "rails",
    ]


def test_one_size_is_first_and_last() -> None:
    found = options.read(["--size", "4GB"])
    assert found.least_bytes == found.most_bytes == 4_000_000_000


@pytest.mark.parametrize(
    "words",
    [
        ["all_reduse"],
        ["--factor", "1"],
        ["--dtype", "int8"],
        ["--iters", "0"],
        ["--iters", "5", "--seconds", "1"],
        ["--seconds", "nan"],
        ["--line-rate", "-1"],
        ["--tolerance", "5"],
        ["--min", "1M", "--max", "1K"],
        ["--group", "pair"],
        ["--matrix", "ranks"],
        ["--redop", "product"],
        ["--duration", "soon"],
        ["--duration", "0"],
        ["--skew", "-1"],
        ["--communicators", "0"],
        ["--matrix", "--require", "80%"],
    ],
)
def test_impossible_options_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        options.read(words)
    assert caught.value.code == 2
    assert "error" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--duration 30m --matrix", "--duration would have no effect with --matrix"),
        ("--duration 30m --baseline old.json", "--baseline would have no effect with --duration"),
        ("--duration 30m --overlap", "--overlap would have no effect with --duration"),
        (
            "--duration 30m --min 4K --factor 4",
            "--min, --factor would have no effect with --size or --duration",
        ),
        ("--size 4G --max 8G", "--max would have no effect with --size"),
        ("--compute --matrix", "--matrix would have no effect with --compute"),
        (
            "all_gather --compute --save run.json --dtype bf16",
            "OP, --dtype, --save would have no effect with",
        ),
        ("all_gather --matrix", "OP would have no effect with --matrix"),
        (
            "--matrix rails --group rail --no-verify",
            "--group, --no-verify would have no effect with --matrix",
        ),
        ("--tolerance 0.1", "--tolerance would have no effect without --baseline FILE"),
        (
            "all_gather --redop max",
            "--redop would have no effect without all_reduce or reduce_scatter or reduce",
        ),
        ("sendrecv --out-of-place", "--out-of-place would have no effect without all_reduce or broadcast"),
        ("all --skew 2", "--skew would have no effect without alltoallv"),
    ],
)
def test_option_without_effect_is_refused(words: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        options.read(words.split())
    assert said in caught.value.what


@pytest.mark.parametrize(
    "words",
    [
        "--compute --seconds 1 --timeout 9",
        "--matrix rails --size 64K --dtype bf16 --iters 5 --require 10 --save run.json --line-rate 200",
        "all --redop max --out-of-place",
        "alltoallv --skew 0",
        "--duration 90s --size 1M --iters 9 --require 80% --no-verify",
        "--baseline old.json --tolerance 0.1 --overlap --group rail --communicators 2",
    ],
)
def test_options_that_belong_together_are_read(words: str) -> None:
    assert options.read(words.split())

"""The one line that says why a finished run ends with exit code 1."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from imgkit_entrypoints.apps.bench import verdict
from imgkit_entrypoints.apps.bench.collectives import named
from imgkit_entrypoints.apps.bench.matrix import Matrix
from imgkit_entrypoints.apps.bench.node_state import Count
from imgkit_entrypoints.apps.bench.options import Requirement, parse_requirement

HOSTS = ("n1", "n2", "n3")
EVEN: Matrix = ((0.0, 10.0, 10.0), (10.0, 0.0, 10.0), (10.0, 10.0, 0.0))
SLOW: Matrix = ((0.0, 10.0, 2.0), (10.0, 0.0, 2.0), (2.0, 2.0, 0.0))


def largest(**changed: Any) -> verdict.Largest:
    # 4 nodes of 4 ranks, 80 Gbps of algbw: 120 Gbps through each node at least, 150 in a flat ring.
    made = {
        "op": named("all_reduce"),
        "size_bytes": 10**9,
        "seconds": 0.1,
        "batch_s": 1.0,
        "busbw_GBps": 18.75,
    }
    return verdict.Largest(**{**made, **changed})


def context(**changed: Any) -> verdict.RunContext:
    made = {"hosts": ("n1", "n2", "n3", "n4"), "ranks": 16, "group": "world", "together": 16}
    made |= {"device": "cuda", "fabric": "infiniband", "line_rate_Gbps": 200.0}
    return verdict.RunContext(**{**made, **changed})


def missed(text: str, *items: verdict.Largest, **changed: Any) -> list[str]:
    return [*verdict.missed(parse_requirement(text), items or (largest(),), context(**changed))]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("80%", Requirement(percent=80.0)),
        ("12.5 %", Requirement(percent=12.5)),
        ("300", Requirement(GBps=300.0)),
        ("300GBps", Requirement(GBps=300.0)),
    ],
)
def test_percent_and_busbw_can_be_required(text: str, wanted: Requirement) -> None:
    assert parse_requirement(text) == wanted


@pytest.mark.parametrize("text", ["", "0", "0%", "-5%", "300Gbps", "300GB", "fast", "%"])
def test_other_requirements_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="neither a percentage of the line rate"):
        parse_requirement(text)


@pytest.mark.parametrize("text", ["60%", "18.75", "1GBps"])
def test_what_is_reached_is_no_failure(text: str) -> None:
    assert missed(text) == []


def test_busbw_below_the_required_one_is_told() -> None:
    (told,) = missed("20")
    assert told == "all_reduce of 954MiB (1GB) reached 18.75 GBps of busbw, --require asks for 20 GBps"


def test_percent_is_the_least_that_was_sent() -> None:
    (told,) = missed("61%")  # a flat ring would be 75 %, but nothing proves that it was one
    assert "reached 60 % of the line rate" in told


def test_percent_is_what_the_ports_counted() -> None:
    ports = ({"mlx5_0:1": Count(sent_bytes=18_000_000_000, received_bytes=0)},) * 4
    assert missed("70%", largest(ports=ports)) == []  # 18 GB in 1 s are 72 % of 200 Gbps


def test_run_without_a_result_fails() -> None:
    assert [*verdict.missed(parse_requirement("5"), (), context())]
    assert not [*verdict.missed(None, (), context())]


def test_slow_nodes_and_wrong_values_share_a_line() -> None:
    reasons = [*verdict.wrong_values(3), *verdict.slow_parts([SLOW], HOSTS)]
    assert verdict.failed_line(reasons) == (
        "FAILED: 3 elements were wrong, so run dist-doctor before you train here; slow, by --matrix: n3."
    )


def test_even_links_and_right_values_are_no_failure() -> None:
    assert not [*verdict.wrong_values(0), *verdict.slow_parts([EVEN], HOSTS)]
    assert not [*verdict.slow_exchanges(parse_requirement("10"), [EVEN], HOSTS)]


def test_links_below_the_required_one_are_counted() -> None:
    (told,) = verdict.slow_exchanges(parse_requirement("5"), [EVEN, SLOW], HOSTS)
    assert told.startswith("2 of 6 links are below the 5 GBps of --require, the slowest is n1 - n3 with 2")

"""The verdict: the expected busbw, low figures, ``--require``, and what is not claimed."""

from __future__ import annotations

import pytest

from imgkit_entrypoints.apps.bench import options, record, verdict
from imgkit_entrypoints.apps.bench.collectives import named
from imgkit_entrypoints.apps.bench.record import Result, World
from imgkit_entrypoints.apps.bench.verify import dtype_named
from imgkit_entrypoints.errors import UsageError

FOUR_NODES = World(
    ranks=16, nodes=4, ranks_per_node=4, hosts=("n1", "n2", "n3", "n4"), backend="nccl", device="cuda"
)
ONE_NODE = World(ranks=4, nodes=1, ranks_per_node=4, hosts=("n1",), backend="nccl", device="cuda")
RATE_Gbps = 200.0


def result(name: str = "all_reduce", seconds: float = 0.1, size_bytes: int = 10**9) -> Result:
    return record.new_result(
        named(name),
        dtype_named("fp32"),
        size_bytes=size_bytes,
        iterations=5,
        seconds=[seconds],
        ranks=16,
        wrong=0,
    )


def test_percent_is_the_share_of_the_expected_busbw() -> None:
    (judged,) = verdict.judge([result(size_bytes=8, seconds=1.0), result()], FOUR_NODES, RATE_Gbps)
    assert judged.size_bytes == 10**9, "the largest size counts"
    assert judged.busbw_GBps == pytest.approx(18.75)
    assert (judged.expected_busbw_GBps, judged.percent) == pytest.approx((25.0, 75.0))


@pytest.mark.parametrize(("world", "rate"), [(ONE_NODE, RATE_Gbps), (FOUR_NODES, None)])
def test_nothing_is_expected_without_a_network_or_its_rate(world: World, rate: float | None) -> None:
    (judged,) = verdict.judge([result()], world, rate)
    assert judged.expected_busbw_GBps is None
    assert judged.percent is None
    assert "%" not in "".join(verdict.sentences([judged], world, rate))


def sentences(*results: Result, world: World = FOUR_NODES, rate: float | None = RATE_Gbps) -> str:
    return "\n".join(verdict.sentences(verdict.judge(results, world, rate), world, rate))


def test_figures_are_in_the_sentence() -> None:
    text = sentences(result())
    for value in ("all_reduce of 954MiB (1GB)", "18.75 GBps", "75 %", "25 GBps", "200 Gbps"):
        assert value in text
    assert "dist-doctor" not in text


def test_low_busbw_names_the_doctor_where_all_nodes_send_all_the_time() -> None:
    assert "dist-doctor" in sentences(result(seconds=0.4))
    assert "dist-doctor" not in sentences(result("sendrecv", seconds=4.0))


@pytest.mark.parametrize(
    ("world", "rate", "option"),
    [
        (
            World(ranks=1, nodes=1, ranks_per_node=1, hosts=("n1",), backend="gloo", device="cpu"),
            None,
            "--nproc",
        ),
        (FOUR_NODES, None, "--line-rate"),
    ],
)
def test_missing_option_is_named(world: World, rate: float | None, option: str) -> None:
    assert option in sentences(result(), world=world, rate=rate)


def shortfalls(text: str, *results: Result) -> list[str]:
    judged = verdict.judge(results, FOUR_NODES, RATE_Gbps)
    return [*verdict.shortfalls(options.parse_requirement(text), judged)]


@pytest.mark.parametrize("text", ["75%", "18.75", "1GBps"])
def test_what_is_reached_is_no_failure(text: str) -> None:
    assert shortfalls(text, result()) == []


@pytest.mark.parametrize(
    ("text", "reached"), [("20", "18.75 GBps of busbw"), ("76%", "75 % of the expected busbw")]
)
def test_what_is_missed_is_told_with_its_figures(text: str, reached: str) -> None:
    (reason,) = shortfalls(text, result())
    assert reason.startswith(f"all_reduce of 954MiB (1GB) reached {reached}")


def test_each_collective_must_reach_it() -> None:
    (reason,) = shortfalls("10", result(), result("broadcast", seconds=1.0))
    assert reason.startswith("broadcast")


def test_run_without_a_result_fails() -> None:
    assert shortfalls("5")
    assert [*verdict.shortfalls(None, [])] == []


@pytest.mark.parametrize(("nodes", "rate", "hint"), [(1, 200.0, "--require GBPS"), (2, None, "--line-rate")])
def test_percentage_without_an_expectation_is_refused(nodes: int, rate: float | None, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        verdict.check_requirement(options.parse_requirement("80%"), nodes, rate)
    assert hint in (caught.value.hint or "")
    verdict.check_requirement(options.parse_requirement("30"), nodes, rate)

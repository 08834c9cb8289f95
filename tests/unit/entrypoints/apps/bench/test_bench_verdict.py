"""The verdict that dist-bench draws from its figures, and what it does not claim."""

from __future__ import annotations

import random
import re

import pytest

from imgkit_entrypoints.apps.bench import verdict
from imgkit_entrypoints.apps.bench.collectives import named
from imgkit_entrypoints.apps.bench.node_state import Count

HOSTS = ("n1", "n2", "n3", "n4")


def largest(**changed: object) -> verdict.Largest:
    made: dict[str, object] = {
        "op": named("all_reduce"),
        "size_bytes": 1_000_000_000,
        "seconds": 0.1,
        "batch_s": 1.0,
        "busbw_GBps": 18.75,
    }
    return verdict.Largest(**{**made, **changed})  # type: ignore[arg-type]


def context(**changed: object) -> verdict.RunContext:
    made: dict[str, object] = {
        "hosts": HOSTS,
        "ranks": 16,
        "group": "world",
        "together": 16,
        "device": "cuda",
        "fabric": "infiniband",
        "line_rate_Gbps": 200.0,
    }
    return verdict.RunContext(**{**made, **changed})  # type: ignore[arg-type]


def sent(count: int, port: str = "mlx5_0:1") -> dict[str, Count]:
    return {port: Count(sent_bytes=count, received_bytes=count // 2)}


def test_percent_is_a_range_and_a_measurement() -> None:
    # 10 operations of 1 GB in 1 s: 80 Gbps of algbw, 1.5 of it by node at least, 1.875 in a flat ring.
    found = verdict.traffic(largest(ports=(sent(16_000_000_000),) * 4), context())
    assert found is not None
    assert (found.least_percent, found.ring_percent) == pytest.approx((60.0, 75.0))
    assert found.measured_percent == pytest.approx(64.0)


def test_counters_that_miss_the_traffic_are_no_measurement() -> None:
    found = verdict.traffic(largest(ports=(sent(3_000_000),) * 4), context())
    assert found is not None
    assert found.measured_Gbps is None
    assert found.best_percent == found.least_percent


def test_rails_of_a_node_add_up() -> None:
    # Four groups of four, one rank a node in each: 4 x 80 Gbps x 2(N-1)/N; least and ring are the same.
    found = verdict.traffic(largest(), context(group="rail", together=4))
    assert found is not None
    assert (found.least_Gbps, found.ring_Gbps) == pytest.approx((480.0, 480.0))


@pytest.mark.parametrize("changed", [{"hosts": ("n1",)}, {"group": "node", "together": 4}])
def test_no_line_rate_inside_a_node(changed: dict[str, object]) -> None:
    assert verdict.traffic(largest(), context(**changed)) is None


def told(*found: verdict.Largest, **changed: object) -> str:
    made = context(**changed)
    hosts = [made.hosts[rank * made.nodes // made.ranks] for rank in range(made.ranks)]
    return "\n".join(verdict.judge(found, made, (), hosts)["sentences"])


def test_rdma_is_told_by_the_ports() -> None:
    ports = {**sent(16_000_000_000), "eth0": Count(sent_bytes=3_000_000, received_bytes=0)}
    text = told(largest(ports=(ports,) * 4))
    assert "RDMA is in use: 16GB through mlx5_0:1, 3MB through eth0 left n1." in text
    assert "64 % (by the algorithm 60 to 75 %) of the line rate of 200 Gbps" in text
    assert "below the ~400 Gbps" in text


def test_sockets_beside_rdma_are_told() -> None:
    slow = largest(seconds=0.4, ports=(sent(4_000_000_000, "eth0"),) * 4)
    text = told(slow)
    assert "Sockets are in use" in text
    assert "This node has infiniband, but it did not carry the data" in text
    assert "about a fifth of this fabric's line rate. Run dist-doctor to see why" in text


def test_one_rank_needs_another() -> None:
    text = told(hosts=("n1",), ranks=1, together=1)
    assert "bandwidth between ranks needs two" in text
    assert "late" not in text


def test_unknown_line_rate_gives_no_percent() -> None:
    text = told(largest(), line_rate_Gbps=None)
    assert "--line-rate" in text
    assert "%" not in text


def test_line_through_times_is_found() -> None:
    found = verdict.fit_line([(size, 200e-6 + size / 2e9) for size in (8, 4096, 1 << 20, 1 << 26)])
    assert found is not None
    assert (found.latency_s, found.bytes_per_s) == pytest.approx((200e-6, 2e9))
    assert found.trusted
    assert found.half_bytes == pytest.approx(400_000)


def test_times_off_the_line_name_nothing() -> None:
    times = ((8, 200e-6), (4096, 900e-6), (1 << 20, 500e-6), (1 << 26, 30e-3))
    found = verdict.fit_line(times)
    assert found is None or not found.trusted
    assert "so neither is reported" in told(largest(times=times))


@pytest.mark.parametrize("times", [[(8, 1.0), (16, 2.0)], [(8, 1.0)] * 5, [(8, 3.0), (16, 2.0), (32, 1.0)]])
def test_no_line_through_too_little(times: list[tuple[int, float]]) -> None:
    assert verdict.fit_line(times) is None


def waits(late: dict[int, float], ranks: int = 4, noise_s: float = 0.1e-3) -> list[list[float]]:
    """Each rank's waits if the ranks in `late` come that many seconds later than the others."""
    rng = random.Random(5)  # noqa: S311 - the same noise every time
    rows: list[list[float]] = [[] for _ in range(ranks)]
    for _ in range(100):
        comes = [late.get(rank, 0.0) + rng.expovariate(1 / noise_s) for rank in range(ranks)]
        for rank in range(ranks):
            rows[rank].append(max(comes) - comes[rank] + 0.2e-3)
    return rows


@pytest.mark.parametrize("ranks", [2, 3, 4, 16])
@pytest.mark.parametrize("seconds", [20e-3, 1e-3])
def test_late_rank_is_the_one_that_waits_least(seconds: float, ranks: int) -> None:
    found = verdict.late_ranks(waits({1: seconds}, ranks))
    assert [item.rank for item in found] == [1]
    assert found[0].seconds == pytest.approx(seconds, rel=0.25)


@pytest.mark.parametrize("noise_s", [0.1e-3, 1e-3, 5e-3])
@pytest.mark.parametrize("ranks", [1, 2, 4, 16])
def test_noise_names_nobody(ranks: int, noise_s: float) -> None:
    assert verdict.late_ranks(waits({}, ranks, noise_s)) == ()


def test_rank_that_is_late_at_times_is_not_named() -> None:
    rows = waits({})
    for turn in range(0, 100, 3):
        rows[2][turn] = 0.0
        rows[0][turn] = rows[1][turn] = rows[3][turn] = 30e-3
    assert verdict.late_ranks(rows) == ()


def test_late_host_is_no_slow_link() -> None:
    late = verdict.late_ranks(waits({2: 5e-3, 3: 5e-3}))
    hosts = ["n1", "n1", "n2", "n2"]
    found = verdict.judge([], context(hosts=("n1", "n2"), ranks=4), late, hosts)
    assert [item["rank"] for item in found["late"]] in ([2, 3], [3, 2])
    assert re.search(r"All ranks of n2 come [45][.\d]* ms late .* not a slow link", found["sentences"][-1])

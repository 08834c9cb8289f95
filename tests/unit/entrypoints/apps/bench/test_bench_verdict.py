"""What dist-bench concludes from its figures, and what it keeps to itself."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from imgkit_entrypoints.apps.bench.judge import counters, fit, nccl_log, stragglers, verdict
from imgkit_entrypoints.apps.bench.judge.counters import Count
from imgkit_entrypoints.apps.bench.measure import matrix, teams
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.facts import Reader

HOSTS = ("n1", "n2", "n3", "n4")


def largest(**changed: object) -> verdict.Largest:
    made: dict[str, object] = {
        "op": "all_reduce",
        "size_bytes": 1_000_000_000,
        "seconds": 0.1,
        "batch_s": 1.0,
        "busbw_GBps": 18.75,
    }
    return verdict.Largest(**{**made, **changed})  # type: ignore[arg-type]


def setting(**changed: object) -> verdict.Setting:
    made: dict[str, object] = {
        "hosts": HOSTS,
        "ranks": 16,
        "group": "world",
        "together": 16,
        "device": "cuda",
        "fabric": "infiniband",
        "line_rate_Gbps": 200.0,
    }
    return verdict.Setting(**{**made, **changed})  # type: ignore[arg-type]


def sent(count: int, port: str = "mlx5_0:1") -> dict[str, Count]:
    return {port: Count(sent_bytes=count, received_bytes=count // 2)}


def test_percent_is_a_range_and_a_measurement() -> None:
    # 10 operations of 1 GB in 1 s: 80 Gbps of algbw, 1.5 of it by node at least, 1.875 in a flat ring.
    found = verdict.traffic(largest(ports=(sent(16_000_000_000),) * 4), setting())
    assert found is not None
    assert (found.least_percent, found.ring_percent) == pytest.approx((60.0, 75.0))
    assert found.measured_percent == pytest.approx(64.0)


def test_counters_that_miss_the_traffic_are_no_measurement() -> None:
    found = verdict.traffic(largest(ports=(sent(3_000_000),) * 4), setting())
    assert found is not None
    assert found.measured_Gbps is None
    assert found.best_percent == found.least_percent


def test_rails_of_a_node_add_up() -> None:
    # Four groups of four, one rank a node in each: 4 x 80 Gbps x 2(N-1)/N; least and ring are the same.
    found = verdict.traffic(largest(), setting(group="rail", together=4))
    assert found is not None
    assert (found.least_Gbps, found.ring_Gbps) == pytest.approx((480.0, 480.0))


@pytest.mark.parametrize("changed", [{"hosts": ("n1",)}, {"group": "node", "together": 4}])
def test_no_line_rate_inside_a_node(changed: dict[str, object]) -> None:
    assert verdict.traffic(largest(), setting(**changed)) is None


def told(*found: verdict.Largest, **changed: object) -> str:
    made = setting(**changed)
    hosts = [made.hosts[rank * made.nodes // made.ranks] for rank in range(made.ranks)]
    return "\n".join(verdict.judge(found, made, (), hosts)["sentences"])


def test_rdma_is_told_by_the_ports() -> None:
    ports = {**sent(16_000_000_000), "eth0": Count(sent_bytes=3_000_000, received_bytes=0)}
    text = told(largest(ports=(ports,) * 4))
    assert "RDMA is in use: 16GB through mlx5_0:1, 3MB through eth0 left n1." in text
    assert "64 % (by the algorithm 60 to 75 %) of the line rate of 200 Gbps" in text
    assert "Below the ~400 Gbps" in text


def test_sockets_beside_rdma_are_told() -> None:
    slow = largest(seconds=0.4, ports=(sent(4_000_000_000, "eth0"),) * 4)
    text = told(slow)
    assert "Sockets are in use" in text
    assert "This node has infiniband, and it is not what carried the data" in text
    assert "about a fifth of this fabric's line rate: dist-doctor says why" in text


def test_one_rank_needs_another() -> None:
    text = told(hosts=("n1",), ranks=1, together=1)
    assert "bandwidth between ranks needs two" in text
    assert "late" not in text


def test_unknown_line_rate_gives_no_percent() -> None:
    text = told(largest(), line_rate_Gbps=None)
    assert "--line-rate" in text
    assert "%" not in text


def test_line_through_times_is_found() -> None:
    found = fit.fit([(size, 200e-6 + size / 2e9) for size in (8, 4096, 1 << 20, 1 << 26)])
    assert found is not None
    assert (found.latency_s, found.bytes_per_s) == pytest.approx((200e-6, 2e9))
    assert found.trusted
    assert found.half_bytes == pytest.approx(400_000)


def test_times_off_the_line_name_nothing() -> None:
    times = ((8, 200e-6), (4096, 900e-6), (1 << 20, 500e-6), (1 << 26, 30e-3))
    found = fit.fit(times)
    assert found is None or not found.trusted
    assert "so neither is named" in told(largest(times=times))


@pytest.mark.parametrize("times", [[(8, 1.0), (16, 2.0)], [(8, 1.0)] * 5, [(8, 3.0), (16, 2.0), (32, 1.0)]])
def test_no_line_through_too_little(times: list[tuple[int, float]]) -> None:
    assert fit.fit(times) is None


def waits(late: dict[int, float], ranks: int = 4, noise_s: float = 0.1e-3) -> list[list[float]]:
    """Each rank's waits where those of `late` come that much later than all others."""
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
    found = stragglers.late(waits({1: seconds}, ranks))
    assert [item.rank for item in found] == [1]
    assert found[0].seconds == pytest.approx(seconds, rel=0.25)


@pytest.mark.parametrize("noise_s", [0.1e-3, 1e-3, 5e-3])
@pytest.mark.parametrize("ranks", [1, 2, 4, 16])
def test_noise_names_nobody(ranks: int, noise_s: float) -> None:
    assert stragglers.late(waits({}, ranks, noise_s)) == ()


def test_rank_that_is_late_at_times_is_not_named() -> None:
    rows = waits({})
    for turn in range(0, 100, 3):
        rows[2][turn] = 0.0
        rows[0][turn] = rows[1][turn] = rows[3][turn] = 30e-3
    assert stragglers.late(rows) == ()


def test_late_host_is_no_slow_link() -> None:
    late = stragglers.late(waits({2: 5e-3, 3: 5e-3}))
    hosts = ["n1", "n1", "n2", "n2"]
    found = verdict.judge([], setting(hosts=("n1", "n2"), ranks=4), late, hosts)
    assert [item["rank"] for item in found["late"]] in ([2, 3], [3, 2])
    assert re.search(r"All ranks of n2 come [45][.\d]* ms late .* not a slow link", found["sentences"][-1])


def tree(root: Path, files: dict[str, str]) -> Reader:
    for name, text in files.items():
        place = root / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text + "\n")
    return Reader(root=root)


def test_ports_count_words_and_interfaces_bytes(tmp_path: Path) -> None:
    port = "sys/class/infiniband/mlx5_0/ports/1/counters"
    net = "sys/class/net"
    telemetry = "sys/class/cxi/cxi0/device/telemetry/hni_sts"
    files = {
        f"{port}/port_xmit_data": "250",
        f"{port}/port_rcv_data": "100",
        f"{port}/symbol_error": "3",
        f"{net}/eth0/statistics/tx_bytes": "70",
        f"{net}/eth0/statistics/rx_bytes": "60",
        f"{net}/ib0/statistics/tx_bytes": "90",
        f"{net}/ib0/statistics/rx_bytes": "90",
        f"{net}/lo/statistics/tx_bytes": "5000",
        f"{net}/lo/statistics/rx_bytes": "5000",
        f"{net}/bond0/statistics/tx_bytes": "70",
        f"{net}/bond0/statistics/rx_bytes": "60",
        f"{net}/bond0/lower_eth0/x": "",
        f"{telemetry}_tx_ok_octets": "11@1700000000.5",
        f"{telemetry}_rx_ok_octets": "12@1700000000.5",
    }
    found = counters.read(tree(tmp_path, files))
    assert found["mlx5_0:1"] == Count(sent_bytes=1000, received_bytes=400)
    assert found["cxi0"] == Count(sent_bytes=11, received_bytes=12)
    assert counters.errors(tree(tmp_path, {})) == {"mlx5_0:1 symbol_error": 3}
    assert set(counters.carriers(found)) == {"mlx5_0:1", "cxi0", "eth0"}  # ib0's bytes are in the port's
    assert counters.busiest(found) == 1000 + 11 + 70


def test_sockets_over_infiniband_are_no_rdma() -> None:
    port, ib0 = (Count(sent_bytes=sent, received_bytes=sent) for sent in (1000, 950))
    assert set(counters.carriers({"mlx5_0:1": port, "ib0": ib0})) == {"ib0"}
    assert not counters.is_rdma("ib0")


def test_device_named_like_an_interface_stays_a_port() -> None:
    named = {"ibp23s0:1": Count(sent_bytes=1000, received_bytes=1000)}
    assert set(counters.carriers(named)) == {"ibp23s0:1"}


def test_counter_that_went_back_counts_from_zero() -> None:
    before, now = sent(1000), sent(400)
    assert counters.since(before, now)["mlx5_0:1"].sent_bytes == 400


@pytest.mark.parametrize("nodes", range(2, 10))
def test_tournament_meets_every_pair_once(nodes: int) -> None:
    found = matrix.rounds(nodes)
    assert len(found) == nodes - 1 + nodes % 2
    pairs = [pair for pairs in found for pair in pairs]
    assert len(pairs) == len(set(pairs)) == nodes * (nodes - 1) // 2
    assert all(len({node for pair in pairs for node in pair}) == 2 * len(pairs) for pairs in found)


def square(slow: dict[tuple[int, int], float], nodes: int = 4) -> matrix.Matrix:
    return tuple(
        tuple(0.0 if a == b else slow.get((min(a, b), max(a, b)), 10.0) for b in range(nodes))
        for a in range(nodes)
    )


def test_slow_link_is_named() -> None:
    (text,) = matrix.sentences(square({(1, 3): 2.0}), HOSTS)
    assert text.startswith("SLOW LINK: n2 - n4 at 2 GBps, 20 %")


def test_slow_node_is_named_once() -> None:
    (text,) = matrix.sentences(square({(0, 2): 2.0, (1, 2): 2.1, (2, 3): 1.9}), HOSTS)
    assert text.startswith("SLOW NODE: n3")


def test_even_links_name_nobody() -> None:
    assert matrix.sentences(square({(0, 1): 8.0}), HOSTS) == ["No slow link: all are above 70 % of the best."]
    assert "no other to hold it against" in matrix.sentences(square({}, 2), HOSTS[:2])[0]


def test_rails_join_equal_local_ranks() -> None:
    seats = teams.placed([("0", "a", 0), ("0", "a", 1), ("1", "b", 0), ("1", "b", 1)])
    assert teams.members("rail", seats) == ((0, 2), (1, 3))
    assert teams.members("node", seats) == ((0, 1), (2, 3))


def test_nodes_of_one_name_stay_apart() -> None:
    seats = teams.placed([("0", "pod", 0), ("1", "pod", 0)])
    assert [seat.host for seat in seats] == ["pod (node 0)", "pod (node 1)"]


def test_uneven_nodes_have_no_rails() -> None:
    seats = teams.placed([("0", "a", 0), ("0", "a", 1), ("1", "b", 0)])
    with pytest.raises(UsageError, match="different numbers of ranks"):
        teams.members("rail", seats)


# Lines as NCCL prints them (src/transport/net.cc, p2p.cc, src/init.cc), of two ranks on two nodes.
LOG = """\
n1:7:9 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>
n1:7:9 [0] NCCL INFO Using network IB
n1:7:9 [0] NCCL INFO 16 coll channels, 16 collnet channels, 0 nvls channels, 16 p2p channels
n1:7:9 [0] NCCL INFO Channel 00/0 : 3[3] -> 4[0] [receive] via NET/IB/0{}
n1:7:9 [0] NCCL INFO Channel 00/0 : 4[0] -> 5[1] via P2P/CUMEM/read
"""


def test_log_of_nccl_tells_the_way() -> None:
    found = nccl_log.parsed(LOG.format("/GDRDMA").splitlines())
    assert found == {"network IB", "16 channels", "via NET/IB with GDRDMA", "via P2P"}
    (text,) = nccl_log.sentences(found)
    assert text.startswith("NCCL's log: 16 channels, network IB")


def test_way_through_host_memory_is_told() -> None:
    found = nccl_log.parsed(LOG.format("").splitlines())
    assert "without GPUDirect RDMA" in nccl_log.sentences(found)[1]
    assert nccl_log.sentences(nccl_log.parsed(["unrelated"])) == ()


def test_plugin_with_a_blank_in_its_name_is_read() -> None:
    line = "n1:7:9 [0] NCCL INFO Channel 00/0 : 3[3] -> 4[0] [receive] via NET/AWS Libfabric/0/GDRDMA"
    assert nccl_log.parsed([line]) == {"via NET/AWS Libfabric with GDRDMA"}


def test_log_that_the_user_wants_is_left_alone() -> None:
    env = {"IMGKIT_DEVICE": "cuda", "NCCL_DEBUG": "WARN"}
    with nccl_log.collected(env) as folder:
        assert folder is None
    assert env == {"IMGKIT_DEVICE": "cuda", "NCCL_DEBUG": "WARN"}


def test_quiet_log_leaves_nothing_behind() -> None:
    env = {"IMGKIT_DEVICE": "cuda"}
    with nccl_log.collected(env) as folder:
        assert folder is not None
        assert env["NCCL_DEBUG_FILE"].startswith(str(folder))
    assert env == {"IMGKIT_DEVICE": "cuda"}
    assert not folder.exists()

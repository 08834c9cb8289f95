"""The byte and error counters of a node's ports, read from a made-up sysfs tree."""

from __future__ import annotations

from pathlib import Path

from imgkit_entrypoints.apps.bench import node_state
from imgkit_entrypoints.apps.bench.node_state import Count
from imgkit_entrypoints.facts import Reader


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
    found = node_state.read_ports(tree(tmp_path, files))
    assert found["mlx5_0:1"] == Count(sent_bytes=1000, received_bytes=400)
    assert found["cxi0"] == Count(sent_bytes=11, received_bytes=12)
    assert node_state.read_errors(tree(tmp_path, {})) == {"mlx5_0:1 symbol_error": 3}
    assert set(node_state.carriers(found)) == {"mlx5_0:1", "cxi0", "eth0"}  # ib0's bytes are in the port's
    assert node_state.busiest(found) == 1000 + 11 + 70


def test_sockets_over_infiniband_are_no_rdma() -> None:
    port, ib0 = (Count(sent_bytes=sent, received_bytes=sent) for sent in (1000, 950))
    assert set(node_state.carriers({"mlx5_0:1": port, "ib0": ib0})) == {"ib0"}
    assert not node_state.is_rdma("ib0")


def test_device_named_like_an_interface_stays_a_port() -> None:
    named = {"ibp23s0:1": Count(sent_bytes=1000, received_bytes=1000)}
    assert set(node_state.carriers(named)) == {"ibp23s0:1"}


def test_counter_that_went_back_counts_from_zero() -> None:
    before, now = ({"mlx5_0:1": Count(sent_bytes=sent, received_bytes=sent // 2)} for sent in (1000, 400))
    assert node_state.since(before, now)["mlx5_0:1"].sent_bytes == 400

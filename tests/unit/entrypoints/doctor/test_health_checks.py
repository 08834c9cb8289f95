"""Checks of the hardware's health, on files as in sysfs and on texts as nvidia-smi and dmesg print them.

No GPU was at hand: the texts follow NVIDIA's documentation of nvidia-smi and of Xid errors.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from file_tree import write_files

from imgkit_entrypoints import facts
from imgkit_entrypoints.doctor import node
from imgkit_entrypoints.doctor.checks import Check
from imgkit_entrypoints.facts import health

GPU, NIC = "0000:18:00.0", "0000:17:00.0"
REPORT = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
  <driver_version>550.54.15</driver_version>
  <gpu id="00000000:18:00.0">
    <serial>1650123456789</serial>
    <ecc_errors>
      <volatile>
        <sram_correctable>7</sram_correctable>
        <sram_uncorrectable_parity>0</sram_uncorrectable_parity>
        <dram_uncorrectable>0</dram_uncorrectable>
      </volatile>
      <aggregate><dram_uncorrectable>3</dram_uncorrectable></aggregate>
    </ecc_errors>
    <remapped_rows>
      <remapped_row_corr>0</remapped_row_corr>
      <remapped_row_pending>No</remapped_row_pending>
      <remapped_row_failure>No</remapped_row_failure>
    </remapped_rows>
    <clocks_event_reasons>
      <clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
      <clocks_event_reason_sw_power_cap>Active</clocks_event_reason_sw_power_cap>
      <clocks_event_reason_hw_thermal_slowdown>Not Active</clocks_event_reason_hw_thermal_slowdown>
    </clocks_event_reasons>
    <processes><process_info><process_name>python secret.py</process_name></process_info></processes>
  </gpu>
</nvidia_smi_log>
"""
XID = "[Sun Nov 22 07:00:01 2026] NVRM: Xid (PCI:0000:18:00): {}, pid='<unknown>', name=<unknown>"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A node with a GPU, and a NIC with one port of 200 Gbit/s; both are healthy."""
    root = tmp_path / "root"
    port = root / "sys/devices/pci0000:16/0000:17:00.0/infiniband/mlx5_0/ports/1"
    write_files(port, {"state": "4: ACTIVE", "link_layer": "InfiniBand", "rate": "200 Gb/sec (2X NDR)"})
    write_files(port / "counters", dict.fromkeys(health.ERRORS, "0"))
    gpu_information = f"/proc/driver/nvidia/gpus/{GPU}/information"
    write_files(root, {gpu_information: "Model: \t\t NVIDIA H100", health.NVIDIA_SMI: REPORT})
    link = {"current_link_width": "16", "max_link_width": "16", "current_link_speed": "32.0 GT/s PCIe"}
    for address in (GPU, NIC):
        write_files(root / "sys/devices/pci0000:16" / address, link)
        (root / "sys/bus/pci/devices").mkdir(parents=True, exist_ok=True)
        (root / "sys/bus/pci/devices" / address).symlink_to(f"../../../devices/pci0000:16/{address}")
    (root / "sys/class/infiniband").mkdir(parents=True)
    (root / "sys/class/infiniband/mlx5_0").symlink_to(
        "../../devices/pci0000:16/0000:17:00.0/infiniband/mlx5_0"
    )
    device = root / "sys/devices/pci0000:16/0000:17:00.0/infiniband/mlx5_0/device"
    device.symlink_to("../../../0000:17:00.0")
    return root


def checks(root: Path) -> dict[str, list[Check]]:
    env = {"IMGKIT_ROOT": str(root)}
    results = node.examine(facts.gather(env=env), None, env, reader=facts.Reader(root=root))
    return {
        name: [check for check in results if check.name == name]
        for name in ("pcie", "port errors", "gpu health", "xid")
    }


def test_healthy_hardware_is_ok(root):
    results = checks(root)
    assert [check.verdict for check in results["pcie"] + results["gpu health"]] == ["ok", "ok"]
    assert results["port errors"] == results["xid"] == []
    assert results["pcie"][0].evidence == "2 links of GPUs and NICs are wide enough"


def test_single_link_is_no_plural(root):
    (root / "sys/class/infiniband/mlx5_0").unlink()
    assert [check.evidence for check in checks(root)["pcie"]] == ["1 link of a GPU or NIC is wide enough"]


@pytest.mark.parametrize(
    ("address", "lanes", "speed", "evidence"),
    [
        (NIC, "1", "32.0 GT/s PCIe", "mlx5_0: .*: 1 of 16 lanes .*32 Gbit/s.*; its ports have 200 Gbit/s"),
        (NIC, "8", "16.0 GT/s PCIe", "126 Gbit/s"),
        (NIC, "8", "32.0 GT/s PCIe", ""),  # a slot of 8 lanes carries 252 Gbit/s
        (GPU, "1", "2.5 GT/s PCIe", "0000:18:00.0: .*: 1 of 16 lanes"),
        (GPU, "16", "2.5 GT/s PCIe", ""),  # an idle GPU lowers its speed, not its width
    ],
)
def test_narrow_link_is_told(root, address, lanes, speed, evidence):
    device = root / "sys/devices/pci0000:16" / address
    write_files(device, {"current_link_width": lanes, "current_link_speed": speed})
    (hit,) = checks(root)["pcie"]
    assert hit.verdict == ("warn" if evidence else "ok")
    assert re.search(evidence, hit.evidence)
    assert (f"lspci -vv -s {address}" in hit.fix) == bool(evidence)


def test_link_of_unknown_width_is_left_out(root):
    for address in (GPU, NIC):
        write_files(root, {f"/sys/devices/pci0000:16/{address}/max_link_width": "Unknown"})
    assert checks(root)["pcie"] == []


def test_counted_port_errors_are_told(root):
    counters = "/sys/devices/pci0000:16/0000:17:00.0/infiniband/mlx5_0/ports/1/counters"
    write_files(root, {f"{counters}/symbol_error": "4711"})
    (hit,) = checks(root)["port errors"]
    assert (hit.verdict, hit.evidence) == (
        "warn", "/sys/class/infiniband/mlx5_0/ports/1/counters/symbol_error: 4711",
    )  # fmt: skip
    assert "perfquery -C mlx5_0 -P 1 -R" in hit.fix


@pytest.mark.parametrize(
    ("old", "new", "verdict", "evidence"),
    [
        ("parity>0<", "parity>2<", "warn", "2 uncorrectable ECC errors"),
        ("pending>No<", "pending>Yes<", "warn", "Remapped Rows Pending: Yes"),
        ("failure>No<", "failure>Yes<", "fail", "Remapping Failure Occurred: Yes"),
        ("slowdown>Not Active<", "slowdown>Active<", "warn", "held down by heat"),
    ],
)
def test_sick_gpu_is_told(root, old, new, verdict, evidence):
    for report in (
        REPORT,
        REPORT.replace("clocks_event_reason", "clocks_throttle_reason"),
    ):  # until driver 535
        write_files(root, {health.NVIDIA_SMI: report.replace(old, new)})
        (hit,) = checks(root)["gpu health"]
        assert (hit.verdict, evidence in hit.evidence, "18:00.0" in hit.evidence) == (verdict, True, True)
        assert hit.fix


@pytest.mark.parametrize(
    ("number", "evidence"),
    [
        (79, "the GPU has fallen off the bus"),
        (94, "contained memory error"),
        (143, "Xid 143"),
        (13, ""),
        (31, ""),
    ],
)
def test_xid_of_hardware_is_told(root, number, evidence):
    write_files(root, {health.XIDS: "\n".join([XID.format(number)] * 3)})
    xid_checks = checks(root)["xid"]
    assert [evidence in check.evidence for check in xid_checks] == ([True] if evidence else [])
    assert all("nvidia-smi -r" in check.fix for check in xid_checks)


@pytest.mark.parametrize(
    "text", ["", "NVIDIA-SMI has failed because it could not communicate", "<gpu", "<log/>"]
)
def test_report_that_is_none_is_no_finding(root, text):
    write_files(root, {health.NVIDIA_SMI: text})
    assert all(check.verdict == "ok" for check in checks(root)["gpu health"])

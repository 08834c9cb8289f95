"""Check the health of the hardware: PCIe links, error counters, GPU memory, clocks and the kernel log."""

from __future__ import annotations

import re
from collections.abc import Iterator
from xml.etree import ElementTree

from imgkit_entrypoints.arguments import parse_digits
from imgkit_entrypoints.doctor.checks.check import Check, CheckedNode
from imgkit_entrypoints.facts import health
from imgkit_entrypoints.facts.health import PcieLink

SLOWDOWNS = {
    "hw_thermal_slowdown": "heat",
    "hw_power_brake_slowdown": "the power brake",
    "hw_slowdown": "a hardware slowdown",
    "sw_thermal_slowdown": "heat (by the driver)",
}
"""Reasons for low clocks that a healthy node never has. A power cap is normal, so it is not listed."""
PROGRAM_XIDS = {13, 31, 43, 45}
"""Xid numbers of errors that a faulty program causes (NVIDIA, "Xid errors").

All other numbers point to a fault of the hardware or the driver.
"""
# Meaning of the most important Xid numbers of hardware and driver, for messages.
XIDS = {
    48: "double-bit ECC error",
    63: "a memory row was remapped",
    64: "a memory row could not be remapped",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    92: "many single-bit ECC errors",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "the GPU's system processor does not answer",
    120: "error of the GPU's system processor",
}
_XID_LINE = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): ([0-9]{1,9})")
"""A line of the kernel log: ``NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus.``"""
_MAX_LINE_CHARACTERS = 160
"""How many characters of a line of the kernel log are quoted."""


def check_pcie(node: CheckedNode) -> Iterator[Check]:
    """Check that the PCIe links of GPUs and NICs use all their lanes.

    If a card is badly seated, its link uses fewer lanes and is slower. A NIC with fewer lanes passes the
    check if the link is still as fast as the ports of the NIC.
    """
    port_rates_Gbps = {}  # the total rate of each NIC's ports, which the NIC's link must reach
    for device in node.facts.rdma:
        rates = [port.rate_Gbps or 0 for port in device.ports if port.active]
        port_rates_Gbps[device.name] = sum(rates)
    links = health.read_links(node.reader, node.facts)
    warnings = []
    for link in links:
        needed_Gbps = port_rates_Gbps.get(link.device)  # None for a GPU, which needs all lanes
        if link.width < link.most_width and not _is_fast_enough(link, needed_Gbps):
            warnings.append(_describe_narrow_link(link, needed_Gbps))
    yield from warnings
    # One result for all good links is enough.
    if len(links) == 1 and not warnings:
        yield Check("pcie", "ok", "1 link of a GPU or NIC is wide enough")
    elif links and not warnings:
        yield Check("pcie", "ok", f"{len(links)} links of GPUs and NICs are wide enough")


def _is_fast_enough(link: PcieLink, needed_Gbps: float | None) -> bool:
    """Return whether a PCIe link is at least as fast as the ports of its NIC.

    If the rate of the link is unknown, or the device is a GPU (`needed_Gbps` is None), return False.
    """
    if needed_Gbps is None or link.rate_Gbps is None:
        return False
    return link.rate_Gbps >= needed_Gbps


def _describe_narrow_link(link: PcieLink, needed_Gbps: float | None) -> Check:
    """Return the warning about a PCIe link that uses too few lanes.

    Parameters
    ----------
    needed_Gbps : total rate of a NIC's ports in Gbit/s, or None for a GPU.
    """
    evidence = f"{link.device}: {link.path}/current_link_width: {link.width} of {link.most_width} lanes "
    if link.rate_Gbps:
        evidence += f"({link.speed}, {link.rate_Gbps:.0f} Gbit/s)"
    else:
        evidence += f"({link.speed})"
    if needed_Gbps:
        evidence += f"; its ports have {needed_Gbps:g} Gbit/s"
    address = link.path.rsplit("/", 1)[-1]
    fix = f"ask the site to reseat the card, with the output of: sudo lspci -vv -s {address} | grep LnkSta"
    return Check("pcie", "warn", evidence, fix)


def check_port_errors(node: CheckedNode) -> Iterator[Check]:
    """Check that the RDMA ports in use have not counted errors, which indicate a bad cable or switch.

    The counters also include errors of the past. So the hint says to check them again after a run.
    """
    counts = health.read_port_errors(node.reader, node.facts)
    for name in node.plan.devices:
        errors = counts.get(name)
        if not errors:
            continue
        device, _, port_number = name.partition(":")
        counters = ", ".join(f"{counter}: {count}" for counter, count in errors.items())
        evidence = f"/sys/class/infiniband/{device}/ports/{port_number}/counters/{counters}"
        fix = "check again after a run: if they grow, the cable or the switch port is bad; report them "
        fix += f"to the site. To count from zero: sudo perfquery -C {device} -P {port_number} -R"
        yield Check("port errors", "warn", evidence, fix)


def check_gpu_health(node: CheckedNode) -> Iterator[Check]:
    """Check that nvidia-smi reports neither memory errors nor reduced clocks for any GPU.

    If there are no GPUs, or the report of nvidia-smi cannot be read, there is no result.
    """
    if not node.facts.gpu_devices:
        return
    report = health.run_nvidia_smi(node.reader)
    if not report:
        return
    try:
        gpus = ElementTree.fromstring(report)  # noqa: S314 - the driver's own program wrote it
    except ElementTree.ParseError:
        return
    problems: list[Check] = []
    for gpu in gpus.iter("gpu"):
        problems += _find_gpu_problems(gpu)
    yield from problems
    if not problems:
        yield Check("gpu health", "ok", "nvidia-smi -q: no memory errors, full clocks")


def _find_gpu_problems(gpu: ElementTree.Element) -> Iterator[Check]:
    """Yield the problems of one GPU: memory errors, failed repairs of its memory, and reduced clocks.

    `gpu` is the element of this GPU in the XML report of ``nvidia-smi -q -x``.
    """
    address = gpu.get("id", "")
    source = f"{address}: nvidia-smi -q:"
    reset = f"stop all programs on it, then: sudo nvidia-smi -r -i {address}, or reboot the node"
    errors = _count_uncorrectable_errors(gpu)
    if errors:
        evidence = f"{source} {errors} uncorrectable ECC errors since the last reset"
        yield Check("gpu health", "warn", evidence, reset)
    # The driver replaces a faulty row of memory by a spare row, which takes effect after a reset. If this
    # fails, the GPU must be replaced.
    if gpu.findtext("remapped_rows/remapped_row_failure") == "Yes":
        evidence = f"{source} Remapping Failure Occurred: Yes, so memory errors will continue"
        fix = "drain the node (Slurm: scontrol update nodename=NODE state=drain), and have the GPU replaced"
        yield Check("gpu health", "fail", evidence, fix)
    elif gpu.findtext("remapped_rows/remapped_row_pending") == "Yes":
        evidence = f"{source} Remapped Rows Pending: Yes, which requires a reset"
        yield Check("gpu health", "warn", evidence, reset)
    reasons = _find_clock_reasons(gpu)
    causes = [cause for reason, cause in SLOWDOWNS.items() if reason in reasons]
    if causes:
        fix = f"check its cooling and power: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER -i {address}"
        yield Check("gpu health", "warn", f"{source} clocks are held down by {', '.join(causes)}", fix)


def _count_uncorrectable_errors(gpu: ElementTree.Element) -> int:
    """Return the number of uncorrectable memory errors of a GPU since its last reset.

    It is the sum of several counters, such as ``dram_uncorrectable``.
    """
    errors = 0
    for counter in gpu.findall("ecc_errors/volatile/*"):
        if "uncorrectable" in counter.tag:
            errors += parse_digits(counter.text or "") or 0
    return errors


def _find_clock_reasons(gpu: ElementTree.Element) -> set[str]:
    """Return the reasons why the clocks of a GPU are low now, such as ``hw_thermal_slowdown``."""
    reasons = set()
    # Newer drivers use the name "clocks_event_reasons", and older drivers "clocks_throttle_reasons".
    for kind in ("event", "throttle"):
        for reason in gpu.findall(f"clocks_{kind}_reasons/*"):
            if reason.text == "Active":
                reasons.add(re.sub("clocks_(event|throttle)_reason_", "", reason.tag))
    return reasons


def check_xids(node: CheckedNode) -> Iterator[Check]:
    """Check that the kernel log contains no Xid of a GPU, which is a numbered error of NVIDIA's driver.

    Numbers of errors that a faulty program causes are ignored.
    """
    if not node.facts.gpu_devices:
        return
    log = health.read_xids(node.reader)
    # An error may occur many times, so only the last line for each GPU and number is reported.
    last_lines: dict[tuple[str, int], str] = {}
    for line in log.splitlines():
        match = _XID_LINE.search(line)
        if match:
            address, xid_text = match.groups()
            last_lines[address, int(xid_text)] = line.strip()[:_MAX_LINE_CHARACTERS]
    for (address, xid), line in last_lines.items():
        if xid in PROGRAM_XIDS:  # a program with a bug caused the error, so the GPU is not at fault
            continue
        name = f"Xid {xid}"
        if xid in XIDS:
            name += f", {XIDS[xid]}"
        fix = f"reset the GPU (sudo nvidia-smi -r -i {address}), or report the node to the site with: "
        yield Check("xid", "warn", f"{address}: {name} ({line})", f"{fix}dmesg | grep Xid")

"""Checks of the hardware's health: PCIe links, error counters, GPU memory, clocks, the kernel log."""

from __future__ import annotations

import re
from collections.abc import Iterator
from xml.etree import ElementTree

from imgkit_entrypoints.arguments import digits
from imgkit_entrypoints.doctor.checks.check import Check, Subject
from imgkit_entrypoints.facts import health

SLOWED = {
    "hw_thermal_slowdown": "heat",
    "hw_power_brake_slowdown": "the power brake",
    "hw_slowdown": "a hardware slowdown",
    "sw_thermal_slowdown": "heat (by the driver)",
}
"""Reasons for low clocks that a healthy node never has; the power cap is none of them."""
PROGRAMS = {13, 31, 43, 45}
"""Xid numbers that a faulty program causes (NVIDIA, "Xid errors"); the others mean hardware or driver."""
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


def pcie(subject: Subject) -> Iterator[Check]:
    """GPUs have their full width, and NICs at least the rate of their ports."""
    rates = {
        device.name: sum(port.rate_Gbps or 0 for port in device.ports if port.active)
        for device in subject.facts.rdma
    }
    found = health.links(subject.reader, subject.facts)
    slow = []
    for link in found:
        wanted, rate = rates.get(link.device), link.rate_Gbps
        narrow = link.width < link.most_width and (wanted is None or rate is None or rate < wanted)
        if narrow:
            needs = f"; its ports have {wanted:g} Gbit/s" if wanted else ""
            carries = f", {rate:.0f} Gbit/s" if rate else ""
            slow.append(link.device)
            yield Check(
                name="pcie",
                verdict="warn",
                evidence=f"{link.device}: {link.path}/current_link_width: {link.width} of {link.most_width} "
                f"lanes ({link.speed}{carries}){needs}",
                fix=f"ask the site to reseat the card, with the output of: sudo lspci -vv -s "
                f"{link.path.rsplit('/', 1)[-1]} | grep LnkSta",
            )
    if found and not slow:
        yield Check(
            name="pcie", verdict="ok", evidence=f"{len(found)} links of GPUs and NICs are wide enough"
        )


def port_errors(subject: Subject) -> Iterator[Check]:
    """No port in use has counted errors."""
    counted = health.port_errors(subject.reader, subject.facts)
    for name in subject.plan.devices:
        if errors := counted.get(name):
            shown = ", ".join(f"{kind}: {count}" for kind, count in errors.items())
            device, _, number = name.partition(":")
            yield Check(
                name="port errors",
                verdict="warn",
                evidence=f"/sys/class/infiniband/{device}/ports/{number}/counters/{shown}",
                fix="check again after a run: if they grow, the cable or the switch port is bad; report them "
                f"to the site. To count from zero: sudo perfquery -C {device} -P {number} -R",
            )


def gpu_health(subject: Subject) -> Iterator[Check]:
    """No GPU has memory errors or is slowed down, as far as nvidia-smi reports it."""
    report = health.nvidia_smi(subject.reader) if subject.facts.gpu_devices else ""
    if not report:
        return
    try:
        bad = [check for gpu in ElementTree.fromstring(report) for check in _gpu(gpu)]  # noqa: S314 - see health.kept
    except ElementTree.ParseError:
        return  # of a saved tree that somebody changed
    yield from bad
    if not bad:
        yield Check(name="gpu health", verdict="ok", evidence="nvidia-smi -q: no memory errors, full clocks")


def _gpu(gpu: ElementTree.Element) -> Iterator[Check]:
    name = gpu.get("id", "")
    reset = f"stop all programs on it, then: sudo nvidia-smi -r -i {name}, or reboot the node"
    counts = [part.text or "" for part in gpu.findall("ecc_errors/volatile/*") if "uncorrectable" in part.tag]
    lost = sum(digits(count) or 0 for count in counts)
    if lost:
        evidence = f"{name}: nvidia-smi -q: {lost} uncorrectable ECC errors since the last reset"
        yield Check(name="gpu health", verdict="warn", evidence=evidence, fix=reset)
    if gpu.findtext("remapped_rows/remapped_row_failure") == "Yes":
        evidence = f"{name}: nvidia-smi -q: Remapping Failure Occurred: Yes, so memory errors will continue"
        fix = "drain the node (Slurm: scontrol update nodename=NODE state=drain), and have the GPU replaced"
        yield Check(name="gpu health", verdict="fail", evidence=evidence, fix=fix)
    elif gpu.findtext("remapped_rows/remapped_row_pending") == "Yes":
        evidence = f"{name}: nvidia-smi -q: Remapped Rows Pending: Yes, which requires a reset"
        yield Check(name="gpu health", verdict="warn", evidence=evidence, fix=reset)
    reasons = {
        re.sub("clocks_(event|throttle)_reason_", "", reason.tag)
        for kind in ("event", "throttle")
        for reason in gpu.findall(f"clocks_{kind}_reasons/*")
        if reason.text == "Active"
    }
    if slowed := [words for reason, words in SLOWED.items() if reason in reasons]:
        evidence = f"{name}: nvidia-smi -q: clocks are held down by {', '.join(slowed)}"
        fix = f"check its cooling and power: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER -i {name}"
        yield Check(name="gpu health", verdict="warn", evidence=evidence, fix=fix)


def xids(subject: Subject) -> Iterator[Check]:
    """The kernel log has no error of a GPU's hardware."""
    log = health.xids(subject.reader) if subject.facts.gpu_devices else ""
    last: dict[tuple[str, int], str] = {}
    for line in log.splitlines():
        if found := re.search(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): ([0-9]{1,9})", line):
            last[found[1], int(found[2])] = line.strip()[:160]
    for (address, number), line in last.items():
        if number not in PROGRAMS:
            yield Check(
                name="xid",
                verdict="warn",
                evidence=f"{address}: Xid {number}"
                + (f", {XIDS[number]}" if number in XIDS else "")
                + f" ({line})",
                fix=f"reset the GPU (sudo nvidia-smi -r -i {address}), or report the node to the site with: "
                "dmesg | grep Xid",
            )

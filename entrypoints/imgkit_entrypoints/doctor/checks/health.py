"""Checks of the hardware's health: PCIe links, error counters, GPU memory, clocks, the kernel log."""

from __future__ import annotations

import re
from collections.abc import Iterator
from xml.etree import ElementTree

from imgkit_entrypoints.arguments import digits
from imgkit_entrypoints.doctor.checks.check import Check, Subject
from imgkit_entrypoints.facts import health

SLOWDOWNS = {
    "hw_thermal_slowdown": "heat",
    "hw_power_brake_slowdown": "the power brake",
    "hw_slowdown": "a hardware slowdown",
    "sw_thermal_slowdown": "heat (by the driver)",
}
"""Reasons for low clocks that a healthy node never has; the power cap is none of them."""
PROGRAM_XIDS = {13, 31, 43, 45}
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
    """Check that GPUs have their full width, and NICs at least the rate of their ports."""
    rates = {
        device.name: sum(port.rate_Gbps or 0 for port in device.ports if port.active)
        for device in subject.facts.rdma
    }
    links = health.links(subject.reader, subject.facts)
    checks = []
    for link in links:
        needed, rate = rates.get(link.device), link.rate_Gbps
        if link.width >= link.most_width or (needed is not None and rate is not None and rate >= needed):
            continue
        evidence = f"{link.device}: {link.path}/current_link_width: {link.width} of {link.most_width} lanes "
        evidence += f"({link.speed}, {rate:.0f} Gbit/s)" if rate else f"({link.speed})"
        evidence += f"; its ports have {needed:g} Gbit/s" if needed else ""
        fix = "ask the site to reseat the card, with the output of: "
        fix += f"sudo lspci -vv -s {link.path.rsplit('/', 1)[-1]} | grep LnkSta"
        checks.append(Check("pcie", "warn", evidence, fix))
    if links and not checks:
        subjects = (
            "1 link of a GPU or NIC is" if len(links) == 1 else f"{len(links)} links of GPUs and NICs are"
        )
        checks.append(Check("pcie", "ok", f"{subjects} wide enough"))
    yield from checks


def port_errors(subject: Subject) -> Iterator[Check]:
    """Check that no port in use has counted errors."""
    counts = health.port_errors(subject.reader, subject.facts)
    for name in subject.plan.devices:
        if errors := counts.get(name):
            counters = ", ".join(f"{counter}: {count}" for counter, count in errors.items())
            device, _, number = name.partition(":")
            fix = "check again after a run: if they grow, the cable or the switch port is bad; report them "
            fix += f"to the site. To count from zero: sudo perfquery -C {device} -P {number} -R"
            evidence = f"/sys/class/infiniband/{device}/ports/{number}/counters/{counters}"
            yield Check("port errors", "warn", evidence, fix)


def gpu_health(subject: Subject) -> Iterator[Check]:
    """Check that no GPU has memory errors or is slowed down, as far as nvidia-smi reports it."""
    report = health.nvidia_smi(subject.reader) if subject.facts.gpu_devices else ""
    if not report:
        return
    try:
        gpus = ElementTree.fromstring(report)  # noqa: S314 - the driver's own program wrote it
    except ElementTree.ParseError:
        return
    checks = [check for gpu in gpus.iter("gpu") for check in _gpu(gpu)]
    yield from checks or (Check("gpu health", "ok", "nvidia-smi -q: no memory errors, full clocks"),)


def _gpu(gpu: ElementTree.Element) -> Iterator[Check]:
    name = gpu.get("id", "")
    evidence = f"{name}: nvidia-smi -q:"
    reset = f"stop all programs on it, then: sudo nvidia-smi -r -i {name}, or reboot the node"
    counts = [part.text or "" for part in gpu.findall("ecc_errors/volatile/*") if "uncorrectable" in part.tag]
    if errors := sum(digits(count) or 0 for count in counts):
        text = f"{evidence} {errors} uncorrectable ECC errors since the last reset"
        yield Check("gpu health", "warn", text, reset)
    if gpu.findtext("remapped_rows/remapped_row_failure") == "Yes":
        text = f"{evidence} Remapping Failure Occurred: Yes, so memory errors will continue"
        fix = "drain the node (Slurm: scontrol update nodename=NODE state=drain), and have the GPU replaced"
        yield Check("gpu health", "fail", text, fix)
    elif gpu.findtext("remapped_rows/remapped_row_pending") == "Yes":
        yield Check(
            "gpu health", "warn", f"{evidence} Remapped Rows Pending: Yes, which requires a reset", reset
        )
    reasons = {
        re.sub("clocks_(event|throttle)_reason_", "", reason.tag)
        for kind in ("event", "throttle")
        for reason in gpu.findall(f"clocks_{kind}_reasons/*")
        if reason.text == "Active"
    }
    if causes := [cause for reason, cause in SLOWDOWNS.items() if reason in reasons]:
        fix = f"check its cooling and power: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER -i {name}"
        yield Check("gpu health", "warn", f"{evidence} clocks are held down by {', '.join(causes)}", fix)


def xids(subject: Subject) -> Iterator[Check]:
    """Check that the kernel log has no error of a GPU's hardware."""
    log = health.xids(subject.reader) if subject.facts.gpu_devices else ""
    last_lines: dict[tuple[str, int], str] = {}
    for line in log.splitlines():
        if match := re.search(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): ([0-9]{1,9})", line):
            last_lines[match[1], int(match[2])] = line.strip()[:160]
    for (address, number), line in last_lines.items():
        if number in PROGRAM_XIDS:
            continue
        name = f"Xid {number}, {XIDS[number]}" if number in XIDS else f"Xid {number}"
        fix = f"reset the GPU (sudo nvidia-smi -r -i {address}), or report the node to the site with: "
        yield Check("xid", "warn", f"{address}: {name} ({line})", f"{fix}dmesg | grep Xid")

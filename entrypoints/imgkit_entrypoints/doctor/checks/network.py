"""Check the network between nodes: the plan's decisions, devices, libraries and distance from the GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from imgkit_entrypoints import files
from imgkit_entrypoints.doctor.checks.check import Check, Subject, Verdict
from imgkit_entrypoints.fabric import library_path, plugin, ports, sockets
from imgkit_entrypoints.fabric.slingshot import find_plugin
from imgkit_entrypoints.facts import health
from imgkit_entrypoints.facts.host_facts import Port
from imgkit_entrypoints.system import HOST_LIBS


def network(subject: Subject) -> Iterator[Check]:
    """Report the kind of network, and every blocker, known issue and warning of its plan."""
    plan = subject.plan
    devices = ", ".join(plan.devices) or "no device"
    if plan.line_rate_Gbps:
        devices += f", {plan.line_rate_Gbps:g} Gbit/s"
    yield Check("network", "ok", f"{plan.kind} over {devices} ({plan.reason})")
    for blocker in plan.blockers:
        yield Check("network", subject.between, blocker.what, blocker.fix)
    for finding in (*plan.refusals, *plan.warnings):
        verdict: Verdict = "fail" if finding.is_failure else "warn"
        yield Check(finding.check, verdict, finding.what, finding.fix)


def net_plugin(subject: Subject) -> Iterator[Check]:
    """Check that the dynamic linker can load the plug-in of NCCL_NET_PLUGIN."""
    value = subject.plan.env.get(plugin.VARIABLE) or subject.env.get(plugin.VARIABLE, "")
    if plugin.VARIABLE in subject.plan.unset or not value:
        return
    fix = "put the folders of what it needs on LD_LIBRARY_PATH, or use a plug-in for this image's glibc"
    for path in plugin.plugin_files(subject.facts, value):
        # `load_fault` loads the plug-in in another process, because its constructors may do anything.
        fault = ""
        if subject.reader.live:
            fault = health.load_fault(path)
        evidence = f"{plugin.VARIABLE}={value}: {path}"
        if fault:
            yield Check("plug-in", "fail", f"{evidence} cannot be opened: {fault}", fix)
        else:
            yield Check("plug-in", "ok", evidence)


def bootstrap(subject: Subject) -> Iterator[Check]:
    """Report the interface for the bootstrap of NCCL and Gloo.

    The bootstrap uses TCP even if the data uses RDMA.
    """
    if not subject.facts.interfaces:
        fix = "start the container with /sys, without --contain"
        yield Check("interface", "unknown", "/sys/class/net shows no interface", fix)
        return
    # If no interface can be used, `network` reports it as a blocker.
    for decision in subject.plan.decisions:
        if decision.variable == sockets.NCCL and decision.value:
            yield Check("interface", "ok", f"{decision.value}: {decision.reason}")


def rdma_ports(subject: Subject) -> Iterator[Check]:
    """Report the RDMA ports in use, and check the other ports for faults.

    A port without a link is a fault only if no port can be used, or if `_dead_siblings` names it.
    """
    by_name = {}
    for device in subject.facts.rdma:
        by_name.update({port.name: port for port in device.ports})
    used = [port for name, port in by_name.items() if name in subject.plan.devices]
    if used:
        links = (f"{port.name} {port.link_layer} {port.rate}" for port in used)
        yield Check("rdma ports", "ok", ", ".join(links))
    dead = _dead_siblings(subject, used)
    is_expected = subject.system.fabric.kind in ("infiniband", "roce")
    for decision in subject.plan.decisions:
        if decision.variable != ports.HCA or decision.used:
            continue
        port = by_name.get(decision.value)
        if port is None or port.active:
            continue
        # State 1 is DOWN, so the port has no link.
        if used and port.state.startswith("1:") and port.name not in dead:
            continue  # a port with another purpose, or without a cable
        fix = "report the node to the site with the output of ibstat; for INIT, check the subnet manager"
        verdict: Verdict = "fail" if is_expected and not used else "warn"
        yield Check("rdma ports", verdict, f"{decision.value}: {decision.reason}", fix)


def _dead_siblings(subject: Subject, used: list[Port]) -> set[str]:
    """Return the ports without a link that should have one.

    A card has failed if none of its ports has a link while most cards of this kind work. But the second port
    of a working card often has no cable on purpose. Nothing is missing if the recipe's number of NICs works.
    """
    kinds = {port.link_layer for port in used}
    used_names = {port.name for port in used}
    working = set()
    for device in subject.facts.rdma:
        if any(port.name in used_names for port in device.ports):
            working.add(device.card)
    nics = subject.system.fabric.nics
    if nics is not None and len(used) >= nics:
        return set()
    dead_ports: set[str] = set()
    dead_cards: set[str] = set()
    for device in subject.facts.rdma:
        for port in device.ports:
            is_down = port.state.startswith("1:")
            if is_down and port.link_layer in kinds and device.card not in working:
                dead_ports.add(port.name)
                dead_cards.add(device.card)
    # Cards without a link count as failed only if they are fewer than those that work.
    if len(dead_cards) >= len(working):
        return set()
    return dead_ports


def verbs(subject: Subject) -> Iterator[Check]:
    """Report the device files and libraries of InfiniBand and RoCE.

    Their failures are warnings of the plan, which `network` reports.
    """
    facts = subject.facts
    names = {name.partition(":")[0] for name in subject.plan.devices}
    devices = [device for device in facts.rdma if device.name in names]
    if subject.plan.kind not in ("infiniband", "roce") or not devices:
        return
    failures = {finding.check for finding in subject.plan.warnings if finding.is_failure}
    if "rdma devices" not in failures:
        opened = ", ".join(device.verbs for device in devices)
        yield Check("rdma devices", "ok", f"{opened} can be opened")
    if not facts.rdma_cm:
        evidence = "/dev/infiniband/rdma_cm cannot be opened; NCCL does not need it, but other libraries do"
        yield Check("rdma devices", "warn", evidence, ports.OPEN_FIX)
    library = facts.library("libibverbs.so.1")
    if library and "libibverbs" not in failures:
        evidence = f"{library.path}, providers {', '.join(facts.verbs_providers)}"
        yield Check("libibverbs", "ok", evidence)


def roce_gid(subject: Subject) -> Iterator[Check]:
    """Report the GID of RoCE ports. A port without an IPv4 GID is a blocker, which `network` reports."""
    reasons = [item.reason for item in subject.plan.decisions if item.variable == ports.GID_INDEX]
    if subject.plan.kind == "roce" and reasons and not subject.plan.blockers:
        yield Check("gid", "ok", "; ".join(reasons))


def slingshot(subject: Subject) -> Iterator[Check]:
    """Check that Slingshot's devices can be opened, and that NCCL's plug-in and its libraries exist."""
    facts = subject.facts
    links = subject.plan.links
    if subject.plan.kind != "slingshot":
        return
    closed = [device.name for device in facts.cxi if not device.opens]
    if closed:
        fix = "Slurm: use a job step with a network allocation; Singularity: no --contain"
        yield Check("slingshot", subject.between, f"cannot be opened: {', '.join(closed)}", fix)
    else:
        names = ", ".join(f"/dev/{device.name}" for device in facts.cxi)
        yield Check("slingshot", "ok", f"{names} can be opened")
    # A library may come from the host (`links`) or be on the library path.
    plugin_path = find_plugin(facts, links)
    needed = ("libfabric.so.1", "libcxi.so.1")
    missing = [name for name in needed if name not in links and facts.library(name) is None]
    if not plugin_path:
        missing.append("libnccl-net.so")
    if missing:
        fix = "in the recipe: system.fabric.host_libs: auto, and their folders in system.runtime.host_libs; "
        fix += "otherwise NCCL uses TCP"
        yield Check("libfabric", subject.between, f"not on the library path: {', '.join(missing)}", fix)
    else:
        yield Check("libfabric", "ok", plugin_path)
    yield from _host_libraries(subject)


def _host_libraries(subject: Subject) -> Iterator[Check]:
    """Check that the dynamic linker can load the libraries that the plan takes from the host.

    The folder with links is made for this as a launch makes it.
    """
    links = subject.plan.links
    if not links or not subject.reader.live:
        return
    folder = library_path.links_folder(links)
    search_path = subject.plan.env[library_path.VARIABLE]
    try:
        files.make_links(Path(folder), links)
        fault = _first_load_fault([f"{folder}/{name}" for name in links], search_path)
    except OSError as error:
        fault = str(error)
    if fault:
        fix = f"to run without them: {HOST_LIBS}=none"
        yield Check("host libraries", subject.between, fault, fix)
    else:
        yield Check("host libraries", "ok", f"{', '.join(links)} of the host can be loaded")


def _first_load_fault(paths: list[str], search_path: str) -> str:
    """Return why the dynamic linker cannot load the first of `paths` that it refuses, or an empty text."""
    for path in paths:
        fault = health.load_fault(path, search_path)
        if fault:
            return fault
    return ""


def gpudirect(subject: Subject) -> Iterator[Check]:
    """Check that NICs can read the memory of GPUs directly, and that each NIC in use is near a GPU."""
    facts = subject.facts
    if not (facts.gpus and subject.rdma):
        return
    if facts.peermem or facts.dmabuf:
        dmabuf = f"DMA-BUF: open kernel module {facts.driver_version}, Linux {facts.kernel}"
        yield Check("gpudirect", "ok", facts.peermem or dmabuf)
    else:
        evidence = "/sys/module/nvidia_peermem does not exist, and there is no open kernel module for DMA-BUF"
        fix = "on the node: modprobe nvidia_peermem. Until then data is copied through host memory"
        yield Check("gpudirect", "warn", evidence, fix)
    # Only the devices of ports in use: "mlx5_0:1" is a port of mlx5_0.
    names = {name.partition(":")[0] for name in subject.plan.devices}
    for device in facts.rdma:
        if device.name not in names:
            continue
        distance = ports.gpu_distance(facts, device)
        evidence = f"{device.name}: {device.path}/device -> {device.pci or '?'}, numa_node {device.numa_node}"
        if distance is None:
            yield Check("affinity", "unknown", evidence, "show the topology: nvidia-smi topo -m")
        elif distance < 2:
            where = ("under one PCI switch with a GPU", "on a GPU's NUMA node")[distance]
            yield Check("affinity", "ok", f"{evidence}: {where}")
        else:
            fix = "data crosses the processors; show the topology: nvidia-smi topo -m"
            yield Check("affinity", "warn", f"{evidence}: far from every GPU", fix)

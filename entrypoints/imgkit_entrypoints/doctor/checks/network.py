"""Checks of the network between nodes: decisions, devices, libraries, distance from the GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from imgkit_entrypoints import files
from imgkit_entrypoints.doctor.checks.check import Check, Subject
from imgkit_entrypoints.fabric import library_path, plugin, ports, sockets
from imgkit_entrypoints.fabric.slingshot import plugin as slingshot_plugin
from imgkit_entrypoints.facts import Port, RdmaDevice, health
from imgkit_entrypoints.system import HOST_LIBS

_OWN_CHECKS = {
    "infiniband": ("libibverbs", "cannot be opened"),
    "roce": ("libibverbs", "cannot be opened"),
    "slingshot": ("aws-ofi-nccl", "cannot be opened"),
    "tcp": (),
}
"""Words of the fabric's warnings that have a check of their own."""


def network(subject: Subject) -> Iterator[Check]:
    """The kind of network, its blockers, and every warning about variables."""
    rate = f", {subject.plan.line_rate_Gbps:g} Gbit/s" if subject.plan.line_rate_Gbps else ""
    carried = f"{', '.join(subject.plan.devices) or 'no device'}{rate}"
    yield Check(
        name="network", verdict="ok", evidence=f"{subject.plan.kind} over {carried} ({subject.plan.reason})"
    )
    for found in subject.plan.blockers:
        yield Check(name="network", verdict=subject.between, evidence=found.what, fix=found.fix)
    for found in subject.plan.warnings:
        if not any(word in found.what for word in (*_OWN_CHECKS[subject.plan.kind], plugin.UNOPENED)):
            yield Check(name="network", verdict="warn", evidence=found.what, fix=found.fix)


def net_plugin(subject: Subject) -> Iterator[Check]:
    """The plug-in that NCCL_NET_PLUGIN names has a file, and the dynamic linker can load it."""
    for found in subject.plan.warnings:
        if plugin.UNOPENED in found.what:
            yield Check(name="plug-in", verdict="fail", evidence=found.what, fix=found.fix)
    value = subject.plan.env.get(plugin.VARIABLE) or subject.env.get(plugin.VARIABLE, "")
    if plugin.VARIABLE in subject.plan.unset or not value:
        return
    for path in plugin.files(subject.facts, value):
        # The program that loads it is another: a plug-in's constructors may do anything.
        fault = health.load_fault(path) if subject.reader.live else ""
        yield Check(
            name="plug-in",
            verdict="fail" if fault else "ok",
            evidence=f"{plugin.VARIABLE}={value}: {path}" + (f" cannot be opened: {fault}" if fault else ""),
            fix="put the folders of what it needs on LD_LIBRARY_PATH, or use a plug-in for this image's glibc"
            if fault
            else "",
        )


def bootstrap(subject: Subject) -> Iterator[Check]:
    """There is an interface for the bootstrap of NCCL and Gloo, which uses TCP even if the data uses RDMA."""
    if not subject.facts.interfaces:
        yield Check(
            name="interface",
            verdict="unknown",
            evidence="/sys/class/net shows no interface",
            fix="start the container with /sys, without --contain",
        )
        return
    # A missing interface is one of the network's blockers.
    for item in subject.plan.decisions:
        if item.variable == sockets.NCCL and item.value:
            yield Check(name="interface", verdict="ok", evidence=f"{item.value}: {item.reason}")


def rdma_ports(subject: Subject) -> Iterator[Check]:
    """Every port is active, and its rate is known."""
    known = {port.name: port for device in subject.facts.rdma for port in device.ports}
    used = [port for name, port in known.items() if name in subject.plan.devices]
    if used:
        shown = ", ".join(f"{port.name} {port.link_layer} {port.rate}" for port in used)
        yield Check(name="rdma ports", verdict="ok", evidence=shown)
    dead = _dead_siblings(subject, used)
    asked = subject.system is not None and subject.system.fabric.kind in ("infiniband", "roce")
    for item in subject.plan.decisions:
        port = known.get(item.value) if item.variable == ports.HCA and not item.used else None
        down = port is not None and port.state.startswith("1:")
        if port is None or port.active or (used and down and port.name not in dead):
            continue  # a port with another purpose, or without a cable
        yield Check(
            name="rdma ports",
            verdict="fail" if asked and not used else "warn",
            evidence=f"{item.value}: {item.reason}",
            fix="report the node to the site with the output of ibstat; for INIT, check the subnet manager",
        )


def _dead_siblings(subject: Subject, used: list[Port]) -> set[str]:
    """Ports without a link on a card of their own, where most cards of this kind work: a card has failed.

    The second port of a card with a working one often has no cable on purpose.
    """
    cards = {port.name: device.card for device in subject.facts.rdma for port in device.ports}
    kinds, working = {port.link_layer for port in used}, {cards[port.name] for port in used}
    dead = {
        port.name: cards[port.name]
        for device in subject.facts.rdma
        for port in device.ports
        if port.state.startswith("1:") and port.link_layer in kinds and cards[port.name] not in working
    }
    nics = subject.system.fabric.nics if subject.system else None
    if nics is not None and len(used) >= nics:
        return set()
    return set(dead) if len(set(dead.values())) < len(working) else set()


def verbs(subject: Subject) -> Iterator[Check]:
    """The container can open the device files of InfiniBand and RoCE, and has their libraries."""
    names = {name.partition(":")[0] for name in subject.plan.devices}
    devices = [device for device in subject.facts.rdma if device.name in names]
    if subject.plan.kind not in ("infiniband", "roce") or not devices:
        return
    fix = "docker: --device /dev/infiniband; Kubernetes: rdma/rdma=1; Singularity: no --contain"
    closed = [device.verbs or f"uverbs of {device.name}" for device in devices if not device.verbs_opens]
    if closed:
        evidence = f"{', '.join(closed)} cannot be opened, but {devices[0].path} exists"
        yield Check(name="rdma devices", verdict="fail", evidence=evidence, fix=fix)
    else:
        opened = ", ".join(device.verbs for device in devices)
        yield Check(name="rdma devices", verdict="ok", evidence=f"{opened} can be opened")
    if not subject.facts.rdma_cm:
        evidence = "/dev/infiniband/rdma_cm cannot be opened; NCCL does not need it, but other libraries do"
        yield Check(name="rdma devices", verdict="warn", evidence=evidence, fix=fix)
    yield _libibverbs(subject, devices)


def _libibverbs(subject: Subject, devices: list[RdmaDevice]) -> Check:
    fix = "add libibverbs1 and ibverbs-providers to the recipe's image.apt; --nv does not add them"
    library, providers = subject.facts.library("libibverbs.so.1"), subject.facts.verbs_providers
    if library is None:
        evidence = "libibverbs.so.1 is not on the library path, so NCCL uses TCP"
        return Check(name="libibverbs", verdict="fail", evidence=evidence, fix=fix)
    evidence = f"{library.path}, providers {', '.join(providers) or 'none'}"
    mellanox = any(device.vendor == "0x15b3" for device in devices)
    if not providers or (mellanox and "mlx5" not in providers):
        lacking = f"{evidence}: no driver for {devices[0].name}, so NCCL reports No device found"
        return Check(name="libibverbs", verdict="fail", evidence=lacking, fix=fix)
    return Check(name="libibverbs", verdict="ok", evidence=evidence)


def roce_gid(subject: Subject) -> Iterator[Check]:
    """The GID of RoCE is known; a port without an IPv4 GID is one of the network's blockers."""
    reasons = [item.reason for item in subject.plan.decisions if item.variable == ports.GID_INDEX]
    if subject.plan.kind == "roce" and reasons and not subject.plan.blockers:
        yield Check(name="gid", verdict="ok", evidence="; ".join(reasons))


def slingshot(subject: Subject) -> Iterator[Check]:
    """Slingshot's devices can be opened, and NCCL's plugin for them has its libraries."""
    if subject.plan.kind != "slingshot":
        return
    closed = [device.name for device in subject.facts.cxi if not device.opens]
    names = ", ".join(f"/dev/{device.name}" for device in subject.facts.cxi)
    yield Check(
        name="slingshot",
        verdict=subject.between if closed else "ok",
        evidence=f"cannot be opened: {', '.join(closed)}" if closed else f"{names} can be opened",
        fix="Slurm: use a job step with a network allocation; Singularity: no --contain" if closed else "",
    )
    links = subject.plan.links
    wanted = ("libfabric.so.1", "libcxi.so.1")
    lacking = [name for name in wanted if name not in links and subject.facts.library(name) is None]
    found = slingshot_plugin(subject.facts, links)
    lacking += [] if found else ["libnccl-net.so"]
    yield Check(
        name="libfabric",
        verdict=subject.between if lacking else "ok",
        evidence=f"not on the library path: {', '.join(lacking)}" if lacking else found,
        fix="in the recipe: system.fabric.host_libs: auto, and their folders in system.runtime.host_libs; "
        "otherwise NCCL uses TCP"
        if lacking
        else "",
    )
    yield from _host_libraries(subject)
    version = re.match(r"([0-9]{1,9})\.([0-9]{1,9})", subject.facts.kernel)
    if version and (int(version[1]), int(version[2])) < (5, 12):
        yield Check(
            name="kernel",
            verdict="warn",
            evidence=f"/proc/sys/kernel/osrelease: {subject.facts.kernel}; fork is safe with RDMA since "
            "Linux 5.12",
            fix="if data workers crash, use no workers or the start method spawn (RHEL 8.6 and SLES 15 SP4 "
            "are safe despite their older kernels)",
        )


def _host_libraries(subject: Subject) -> Iterator[Check]:
    """The dynamic linker loads what the plan takes from the host."""
    links = subject.plan.links
    if not links or not subject.reader.live:
        return
    folder, searched = library_path.links_folder(links), subject.plan.env[library_path.VARIABLE]
    faults = []
    try:
        files.make_links(Path(folder), links)
        faults = [text for name in links if (text := health.load_fault(f"{folder}/{name}", searched))]
    except OSError as error:
        faults = [str(error)]
    yield Check(
        name="host libraries",
        verdict=subject.between if faults else "ok",
        evidence=faults[0] if faults else f"{', '.join(links)} of the host can be loaded",
        fix=f"to run without them: {HOST_LIBS}=none" if faults else "",
    )


def gpudirect(subject: Subject) -> Iterator[Check]:
    """NICs can read the GPUs' memory directly, and are near the GPUs."""
    if not (subject.facts.gpus and subject.rdma):
        return
    if subject.facts.peermem or subject.facts.dmabuf:
        evidence = subject.facts.peermem or f"DMA-BUF: {subject.facts.driver}, Linux {subject.facts.kernel}"
        yield Check(name="gpudirect", verdict="ok", evidence=evidence)
    else:
        yield Check(
            name="gpudirect",
            verdict="warn",
            evidence="/sys/module/nvidia_peermem does not exist, and there is no open kernel module for "
            "DMA-BUF",
            fix="on the node: modprobe nvidia_peermem. Until then data is copied through host memory",
        )
    names = {name.partition(":")[0] for name in subject.plan.devices}
    for device in subject.facts.rdma:
        if device.name not in names:
            continue
        far = ports.distance(subject.facts, device)
        evidence = f"{device.name}: {device.path}/device -> {device.pci or '?'}, numa_node {device.numa_node}"
        if far is None:
            yield Check(
                name="affinity",
                verdict="unknown",
                evidence=evidence,
                fix="show the topology: nvidia-smi topo -m",
            )
        else:
            where = ("under one PCI switch with a GPU", "on a GPU's NUMA node", "far from every GPU")[far]
            fix = "data crosses the processors; show the topology: nvidia-smi topo -m" if far == 2 else ""
            yield Check(
                name="affinity",
                verdict="warn" if far == 2 else "ok",
                evidence=f"{evidence}: {where}",
                fix=fix,
            )

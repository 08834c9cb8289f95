"""Check the network between nodes: its settings, devices, libraries, and the distance of NICs from GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from imgkit_entrypoints import files
from imgkit_entrypoints.doctor.checks.check import Check, CheckedNode, Verdict
from imgkit_entrypoints.fabric import library_path, plugin, ports, sockets
from imgkit_entrypoints.fabric.slingshot import find_plugin
from imgkit_entrypoints.facts import health
from imgkit_entrypoints.facts.host_facts import Port, RdmaDevice
from imgkit_entrypoints.system import HOST_LIBS


def report_network(node: CheckedNode) -> Iterator[Check]:
    """Report the kind of network that a run would use, and every problem that the network plan contains.

    A problem is a blocker (a run on several nodes would fail), a refusal (a known issue, with which a run on
    GPUs must not start), or a warning. Each problem is a separate result.
    """
    plan = node.plan
    devices = ", ".join(plan.devices) or "no device"
    if plan.line_rate_Gbps:
        devices += f", {plan.line_rate_Gbps:g} Gbit/s"
    yield Check("network", "ok", f"{plan.kind} over {devices} ({plan.reason})")
    # On one node, blockers do not matter, so the verdict is only "warn" there.
    for blocker in plan.blockers:
        yield Check("network", node.network_verdict, blocker.what, blocker.fix)
    for finding in (*plan.refusals, *plan.warnings):
        verdict: Verdict = "fail" if finding.is_failure else "warn"
        yield Check(finding.check, verdict, finding.what, finding.fix)


def check_net_plugin(node: CheckedNode) -> Iterator[Check]:
    """Check that the dynamic linker can load the network plug-in in NCCL_NET_PLUGIN.

    Loading can fail although the file exists, because the plug-in needs other libraries.
    """
    value = node.plan.env.get(plugin.VARIABLE) or node.env.get(plugin.VARIABLE, "")
    if plugin.VARIABLE in node.plan.unset or not value:
        return
    fix = "put the folders of what it needs on LD_LIBRARY_PATH, or use a plug-in for this image's glibc"
    for path in plugin.plugin_files(node.facts, value):
        problem = ""
        if node.reader.live:  # the files of another machine cannot be loaded here
            problem = health.load_problem(path)
        evidence = f"{plugin.VARIABLE}={value}: {path}"
        if problem:
            yield Check("plug-in", "fail", f"{evidence} cannot be opened: {problem}", fix)
        else:
            yield Check("plug-in", "ok", evidence)


def report_interface(node: CheckedNode) -> Iterator[Check]:
    """Report the network interface over which the processes of NCCL and Gloo connect to each other.

    These connections use TCP, even if the data uses RDMA.
    """
    if not node.facts.interfaces:
        fix = "start the container with /sys, without --contain"
        yield Check("interface", "unknown", "/sys/class/net shows no interface", fix)
        return
    # A decision is a variable that the plan sets, with its value and the reason. If no interface is usable,
    # there is none for NCCL_SOCKET_IFNAME (`sockets.NCCL`), and `report_network` reports a blocker.
    for decision in node.plan.decisions:
        if decision.variable == sockets.NCCL and decision.value:
            yield Check("interface", "ok", f"{decision.value}: {decision.reason}")


def check_rdma_ports(node: CheckedNode) -> Iterator[Check]:
    """Report the RDMA ports that NCCL uses, and check the other ports for faults.

    A port without a link often has no cable on purpose. It counts as a fault only if no port can be used, or
    if its whole card has failed (see `_find_ports_of_failed_cards`).
    """
    all_ports: dict[str, Port] = {}
    for device in node.facts.rdma:
        all_ports |= {port.name: port for port in device.ports}
    used = [port for name, port in all_ports.items() if name in node.plan.devices]
    if used:
        links = ", ".join(f"{port.name} {port.link_layer} {port.rate}" for port in used)
        yield Check("rdma ports", "ok", links)
    failed_names = _find_ports_of_failed_cards(node, used)
    # Without any usable port, a node of an RDMA cluster is broken. On other nodes, RDMA is optional.
    is_expected = node.system.fabric.kind in ("infiniband", "roce")  # according to the image's recipe
    verdict: Verdict = "fail" if is_expected and not used else "warn"
    fix = "report the node to the site with the output of ibstat; for INIT, check the subnet manager"
    for name, reason in _list_unused_ports(node):
        port = all_ports.get(name)
        if port is None or port.active:
            continue
        # While other ports work, a port without a link is probably not connected on purpose.
        is_unplugged_on_purpose = bool(used) and not port.has_link and name not in failed_names
        if not is_unplugged_on_purpose:
            yield Check("rdma ports", verdict, f"{name}: {reason}", fix)


def _list_unused_ports(node: CheckedNode) -> Iterator[tuple[str, str]]:
    """Yield the name of each port that NCCL does not use, and the reason.

    The network plan has a decision about NCCL_IB_HCA for each of them. It may also have such decisions about
    a list of ports, such as ``=mlx5_0:1,mlx5_1:1``. They are yielded in the same way.
    """
    for decision in node.plan.decisions:
        if decision.variable == ports.HCA and not decision.used:
            yield decision.value, decision.reason


def _find_ports_of_failed_cards(node: CheckedNode, used: Sequence[Port]) -> set[str]:
    """Return the names of ports, such as ``mlx5_3:1``, that have no link because their card has failed.

    A card has failed if none of its ports has a link while most cards of the same kind work. A working card
    does not count, because its second port often has no cable on purpose. If the node has as many working
    ports as the recipe lists NICs, no card has failed.

    Parameters
    ----------
    used : ports that NCCL uses for the run.
    """
    # If the node has all NICs that the recipe expects, the other ports are unused on purpose.
    nics = node.system.fabric.nics
    if nics is not None and len(used) >= nics:
        return set()
    # The ports of a card may be separate devices, so compare cards instead of devices.
    used_devices = {port.device for port in used}
    working_cards = {device.card for device in node.facts.rdma if device.name in used_devices}
    # An unused Ethernet port says nothing about a node whose fabric is InfiniBand.
    link_layers = {port.link_layer for port in used}
    failed_cards, failed_ports = set(), set()
    for device in node.facts.rdma:
        if device.card in working_cards:
            continue
        for port in device.ports:
            if not port.has_link and port.link_layer in link_layers:
                failed_cards.add(device.card)
                failed_ports.add(port.name)
    # If at least half of the cards have no link, they were probably not meant to be connected. On a node
    # without any working card, this also returns no port, but then `check_rdma_ports` reports all of them.
    if len(failed_cards) >= len(working_cards):
        return set()
    return failed_ports


def check_verbs(node: CheckedNode) -> Iterator[Check]:
    """Report that the device files and libraries of InfiniBand and RoCE are available.

    NCCL uses them through an interface that is called verbs. If one of them is missing, `report_network`
    reports this as a failure of the same name.
    """
    facts, devices = node.facts, _find_used_devices(node)
    if node.plan.kind not in ("infiniband", "roce") or not devices:
        return
    if not _has_failed(node, "rdma devices"):
        device_files = ", ".join(device.verbs for device in devices)
        yield Check("rdma devices", "ok", f"{device_files} can be opened")
    if not facts.rdma_cm:
        evidence = "/dev/infiniband/rdma_cm cannot be opened; NCCL does not need it, but other libraries do"
        yield Check("rdma devices", "warn", evidence, ports.OPEN_FIX)
    library = facts.library("libibverbs.so.1")
    if library and not _has_failed(node, "libibverbs"):
        evidence = f"{library.path}, providers {', '.join(facts.verbs_providers)}"
        yield Check("libibverbs", "ok", evidence)


def _has_failed(node: CheckedNode, check: str) -> bool:
    """Return whether the network plan contains a failure of a check, which `report_network` reports."""
    return any(finding.check == check and finding.is_failure for finding in node.plan.warnings)


def report_gid(node: CheckedNode) -> Iterator[Check]:
    """Report which GIDs (addresses for RDMA) the RoCE ports use.

    If a port has no suitable GID, the plan contains a blocker, which `report_network` reports instead.
    """
    reasons = [item.reason for item in node.plan.decisions if item.variable == ports.GID_INDEX]
    if node.plan.kind == "roce" and reasons and not node.plan.blockers:
        yield Check("gid", "ok", "; ".join(reasons))


def check_slingshot(node: CheckedNode) -> Iterator[Check]:
    """Check the devices and the libraries of a node with Slingshot. On other nodes, there is no result."""
    if node.plan.kind == "slingshot":
        yield _check_slingshot_devices(node)
        yield _check_slingshot_libraries(node)
        yield from _check_host_libraries(node)


def _check_slingshot_devices(node: CheckedNode) -> Check:
    """Check that the device files of the Slingshot NICs can be opened."""
    closed = [device.name for device in node.facts.cxi if not device.opens]
    if closed:
        fix = "Slurm: use a job step with a network allocation; Singularity: no --contain"
        return Check("slingshot", node.network_verdict, f"cannot be opened: {', '.join(closed)}", fix)
    device_files = ", ".join(f"/dev/{device.name}" for device in node.facts.cxi)
    return Check("slingshot", "ok", f"{device_files} can be opened")


def _check_slingshot_libraries(node: CheckedNode) -> Check:
    """Check that NCCL's plug-in for Slingshot exists, and the libraries that it needs."""
    missing = []
    for name in ("libfabric.so.1", "libcxi.so.1"):
        is_linked = name in node.plan.links  # a launch links the host's library into the container
        if not is_linked and node.facts.library(name) is None:
            missing.append(name)
    plugin_path = find_plugin(node.facts, node.plan.links)
    if not plugin_path:
        missing.append("libnccl-net.so")
    if not missing:
        return Check("libfabric", "ok", plugin_path)
    fix = "in the recipe: system.fabric.host_libs: auto, and their folders in system.runtime.host_libs; "
    fix += "otherwise NCCL uses TCP"
    evidence = f"not on the library path: {', '.join(missing)}"
    return Check("libfabric", node.network_verdict, evidence, fix)


def _check_host_libraries(node: CheckedNode) -> Iterator[Check]:
    """Check that the dynamic linker can load the host's libraries that workers would use.

    A launch creates a folder with links to these libraries and adds it to the library path. This check does
    the same, so that the dynamic linker finds the libraries in the same way as in a run.
    """
    links = node.plan.links
    # The libraries of another machine, whose files were only copied here, cannot be loaded.
    if not links or not node.reader.live:
        return
    folder = library_path.links_folder(links)
    search_path = node.plan.env[library_path.VARIABLE]
    try:
        files.make_links(Path(folder), links)
        problems = [health.load_problem(f"{folder}/{name}", search_path) for name in links]
    except OSError as error:
        problems = [str(error)]
    # One problem is enough: the fix is the same for all, and a missing library often breaks several.
    for problem in problems:
        if problem:
            fix = f"to run without them: {HOST_LIBS}=none"
            yield Check("host libraries", node.network_verdict, problem, fix)
            return
    yield Check("host libraries", "ok", f"{', '.join(links)} of the host can be loaded")


def check_gpudirect(node: CheckedNode) -> Iterator[Check]:
    """Check that NICs can directly access the memory of GPUs, and that each NIC in use is near a GPU.

    NVIDIA calls this GPUDirect RDMA. It needs a kernel module (nvidia_peermem) or DMA-BUF. On a node without
    GPUs or without RDMA, there is no result.
    """
    facts = node.facts
    if not (facts.gpus and node.uses_rdma):
        return
    if facts.peermem:
        yield Check("gpudirect", "ok", facts.peermem)
    elif facts.dmabuf:
        evidence = f"DMA-BUF: open kernel module {facts.driver_version}, Linux {facts.kernel}"
        yield Check("gpudirect", "ok", evidence)
    else:
        evidence = "/sys/module/nvidia_peermem does not exist, and there is no open kernel module for DMA-BUF"
        fix = "on the node: modprobe nvidia_peermem. Until then data is copied through host memory"
        yield Check("gpudirect", "warn", evidence, fix)
    for device in _find_used_devices(node):
        yield _check_affinity(node, device)


def _find_used_devices(node: CheckedNode) -> list[RdmaDevice]:
    """Return the RDMA devices whose ports NCCL uses. The port ``mlx5_0:1`` belongs to the device mlx5_0."""
    names = {name.partition(":")[0] for name in node.plan.devices}
    return [device for device in node.facts.rdma if device.name in names]


def _check_affinity(node: CheckedNode, device: RdmaDevice) -> Check:
    """Check that an RDMA device is near a GPU: below the same PCI switch, or on the same NUMA node.

    Otherwise, data between GPU and network crosses the processors, which is slower.
    """
    evidence = f"{device.name}: {device.path}/device -> {device.pci or '?'}, numa_node {device.numa_node}"
    match ports.gpu_distance(node.facts, device):
        case None:
            return Check("affinity", "unknown", evidence, "show the topology: nvidia-smi topo -m")
        case 0:
            return Check("affinity", "ok", f"{evidence}: under one PCI switch with a GPU")
        case 1:
            return Check("affinity", "ok", f"{evidence}: on a GPU's NUMA node")
        case _:
            fix = "data crosses the processors; show the topology: nvidia-smi topo -m"
            return Check("affinity", "warn", f"{evidence}: far from every GPU", fix)

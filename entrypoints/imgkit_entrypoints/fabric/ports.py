"""Decide which RDMA ports NCCL uses (NCCL_IB_HCA), and the GID of RoCE ports (NCCL_IB_GID_INDEX).

NCCL 2.21 and later search for the GID themselves (net_ib/connect.cc: NCCL_IB_ADDR_FAMILY,
NCCL_IB_ROCE_VERSION_NUM), and the guide of these versions advises against NCCL_IB_GID_INDEX. Earlier versions
use index 0, which is link-local.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from imgkit_entrypoints.fabric.fabric_plan import FabricPlanBuilder
from imgkit_entrypoints.facts.host_facts import Gid, HostFacts, Port, RdmaDevice

HCA = "NCCL_IB_HCA"
OPEN_FIX = "docker: --device /dev/infiniband; Kubernetes: rdma/rdma=1; Singularity: no --contain"
"""Remedy for a device file that cannot be opened."""
_LINK_LAYERS = ("InfiniBand", "Ethernet")
# Contents of a port's file `state`, as drivers/infiniband/core/sysfs.c of Linux prints them.
_STATES = {
    "1: DOWN": "no link: check the cable, the switch, and whether the interface is up",
    "2: INIT": "no subnet manager has configured it",
    "3: ARMED": "the subnet manager has not activated it",
}
_NEARNESS = ("under its PCI switch", "on its NUMA node", "near it")
"""How messages describe a GPU, by the `gpu_distance` of a NIC: 0, 1 or 2."""


@dataclass(frozen=True, slots=True)
class UnusedPort:
    """A port that NCCL should not use, and the reason."""

    port: Port
    reason: str


class PortChoice(NamedTuple):
    """The ports that NCCL should use, and the other ports."""

    selected: tuple[Port, ...]
    unused: tuple[UnusedPort, ...]


def choose_ports(plan: FabricPlanBuilder) -> PortChoice:
    """Return the ports that NCCL should use, and the other ports, each with the reason.

    By itself, NCCL uses every ACTIVE port, including storage and management NICs, and refuses to mix
    InfiniBand with RoCE. So if one port is InfiniBand, this function selects no Ethernet port. Among RoCE
    ports, it selects those with an IPv4 GID (an address for RDMA) of type RoCE v2, and among these the ones
    nearest to a GPU. The distance does not count if that would leave fewer ports than the recipe's NICs.
    """
    unused: list[UnusedPort] = []
    active: list[Port] = []
    for port in _all_ports(plan.facts):
        problem = _port_problem(port)
        if problem:
            unused.append(UnusedPort(port, problem))
        else:
            active.append(port)
    infiniband = [port for port in active if port.link_layer == "InfiniBand"]
    if infiniband:
        evidence = f"{infiniband[0].path}/link_layer is {infiniband[0].link_layer}"
        reason = f"an Ethernet port, but {evidence}: NCCL cannot mix InfiniBand and Ethernet"
        unused += [UnusedPort(port, reason) for port in active if port not in infiniband]
        return PortChoice(tuple(infiniband), tuple(unused))
    addressed, without_gid = _keep_addressed(active)
    near, far = _keep_nearest(plan.facts, addressed)
    expected_nics = plan.system.fabric.nics
    if expected_nics is not None and len(near) < expected_nics:
        near, far = addressed, []
    return PortChoice(tuple(near), (*unused, *without_gid, *far))


def _all_ports(facts: HostFacts) -> list[Port]:
    """Return the ports of all RDMA devices of the node."""
    return [port for device in facts.rdma for port in device.ports]


def is_efa(device: RdmaDevice) -> bool:
    """Return True for Amazon's EFA, whose ports have neither of the two link layers of verbs."""
    return not any(port.link_layer in _LINK_LAYERS for port in device.ports)


def _port_problem(port: Port) -> str:
    """Return why NCCL cannot use a port, or "" if it can. It must be up, and InfiniBand or Ethernet."""
    if port.link_layer not in _LINK_LAYERS:
        evidence = f"{port.path}/link_layer: {port.link_layer}"
        return f"{evidence}: NCCL cannot use it through verbs (EFA needs the aws-ofi-nccl plugin)"
    if not port.active:
        state = _STATES.get(port.state, "not active")
        return f"{port.path}/state: {port.state}, phys_state: {port.phys_state}: {state}"
    return ""


def _keep_addressed(ports: list[Port]) -> tuple[list[Port], list[UnusedPort]]:
    """Return the ports with an IPv4 GID of type RoCE v2, and the others with the reason why they are unused.

    A GID is an address for RDMA. Routers forward only this type. If no port has one, all ports are kept.
    """
    addressed, unaddressed = [], []
    for port in ports:
        gid = pick_gid(port.gids)
        if gid is not None and gid.kind == "RoCE v2":
            addressed.append(port)
        else:
            reason = "no IPv4 GID of type RoCE v2, but other ports have one"
            unaddressed.append(UnusedPort(port, f"{port.path}/gids: {reason}"))
    if not addressed:
        return ports, []
    return addressed, unaddressed


def _keep_nearest(facts: HostFacts, ports: list[Port]) -> tuple[list[Port], list[UnusedPort]]:
    """Return the ports nearest to a GPU, and the others with the reason why they are unused.

    A NIC that is further away than others is usually for storage or management. If a distance is unknown, all
    ports are kept.
    """
    distances = []
    for port in ports:
        distance = gpu_distance(facts, _device_of_port(facts, port))
        if distance is None:
            return ports, []
        distances.append(distance)
    best = min(distances, default=0)
    near, far = [], []
    for port, distance in zip(ports, distances, strict=True):
        if distance == best:
            near.append(port)
            continue
        device = _device_of_port(facts, port)
        evidence = f"{device.path}/device -> {device.pci}, numa_node {device.numa_node}"
        reason = f"no GPU is {_NEARNESS[best]}, unlike other ports ({evidence})"
        far.append(UnusedPort(port, f"{reason}: a storage or management NIC"))
    return near, far


def gpu_distance(facts: HostFacts, device: RdmaDevice) -> int | None:
    """Return how far a NIC is from the nearest GPU, or None if that is unknown.

    The distance is 0 if both are under the same PCI switch, 1 if they are on the same NUMA node, and 2
    otherwise.
    """
    bridge = _pci_bridge(device.pci)
    if bridge and bridge in [_pci_bridge(gpu.pci) for gpu in facts.gpu_devices]:
        return 0
    numa_nodes = {gpu.numa_node for gpu in facts.gpu_devices} - {None}
    if device.numa_node is None or not numa_nodes:
        return None
    return 1 if device.numa_node in numa_nodes else 2


def _pci_bridge(path: str) -> str:
    """Return the first two parts of a PCI path, or "" if it has only one.

    In ``pci0000:16/0000:16:01.0/...``, the second part is a bridge, and devices below the same bridge are
    close. Devices that share only the first part share no more than the root complex.
    """
    root, _, rest = path.partition("/")
    bridge, _, _ = rest.partition("/")
    return f"{root}/{bridge}" if bridge else ""


def format_hcas(ports: Iterable[Port]) -> str:
    """Return the value of NCCL_IB_HCA that selects exactly these ports: ``=mlx5_0:1,mlx5_1:1``.

    The value begins with ``=``, because NCCL otherwise reads names as prefixes: mlx5_1 also selects mlx5_10.
    """
    return "=" + ",".join(port.name for port in ports)


class Selection(NamedTuple):
    """A value of NCCL_IB_HCA or NCCL_SOCKET_IFNAME: ``[^][=]name,...``."""

    excludes: bool
    """True if it selects everything except `names`."""
    is_exact: bool
    """False if `names` are prefixes."""
    names: list[str]

    def has_name(self, device: str, name: str) -> bool:
        """Return whether `name`, which is one of `names`, stands for the device or interface `device`."""
        return device == name if self.is_exact else device.startswith(name)


def parse_selection(value: str) -> Selection:
    """Parse a value of NCCL_IB_HCA or NCCL_SOCKET_IFNAME.

    For example, ``^=eth0,lo`` excludes exactly eth0 and lo.
    """
    body = value.removeprefix("^")
    names = [name for name in body.removeprefix("=").split(",") if name]
    return Selection(excludes=value.startswith("^"), is_exact=body.startswith("="), names=names)


def match_ports(value: str, ports: Iterable[Port]) -> tuple[Port, ...]:
    """Return those of `ports` that a value of NCCL_IB_HCA selects.

    The format is ``[^][=]name[:port[:rail[:plane]]],...``, for example ``=mlx5_0:1,mlx5_1``. Rail and plane
    do not select ports, so they are ignored.
    """
    selection = parse_selection(value)
    if not selection.names:
        return tuple(ports)
    matches = []
    for port in ports:
        is_named = any(_is_port_named(selection, name, port) for name in selection.names)
        if is_named != selection.excludes:
            matches.append(port)
    return tuple(matches)


def _is_port_named(selection: Selection, name: str, port: Port) -> bool:
    """Return whether a name of the selection, such as ``mlx5_0`` or ``mlx5_0:1``, stands for `port`."""
    device, _, rest = name.partition(":")
    number, _, _ = rest.partition(":")
    return selection.has_name(port.device, device) and number in ("", str(port.number))


def ports_in_use(plan: FabricPlanBuilder) -> tuple[Port, ...]:
    """Return the ports that NCCL will use.

    They are selected by NCCL_IB_HCA if the user or the recipe sets it, and otherwise by `choose_ports`.
    """
    preset = plan.requested_preset(HCA)
    if preset is None:
        return choose_ports(plan).selected
    usable = [port for port in _all_ports(plan.facts) if not _port_problem(port)]
    return match_ports(preset.value, usable)


def set_hcas(plan: FabricPlanBuilder) -> tuple[Port, ...]:
    """Set NCCL_IB_HCA, the list of ports, and return the ports that NCCL will use.

    The other ports are reported with the reason. Slow ports and devices that cannot be opened get warnings.
    """
    choice = choose_ports(plan)
    states = []
    for port in choice.selected:
        states.append(f"{port.path}: state {port.state}, {port.link_layer}, {port.rate or 'no rate'}")
    value = format_hcas(choice.selected)
    plan.set_variable(HCA, value, f"the ACTIVE ports of the fabric: {'; '.join(states)}")
    report_unused(plan, choice.unused)
    used = ports_in_use(plan)
    if not used:
        names = ", ".join(port.name for port in choice.selected)
        plan.add_warning(
            f"{HCA}={plan.worker_value(HCA)} selects no ACTIVE port of this machine (available: {names}): "
            "NCCL would use TCP",
            f"{plan.unset_hint(HCA)}, or set {HCA}={value}",
        )
    _report_cards(plan, used)
    _warn_slow_ports(plan, used)
    _warn_closed_devices(plan, used)
    _warn_missing_libibverbs(plan, used)
    return used


def report_unused(plan: FabricPlanBuilder, unused: Iterable[UnusedPort]) -> None:
    """Report the ports that NCCL should not use, each with the reason."""
    for item in unused:
        plan.add_decision(HCA, item.port.name, f"left out: {item.reason}")


def _device_of_port(facts: HostFacts, port: Port) -> RdmaDevice:
    """Return the device to which a port belongs."""
    return next(device for device in facts.rdma if device.name == port.device)


def _report_cards(plan: FabricPlanBuilder, used: Sequence[Port]) -> None:
    """Report which ports are virtual functions, and which ports NCCL merges into one NIC.

    A virtual function is a share of a card, as a virtual machine gets it.
    """
    ports_by_card: dict[str, list[Port]] = {}
    for port in used:
        device = _device_of_port(plan.facts, port)
        ports_by_card.setdefault(device.card, []).append(port)
        if device.physical:
            reason = f"{device.path}/device/physfn -> {device.physical}: a virtual function of that card"
            plan.add_decision(HCA, port.name, reason, used=True)
    for card, ports in ports_by_card.items():
        if len(ports) > 1:
            path = _device_of_port(plan.facts, ports[0]).path
            reason = f"one card ({path}/device: {card}): NCCL merges its ports into one NIC"
            plan.add_decision(HCA, ",".join(port.name for port in ports), reason, used=True)


def _warn_slow_ports(plan: FabricPlanBuilder, used: Sequence[Port]) -> None:
    """Warn about ports that are slower than the fastest port, and about ports whose rate is unknown.

    A slower port usually has a bad cable, and slows down every collective.
    """
    best = max((port.rate_Gbps or 0 for port in used), default=0)
    for port in used:
        if port.rate_Gbps is None:
            plan.add_warning(
                f"{port.name}: rate unknown ({port.path}/rate: {port.rate}; a kernel prints SDR for a speed "
                "that it does not know)",
                f"ask the driver instead: ibstat {port.device}, mlxlink -d {port.device}",
            )
        elif port.rate_Gbps < best:
            plan.add_warning(
                f"{port.name} is degraded: {port.path}/rate: {port.rate}, its siblings have {best:g} Gb/sec",
                f"check the cable, and report the node to the site with the output of: ibstat {port.device}",
            )


def _warn_closed_devices(plan: FabricPlanBuilder, used: Sequence[Port]) -> None:
    """Warn about a device that this container cannot open."""
    for device in dict.fromkeys(_device_of_port(plan.facts, port) for port in used):
        if not device.verbs_opens:
            file = device.verbs or f"/dev/infiniband/uverbs* for {device.name}"
            problem = f"{device.path} exists, but {file} cannot be opened: NCCL would use TCP"
            plan.add_warning(problem, OPEN_FIX, failed_check="rdma devices")


def _warn_missing_libibverbs(plan: FabricPlanBuilder, used: Sequence[Port]) -> None:
    """Warn if the image lacks libibverbs, through which NCCL uses RDMA, or its driver for the devices in use.

    Such a driver is called a provider, for example mlx5 for NVIDIA's NICs.
    """
    devices = [_device_of_port(plan.facts, port) for port in used]
    if not devices:  # without a usable port, NCCL does not need the library
        return
    fix = "add libibverbs1 and ibverbs-providers to the recipe's image.apt; --nv does not add them"
    if plan.facts.library("libibverbs.so.1") is None:
        problem = "libibverbs.so.1 is not on the library path: NCCL would use TCP"
        plan.add_warning(problem, fix, failed_check="libibverbs")
        return
    providers = plan.facts.verbs_providers
    # 0x15b3 is the PCI vendor of Mellanox (NVIDIA), whose NICs need the provider mlx5.
    needs_mlx5 = "0x15b3" in [device.vendor for device in devices]
    if not providers or (needs_mlx5 and "mlx5" not in providers):
        names = ", ".join(providers) or "none"
        problem = (
            f"libibverbs has no provider for {devices[0].name} (/etc/libibverbs.d, "
            f'libibverbs/lib*-rdmav*.so: {names}): NCCL would report "No device found"'
        )
        plan.add_warning(problem, fix, failed_check="libibverbs")


def line_rate_Gbps(facts: HostFacts, used: Sequence[Port]) -> float | None:
    """Return the rate of all ports together in Gbit/s, or None if one of the rates is unknown.

    A virtual function does not count if its card is also in use, because both share the card's rate.
    """
    devices = {port.name: _device_of_port(facts, port) for port in used}
    cards = {device.card for device in devices.values() if not device.physical}
    total = 0.0
    for port in used:
        device = devices[port.name]
        if device.physical and device.card in cards:
            continue
        if port.rate_Gbps is None:
            return None
        total += port.rate_Gbps
    return total or None


FINDS_GID: tuple[int, ...] = (2, 21)
"""First version of NCCL that finds the GID itself."""
GID_INDEX = "NCCL_IB_GID_INDEX"
GID_SEARCH = ("NCCL_IB_ADDR_FAMILY", "NCCL_IB_ADDR_RANGE", "NCCL_IB_ROCE_VERSION_NUM")
"""Variables with which a user changes NCCL's search."""


def pick_gid(gids: Sequence[Gid]) -> Gid | None:
    """Return the GID that NCCL's own search finds, or None if the port has no IPv4 GID.

    It is the first IPv4-mapped GID of type RoCE v2, or else the first IPv4-mapped one. Without any, NCCL
    stays at index 0. NCCL's loop is written in another way, and a test compares both.
    """
    mapped = [gid for gid in gids if gid.ipv4]
    return min(mapped, key=lambda gid: (gid.kind != "RoCE v2", gid.index), default=None)


def gid_evidence(port: Port, gid: Gid) -> str:
    """Return a slot of the GID table with its content, for a message.

    For example ``/sys/class/infiniband/mlx5_0/ports/1/gids/3: 0000:...:0a00:0001 (10.0.0.1), RoCE v2``.
    """
    return f"{port.path}/gids/{gid.index}: {gid.value} ({gid.ipv4 or 'no IPv4'}), {gid.kind or 'no type'}"


def set_gid_index(plan: FabricPlanBuilder, ports: Sequence[Port]) -> None:
    """Set NCCL_IB_GID_INDEX for these RoCE ports, or report why it is not set.

    It is the index of the address (GID) that NCCL uses on each port. It is set only for NCCL below 2.21,
    since later versions search for the right address themselves. A run on several nodes is blocked in two
    cases: an old NCCL would need different indices for its ports, or a port has no IPv4 address.
    """
    for name in GID_SEARCH:
        if plan.preset(name):
            evidence = f"{name}={plan.worker_value(name)}"
            reason = f"{evidence} changes NCCL's search, so its result is not predicted"
            plan.report_unset(GID_INDEX, "", reason)
            return
    gids: dict[str, Gid] = {}
    gid_texts: list[str] = []
    for port in ports:
        gid = pick_gid(port.gids)
        if gid is None:
            _block_port_without_gid(plan, port)
        else:
            gids[port.name] = gid
            gid_texts.append(gid_evidence(port, gid))
    # No index is right for all ports if one has no GID. Such a port was reported above.
    if gids and len(gids) == len(ports):
        _set_common_index(plan, gids, "; ".join(gid_texts))


def _set_common_index(plan: FabricPlanBuilder, gids: Mapping[str, Gid], evidence: str) -> None:
    """Set the GID index for ports that all have an IPv4 GID, if NCCL needs it and one index is right for all.

    Parameters
    ----------
    gids : the GID that each port needs, by the port's name.
    evidence : where these GIDs stand, for messages.
    """
    facts = plan.facts
    index_by_port = ", ".join(f"{gid.index} on {name}" for name, gid in gids.items())
    indices = {gid.index for gid in gids.values()}
    common_index = str(indices.pop()) if len(indices) == 1 else ""
    nccl = f"NCCL {facts.nccl_version} ({facts.nccl_source})"
    if facts.nccl is None:
        reason = f"NCCL's version is unknown; 2.21 and later find this themselves: {evidence}"
        plan.report_unset(GID_INDEX, index_by_port, reason)
        if plan.preset(GID_INDEX) is None:
            plan.add_warning(
                f"the image's NCCL version is unknown. Below 2.21, RoCE needs {GID_INDEX} ({index_by_port})",
                "set the version, for example IMGKIT_NCCL_VERSION=2.20.5",
            )
    elif facts.nccl >= FINDS_GID:
        reason = f"{nccl} finds {index_by_port} itself: {evidence}"
        plan.drop_image_variable(GID_INDEX, reason)
        plan.report_unset(GID_INDEX, common_index or index_by_port, reason)
    elif common_index:
        reason = f"{nccl} uses index 0 by default (2.21 and later search): {evidence}"
        plan.set_variable(GID_INDEX, common_index, reason)
    else:
        problem = "the NICs need different indices"
        plan.drop_image_variable(GID_INDEX, f"{problem} ({index_by_port}): {evidence}")
        plan.report_unset(GID_INDEX, index_by_port, f"{problem}, so none is set: {evidence}")
        if plan.preset(GID_INDEX) is None:
            first_port = next(iter(gids))
            plan.add_blocker(
                f"NCCL {facts.nccl_version} has one {GID_INDEX} for all NICs, but they need different "
                f"ones ({index_by_port})",
                f"use an image with NCCL 2.21 or later, or one NIC: {HCA}=={first_port}",
            )


def _block_port_without_gid(plan: FabricPlanBuilder, port: Port) -> None:
    """Block a run on several nodes because a port has no IPv4 GID, the address that RoCE needs.

    If NCCL_IB_GID_INDEX is set already, somebody has chosen another address, so the run is not blocked.
    """
    slots = ", ".join(f"{gid.index}: {gid.value} {gid.kind}".strip() for gid in port.gids) or "all empty"
    netdev = next((gid.netdev for gid in port.gids if gid.netdev), "its interface")
    reason = f"{port.name} has no IPv4 GID, so NCCL uses index 0; {port.path}/gids: {slots}"
    plan.drop_image_variable(GID_INDEX, reason)
    plan.report_unset(GID_INDEX, "", reason)
    if plan.preset(GID_INDEX) is None:
        plan.add_blocker(
            f"{port.name} has no IPv4 GID because {netdev} has no IPv4 address ({port.path}/gids: {slots})",
            f"give {netdev} an address (in a pod: add the RoCE network's annotation), or use TCP: "
            "NCCL_IB_DISABLE=1",
        )

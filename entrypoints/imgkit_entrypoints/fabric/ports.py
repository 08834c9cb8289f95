"""Decide which RDMA ports NCCL uses (NCCL_IB_HCA), and which GID of RoCE ports (NCCL_IB_GID_INDEX).

RoCE is RDMA over Ethernet. A RoCE port has a table of GIDs, which are its addresses. NCCL 2.21 and later
search this table for the right GID (net_ib/connect.cc: NCCL_IB_ADDR_FAMILY, NCCL_IB_ROCE_VERSION_NUM), and
the guide of these versions advises against NCCL_IB_GID_INDEX. Earlier versions use index 0, which is a
link-local address.
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
"""Where messages say that a GPU is, seen from a NIC, by the `gpu_distance` 0, 1 or 2."""


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
    """Return the ports that NCCL should use, and the other ports with the reason against each.

    Without such a choice, NCCL uses every ACTIVE port, including ports of storage and management NICs. NCCL
    cannot mix InfiniBand with RoCE (RDMA over Ethernet). So if any port is InfiniBand, Ethernet ports are not
    selected. Otherwise, the RoCE ports are filtered in two steps:

    * Ports with an IPv4 GID (an address for RDMA) of type RoCE v2 are preferred.
    * Of these ports, the ones that are nearest to a GPU are selected. This step is skipped if fewer ports
      would remain than the node has NICs according to the recipe.
    """
    # The function only reads `plan`, so several callers ask for the same choice. Each function for a split
    # returns the ports to keep, and the others with the reason against them.
    usable, unusable = _split_by_state(plan.facts)
    # NCCL cannot mix the two link layers, so if there is InfiniBand, only InfiniBand is used.
    infiniband = [port for port in usable if port.link_layer == "InfiniBand"]
    if infiniband:
        evidence = f"{infiniband[0].path}/link_layer is {infiniband[0].link_layer}"
        reason = f"an Ethernet port, but {evidence}: NCCL cannot mix InfiniBand and Ethernet"
        ethernet = [UnusedPort(port, reason) for port in usable if port not in infiniband]
        return PortChoice(tuple(infiniband), (*unusable, *ethernet))
    addressed, without_gid = _split_by_address(usable)
    near, far = _split_by_distance(plan.facts, addressed)
    # If too few ports remain, the distance was misleading, so keep all ports with an address.
    expected_nics = plan.system.fabric.nics
    if expected_nics is not None and len(near) < expected_nics:
        near, far = addressed, []
    return PortChoice(tuple(near), (*unusable, *without_gid, *far))


def _split_by_state(facts: HostFacts) -> tuple[list[Port], list[UnusedPort]]:
    """Split the ports of all RDMA devices into those that NCCL can use and the others.

    A usable port is ACTIVE, and its link layer is InfiniBand or Ethernet.
    """
    usable, unusable = [], []
    ports = [port for device in facts.rdma for port in device.ports]
    for port in ports:
        problem = _find_port_problem(port)
        if problem:
            unusable.append(UnusedPort(port, problem))
        else:
            usable.append(port)
    return usable, unusable


def is_efa(device: RdmaDevice) -> bool:
    """Return whether a device is Amazon's EFA. Its ports are neither InfiniBand nor Ethernet."""
    return not any(port.link_layer in _LINK_LAYERS for port in device.ports)


def _find_port_problem(port: Port) -> str:
    """Return why NCCL cannot use a port, or "" if it can.

    A usable port is ACTIVE, and its link layer is InfiniBand or Ethernet.
    """
    if port.link_layer not in _LINK_LAYERS:
        evidence = f"{port.path}/link_layer: {port.link_layer}"
        return f"{evidence}: NCCL cannot use it through verbs (EFA needs the aws-ofi-nccl plugin)"
    if not port.active:
        state = _STATES.get(port.state, "not active")
        return f"{port.path}/state: {port.state}, phys_state: {port.phys_state}: {state}"
    return ""


def _split_by_address(ports: list[Port]) -> tuple[list[Port], list[UnusedPort]]:
    """Split ports into those with an IPv4 GID of type RoCE v2 and the others, which NCCL should not use.

    A GID is an address for RDMA. Routers forward only GIDs of this type. If no port has such a GID, all ports
    are kept.
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


def _split_by_distance(facts: HostFacts, ports: list[Port]) -> tuple[list[Port], list[UnusedPort]]:
    """Split ports into those nearest to a GPU and the others, which NCCL should not use.

    A NIC that is further away from the GPUs is usually for storage or management. If the distance of any port
    is unknown, all ports are kept.
    """
    distances = []
    for port in ports:
        distance = gpu_distance(facts, _find_device(facts, port))
        if distance is None:
            return ports, []
        distances.append(distance)
    best = min(distances, default=0)  # 0 is nearest, 2 is farthest (see `gpu_distance`)
    near, far = [], []
    for port, distance in zip(ports, distances, strict=True):
        if distance == best:
            near.append(port)
            continue
        device = _find_device(facts, port)
        evidence = f"{device.path}/device -> {device.pci}, numa_node {device.numa_node}"
        reason = f"no GPU is {_NEARNESS[best]}, unlike other ports ({evidence})"
        far.append(UnusedPort(port, f"{reason}: a storage or management NIC"))
    return near, far


def gpu_distance(facts: HostFacts, device: RdmaDevice) -> int | None:
    """Return how far a NIC is from the nearest GPU, or None if the distance is unknown.

    The distance is 0 below the same PCI switch, 1 on the same NUMA node, and 2 otherwise.
    """
    bridge = _find_pci_bridge(device.pci)
    if bridge and bridge in [_find_pci_bridge(gpu.pci) for gpu in facts.gpu_devices]:
        return 0
    numa_nodes = {gpu.numa_node for gpu in facts.gpu_devices} - {None}  # None means unknown
    if device.numa_node is None or not numa_nodes:
        return None
    return 1 if device.numa_node in numa_nodes else 2


def _find_pci_bridge(path: str) -> str:
    """Return the bridge at the top of a PCI path, or "" if the path has only one part.

    For example, ``pci0000:16/0000:16:01.0/0000:17:00.0`` gives ``pci0000:16/0000:16:01.0``. Devices below the
    same bridge are close to each other. Devices with only the first part in common share a root complex,
    which says little about their distance.
    """
    root, _, rest = path.partition("/")
    bridge, _, _ = rest.partition("/")
    return f"{root}/{bridge}" if bridge else ""


def format_hcas(ports: Iterable[Port]) -> str:
    """Return the value of NCCL_IB_HCA that selects exactly these ports: ``=mlx5_0:1,mlx5_1:1``.

    The value begins with ``=``. Without it, names are prefixes, and mlx5_1 would also select mlx5_10.
    """
    return "=" + ",".join(port.name for port in ports)


class Selection(NamedTuple):
    """The parsed value of NCCL_IB_HCA or NCCL_SOCKET_IFNAME, in the format ``[^][=]name,...``."""

    excludes: bool
    """True if the value selects everything except `names`. It then begins with ``^``."""
    is_exact: bool
    """True if names must match completely (``=``), and False if they are prefixes."""
    names: list[str]

    def has_name(self, device: str, name: str) -> bool:
        """Return whether `name` matches the device or interface `device`.

        `name` is one of `names`, without the port's number.
        """
        return device == name if self.is_exact else device.startswith(name)


def parse_selection(value: str) -> Selection:
    """Parse a value of NCCL_IB_HCA or NCCL_SOCKET_IFNAME.

    For example, ``^=eth0,lo`` excludes exactly eth0 and lo.
    """
    body = value.removeprefix("^")
    names = [name for name in body.removeprefix("=").split(",") if name]
    return Selection(excludes=value.startswith("^"), is_exact=body.startswith("="), names=names)


def match_ports(value: str, ports: Iterable[Port]) -> tuple[Port, ...]:
    """Return the ports that a value of NCCL_IB_HCA selects.

    The format is ``[^][=]name[:port[:rail[:plane]]],...``, for example ``=mlx5_0:1,mlx5_1``. The fields for
    rail and plane have no effect on the selection. An empty value selects all ports.
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
    """Return whether a name of the selection, such as ``mlx5_0`` or ``mlx5_0:1``, matches `port`."""
    device, _, rest = name.partition(":")
    port_number, _, _ = rest.partition(":")
    return selection.has_name(port.device, device) and port_number in ("", str(port.number))


def ports_in_use(plan: FabricPlanBuilder) -> tuple[Port, ...]:
    """Return the ports that NCCL will use.

    If the user or the recipe sets NCCL_IB_HCA, its value selects the ports. Otherwise, `choose_ports` does.
    """
    # A value of the image does not count, because `set_hcas` replaces it.
    preset = plan.requested_preset(HCA)
    if preset is None:
        return choose_ports(plan).selected
    usable, _ = _split_by_state(plan.facts)
    return match_ports(preset.value, usable)


def set_hcas(plan: FabricPlanBuilder) -> tuple[Port, ...]:
    """Set NCCL_IB_HCA to the ports that NCCL should use, and return the ports that it will use.

    The result differs from the choice if the user or the recipe has set NCCL_IB_HCA. Unused ports are
    reported with the reason. The plan gets warnings about slow ports and devices that cannot be opened.
    """
    choice = choose_ports(plan)
    states = []
    for port in choice.selected:
        states.append(f"{port.path}: state {port.state}, {port.link_layer}, {port.rate or 'no rate'}")
    hca_list = format_hcas(choice.selected)
    plan.set_variable(HCA, hca_list, f"the ACTIVE ports of the fabric: {'; '.join(states)}")
    report_unused(plan, choice.unused)
    # `set_variable` keeps a value of the user or the recipe, which may select other ports than the choice.
    used = ports_in_use(plan)
    if not used:
        names = ", ".join(port.name for port in choice.selected)
        plan.add_warning(
            f"{HCA}={plan.worker_value(HCA)} selects no ACTIVE port of this machine (available: {names}): "
            "NCCL would use TCP",
            f"{plan.unset_hint(HCA)}, or set {HCA}={hca_list}",
        )
    _report_cards(plan, used)
    _warn_slow_ports(plan, used)
    _warn_closed_devices(plan, used)
    _warn_missing_libibverbs(plan, used)
    return used


def report_unused(plan: FabricPlanBuilder, unused: Iterable[UnusedPort]) -> None:
    """Report the ports that NCCL should not use, each with the reason."""
    for unused_port in unused:
        plan.add_decision(HCA, unused_port.port.name, f"left out: {unused_port.reason}")


def _find_device(facts: HostFacts, port: Port) -> RdmaDevice:
    """Return the device to which a port belongs."""
    return next(device for device in facts.rdma if device.name == port.device)


def _report_cards(plan: FabricPlanBuilder, used: Sequence[Port]) -> None:
    """Report which ports are virtual functions, and which ports NCCL merges into one NIC.

    A virtual function is a share of a physical card, for example for a virtual machine. NCCL merges all ports
    that belong to the same card.
    """
    # A card may appear as several devices, such as mlx5_0 and mlx5_1.
    ports_by_card: dict[str, list[Port]] = {}
    for port in used:
        device = _find_device(plan.facts, port)
        ports_by_card.setdefault(device.card, []).append(port)
        if _is_virtual_function(device):
            reason = f"{device.path}/device/physfn -> {device.physical}: a virtual function of that card"
            plan.add_decision(HCA, port.name, reason, used=True)
    for card, card_ports in ports_by_card.items():
        if len(card_ports) > 1:
            path = _find_device(plan.facts, card_ports[0]).path
            reason = f"one card ({path}/device: {card}): NCCL merges its ports into one NIC"
            plan.add_decision(HCA, ",".join(port.name for port in card_ports), reason, used=True)


def _is_virtual_function(device: RdmaDevice) -> bool:
    """Return whether a device is a virtual function, which is a share of a physical card."""
    return device.physical != ""  # the address of that card, or "" for a device that is a card itself


def _warn_slow_ports(plan: FabricPlanBuilder, used: Sequence[Port]) -> None:
    """Warn about ports that are slower than the fastest port, and about ports whose rate is unknown.

    A slower port usually has a bad cable, and it slows down every collective operation.
    """
    best = max((port.rate_Gbps or 0 for port in used), default=0)  # an unknown rate counts as 0
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
    """Warn about devices whose device file cannot be opened in this container."""
    for device in dict.fromkeys(_find_device(plan.facts, port) for port in used):
        if not device.verbs_opens:
            file = device.verbs or f"/dev/infiniband/uverbs* for {device.name}"
            problem = f"{device.path} exists, but {file} cannot be opened: NCCL would use TCP"
            plan.add_warning(problem, OPEN_FIX, failed_check="rdma devices")


def _warn_missing_libibverbs(plan: FabricPlanBuilder, used: Sequence[Port]) -> None:
    """Warn if the image lacks libibverbs or its driver for the devices in use.

    NCCL needs this library for RDMA. Its drivers are called providers, for example mlx5 for NVIDIA's NICs.
    """
    devices = [_find_device(plan.facts, port) for port in used]
    if not devices:  # without a usable port, NCCL does not need the library
        return
    fix = "add libibverbs1 and ibverbs-providers to the recipe's image.apt; --nv does not add them"
    if plan.facts.library("libibverbs.so.1") is None:
        problem = "libibverbs.so.1 is not on the library path: NCCL would use TCP"
        plan.add_warning(problem, fix, failed_check="libibverbs")
        return
    providers = plan.facts.verbs_providers
    # 0x15b3 is the PCI vendor of Mellanox (NVIDIA), whose NICs need the provider mlx5. For other vendors, any
    # provider is accepted, because imgkit does not know which one they need.
    needs_mlx5 = "0x15b3" in [device.vendor for device in devices]
    if not providers or (needs_mlx5 and "mlx5" not in providers):
        names = ", ".join(providers) or "none"
        problem = (
            f"libibverbs has no provider for {devices[0].name} (/etc/libibverbs.d, "
            f'libibverbs/lib*-rdmav*.so: {names}): NCCL would report "No device found"'
        )
        plan.add_warning(problem, fix, failed_check="libibverbs")


def line_rate_Gbps(facts: HostFacts, used: Sequence[Port]) -> float | None:
    """Return the total rate of the ports in Gbit/s, or None if the rate of any port is unknown.

    A virtual function is a share of a card. If the card itself is also in use, the virtual function does not
    count, because both share the card's rate.
    """
    devices = {port.name: _find_device(facts, port) for port in used}
    whole_cards = {device.card for device in devices.values() if not _is_virtual_function(device)}
    total_Gbps = 0.0
    for port in used:
        device = devices[port.name]
        if _is_virtual_function(device) and device.card in whole_cards:
            continue
        if port.rate_Gbps is None:
            return None
        total_Gbps += port.rate_Gbps
    return total_Gbps or None  # without ports, the rate is unknown and not 0


FINDS_GID: tuple[int, ...] = (2, 21)
"""First version of NCCL that finds the GID itself."""
GID_INDEX = "NCCL_IB_GID_INDEX"
GID_SEARCH = ("NCCL_IB_ADDR_FAMILY", "NCCL_IB_ADDR_RANGE", "NCCL_IB_ROCE_VERSION_NUM")
"""Variables that change how NCCL searches for the GID."""


def pick_gid(gids: Sequence[Gid]) -> Gid | None:
    """Return the GID that NCCL's own search would find, or None if the port has no IPv4 GID.

    The result is the first IPv4-mapped GID of type RoCE v2. If there is none, it is the first IPv4-mapped GID
    of any type. If no GID is IPv4-mapped, NCCL uses index 0. NCCL's own code is a different loop, and a test
    compares the results of both.
    """
    mapped = [gid for gid in gids if gid.ipv4]
    # False sorts before True, so GIDs of type RoCE v2 come first.
    return min(mapped, key=lambda gid: (gid.kind != "RoCE v2", gid.index), default=None)


def gid_evidence(port: Port, gid: Gid) -> str:
    """Return a text for messages that quotes one slot of a port's GID table.

    For example ``/sys/class/infiniband/mlx5_0/ports/1/gids/3: 0000:...:0a00:0001 (10.0.0.1), RoCE v2``.
    """
    return f"{port.path}/gids/{gid.index}: {gid.value} ({gid.ipv4 or 'no IPv4'}), {gid.kind or 'no type'}"


def set_gid_index(plan: FabricPlanBuilder, used: Sequence[Port]) -> None:
    """Set NCCL_IB_GID_INDEX for the RoCE ports in use, or report why it is not set.

    The value is the index of the address (GID) that NCCL uses on each port. It is set only for versions of
    NCCL below 2.21, because later versions find the right address themselves. A run on several nodes is
    blocked if a port has no IPv4 address. It is also blocked if NCCL is older than 2.21 and the ports need
    different indices, because NCCL has only one index for all ports.
    """
    # `pick_gid` below predicts NCCL's own search, but only with the search's default settings.
    search_variable = _find_gid_search_variable(plan)
    if search_variable:
        evidence = f"{search_variable}={plan.worker_value(search_variable)}"
        plan.leave_variable(GID_INDEX, f"{evidence} changes NCCL's search, so its result is not predicted")
        return
    gids: dict[str, Gid] = {}
    gid_texts: list[str] = []
    for port in used:
        gid = pick_gid(port.gids)
        if gid is None:
            _block_port_without_gid(plan, port)
        else:
            gids[port.name] = gid
            gid_texts.append(gid_evidence(port, gid))
    # If a port has no GID, no index is right for all ports. The loop above has reported such a port.
    if gids and len(gids) == len(used):
        _set_common_index(plan, gids, "; ".join(gid_texts))  # checks NCCL's version, too


def _find_gid_search_variable(plan: FabricPlanBuilder) -> str:
    """Return a variable that is set and changes NCCL's search for the GID, or "" if there is none.

    For example NCCL_IB_ADDR_FAMILY.
    """
    for variable in GID_SEARCH:
        if plan.preset(variable) is not None:
            return variable
    return ""


def _set_common_index(plan: FabricPlanBuilder, gids: Mapping[str, Gid], evidence: str) -> None:
    """Set NCCL_IB_GID_INDEX if NCCL needs it and one index is right for all ports, or report why not.

    NCCL 2.21 and later find the GID (the address for RDMA) themselves. Earlier versions have one index for
    all ports. If the ports need different indices, a run on several nodes is blocked.

    Parameters
    ----------
    gids : the GID that each port needs, by the port's name. Every port must have one.
    evidence : the files that show these GIDs, for messages.
    """
    facts = plan.facts
    index_by_port = ", ".join(f"{gid.index} on {name}" for name, gid in gids.items())
    indices = {gid.index for gid in gids.values()}
    common_index = str(indices.pop()) if len(indices) == 1 else ""
    nccl = f"NCCL {facts.nccl_version} ({facts.nccl_source})"
    # Four cases: NCCL's version is unknown, NCCL finds the GID itself, one index is right for all ports, or
    # none is.
    if facts.nccl is None:
        _leave_index_to_unknown_nccl(plan, index_by_port, evidence)
    elif facts.nccl >= FINDS_GID:
        reason = f"{nccl} finds {index_by_port} itself: {evidence}"
        plan.drop_image_variable(GID_INDEX, reason)
        plan.leave_variable(GID_INDEX, reason, right_value=common_index or index_by_port)
    elif common_index:
        reason = f"{nccl} uses index 0 by default (2.21 and later search): {evidence}"
        plan.set_variable(GID_INDEX, common_index, reason)
    else:
        _block_different_indices(plan, gids, index_by_port, evidence)


def _leave_index_to_unknown_nccl(plan: FabricPlanBuilder, index_by_port: str, evidence: str) -> None:
    """Leave NCCL_IB_GID_INDEX as it is, because NCCL's version is unknown. Warn if the variable is not set.

    Parameters
    ----------
    index_by_port : the right index for each port, for messages: ``3 on mlx5_0:1, 3 on mlx5_1:1``.
    evidence : the files that show these indices, for messages.
    """
    reason = f"NCCL's version is unknown; 2.21 and later find this themselves: {evidence}"
    plan.leave_variable(GID_INDEX, reason, right_value=index_by_port)
    if plan.preset(GID_INDEX) is None:
        plan.add_warning(
            f"the image's NCCL version is unknown. Below 2.21, RoCE needs {GID_INDEX} ({index_by_port})",
            "set the version, for example IMGKIT_NCCL_VERSION=2.20.5",
        )


def _block_different_indices(
    plan: FabricPlanBuilder, gids: Mapping[str, Gid], index_by_port: str, evidence: str
) -> None:
    """Block a run on several nodes, because no value of NCCL_IB_GID_INDEX is right for all of its ports.

    If the user or the recipe has set the variable deliberately, the run is not blocked.

    Parameters
    ----------
    gids : the GID that each port needs, by the port's name.
    index_by_port, evidence : the right index for each port, and the files that show them, for messages.
    """
    problem = "the NICs need different indices"
    # Drop the image's index first, so that the rest only sees a value of the user or the recipe.
    plan.drop_image_variable(GID_INDEX, f"{problem} ({index_by_port}): {evidence}")
    reason = f"{problem}, so none is set: {evidence}"
    plan.leave_variable(GID_INDEX, reason, right_value=index_by_port)
    if plan.preset(GID_INDEX) is not None:  # a deliberate choice
        return
    first_port = next(iter(gids))
    plan.add_blocker(
        f"NCCL {plan.facts.nccl_version} has one {GID_INDEX} for all NICs, but they need different "
        f"ones ({index_by_port})",
        f"use an image with NCCL 2.21 or later, or one NIC: {HCA}=={first_port}",
    )


def _block_port_without_gid(plan: FabricPlanBuilder, port: Port) -> None:
    """Block a run on several nodes because a port has no IPv4 GID, which is the address that RoCE needs.

    If NCCL_IB_GID_INDEX is already set, the user or the recipe has chosen an address deliberately, so the run
    is not blocked.
    """
    slots = ", ".join(f"{gid.index}: {gid.value} {gid.kind}".strip() for gid in port.gids) or "all empty"
    netdev = next((gid.netdev for gid in port.gids if gid.netdev), "its interface")
    reason = f"{port.name} has no IPv4 GID, so NCCL uses index 0; {port.path}/gids: {slots}"
    # Drop the image's index first, so that the rest only sees a value of the user or the recipe.
    plan.drop_image_variable(GID_INDEX, reason)
    plan.leave_variable(GID_INDEX, reason)
    if plan.preset(GID_INDEX) is not None:  # a deliberate choice
        return
    plan.add_blocker(
        f"{port.name} has no IPv4 GID because {netdev} has no IPv4 address ({port.path}/gids: {slots})",
        f"give {netdev} an address (in a pod: add the RoCE network's annotation), or use TCP: "
        "NCCL_IB_DISABLE=1",
    )

"""The RDMA ports that NCCL should use (NCCL_IB_HCA), and the GID of a RoCE port (NCCL_IB_GID_INDEX).

NCCL 2.21 and later find the GID themselves (net_ib/connect.cc: NCCL_IB_ADDR_FAMILY,
NCCL_IB_ROCE_VERSION_NUM), and their guide advises against NCCL_IB_GID_INDEX. Earlier versions use index
0, which is link-local.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from imgkit_entrypoints.fabric.fabric_plan import Decision, PlanDraft
from imgkit_entrypoints.facts import Gid, HostFacts, Port, RdmaDevice

HCA = "NCCL_IB_HCA"
_STATES = {
    "1: DOWN": "no link: check the cable, the switch, and whether the interface is up",
    "2: INIT": "no subnet manager has configured it",
    "3: ARMED": "the subnet manager has not activated it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusedPort:
    """A port that is not used, and the reason."""

    port: Port
    reason: str


def pairs(facts: HostFacts) -> tuple[tuple[RdmaDevice, Port], ...]:
    """Every port with its device."""
    return tuple((device, port) for device in facts.rdma for port in device.ports)


def choose(facts: HostFacts, nics: int | None = None) -> tuple[tuple[Port, ...], tuple[UnusedPort, ...]]:
    """Ports to use, and the other ports with their reasons.

    NCCL itself uses every ACTIVE port, including storage and management NICs, and refuses to mix InfiniBand
    with RoCE. The rule: if one port is InfiniBand, no Ethernet port is used. Among RoCE ports, those with an
    IPv4 RoCE v2 GID are used, and among these the ones nearest to a GPU. Distance does not count if
    fewer ports than the recipe's `nics` would remain.
    """
    left: list[UnusedPort] = []
    active: list[tuple[RdmaDevice, Port]] = []
    for device, port in pairs(facts):
        reason = _unusable(port)
        if reason:
            left.append(UnusedPort(port=port, reason=reason))
        else:
            active.append((device, port))
    infiniband = [port for _, port in active if port.link_layer == "InfiniBand"]
    if infiniband:
        first = infiniband[0]
        other = f"an Ethernet port, but {first.path}/link_layer is {first.link_layer}"
        left.extend(
            UnusedPort(port=port, reason=f"{other}: NCCL cannot mix InfiniBand and Ethernet")
            for _, port in active
            if port not in infiniband
        )
        return tuple(infiniband), tuple(left)
    active, dropped = _addressed(active)
    left.extend(dropped)
    near, dropped = _near(facts, active)
    if len(near) >= (nics or 0):
        active = near
        left.extend(dropped)
    return tuple(port for _, port in active), tuple(left)


def _unusable(port: Port) -> str:
    if port.link_layer not in ("InfiniBand", "Ethernet"):
        return (
            f"{port.path}/link_layer: {port.link_layer}: NCCL cannot use it through verbs (EFA "
            "needs the aws-ofi-nccl plugin)"
        )
    if not port.active:
        known = _STATES.get(port.state, "not active")
        return f"{port.path}/state: {port.state}, phys_state: {port.phys_state}: {known}"
    return ""


_Split = tuple[list[tuple[RdmaDevice, Port]], list[UnusedPort]]


def _addressed(ports: Sequence[tuple[RdmaDevice, Port]]) -> _Split:
    """Keep the ports with an IPv4 RoCE v2 GID, if there are any."""

    def good(port: Port) -> bool:
        found = pick_gid(port.gids)
        return found is not None and found.kind == "RoCE v2"

    if not any(good(port) for _, port in ports):
        return list(ports), []
    kept = [(device, port) for device, port in ports if good(port)]
    return kept, [
        UnusedPort(
            port=port, reason=f"{port.path}/gids: no IPv4 GID of type RoCE v2, but other ports have one"
        )
        for _, port in ports
        if not good(port)
    ]


def _near(facts: HostFacts, ports: Sequence[tuple[RdmaDevice, Port]]) -> _Split:
    """Keep the ports nearest to a GPU; all ports, if a distance is unknown."""
    distances = [distance(facts, device) for device, _ in ports]
    known = [item for item in distances if item is not None]
    if len(known) < len(ports) or not known or min(known) == max(known):
        return list(ports), []
    best = min(known)
    kept, left = [], []
    for (device, port), found in zip(ports, distances, strict=True):
        if found == best:
            kept.append((device, port))
            continue
        where = f"{device.path}/device -> {device.pci}, numa_node {device.numa_node}"
        reason = f"no GPU is {_NEARNESS[best]}, unlike other ports ({where}): a storage or management NIC"
        left.append(UnusedPort(port=port, reason=reason))
    return kept, left


_NEARNESS = ("under its PCI switch", "on its NUMA node", "near it")


def distance(facts: HostFacts, device: RdmaDevice) -> int | None:
    """0: a GPU is under the same PCI switch; 1: on the same NUMA node; 2: neither; None: unknown."""
    gpus = facts.gpu_devices
    if not gpus or not (device.pci or device.numa_node is not None):
        return None
    if any(gpu.pci and _shared_bridges(gpu.pci, device.pci) >= 2 for gpu in gpus):
        return 0
    if device.numa_node is None or all(gpu.numa_node is None for gpu in gpus):
        return None
    return 1 if any(gpu.numa_node == device.numa_node for gpu in gpus) else 2


def _shared_bridges(one: str, other: str) -> int:
    """Number of leading parts that two PCI paths share; 1 means only the root complex."""
    count = 0
    for left, right in zip(one.split("/"), other.split("/"), strict=False):
        if left != right:
            break
        count += 1
    return count


def spell(ports: Iterable[Port]) -> str:
    """Ports as a value of NCCL_IB_HCA; ``=`` makes names exact, because mlx5_1 also selects mlx5_10."""
    return "=" + ",".join(port.name for port in ports)


def matching(text: str, ports: Iterable[Port]) -> tuple[Port, ...]:
    """Ports that a value of NCCL_IB_HCA selects (``[^][=]name[:port[:rail[:plane]]],...``)."""
    exclude = text.startswith("^")
    body = text.removeprefix("^")
    exact = body.startswith("=")
    words = [word.split(":") for word in body.removeprefix("=").split(",") if word]

    def selected(port: Port) -> bool:
        for name, *rest in words:
            same = port.device == name if exact else port.device.startswith(name)
            if same and (not rest or not rest[0] or rest[0] == str(port.number)):
                return True
        return False

    return tuple(port for port in ports if not words or selected(port) != exclude)


def in_use(draft: PlanDraft) -> tuple[Port, ...]:
    """Ports that NCCL will use, by the rule or by an existing value of NCCL_IB_HCA."""
    chosen, _ = choose(draft.facts, draft.nics)
    known = draft.request(HCA)
    if known is None:
        return chosen
    usable = [port for _, port in pairs(draft.facts) if not _unusable(port)]
    return matching(known.value, usable)


def decide(draft: PlanDraft) -> tuple[Port, ...]:
    """Decide NCCL_IB_HCA and report the other ports; returns the ports that NCCL will use."""
    chosen, left = choose(draft.facts, draft.nics)
    shown = "; ".join(
        f"{port.path}: state {port.state}, {port.link_layer}, {port.rate or 'no rate'}" for port in chosen
    )
    draft.set(HCA, spell(chosen), f"the ACTIVE ports of the fabric: {shown}")
    report_left(draft, left)
    used = in_use(draft)
    if not used:
        usable = ", ".join(port.name for port in chosen)
        draft.warn(
            f"{HCA}={draft.value(HCA)} selects no ACTIVE port of this machine (available: "
            f"{usable}): NCCL would use TCP",
            f"{draft.unsetting(HCA)}, or set {HCA}={spell(chosen)}",
        )
    _cards(draft, used)
    _rates(draft, used)
    _openable(draft, used)
    return used


def report_left(draft: PlanDraft, left: Iterable[UnusedPort]) -> None:
    """Report the ports that are not used."""
    for item in left:
        draft.decisions.append(
            Decision(variable=HCA, value=item.port.name, reason=f"left out: {item.reason}", used=False)
        )


def _device(facts: HostFacts, port: Port) -> RdmaDevice:
    return next(device for device in facts.rdma if device.name == port.device)


def _cards(draft: PlanDraft, used: Sequence[Port]) -> None:
    """Report ports that NCCL merges into one NIC, and virtual functions."""
    cards: dict[str, list[Port]] = {}
    for port in used:
        device = _device(draft.facts, port)
        cards.setdefault(device.card, []).append(port)
        if device.physical:
            reason = f"{device.path}/device/physfn -> {device.physical}: a virtual function of that card"
            draft.decisions.append(Decision(variable=HCA, value=port.name, reason=reason))
    for card, ports in cards.items():
        if len(ports) > 1:
            names = ",".join(port.name for port in ports)
            path = _device(draft.facts, ports[0]).path
            reason = f"one card ({path}/device: {card}): NCCL merges its ports into one NIC"
            draft.decisions.append(Decision(variable=HCA, value=names, reason=reason))


def _rates(draft: PlanDraft, used: Sequence[Port]) -> None:
    known = [port.rate_Gbps for port in used if port.rate_Gbps is not None]
    for port in used:
        rate = port.rate_Gbps
        if rate is None:
            draft.warn(
                f"{port.name}: rate unknown ({port.path}/rate: {port.rate}; a kernel prints SDR for a speed "
                "that it does not know)",
                f"ask the driver instead: ibstat {port.device}, mlxlink -d {port.device}",
            )
        elif rate < max(known):
            draft.warn(
                f"{port.name} is degraded: {port.path}/rate: {port.rate}, its siblings have {max(known):g} "
                "Gb/sec",
                f"check the cable, and report the node to the site with the output of: ibstat {port.device}",
            )


def _openable(draft: PlanDraft, used: Sequence[Port]) -> None:
    """Warn about a device of sysfs that this container cannot open, or that no library supports."""
    fix = "docker: --device /dev/infiniband; Kubernetes: rdma/rdma=1; Singularity: no --contain"
    for device in dict.fromkeys(_device(draft.facts, port) for port in used):
        if not device.verbs_opens:
            place = device.verbs or f"/dev/infiniband/uverbs* for {device.name}"
            draft.warn(f"{device.path} exists, but {place} cannot be opened: NCCL would use TCP", fix)
    if used and draft.facts.library("libibverbs.so.1") is None:
        draft.warn(
            "libibverbs.so.1 is not on the library path: NCCL would use TCP",
            "add the packages libibverbs1 and ibverbs-providers to the recipe's image.apt",
        )
    elif used and not draft.facts.verbs_providers:
        draft.warn(
            "libibverbs has no provider (/etc/libibverbs.d, libibverbs/lib*-rdmav*.so): NCCL would "
            'report "No device found"',
            "add the package ibverbs-providers to the recipe's image.apt",
        )


def line_rate_Gbps(facts: HostFacts, used: Sequence[Port]) -> float | None:
    """Rate of all ports together, in 1e9 bit/s; a virtual function does not add to its own card."""
    full = {_device(facts, port).card for port in used if not _device(facts, port).physical}
    counted = [
        port for port in used if not (_device(facts, port).physical and _device(facts, port).card in full)
    ]
    rates = [port.rate_Gbps for port in counted]
    return sum(rate for rate in rates if rate is not None) if rates and None not in rates else None


FINDS_GID: tuple[int, ...] = (2, 21)
"""First version of NCCL that finds the GID itself."""
GID_INDEX = "NCCL_IB_GID_INDEX"
GID_SEARCH = ("NCCL_IB_ADDR_FAMILY", "NCCL_IB_ADDR_RANGE", "NCCL_IB_ROCE_VERSION_NUM")
"""Variables with which a user changes NCCL's search."""


def pick_gid(gids: Sequence[Gid]) -> Gid | None:
    """GID that NCCL's search finds; None if there is no IPv4 GID and the search stays at index 0.

    The result is the first IPv4-mapped GID of type RoCE v2, else the first IPv4-mapped one. NCCL's own loop
    looks different; a test compares both.
    """
    mapped = sorted((gid for gid in gids if gid.ipv4), key=lambda gid: gid.index)
    return next((gid for gid in mapped if gid.kind == "RoCE v2"), mapped[0] if mapped else None)


def gid_evidence(port: Port, gid: Gid) -> str:
    """Slot of /sys with its content."""
    return f"{port.path}/gids/{gid.index}: {gid.value} ({gid.ipv4 or 'no IPv4'}), {gid.kind or 'no type'}"


def decide_gid(draft: PlanDraft, ports: Sequence[Port]) -> None:
    """Decide the GID index for these RoCE ports; it is set only for a version of NCCL that needs it."""
    asked = next((name for name in GID_SEARCH if draft.given(name)), None)
    if asked:
        draft.note(
            GID_INDEX,
            "",
            f"{asked}={draft.value(asked)} changes NCCL's search, so its result is not predicted",
        )
        return
    picked = [(port, pick_gid(port.gids)) for port in ports]
    bare = [port for port, gid in picked if gid is None]
    for port in bare:
        _without_ipv4_gid(draft, port)
    found = [(port, gid) for port, gid in picked if gid is not None]
    if not found or bare:
        return
    shown = "; ".join(gid_evidence(port, gid) for port, gid in found)
    indices = {gid.index for _, gid in found}
    text = ", ".join(f"{gid.index} on {port.name}" for port, gid in found)
    version = draft.facts.nccl
    named = f"{draft.facts.nccl_version} ({draft.facts.nccl_source})"
    if version is not None and version >= FINDS_GID:
        draft.refuse_image(GID_INDEX, f"NCCL {named} finds {text} itself: {shown}")
        value = str(found[0][1].index) if len(indices) == 1 else text
        draft.note(GID_INDEX, value, f"NCCL {named} finds {text} itself: {shown}")
    elif version is None:
        draft.note(
            GID_INDEX, text, f"NCCL's version is unknown; 2.21 and later find this themselves: {shown}"
        )
        if draft.given(GID_INDEX) is None:
            draft.warn(
                f"the image's NCCL version is unknown. Below 2.21, RoCE needs {GID_INDEX} ({text})",
                "set the version, for example IMGKIT_NCCL_VERSION=2.20.5",
            )
    elif len(indices) == 1:
        reason = f"NCCL {named} uses index 0 by default (2.21 and later search): {shown}"
        draft.set(GID_INDEX, str(indices.pop()), reason)
    else:
        _differing_gids(draft, found[0][0], text, shown)


def _without_ipv4_gid(draft: PlanDraft, port: Port) -> None:
    slots = ", ".join(f"{gid.index}: {gid.value} {gid.kind}".strip() for gid in port.gids) or "all empty"
    netdev = next((gid.netdev for gid in port.gids if gid.netdev), "its interface")
    reason = f"{port.name} has no IPv4 GID, so NCCL uses index 0; {port.path}/gids: {slots}"
    draft.refuse_image(GID_INDEX, reason)
    draft.note(GID_INDEX, "", reason)
    if draft.given(GID_INDEX) is None:
        draft.block(
            f"{port.name} has no IPv4 GID because {netdev} has no IPv4 address ({port.path}/gids: {slots})",
            f"give {netdev} an address (in a pod: add the RoCE network's annotation), or use TCP: "
            "NCCL_IB_DISABLE=1",
        )


def _differing_gids(draft: PlanDraft, first: Port, text: str, shown: str) -> None:
    version = draft.facts.nccl_version
    draft.refuse_image(GID_INDEX, f"the NICs need different indices ({text}): {shown}")
    draft.note(GID_INDEX, text, f"the NICs need different indices, so none is set: {shown}")
    if draft.given(GID_INDEX) is None:
        draft.block(
            f"NCCL {version} has one {GID_INDEX} for all NICs, but they need different ones ({text})",
            f"use an image with NCCL 2.21 or later, or one NIC: NCCL_IB_HCA=={first.name}",
        )

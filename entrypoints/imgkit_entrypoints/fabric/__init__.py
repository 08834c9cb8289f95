"""The network variables of a machine: one function per fabric decides them from the facts.

This room reads no file: `choose` is a pure function of facts, recipe and environment.
"""

from __future__ import annotations

from collections.abc import Mapping

from imgkit_entrypoints.fabric import library_path, lint, plugin, ports, slingshot, sockets
from imgkit_entrypoints.fabric.fabric_plan import Decision, FabricPlan, Finding, PlanDraft, draft_for
from imgkit_entrypoints.facts import HostFacts, Interface, Port
from imgkit_entrypoints.system import PARTITION, FabricKind, SystemFacts

UNKNOWN_IMAGE = "/opt/imgkit/manifest.json states no variables of an image, so they count as set by the user"

__all__ = ["Decision", "FabricPlan", "Finding", "choose"]


def choose(
    facts: HostFacts,
    system: SystemFacts | None,
    env: Mapping[str, str],
    *,
    nnodes: int = 1,
    head: str = "",
) -> FabricPlan:
    """Decide the network variables of this node; variables of the user are kept and reported.

    Those that the image brings are replaced where the facts say otherwise.

    Parameters
    ----------
    nnodes : nodes of the run; some settings are only right between nodes.
    head : address of node 0, empty if unknown; an interface in its network is preferred.
    """
    draft = draft_for(facts, system, env, nnodes=nnodes, head=head)
    sockets.of_partition(draft, system, env.get(PARTITION, ""))
    kind, reason, asked = _kind(draft)
    library_path.decide(draft, kind)
    plugin.decide(draft, kind)
    devices, rate = _FABRICS[kind](draft, system)
    if not asked:
        _expect(draft, system, kind, reason, rate)
    draft.rest()
    return FabricPlan(
        kind=kind,
        reason=reason,
        env=dict(draft.chosen),
        decisions=tuple(draft.decisions),
        unset=tuple(dict.fromkeys(name for name in draft.unset if name not in draft.chosen)),
        warnings=(*draft.warnings, *lint.check(draft, kind)),
        blockers=tuple(draft.blockers),
        devices=devices,
        line_rate_Gbps=rate,
        links=dict(draft.links),
        image=UNKNOWN_IMAGE if facts.image_env is None else "",
    )


_Carriers = tuple[tuple[str, ...], float | None]


def infiniband(draft: PlanDraft, system: SystemFacts | None) -> _Carriers:
    """Decide for InfiniBand: exact ports; no GID index, because it routes by LID."""
    used = ports.decide(draft)
    lids = "; ".join(f"{port.path}/lid: {port.lid or 'none'}" for port in used)
    draft.refuse_image(ports.GID_INDEX, f"InfiniBand routes by LID ({lids})")
    draft.note(
        ports.GID_INDEX, "", f"InfiniBand routes by LID; NCCL 2.22.3 and later ignore the variable ({lids})"
    )
    own = [item.name for item in sockets.usable(draft.facts) if item.name.startswith("ib")]
    sockets.decide(draft, prefer=own)
    return _rdma(draft, used, "InfiniBand")


def roce(draft: PlanDraft, system: SystemFacts | None) -> _Carriers:
    """Decide for RDMA over Ethernet: exact ports, and the GID index if NCCL does not find it itself."""
    used = ports.decide(draft)
    ports.decide_gid(draft, used)
    sockets.decide(draft)
    return _rdma(draft, used, "RoCE")


def _rdma(draft: PlanDraft, used: tuple[Port, ...], kind: str) -> _Carriers:
    sockets.refuse_threads(draft, kind)
    if used:
        shown = ", ".join(f"{port.path}/state: {port.state}" for port in used)
        draft.refuse_image("NCCL_IB_DISABLE", f"the fabric's ports are there ({shown})")
        if _other_net(draft, ("ib", "ibext", "ucx", "spcx")):
            draft.refuse_image("NCCL_NET", f"{kind} needs no other network ({shown})")
    return tuple(port.name for port in used), ports.line_rate_Gbps(draft.facts, used)


def _other_net(draft: PlanDraft, right: tuple[str, ...]) -> bool:
    """Whether the image pins a network of NCCL that is none of the `right` ones."""
    known = draft.from_image("NCCL_NET")
    return known is not None and known.value.partition("_v")[0].lower() not in right


def slingshot_11(draft: PlanDraft, system: SystemFacts | None) -> _Carriers:
    """Decide for Slingshot: the plugin's settings, the bootstrap interfaces, and the guard for GH200."""
    cxi = draft.facts.cxi
    slingshot.settings(draft)
    slingshot.provider(draft)
    slingshot.net(draft)
    slingshot.guard(draft, system.node.gpu_model if system else "")
    hsn = _hsn(draft.facts)
    if hsn:
        shown = "; ".join(f"/sys/class/net/{item.name}/operstate: {item.state}" for item in hsn)
        sockets.refuse_absent(draft)
        if draft.several:
            reason = f"NCCL's bootstrap uses the fabric's interfaces: {shown}"
            draft.set(sockets.NCCL, sockets.spell([item.name for item in hsn], draft.facts), reason)
            draft.set(sockets.GLOO, hsn[0].name, f"Gloo uses only one interface: {shown}")
    else:
        sockets.decide(draft)
    sockets.refuse_threads(draft, "Slingshot")
    rates = [(item.speed_Mbps or slingshot.NIC_Gbps * 1000) / 1000 for item in hsn]
    down = [item for item in draft.facts.interfaces if item.name.startswith("hsn") and not item.running]
    for item in down:
        draft.warn(
            f"{item.name} is down (/sys/class/net/{item.name}/operstate: {item.state}): its NIC carries no "
            "traffic",
            f"report the node to the site with the output of: ip link show {item.name}",
        )
    # A container with a network of its own shows no hsn interface, but its NICs work.
    rate = sum(rates) if len(rates) + len(down) == len(cxi) else slingshot.NIC_Gbps * len(cxi)
    return tuple(device.name for device in cxi), rate


def _hsn(facts: HostFacts) -> tuple[Interface, ...]:
    running = tuple(item for item in facts.interfaces if item.name.startswith("hsn") and item.running)
    return tuple(item for item in running if item.addresses) or running


def tcp(draft: PlanDraft, system: SystemFacts | None) -> _Carriers:
    """Decide for TCP sockets: which interface NCCL uses, and that it does not look for RDMA devices."""
    idle, left = ports.choose(draft.facts, draft.nics)
    ports.report_left(draft, left)
    plugin_only = [
        device
        for device in draft.facts.rdma
        if not any(port.link_layer in ("InfiniBand", "Ethernet") for port in device.ports)
    ]
    if idle:
        there = ", ".join(port.path for port in idle)
        draft.set("NCCL_IB_DISABLE", "1", f"TCP is requested, so these ports stay unused: {there}")
    elif plugin_only:
        first = plugin_only[0]
        draft.warn(
            f"{first.name} is an EFA device ({first.path}/node_type: {first.node_type}): NCCL needs the "
            "aws-ofi-nccl plugin for it, and otherwise uses TCP",
            "put the folder of libnccl-net.so on LD_LIBRARY_PATH",
        )
    elif not draft.facts.rdma:
        draft.set("NCCL_IB_DISABLE", "1", "/sys/class/infiniband: no device, so NCCL need not look for one")
    else:
        there = ", ".join(device.path for device in draft.facts.rdma)
        draft.set("NCCL_IB_DISABLE", "1", f"no usable RDMA port ({there}), so NCCL must not try one")
    if not plugin_only and _other_net(draft, ("socket",)):
        draft.refuse_image("NCCL_NET", "the data uses TCP (/sys/class/infiniband, /sys/class/cxi)")
    # Sockets run over the fabric's interfaces as well, and faster than over the one with the default route.
    own = [item.name for item in sockets.usable(draft.facts) if item.name.startswith(("hsn", "ib"))]
    item = sockets.decide(draft, prefer=own)
    sockets.threads(draft, item)
    rate = item.speed_Mbps / 1000 if item and item.speed_Mbps else None
    return (item.name,) if item else (), rate


_FABRICS = {"infiniband": infiniband, "roce": roce, "slingshot": slingshot_11, "tcp": tcp}


def _kind(draft: PlanDraft) -> tuple[FabricKind, str, bool]:
    """Fabric, reason, and whether TCP was requested; else cxi, then active RDMA ports, then TCP."""
    net = draft.request("NCCL_NET")
    if net is not None and net.value.lower() == "socket":
        return "tcp", f"NCCL_NET={net.value} ({net.origin})", True
    if draft.facts.cxi:
        return "slingshot", f"Slingshot NICs: {slingshot.nics(draft.facts)}", False
    off = draft.request("NCCL_IB_DISABLE")
    if off is not None and off.value.strip() not in ("", "0"):
        return "tcp", f"NCCL_IB_DISABLE={off.value} ({off.origin})", True
    used = ports.in_use(draft) or ports.choose(draft.facts, draft.nics)[0]
    if used:
        shown = "; ".join(f"{port.path}/link_layer: {port.link_layer}" for port in used)
        return ("infiniband" if used[0].link_layer == "InfiniBand" else "roce"), shown, False
    if draft.facts.rdma:
        names = ", ".join(device.name for device in draft.facts.rdma)
        return "tcp", f"/sys/class/infiniband: {names}, but no port that NCCL can use", False
    return "tcp", "/sys/class/infiniband and /sys/class/cxi: no device", False


def _expect(
    draft: PlanDraft, system: SystemFacts | None, kind: FabricKind, reason: str, rate: float | None
) -> None:
    """Compare the fabric with the recipe's system."""
    if system is None or system.fabric.kind == "tcp":
        return
    wanted = system.fabric
    if kind != wanted.kind:
        text = f"the recipe says {wanted.kind}, but this machine has {kind} ({reason})"
        if kind == "tcp" and draft.several and draft.facts.gpus:
            # One such node makes NCCL fail or hang: it uses TCP, the others do not.
            draft.block(text, "repair the node, or use TCP on all nodes: NCCL_IB_DISABLE=1")
        else:
            fix = (
                "correct system.fabric.kind in the recipe, or repair what /sys/class/infiniband and cxi lack"
            )
            draft.warn(text, fix)
        return
    if rate is not None and wanted.line_rate_Gbps and rate < wanted.line_rate_Gbps:
        lacking = ", ".join(item.value for item in draft.decisions if not item.used and ":" in item.value)
        used = ", ".join(f"{port.name} {port.rate}" for port in ports.in_use(draft)) or "no RDMA port"
        draft.warn(
            f"this node has {rate:g} of its {wanted.line_rate_Gbps} Gbit/s: {used}"
            + (f"; left out: {lacking}" if lacking else ""),
            "report the node to the site with the output of ibstat",
        )

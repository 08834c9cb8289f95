"""From what the machine shows to the variables of its network: one function per fabric.

Nothing here reads anything: `choose` is a pure function of facts, recipe and environment.
"""

from __future__ import annotations

from collections.abc import Mapping

from imgkit_entrypoints.fabric import gid, lint, ports, slingshot, sockets
from imgkit_entrypoints.fabric.fabric_plan import Decision, FabricPlan
from imgkit_entrypoints.fabric.precedence import PlanDraft, draft_for
from imgkit_entrypoints.facts import HostFacts, Interface, Port
from imgkit_entrypoints.system import FabricKind, SystemFacts

__all__ = ["Decision", "FabricPlan", "choose"]


def choose(
    facts: HostFacts,
    system: SystemFacts | None,
    env: Mapping[str, str],
    *,
    nnodes: int = 1,
    head: str = "",
) -> FabricPlan:
    """Decide the network variables of this node; what the user has set is kept and shown.

    Parameters
    ----------
    nnodes : nodes of the run; some settings are right between nodes only.
    head : address of node 0 where it is known; an interface in its network is preferred.
    """
    draft = draft_for(facts, system, env, nnodes=nnodes, head=head)
    kind, reason, asked = _kind(draft)
    devices, rate = _FABRICS[kind](draft, system)
    if not asked:
        _expect(draft, system, kind, reason, rate)
    draft.rest()
    return FabricPlan(
        kind=kind,
        reason=reason,
        env=dict(draft.chosen),
        decisions=tuple(draft.decisions),
        unset=tuple(draft.unset),
        warnings=(*draft.warnings, *lint.check(draft, kind)),
        blockers=tuple(draft.blockers),
        devices=devices,
        line_rate_Gbps=rate,
    )


_Carriers = tuple[tuple[str, ...], float | None]


def infiniband(draft: PlanDraft, system: SystemFacts | None) -> _Carriers:
    """InfiniBand: exact ports; the GID index is left alone, since it routes by LID."""
    used = ports.decide(draft)
    lids = "; ".join(f"{port.path}/lid: {port.lid or 'none'}" for port in used)
    draft.note(gid.VARIABLE, "", f"InfiniBand routes by LID, NCCL >= 2.22.3 does not read it here ({lids})")
    own = [item.name for item in sockets.usable(draft.facts) if item.name.startswith("ib")]
    sockets.decide(draft, prefer=own)
    return _rdma(draft, used, "InfiniBand")


def roce(draft: PlanDraft, system: SystemFacts | None) -> _Carriers:
    """RDMA over Ethernet: exact ports, and the GID index for an NCCL that does not find it itself."""
    used = ports.decide(draft)
    gid.decide(draft, used)
    sockets.decide(draft)
    return _rdma(draft, used, "RoCE")


def _rdma(draft: PlanDraft, used: tuple[Port, ...], kind: str) -> _Carriers:
    sockets.refuse_threads(draft, kind)
    return tuple(port.name for port in used), ports.line_rate_Gbps(draft.facts, used)


def slingshot_11(draft: PlanDraft, system: SystemFacts | None) -> _Carriers:
    """Slingshot: the plugin's settings, its bootstrap interfaces, and the guard for GH200."""
    cxi = draft.facts.cxi
    slingshot.settings(draft)
    slingshot.net(draft)
    slingshot.guard(draft, system.node.gpu_model if system else "")
    hsn = _hsn(draft.facts)
    if hsn:
        shown = "; ".join(f"/sys/class/net/{item.name}/operstate: {item.state}" for item in hsn)
        sockets.refuse_absent(draft)
        if draft.several:
            reason = f"the fabric's own interfaces, for the bootstrap: {shown}"
            draft.set(sockets.NCCL, sockets.spell([item.name for item in hsn], draft.facts), reason)
            draft.set(sockets.GLOO, hsn[0].name, f"Gloo takes one: {shown}")
    else:
        sockets.decide(draft)
    sockets.refuse_threads(draft, "Slingshot")
    rates = [(item.speed_Mbps or slingshot.NIC_Gbps * 1000) / 1000 for item in hsn]
    down = [item for item in draft.facts.interfaces if item.name.startswith("hsn") and not item.running]
    for item in down:
        draft.warnings.append(
            f"{item.name} is down (/sys/class/net/{item.name}/operstate: {item.state}): its NIC carries "
            "nothing; tell the site"
        )
    # A container of its own network shows no hsn interface, and its NICs work all the same.
    rate = sum(rates) if len(rates) + len(down) == len(cxi) else slingshot.NIC_Gbps * len(cxi)
    return tuple(device.name for device in cxi), rate


def _hsn(facts: HostFacts) -> tuple[Interface, ...]:
    running = tuple(item for item in facts.interfaces if item.name.startswith("hsn") and item.running)
    return tuple(item for item in running if item.addresses) or running


def tcp(draft: PlanDraft, system: SystemFacts | None) -> _Carriers:
    """Plain sockets: NCCL is told not to look for verbs, and which interface to use."""
    idle, left = ports.choose(draft.facts, draft.nics)
    ports.report_left(draft, left)
    plugin_only = [
        device
        for device in draft.facts.rdma
        if not any(port.link_layer in ("InfiniBand", "Ethernet") for port in device.ports)
    ]
    if idle:
        there = ", ".join(port.path for port in idle)
        draft.set("NCCL_IB_DISABLE", "1", f"TCP is asked for, so these stay unused: {there}")
    elif plugin_only:
        first = plugin_only[0]
        draft.warnings.append(
            f"{first.name} is an EFA device ({first.path}/node_type: {first.node_type}): NCCL reaches it "
            "only by the aws-ofi-nccl plugin (libnccl-net.so on LD_LIBRARY_PATH); without it, TCP"
        )
    elif not draft.facts.rdma:
        draft.set("NCCL_IB_DISABLE", "1", "/sys/class/infiniband: no device, so none is to be looked for")
    else:
        there = ", ".join(device.path for device in draft.facts.rdma)
        draft.set("NCCL_IB_DISABLE", "1", f"no usable RDMA port ({there}), so NCCL shall not try one")
    # The fabric's own interfaces carry sockets as well, and faster than the one with the default route.
    own = [item.name for item in sockets.usable(draft.facts) if item.name.startswith(("hsn", "ib"))]
    item = sockets.decide(draft, prefer=own)
    sockets.threads(draft, item)
    rate = item.speed_Mbps / 1000 if item and item.speed_Mbps else None
    return (item.name,) if item else (), rate


_FABRICS = {"infiniband": infiniband, "roce": roce, "slingshot": slingshot_11, "tcp": tcp}


def _kind(draft: PlanDraft) -> tuple[FabricKind, str, bool]:
    """The fabric, why, and if it was asked for: TCP then; else cxi, then active RDMA ports, then TCP."""
    net = draft.given("NCCL_NET")
    if net is not None and net.value.lower() == "socket":
        return "tcp", f"NCCL_NET={net.value} ({net.origin})", True
    if draft.facts.cxi:
        return "slingshot", f"Slingshot NICs: {slingshot.nics(draft.facts)}", False
    off = draft.given("NCCL_IB_DISABLE")
    if off is not None and off.value.strip() not in ("", "0"):
        return "tcp", f"NCCL_IB_DISABLE={off.value} ({off.origin})", True
    used = ports.in_use(draft) or ports.choose(draft.facts, draft.nics)[0]
    if used:
        shown = "; ".join(f"{port.path}/link_layer: {port.link_layer}" for port in used)
        return ("infiniband" if used[0].link_layer == "InfiniBand" else "roce"), shown, False
    if draft.facts.rdma:
        names = ", ".join(device.name for device in draft.facts.rdma)
        return "tcp", f"/sys/class/infiniband: {names}, none with a port that NCCL can use", False
    return "tcp", "/sys/class/infiniband and /sys/class/cxi: no device", False


def _expect(
    draft: PlanDraft, system: SystemFacts | None, kind: FabricKind, reason: str, rate: float | None
) -> None:
    """Compare with what the recipe says of the system."""
    if system is None or system.fabric.kind == "tcp":
        return
    wanted = system.fabric
    if kind != wanted.kind:
        text = f"the recipe says {wanted.kind}, this machine shows {kind} ({reason})"
        if kind == "tcp" and draft.several and draft.facts.gpus:
            # One such node makes NCCL fail or hang: it speaks TCP, the others do not.
            draft.blockers.append(f"{text}: fix the node, or run by TCP on all with NCCL_IB_DISABLE=1")
        else:
            draft.warnings.append(text)
        return
    if rate is not None and wanted.line_rate_Gbps and rate < wanted.line_rate_Gbps:
        draft.warnings.append(
            f"{rate:g} of the node's {wanted.line_rate_Gbps} Gbit/s: the decisions say which port is "
            "missing or slow"
        )

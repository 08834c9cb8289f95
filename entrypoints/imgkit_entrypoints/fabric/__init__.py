"""Decide the network variables of a node, with one function for each fabric.

The fabrics are InfiniBand, RoCE, Slingshot and plain TCP. Nothing here reads a file: `choose_fabric` is a
pure function of the node's facts, the recipe and the environment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from imgkit_entrypoints.fabric import issues, library_path, lint, plugin, ports, slingshot, sockets
from imgkit_entrypoints.fabric.fabric_plan import (
    Decision,
    FabricPlan,
    Finding,
    PlanDraft,
    issue_findings,
)
from imgkit_entrypoints.facts.host_facts import HostFacts, Port
from imgkit_entrypoints.system import PARTITION, FabricKind, SystemFacts

UNKNOWN_IMAGE = "/opt/imgkit/manifest.json states no variables of an image, so they count as set by the user"

__all__ = ["Decision", "FabricPlan", "Finding", "choose_fabric"]


def choose_fabric(
    facts: HostFacts,
    system: SystemFacts | None,
    env: Mapping[str, str],
    *,
    nnodes: int = 1,
    head: str = "",
) -> FabricPlan:
    """Return the network variables of this node, each with the reason for its value.

    A variable that the user has set keeps its value and is only reported. A variable that the image sets is
    replaced if this node needs another value.

    Parameters
    ----------
    facts : what was found on this node.
    system : the image's recipe for a cluster, or None in an image without one.
    nnodes : number of nodes of the run. Some settings are only right between nodes.
    head : address of node 0, or "" if unknown. An interface in its network is preferred.
    """
    recipe, nics = (system.env, system.fabric.nics) if system else ({}, None)
    draft = PlanDraft(facts=facts, env=env, recipe=recipe, nnodes=nnodes, head=head, nics=nics)
    sockets.use_partition(draft, system, env.get(PARTITION, ""))
    # `imgkit run` exports the recipe's variables to the shell or script from which a launch may start. A
    # variable with exactly the recipe's value therefore does not count as one of the user.
    draft.env = {name: value for name, value in env.items() if draft.recipe.get(name) != value}
    kind, reason, is_requested = _select_kind(draft)
    library_path.decide_library_path(draft, kind)
    plugin.decide_plugin(draft, kind)
    devices, rate = _FABRICS[kind](draft)
    if not is_requested:
        _compare_with_recipe(draft, system, kind, reason, rate)
    results = issues.apply_known_issues(draft, kind, system)
    draft.report_rest()
    return FabricPlan(
        kind=kind,
        reason=reason,
        env=dict(draft.chosen),
        decisions=tuple(draft.decisions),
        unset=tuple(dict.fromkeys(name for name in draft.unset if name not in draft.chosen)),
        warnings=(*draft.warnings, *issue_findings(results, "warn"), *lint.check_variables(draft, kind)),
        blockers=tuple(draft.blockers),
        issues=results,
        devices=devices,
        line_rate_Gbps=rate,
        links=dict(draft.links),
        image=UNKNOWN_IMAGE if facts.image_env is None else "",
    )


_Carriers = tuple[tuple[str, ...], float | None]
"""The carriers: devices that carry the traffic, and their rate together in Gbit/s. None is an unknown rate.

For example, two InfiniBand ports of 200 Gbit/s are ``(("mlx5_0:1", "mlx5_1:1"), 400.0)``.
"""


def _decide_infiniband(draft: PlanDraft) -> _Carriers:
    """Decide the variables for InfiniBand: the exact ports, the interface, and no GID index.

    Return the ports and their rate. A GID is an address of a port for RDMA over Ethernet. InfiniBand uses
    another address, the LID, and NCCL 2.22.3 and later do not even read NCCL_IB_GID_INDEX there.
    """
    used = ports.decide_ports(draft)
    lids = "; ".join(f"{port.path}/lid: {port.lid or 'none'}" for port in used)
    draft.refuse_image(ports.GID_INDEX, f"InfiniBand routes by LID ({lids})")
    draft.note(
        ports.GID_INDEX, "", f"InfiniBand routes by LID; NCCL 2.22.3 and later ignore the variable ({lids})"
    )
    sockets.decide_interface(draft, prefer=sockets.usable_names(draft.facts, "ib"))
    return _decide_rdma(draft, used, "InfiniBand")


def _decide_roce(draft: PlanDraft) -> _Carriers:
    """Decide the variables for RDMA over Ethernet (RoCE): the exact ports, the GID index and the interface.

    Return the ports and their rate. A port has several addresses (GIDs) of different types. The index of the
    right one is set only for versions of NCCL that do not search for it themselves (`ports.decide_gid`).
    """
    used = ports.decide_ports(draft)
    ports.decide_gid(draft, used)
    sockets.decide_interface(draft)
    return _decide_rdma(draft, used, "RoCE")


def _decide_rdma(draft: PlanDraft, used: tuple[Port, ...], kind: str) -> _Carriers:
    """Leave out variables that would keep NCCL off its RDMA ports.

    Return the names of these ports and their rate. `kind` is the name of the fabric for messages.
    """
    sockets.refuse_threads(draft, kind)
    if used:
        states = ", ".join(f"{port.path}/state: {port.state}" for port in used)
        draft.refuse_image("NCCL_IB_DISABLE", f"the fabric's ports are there ({states})")
        _refuse_net(draft, ("ib", "ibext", "ucx", "spcx"), f"{kind} needs no other network ({states})")
    return tuple(port.name for port in used), ports.line_rate_Gbps(draft.facts, used)


def _refuse_net(draft: PlanDraft, networks: tuple[str, ...], reason: str) -> None:
    """Leave out the image's NCCL_NET if it names none of `networks` (in lower case)."""
    preset = draft.image_preset("NCCL_NET")
    # The version behind a plug-in's name does not count: "IBext_v8" is "ibext".
    if preset is not None and preset.value.partition("_v")[0].lower() not in networks:
        draft.refuse("NCCL_NET", reason)


def _decide_slingshot(draft: PlanDraft) -> _Carriers:
    """Decide the variables for Slingshot: the plug-in's settings, and the interfaces for NCCL's bootstrap.

    In the bootstrap, NCCL's processes find each other over TCP. `draft` is the plan while it is being
    decided. Return the NICs and their rate. A network interface of the fabric that is down gets a warning,
    because its NIC carries no traffic.
    """
    slingshot.decide_slingshot(draft)
    # Slingshot's network interfaces are named hsn0, hsn1, ...
    interfaces = [interface for interface in draft.facts.interfaces if interface.name.startswith("hsn")]
    running, down = [], []
    for interface in interfaces:
        if interface.running:
            running.append(interface)
        else:
            down.append(interface)
    used = [interface for interface in running if interface.addresses] or running
    if not used:
        sockets.decide_interface(draft)
    else:
        sockets.refuse_absent(draft)
        if draft.has_several_nodes:
            states = "; ".join(map(sockets.state_of, used))
            value = sockets.format_interfaces([item.name for item in used], draft.facts)
            draft.set(sockets.NCCL, value, f"NCCL's bootstrap uses the fabric's interfaces: {states}")
            draft.set(sockets.GLOO, used[0].name, f"Gloo uses only one interface: {states}")
    sockets.refuse_threads(draft, "Slingshot")
    for interface in down:
        draft.warn(
            f"{interface.name} is down ({sockets.state_of(interface)}): its NIC carries no traffic",
            f"report the node to the site with the output of: ip link show {interface.name}",
        )
    nics = draft.facts.cxi
    names = tuple(device.name for device in nics)
    if len(used) + len(down) != len(nics):
        # A container with a network of its own shows no hsn interface, but its NICs work.
        return names, slingshot.NIC_Gbps * len(nics)
    rate_Gbps = 0.0
    for interface in used:
        if interface.speed_Mbps is None:  # the kernel does not state it
            rate_Gbps += slingshot.NIC_Gbps
        else:
            rate_Gbps += interface.speed_Mbps / 1000
    return names, rate_Gbps


def _decide_tcp(draft: PlanDraft) -> _Carriers:
    """Decide the variables for TCP sockets: NCCL's interface, and that NCCL skips RDMA devices.

    `draft` is the plan while it is being decided. Return the interface and its rate. Amazon's EFA is an
    exception: it has an RDMA device, but NCCL reaches the device only through the aws-ofi-nccl plug-in. So a
    node with EFA gets a warning instead of NCCL_IB_DISABLE.
    """
    idle_ports, unused = ports.choose_ports(draft.facts, draft.nics)
    ports.report_unused(draft, unused)
    # The ports of an EFA device have neither of the two link layers.
    efa_devices = []
    for device in draft.facts.rdma:
        if {port.link_layer for port in device.ports}.isdisjoint(("InfiniBand", "Ethernet")):
            efa_devices.append(device)
    if efa_devices and not idle_ports:
        efa = efa_devices[0]
        draft.warn(
            f"{efa.name} is an EFA device ({efa.path}/node_type: {efa.node_type}): NCCL needs the "
            "aws-ofi-nccl plugin for it, and otherwise uses TCP",
            "put the folder of libnccl-net.so on LD_LIBRARY_PATH",
        )
    else:
        draft.set("NCCL_IB_DISABLE", "1", _no_rdma_reason(draft, idle_ports))
    if not efa_devices:
        _refuse_net(draft, ("socket",), "the data uses TCP (/sys/class/infiniband, /sys/class/cxi)")
    # TCP also works over the fabric's own interfaces (hsn0, ib0), and faster than over the one with the
    # default route.
    interface = sockets.decide_interface(draft, prefer=sockets.usable_names(draft.facts, "hsn", "ib"))
    sockets.decide_threads(draft, interface)
    if interface is None:
        return (), None
    rate_Gbps = interface.speed_Mbps / 1000 if interface.speed_Mbps else None
    return (interface.name,), rate_Gbps


def _no_rdma_reason(draft: PlanDraft, idle_ports: Sequence[Port]) -> str:
    """Return why NCCL must not use RDMA, for the report.

    `idle_ports` are ports that NCCL could use, but does not, because the user has asked for TCP.
    """
    if idle_ports:
        paths = ", ".join(port.path for port in idle_ports)
        return f"TCP is requested, so these ports stay unused: {paths}"
    if draft.facts.rdma:
        paths = ", ".join(device.path for device in draft.facts.rdma)
        return f"no usable RDMA port ({paths}), so NCCL must not try one"
    return "/sys/class/infiniband: no device, so NCCL need not look for one"


_FABRICS = {
    "infiniband": _decide_infiniband,
    "roce": _decide_roce,
    "slingshot": _decide_slingshot,
    "tcp": _decide_tcp,
}


def _select_kind(draft: PlanDraft) -> tuple[FabricKind, str, bool]:
    """Return the node's fabric, the evidence for it, and whether a variable requested TCP.

    A request for TCP comes first: NCCL_NET=Socket, or NCCL_IB_DISABLE=1 on a node without Slingshot. Without
    such a request, Slingshot NICs decide, and then RDMA ports that NCCL can use. A node with neither uses
    TCP.
    """
    net, disable = draft.request("NCCL_NET"), draft.request("NCCL_IB_DISABLE")
    if net is not None and net.value.lower() == "socket":
        return "tcp", f"NCCL_NET={net.value} ({net.source})", True
    if draft.facts.cxi:
        return "slingshot", f"Slingshot NICs: {slingshot.nics_text(draft.facts)}", False
    # Below the check for Slingshot, because NCCL uses no verbs there and NCCL_IB_DISABLE changes nothing.
    if disable is not None and disable.value.strip() not in ("", "0"):
        return "tcp", f"NCCL_IB_DISABLE={disable.value} ({disable.source})", True
    usable, _ = ports.choose_ports(draft.facts, draft.nics)
    used = ports.in_use(draft) or usable
    if used:
        kind: FabricKind = "infiniband" if used[0].link_layer == "InfiniBand" else "roce"
        return kind, "; ".join(f"{port.path}/link_layer: {port.link_layer}" for port in used), False
    if draft.facts.rdma:
        names = ", ".join(device.name for device in draft.facts.rdma)
        return "tcp", f"/sys/class/infiniband: {names}, but no port that NCCL can use", False
    return "tcp", "/sys/class/infiniband and /sys/class/cxi: no device", False


def _compare_with_recipe(
    draft: PlanDraft, system: SystemFacts | None, kind: FabricKind, reason: str, rate: float | None
) -> None:
    """Report that this node has another fabric, or a lower rate, than the recipe states for the cluster.

    If a node with GPUs has only TCP, a run on several nodes must not start, since NCCL would fail or hang.
    Every other difference is a warning.

    Parameters
    ----------
    kind : the fabric that was found on this node.
    reason : the evidence for `kind`.
    rate : rate of the node's devices together in Gbit/s, or None if unknown.
    """
    if system is None or system.fabric.kind == "tcp":
        return
    expected = system.fabric
    if kind == expected.kind:
        if rate is not None and expected.line_rate_Gbps and rate < expected.line_rate_Gbps:
            _warn_low_rate(draft, rate, expected.line_rate_Gbps)
        return
    problem = f"the recipe says {expected.kind}, but this machine has {kind} ({reason})"
    if kind == "tcp" and draft.has_several_nodes and draft.facts.gpus:
        # One such node makes NCCL fail or hang, because it uses TCP while the others use the fabric.
        draft.block(problem, "repair the node, or use TCP on all nodes: NCCL_IB_DISABLE=1")
    else:
        fix = "correct system.fabric.kind in the recipe, or repair what /sys/class/infiniband and cxi lack"
        draft.warn(problem, fix)


def _warn_low_rate(draft: PlanDraft, rate: float, expected: float) -> None:
    """Warn that the ports in use together have a lower rate than the recipe states.

    Parameters
    ----------
    rate : rate of the ports in use together, in Gbit/s.
    expected : the recipe's rate in Gbit/s.
    """
    used = ", ".join(f"{port.name} {port.rate}" for port in ports.in_use(draft)) or "no RDMA port"
    # A decision about a port has a value such as "mlx5_0:1". If it is not used, the port was left out.
    unused = ", ".join(item.value for item in draft.decisions if not item.used and ":" in item.value)
    if unused:
        used += f"; left out: {unused}"
    draft.warn(
        f"this node has {rate:g} of its {expected} Gbit/s: {used}",
        "report the node to the site with the output of ibstat",
    )

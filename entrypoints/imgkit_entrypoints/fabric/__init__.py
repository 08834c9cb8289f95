"""Decide the network variables of a node, with one function for each fabric.

The fabrics are InfiniBand, RoCE, Slingshot and plain TCP. Nothing here reads a file: `choose_fabric` is a
pure function of the node's facts, the recipe and the environment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from imgkit_entrypoints.fabric import issues, library_path, lint, plugin, ports, slingshot, sockets
from imgkit_entrypoints.fabric.fabric_plan import (
    Carriers,
    Decision,
    FabricPlan,
    FabricPlanBuilder,
    Finding,
    issue_findings,
)
from imgkit_entrypoints.facts.host_facts import HostFacts, Interface, Port
from imgkit_entrypoints.system import PARTITION, FabricKind, SystemFacts

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
    system = system or SystemFacts()
    partition = env.get(PARTITION, "")
    partition_env = sockets.partition_variables(facts, system, partition)
    recipe = {**system.env, **partition_env}
    # `imgkit run` exports the recipe's variables to the shell or script from which a launch may start. A
    # variable with exactly the recipe's value therefore does not count as one of the user.
    users_env = {name: value for name, value in env.items() if recipe.get(name) != value}
    plan = FabricPlanBuilder(
        facts=facts,
        system=system,
        env=users_env,
        recipe=recipe,
        nnodes=nnodes,
        head=head,
        partition=partition if partition_env else "",
    )
    fabric = _select_fabric(plan)
    plan.kind = fabric.kind
    library_path.set_library_path(plan)
    plugin.check_plugin(plan)
    carriers = _FABRICS[fabric.kind](plan)
    if not fabric.is_requested:
        _compare_with_recipe(plan, fabric.reason, carriers.rate_Gbps)
    results = issues.apply_known_issues(plan)
    plan.keep_undecided_variables()
    plan.warnings += issue_findings(results, "warn")
    plan.warnings += lint.check_variables(plan)
    return plan.build(fabric.reason, carriers, results)


def _configure_infiniband(plan: FabricPlanBuilder) -> Carriers:
    """Set the variables for InfiniBand: the exact ports, the interface, and no GID index.

    Return the ports and their rate. A GID is an address of a port for RDMA over Ethernet. InfiniBand uses
    another address, the LID, and NCCL 2.22.3 and later do not even read NCCL_IB_GID_INDEX there.
    """
    used = ports.set_hcas(plan)
    lids = "; ".join(f"{port.path}/lid: {port.lid or 'none'}" for port in used)
    plan.drop_image_variable(ports.GID_INDEX, f"InfiniBand routes by LID ({lids})")
    reason = f"InfiniBand routes by LID; NCCL 2.22.3 and later ignore the variable ({lids})"
    plan.report_unset(ports.GID_INDEX, "", reason)
    sockets.set_interface(plan, preferred=sockets.usable_names(plan.facts, "ib"))
    return _configure_rdma(plan, used, "InfiniBand")


def _configure_roce(plan: FabricPlanBuilder) -> Carriers:
    """Set the variables for RDMA over Ethernet (RoCE): the exact ports, the GID index and the interface.

    Return the ports and their rate. A port has several addresses (GIDs) of different types. The index of the
    right one is set only for versions of NCCL that do not search for it themselves (`ports.set_gid_index`).
    """
    used = ports.set_hcas(plan)
    ports.set_gid_index(plan, used)
    sockets.set_interface(plan)
    return _configure_rdma(plan, used, "RoCE")


def _configure_rdma(plan: FabricPlanBuilder, used: tuple[Port, ...], fabric_name: str) -> Carriers:
    """Drop variables that would keep NCCL off its RDMA ports, and return the ports' names and rate."""
    sockets.drop_socket_counts(plan, fabric_name)
    if used:
        states = ", ".join(f"{port.path}/state: {port.state}" for port in used)
        plan.drop_image_variable("NCCL_IB_DISABLE", f"the fabric's ports are there ({states})")
        reason = f"{fabric_name} needs no other network ({states})"
        _drop_other_network(plan, ("ib", "ibext", "ucx", "spcx"), reason)
    return Carriers(tuple(port.name for port in used), ports.line_rate_Gbps(plan.facts, used))


def _drop_other_network(plan: FabricPlanBuilder, networks: tuple[str, ...], reason: str) -> None:
    """Drop the image's NCCL_NET if it names none of `networks` (in lower case)."""
    preset = plan.image_preset("NCCL_NET")
    if preset is None:
        return
    network, _, _ = preset.value.partition("_v")  # the version of a plug-in's name: "IBext_v8" is "IBext"
    if network.lower() not in networks:
        plan.drop_variable("NCCL_NET", reason)


def _configure_slingshot(plan: FabricPlanBuilder) -> Carriers:
    """Set the variables for Slingshot: the plug-in's settings, and the interfaces for NCCL's bootstrap.

    In the bootstrap, NCCL's processes find each other over TCP. Return the NICs and their rate. A network
    interface of the fabric that is down gets a warning, because its NIC carries no traffic.
    """
    slingshot.set_variables(plan)
    # Slingshot's network interfaces are named hsn0, hsn1, ...
    interfaces = [interface for interface in plan.facts.interfaces if interface.name.startswith("hsn")]
    running = [interface for interface in interfaces if interface.running]
    with_address = [interface for interface in running if interface.addresses]
    used = with_address or running
    if used:
        _set_slingshot_interfaces(plan, used)
    else:
        sockets.set_interface(plan)
    sockets.drop_socket_counts(plan, "Slingshot")
    down = [interface for interface in interfaces if not interface.running]
    for interface in down:
        plan.add_warning(
            f"{interface.name} is down ({sockets.state_of(interface)}): its NIC carries no traffic",
            f"report the node to the site with the output of: ip link show {interface.name}",
        )
    nics = plan.facts.cxi
    names = tuple(nic.name for nic in nics)
    if len(used) + len(down) != len(nics):
        # A container with a network of its own shows no hsn interface, but its NICs work.
        return Carriers(names, slingshot.NIC_Gbps * len(nics))
    rate_Gbps = 0.0
    for interface in used:
        if interface.speed_Mbps is None:  # the kernel does not state it
            rate_Gbps += slingshot.NIC_Gbps
        else:
            rate_Gbps += interface.speed_Mbps / 1000
    return Carriers(names, rate_Gbps)


def _set_slingshot_interfaces(plan: FabricPlanBuilder, interfaces: Sequence[Interface]) -> None:
    """Let NCCL's bootstrap use these interfaces, and Gloo the first of them, if there are several nodes."""
    sockets.drop_absent_interfaces(plan)
    if not plan.has_several_nodes:
        return
    states = "; ".join(sockets.state_of(interface) for interface in interfaces)
    names = [interface.name for interface in interfaces]
    value = sockets.format_interfaces(names, plan.facts)
    plan.set_variable(sockets.NCCL, value, f"NCCL's bootstrap uses the fabric's interfaces: {states}")
    plan.set_variable(sockets.GLOO, names[0], f"Gloo uses only one interface: {states}")


def _configure_tcp(plan: FabricPlanBuilder) -> Carriers:
    """Set the variables for TCP sockets: NCCL's interface, and that NCCL skips RDMA devices.

    Return the interface and its rate. Amazon's EFA is an exception: it has an RDMA device, but NCCL reaches
    the device only through the aws-ofi-nccl plug-in. So a node with EFA gets a warning instead of
    NCCL_IB_DISABLE.
    """
    choice = ports.choose_ports(plan)
    ports.report_unused(plan, choice.unused)
    efa_devices = [device for device in plan.facts.rdma if ports.is_efa(device)]
    if efa_devices and not choice.selected:
        efa = efa_devices[0]
        plan.add_warning(
            f"{efa.name} is an EFA device ({efa.path}/node_type: {efa.node_type}): NCCL needs the "
            "aws-ofi-nccl plugin for it, and otherwise uses TCP",
            "put the folder of libnccl-net.so on LD_LIBRARY_PATH",
        )
    else:
        plan.set_variable("NCCL_IB_DISABLE", "1", _no_rdma_reason(plan.facts, choice.selected))
    if not efa_devices:
        reason = "the data uses TCP (/sys/class/infiniband, /sys/class/cxi)"
        _drop_other_network(plan, ("socket",), reason)
    # TCP also works over the fabric's own interfaces (hsn0, ib0), and faster than over the one with the
    # default route.
    interface = sockets.set_interface(plan, preferred=sockets.usable_names(plan.facts, "hsn", "ib"))
    if interface is None:
        return Carriers((), None)
    sockets.set_socket_counts(plan, interface)
    if not interface.speed_Mbps:
        return Carriers((interface.name,), None)
    return Carriers((interface.name,), interface.speed_Mbps / 1000)


def _no_rdma_reason(facts: HostFacts, idle_ports: Sequence[Port]) -> str:
    """Return why NCCL must not use RDMA, for the report.

    `idle_ports` are ports that NCCL could use, but does not, because the user has asked for TCP.
    """
    if idle_ports:
        paths = ", ".join(port.path for port in idle_ports)
        return f"TCP is requested, so these ports stay unused: {paths}"
    if facts.rdma:
        paths = ", ".join(device.path for device in facts.rdma)
        return f"no usable RDMA port ({paths}), so NCCL must not try one"
    return "/sys/class/infiniband: no device, so NCCL need not look for one"


_FABRICS = {
    "infiniband": _configure_infiniband,
    "roce": _configure_roce,
    "slingshot": _configure_slingshot,
    "tcp": _configure_tcp,
}


class _Fabric(NamedTuple):
    """The node's fabric."""

    kind: FabricKind
    reason: str
    """The evidence for `kind`."""
    is_requested: bool = False
    """True if a variable requested TCP."""


def _select_fabric(plan: FabricPlanBuilder) -> _Fabric:
    """Return the node's fabric.

    A request for TCP comes first: NCCL_NET=Socket, or NCCL_IB_DISABLE=1 on a node without Slingshot. Without
    such a request, Slingshot NICs decide, and then RDMA ports that NCCL can use. A node with neither uses
    TCP.
    """
    net = plan.requested_preset("NCCL_NET")
    if net is not None and net.value.lower() == "socket":
        return _Fabric("tcp", f"NCCL_NET={net.value} ({net.source})", is_requested=True)
    if plan.facts.cxi:
        return _Fabric("slingshot", f"Slingshot NICs: {slingshot.nics_text(plan.facts)}")
    # Below the check for Slingshot, because NCCL uses no verbs there and NCCL_IB_DISABLE changes nothing.
    disable = plan.requested_preset("NCCL_IB_DISABLE")
    if disable is not None and disable.value.strip() not in ("", "0"):
        return _Fabric("tcp", f"NCCL_IB_DISABLE={disable.value} ({disable.source})", is_requested=True)
    used = ports.ports_in_use(plan) or ports.choose_ports(plan).selected
    if used:
        evidence = "; ".join(f"{port.path}/link_layer: {port.link_layer}" for port in used)
        if used[0].link_layer == "InfiniBand":
            return _Fabric("infiniband", evidence)
        return _Fabric("roce", evidence)
    if plan.facts.rdma:
        names = ", ".join(device.name for device in plan.facts.rdma)
        return _Fabric("tcp", f"/sys/class/infiniband: {names}, but no port that NCCL can use")
    return _Fabric("tcp", "/sys/class/infiniband and /sys/class/cxi: no device")


def _compare_with_recipe(plan: FabricPlanBuilder, reason: str, rate_Gbps: float | None) -> None:
    """Report that this node has another fabric, or a lower rate, than the recipe states for the cluster.

    If a node with GPUs has only TCP, a run on several nodes must not start, since NCCL would fail or hang.
    Every other difference is a warning.

    Parameters
    ----------
    reason : the evidence for the fabric of this node.
    rate_Gbps : rate of the node's devices together, or None if unknown.
    """
    expected = plan.system.fabric
    if expected.kind == "tcp":
        return
    if plan.kind != expected.kind:
        problem = f"the recipe says {expected.kind}, but this machine has {plan.kind} ({reason})"
        if plan.kind == "tcp" and plan.has_several_nodes and plan.facts.gpus:
            # One such node makes NCCL fail or hang, because it uses TCP while the others use the fabric.
            plan.add_blocker(problem, "repair the node, or use TCP on all nodes: NCCL_IB_DISABLE=1")
        else:
            fix = (
                "correct system.fabric.kind in the recipe, or repair what /sys/class/infiniband and cxi lack"
            )
            plan.add_warning(problem, fix)
    elif rate_Gbps is not None and expected.line_rate_Gbps and rate_Gbps < expected.line_rate_Gbps:
        used = ", ".join(f"{port.name} {port.rate}" for port in ports.ports_in_use(plan)) or "no RDMA port"
        # A decision about a port has a value such as "mlx5_0:1". If it is not used, the port was left out.
        unused = ", ".join(item.value for item in plan.decisions if not item.used and ":" in item.value)
        if unused:
            used += f"; left out: {unused}"
        plan.add_warning(
            f"this node has {rate_Gbps:g} of its {expected.line_rate_Gbps} Gbit/s: {used}",
            "report the node to the site with the output of ibstat",
        )

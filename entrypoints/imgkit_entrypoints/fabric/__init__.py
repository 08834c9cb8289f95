"""Decide the network variables of a node, with one function for each fabric.

A fabric is the network over which the nodes of a run exchange data: InfiniBand, RoCE, Slingshot or plain TCP.
This package does not read files. The result of `choose_fabric` depends only on the facts that were read from
the node, on the image's recipe, and on the environment.
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

    If the user has set a variable, it keeps its value and is only reported. If the image sets a variable, but
    this node needs another value, the image's value is replaced.

    Parameters
    ----------
    facts : hardware, drivers and libraries that were found on this node.
    system : what the image's recipe says about the cluster, or None if the image has no recipe.
    nnodes : number of nodes of the run. Some variables are only set for a run on several nodes.
    head : address of the head (node 0), or "" if unknown. An interface in the same network is preferred.
    """
    system = system or SystemFacts()
    partition = env.get(PARTITION, "")
    partition_env = sockets.partition_variables(facts, system, partition)
    recipe = {**system.env, **partition_env}
    # `imgkit run` exports the recipe's variables to the shell or script that starts this launch. So if a
    # variable has exactly the recipe's value, it is treated as the recipe's and not as the user's.
    users_env = {name: value for name, value in env.items() if recipe.get(name) != value}
    plan = FabricPlanBuilder(
        facts=facts,
        system=system,
        env=users_env,
        recipe=recipe,
        nnodes=nnodes,
        head=head,
        # Messages name the partition only if the recipe has settings for it.
        partition=partition if partition_env else "",
    )
    return _decide_variables(plan)


def _decide_variables(plan: FabricPlanBuilder) -> FabricPlan:
    """Decide all network variables of a node, and return the plan with the decisions."""
    fabric = _select_fabric(plan)
    plan.kind = fabric.kind
    # The order matters: the next call stores the host's libraries in `plan.links`. `check_plugin` and the
    # functions for Slingshot look for NCCL's plug-in there.
    library_path.set_library_path(plan)
    plugin.check_plugin(plan)
    carriers = _FABRICS[fabric.kind](plan)
    # A user who asks for TCP knows that the node does not use the recipe's fabric.
    if not fabric.is_requested:
        _compare_with_recipe(plan, fabric.reason, carriers.rate_Gbps)
    # Known issues come after the fabric, because their conditions see the variables that were set above.
    results = issues.apply_known_issues(plan)
    # Workers also get the recipe's variables about which nothing was decided. Only now are these known.
    plan.keep_undecided_variables()
    # These warnings are about the values that workers get, so all values must be decided before.
    plan.warnings += issue_findings(results, "warn")
    plan.warnings += lint.check_variables(plan)
    return plan.build(fabric.reason, carriers, results)


def _configure_infiniband(plan: FabricPlanBuilder) -> Carriers:
    """Set NCCL's variables for InfiniBand, and return the ports that carry the data and their total rate.

    NCCL_IB_HCA lists the exact ports. NCCL_IB_GID_INDEX is not set: it selects a GID, which is the address of
    a port in RDMA over Ethernet. InfiniBand uses another kind of address, the LID. NCCL 2.22.3 and later do
    not even read NCCL_IB_GID_INDEX on InfiniBand.
    """
    used = ports.set_hcas(plan)
    lids = "; ".join(f"{port.path}/lid: {port.lid or 'none'}" for port in used)
    # The report shows the first reason beside the image's index, and the second for imgkit's own decision.
    # In the other order, `leave_variable` would keep the image's index for the workers.
    plan.drop_image_variable(ports.GID_INDEX, f"InfiniBand routes by LID ({lids})")
    reason = f"InfiniBand routes by LID; NCCL 2.22.3 and later ignore the variable ({lids})"
    plan.leave_variable(ports.GID_INDEX, reason)
    sockets.set_interface(plan, preferred=sockets.usable_names(plan.facts, prefixes=("ib",)))
    _drop_variables_against_rdma(plan, used, "InfiniBand")
    return _sum_up_ports(plan.facts, used)


def _configure_roce(plan: FabricPlanBuilder) -> Carriers:
    """Set NCCL's variables for RoCE (RDMA over Ethernet), and return the ports and their total rate.

    NCCL_IB_HCA lists the exact ports. Each port has several addresses (GIDs) of different types, and
    NCCL_IB_GID_INDEX selects the right address. This index is set only for versions of NCCL that do not find
    the address themselves (see `ports.set_gid_index`).
    """
    used = ports.set_hcas(plan)
    ports.set_gid_index(plan, used)
    sockets.set_interface(plan)
    _drop_variables_against_rdma(plan, used, "RoCE")
    return _sum_up_ports(plan.facts, used)


def _drop_variables_against_rdma(plan: FabricPlanBuilder, used: Sequence[Port], fabric_name: str) -> None:
    """Drop variables that only make sense over TCP, or that would keep NCCL from using RDMA.

    Such variables usually come from an image that was made for another network. For example, NCCL_IB_DISABLE
    makes NCCL use TCP. Values of the user are kept.

    Parameters
    ----------
    used : the ports that NCCL uses. Empty if a variable of the user or the recipe selects none.
    fabric_name : the name of the fabric for messages, such as ``RoCE``.
    """
    sockets.drop_socket_counts(plan, fabric_name)
    if not used:
        return
    states = ", ".join(f"{port.path}/state: {port.state}" for port in used)
    plan.drop_image_variable("NCCL_IB_DISABLE", f"the fabric's ports are there ({states})")
    reason = f"{fabric_name} needs no other network ({states})"
    # NCCL's own network for RDMA, and NVIDIA's plug-ins, which use RDMA as well.
    _drop_other_network(plan, ("ib", "ibext", "ucx", "spcx"), reason)


def _sum_up_ports(facts: HostFacts, used: Sequence[Port]) -> Carriers:
    """Return the names of the RDMA ports in use, and their total rate."""
    return Carriers(tuple(port.name for port in used), ports.line_rate_Gbps(facts, used))


def _drop_other_network(plan: FabricPlanBuilder, networks: tuple[str, ...], reason: str) -> None:
    """Drop the image's value of NCCL_NET if it is none of `networks`, which are names in lower case."""
    # A value of the user or the recipe is a deliberate choice, so it is kept.
    preset = plan.image_preset("NCCL_NET")
    if preset is None:
        return
    network, _, _ = preset.value.partition("_v")  # the version of a plug-in's name: "IBext_v8" is "IBext"
    if network.lower() not in networks:
        plan.drop_variable("NCCL_NET", reason)


def _configure_slingshot(plan: FabricPlanBuilder) -> Carriers:
    """Set the variables for Slingshot, and return the names of the NICs and their total rate.

    The variables configure NCCL's network plug-in, and select the interfaces for NCCL's bootstrap, in which
    its processes find each other over TCP. If one of Slingshot's network interfaces is down, the plan gets a
    warning, because the NIC of that interface carries no traffic.
    """
    slingshot.set_variables(plan)  # the variables of libfabric and of NCCL's plug-in
    # Slingshot's network interfaces are named hsn0, hsn1, ...
    interfaces = [interface for interface in plan.facts.interfaces if interface.name.startswith("hsn")]
    running = [interface for interface in interfaces if interface.running]
    with_address = [interface for interface in running if interface.addresses]
    # If no interface has a known address, use all interfaces that are up.
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
    rate_Gbps = slingshot.NIC_Gbps * len(nics)
    # Each NIC normally has one hsn interface. If not, the rate cannot be added up by interface: a container
    # with its own network namespace does not show the hsn interfaces, although the NICs work.
    if len(used) + len(down) == len(nics):
        rate_Gbps = _add_up_rates_Gbps(used)
    return Carriers(tuple(nic.name for nic in nics), rate_Gbps)


def _add_up_rates_Gbps(interfaces: Sequence[Interface]) -> float:
    """Return the total rate of Slingshot's `interfaces` in Gbit/s.

    If the kernel does not report the speed of an interface, the rate of a Slingshot NIC is assumed.
    """
    total_Gbps = 0.0
    for interface in interfaces:
        if interface.speed_Mbps is None:
            total_Gbps += slingshot.NIC_Gbps
        else:
            total_Gbps += interface.speed_Mbps / 1000
    return total_Gbps


def _set_slingshot_interfaces(plan: FabricPlanBuilder, interfaces: Sequence[Interface]) -> None:
    """Make NCCL's bootstrap use all of `interfaces`, and Gloo the first one, in a run on several nodes.

    On one node, nothing is set. Interfaces that do not exist on this node are dropped in either case.
    """
    # Otherwise, `set_variable` below would keep such a value of the recipe.
    sockets.drop_absent_interfaces(plan)
    if not plan.has_several_nodes:
        return
    states = "; ".join(sockets.state_of(interface) for interface in interfaces)
    names = [interface.name for interface in interfaces]
    interface_list = sockets.format_interfaces(names, plan.facts)
    plan.set_variable(
        sockets.NCCL, interface_list, f"NCCL's bootstrap uses the fabric's interfaces: {states}"
    )
    plan.set_variable(sockets.GLOO, names[0], f"Gloo uses only one interface: {states}")


def _configure_tcp(plan: FabricPlanBuilder) -> Carriers:
    """Set the variables for TCP sockets, and return the name of NCCL's interface and its rate."""
    _turn_off_rdma(plan)
    # TCP also works over the fabric's own interfaces, and faster than over the one with the default route.
    fabric_interfaces = sockets.usable_names(plan.facts, prefixes=sockets.FABRIC_PREFIXES)
    interface = sockets.set_interface(plan, preferred=fabric_interfaces)
    if interface is None:  # no interface is usable, which `set_interface` has reported
        return Carriers((), None)
    sockets.set_socket_counts(plan, interface)  # more than one socket for each connection on a fast interface
    if not interface.speed_Mbps:
        return Carriers((interface.name,), None)
    return Carriers((interface.name,), interface.speed_Mbps / 1000)


def _turn_off_rdma(plan: FabricPlanBuilder) -> None:
    """Make NCCL use TCP and no RDMA device, except for Amazon's EFA.

    NCCL_IB_DISABLE=1 makes NCCL skip RDMA devices. EFA is an RDMA device, too, but NCCL reaches it only
    through the aws-ofi-nccl plug-in. If a node has only EFA, the plan gets a warning about the plug-in
    instead of NCCL_IB_DISABLE.
    """
    choice = ports.choose_ports(plan)
    idle_ports = choice.selected  # NCCL could use them, so there are none unless TCP was requested
    ports.report_unused(plan, choice.unused)
    efa_devices = [device for device in plan.facts.rdma if ports.is_efa(device)]
    if efa_devices and not idle_ports:
        efa = efa_devices[0]
        plan.add_warning(
            f"{efa.name} is an EFA device ({efa.path}/node_type: {efa.node_type}): NCCL needs the "
            "aws-ofi-nccl plugin for it, and otherwise uses TCP",
            "put the folder of libnccl-net.so on LD_LIBRARY_PATH",
        )
    else:
        plan.set_variable("NCCL_IB_DISABLE", "1", _explain_unused_rdma(plan.facts, idle_ports))
    # On a node with EFA, the image's NCCL_NET may name the plug-in's network, so it is kept.
    if not efa_devices:
        reason = "the data uses TCP (/sys/class/infiniband, /sys/class/cxi)"
        _drop_other_network(plan, ("socket",), reason)


def _explain_unused_rdma(facts: HostFacts, idle_ports: Sequence[Port]) -> str:
    """Return the reason that the report gives for turning off RDMA.

    `idle_ports` are the ports that NCCL could use. They stay idle because the user has asked for TCP.
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
    """The kind of network that a node uses, and the reason."""

    kind: FabricKind
    reason: str
    """The evidence for `kind`."""
    is_requested: bool = False
    """True if `kind` is TCP because a variable of the user or the recipe asks for it."""


def _select_fabric(plan: FabricPlanBuilder) -> _Fabric:
    """Return the fabric (the kind of network) that this node uses.

    If the user or the recipe asks for TCP, the fabric is TCP. The requests are NCCL_NET=Socket, and
    NCCL_IB_DISABLE=1 on a node without Slingshot. Otherwise, a node with Slingshot NICs uses Slingshot, and a
    node with RDMA ports that NCCL can use has InfiniBand or RoCE. Every other node uses TCP.
    """
    # An image's value is no request: the image may have been made for another network.
    network = plan.requested_preset("NCCL_NET")
    if network is not None and network.value.lower() == "socket":
        return _Fabric("tcp", f"NCCL_NET={network.value} ({network.source})", is_requested=True)
    if plan.facts.cxi:
        return _Fabric("slingshot", f"Slingshot NICs: {slingshot.nics_text(plan.facts)}")
    # This check comes after the check for Slingshot: NCCL reaches Slingshot without InfiniBand verbs, so
    # NCCL_IB_DISABLE has no effect there.
    disable = plan.requested_preset("NCCL_IB_DISABLE")
    if disable is not None and disable.value.strip() not in ("", "0"):
        return _Fabric("tcp", f"NCCL_IB_DISABLE={disable.value} ({disable.source})", is_requested=True)
    # If NCCL_IB_HCA selects no port that works, the node still has the fabric of its ports. `set_hcas` warns.
    used = ports.ports_in_use(plan) or ports.choose_ports(plan).selected
    if used:
        # NCCL cannot mix InfiniBand and Ethernet, so the first port stands for all.
        evidence = "; ".join(f"{port.path}/link_layer: {port.link_layer}" for port in used)
        if used[0].link_layer == "InfiniBand":
            return _Fabric("infiniband", evidence)
        return _Fabric("roce", evidence)
    if plan.facts.rdma:
        names = ", ".join(device.name for device in plan.facts.rdma)
        return _Fabric("tcp", f"/sys/class/infiniband: {names}, but no port that NCCL can use")
    return _Fabric("tcp", "/sys/class/infiniband and /sys/class/cxi: no device")


def _compare_with_recipe(plan: FabricPlanBuilder, reason: str, rate_Gbps: float | None) -> None:
    """Report if this node has another fabric or a lower rate than the recipe expects for the cluster.

    Such a node is usually broken. If a node with GPUs has only TCP, a run on several nodes must not start,
    because NCCL would fail or hang. Every other difference is a warning.

    Parameters
    ----------
    reason : the evidence for the fabric of this node.
    rate_Gbps : total rate of the devices that carry the data, or None if it is unknown.
    """
    expected = plan.system.fabric
    if expected.kind == "tcp":  # every node can use TCP, so no node can be worse than that
        return
    if plan.kind != expected.kind:
        _report_other_fabric(plan, reason)
    elif rate_Gbps is not None and expected.line_rate_Gbps and rate_Gbps < expected.line_rate_Gbps:
        plan.add_warning(
            f"this node has {rate_Gbps:g} of its {expected.line_rate_Gbps} Gbit/s: {_describe_ports(plan)}",
            "report the node to the site with the output of ibstat",
        )


def _report_other_fabric(plan: FabricPlanBuilder, reason: str) -> None:
    """Block a run on several nodes, or warn, because the recipe expects another fabric than this node has.

    `reason` is the evidence for the fabric of this node.
    """
    problem = f"the recipe says {plan.system.fabric.kind}, but this machine has {plan.kind} ({reason})"
    if plan.kind == "tcp" and plan.has_several_nodes and plan.facts.gpus:
        # This node would use TCP while the other nodes use the fabric, so NCCL would fail or hang.
        plan.add_blocker(problem, "repair the node, or use TCP on all nodes: NCCL_IB_DISABLE=1")
        return
    fix = "correct system.fabric.kind in the recipe, or repair what /sys/class/infiniband and cxi lack"
    plan.add_warning(problem, fix)


def _describe_ports(plan: FabricPlanBuilder) -> str:
    """Return the RDMA ports that NCCL uses, with their rates, and the ports that it leaves out.

    For example ``mlx5_0:1 200 Gb/sec (2X NDR); left out: mlx5_1:1``.
    """
    used = ", ".join(f"{port.name} {port.rate}" for port in ports.ports_in_use(plan)) or "no RDMA port"
    # A decision about a port has the port's name as its value, such as "mlx5_0:1". If such a decision is not
    # used, NCCL does not use the port.
    unused = [decision.value for decision in plan.decisions if not decision.used and ":" in decision.value]
    if unused:
        used += f"; left out: {', '.join(unused)}"
    return used

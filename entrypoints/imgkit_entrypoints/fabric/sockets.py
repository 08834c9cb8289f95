"""Decide the network interface of NCCL and Gloo.

NCCL's processes connect over this interface, even if the data itself uses RDMA. Without RDMA, the data uses
the interface as well.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from imgkit_entrypoints.fabric import ports
from imgkit_entrypoints.fabric.fabric_plan import INTERFACES, FabricPlanBuilder
from imgkit_entrypoints.facts.host_facts import HostFacts, Interface, Route
from imgkit_entrypoints.system import SystemFacts

NCCL, GLOO = INTERFACES
SOCKET_COUNTS = ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD")
# Prefixes of interfaces that containers, virtual machines and tunnels create. Other nodes cannot reach them.
_VIRTUAL = (
    *("docker", "virbr", "veth", "br-", "cni", "flannel", "cali", "tun", "kube", "podman", "ifb", "dummy"),
)
FABRIC_PREFIXES = ("hsn", "ib")
"""Prefixes of the interfaces over which TCP uses Slingshot (hsn0) and InfiniBand (ib0)."""
_SELF_TUNED = {"0x1d0f": "AWS", "0x1ae0": "Google"}
"""PCI vendors for which NCCL chooses the number of sockets itself (net_socket.cc)."""
# NCCL's user guide recommends more sockets "for generic 100G networks", so not below 100 Gbit/s.
_FAST_Mbps = 100_000


def usable_interfaces(facts: HostFacts) -> tuple[Interface, ...]:
    """Return the interfaces over which other nodes could reach this node.

    Such an interface is up and has an address. Loopback, and interfaces that containers, virtual machines and
    tunnels create, are left out.
    """
    interfaces = []
    for interface in facts.interfaces:
        is_local = interface.name == "lo" or interface.name.startswith(_VIRTUAL)
        if interface.running and interface.addresses and not is_local:
            interfaces.append(interface)
    return tuple(interfaces)


def usable_names(facts: HostFacts, prefixes: tuple[str, ...] = ("",)) -> list[str]:
    """Return the names of the usable interfaces that begin with one of `prefixes`. By default, all do."""
    return [item.name for item in usable_interfaces(facts) if item.name.startswith(prefixes)]


class InterfaceChoice(NamedTuple):
    """The interface over which nodes should connect, and why it was chosen."""

    interface: Interface
    reason: str


def best_interface(plan: FabricPlanBuilder, preferred: Sequence[str] = ()) -> InterfaceChoice | None:
    """Return the interface over which nodes should connect, or None if no interface is usable.

    Of several usable interfaces, the choice is the first of these that exists:

    1. an interface in the same network as the head (node 0),
    2. an interface in `preferred`, where the best name comes first,
    3. the interface of the default route,
    4. the first interface with an IPv4 address, or else the first interface.

    If the head has a loopback address, all nodes are on this machine, and the result is ``lo``.
    """
    loopback = _find_loopback(plan)
    if loopback:
        return loopback
    by_name = {interface.name: interface for interface in usable_interfaces(plan.facts)}
    if not by_name:
        return None
    for route in plan.facts.routes:
        # A route without a gateway (0.0.0.0) leads to a network to which this node is directly connected.
        is_direct = route.interface in by_name and route.gateway == "0.0.0.0"  # noqa: S104
        if is_direct and _is_inside(plan.head, route.network):
            reason = f"the head {plan.head} is in its network {route.network}"
            return InterfaceChoice(by_name[route.interface], reason)
    for name in preferred:
        if name in by_name:
            reason = f"the fabric's own interface ({describe_interface(by_name[name])})"
            return InterfaceChoice(by_name[name], reason)
    return _choose_default_interface(by_name, plan.facts.routes)


def _find_loopback(plan: FabricPlanBuilder) -> InterfaceChoice | None:
    """Return the interface ``lo`` if the head has a loopback address, or None.

    A loopback address is only reachable from this machine, so all nodes of the run are on it.
    """
    if not _is_inside(plan.head, "127.0.0.0/8"):
        return None
    for interface in plan.facts.interfaces:
        if interface.name == "lo":
            evidence = describe_interface(interface)
            reason = f"the head is {plan.head}: all nodes are on this machine ({evidence})"
            return InterfaceChoice(interface, reason)
    return None


def _choose_default_interface(by_name: Mapping[str, Interface], routes: Sequence[Route]) -> InterfaceChoice:
    """Return the interface of the default route, or else the first interface.

    `by_name` are the usable interfaces by name. Of these, the first one with an IPv4 address is preferred.
    """
    default_routes = [
        route for route in routes if route.network == "0.0.0.0/0" and route.interface in by_name
    ]
    if default_routes:
        route = min(default_routes, key=lambda route: route.metric)
        interface = by_name[route.interface]
        evidence = describe_interface(interface)
        reason = f"/proc/net/route: the default route via {route.gateway} ({evidence})"
        return InterfaceChoice(interface, reason)
    with_ipv4 = [interface for interface in by_name.values() if interface.ipv4]
    first, *_ = with_ipv4 or by_name.values()
    reason = f"the first interface that is up with an address ({describe_interface(first)})"
    return InterfaceChoice(first, reason)


def _is_inside(head: str, network: str) -> bool:
    """Return whether the address `head` is in `network`, such as ``10.0.0.0/24``.

    If `head` is empty or a host name instead of an address, return False.
    """
    try:
        return ipaddress.ip_address(head) in ipaddress.ip_network(network)
    except ValueError:
        return False


def describe_interface(interface: Interface) -> str:
    """Return the state, speed and addresses of an interface for a message.

    For example ``/sys/class/net/eth0/operstate: up, speed 25000 Mb/s, 10.0.0.1``.
    """
    speed = f", speed {interface.speed_Mbps} Mb/s" if interface.speed_Mbps else ""
    return f"{state_of(interface)}{speed}, {', '.join(interface.addresses)}"


def state_of(interface: Interface) -> str:
    """Return the state of an interface with its file: ``/sys/class/net/eth0/operstate: up``."""
    return f"/sys/class/net/{interface.name}/operstate: {interface.state}"


def format_interfaces(names: Sequence[str], facts: HostFacts) -> str:
    """Return the value of NCCL_SOCKET_IFNAME that selects exactly `names`.

    NCCL reads each name as a prefix, unless the value begins with ``=``. The ``=`` is added only if a name is
    also a prefix of another interface: ``["eth1"] -> "=eth1"`` on a node with eth1 and eth10.
    """
    unselected = [item.name for item in facts.interfaces if item.name not in names]
    is_exact = any(text.startswith(name) for text in unselected for name in names)
    return ("=" if is_exact else "") + ",".join(names)


def match_interfaces(value: str, interfaces: Iterable[Interface]) -> tuple[Interface, ...]:
    """Return the interfaces that a value of NCCL_SOCKET_IFNAME selects.

    The format is ``[^][=]prefix,...``. With ``^``, the value selects everything except the named interfaces.
    With ``=``, names must match completely. For example, ``^docker,lo`` selects all interfaces whose names
    begin with neither ``docker`` nor ``lo``.
    """
    selection = ports.parse_selection(value)
    if not selection.names:
        return tuple(interfaces)
    matches = []
    for interface in interfaces:
        is_named = any(selection.has_name(interface.name, name) for name in selection.names)
        if is_named != selection.excludes:
            matches.append(interface)
    return tuple(matches)


def match_gloo_interface(name: str, interfaces: Iterable[Interface]) -> tuple[Interface, ...]:
    """Return the interface that a value of GLOO_SOCKET_IFNAME selects. Gloo requires the exact name."""
    return match_interfaces(f"={name}", interfaces)


# The function that finds the interfaces for a value of each variable.
MATCHING = {NCCL: match_interfaces, GLOO: match_gloo_interface}


def selected_interface(facts: HostFacts, env: Mapping[str, str]) -> Interface | None:
    """Return the interface over which a worker with the environment `env` connects to other workers.

    A worker with GPUs uses NCCL's variable, and a worker without GPUs uses the variable of Gloo, torch's
    library for CPUs. If that variable is not set, the other one counts. Return None if neither is set, or if
    the variable selects no interface that is up with an address.
    """
    variables = (NCCL, GLOO) if env.get("IMGKIT_DEVICE") == "cuda" else (GLOO, NCCL)
    for variable in variables:
        value = env.get(variable)
        if value:
            interfaces = MATCHING[variable](value, facts.interfaces)
            return next(
                (interface for interface in interfaces if interface.running and interface.addresses), None
            )
    return None


def set_interface(plan: FabricPlanBuilder, preferred: Sequence[str] = ()) -> Interface | None:
    """Set the interface of NCCL's bootstrap and of Gloo for a run on several nodes, and return it.

    In the bootstrap, NCCL's processes find each other over TCP. For a run on one node, the interface is only
    reported. If no interface is usable, return None and block a run on several nodes.

    Parameters
    ----------
    preferred : names of interfaces, the best one first.
    """
    drop_absent_interfaces(plan)  # such values of the recipe or the image must not count as presets below
    choice = best_interface(plan, preferred)
    if choice is None:
        reason = "no interface except lo is up with an address (/sys/class/net, /proc/net/fib_trie)"
        plan.leave_variable(NCCL, reason)
        # If no interface is known at all, /sys is not visible, and the node may still work.
        if plan.has_several_nodes and plan.facts.interfaces:
            fix = "start the container with the host's network (docker: --network host)"
            plan.add_blocker(f"{reason}: nodes cannot connect", fix)
        return None
    interface, reason = choice
    interface_list = format_interfaces([interface.name], plan.facts)
    if plan.has_several_nodes:
        plan.set_variable(NCCL, interface_list, reason)
        plan.set_variable(GLOO, interface.name, reason)
    else:
        one_node_reason = f"one node needs none; several nodes would use it: {reason}"
        plan.leave_variable(NCCL, one_node_reason, right_value=interface_list)
    return interface


def partition_variables(facts: HostFacts, system: SystemFacts, partition: str) -> Mapping[str, str]:
    """Return the variables that select the interfaces of a Slurm partition, if the recipe lists any for it.

    They replace the recipe's variables for the whole cluster. If the recipe lists no interfaces for
    `partition`, the result is empty.
    """
    if partition not in system.partitions:
        return {}
    names = system.partitions[partition].interfaces
    if not names:
        return {}
    # NCCL uses several interfaces, but Gloo only one, so Gloo gets the first interface that this node has.
    present = {interface.name for interface in facts.interfaces}
    gloo_name = next((name for name in names if name in present), names[0])
    return {NCCL: format_interfaces(names, facts), GLOO: gloo_name}


def drop_absent_interfaces(plan: FabricPlanBuilder) -> None:
    """Drop the recipe's or the image's choice of interfaces if this node has none of them.

    NCCL exits with an error if NCCL_SOCKET_IFNAME selects no interface.
    """
    interfaces = plan.facts.interfaces
    if not interfaces:  # /sys is not visible, so the node's interfaces are unknown
        return
    names = ", ".join(interface.name for interface in interfaces)
    for variable in INTERFACES:
        value = plan.worker_value(variable)
        if value and not match_interfaces(value, interfaces):
            plan.drop_variable(variable, f"this machine has no such interface (/sys/class/net: {names})")


def set_socket_counts(plan: FabricPlanBuilder, interface: Interface) -> None:
    """Set how many sockets NCCL opens for each TCP connection over an interface of 100 Gbit/s or more.

    With one socket, which is NCCL's default, the connection cannot reach the rate of such an interface. On
    AWS and Google Cloud, NCCL chooses the number itself, so the variables are not set.
    """
    if not plan.has_several_nodes or (interface.speed_Mbps or 0) < _FAST_Mbps:
        return
    folder = f"/sys/class/net/{interface.name}"
    cloud = _SELF_TUNED.get(interface.vendor)
    for variable in SOCKET_COUNTS:
        if cloud:
            evidence = f"{folder}/device/vendor: {interface.vendor}"
            plan.leave_variable(variable, f"{evidence}: NCCL chooses the number itself on {cloud}")
        else:
            evidence = f"{folder}/speed: {interface.speed_Mbps}"
            reason = f"{evidence}; NCCL's user guide recommends 4 for generic 100G networks"
            plan.set_variable(variable, "4", reason)


def drop_socket_counts(plan: FabricPlanBuilder, fabric_name: str) -> None:
    """Drop the recipe's or the image's number of sockets, because it only has an effect on TCP."""
    for variable in SOCKET_COUNTS:
        plan.drop_variable(variable, f"it only affects TCP, but the data uses {fabric_name}")

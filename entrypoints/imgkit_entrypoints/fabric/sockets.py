"""Decide the network interface of NCCL and Gloo.

NCCL connects its processes over this interface even where the data uses RDMA. Without RDMA, the data uses it
as well.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence

from imgkit_entrypoints.fabric import ports
from imgkit_entrypoints.fabric.fabric_plan import INTERFACES, PlanDraft
from imgkit_entrypoints.facts.host_facts import HostFacts, Interface
from imgkit_entrypoints.system import SystemFacts

NCCL, GLOO = INTERFACES
THREADS = ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD")
# Prefixes of interfaces that containers, virtual machines and tunnels create. Other nodes cannot reach them.
_VIRTUAL = (
    *("docker", "virbr", "veth", "br-", "cni", "flannel", "cali", "tun", "kube", "podman", "ifb", "dummy"),
)
_SELF_TUNED = {"0x1d0f": "AWS", "0x1ae0": "Google"}
"""PCI vendors for which NCCL chooses the number of sockets itself (net_socket.cc)."""
# NCCL's user guide recommends more sockets "for generic 100G networks", so not below 100 Gbit/s.
_FAST_Mbps = 100_000


def usable_interfaces(facts: HostFacts) -> tuple[Interface, ...]:
    """Return the interfaces over which another node could reach this one.

    They are up and have an address. Loopback and the interfaces of containers are left out.
    """
    return tuple(
        item
        for item in facts.interfaces
        if item.running and item.addresses and item.name != "lo" and not item.name.startswith(_VIRTUAL)
    )


def usable_names(facts: HostFacts, *prefixes: str) -> list[str]:
    """Return the names of the usable interfaces that begin with one of `prefixes`."""
    return [item.name for item in usable_interfaces(facts) if item.name.startswith(prefixes)]


def best_interface(
    facts: HostFacts, head: str = "", prefer: Sequence[str] = ()
) -> tuple[Interface, str] | None:
    """Return the interface over which nodes should connect, and the reason for the choice.

    Return None if no interface is usable. The first rule that applies decides: the interface is in the head's
    network; it is one of `prefer`; the default route uses it; it is the first usable interface.

    Parameters
    ----------
    head : address of node 0, or "". A loopback address means that all nodes are on this machine.
    prefer : names of interfaces, the best one first.
    """
    loopback = next((item for item in facts.interfaces if item.name == "lo"), None)
    if loopback and _is_inside(head, "127.0.0.0/8"):
        return loopback, f"the head is {head}: all nodes are on this machine ({describe_interface(loopback)})"
    candidates = usable_interfaces(facts)
    if not candidates:
        return None
    by_name = {item.name: item for item in candidates}
    routes = [route for route in facts.routes if route.interface in by_name]
    for route in routes:
        # A route without a gateway leads to a network in which this node is itself.
        if route.gateway == "0.0.0.0" and _is_inside(head, route.network):  # noqa: S104
            return by_name[route.interface], f"the head {head} is in its network {route.network}"
    for name in prefer:
        if name in by_name:
            return by_name[name], f"the fabric's own interface ({describe_interface(by_name[name])})"
    default_routes = [route for route in routes if route.network == "0.0.0.0/0"]
    if default_routes:
        route = min(default_routes, key=lambda route: route.metric)
        interface = by_name[route.interface]
        reason = f"/proc/net/route: the default route via {route.gateway} ({describe_interface(interface)})"
        return interface, reason
    first = next((item for item in candidates if item.ipv4), candidates[0])
    return first, f"the first interface that is up with an address ({describe_interface(first)})"


def _is_inside(head: str, network: str) -> bool:
    """Return whether the address `head` is in `network`. It is not if `head` is empty or a host name."""
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

    NCCL reads each name as a prefix. If a name is also a prefix of another interface, the value begins with
    ``=``, which makes the names exact: ``["eth1"] -> "=eth1"`` on a node with eth1 and eth10.
    """
    unselected = [item.name for item in facts.interfaces if item.name not in names]
    is_exact = any(text.startswith(name) for text in unselected for name in names)
    return ("=" if is_exact else "") + ",".join(names)


def match_interfaces(selection: str, interfaces: Iterable[Interface]) -> tuple[Interface, ...]:
    """Return those of `interfaces` that a value of NCCL_SOCKET_IFNAME selects.

    The format is ``[^][=]prefix,...``: ``^`` excludes what follows, and ``=`` makes the names exact. For
    example, ``^docker,lo`` selects all interfaces whose names begin with neither of the two.
    """
    excludes, is_exact, names = ports.parse_selection(selection)

    def is_listed(interface: str) -> bool:
        return any(interface == name if is_exact else interface.startswith(name) for name in names)

    return tuple(item for item in interfaces if not names or is_listed(item.name) != excludes)


def matching_gloo(name: str, interfaces: Iterable[Interface]) -> tuple[Interface, ...]:
    """Return the interface that a value of GLOO_SOCKET_IFNAME names, which must be the exact name."""
    return match_interfaces(f"={name}", interfaces)


# The function that reads the value of each variable.
MATCHING = {NCCL: match_interfaces, GLOO: matching_gloo}


def selected_interface(facts: HostFacts, env: Mapping[str, str]) -> Interface | None:
    """Return the interface over which a worker with the variables `env` connects.

    Return None if no variable is set, or if the variable selects no interface that is up with an address.
    With GPUs the variable of NCCL comes first, otherwise the variable of Gloo, torch's library for CPUs.
    """
    variables = (NCCL, GLOO) if env.get("IMGKIT_DEVICE") == "cuda" else (GLOO, NCCL)
    for variable in variables:
        value = env.get(variable)
        if value:
            interfaces = MATCHING[variable](value, facts.interfaces)
            return next((item for item in interfaces if item.running and item.addresses), None)
    return None


def decide_interface(draft: PlanDraft, prefer: Sequence[str] = ()) -> Interface | None:
    """Set the interface of NCCL's bootstrap and of Gloo for a run on several nodes, and return it.

    In the bootstrap, NCCL's processes find each other over TCP. On one node, the interface is only reported.
    If no interface is usable, return None, and block a run on several nodes.

    Parameters
    ----------
    prefer : names of interfaces, the best one first.
    """
    refuse_absent(draft)
    choice = best_interface(draft.facts, draft.head, prefer)
    if choice is None:
        reason = "no interface except lo is up with an address (/sys/class/net, /proc/net/fib_trie)"
        draft.note(NCCL, "", reason)
        if draft.has_several_nodes and draft.facts.interfaces:
            fix = "start the container with the host's network (docker: --network host)"
            draft.block(f"{reason}: nodes cannot connect", fix)
        return None
    interface, reason = choice
    value = format_interfaces([interface.name], draft.facts)
    if draft.has_several_nodes:
        draft.set(NCCL, value, reason)
        draft.set(GLOO, interface.name, reason)
    else:
        draft.note(NCCL, value, f"one node needs none; several nodes would use it: {reason}")
    return interface


def use_partition(draft: PlanDraft, system: SystemFacts | None, partition: str) -> None:
    """Use the interfaces that the recipe states for a Slurm partition, not those for the whole cluster.

    The recipe's values in `draft` are changed. Without an entry for `partition`, nothing changes.
    """
    if system is None or partition not in system.partitions:
        return
    names = system.partitions[partition].interfaces
    if not names:
        return
    # NCCL takes several interfaces, Gloo only one: the first that this node has.
    present = {item.name for item in draft.facts.interfaces}
    gloo_name = next((name for name in names if name in present), names[0])
    draft.recipe = {**draft.recipe, NCCL: format_interfaces(names, draft.facts), GLOO: gloo_name}
    draft.partition = partition


def refuse_absent(draft: PlanDraft) -> None:
    """Leave out interface names of the recipe or the image that this node does not have.

    NCCL would end with an error if a name selected no interface.
    """
    interfaces = draft.facts.interfaces
    if not interfaces:  # /sys is not visible, so nothing is known about them
        return
    names = ", ".join(item.name for item in interfaces)
    for variable in (NCCL, GLOO):
        value = draft.value(variable)
        if value and not match_interfaces(value, interfaces):
            draft.refuse(variable, f"this machine has no such interface (/sys/class/net: {names})")


def decide_threads(draft: PlanDraft, interface: Interface | None) -> None:
    """Set the number of sockets of NCCL's TCP transport for an interface of 100 Gbit/s or more.

    With NCCL's default of one socket, such an interface cannot reach its rate. On AWS and Google Cloud, NCCL
    chooses the number itself, so nothing is set there.
    """
    if interface is None or not draft.has_several_nodes or (interface.speed_Mbps or 0) < _FAST_Mbps:
        return
    folder = f"/sys/class/net/{interface.name}"
    cloud = _SELF_TUNED.get(interface.vendor)
    for variable in THREADS:
        if cloud:
            evidence = f"{folder}/device/vendor: {interface.vendor}"
            draft.note(variable, "", f"{evidence}: NCCL chooses the number itself on {cloud}")
        else:
            evidence = f"{folder}/speed: {interface.speed_Mbps}"
            draft.set(variable, "4", f"{evidence}; NCCL's user guide recommends 4 for generic 100G networks")


def refuse_threads(draft: PlanDraft, kind: str) -> None:
    """Leave out the recipe's or image's number of sockets, which matters only where the data uses TCP."""
    for variable in THREADS:
        draft.refuse(variable, f"it only affects TCP, but the data uses {kind}")

"""The network interface of NCCL and Gloo: always for the bootstrap, and without RDMA for the data as well."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence

from imgkit_entrypoints.fabric import ports
from imgkit_entrypoints.fabric.fabric_plan import INTERFACES, PlanDraft
from imgkit_entrypoints.facts.host_facts import HostFacts, Interface
from imgkit_entrypoints.system import Partition, SystemFacts

NCCL, GLOO = INTERFACES
THREADS = ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD")
_VIRTUAL = (
    *("docker", "virbr", "veth", "br-", "cni", "flannel", "cali", "tun", "kube", "podman", "ifb", "dummy"),
)
_SELF_TUNED = {"0x1d0f": "AWS", "0x1ae0": "Google"}
"""PCI vendors for which NCCL chooses the number of sockets itself (net_socket.cc)."""
_FAST_Mbps = 100_000


def usable_interfaces(facts: HostFacts) -> tuple[Interface, ...]:
    """Return the interfaces that another node could reach: up, with an address, no loopback and no bridge."""
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
    """Return the interface on which nodes connect, and the reason; None if there is none.

    Order: the interface whose network contains the head; one of `prefer`; the interface of the default route;
    the first one.
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
        if route.gateway == "0.0.0.0" and _is_inside(head, route.network):  # noqa: S104
            return by_name[route.interface], f"the head {head} is in its network {route.network}"
    for name in prefer:
        if name in by_name:
            return by_name[name], f"the fabric's own interface ({describe_interface(by_name[name])})"
    defaults = [route for route in routes if route.network == "0.0.0.0/0"]
    if defaults:
        route = min(defaults, key=lambda route: route.metric)
        interface = by_name[route.interface]
        return (
            interface,
            f"/proc/net/route: the default route via {route.gateway} ({describe_interface(interface)})",
        )
    first = next((item for item in candidates if item.ipv4), candidates[0])
    return first, f"the first interface that is up with an address ({describe_interface(first)})"


def _is_inside(head: str, network: str) -> bool:
    try:
        return ipaddress.ip_address(head) in ipaddress.ip_network(network)
    except ValueError:
        return False


def describe_interface(interface: Interface) -> str:
    """Return the interface as /sys shows it."""
    speed = f", speed {interface.speed_Mbps} Mb/s" if interface.speed_Mbps else ""
    return f"{state_of(interface)}{speed}, {', '.join(interface.addresses)}"


def state_of(interface: Interface) -> str:
    """Return the file with the interface's state, and its content."""
    return f"/sys/class/net/{interface.name}/operstate: {interface.state}"


def format_interfaces(names: Sequence[str], facts: HostFacts) -> str:
    """Return names as a value of NCCL_SOCKET_IFNAME; ``=`` makes prefixes exact."""
    unselected = [item.name for item in facts.interfaces if item.name not in names]
    is_exact = any(text.startswith(name) for text in unselected for name in names)
    return ("=" if is_exact else "") + ",".join(names)


def match_interfaces(selection: str, interfaces: Iterable[Interface]) -> tuple[Interface, ...]:
    """Return the interfaces that a value of NCCL_SOCKET_IFNAME selects (``[^][=]prefix,...``)."""
    excludes, is_exact, names = ports.parse_selection(selection)

    def is_listed(interface: str) -> bool:
        return any(interface == name if is_exact else interface.startswith(name) for name in names)

    return tuple(item for item in interfaces if not names or is_listed(item.name) != excludes)


def matching_gloo(name: str, interfaces: Iterable[Interface]) -> tuple[Interface, ...]:
    """Return the interface that a value of GLOO_SOCKET_IFNAME names."""
    return match_interfaces(f"={name}", interfaces)


MATCHING = {NCCL: match_interfaces, GLOO: matching_gloo}


def selected_interface(facts: HostFacts, env: Mapping[str, str]) -> Interface | None:
    """Return the interface that a worker with `env` connects over; None if no variable selects one."""
    is_cuda = env.get("IMGKIT_DEVICE") == "cuda"
    for variable in (NCCL, GLOO) if is_cuda else (GLOO, NCCL):
        if value := env.get(variable):
            interfaces = MATCHING[variable](value, facts.interfaces)
            return next((item for item in interfaces if item.running and item.addresses), None)
    return None


def decide_interface(draft: PlanDraft, prefer: Sequence[str] = ()) -> Interface | None:
    """Decide the interface of NCCL's bootstrap and of Gloo; only a run on several nodes needs one."""
    refuse_absent(draft)
    choice = best_interface(draft.facts, draft.head, prefer)
    if choice is None:
        reason = "no interface except lo is up with an address (/sys/class/net, /proc/net/fib_trie)"
        draft.note(NCCL, "", reason)
        if draft.several and draft.facts.interfaces:
            fix = "start the container with the host's network (docker: --network host)"
            draft.block(f"{reason}: nodes cannot connect", fix)
        return None
    interface, reason = choice
    value = format_interfaces([interface.name], draft.facts)
    if draft.several:
        draft.set(NCCL, value, reason)
        draft.set(GLOO, interface.name, reason)
    else:
        draft.note(NCCL, value, f"one node needs none; several nodes would use it: {reason}")
    return interface


def use_partition(draft: PlanDraft, system: SystemFacts | None, partition: str) -> None:
    """Take the interfaces that the recipe states for a partition, before those of its ``env``."""
    names = system.partitions.get(partition, Partition()).interfaces if system else ()
    if names:
        present = {item.name for item in draft.facts.interfaces}
        gloo = next((name for name in names if name in present), names[0])
        draft.recipe = {**draft.recipe, NCCL: format_interfaces(names, draft.facts), GLOO: gloo}
        draft.partition = partition


def refuse_absent(draft: PlanDraft) -> None:
    """Leave out interface names of the recipe that this machine does not have: NCCL would not start."""
    interfaces = draft.facts.interfaces
    for variable in (NCCL, GLOO):
        value = draft.value(variable)
        if value and interfaces and not match_interfaces(value, interfaces):
            names = ", ".join(item.name for item in interfaces)
            draft.refuse(variable, f"this machine has no such interface (/sys/class/net: {names})")


def decide_threads(draft: PlanDraft, interface: Interface | None) -> None:
    """Decide the socket numbers of NCCL's TCP transport, if its default of one socket is too low."""
    if interface is None or not draft.several or (interface.speed_Mbps or 0) < _FAST_Mbps:
        return
    folder = f"/sys/class/net/{interface.name}"
    cloud = _SELF_TUNED.get(interface.vendor)
    for variable in THREADS:
        if cloud:
            evidence = f"{folder}/device/vendor: {interface.vendor}"
            draft.note(variable, "", f"{evidence}: NCCL chooses the number itself on {cloud}")
        else:
            reason = f"{folder}/speed: {interface.speed_Mbps}; "
            draft.set(variable, "4", f"{reason}NCCL's user guide recommends 4 for generic 100G networks")


def refuse_threads(draft: PlanDraft, kind: str) -> None:
    """Leave out socket numbers of the recipe if the data does not use TCP."""
    for variable in THREADS:
        draft.refuse(variable, f"it only affects TCP, but the data uses {kind}")

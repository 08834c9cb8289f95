"""The network interface of NCCL and Gloo: always for the bootstrap, and without RDMA for the data as well."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence

from imgkit_entrypoints.fabric.fabric_plan import INTERFACES, PlanDraft
from imgkit_entrypoints.facts import HostFacts, Interface
from imgkit_entrypoints.system import Partition, SystemFacts

NCCL, GLOO = INTERFACES
THREADS = ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD")
_VIRTUAL = (
    "docker",
    "virbr",
    "veth",
    "br-",
    "cni",
    "flannel",
    "cali",
    "tun",
    "kube",
    "podman",
    "ifb",
    "dummy",
)
_SELF_TUNED = {"0x1d0f": "AWS", "0x1ae0": "Google"}
"""PCI vendors for which NCCL chooses the number of sockets itself (net_socket.cc)."""
_FAST_Mbps = 100_000


def usable(facts: HostFacts) -> tuple[Interface, ...]:
    """Interfaces that another node could reach: up, with an address, no loopback and no bridge."""
    return tuple(
        item
        for item in facts.interfaces
        if item.running and item.addresses and item.name != "lo" and not item.name.startswith(_VIRTUAL)
    )


def best(facts: HostFacts, head: str = "", prefer: Sequence[str] = ()) -> tuple[Interface, str] | None:
    """Interface on which nodes connect, and the reason; None if there is none.

    Order: the interface whose network contains the head; one of `prefer`; the interface of the default route;
    the first one.
    """
    loopback = next((item for item in facts.interfaces if item.name == "lo"), None)
    if loopback and _inside(head, "127.0.0.0/8"):
        return loopback, f"the head is {head}: all nodes are on this machine ({describe(loopback)})"
    candidates = usable(facts)
    if not candidates:
        return None
    by_name = {item.name: item for item in candidates}
    for route in facts.routes:
        if route.interface in by_name and route.gateway == "0.0.0.0" and _inside(head, route.network):  # noqa: S104
            return by_name[route.interface], f"the head {head} is in its network {route.network}"
    for name in prefer:
        if name in by_name:
            return by_name[name], f"the fabric's own interface ({describe(by_name[name])})"
    default = [route for route in facts.routes if route.network == "0.0.0.0/0" and route.interface in by_name]
    if default:
        route = min(default, key=lambda item: item.metric)
        found = by_name[route.interface]
        return found, f"/proc/net/route: the default route via {route.gateway} ({describe(found)})"
    first = next((item for item in candidates if item.ipv4), candidates[0])
    return first, f"the first interface that is up with an address ({describe(first)})"


def _inside(head: str, network: str) -> bool:
    try:
        return ipaddress.ip_address(head) in ipaddress.ip_network(network)
    except ValueError:
        return False


def describe(item: Interface) -> str:
    """Interface as /sys shows it."""
    speed = f", speed {item.speed_Mbps} Mb/s" if item.speed_Mbps else ""
    return f"/sys/class/net/{item.name}/operstate: {item.state}{speed}, {', '.join(item.addresses)}"


def spell(names: Sequence[str], facts: HostFacts) -> str:
    """Names as a value of NCCL_SOCKET_IFNAME; ``=`` makes prefixes exact."""
    others = [item.name for item in facts.interfaces if item.name not in names]
    exact = any(other.startswith(name) for other in others for name in names)
    return ("=" if exact else "") + ",".join(names)


def matching(text: str, interfaces: Iterable[Interface]) -> tuple[Interface, ...]:
    """Interfaces that a value of NCCL_SOCKET_IFNAME selects (``[^][=]prefix,...``)."""
    exclude = text.startswith("^")
    body = text.removeprefix("^")
    exact = body.startswith("=")
    words = [word for word in body.removeprefix("=").split(",") if word]

    def selected(name: str) -> bool:
        return any(name == word if exact else name.startswith(word) for word in words)

    return tuple(item for item in interfaces if not words or selected(item.name) != exclude)


def selected(facts: HostFacts, env: Mapping[str, str]) -> Interface | None:
    """Interface with an address that a worker with `env` connects over; None if no variable selects one."""
    cuda = env.get("IMGKIT_DEVICE") == "cuda"
    for variable in (NCCL, GLOO) if cuda else (GLOO, NCCL):
        if value := env.get(variable):
            exact = "=" if variable == GLOO else ""
            found = matching(exact + value, facts.interfaces)
            return next((item for item in found if item.running and item.addresses), None)
    return None


def decide(draft: PlanDraft, prefer: Sequence[str] = ()) -> Interface | None:
    """Decide the interface of NCCL's bootstrap and of Gloo; only a run on several nodes needs one."""
    refuse_absent(draft)
    found = best(draft.facts, draft.head, prefer)
    if found is None:
        reason = "no interface except lo is up with an address (/sys/class/net, /proc/net/fib_trie)"
        draft.note(NCCL, "", reason)
        if draft.several and draft.facts.interfaces:
            draft.block(
                f"{reason}: nodes cannot connect",
                "start the container with the host's network (docker: --network host)",
            )
        return None
    item, reason = found
    if not draft.several:
        draft.note(
            NCCL,
            spell([item.name], draft.facts),
            f"one node needs none; several nodes would use it: {reason}",
        )
        return item
    draft.set(NCCL, spell([item.name], draft.facts), reason)
    draft.set(GLOO, item.name, reason)
    return item


def of_partition(draft: PlanDraft, system: SystemFacts | None, name: str) -> None:
    """Take the interfaces that the recipe states for the partition `name`, before those of its ``env``."""
    own = system.partitions.get(name, Partition()).interfaces if system else ()
    if own:
        there = [item.name for item in draft.facts.interfaces if item.name in own]
        one = next((name for name in own if name in there), own[0])
        draft.recipe = {**draft.recipe, NCCL: spell(own, draft.facts), GLOO: one}
        draft.partition = name


def refuse_absent(draft: PlanDraft) -> None:
    """Leave out interface names of the recipe that this machine does not have: NCCL would not start."""
    for variable in (NCCL, GLOO):
        value = draft.value(variable)
        if value and draft.facts.interfaces and not matching(value, draft.facts.interfaces):
            names = ", ".join(item.name for item in draft.facts.interfaces)
            draft.refuse(variable, f"this machine has no such interface (/sys/class/net: {names})")


def threads(draft: PlanDraft, item: Interface | None) -> None:
    """Decide the socket numbers of NCCL's TCP transport, if its default of one socket is too low."""
    if item is None or not draft.several or item.speed_Mbps is None or item.speed_Mbps < _FAST_Mbps:
        return
    if item.vendor in _SELF_TUNED:
        path, cloud = f"/sys/class/net/{item.name}/device/vendor", _SELF_TUNED[item.vendor]
        reason = f"{path}: {item.vendor}: NCCL chooses the number itself on {cloud}"
        for variable in THREADS:
            draft.note(variable, "", reason)
        return
    reason = (
        f"/sys/class/net/{item.name}/speed: {item.speed_Mbps}; NCCL's user guide recommends 4 for generic "
        "100G networks"
    )
    for variable in THREADS:
        draft.set(variable, "4", reason)


def refuse_threads(draft: PlanDraft, kind: str) -> None:
    """Leave out socket numbers of the recipe if the data does not use TCP."""
    for variable in THREADS:
        draft.refuse(variable, f"it only affects TCP, but the data uses {kind}")

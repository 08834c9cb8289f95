"""Interfaces and IPv4 routes, read from files only: a saved tree shows the same as the machine."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence

from imgkit_entrypoints.facts.compute import pci_path
from imgkit_entrypoints.facts.host_facts import Interface, Route
from imgkit_entrypoints.facts.reader import Reader


def interfaces(reader: Reader) -> tuple[Interface, ...]:
    """Every interface with its addresses, IPv4 first."""
    names = [name for name in reader.names("/sys/class/net") if reader.exists(f"/sys/class/net/{name}/")]
    v4, v6 = _ipv4(reader, names), _ipv6(reader)
    return tuple(_interface(reader, name, (*v4.get(name, ()), *v6.get(name, ()))) for name in names)


def _interface(reader: Reader, name: str, addresses: tuple[str, ...]) -> Interface:
    path = f"/sys/class/net/{name}"
    speed = reader.number(f"{path}/speed")
    return Interface(
        name=name,
        state=reader.text(f"{path}/operstate") or "",
        speed_Mbps=speed if speed and speed > 0 else None,
        addresses=addresses,
        physical=reader.exists(f"{path}/device"),
        pci=pci_path(reader, f"{path}/device"),
        vendor=reader.text(f"{path}/device/vendor") or "",
    )


def routes(reader: Reader) -> tuple[Route, ...]:
    """Routes of /proc/net/route that are up."""
    lines = (reader.text("/proc/net/route") or "").splitlines()[1:]
    found = (_route(line.split()) for line in lines)
    return tuple(route for route in found if route is not None)


def _route(words: Sequence[str]) -> Route | None:
    if len(words) < 8:
        return None
    try:
        if not int(words[3], 16) & 1:
            return None
        network = ipaddress.ip_network(f"{_address(words[1])}/{_address(words[7])}", strict=False)
        gateway, metric = _address(words[2]), int(words[6])
    except ValueError:
        return None
    return Route(interface=words[0], network=str(network), gateway=gateway, metric=metric)


def _address(text: str) -> str:
    # The kernel prints the number in memory order.
    return str(ipaddress.IPv4Address(bytes.fromhex(text)[::-1]))


def _ipv4(reader: Reader, names: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """IPv4 addresses by interface: each local address of fib_trie belongs to the interface with its network.

    If several interfaces share a network, as rails of a fabric often do, the files do not say which one has
    which address. The addresses are assigned in order: whether an interface has an address stays right.
    """
    local = _local(reader.text("/proc/net/fib_trie") or "")
    found: dict[str, tuple[str, ...]] = {"lo": tuple(text for text in local if text.startswith("127."))}
    shared: dict[str, list[str]] = {}
    for route in routes(reader):
        if route.gateway == "0.0.0.0" and route.network != "0.0.0.0/0" and route.interface in names:  # noqa: S104
            shared.setdefault(route.network, [])
            if route.interface not in shared[route.network]:
                shared[route.network].append(route.interface)
    # The narrowest network first: a host route to a peer has no local address, a /16 follows its /24.
    given: set[str] = set()
    for text in sorted(shared, key=lambda item: -ipaddress.IPv4Network(item).prefixlen):
        network, owners = ipaddress.IPv4Network(text), shared[text]
        mine = [item for item in local if item not in given and ipaddress.IPv4Address(item) in network]
        given.update(mine)
        for position, address in enumerate(mine):
            owner = owners[position % len(owners)]
            found[owner] = (*found.get(owner, ()), address)
    return found


def _local(trie: str) -> tuple[str, ...]:
    """Addresses marked ``host LOCAL``, each once, in the order of the file."""
    found: dict[str, None] = {}
    address = ""
    for line in trie.splitlines():
        leaf = re.match(r"\s*\|-- (\S+)", line)
        if leaf:
            address = leaf[1]
        elif re.match(r"\s*/32 host LOCAL", line) and _is_ipv4(address):
            found[address] = None
    return tuple(found)


def _is_ipv4(text: str) -> bool:
    try:
        ipaddress.IPv4Address(text)
    except ValueError:
        return False
    return True


def _ipv6(reader: Reader) -> Mapping[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for line in (reader.text("/proc/net/if_inet6") or "").splitlines():
        words = line.split()
        if len(words) != 6:
            continue
        try:
            address = ipaddress.IPv6Address(bytes.fromhex(words[0]))
        except ValueError:
            continue
        if not address.is_link_local:
            found[words[5]] = (*found.get(words[5], ()), str(address))
    return found

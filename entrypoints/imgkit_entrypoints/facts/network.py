"""Network devices, read from files only: interfaces, IPv4 routes, RDMA devices, and Slingshot's cxi devices.

A saved tree shows the same as the machine. Files of /sys/class/infiniband follow Linux:
drivers/infiniband/core/sysfs.c, Documentation/ABI/stable/sysfs-class-infiniband.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping, Sequence

from imgkit_entrypoints.facts.compute import numa_node, pci_path
from imgkit_entrypoints.facts.host_facts import CxiDevice, Gid, Interface, Port, RdmaDevice, Route
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


SYSFS = "/sys/class/infiniband"


def rdma_devices(reader: Reader) -> tuple[RdmaDevice, ...]:
    """Every RDMA device with its ports and used GIDs."""
    verbs = _verbs(reader)
    return tuple(_rdma_device(reader, name, verbs.get(name, "")) for name in reader.names(SYSFS))


def _verbs(reader: Reader) -> dict[str, str]:
    """File under /dev/infiniband by device name."""
    folder = "/sys/class/infiniband_verbs"
    found = {}
    for name in reader.names(folder):
        device = reader.text(f"{folder}/{name}/ibdev")
        if device and name.startswith("uverbs"):
            found[device] = f"/dev/infiniband/{name}"
    return found


def _rdma_device(reader: Reader, name: str, verbs: str) -> RdmaDevice:
    path = f"{SYSFS}/{name}"
    return RdmaDevice(
        name=name,
        path=path,
        node_type=reader.text(f"{path}/node_type") or "",
        pci=pci_path(reader, f"{path}/device"),
        numa_node=numa_node(reader, f"{path}/device"),
        vendor=reader.text(f"{path}/device/vendor") or "",
        physical=reader.target(f"{path}/device/physfn").rsplit("/", 1)[-1],
        netdevs=reader.names(f"{path}/device/net"),
        verbs=verbs,
        verbs_opens=bool(verbs) and opens(reader, verbs),
        ports=tuple(
            _rdma_port(reader, name, int(number)) for number in reader.names(f"{path}/ports", "[0-9]{1,9}")
        ),
    )


def _rdma_port(reader: Reader, device: str, number: int) -> Port:
    path = f"{SYSFS}/{device}/ports/{number}"
    return Port(
        device=device,
        number=number,
        path=path,
        state=reader.text(f"{path}/state") or "",
        phys_state=reader.text(f"{path}/phys_state") or "",
        link_layer=reader.text(f"{path}/link_layer") or "",
        rate=reader.text(f"{path}/rate") or "",
        lid=reader.text(f"{path}/lid") or "",
        gids=_gids(reader, path),
    )


def _gids(reader: Reader, port: str) -> tuple[Gid, ...]:
    found = []
    for slot in reader.names(f"{port}/gids", "[0-9]{1,9}"):
        value = reader.text(f"{port}/gids/{slot}")
        # A table has up to 256 slots, most of them empty; the attributes of an empty slot answer EINVAL.
        if value is None or not _used_gid(value):
            continue
        found.append(
            Gid(
                index=int(slot),
                value=value,
                kind=reader.text(f"{port}/gid_attrs/types/{slot}") or "",
                netdev=reader.text(f"{port}/gid_attrs/ndevs/{slot}") or "",
            )
        )
    return tuple(found)


def _used_gid(gid: str) -> bool:
    if not gid.strip("0:"):
        return False
    try:
        ipaddress.IPv6Address(gid)
    except ValueError:
        return False
    return True


def opens(reader: Reader, path: str) -> bool:
    """True if the device file opens for reading and writing: only then may this container use it.

    A saved tree has plain files instead, and facts.json lists the files that did not open under ``closed``.
    """
    if not reader.live:
        return reader.exists(path) and path not in reader.not_files().get("closed", ())
    try:
        # Not os.access: a container's device rules apply only when a file is opened.
        os.close(os.open(reader.place(path), os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def cxi_devices(reader: Reader) -> tuple[CxiDevice, ...]:
    """Slingshot NICs, from any of the three places that show them."""
    places = ("/sys/class/cxi", "/sys/class/cxi_user", "/dev")
    seen: dict[str, str] = {}
    for folder in places:
        for name in reader.names(folder, r"cxi\d+"):
            seen.setdefault(name, f"{folder}/{name}")
    return tuple(
        CxiDevice(
            name=name,
            path=path,
            numa_node=numa_node(reader, f"{path}/device"),
            pci=pci_path(reader, f"{path}/device"),
            opens=opens(reader, f"/dev/{name}"),
        )
        for name, path in seen.items()
    )

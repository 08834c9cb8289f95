"""Read the machine's network interfaces, IPv4 routes, RDMA devices and Slingshot NICs from files.

The files in /sys/class/infiniband are described in Linux's Documentation/ABI/stable/sysfs-class-infiniband,
and their code is drivers/infiniband/core/sysfs.c.
"""

from __future__ import annotations

import ipaddress
import itertools
import os
import re
from collections.abc import Mapping, Sequence

from imgkit_entrypoints.facts.compute import numa_node, pci_path
from imgkit_entrypoints.facts.host_facts import CxiDevice, Gid, Interface, Port, RdmaDevice, Route
from imgkit_entrypoints.facts.reader import Reader


def read_interfaces(reader: Reader) -> tuple[Interface, ...]:
    """Return every network interface in /sys/class/net with its state, speed and addresses."""
    folder = "/sys/class/net"
    # Interfaces are folders. The kernel's bonding module also creates the file bonding_masters in this
    # folder.
    names = [name for name in reader.names(folder) if reader.exists(f"{folder}/{name}/")]
    v4, v6 = _assign_ipv4_addresses(reader, names), _read_ipv6_addresses(reader)
    interfaces = []
    for name in names:
        path = f"{folder}/{name}"
        speed = reader.number(f"{path}/speed")
        interface = Interface(
            name=name,
            state=reader.text(f"{path}/operstate") or "",
            # The kernel reports -1 for an unknown speed.
            speed_Mbps=speed if speed and speed > 0 else None,
            addresses=(*v4.get(name, ()), *v6.get(name, ())),
            physical=reader.exists(f"{path}/device"),  # a bridge or a tunnel has no device
            pci=pci_path(reader, f"{path}/device"),
            vendor=reader.text(f"{path}/device/vendor") or "",
        )
        interfaces.append(interface)
    return tuple(interfaces)


def read_routes(reader: Reader) -> tuple[Route, ...]:
    """Return the IPv4 routes of /proc/net/route that are up. Lines that cannot be parsed are left out."""
    lines = (reader.text("/proc/net/route") or "").splitlines()
    routes = [_parse_route(line) for line in lines[1:]]  # the first line is a header
    return tuple(route for route in routes if route is not None)


def _parse_route(line: str) -> Route | None:
    """Return the route in a line of /proc/net/route, or None if it is not up or the line cannot be parsed.

    For example, ``eth0 0000000A 00000000 0001 0 0 100 00FFFFFF 0 0 0`` is a route to 10.0.0.0/24.
    """
    try:
        interface, network, gateway, flags, _, _, metric, mask, *_ = line.split()
        subnet = ipaddress.ip_network(
            f"{_parse_route_address(network)}/{_parse_route_address(mask)}", strict=False
        )
        is_up = int(flags, 16) & 1  # RTF_UP
        route = Route(
            interface=interface,
            network=str(subnet),
            gateway=_parse_route_address(gateway),
            metric=int(metric),
        )
    except ValueError:
        return None
    return route if is_up else None


def _parse_route_address(text: str) -> str:
    """Convert a hexadecimal number of /proc/net/route to an IPv4 address: ``0100000A -> 10.0.0.1``."""
    # The kernel prints the number in the byte order of the machine, which is little-endian.
    return str(ipaddress.IPv4Address(bytes.fromhex(text)[::-1]))


def _assign_ipv4_addresses(reader: Reader, names: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """Return the IPv4 addresses of each interface by its name, as far as the files in /proc show them.

    /proc/net/fib_trie lists the addresses of this machine, but not their interfaces. So each address is
    assigned to the interface that has a route to its network. The interfaces of a fabric often share a
    network, and no file shows which of them has which address. In this case the addresses are assigned in
    order. An interface may then get the address of another one, but callers mostly need to know that each has
    an address.
    """
    local_addresses = _find_local_addresses(reader.text("/proc/net/fib_trie") or "")
    loopback = tuple(address for address in local_addresses if address.startswith("127."))
    addresses_by_interface = {"lo": loopback}
    unassigned = [address for address in local_addresses if address not in loopback]
    interfaces_by_network = _group_interfaces_by_network(reader, names)
    # Small networks come first, so that an address in a /24 is not assigned to a /16 that contains the /24.
    for network in sorted(interfaces_by_network, key=lambda network: -network.prefixlen):
        inside = [address for address in unassigned if ipaddress.IPv4Address(address) in network]
        # Each address is assigned only once.
        unassigned = [address for address in unassigned if address not in inside]
        # If there are more addresses than interfaces, `cycle` begins again with the first interface.
        for address, interface in zip(inside, itertools.cycle(interfaces_by_network[network])):
            addresses_by_interface[interface] = (*addresses_by_interface.get(interface, ()), address)
    return addresses_by_interface


def _group_interfaces_by_network(
    reader: Reader, names: Sequence[str]
) -> Mapping[ipaddress.IPv4Network, Sequence[str]]:
    """Return the interfaces in `names` by the network to which they have a direct route.

    A direct route has no gateway, so this node is itself in the network.
    """
    interfaces_by_network: dict[ipaddress.IPv4Network, list[str]] = {}
    for route in read_routes(reader):
        is_direct = route.gateway == "0.0.0.0" and route.network != "0.0.0.0/0"  # noqa: S104
        if not is_direct or route.interface not in names:
            continue
        interfaces = interfaces_by_network.setdefault(ipaddress.IPv4Network(route.network), [])
        # An interface may have several routes to a network, but is listed once. Otherwise it would get more
        # than its share of the addresses (`_assign_ipv4_addresses`).
        if route.interface not in interfaces:
            interfaces.append(route.interface)
    return interfaces_by_network


def _find_local_addresses(trie: str) -> tuple[str, ...]:
    """Return the IPv4 addresses of this machine, in their order, without duplicates.

    `trie` is the content of /proc/net/fib_trie, the kernel's routing table.
    """
    # The line "|-- 10.0.0.1" names an address. The line "/32 host LOCAL" below it means that the address is
    # one of this machine. A dict keeps each address once.
    local_addresses: dict[str, None] = {}
    address = ""
    for line in trie.splitlines():
        address_match = re.match(r"\s*\|-- (\S+)", line)
        if address_match:
            address = address_match[1]
        elif re.match(r"\s*/32 host LOCAL", line) and _is_address(address, ipaddress.IPv4Address):
            local_addresses[address] = None
    return tuple(local_addresses)


def _is_address(text: str, kind: type[ipaddress.IPv4Address] | type[ipaddress.IPv6Address]) -> bool:
    """Return whether `text` is a valid address of the given kind, IPv4 or IPv6."""
    try:
        kind(text)
    except ValueError:
        return False
    return True


def _read_ipv6_addresses(reader: Reader) -> Mapping[str, tuple[str, ...]]:
    """Return the IPv6 addresses of each interface by its name, from /proc/net/if_inet6.

    Link-local addresses are left out. Every interface has one, and other nodes cannot use it without the name
    of the interface.
    """
    addresses: dict[str, tuple[str, ...]] = {}
    for line in (reader.text("/proc/net/if_inet6") or "").splitlines():
        try:
            digits, _, _, _, _, interface = line.split()
            address = ipaddress.IPv6Address(bytes.fromhex(digits))
        except ValueError:  # the line has another format, so skip it
            continue
        if not address.is_link_local:
            addresses[interface] = (*addresses.get(interface, ()), str(address))
    return addresses


SYSFS = "/sys/class/infiniband"


def read_rdma_devices(reader: Reader) -> tuple[RdmaDevice, ...]:
    """Return every RDMA device of /sys/class/infiniband with its ports and their GIDs."""
    verbs = _find_device_files(reader)
    return tuple(_read_rdma_device(reader, name, verbs.get(name, "")) for name in reader.names(SYSFS))


def _find_device_files(reader: Reader) -> dict[str, str]:
    """Return the device file of each RDMA device: ``{"mlx5_0": "/dev/infiniband/uverbs0"}``."""
    folder = "/sys/class/infiniband_verbs"
    names = reader.names(folder, "uverbs.*")
    devices = {name: reader.text(f"{folder}/{name}/ibdev") for name in names}
    return {device: f"/dev/infiniband/{name}" for name, device in devices.items() if device}


def _read_rdma_device(reader: Reader, name: str, verbs: str) -> RdmaDevice:
    """Read the RDMA device `name` from sysfs. `verbs` is its device file, or "" if sysfs names none."""
    path = f"{SYSFS}/{name}"
    port_numbers = reader.names(f"{path}/ports", "[0-9]{1,9}")
    return RdmaDevice(
        name=name,
        path=path,
        node_type=reader.text(f"{path}/node_type") or "",
        pci=pci_path(reader, f"{path}/device"),
        numa_node=numa_node(reader, f"{path}/device"),
        vendor=reader.text(f"{path}/device/vendor") or "",
        # Only a virtual function (a share of a card) has this link, which leads to the card itself.
        physical=reader.target(f"{path}/device/physfn").rsplit("/", 1)[-1],
        netdevs=reader.names(f"{path}/device/net"),
        verbs=verbs,
        verbs_opens=bool(verbs) and can_open(reader, verbs),
        ports=tuple(_read_port(reader, name, int(number)) for number in port_numbers),
    )


def _read_port(reader: Reader, device: str, number: int) -> Port:
    """Read a port of an RDMA device from /sys/class/infiniband/DEVICE/ports/NUMBER.

    The value is an empty text for each file that is missing.
    """
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
        gids=_read_gids(reader, path),
    )


def _read_gids(reader: Reader, port: str) -> tuple[Gid, ...]:
    """Return the GIDs of a port (its addresses for RDMA) in the order of their index, without empty slots.

    `port` is the folder of the port in sysfs.
    """
    gids = []
    for slot in reader.names(f"{port}/gids", "[0-9]{1,9}"):
        value = reader.text(f"{port}/gids/{slot}") or ""
        # A table has up to 256 slots, and most of them are empty. The GID of an empty slot consists of zeros,
        # and an attempt to read its type or device fails with EINVAL.
        if value.strip("0:") and _is_address(value, ipaddress.IPv6Address):
            kind = reader.text(f"{port}/gid_attrs/types/{slot}") or ""
            netdev = reader.text(f"{port}/gid_attrs/ndevs/{slot}") or ""
            gids.append(Gid(index=int(slot), value=value, kind=kind, netdev=netdev))
    return tuple(gids)


def can_open(reader: Reader, path: str) -> bool:
    """Return whether this container can open the device file `path` for reading and writing.

    In a saved tree of files (``IMGKIT_ROOT``), devices cannot be opened, so it is enough that the file
    exists.
    """
    if not reader.live:
        return reader.exists(path)
    try:
        # os.access is not sufficient, because the container's device rules only apply when a file is opened.
        os.close(os.open(reader.real_path(path), os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))  # noqa: TID251 - a device
    except OSError:
        return False
    return True


def read_cxi_devices(reader: Reader) -> tuple[CxiDevice, ...]:
    """Return the Slingshot NICs of this machine.

    Depending on the driver and the container, they are visible in one or several of three folders. The path
    of a NIC is the one in the first folder that shows it.
    """
    paths: dict[str, str] = {}
    for folder in ("/sys/class/cxi", "/sys/class/cxi_user", "/dev"):
        for name in reader.names(folder, r"cxi\d+"):
            paths.setdefault(name, f"{folder}/{name}")
    return tuple(
        CxiDevice(
            name=name,
            path=path,
            numa_node=numa_node(reader, f"{path}/device"),
            pci=pci_path(reader, f"{path}/device"),
            opens=can_open(reader, f"/dev/{name}"),
        )
        for name, path in paths.items()
    )

"""RDMA devices of /sys/class/infiniband, and Slingshot's cxi devices, which that folder does not list.

File contents follow Linux: drivers/infiniband/core/sysfs.c,
Documentation/ABI/stable/sysfs-class-infiniband.
"""

from __future__ import annotations

import ipaddress
import os

from imgkit_entrypoints.facts.compute import numa_node, pci_path
from imgkit_entrypoints.facts.host_facts import CxiDevice, Gid, Port, RdmaDevice
from imgkit_entrypoints.facts.reader import Reader

SYSFS = "/sys/class/infiniband"


def devices(reader: Reader) -> tuple[RdmaDevice, ...]:
    """Every RDMA device with its ports and used GIDs."""
    verbs = _verbs(reader)
    return tuple(_device(reader, name, verbs.get(name, "")) for name in reader.names(SYSFS))


def _verbs(reader: Reader) -> dict[str, str]:
    """File under /dev/infiniband by device name."""
    folder = "/sys/class/infiniband_verbs"
    found = {}
    for name in reader.names(folder):
        device = reader.text(f"{folder}/{name}/ibdev")
        if device and name.startswith("uverbs"):
            found[device] = f"/dev/infiniband/{name}"
    return found


def _device(reader: Reader, name: str, verbs: str) -> RdmaDevice:
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
            _port(reader, name, int(number)) for number in reader.names(f"{path}/ports", "[0-9]{1,9}")
        ),
    )


def _port(reader: Reader, device: str, number: int) -> Port:
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
        if value is None or not _used(value):
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


def _used(gid: str) -> bool:
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

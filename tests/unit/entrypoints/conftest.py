"""Machines as folders of small text files: one table, and one function that writes a row of it.

The folders are written at run time, because git keeps no empty directories. A slot that answers EINVAL is a
directory in place of the file: reading it fails with an OSError as well, even for root.
"""

from __future__ import annotations

import functools
import ipaddress
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from file_tree import write_files

NDR200, HDR100, SDR = "200 Gb/sec (2X NDR)", "100 Gb/sec (2X HDR)", "10 Gb/sec (4X SDR)"
FE80 = "fe80::b226:28ff:fed3:b0f0"


@dataclass(frozen=True, kw_only=True)
class PortRow:
    rate: str = NDR200
    link: str = "InfiniBand"
    state: str = "4: ACTIVE"
    phys: str = "5: LinkUp"
    lid: str = "0x1f3"
    gids: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    """(address, type) by slot; all other slots are empty."""
    slots: int = 4


@dataclass(frozen=True, kw_only=True)
class Nic:
    name: str
    ports: tuple[PortRow, ...] = (PortRow(),)
    pci: str = "pci0000:16/0000:16:01.0/0000:17:00.0"
    numa: int = 0
    physfn: str = ""
    """PCI path of the physical function."""
    netdev: str = ""
    node_type: str = "1: CA"
    verbs: bool = True


@dataclass(frozen=True, kw_only=True)
class Net:
    name: str
    address: str = ""
    speed: int = 0
    state: str = "up"
    vendor: str = "0x15b3"


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Expected result of `fabric.choose_fabric` for a tree."""

    fabric: str
    """Kind, rate in Gbit/s and devices: ``infiniband 400 mlx5_0:1 mlx5_1:1``."""
    env: Mapping[str, str | None] = field(default_factory=dict)
    """Variables set for two nodes with NCCL 2.27.3; None: must not be set."""
    old_env: Mapping[str, str | None] = field(default_factory=dict)
    """Differences with NCCL 2.20.5."""
    reported: Mapping[str, str] = field(default_factory=dict)
    """Words of the reason, by the value of a variable that is only reported."""
    warns: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    old_blocks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Tree:
    expect: Expected
    nics: tuple[Nic, ...] = ()
    nets: tuple[Net, ...] = (Net(name="eth0", address="10.0.0.5/24", speed=25000),)
    cxi: int = 0
    gpus: tuple[tuple[str, str, int], ...] = ()
    """(model, PCI path, NUMA node)."""


def roce(
    gids: Mapping[int, tuple[str, str]], *, rate: str = "100 Gb/sec (4X EDR)", slots: int = 4
) -> PortRow:
    return PortRow(rate=rate, link="Ethernet", lid="0x0", gids=gids, slots=slots)


def nic(number: int, port: PortRow, **fields: object) -> Nic:
    bus = 0x10 + 0x10 * number
    pci = f"pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.0"
    return Nic(name=f"mlx5_{number}", ports=(port,), pci=pci, **fields)  # type: ignore[arg-type]


LOCAL_ONLY = {0: (FE80, "IB/RoCE v1"), 1: (FE80, "RoCE v2")}
MAPPED_V1, MAPPED_V2 = ("::ffff:10.1.2.3", "IB/RoCE v1"), ("::ffff:10.1.2.3", "RoCE v2")
POD_GIDS = {8: MAPPED_V1, 9: MAPPED_V2}
V1_V2_AT = {3: {2: MAPPED_V1, 3: MAPPED_V2}, 5: {4: MAPPED_V1, 5: MAPPED_V2}}
BOND = "mlx5_bond_0"


def bond(
    gids: Mapping[int, tuple[str, str]],
    *,
    slots: int = 4,
    netdev: str = "",
    verbs: bool = True,
    **expected: Any,
) -> Tree:
    """A pod with one RoCE device of 100 Gbit/s."""
    return Tree(
        nics=(Nic(name=BOND, ports=(roce(gids, slots=slots),), netdev=netdev, verbs=verbs),),
        expect=Expected(fabric="roce 100 mlx5_bond_0:1", **expected),
    )


TREES: dict[str, Tree] = {
    "ib4_ndr200": Tree(
        nics=(
            *(nic(number, PortRow()) for number in range(4)),
            nic(4, roce(LOCAL_ONLY | V1_V2_AT[3]), netdev="eno1"),
        ),
        nets=(
            Net(name="eno1", address="10.0.0.5/24", speed=25000),
            Net(name="ib0", address="10.20.0.5/16"),
        ),
        expect=Expected(
            fabric="infiniband 800 mlx5_0:1 mlx5_1:1 mlx5_2:1 mlx5_3:1",
            env={
                "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_3:1",
                "NCCL_IB_GID_INDEX": None,
                "NCCL_IB_DISABLE": None,
                "NCCL_SOCKET_IFNAME": "ib0",
                "GLOO_SOCKET_IFNAME": "ib0",
            },
            reported={"mlx5_4:1": "NCCL cannot mix InfiniBand and Ethernet"},
        ),
    ),
    "roce_pod": bond(
        POD_GIDS,
        slots=10,
        netdev="net1",
        env={"NCCL_IB_HCA": f"={BOND}:1", "NCCL_IB_GID_INDEX": None, "NCCL_SOCKET_NTHREADS": None},
        old_env={"NCCL_IB_GID_INDEX": "9"},
        reported={"9": "finds 9 on mlx5_bond_0:1 itself"},
    ),
    "roce_single_v2": bond(
        {0: (FE80, "IB/RoCE v1"), 3: MAPPED_V2},
        env={"NCCL_IB_GID_INDEX": None},
        old_env={"NCCL_IB_GID_INDEX": "3"},
        reported={"3": "10.1.2.3"},
    ),
    "roce_no_ipv4": bond(
        LOCAL_ONLY,
        netdev="net1",
        env={"NCCL_IB_GID_INDEX": None},
        blocks=("net1 has no IPv4 address",),
        old_blocks=("net1 has no IPv4 address",),
    ),
    "roce_two_nics_diff": Tree(
        nics=(nic(0, roce(V1_V2_AT[3], slots=6)), nic(1, roce(V1_V2_AT[5], slots=6))),
        expect=Expected(
            fabric="roce 200 mlx5_0:1 mlx5_1:1",
            env={"NCCL_IB_GID_INDEX": None, "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1"},
            reported={"3 on mlx5_0:1, 5 on mlx5_1:1": " itself: "},
            old_blocks=("3 on mlx5_0:1, 5 on mlx5_1:1",),
        ),
    ),
    "roce_idx10": bond(
        {10: ("::ffff:10.9.9.9", "RoCE v2"), 2: MAPPED_V2},
        slots=12,
        old_env={"NCCL_IB_GID_INDEX": "2"},
        reported={"2": "10.1.2.3"},
    ),
    "ports_down": Tree(
        nics=(
            nic(0, PortRow(state="1: DOWN", phys="3: Disabled")),
            nic(1, PortRow(state="2: INIT")),
            nic(2, PortRow(state="3: ARMED")),
        ),
        expect=Expected(
            fabric="tcp 25 eth0",
            env={"NCCL_IB_DISABLE": "1", "NCCL_IB_HCA": None, "NCCL_SOCKET_IFNAME": "eth0"},
            reported={
                "mlx5_0:1": "1: DOWN, phys_state: 3: Disabled",
                "mlx5_1:1": "no subnet manager",
                "mlx5_2:1": "not activated",
            },
        ),
    ),
    "slow_rate": Tree(
        nics=(
            nic(0, PortRow()),
            nic(1, PortRow()),
            nic(2, PortRow(rate=HDR100)),
            nic(3, PortRow(rate=SDR)),
        ),
        expect=Expected(
            fabric="infiniband None mlx5_0:1 mlx5_1:1 mlx5_2:1 mlx5_3:1",
            warns=("mlx5_2:1 is degraded", "mlx5_3:1: rate unknown"),
        ),
    ),
    "two_ports": Tree(
        nics=(Nic(name="mlx5_0", ports=(PortRow(), PortRow())),),
        expect=Expected(
            fabric="infiniband 400 mlx5_0:1 mlx5_0:2",
            env={"NCCL_IB_HCA": "=mlx5_0:1,mlx5_0:2"},
            reported={"mlx5_0:1,mlx5_0:2": "/sys/class/infiniband/mlx5_0/device: 0000:17:00.0"},
        ),
    ),
    "vf": Tree(
        nics=(
            Nic(name="mlx5_0"),
            Nic(
                name="mlx5_1",
                pci="pci0000:16/0000:16:01.0/0000:17:01.2",
                physfn="pci0000:16/0000:16:01.0/0000:17:00.0",
            ),
        ),
        expect=Expected(
            fabric="infiniband 200 mlx5_0:1 mlx5_1:1",
            reported={
                "mlx5_1:1": "a virtual function",
                "mlx5_0:1,mlx5_1:1": "/sys/class/infiniband/mlx5_0/device: 0000:17:00.0",
            },
        ),
    ),
    "efa": Tree(
        nics=(
            Nic(
                name="rdmap0s6",
                ports=(PortRow(link="Unspecified", rate="100 Gb/sec (4X EDR)"),),
                node_type="7: unspecified",
            ),
        ),
        nets=(Net(name="ens5", address="10.0.0.5/24", speed=100000, vendor="0x1d0f"),),
        expect=Expected(
            fabric="tcp 100 ens5",
            env={"NCCL_IB_DISABLE": None, "NCCL_SOCKET_NTHREADS": None},
            reported={"rdmap0s6:1": "cannot use it through verbs"},
            warns=("aws-ofi-nccl",),
        ),
    ),
    "cxi4": Tree(
        cxi=4,
        nets=(
            *(
                Net(name=f"hsn{number}", address=f"10.30.0.{number + 1}/16", speed=200000)
                for number in range(4)
            ),
            Net(name="nmn0", address="10.168.0.10/17", speed=1000),
        ),
        gpus=tuple(
            ("NVIDIA GH200 120GB", f"pci000{number}:00/000{number}:00:00.0/000{number}:01:00.0", number)
            for number in range(4)
        ),
        expect=Expected(
            fabric="slingshot 800 cxi0 cxi1 cxi2 cxi3",
            env={
                "NCCL_NET": "AWS Libfabric",
                "NCCL_SOCKET_IFNAME": "hsn0,hsn1,hsn2,hsn3",
                "GLOO_SOCKET_IFNAME": "hsn0",
                "NCCL_NET_GDR_LEVEL": "PHB",
                "FI_CXI_RDZV_THRESHOLD": "0",
                "FI_CXI_RDZV_GET_MIN": "0",
                "FI_CXI_RDZV_EAGER_SIZE": "0",
                "NCCL_PROTO": "^LL128",
                "NCCL_IB_HCA": None,
            },
            old_env={"NCCL_PROTO": None},
            warns=("aws-ofi-nccl",),
        ),
    ),
    "none": Tree(
        expect=Expected(
            fabric="tcp 25 eth0",
            env={
                "NCCL_IB_DISABLE": "1",
                "NCCL_SOCKET_IFNAME": "eth0",
                "GLOO_SOCKET_IFNAME": "eth0",
                "NCCL_IB_HCA": None,
            },
        ),
    ),
    # No real site: this tree tests the rules for storage and management NICs among RoCE ports.
    "roce_storage": Tree(
        nics=(
            nic(0, roce(V1_V2_AT[3])),
            nic(1, roce(V1_V2_AT[3])),
            nic(5, roce(V1_V2_AT[3]), numa=1),
            nic(6, roce(LOCAL_ONLY)),
            nic(7, roce(V1_V2_AT[3])),
        ),
        gpus=(
            ("NVIDIA H100", "pci0000:10/0000:10:01.0/0000:12:00.0", 0),
            ("NVIDIA H100", "pci0000:20/0000:20:01.0/0000:22:00.0", 0),
        ),
        expect=Expected(
            fabric="roce 200 mlx5_0:1 mlx5_1:1",
            reported={
                "mlx5_5:1": "storage or management",
                "mlx5_6:1": "no IPv4 GID of type RoCE v2",
                "mlx5_7:1": "under its PCI switch",
            },
        ),
    ),
    "half_pod": bond(POD_GIDS, slots=10, verbs=False, warns=("/dev/infiniband", "rdma/rdma=1")),
}


def link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Relative, as in sysfs: a tree can be moved, and no link leads out of it.
    path.symlink_to(os.path.relpath(target, path.parent))


def plant(root: Path, tree: Tree) -> Path:
    """Write the machine `tree` under `root`."""
    for folder in ("sys/class", "sys/devices", "proc/net", "dev"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for number, device in enumerate(tree.nics):
        _plant_nic(root, device, number)
    if tree.nics:
        write_files(root, {"etc/libibverbs.d/mlx5.driver": "driver mlx5", "usr/lib64/libibverbs.so.1": ""})
    for number in range(tree.cxi):
        device = root / f"sys/devices/pci{number}:00/{number}:00:00.0"
        write_files(device, {"numa_node": "-1", f"cxi/cxi{number}/dev": "238:0"})
        link(device / f"cxi/cxi{number}/device", device)
        link(root / f"sys/class/cxi/cxi{number}", device / f"cxi/cxi{number}")
        write_files(root, {f"dev/cxi{number}": ""})
    for number, (model, pci, numa) in enumerate(tree.gpus):
        address = pci.rsplit("/", 1)[1]
        files = {
            f"sys/devices/{pci}/numa_node": str(numa),
            f"proc/driver/nvidia/gpus/{address}/information": f"Model: \t\t {model}\nIRQ: 1",
            f"dev/nvidia{number}": "",
        }
        write_files(root, files)
        link(root / "sys/bus/pci/devices" / address, root / "sys/devices" / pci)
    _plant_nets(root, tree.nets)
    return write_files(root, {"proc/self/status": "Cpus_allowed_list:\t0-7"})


def _plant_nic(root: Path, device: Nic, number: int) -> None:
    pci = root / "sys/devices" / device.pci
    home = pci / "infiniband" / device.name
    write_files(pci, {"numa_node": str(device.numa), "vendor": "0x15b3"})
    if device.physfn:
        link(pci / "physfn", root / "sys/devices" / device.physfn)
    if device.netdev:
        (pci / "net" / device.netdev).mkdir(parents=True)
    write_files(home, {"node_type": device.node_type})
    link(home / "device", pci)
    link(root / "sys/class/infiniband" / device.name, home)
    write_files(root, {f"sys/class/infiniband_verbs/uverbs{number}/ibdev": device.name})
    if device.verbs:
        write_files(root, {f"dev/infiniband/uverbs{number}": ""})
    for position, row in enumerate(device.ports, start=1):
        port = home / "ports" / str(position)
        files = {
            "state": row.state,
            "phys_state": row.phys,
            "rate": row.rate,
            "link_layer": row.link,
            "lid": row.lid,
        }
        write_files(port, files)
        for slot in range(row.slots):
            _plant_gid(port, slot, row.gids.get(slot), device.netdev or "eth0")


def _plant_gid(port: Path, slot: int, gid: tuple[str, str] | None, netdev: str) -> None:
    address = ipaddress.IPv6Address(gid[0] if gid else "::")
    write_files(port, {f"gids/{slot}": address.exploded})
    for name, content in (("types", gid and gid[1]), ("ndevs", gid and netdev)):
        path = f"gid_attrs/{name}/{slot}"
        if content:
            write_files(port, {path: content})
        else:
            (port / path).mkdir(parents=True)


def _plant_nets(root: Path, nets: tuple[Net, ...]) -> None:
    header = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT"
    routes, trie = [header], ["Local:", "|-- 127.0.0.1", "   /32 host LOCAL"]
    write_files(root, {"sys/class/net/lo/operstate": "unknown"})
    for net in nets:
        home = root / "sys/class/net" / net.name
        write_files(home, {"operstate": net.state, "device/vendor": net.vendor})
        if net.speed:
            write_files(home, {"speed": str(net.speed)})
        if net.address:
            interface = ipaddress.IPv4Interface(net.address)
            network = _kernel(interface.network.network_address)
            netmask = _kernel(interface.network.netmask)
            routes.append(f"{net.name} {network} 00000000 0001 0 0 0 {netmask} 0 0 0")
            trie += [f"   |-- {interface.ip}", "      /32 host LOCAL"]
    if nets:
        routes.insert(1, f"{nets[0].name} 00000000 0100000A 0003 0 0 0 00000000 0 0 0")
    write_files(root, {"proc/net/route": "\n".join(routes), "proc/net/fib_trie": "\n".join(trie)})


def _kernel(address: ipaddress.IPv4Address) -> str:
    return address.packed[::-1].hex().upper()


@pytest.fixture
def planted(tmp_path: Path) -> Callable[[str], Path]:
    """Function that writes a tree of the table, by its name, and returns its root."""
    return lambda name: plant(tmp_path / name, TREES[name])


@pytest.fixture(scope="session")
def kept_tree(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Function like `planted`, for tests that change nothing: it writes each tree once."""
    folder = tmp_path_factory.mktemp("trees")
    return functools.cache(lambda name: plant(folder / name, TREES[name]))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test with an argument `tree` for every row of the table."""
    if "tree" in metafunc.fixturenames:
        metafunc.parametrize(("tree", "row"), TREES.items(), ids=list(TREES))

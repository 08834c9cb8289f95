"""Dataclasses for the facts about a machine, such as its ports, interfaces and GPUs.

Contents of files are kept as they were read, so that messages can quote them as evidence.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from imgkit_entrypoints.facts.elf import SharedObject


@dataclass(frozen=True, slots=True, kw_only=True)
class Gid:
    """One address of an RDMA port (GID): a slot in the port's GID table that is not empty."""

    index: int
    value: str
    """Eight groups of four hex digits: ``fe80:0000:0000:0000:b226:28ff:fed3:b0f0``."""
    kind: str
    """``RoCE v2`` or ``IB/RoCE v1``, or empty if the kernel does not report the type."""
    netdev: str = ""

    @property
    def address(self) -> ipaddress.IPv6Address:
        """Return the GID as an IPv6 address."""
        return ipaddress.IPv6Address(self.value)

    @property
    def ipv4(self) -> str:
        """Return the IPv4 address in an IPv4-mapped GID, such as ``10.0.0.1``, or "" for other GIDs."""
        mapped = self.address.ipv4_mapped
        return str(mapped) if mapped else ""

    @property
    def link_local(self) -> bool:
        """Return whether the address begins with fe80:0:0:0. NCCL's search for a GID skips such addresses."""
        return self.address.packed[:8] == b"\xfe\x80" + bytes(6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """One port of an RDMA device."""

    device: str
    number: int
    path: str
    state: str
    """Content of the file ``state``: ``4: ACTIVE``."""
    phys_state: str
    link_layer: str
    rate: str
    """Content of the file ``rate``: ``200 Gb/sec (2X NDR)``."""
    lid: str = ""
    gids: tuple[Gid, ...] = ()

    @property
    def name(self) -> str:
        """Return the port as NCCL_IB_HCA names it: ``mlx5_0:1``."""
        return f"{self.device}:{self.number}"

    @property
    def active(self) -> bool:
        """Return whether the port is in state 4 (ACTIVE). NCCL uses no port in another state."""
        return self.state.startswith("4:")

    @property
    def has_link(self) -> bool:
        """Return whether the port is connected to a switch. In state 1 (DOWN), it is not connected."""
        return not self.state.startswith("1:")

    @property
    def rate_Gbps(self) -> float | None:
        """Return the rate of the link in Gbit/s, or None if it is unknown.

        If a kernel does not know the speed of a new NIC, it prints SDR. Therefore SDR counts as unknown.
        """
        match = re.match(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) Gb/sec \(([0-9]{1,9})X (\w+)\)", self.rate)
        return float(match[1]) if match and match[3] != "SDR" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaDevice:
    """One device of /sys/class/infiniband."""

    name: str
    path: str
    node_type: str
    pci: str
    """PCI path with the bridges above the device: ``pci0000:16/0000:16:01.0/0000:17:00.0``; may be empty."""
    numa_node: int | None
    """None if the kernel reports -1 or no number."""
    vendor: str
    physical: str
    """PCI address of the card that a virtual function belongs to; empty for other devices."""
    netdevs: tuple[str, ...]
    verbs: str
    """Device file, for example ``/dev/infiniband/uverbs0``; empty if sysfs names none."""
    verbs_opens: bool
    """True if the device file could be opened for reading and writing."""
    ports: tuple[Port, ...]

    @property
    def card(self) -> str:
        """Return the PCI address of the physical card, which is equal for all devices on this card.

        NCCL merges all devices of a card into one NIC (net_ib/init.cc). The ports of a card differ only in
        the last digit of their PCI address: ``0000:17:00.1`` and ``0000:17:00.0`` are on the card
        ``0000:17:00.0``. Virtual functions (shares of a card) also differ in the two digits before it. If the
        PCI address is unknown, return the device's name.
        """
        _, _, address = self.pci.rpartition("/")  # "0000:17:00.1"
        if not address:
            return self.name
        slot, _, _ = address.rpartition(".")  # "0000:17:00"
        is_virtual = self.physical != ""
        if not is_virtual:
            return f"{slot}.0"
        bus, _, _ = slot.rpartition(":")  # "0000:17"
        return f"{bus}:00.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class CxiDevice:
    """One Slingshot NIC."""

    name: str
    path: str
    numa_node: int | None
    pci: str
    opens: bool
    """True if /dev/cxiN could be opened for reading and writing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """One network interface."""

    name: str
    state: str
    """Content of the file ``operstate``: ``up``, ``down``, or ``unknown`` for lo and virtual interfaces."""
    speed_Mbps: int | None
    addresses: tuple[str, ...]
    """IPv4 addresses, then the IPv6 addresses that are not link-local."""
    physical: bool
    """True if sysfs links the interface to a device."""
    pci: str = ""
    vendor: str = ""

    @property
    def running(self) -> bool:
        """Return whether the interface can carry traffic.

        It is up, or it does not report its state (``unknown``), which is usual for lo.
        """
        return self.state in ("up", "unknown")

    @property
    def ipv4(self) -> str:
        """Return the first IPv4 address, or an empty text."""
        return next((text for text in self.addresses if ":" not in text), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One IPv4 route of the main table."""

    interface: str
    network: str
    """``10.0.0.0/24``; the default route is ``0.0.0.0/0``."""
    gateway: str
    metric: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU that the driver shows in /proc, even in a container that was started without ``--nv``."""

    model: str
    address: str
    pci: str
    """PCI address with the path of bridges above it."""
    numa_node: int | None
    file: str = ""
    """The device file, such as ``/dev/nvidia0``; empty if the driver does not report it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A resource limit. If it is unknown, it equals ``Limit()``: it has no value and is not unlimited."""

    value: int | None = None
    unlimited: bool = False

    def __str__(self) -> str:
        return "unlimited" if self.unlimited else str(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """A shared library that the dynamic linker finds under its name."""

    name: str
    path: str
    target: str
    """The file behind all links: ``/usr/lib/.../libnccl.so.2.20.5``."""
    version: str = ""
    """Version of libfabric or aws-ofi-nccl. Empty for other libraries, and if the version is unknown."""
    opens: str = ""
    """``libcudart.so`` if the library is aws-ofi-nccl and opens this file at run time; otherwise empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A file of the host or the image that could be loaded under the name of a library."""

    name: str
    path: str
    """Path on the host or in the image. It may be a symbolic link."""
    target: str
    """Path in the container of the file to which the links lead; empty if it is not visible there."""
    object: SharedObject | None = None
    version: str = ""
    """See `Library.version`."""
    opens: str = ""
    """See `Library.opens`."""
    fault: str = ""
    """Why the file cannot be read as a shared object; empty if `object` is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLibraries:
    """The fabric's libraries on the host and the libraries that they need, and the image's counterparts."""

    source: str
    """The variable or the setting of the recipe that requests the host's libraries."""
    bound: bool
    """True if the host's folders are visible in the container."""
    host: tuple[Candidate, ...] = ()
    image: tuple[Candidate, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaCompat:
    """The image's libraries for CUDA's forward compatibility."""

    source: str
    """The variable or the setting of the recipe that allows forward compatibility, or ``the default``."""
    is_for_major: bool = False
    """True if they are used only if the image's CUDA has a newer major version than the driver supports."""
    folder: str = ""
    """Folder with the image's libcuda.so.1; empty if the image has none."""
    target: str = ""
    """The real file of this libcuda.so.1: ``/usr/local/cuda/compat/lib.real/libcuda.so.575.57.08``."""
    cuda_folders: tuple[str, ...] = ()
    """Folders of the library path that also contain a libcuda.so.1, in the order of the path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A variable in an nccl.conf file. NCCL reads this file, but the variable is not in the environment."""

    name: str
    value: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """The facts about the machine, as this process sees it. Unknown facts are empty or None.

    A field ``X_source`` contains the evidence for the field ``X``.
    """

    hostname: str
    arch: str
    """Architecture as ``uname -m`` prints it: x86_64, aarch64."""
    python: str
    cpus: int
    """Processors that this process may use by affinity and cgroup quota. The node may have more."""
    gpus: int
    """Number of GPUs that a worker could use, by CUDA_VISIBLE_DEVICES and the driver's device files."""
    gpus_source: str
    gpus_problem: str = ""
    """Mistake in CUDA_VISIBLE_DEVICES, with its effect."""
    cpus_source: str = ""
    amd_gpus: str = ""
    """Evidence of AMD GPUs on a node without NVIDIA GPUs; otherwise empty."""
    allowed_cpus: str = ""
    """Processors on which this process may run, regardless of quotas: ``0-39,80-119``."""
    numa_cpus: Mapping[int, str] = field(default_factory=dict)
    """Processors of each NUMA node, ``{0: "0-39"}``. Nodes that have only memory are left out."""
    worker_gpus: tuple[Gpu, ...] = ()
    """GPUs that workers can use, by local rank. Empty if CUDA's order of them is unknown."""
    gpu_devices: tuple[Gpu, ...] = ()
    """All GPUs that the driver shows, including those of other jobs."""
    driver: str = ""
    """First line of /proc/driver/nvidia/version."""
    kernel: str = ""
    boot_id: str = ""
    memlock: Limit = Limit()
    """Limit of locked memory in bytes."""
    stack: Limit = Limit()
    """Limit of the stack in bytes."""
    open_files: Limit = Limit()
    processes: Limit = Limit()
    """Limit of processes and threads: the lowest of the user's limit and the limits of the cgroups."""
    processes_source: str = ""
    shm_bytes: int | None = None
    """Size of /dev/shm in bytes."""
    ephemeral_ports: tuple[int, int] | None = None
    """First and last port that the kernel assigns to outgoing connections."""
    rdma: tuple[RdmaDevice, ...] = ()
    rdma_cm: bool = False
    """True if /dev/infiniband/rdma_cm could be opened."""
    cxi: tuple[CxiDevice, ...] = ()
    interfaces: tuple[Interface, ...] = ()
    routes: tuple[Route, ...] = ()
    peermem: str = ""
    """Path and content of the peer memory module's version; empty without the module."""
    dmabuf: bool = False
    """True if the driver's open kernel module and the kernel allow DMA-BUF."""
    libraries: tuple[Library, ...] = ()
    verbs_providers: tuple[str, ...] = ()
    torch_version: str = ""
    torch_cuda: str = ""
    """Version of CUDA for which torch is built; empty if torch is built for CPUs only."""
    rocm: str = ""
    """Evidence that this image is built for AMD GPUs; empty if it is not."""
    nccl_version: str = ""
    """Version of the NCCL that torch loads: ``2.20.5``; empty if unknown."""
    nccl_source: str = ""
    nccl_of: str = ""
    """``torch`` if torch loads NCCL from a wheel, ``image`` if torch loads it from the library path."""
    image_nccl: str = ""
    """Version of the NCCL on the library path."""
    numa_fault: str = ""
    """Evidence that this container refuses the NUMA calls of CUDA's cuMem functions; otherwise empty."""
    has_cuda_compat: bool = False
    """True if the image or the library path contains libraries for CUDA's forward compatibility."""
    nccl_settings: tuple[Setting, ...] = ()
    image_env: Mapping[str, str] | None = None
    """Variables that the image sets, from its manifest. None if imgkit has not built the image."""
    host_libraries: HostLibraries | None = None
    """None if neither a variable nor the recipe requests libraries of the host."""
    cuda_compat: CudaCompat | None = None
    """None if a variable or the recipe forbids forward compatibility."""

    @property
    def nccl(self) -> tuple[int, ...] | None:
        """Return NCCL's version as numbers, such as ``(2, 20, 5)``, or None if it is unknown."""
        return tuple(int(part) for part in self.nccl_version.split(".")) if self.nccl_version else None

    @property
    def driver_version(self) -> str:
        """Return the version of the NVIDIA driver, such as ``580.159.04``, or "" if it is unknown."""
        match = re.search(r"\b[0-9]{3,5}\.[0-9]{1,5}(?:\.[0-9]{1,5})?", self.driver)
        return match[0] if match else ""

    def library(self, name: str) -> Library | None:
        """Return the library with this name on the library path, or None if there is none."""
        return next((library for library in self.libraries if library.name == name), None)

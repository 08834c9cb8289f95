"""The values that hold the facts of a machine.

They keep the texts of files as they were read, so that a message can quote them as evidence.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from imgkit_entrypoints.facts.elf import SharedObject


@dataclass(frozen=True, slots=True, kw_only=True)
class Gid:
    """One slot of a port's GID table that is in use."""

    index: int
    value: str
    """Eight groups of four hex digits: ``fe80:0000:0000:0000:b226:28ff:fed3:b0f0``."""
    kind: str
    """``RoCE v2``, ``IB/RoCE v1``, or empty where the kernel does not report it."""
    netdev: str = ""

    @property
    def address(self) -> ipaddress.IPv6Address:
        """Return the GID as an IPv6 address."""
        return ipaddress.IPv6Address(self.value)

    @property
    def ipv4(self) -> str:
        """Return the IPv4 address that the GID maps, such as ``10.0.0.1``, or an empty text."""
        mapped = self.address.ipv4_mapped
        return str(mapped) if mapped else ""

    @property
    def link_local(self) -> bool:
        """Return whether the address begins with fe80:0:0:0. NCCL's search skips such a GID."""
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
        """Return whether the port has a connection to a switch. It has none in state 1 (DOWN)."""
        return not self.state.startswith("1:")

    @property
    def rate_Gbps(self) -> float | None:
        """Return the rate of the link in Gbit/s, or None if it is unknown.

        A kernel that does not know the speed of a new NIC prints SDR, so SDR counts as unknown.
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
        """Return the address of this device's card.

        NCCL merges all ports and virtual functions (shares of a card) with the same address into one NIC. The
        ports of a card differ in the last digit of their address, and virtual functions also in the two
        digits of the device: ``0000:17:00.1 -> 0000:17:00.0`` (net_ib/init.cc). Without an address, return
        the device's name.
        """
        _, _, address = self.pci.rpartition("/")
        if not address:
            return self.name
        slot, _, _ = address.rpartition(".")
        if self.physical:
            bus, _, _ = slot.rpartition(":")
            return f"{bus}:00.0"
        return f"{slot}.0"


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
    """Content of the file ``operstate``: ``up``, ``down``, or ``unknown`` for lo and some virtual ones."""
    speed_Mbps: int | None
    addresses: tuple[str, ...]
    """IPv4 addresses, then the IPv6 addresses that are not link-local."""
    physical: bool
    """True if sysfs links the interface to a device."""
    pci: str = ""
    vendor: str = ""

    @property
    def running(self) -> bool:
        """Return whether the interface is up, or does not report its state, as lo."""
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
    """One GPU that the driver shows in /proc. A container without ``--nv`` shows it as well."""

    model: str
    address: str
    pci: str
    """PCI address with the path of bridges above it."""
    numa_node: int | None
    file: str = ""
    """The device file, such as ``/dev/nvidia0``; empty if the driver does not say which it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A resource limit. ``Limit()``, which has no value and is not unlimited, means that it is unknown."""

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
    """Version of libfabric or aws-ofi-nccl. Empty for other libraries, and if it is unknown."""
    opens: str = ""
    """``libcudart.so`` if the library is an aws-ofi-nccl that opens it while it runs; else empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A file that the host or the image has for the name of a library."""

    name: str
    path: str
    """Path on the host, or in the image, without following links."""
    target: str
    """Path in the container of the file behind all links. Empty if a link leads to a folder not bound."""
    object: SharedObject | None = None
    version: str = ""
    """See `Library.version`."""
    opens: str = ""
    """See `Library.opens`."""
    fault: str = ""
    """Why the file cannot be read as a shared object; empty if `object` is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLibraries:
    """The fabric's libraries on the host with all that they need, and the image's files of the same names."""

    source: str
    """The variable or the setting of the recipe that asks for the host's libraries."""
    bound: bool
    """True if the host's folders are visible in the container."""
    host: tuple[Candidate, ...] = ()
    image: tuple[Candidate, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaCompat:
    """The image's libraries for CUDA's forward compatibility."""

    source: str
    """The variable or the setting of the recipe that asks for them, or ``the default``."""
    is_for_major: bool = False
    """True if they are used only when the image's CUDA has a newer major version than the driver supports."""
    folder: str = ""
    """Folder with the image's libcuda.so.1; empty if the image has none."""
    target: str = ""
    """The file behind it: ``/usr/local/cuda/compat/lib.real/libcuda.so.575.57.08``."""
    cuda_folders: tuple[str, ...] = ()
    """Folders of the library path that also have a libcuda.so.1, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A variable in an nccl.conf file, which NCCL reads and no shell shows."""

    name: str
    value: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """The facts of the machine, as this process sees it. Unknown facts are empty or None.

    A field ``X_source`` holds the evidence for the field ``X``.
    """

    hostname: str
    arch: str
    """Architecture as ``uname -m`` prints it: x86_64, aarch64."""
    python: str
    cpus: int
    """Processors that this process may use by affinity and cgroup quota, not those of the node."""
    gpus: int
    """GPUs that a worker could use: CUDA_VISIBLE_DEVICES if set, else the driver's device files."""
    gpus_source: str
    gpus_problem: str = ""
    """Mistake in CUDA_VISIBLE_DEVICES, with its effect."""
    cpus_source: str = ""
    amd_gpus: str = ""
    """Evidence of AMD GPUs on a node that shows none of NVIDIA's; empty without them."""
    allowed_cpus: str = ""
    """Processors on which this process may run, without regard to quotas: ``0-39,80-119``."""
    numa_cpus: Mapping[int, str] = field(default_factory=dict)
    """Processors of each NUMA node, ``{0: "0-39"}``. Nodes that have only memory are left out."""
    worker_gpus: tuple[Gpu, ...] = ()
    """GPUs that workers can use, by local rank. Empty if CUDA's order of them is unknown."""
    gpu_devices: tuple[Gpu, ...] = ()
    """GPUs that the driver shows, also those of other jobs."""
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
    """Limit of processes and threads: the lowest of those of the user and the cgroups."""
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
    """Version of CUDA that torch is built for; empty for a torch of CPUs."""
    rocm: str = ""
    """Evidence that this image is made for AMD GPUs; empty if it is not."""
    nccl_version: str = ""
    """Version of the NCCL that torch loads: ``2.20.5``; empty if unknown."""
    nccl_source: str = ""
    nccl_of: str = ""
    """``torch`` if torch loads the NCCL of a wheel, ``image`` if it loads the one on the library path."""
    image_nccl: str = ""
    """Version of the NCCL on the library path."""
    numa_fault: str = ""
    """Evidence that this container refuses the NUMA calls of cuMem; empty if it does not."""
    has_cuda_compat: bool = False
    """True if the image or a folder of the library path has libraries for CUDA's forward compatibility."""
    nccl_settings: tuple[Setting, ...] = ()
    image_env: Mapping[str, str] | None = None
    """Variables that the image sets, from its manifest. None if unknown, as in an image of another tool."""
    host_libraries: HostLibraries | None = None
    """None if neither a variable nor the recipe asks for libraries of the host."""
    cuda_compat: CudaCompat | None = None
    """None if forward compatibility must not be used."""

    @property
    def nccl(self) -> tuple[int, ...] | None:
        """Return NCCL's version as numbers that can be compared, ``(2, 20, 5)``, or None if it is unknown."""
        return tuple(int(part) for part in self.nccl_version.split(".")) if self.nccl_version else None

    @property
    def driver_version(self) -> str:
        """Return the version of the NVIDIA driver, such as ``580.159.04``, or "" if it is unknown."""
        match = re.search(r"\b[0-9]{3,5}\.[0-9]{1,5}(?:\.[0-9]{1,5})?", self.driver)
        return match[0] if match else ""

    def library(self, name: str) -> Library | None:
        """Return the library with this name on the library path, or None if there is none."""
        return next((library for library in self.libraries if library.name == name), None)

"""Facts of a machine as values; raw texts are kept, so that a reason can quote them."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from imgkit_entrypoints.facts.elf import SharedObject


@dataclass(frozen=True, slots=True, kw_only=True)
class Gid:
    """One used slot of a port's GID table; empty slots are left out."""

    index: int
    value: str
    """Eight groups of four hex digits."""
    kind: str
    """``RoCE v2``, ``IB/RoCE v1``, or empty where the kernel does not report it."""
    netdev: str = ""

    @property
    def address(self) -> ipaddress.IPv6Address:
        """The GID as an address."""
        return ipaddress.IPv6Address(self.value)

    @property
    def ipv4(self) -> str:
        """The mapped IPv4 address, or empty."""
        mapped = self.address.ipv4_mapped
        return str(mapped) if mapped else ""

    @property
    def link_local(self) -> bool:
        """True for fe80:0:0:0:..., which NCCL skips."""
        return self.address.packed[:8] == b"\xfe\x80" + bytes(6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """One port of an RDMA device."""

    device: str
    number: int
    path: str
    state: str
    """Content of the file: ``4: ACTIVE``."""
    phys_state: str
    link_layer: str
    rate: str
    """Content of the file: ``200 Gb/sec (2X NDR)``."""
    lid: str = ""
    gids: tuple[Gid, ...] = ()

    @property
    def name(self) -> str:
        """Name for NCCL_IB_HCA: ``mlx5_0:1``."""
        return f"{self.device}:{self.number}"

    @property
    def active(self) -> bool:
        """True in state 4, the only one that NCCL uses."""
        return self.state.split(":")[0] == "4"

    @property
    def rate_Gbps(self) -> float | None:
        """Rate of the link, in 1e9 bit/s; None if unknown: kernels print SDR for a new speed."""
        match = re.match(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) Gb/sec \(([0-9]{1,9})X (\w+)\)", self.rate)
        return float(match[1]) if match and match[3] != "SDR" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaDevice:
    """One device of /sys/class/infiniband."""

    name: str
    path: str
    node_type: str
    pci: str
    """PCI address with the path of bridges above it; empty without a ``device`` link."""
    numa_node: int | None
    """None if the kernel reports -1 or no number."""
    vendor: str
    physical: str
    """PCI address of the card that a virtual function belongs to; else empty."""
    netdevs: tuple[str, ...]
    verbs: str
    """Device file, for example ``/dev/infiniband/uverbs0``; empty if sysfs names none."""
    verbs_opens: bool
    """True if the device file could be opened for reading and writing."""
    ports: tuple[Port, ...]

    @property
    def card(self) -> str:
        """PCI address by which NCCL merges ports and virtual functions of one card (net_ib/init.cc)."""
        address = self.pci.rsplit("/", 1)[-1]
        if not address:
            return self.name
        address = address[:-1] + "0"
        return address[:-4] + "00" + address[-2:] if self.physical else address


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
    """operstate: ``up``, ``down``, ``unknown`` (lo, some virtual ones)."""
    speed_Mbps: int | None
    addresses: tuple[str, ...]
    """IPv4 first, then IPv6 that is not link-local."""
    physical: bool
    """True if the interface has a device."""
    pci: str = ""
    vendor: str = ""

    @property
    def running(self) -> bool:
        """True if NCCL may use it."""
        return self.state in ("up", "unknown")

    @property
    def ipv4(self) -> str:
        """First IPv4 address, or empty."""
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
    """One GPU of the driver's /proc, which also a container without ``--nv`` shows."""

    model: str
    address: str
    pci: str
    """PCI address with the path of bridges above it."""
    numa_node: int | None
    file: str = ""
    """The device file, such as ``/dev/nvidia0``; empty if the driver does not say which it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A resource limit; it is unknown if it has no value and is not unlimited."""

    value: int | None = None
    unlimited: bool = False

    def __str__(self) -> str:
        return "unlimited" if self.unlimited else str(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """A shared library that the dynamic linker would find."""

    name: str
    path: str
    target: str
    """The file behind the link: ``/usr/lib/.../libnccl.so.2.20.5``."""
    version: str = ""
    """Version of libfabric or aws-ofi-nccl; empty for others, and if unknown."""
    opens: str = ""
    """Library that aws-ofi-nccl opens while it runs, by a name without a version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A library that the host or the image offers under a name."""

    name: str
    path: str
    """Path on its own side."""
    target: str
    """Path in the container of the file behind all links; empty where a link leads out of what is bound."""
    object: SharedObject | None = None
    version: str = ""
    """As `Library.version`."""
    opens: str = ""
    """As `Library.opens`."""
    fault: str = ""
    """Why the file is no shared object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLibraries:
    """Libraries of the fabric on the host, what they need there, and what the image has of all of these."""

    source: str
    """Who asks for them: a variable, or the recipe."""
    bound: bool
    """True if the host's folders are visible in the container."""
    host: tuple[Candidate, ...] = ()
    image: tuple[Candidate, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaCompat:
    """The image's libraries for CUDA's forward compatibility."""

    source: str
    """Who asks for them: a variable, the recipe, or nobody, so that the default counts."""
    is_for_major: bool = False
    """Whether they are used only for a newer major version of CUDA than the driver supports."""
    folder: str = ""
    """Folder with its libcuda.so.1; empty: the image has none."""
    target: str = ""
    """The file behind that: ``/usr/local/cuda/compat/lib.real/libcuda.so.575.57.08``."""
    cuda_folders: tuple[str, ...] = ()
    """Folders of the library path that have a libcuda.so.1 as well, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A variable set in an nccl.conf file, where no shell shows it."""

    name: str
    value: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """Facts of the machine as this process sees it."""

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
    """The same processors by affinity alone, as the kernel lists them: ``0-39,80-119``."""
    numa_cpus: Mapping[int, str] = field(default_factory=dict)
    """List of the processors of each NUMA node; nodes that have only memory are left out."""
    worker_gpus: tuple[Gpu, ...] = ()
    """GPUs that workers can use, by local rank; empty if CUDA's order of them is unknown."""
    gpu_devices: tuple[Gpu, ...] = ()
    driver: str = ""
    """First line of /proc/driver/nvidia/version."""
    kernel: str = ""
    boot_id: str = ""
    memlock: Limit = Limit()
    """Most bytes of locked memory."""
    stack: Limit = Limit()
    """Most bytes of stack."""
    open_files: Limit = Limit()
    processes: Limit = Limit()
    """Most processes and threads, of the user's limit and of the cgroups."""
    processes_source: str = ""
    shm_bytes: int | None = None
    """Size of /dev/shm."""
    ephemeral_ports: tuple[int, int] | None = None
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
    """Version of CUDA that torch is built for."""
    rocm: str = ""
    """Evidence that this image is made for AMD GPUs; empty if it is not."""
    nccl_version: str = ""
    """``2.20.5``; empty if unknown."""
    nccl_source: str = ""
    nccl_of: str = ""
    """``torch`` if torch loads the NCCL of a wheel beside it, ``image`` if that on the library path."""
    image_nccl: str = ""
    """Version of the NCCL on the library path."""
    numa_fault: str = ""
    """Evidence that this container refuses the NUMA calls of cuMem; empty if it does not."""
    has_cuda_compat: bool = False
    """True if the image or a folder of the library path has libraries for CUDA's forward compatibility."""
    nccl_settings: tuple[Setting, ...] = ()
    image_env: Mapping[str, str] | None = None
    """Variables that the image sets, by its manifest; None: unknown, as in an image of another tool."""
    host_libraries: HostLibraries | None = None
    """None: nobody asks for them."""
    cuda_compat: CudaCompat | None = None
    """None: nobody asks for it."""

    @property
    def nccl(self) -> tuple[int, ...] | None:
        """NCCL version as comparable numbers; None if unknown."""
        return tuple(int(part) for part in self.nccl_version.split(".")) if self.nccl_version else None

    @property
    def driver_version(self) -> str:
        """Version of the NVIDIA driver: ``580.159.04``; empty if unknown."""
        match = re.search(r"\b[0-9]{3,5}\.[0-9]{1,5}(?:\.[0-9]{1,5})?", self.driver)
        return match[0] if match else ""

    def library(self, name: str) -> Library | None:
        """Return the library `name`, or None."""
        return next((library for library in self.libraries if library.name == name), None)

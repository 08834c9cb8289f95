"""Read the processors, GPUs and limits of the node, as far as this process may use them."""

from __future__ import annotations

import collections
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from imgkit_entrypoints.arguments import parse_digits
from imgkit_entrypoints.facts.host_facts import Gpu, Limit
from imgkit_entrypoints.facts.reader import Reader

_CPU_LIST = re.compile(r"[0-9]{1,4}(-[0-9]{1,4})?(,[0-9]{1,4}(-[0-9]{1,4})?)*")
"""The kernel's format of a set of processors, such as ``0-39,80-119``. No kernel supports 10,000 of them."""
# Longest text in characters that is parsed, so that a damaged or hostile file does not cost time. 4096 is
# Linux's PATH_MAX.
_LONGEST_PATH = _LONGEST_CPU_LIST = 4096


def count_cpus(reader: Reader) -> tuple[int, str]:
    """Return the number of processors that this process may use (at least 1), and the evidence for it.

    Two limits count: the affinity of the process, and the CPU quotas of its cgroups (groups of processes with
    common limits). os.cpu_count() would be wrong, because it counts all processors of the node. A job step
    often gets only some of them, and torch would start too many threads.
    """
    count, source = _read_affinity(reader)
    # All quotas apply at the same time, so the lowest one counts.
    quota, quota_source = min(_read_quotas(reader), default=(None, ""))
    if quota is None:
        return count, source
    # Round down: if threads use more time than the quota, the kernel stops all of them until the next period.
    return min(count, max(1, int(quota))), f"{source}; {quota_source}"


def _read_affinity(reader: Reader) -> tuple[int, str]:
    """Return the number of processors on which the kernel may schedule this process, and the evidence."""
    text = read_allowed_cpus(reader)
    if text:
        return len(parse_cpu_list(text)), f"/proc/self/status: Cpus_allowed_list {text}"
    return len(os.sched_getaffinity(0)), "sched_getaffinity"


def read_allowed_cpus(reader: Reader) -> str:
    """Return the processors on which this process may run, in the kernel's format: ``0-39,80-119``.

    If they are unknown, return an empty text.
    """
    for line in (reader.text("/proc/self/status") or "").splitlines():
        name, _, value = line.partition(":")
        if name == "Cpus_allowed_list" and parse_cpu_list(value.strip()):
            return value.strip()
    return ""


def read_numa_cpus(reader: Reader) -> Mapping[int, str]:
    """Return the processors of each NUMA node, in the kernel's format: ``{0: "0-39", 1: "40-79"}``.

    NUMA nodes without processors are left out. For example, the memory of a GPU in a GH200 is such a node.
    """
    cpu_lists = {}
    for name in reader.names("/sys/devices/system/node", "node[0-9]{1,4}"):
        cpu_list = reader.text(f"/sys/devices/system/node/{name}/cpulist") or ""
        if parse_cpu_list(cpu_list):
            cpu_lists[int(name.removeprefix("node"))] = cpu_list
    return cpu_lists


def parse_cpu_list(text: str) -> frozenset[int]:
    """Parse the kernel's format for a set of processors: ``0-3,8`` gives 0, 1, 2, 3, 8.

    If `text` does not have this format, return an empty set.
    """
    if len(text) > _LONGEST_CPU_LIST or not _CPU_LIST.fullmatch(text):
        return frozenset()
    cpus: set[int] = set()
    for interval in text.split(","):
        first, _, last = interval.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _read_quotas(reader: Reader) -> Iterator[tuple[float, str]]:
    """Yield each CPU quota that limits this process, as a number of processors, with the evidence.

    A quota can be set for the cgroup of the process and for each of its parent cgroups. The kernel has two
    versions of cgroups with different files, and both are read.
    """
    for version, folder in _find_cgroups(reader, "cpu"):
        if version == 2:
            # "150000 100000" is 1.5 processors; "max 100000" is no quota
            quota_text = reader.text(f"{folder}/cpu.max") or ""
            match = re.fullmatch(r"([0-9]{1,18}) ([0-9]{1,18})", quota_text)
            if match and int(match[2]):
                yield int(match[1]) / int(match[2]), f"{folder}/cpu.max: {quota_text}"
        else:
            quota = reader.number(f"{folder}/cpu.cfs_quota_us")
            period = reader.number(f"{folder}/cpu.cfs_period_us")
            if quota is not None and quota > 0 and period:
                yield quota / period, f"{folder}/cpu.cfs_quota_us: {quota} of {period}"


def _find_cgroups(reader: Reader, controller: str) -> Iterator[tuple[int, str]]:
    """Yield the version and the folder of each cgroup that may limit this process.

    The process's own cgroup comes first, then its parents up to the root. Some of the folders may not exist.

    Parameters
    ----------
    controller : the kind of limit, such as ``cpu`` or ``pids``.
    """
    for line in (reader.text("/proc/self/cgroup") or "").splitlines():
        # A line is "0::/slurm/job_7" in version 2, and "4:cpu,cpuacct:/slurm/job_7" in version 1.
        fields = line.split(":", 2)
        if len(fields) != 3 or len(fields[2]) > _LONGEST_PATH:  # the file is damaged
            continue
        _, controllers, path = fields
        if controllers == "":  # version 2 has all controllers in one tree, so the line names none
            version, mounts = 2, ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
        elif controller in controllers.split(","):
            version, mounts = 1, (f"/sys/fs/cgroup/{controllers}", f"/sys/fs/cgroup/{controller}")
        else:
            continue
        for folder in _list_cgroup_folders(mounts, path):
            yield version, folder


def _list_cgroup_folders(mounts: Sequence[str], path: str) -> Iterator[str]:
    """Yield the folders of the cgroup `path` and of all its parents, below each folder in `mounts`.

    For example, the folders for ``/slurm/job_7`` below M are ``M/slurm/job_7``, ``M/slurm`` and ``M``. In a
    container, `path` is often a path on the host, and no such folder is mounted. Then M itself is the cgroup
    of this process.
    """
    cgroup = PurePosixPath("/") / path.lstrip("/")
    for folder in (cgroup, *cgroup.parents):
        for mount in dict.fromkeys(mounts):  # each mount once
            yield f"{mount}{folder}".rstrip("/")  # the last parent is "/"


def read_process_limit(reader: Reader) -> tuple[Limit, str]:
    """Return how many processes and threads are allowed, and the evidence.

    The limit can be set for the user and for each cgroup (group of processes) that contains this process. The
    lowest limit counts. If no limit can be read, the result is ``Limit(), ""``.
    """
    # The user's limit counts threads as well, and so does pids.max of a cgroup.
    user_limit = read_limit(reader, "Max processes")
    user_source = f"/proc/self/limits: Max processes {user_limit}"
    limits = []
    if user_limit.value is not None:
        limits.append((user_limit.value, user_source))
    for _, folder in _find_cgroups(reader, "pids"):
        cgroup_limit = reader.number(f"{folder}/pids.max")
        if cgroup_limit is not None:
            limits.append((cgroup_limit, f"{folder}/pids.max: {cgroup_limit}"))
    if limits:
        value, source = min(limits)
        return Limit(value=value), source
    if user_limit.unlimited:
        return user_limit, user_source
    return Limit(), ""


@dataclass(frozen=True, slots=True)
class VisibleGpus:
    """The number of GPUs that a worker could use, and the evidence."""

    count: int
    source: str
    problem: str = ""
    """A mistake in CUDA_VISIBLE_DEVICES with its effect; empty if there is none."""


ONLY_NVIDIA = "imgkit uses NVIDIA GPUs only"
"""Text that is added to the evidence on a node where all GPUs are from other makers."""
NVIDIA_FILES = r"nvidia\d+"
"""Names of the device files of NVIDIA GPUs."""
_OTHER_FILES = r"kfd|dri|accel|hl\d+|davinci\d+|neuron\d+"
"""Device files, or folders with them, of GPUs and accelerators of other makers."""
# Makers by the PCI vendor in /sys/bus/pci/devices/*/vendor.
_MAKERS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel", "0x1da3": "Habana"}
_ANY_DISPLAY, _DISPLAY_3D, _OTHER_DISPLAY, _ACCELERATOR = "0x03", "0x0302", "0x0380", "0x1200"
"""First digits of PCI classes (include/linux/pci_ids.h). The class of every display begins with 0x03."""
_PCI = "/sys/bus/pci/devices"
_DRIVER_GPUS = "/proc/driver/nvidia/gpus"


def _count_pci_gpus(reader: Reader, *, computing: bool = False) -> Mapping[str, int]:
    """Return the number of GPUs and accelerators on the PCI bus by maker: ``{"NVIDIA": 4}``.

    GPUs are visible on the bus even if a container hides their device files.

    Parameters
    ----------
    computing : True to leave out AMD cards that drive a display, because they may not support computing.
    """
    counts: collections.Counter[str] = collections.Counter()
    for address in reader.names(_PCI):
        pci_class = reader.text(f"{_PCI}/{address}/class") or ""
        vendor = reader.text(f"{_PCI}/{address}/vendor") or ""
        maker = _MAKERS.get(vendor, "")
        # The class is a text such as 0x030200. Its first digits are the kind of the device.
        if pci_class.startswith(_list_gpu_classes(maker, computing=computing)):
            counts[maker or f"vendor {vendor}"] += 1
    return counts


def _list_gpu_classes(maker: str, *, computing: bool) -> tuple[str, ...]:
    """Return the first digits of the PCI classes by which devices of `maker` count as GPUs.

    `maker` is empty if the maker is not in the table of makers. With `computing`, an AMD card for displays
    does not count, because it may not support computing.
    """
    # "3D" is the class of a GPU without a display.
    if not maker:
        # Most servers have a service processor with a plain display adapter, which must not count.
        return (_DISPLAY_3D, _ACCELERATOR)
    if maker == "Intel" or (maker == "AMD" and computing):
        # Many Intel processors have a plain display adapter as well.
        return (_DISPLAY_3D, _ACCELERATOR, _OTHER_DISPLAY)
    return (_ANY_DISPLAY, _ACCELERATOR)


def _describe_hidden_gpus(reader: Reader, has_files: bool) -> str:
    """Return the end of a message for a node without usable GPUs: which GPUs /dev, /proc and /sys show.

    If all of them are of other makers, the last part says that imgkit uses NVIDIA GPUs only. An example is
    ``; /dev: kfd dri; /sys/bus/pci/devices: 4 of AMD; imgkit uses NVIDIA GPUs only``.

    Parameters
    ----------
    has_files : True if the node has device files of NVIDIA GPUs. They cannot be opened in this case.
    """
    other_files, driver_gpus = reader.names("/dev", _OTHER_FILES), reader.names(_DRIVER_GPUS)
    counts = _count_pci_gpus(reader)
    evidence = []
    if other_files:
        evidence.append(f"/dev: {' '.join(other_files)}")
    if driver_gpus:
        evidence.append(f"{_DRIVER_GPUS}: the driver has {len(driver_gpus)}")
    if counts:
        makers = [f"{count} of {maker}" for maker, count in counts.items()]
        evidence.append(f"{_PCI}: {', '.join(makers)}")
    has_nvidia = has_files or driver_gpus or "NVIDIA" in counts
    # /dev/dri alone does not show a GPU for computing, because every display adapter creates it.
    has_accelerator_file = other_files not in ((), ("dri",))
    if not has_nvidia and (counts or has_accelerator_file):
        evidence.append(ONLY_NVIDIA)
    # The result is appended to other evidence, so each part begins with a semicolon.
    return "".join(f"; {clause}" for clause in evidence)


def find_amd_gpus(reader: Reader) -> str:
    """Return evidence of AMD GPUs that could compute, or "" if there are none.

    On a node with an NVIDIA GPU, the result is also "", because the run uses that GPU. An AMD card that
    drives a display does not count by itself. The device file /dev/kfd of AMD's compute driver always counts.
    """
    accelerators = _count_pci_gpus(reader, computing=True)
    if reader.names("/dev", NVIDIA_FILES) or reader.names(_DRIVER_GPUS) or "NVIDIA" in accelerators:
        return ""
    evidence = []
    if reader.exists("/dev/kfd"):
        evidence.append("/dev/kfd")
    if "AMD" in accelerators:
        evidence.append(f"{_PCI}: {accelerators['AMD']} of AMD")
    return "; ".join(evidence)


def count_gpus(reader: Reader, env: Mapping[str, str], inaccessible: Mapping[str, str]) -> VisibleGpus:
    """Count the GPUs that a worker could use, by device files and CUDA_VISIBLE_DEVICES.

    The result also contains the evidence for the number, and a mistake in the variable if there is one.

    Parameters
    ----------
    inaccessible : device files that cannot be opened, with the reasons (`software.inaccessible_gpus`).
    """
    names = reader.names("/dev", NVIDIA_FILES)
    # CUDA does not count a GPU whose device file it cannot open.
    usable_names = tuple(name for name in names if f"/dev/{name}" not in inaccessible)
    setting = env.get("CUDA_VISIBLE_DEVICES")  # None: all GPUs are visible. "": no GPU is visible
    if usable_names and setting is not None:
        return _count_selected_gpus(setting, usable_names)
    evidence = _describe_device_files(names, usable_names, inaccessible)
    if usable_names:
        return VisibleGpus(len(usable_names), evidence)
    if setting is not None:
        evidence = f"CUDA_VISIBLE_DEVICES={setting!r}, {evidence}"
    return VisibleGpus(0, evidence + _describe_hidden_gpus(reader, bool(names)))


def _describe_device_files(
    names: Sequence[str], usable_names: Sequence[str], inaccessible: Mapping[str, str]
) -> str:
    """Return the evidence that the device files of NVIDIA GPUs give.

    An example is ``/dev: nvidia0 nvidia1, but 1 of them not accessible to this process``.

    Parameters
    ----------
    usable_names : those of `names` that can be opened.
    inaccessible : device files that cannot be opened, with the reasons.
    """
    evidence = f"/dev: {' '.join(names) or 'no nvidia device'}"
    if not inaccessible:
        return evidence
    reason, *_ = inaccessible.values()  # the reason is the same for all of them
    # Without a usable file, the reason is about all of them.
    count_text = f"{len(inaccessible)} of them " if usable_names else ""
    return f"{evidence}, but {count_text}{reason}"


def _count_selected_gpus(setting: str, devices: Sequence[str]) -> VisibleGpus:
    """Count the GPUs that a value of CUDA_VISIBLE_DEVICES selects, by CUDA's rules.

    CUDA ignores the first invalid entry, usually -1, and all entries after it. If an entry occurs twice, CUDA
    shows no GPU at all. torch implements the same rules in _parse_visible_devices and _device_count_nvml of
    torch/cuda/__init__.py.

    Parameters
    ----------
    setting : the value of CUDA_VISIBLE_DEVICES.
    devices : names of the device files that can be opened, such as ``nvidia0``.
    """
    variable = f"CUDA_VISIBLE_DEVICES={setting!r}"
    source = f"{variable}, {len(devices)} device files"
    entries = _split_entries(setting)
    # The order of these checks is CUDA's: an entry that occurs twice only counts before the -1.
    if "-1" in entries:
        entries = entries[: entries.index("-1")]
    for entry, count in collections.Counter(entries).items():
        if count > 1:
            return VisibleGpus(0, source, f"{variable} names {entry} twice, so CUDA shows no GPU at all")
    for position, entry in enumerate(entries):
        gpu_index = parse_digits(entry)  # None for the UUID of a GPU
        if gpu_index is not None and gpu_index >= len(devices):
            problem = (
                f"{variable} names {entry}, but there are {len(devices)} GPUs "
                f"(/dev: {' '.join(devices)}): CUDA ends the list there and shows {position}"
            )
            return VisibleGpus(position, source, problem)
    # Entries with a UUID are not checked, so there may be more entries than GPUs.
    return VisibleGpus(min(len(entries), len(devices)), source)


def _split_entries(setting: str) -> list[str]:
    """Return the entries of a value of CUDA_VISIBLE_DEVICES: ``"0, 1," -> 0, 1``."""
    return [entry.strip() for entry in setting.split(",") if entry.strip()]


def read_gpu_devices(reader: Reader) -> tuple[Gpu, ...]:
    """Return the GPUs that NVIDIA's driver shows in /proc, sorted by PCI address.

    The driver shows all GPUs of the node. Some may belong to other jobs, or may be hidden in this container.
    """
    # Addresses such as 0000:1b:00.0 have a fixed width, so sorting the texts gives CUDA's order.
    return tuple(_read_gpu(reader, name) for name in sorted(reader.names(_DRIVER_GPUS)))


def _read_gpu(reader: Reader, name: str) -> Gpu:
    """Read a GPU from the driver's folder in /proc with this `name`, which is the GPU's PCI address."""
    values = {}
    for line in (reader.text(f"{_DRIVER_GPUS}/{name}/information") or "").splitlines():
        key, _, value = line.partition(":")  # "Device Minor: 	 0"
        values[key] = value.strip()
    address = name.lower()
    link = f"{_PCI}/{address}"
    minor = parse_digits(values.get("Device Minor", ""))
    return Gpu(
        model=values.get("Model", ""),
        address=address,
        pci=pci_path(reader, link),
        numa_node=numa_node(reader, link),
        file="" if minor is None else f"/dev/nvidia{minor}",
    )


def order_worker_gpus(
    reader: Reader,
    env: Mapping[str, str],
    devices: Sequence[Gpu],
    visible: VisibleGpus,
    inaccessible: Mapping[str, str],
) -> tuple[Gpu, ...]:
    """Return the GPUs that workers can use, in the order of their local ranks, or () if it is unknown.

    CUDA gives the lowest numbers to the fastest GPUs, and sorts equal GPUs by PCI address. Therefore the
    order is known only if all GPUs are of one model. It is also unknown if CUDA_VISIBLE_DEVICES selects a GPU
    by its UUID instead of its number.

    Parameters
    ----------
    devices : the result of `read_gpu_devices`. Some of these GPUs may belong to other jobs.
    visible : the result of `count_gpus`: how many GPUs a worker can use.
    inaccessible : device files that cannot be opened, with the reasons (`software.inaccessible_gpus`).
    """
    usable = []
    for gpu in devices:
        can_open = reader.exists(gpu.file) and gpu.file not in inaccessible
        # If the driver does not report the device file, assume that the GPU is usable. The comparison with
        # the number of visible GPUs below detects a wrong assumption.
        if can_open or not gpu.file:
            usable.append(gpu)
    setting = env.get("CUDA_VISIBLE_DEVICES")
    if setting is not None:
        # CUDA numbers only the GPUs that it can use. At the first invalid entry, it ends the list, and
        # `visible.count` is the number of entries before that.
        by_entry = {str(index): gpu for index, gpu in enumerate(usable)}
        entries = _split_entries(setting)[: visible.count]
        usable = [by_entry[entry] for entry in entries if entry in by_entry]
    # A wrong order would bind workers to the processors of another GPU, so return nothing instead.
    models = {gpu.model for gpu in usable}
    if len(usable) != visible.count or len(models) != 1:
        return ()
    return tuple(usable)


def pci_path(reader: Reader, link: str) -> str:
    """Return the PCI path of the device to which `link` leads, or "" if it is not a PCI device.

    The path contains the root complex and the bridges above the device:
    ``pci0000:16/0000:16:01.0/0000:17:00.0``.
    """
    _, separator, path = reader.target(link).partition("/pci")
    return f"pci{path}" if separator else ""


def numa_node(reader: Reader, folder: str) -> int | None:
    """Return the number of a device's NUMA node, or None if it is unknown. The kernel then reports -1."""
    number = reader.number(f"{folder}/numa_node")
    return None if number is None or number < 0 else number


def read_driver(reader: Reader) -> str:
    """Return the first line of the NVIDIA driver's version file, or "" if the driver is not loaded."""
    return (reader.text("/proc/driver/nvidia/version") or "").partition("\n")[0]


def read_limit(reader: Reader, name: str) -> Limit:
    """Return the soft limit `name` of /proc/self/limits, such as ``Max processes``."""
    for line in (reader.text("/proc/self/limits") or "").splitlines():
        # "Max locked memory         65536                65536                bytes"
        if line.startswith(name):
            limits = line.removeprefix(name).split()
            soft = limits[0] if limits else ""
            return Limit(value=parse_digits(soft), unlimited=soft == "unlimited")
    return Limit()


def read_shm_bytes(reader: Reader) -> int | None:
    """Return the size of /dev/shm in bytes, or None if it is unknown.

    It is unknown if the facts come from a saved tree of files, because the tree does not contain the size.
    """
    if not reader.live:
        return None
    try:
        stat = os.statvfs("/dev/shm")  # noqa: S108 - its size is asked for, nothing is put there
    except OSError:
        return None
    return stat.f_frsize * stat.f_blocks


def read_ephemeral_ports(reader: Reader) -> tuple[int, int] | None:
    """Return the first and last port that the kernel assigns to outgoing connections, or None if unknown."""
    text = reader.text("/proc/sys/net/ipv4/ip_local_port_range") or ""
    match = re.fullmatch(r"([0-9]{1,18})\s+([0-9]{1,18})", text)
    if match is None:
        return None
    return int(match[1]), int(match[2])

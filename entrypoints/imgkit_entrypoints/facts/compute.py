"""Processors, GPUs and limits: the part of the node that this process may use."""

from __future__ import annotations

import collections
import itertools
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from imgkit_entrypoints.arguments import digits
from imgkit_entrypoints.facts.host_facts import Gpu, Limit
from imgkit_entrypoints.facts.reader import Reader

_CPU_LIST = re.compile(r"[0-9]{1,9}(-[0-9]{1,9})?(,[0-9]{1,9}(-[0-9]{1,9})?)*")
_LONGEST_PATH = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpus:
    """Number of processors, and the evidence."""

    allowed: int
    quota: float | None
    source: str


def cpus(reader: Reader, known: Mapping[str, Any]) -> Cpus:
    """Processors of the affinity mask, limited by the cgroup's quota (at least 1).

    os.cpu_count() would be wrong: a job step owns a part of the node, and torch would start threads
    for all of it.
    """
    count, source = _affinity(reader, known)
    quotas = sorted(_quotas(reader))
    if not quotas:
        return Cpus(allowed=count, quota=None, source=source)
    quota, quota_source = quotas[0]
    # Rounded down: one thread above the quota makes all threads wait for the next period.
    allowed = min(count, max(1, int(quota)))
    return Cpus(allowed=allowed, quota=quota, source=f"{source}; {quota_source}")


def _affinity(reader: Reader, known: Mapping[str, Any]) -> tuple[int, str]:
    for line in (reader.text("/proc/self/status") or "").splitlines():
        name, _, value = line.partition(":")
        if name == "Cpus_allowed_list" and _CPU_LIST.fullmatch(value.strip()):
            ends = (part.split("-") for part in value.strip().split(","))
            count = sum(int(end[-1]) - int(end[0]) + 1 for end in ends)
            return count, f"/proc/self/status: Cpus_allowed_list {value.strip()}"
    if isinstance(known.get("cpus"), int):
        return known["cpus"], "facts.json: cpus"
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0)), "sched_getaffinity"
    return os.cpu_count() or 1, "os.cpu_count"


def _quotas(reader: Reader) -> Iterator[tuple[float, str]]:
    """Quota of every cgroup above this process, in both versions, with its evidence."""
    for version, folder in _cgroups(reader, "cpu"):
        found = (_quota_v2 if version == 2 else _quota_v1)(reader, folder)
        if found:
            yield found


def _cgroups(reader: Reader, controller: str) -> Iterator[tuple[int, str]]:
    """Version and folder of every cgroup above this process that may have the controller's files."""
    for line in (reader.text("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if len(path) > _LONGEST_PATH:
            continue
        if controllers == "":
            bases, version = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"), 2
        elif controller in controllers.split(","):
            bases, version = (f"/sys/fs/cgroup/{controllers}", f"/sys/fs/cgroup/{controller}"), 1
        else:
            continue
        # In a container the path is often the host's and not mounted: then our cgroup is the mount's top.
        folders = (str(folder).lstrip("/") for folder in _upwards(path))
        for folder, base in itertools.product(folders, dict.fromkeys(bases)):
            yield version, f"{base}/{folder}".rstrip("/")


def processes(reader: Reader) -> tuple[Limit, str]:
    """Most processes and threads that this process may have, and the evidence."""
    own = limit(reader, "Max processes")
    found = [(own.value, f"/proc/self/limits: Max processes {own.value}")] if own.value is not None else []
    for _, folder in _cgroups(reader, "pids"):
        most = reader.number(f"{folder}/pids.max")
        if most is not None:
            found.append((most, f"{folder}/pids.max: {most}"))
    if not found:
        return own, "/proc/self/limits: Max processes unlimited" if own.unlimited else ""
    value, source = min(found)
    return Limit(value=value), source


def _upwards(path: str) -> tuple[PurePosixPath, ...]:
    start = PurePosixPath("/") / path.lstrip("/")
    return (start, *start.parents)


def _quota_v2(reader: Reader, folder: str) -> tuple[float, str] | None:
    text = reader.text(f"{folder}/cpu.max") or ""
    found = re.fullmatch(r"([0-9]{1,18}) ([0-9]{1,18})", text)
    if not found or not int(found[2]):
        return None
    return int(found[1]) / int(found[2]), f"{folder}/cpu.max: {text}"


def _quota_v1(reader: Reader, folder: str) -> tuple[float, str] | None:
    quota = reader.number(f"{folder}/cpu.cfs_quota_us")
    period = reader.number(f"{folder}/cpu.cfs_period_us")
    if quota is None or quota <= 0 or not period:
        return None
    return quota / period, f"{folder}/cpu.cfs_quota_us: {quota} of {period}"


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleGpus:
    """Number of GPUs that a worker could use, and the evidence."""

    count: int
    source: str
    problem: str = ""
    """Mistake in CUDA_VISIBLE_DEVICES."""


ONLY_NVIDIA = "imgkit uses NVIDIA GPUs only"
"""Part of the evidence for no GPU on a node that has GPUs of other makers alone."""
NVIDIA_FILES = r"nvidia\d+"
"""Names of the device files of NVIDIA GPUs."""
_OTHER_FILES = r"kfd|dri|accel|hl\d+|davinci\d+|neuron\d+"
"""Names of the device files, and of folders with those, of other makers' GPUs."""
_MAKERS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel", "0x1da3": "Habana"}


def _pci_gpus(reader: Reader, *, computing: bool = False) -> Mapping[str, int]:
    """Number of GPUs and accelerators on the PCI bus by maker, also of those that a container hides.

    `computing` leaves out those of AMD that drive a display.
    """
    found: collections.Counter[str] = collections.Counter()
    for address in reader.names("/sys/bus/pci/devices"):
        kind, vendor = (reader.text(f"/sys/bus/pci/devices/{address}/{file}") for file in ("class", "vendor"))
        maker = _MAKERS.get(vendor or "", "")
        # 3D controllers and accelerators. Service processors and processors of Intel have a display, too.
        only = maker == "Intel" or (computing and maker == "AMD")
        displays = ("0x0380",) if only else ("0x03",) if maker else ()
        if (kind or "").startswith(("0x0302", "0x1200", *displays)):
            found[maker or f"vendor {vendor}"] += 1
    return found


def _hidden(reader: Reader, has_files: bool) -> str:
    """What /dev, /proc and /sys show of GPUs on a node where none can be used."""
    others, driver = reader.names("/dev", _OTHER_FILES), reader.names("/proc/driver/nvidia/gpus")
    makers = _pci_gpus(reader)
    on_bus = ", ".join(f"{count} of {maker}" for maker, count in makers.items())
    foreign = makers or {*others} - {"dri"}
    found = (
        f"/dev: {' '.join(others)}" if others else "",
        f"/proc/driver/nvidia/gpus: the driver has {len(driver)}" if driver else "",
        f"/sys/bus/pci/devices: {on_bus}" if makers else "",
        ONLY_NVIDIA if foreign and not (has_files or driver or "NVIDIA" in makers) else "",
    )
    return "".join(f"; {text}" for text in found if text)


def amd_gpus(reader: Reader) -> str:
    """Evidence of AMD GPUs that could compute, unless the node shows one of NVIDIA's; empty without them.

    /dev/kfd is the device of AMD's compute driver. A card that only drives a display counts with it alone.
    Source of the folders: Linux, drivers/gpu/drm/amd/amdkfd/kfd_topology.c.
    """
    accelerators = _pci_gpus(reader, computing=True)
    nvidia = reader.names("/dev", NVIDIA_FILES) or reader.names("/proc/driver/nvidia/gpus")
    has_kfd = reader.exists("/dev/kfd")
    if nvidia or "NVIDIA" in accelerators or not (has_kfd or "AMD" in accelerators):
        return ""
    nodes, cards = "/sys/class/kfd/kfd/topology/nodes", "/sys/class/drm"
    nodes_of_amd = sum(_is_amd_gpu(reader.text(f"{nodes}/{name}/properties")) for name in reader.names(nodes))
    vendors = (reader.text(f"{cards}/{name}/device/vendor") for name in reader.names(cards, r"card\d+"))
    counts = {
        nodes: nodes_of_amd,
        cards: sum(_MAKERS.get(vendor or "") == "AMD" for vendor in vendors),
        "/sys/bus/pci/devices": accelerators.get("AMD", 0),
    }
    first = next((f"{place}: {count} of AMD" for place, count in counts.items() if count), "")
    return "; ".join(filter(None, ("/dev/kfd" if has_kfd else "", first)))


def _is_amd_gpu(properties: str | None) -> bool:
    """Whether a node of the topology is a GPU of AMD; processors have nodes without SIMD units."""
    values = dict(line.split(maxsplit=1) for line in (properties or "").splitlines() if line.count(" ") == 1)
    return values.get("vendor_id") == str(0x1002) and (digits(values.get("simd_count", "")) or 0) > 0


def gpus(reader: Reader, env: Mapping[str, str], closed: Mapping[str, str]) -> VisibleGpus:
    """Number of GPUs that a worker could use; `closed` is that of `software.closed_gpus`."""
    files = reader.names("/dev", NVIDIA_FILES)
    devices = tuple(name for name in files if f"/dev/{name}" not in closed)
    visible = env.get("CUDA_VISIBLE_DEVICES")
    shown = f"/dev: {' '.join(files) or 'no nvidia device'}"
    if why := next(iter(closed.values()), ""):
        shown += f", but {f'{len(closed)} of them ' if devices else ''}{why}"
    if not devices:
        given = "" if visible is None else f"CUDA_VISIBLE_DEVICES={visible!r}, "
        return VisibleGpus(count=0, source=f"{given}{shown}{_hidden(reader, bool(files))}")
    if visible is None:
        return VisibleGpus(count=len(devices), source=shown)
    source = f"CUDA_VISIBLE_DEVICES={visible!r}, {len(devices)} device files"
    # CUDA ends the list at the first unknown entry, which is usually -1.
    wanted = [item.strip() for item in visible.split(",") if item.strip()]
    usable = list(itertools.takewhile(lambda item: item != "-1", wanted))
    # Both rules are CUDA's: _parse_visible_devices and _device_count_nvml of torch/cuda/__init__.py.
    counts = collections.Counter(usable)
    twice = next((item for item in usable if counts[item] > 1), "")
    if twice:
        problem = f"CUDA_VISIBLE_DEVICES={visible!r} names {twice} twice, so CUDA shows no GPU at all"
        return VisibleGpus(count=0, source=source, problem=problem)
    there = list(itertools.takewhile(lambda item: (digits(item) or 0) < len(devices), usable))
    if len(there) < len(usable):
        problem = (
            f"CUDA_VISIBLE_DEVICES={visible!r} names {usable[len(there)]}, but there are {len(devices)} GPUs "
            f"(/dev: {' '.join(devices)}): CUDA ends the list there and shows {len(there)}"
        )
        return VisibleGpus(count=len(there), source=source, problem=problem)
    return VisibleGpus(count=min(len(usable), len(devices)), source=source)


def gpu_devices(reader: Reader) -> tuple[Gpu, ...]:
    """GPUs that the driver shows, even if this container may not use them."""
    found = []
    for address in reader.names("/proc/driver/nvidia/gpus"):
        text = reader.text(f"/proc/driver/nvidia/gpus/{address}/information") or ""
        model = re.search(r"^Model:\s*(.*?)\s*$", text, re.MULTILINE)
        folder = f"/sys/bus/pci/devices/{address.lower()}"
        found.append(
            Gpu(
                model=model[1] if model else "",
                address=address.lower(),
                pci=pci_path(reader, folder),
                numa_node=numa_node(reader, folder),
            )
        )
    return tuple(found)


def pci_path(reader: Reader, link: str) -> str:
    """PCI path of the device behind `link`, bridges first: ``pci0000:16/0000:16:01.0/0000:17:00.0``."""
    target = reader.target(link)
    start = target.find("/pci")
    return target[start + 1 :] if start >= 0 else ""


def numa_node(reader: Reader, folder: str) -> int | None:
    """NUMA node of a device; None if the kernel reports -1 or no number."""
    number = reader.number(f"{folder}/numa_node")
    return None if number is None or number < 0 else number


def driver(reader: Reader) -> str:
    """First line of the NVIDIA driver's version."""
    return (reader.text("/proc/driver/nvidia/version") or "").partition("\n")[0]


def limit(reader: Reader, name: str) -> Limit:
    """Soft limit `name` of /proc/self/limits."""
    for line in (reader.text("/proc/self/limits") or "").splitlines():
        if line.startswith(name):
            soft = line[len(name) :].split()[:1]
            if soft == ["unlimited"]:
                return Limit(unlimited=True)
            if soft and (value := digits(soft[0])) is not None:
                return Limit(value=value)
    return Limit()


def shm_bytes(reader: Reader, known: Mapping[str, Any]) -> int | None:
    """Size of /dev/shm; a saved tree has it in facts.json."""
    if not reader.live:
        value = known.get("shm_bytes")
        return value if isinstance(value, int) else None
    try:
        found = os.statvfs("/dev/shm")  # noqa: S108 - its size is asked for, nothing is put there
    except OSError:
        return None
    return found.f_frsize * found.f_blocks


def ephemeral_ports(reader: Reader) -> tuple[int, int] | None:
    """First and last port of those that the kernel hands out for outgoing connections."""
    words = (reader.text("/proc/sys/net/ipv4/ip_local_port_range") or "").split(maxsplit=2)
    first, last = (digits(word) for word in words) if len(words) == 2 else (None, None)
    return None if first is None or last is None else (first, last)

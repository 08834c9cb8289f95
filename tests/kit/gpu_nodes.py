"""Copies of a node's /sys, /proc and /dev for IMGKIT_ROOT: GPUs, and the NUMA nodes on which they are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from file_tree import write_files


def write_gpu_node(
    root: Path,
    gpus: Mapping[str, int],
    numa_cpus: Mapping[int, str],
    allowed: str,
    model: str = "NVIDIA H100",
) -> Path:
    """Write a node below `root`, and return `root`.

    Parameters
    ----------
    gpus : the NUMA node of each GPU by its PCI address; the first one has the device file nvidia0.
    numa_cpus : the processors of each NUMA node; empty for one that has only memory.
    allowed : the processors on which the process may run.
    """
    files = {"proc/self/status": f"Name:\tpython3\nCpus_allowed_list:\t{allowed}", "sys/class/net/.keep": ""}
    for minor, (address, numa_node) in enumerate(gpus.items()):
        information = f"Model: \t\t {model}\nGPU UUID: \t GPU-{minor}\nDevice Minor: \t {minor}"
        files[f"proc/driver/nvidia/gpus/{address}/information"] = information
        files[f"sys/bus/pci/devices/{address}/numa_node"] = str(numa_node)
        files[f"dev/nvidia{minor}"] = ""
    for number, cpus in numa_cpus.items():
        files[f"sys/devices/system/node/node{number}/cpulist"] = cpus
    return write_files(root, files)


def mare_nostrum(root: Path, allowed: str = "0-79") -> Path:
    """Write an accelerated node of MareNostrum 5: two sockets of 40 cores, and two H100 on each."""
    gpus = {"0000:1b:00.0": 0, "0000:2c:00.0": 0, "0000:9d:00.0": 1, "0000:ad:00.0": 1}
    return write_gpu_node(root, gpus, {0: "0-39", 1: "40-79"}, allowed)


def grace_hopper(root: Path, allowed: str = "0-287") -> Path:
    """Write a node of four GH200: four sockets of 72 cores; the memory of each GPU is a NUMA node, too."""
    gpus = {f"00{number}9:01:00.0": number for number in range(4)}
    sockets = {number: f"{72 * number}-{72 * number + 71}" for number in range(4)}
    return write_gpu_node(
        root, gpus, {**sockets, 4: "", 12: "", 20: "", 28: ""}, allowed, "NVIDIA GH200 120GB"
    )

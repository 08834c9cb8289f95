"""Choose the processors of each worker: those of the job that are on the NUMA node of the worker's GPU.

If a worker's threads run on another socket than its GPU, each batch is copied over the link between the
sockets. torchrun has the option ``--numa-binding`` against this, but only since torch 2.9. The option also
needs the program numactl, and fails without it. Few images contain numactl.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from imgkit_entrypoints import terminal
from imgkit_entrypoints.facts import HostFacts
from imgkit_entrypoints.facts.compute import parse_cpu_list
from imgkit_entrypoints.schedulers.hostlist import expand_counts

VARIABLE = "IMGKIT_CPUS"
"""Variable for torchrun (apps/torchrun.py) with the processors of each local rank's NUMA node.

With four workers on two NUMA nodes, its value is ``0-39;0-39;40-79;40-79``.
"""
# Slurm's processors of the job on each node, such as ``80(x4)``.
_JOB_CPUS = "SLURM_JOB_CPUS_PER_NODE"


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuBinding:
    """The processors of the workers, with the reason for the choice."""

    value: str = ""
    """The value of `VARIABLE`. Empty if the workers are not bound."""
    reason: str = ""
    """Why the workers get these processors, or why they are not bound."""
    cpus_per_worker: int = 0
    """Lowest number of processors that a worker has. Workers on one NUMA node share its processors."""


def choose_binding(host: HostFacts, nproc: int, env: Mapping[str, str]) -> CpuBinding:
    """Choose the processors for `nproc` workers, which are those on the NUMA node of each worker's GPU.

    Each worker has one GPU. Workers are not bound if that could slow them down:

    * if the machine does not show two NUMA nodes with processors,
    * if it is unknown which GPU a worker gets, or on which NUMA node the GPU is,
    * if too few processors are allowed on that NUMA node,
    * if the launcher has already bound this process to a part of the job's processors.

    Raises
    ------
    NoPlan : Slurm's number of processors cannot be read.
    """
    # Slurm's text has one number for each node, such as "80(x3),40" -> 80, 80, 80, 40. Every node has at
    # least the lowest number. Without Slurm, it is 0.
    job_cpu_count = min(expand_counts(env.get(_JOB_CPUS) or "0", where=_JOB_CPUS))
    if len(host.numa_cpus) < 2:
        return CpuBinding(reason="/sys/devices/system/node does not show two NUMA nodes with processors")
    node_cpu_count = sum(len(parse_cpu_list(cpu_list)) for cpu_list in host.numa_cpus.values())
    allowed_cpu_count = len(parse_cpu_list(host.allowed_cpus))
    job_has_whole_node = job_cpu_count >= node_cpu_count
    if job_has_whole_node and allowed_cpu_count < node_cpu_count:  # the launcher has bound this process
        problem = f"{_JOB_CPUS}: the job has all {node_cpu_count} processors, but was bound to"
        return CpuBinding(reason=f"{problem} {host.allowed_cpus}")
    if not host.worker_gpus:
        return CpuBinding(reason="it is unknown which GPU each worker gets")
    return _bind_to_numa_nodes(host, [gpu.numa_node for gpu in host.worker_gpus[:nproc]])


def _bind_to_numa_nodes(host: HostFacts, numa_nodes: Sequence[int | None]) -> CpuBinding:
    """Return the processors of workers whose GPUs are on `numa_nodes`.

    `numa_nodes` has one entry for each worker. An entry is None if the NUMA node of the worker's GPU is
    unknown. Each worker may run on all processors of its NUMA node, as in ``0-39;0-39;40-79;40-79``. If the
    allowed ones among them are fewer than the workers there, no worker is bound: the result then contains
    only the reason.
    """
    names = ", ".join(map(str, numa_nodes))
    evidence = f"the NUMA nodes of the GPUs: {names}; processors allowed: {host.allowed_cpus}"
    allowed_cpus = parse_cpu_list(host.allowed_cpus)
    cpu_lists, cpus_per_worker = [], []
    for numa_node in numa_nodes:
        # "" means no processors: the NUMA node is unknown, or has none.
        cpu_list = "" if numa_node is None else host.numa_cpus.get(numa_node, "")
        usable_cpus = allowed_cpus & parse_cpu_list(cpu_list)
        # Workers whose GPUs are on the same NUMA node share its processors evenly.
        share = len(usable_cpus) // numa_nodes.count(numa_node)
        if share == 0:
            return CpuBinding(reason=f"too few processors are allowed on NUMA node {numa_node} ({evidence})")
        cpu_lists.append(cpu_list)
        cpus_per_worker.append(share)
    return CpuBinding(value=";".join(cpu_lists), reason=evidence, cpus_per_worker=min(cpus_per_worker))


def bind_to_cpus(env: Mapping[str, str], local_rank: int) -> None:
    """Bind this thread, and all processes that it starts, to the processors of the worker `local_rank`.

    The processors come from `VARIABLE` in `env`. If the variable is not set, do nothing. Processors that this
    process may not use are left out. If the system refuses the binding, print a warning.
    """
    if not env.get(VARIABLE):
        return
    cpu_list = env[VARIABLE].split(";")[local_rank]  # one entry for each local rank: "0-39;0-39;40-79"
    try:
        os.sched_setaffinity(0, os.sched_getaffinity(0) & parse_cpu_list(cpu_list))
    # The worker also runs without the binding, only slower, so this is no error.
    except OSError as error:  # the job has lost these processors since the plan was made
        problem = f"local rank {local_rank} is not bound to the processors {cpu_list}: {error.strerror}"
        terminal.print_messages(f"imgkit: warning: {problem}")

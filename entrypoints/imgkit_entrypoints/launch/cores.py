"""The processors of each worker: those of the job that are on the NUMA node of the worker's GPU.

The threads of a worker on another socket than its GPU copy each batch over the link between the sockets.
torchrun has an option for this, ``--numa-binding``, but only since torch 2.9. It needs the program numactl,
which few images have, and raises without it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from imgkit_entrypoints import terminal
from imgkit_entrypoints.facts import HostFacts
from imgkit_entrypoints.facts.compute import parse_cpu_list
from imgkit_entrypoints.schedulers.hostlist import expand_counts

VARIABLE = "IMGKIT_CPUS"
"""For torchrun (apps/torchrun.py): the NUMA node's processors by local rank, ``0-39;0-39;40-79;40-79``."""
_JOB_CPUS = "SLURM_JOB_CPUS_PER_NODE"


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuBinding:
    """The processors of the workers, and the reason for them."""

    value: str = ""
    """The value of `VARIABLE`; empty: the workers are not bound."""
    reason: str = ""
    cpus_per_worker: int = 0
    """The smallest share of a worker in these processors; workers on one NUMA node share them."""


def choose_binding(host: HostFacts, nproc: int, env: Mapping[str, str]) -> CpuBinding:
    """Return the processors of `nproc` workers, one per GPU; none where binding could do harm.

    Raises
    ------
    NoPlan : Slurm's number of processors cannot be read.
    """
    allowed = parse_cpu_list(host.allowed_cpus)
    total = sum(len(parse_cpu_list(text)) for text in host.numa_cpus.values())
    job_cpus = min(expand_counts(env.get(_JOB_CPUS) or "0", where=_JOB_CPUS))
    if len(host.numa_cpus) < 2:
        return CpuBinding(reason="/sys/devices/system/node does not show two NUMA nodes with processors")
    if job_cpus >= total > len(allowed):
        problem = f"{_JOB_CPUS}: the job has all {total} processors, but was bound to"
        return CpuBinding(reason=f"{problem} {host.allowed_cpus}")
    if not host.worker_gpus:
        return CpuBinding(reason="it is unknown which GPU each worker gets")
    nodes = [gpu.numa_node for gpu in host.worker_gpus[:nproc]]
    evidence = (
        f"the NUMA nodes of the GPUs: {', '.join(map(str, nodes))}; processors allowed: {host.allowed_cpus}"
    )
    lists = []
    shares = []
    for node in nodes:
        cpu_list = "" if node is None else host.numa_cpus.get(node, "")
        share = len(allowed & parse_cpu_list(cpu_list)) // nodes.count(node)
        if not share:
            return CpuBinding(reason=f"too few processors are allowed on NUMA node {node} ({evidence})")
        lists.append(cpu_list)
        shares.append(share)
    return CpuBinding(value=";".join(lists), reason=evidence, cpus_per_worker=min(shares))


def bind_to_cpus(env: Mapping[str, str], local_rank: int) -> None:
    """Keep this thread, and the processes that it starts, on those of its processors that a worker may use.

    Without `VARIABLE` in `env`, nothing changes. Where the system refuses, a warning is printed.
    """
    cpu_lists = env.get(VARIABLE, "")
    if not cpu_lists:
        return
    cpu_list = cpu_lists.split(";")[local_rank]
    try:
        os.sched_setaffinity(0, os.sched_getaffinity(0) & parse_cpu_list(cpu_list))
    except OSError as error:  # the job has lost these processors since the plan was made
        problem = f"local rank {local_rank} is not bound to the processors {cpu_list}: {error.strerror}"
        terminal.print_messages(f"imgkit: warning: {problem}")

"""The checks of dist-doctor on a node, which need no other node. Each check is one function.

A check yields one result or several. One that does not apply, such as InfiniBand on a laptop, yields none.
Limits and texts come from NCCL's user guide, "Troubleshooting", unless a check names another source.
"""

from __future__ import annotations

from imgkit_entrypoints.doctor.checks import health, machine, network, software
from imgkit_entrypoints.doctor.checks.check import Check, Subject, Verdict

__all__ = ["CHECKS", "Check", "Subject", "Verdict"]

CHECKS = (
    machine.image,
    software.scheduler,
    software.fuse,
    machine.gpus,
    machine.driver,
    machine.cpus,
    machine.memlock,
    machine.shm,
    machine.disk,
    machine.limits,
    machine.processes,
    network.network,
    network.net_plugin,
    network.bootstrap,
    network.rdma_ports,
    network.verbs,
    network.roce_gid,
    network.slingshot,
    network.gpudirect,
    software.glibc,
    machine.iommu,
    machine.nccl,
    software.variables,
    health.pcie,
    health.port_errors,
    health.gpu_health,
    health.xids,
)
"""All checks, in the order of the report."""

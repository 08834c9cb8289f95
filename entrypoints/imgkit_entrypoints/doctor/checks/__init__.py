"""The checks that dist-doctor runs on each node. They do not communicate with other nodes.

Each check is a function that yields one or several results. If a check does not apply, such as InfiniBand on
a laptop, it yields none. Limits and texts come from the section "Troubleshooting" of NCCL's user guide,
unless a check names another source.
"""

from __future__ import annotations

from imgkit_entrypoints.doctor.checks import health, machine, network, software
from imgkit_entrypoints.doctor.checks.check import Check, CheckedNode, Verdict

__all__ = ["CHECKS", "Check", "CheckedNode", "Verdict"]

CHECKS = (
    machine.check_image,
    software.check_scheduler,
    software.check_image_mount,
    machine.check_gpus,
    machine.report_driver,
    machine.check_processors,
    machine.check_locked_memory,
    machine.check_shared_memory,
    machine.check_disk,
    machine.check_limits,
    machine.check_ports,
    machine.check_processes,
    network.report_network,
    network.check_net_plugin,
    network.report_interface,
    network.check_rdma_ports,
    network.check_verbs,
    network.report_gid,
    network.check_slingshot,
    network.check_gpudirect,
    software.check_glibc,
    machine.report_iommu,
    machine.report_nccl,
    software.check_variables,
    health.check_pcie,
    health.check_port_errors,
    health.check_gpu_health,
    health.check_xids,
)
"""All checks, in the order of the report."""

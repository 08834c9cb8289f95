"""Check the node itself: its image, GPUs, processors and limits."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from imgkit_entrypoints.doctor.checks.check import Check, CheckedNode, Verdict
from imgkit_entrypoints.facts import software, storage
from imgkit_entrypoints.facts.compute import ONLY_NVIDIA
from imgkit_entrypoints.facts.host_facts import Limit
from imgkit_entrypoints.schedulers.placement import FIRST_PORT, PORTS

MIB, GIB = 1 << 20, 1 << 30
STACK_BYTES = 8 * MIB
"""Size of the stack that NCCL needs. Its search for a topology graph overflows a stack of 2 MB."""
# Number of files that a process must be able to open. 1024 is Linux's default.
OPEN_FILES = 1024
MIN_PROCESSES = 1024
"""Smallest acceptable limit for processes and threads. OpenMP, NCCL and data workers start many threads."""
SHM = "/dev/shm"  # noqa: S108 - its size is asked for, nothing is put there
ENOUGH_SHM_BYTES = GIB
# Docker's default size of /dev/shm.
DOCKER_SHM_BYTES = 64 * MIB
# The output of `uname -m` for each platform of an image, as it is written in the image's manifest.
MACHINES = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}


def check_image(node: CheckedNode) -> Iterator[Check]:
    """Check that imgkit has built the image, and that the image is for this machine's architecture.

    Other images do not contain imgkit's file with the expected hardware, so the verdict is ``unknown``.
    """
    if not node.has_recipe:
        evidence = "/opt/imgkit/system.json does not exist, so the expected hardware is unknown"
        yield Check("image", "unknown", evidence, "run inside an image that imgkit built")
        return
    platform = str(software.manifest(node.reader).get("platform", ""))
    system, architecture, *_ = f"{platform}/".split("/")  # "linux/arm64/v8" has a variant as well
    machine = MACHINES.get(f"{system}/{architecture}")
    evidence = f"/opt/imgkit/manifest.json: {platform or 'no platform'}; this machine is {node.facts.arch}"
    if machine is None:
        yield Check("image", "unknown", evidence, "rebuild the image with imgkit build")
    elif machine != node.facts.arch:
        yield Check("image", "fail", evidence, "build an image for this machine: imgkit build --platform")
    else:
        yield Check("image", "ok", f"{node.system.title or 'imgkit'}; {evidence}")


def check_gpus(node: CheckedNode) -> Iterator[Check]:
    """Check that the node has as many usable GPUs as the recipe expects.

    The check fails for an image or a node with AMD GPUs, because imgkit supports only CUDA and NCCL. If the
    user has chosen CPUs (``--device cpu``), missing GPUs are only a warning.
    """
    facts = node.facts
    expected = node.system.node.gpus
    evidence = f"{facts.gpus} visible ({facts.gpus_source})"
    if expected:
        evidence += f", the recipe says {expected} per node"
    # IMGKIT_DEVICE is the variable of --device. A run on CPUs works without GPUs.
    verdict: Verdict = "warn" if node.env.get("IMGKIT_DEVICE") == "cpu" else "fail"
    if _is_for_other_gpus(node):
        if facts.rocm:
            evidence += f"; made for AMD GPUs: {facts.rocm}"
        fix = "imgkit supports CUDA and NCCL only: use an image and a node for NVIDIA GPUs, "
        fix += "or CPUs only (--device cpu)"
        yield Check("gpus", verdict, evidence, fix)
        return
    # If the driver shows GPUs in /proc but none can be used, the container was probably started without --nv.
    # With CUDA_VISIBLE_DEVICES, somebody may have hidden them on purpose.
    has_unusable_gpus = facts.gpu_devices and "CUDA_VISIBLE_DEVICES" not in node.env
    requested = expected or len(facts.gpu_devices)
    fix = f"start the container with --nv, and request GPUs (Slurm: --gres=gpu:{requested})"
    if 0 < facts.gpus < expected:
        # A job may have requested only some of the node's GPUs, so this is no failure.
        yield Check("gpus", "warn", evidence, fix)
    elif facts.gpus:
        models = {gpu.model for gpu in facts.gpu_devices if gpu.model}
        yield Check("gpus", "ok", ", ".join([evidence, *sorted(models)]))
    elif expected or has_unusable_gpus:
        yield Check("gpus", verdict, evidence, fix)
    else:
        yield Check("gpus", "ok", evidence)


def _is_for_other_gpus(node: CheckedNode) -> bool:
    """Return whether the image is built for AMD GPUs, or the node has GPUs for computing, but none of NVIDIA.

    Many nodes have a display adapter that is not meant for computing. So GPUs of other makers than AMD count
    only if the recipe expects GPUs.
    """
    facts = node.facts
    if facts.rocm:  # the evidence that the image is built for AMD GPUs
        return True
    if facts.gpus:  # the number of NVIDIA GPUs
        return False
    if facts.amd_gpus:  # the evidence that AMD GPUs of the node can compute
        return True
    expects_gpus = node.system.node.gpus > 0
    # The evidence for the number of GPUs contains this text if all GPUs of the node are from other makers.
    has_other_gpus = ONLY_NVIDIA in facts.gpus_source
    return expects_gpus and has_other_gpus


def report_driver(node: CheckedNode) -> Iterator[Check]:
    """Report the versions of the driver and of the image's CUDA.

    This function does not check whether the driver is too old for the CUDA version. The table of known issues
    has an entry for that.
    """
    if not node.facts.gpus:
        return
    cuda = node.env.get("CUDA_VERSION", "")
    version = node.facts.driver_version
    cuda_text = f"CUDA {cuda} (CUDA_VERSION)" if cuda else "CUDA_VERSION is not set"
    evidence = f"{version or 'unknown'} (/proc/driver/nvidia/version), {cuda_text}"
    if version and cuda:
        yield Check("driver", "ok", evidence)
    else:
        yield Check("driver", "unknown", evidence, "compare both versions: nvidia-smi")


def check_processors(node: CheckedNode) -> Iterator[Check]:
    """Check that there are enough processors to feed the GPUs with data.

    The recipe can set how many processors each GPU needs. The default is one.
    """
    per_gpu = node.system.node.cpus_per_gpu or 1
    # Without GPUs, no processors are needed, and the check passes.
    needed = per_gpu * node.facts.gpus
    evidence = f"{node.facts.cpus} allowed ({node.facts.cpus_source})"
    if node.facts.cpus >= needed:
        yield Check("processors", "ok", evidence)
        return
    evidence += f"; {node.facts.gpus} GPUs need {per_gpu} each"
    fix = f"Slurm: --cpus-per-task={needed}, for srun as well; mpirun: --bind-to none; docker: --cpus"
    yield Check("processors", "warn", evidence, fix)


def check_locked_memory(node: CheckedNode) -> Iterator[Check]:
    """Check that the limit of locked memory is high enough for RDMA.

    RDMA locks its buffers in memory, so it fails if the limit is too low. On a node without RDMA, there is no
    result.
    """
    limit = node.facts.memlock
    if not node.uses_rdma:
        return
    evidence = f"/proc/self/limits: Max locked memory {limit}"
    if limit.unlimited:
        yield Check("memlock", "ok", evidence)
        return
    if limit.value is None:
        evidence = "/proc/self/limits has no line Max locked memory"
        yield Check("memlock", "unknown", evidence, "read the limit in KiB: ulimit -l")
        return
    # Below 1 GiB, RDMA usually fails. A higher limit may be enough, so it is only a warning.
    verdict: Verdict = "fail" if limit.value < GIB else "warn"
    yield Check(
        "memlock",
        verdict,
        f"{evidence}: RDMA fails in ibv_reg_mr or ibv_create_qp",
        "docker: --ulimit memlock=-1. On a node: memlock in /etc/security/limits.conf. Slurm: "
        "LimitMEMLOCK=infinity for slurmd, and PropagateResourceLimitsExcept=MEMLOCK",
    )


def check_shared_memory(node: CheckedNode) -> Iterator[Check]:
    """Check that /dev/shm is large enough.

    The ranks of a node exchange data through this shared memory, and so do data workers.
    """
    size_bytes = node.facts.shm_bytes
    if size_bytes is None:
        yield Check(SHM, "unknown", "the size cannot be read", "read the size: df -h /dev/shm")
        return
    if size_bytes >= ENOUGH_SHM_BYTES:
        yield Check(SHM, "ok", f"{size_bytes / GIB:.1f} GiB")
        return
    # With Docker's default size, NCCL fails as soon as it connects two GPUs.
    is_too_small = size_bytes <= DOCKER_SHM_BYTES and node.facts.gpus > 1
    yield Check(
        SHM,
        "fail" if is_too_small else "warn",
        f"{size_bytes / MIB:.0f} MiB; NCCL fails with: failed to extend /dev/shm/nccl-...",
        "docker: --shm-size=8g or --ipc=host; Kubernetes: an emptyDir of medium Memory (RunAI: --large-shm)",
    )


def check_disk(node: CheckedNode) -> Iterator[Check]:
    """Check that temporary files can be written, and measure how fast.

    If the facts come from a saved tree of files (``IMGKIT_ROOT``), there is no disk to check and no result.
    """
    if not node.reader.live:
        return
    folder = tempfile.gettempdir()
    try:
        rate_MBps = storage.measure_write_MBps(Path(folder))
    except OSError as error:
        fix = "free some space, or name a writable folder of this node in TMPDIR"
        yield Check("disk", "warn", f"{folder} cannot be written: {error.strerror}", fix)
    else:
        yield Check("disk", "ok", f"{folder}: {rate_MBps:.0f} MB/s written")


def check_limits(node: CheckedNode) -> Iterator[Check]:
    """Check that the limits of the stack and of open files are high enough for NCCL and torch."""
    fix = "before the launch: ulimit -s 8192"
    yield from _check_limit("stack", node.facts.stack, STACK_BYTES, fix)
    fix = "before the launch: ulimit -n 65536; docker: --ulimit nofile=16384"
    yield from _check_limit("open files", node.facts.open_files, OPEN_FILES, fix)


def _check_limit(name: str, limit: Limit, least: int, fix: str) -> Iterator[Check]:
    """Check that a limit is at least `least`. If the limit is unknown, there is no result."""
    evidence = f"/proc/self/limits: {limit}"
    if limit.unlimited or (limit.value is not None and limit.value >= least):
        yield Check(name, "ok", evidence)
    elif limit.value is not None:
        yield Check(name, "warn", evidence, fix)


def check_ports(node: CheckedNode) -> Iterator[Check]:
    """Check that the kernel does not use the ports of jobs for outgoing connections.

    If the ranges of ports overlap, another program's connection may already use the port on which torchrun
    has to listen.
    """
    if node.facts.ephemeral_ports is None:
        return
    first, last = node.facts.ephemeral_ports
    evidence = f"/proc/sys/net/ipv4/ip_local_port_range: {first} {last}"
    # The port of a job is computed from the job id, and is always in this range (schedulers/placement.py).
    last_job_port = FIRST_PORT + PORTS - 1
    if first > last_job_port or last < FIRST_PORT:
        yield Check("ports", "ok", evidence)
    else:
        evidence += f" overlaps the ports of jobs, {FIRST_PORT} to {last_job_port}"
        fix = "choose a port outside the range with --port, or start again if a port is busy"
        yield Check("ports", "warn", evidence, fix)


def check_processes(node: CheckedNode) -> Iterator[Check]:
    """Check that the limits of the user and the container allow enough processes and threads."""
    limit = node.facts.processes
    if limit == Limit():  # the limit is unknown
        return
    # Where the lowest limit was found, such as "/sys/fs/cgroup/pids.max: 100".
    source = node.facts.processes_source
    evidence = source or str(limit)
    # Each processor may run several threads of OpenMP, NCCL and data workers.
    needed = max(MIN_PROCESSES, 4 * node.facts.cpus)
    if limit.value is None or limit.value >= needed:  # None: unlimited
        yield Check("processes", "ok", evidence)
        return
    fix = f"before the launch: ulimit -u {needed}"
    if "pids.max" in source:  # the limit of the container's cgroup, not of the user
        fix = "docker: --pids-limit=-1; Kubernetes: the kubelet's podPidsLimit; systemd: TasksMax"
    evidence += f"; the threads of torch, NCCL and data workers may need {needed}"
    yield Check("processes", "warn", evidence, fix)


def report_iommu(node: CheckedNode) -> Iterator[Check]:
    """Report if the node has an IOMMU, which may slow down traffic between GPUs.

    An IOMMU translates the memory addresses that devices use. The verdict is ``unknown``, because only a
    measurement shows whether the traffic is slow.
    """
    if node.facts.gpus < 2:
        return
    names = node.reader.names("/sys/class/iommu")
    if names:
        evidence = f"/sys/class/iommu: {', '.join(names)}; "
        evidence += "an IOMMU can slow down or hang traffic between GPUs"
        fix = "if dist-bench is slow on one node, SrcValid+ must be off: sudo lspci -vvv | grep ACSCtl"
        yield Check("iommu", "unknown", evidence, fix)


def report_nccl(node: CheckedNode) -> Iterator[Check]:
    """Report the version of NCCL and the settings in nccl.conf files.

    NCCL reads these files in addition to the environment.
    """
    facts = node.facts
    if facts.nccl_version:
        yield Check("nccl", "ok", f"{facts.nccl_version} ({facts.nccl_source})")
    elif facts.gpus:
        fix = "set the version, for example: IMGKIT_NCCL_VERSION=2.20.5"
        yield Check("nccl", "unknown", "there is no libnccl.so.2 and no NCCL wheel", fix)
    if facts.nccl_settings:
        settings = (f"{setting.name}={setting.value} ({setting.path})" for setting in facts.nccl_settings)
        yield Check("nccl.conf", "ok", ", ".join(settings))

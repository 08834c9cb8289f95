"""Checks of the node itself: image, GPUs, processors, limits."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from imgkit_entrypoints import json_text
from imgkit_entrypoints.doctor.checks.check import Check, Subject
from imgkit_entrypoints.fabric import library_path
from imgkit_entrypoints.facts import Limit, host_libs, storage
from imgkit_entrypoints.facts.compute import ONLY_NVIDIA
from imgkit_entrypoints.schedulers.placement import FIRST_PORT, PORTS

MIB, GIB = 1 << 20, 1 << 30
STACK_BYTES = 8 * MIB
"""Stack that NCCL's graph search needs; 2 MB overflow."""
OPEN_FILES = 1024
PROCESSES = 1024
"""Least number of processes and threads: every core has several threads of OpenMP, NCCL and data workers."""
SHM = "/dev/shm"  # noqa: S108 - its size is asked for, nothing is put there
SHM_BYTES = GIB
DOCKER_SHM_BYTES = 64 * MIB
DRIVERS = {13: 580, 12: 525, 11: 450}
"""First driver that runs a major version of CUDA (NVIDIA, "CUDA compatibility")."""
MACHINES = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}


def image(subject: Subject) -> Iterator[Check]:
    """The image has the recipe's facts and is built for this architecture."""
    if subject.system is None:
        yield Check(
            name="image",
            verdict="unknown",
            evidence="/opt/imgkit/system.json does not exist, so the expected hardware is unknown",
            fix="run inside an image that imgkit built",
        )
        return
    text = subject.reader.text("/opt/imgkit/manifest.json")
    try:
        platform = str(json_text.parse(text or "{}").get("platform", ""))
    except (ValueError, AttributeError):
        platform = ""
    wanted = MACHINES.get("/".join(platform.split("/")[:2]))
    evidence = f"/opt/imgkit/manifest.json: {platform or 'no platform'}; this machine is {subject.facts.arch}"
    if wanted is None:
        yield Check(
            name="image", verdict="unknown", evidence=evidence, fix="rebuild the image with imgkit build"
        )
    elif wanted != subject.facts.arch:
        yield Check(
            name="image",
            verdict="fail",
            evidence=evidence,
            fix="build an image for this machine: imgkit build --platform",
        )
    else:
        yield Check(name="image", verdict="ok", evidence=f"{subject.system.title or 'imgkit'}; {evidence}")


def gpus(subject: Subject) -> Iterator[Check]:
    """The node has as many GPUs as the recipe says."""
    expected = subject.system.node.gpus if subject.system else 0
    found, source = subject.facts.gpus, subject.facts.gpus_source
    evidence = f"{found} visible ({source})" + (f", the recipe says {expected} per node" if expected else "")
    wanted = expected or len(subject.facts.gpu_devices)
    fix = f"start the container with --nv, and request GPUs (Slurm: --gres=gpu:{wanted})"
    amd = subject.facts.rocm or ("" if found else subject.facts.amd_gpus)
    if amd or (not found and ONLY_NVIDIA in source and expected):
        yield Check(
            name="gpus",
            verdict="fail" if (expected or amd) and subject.env.get("IMGKIT_DEVICE") != "cpu" else "warn",
            evidence=f"{evidence}; made for AMD GPUs: {amd}" if subject.facts.rocm else evidence,
            fix="imgkit supports CUDA and NCCL only: use an image and a node for NVIDIA GPUs, "
            "or CPUs only (--device cpu)",
        )
        return
    hidden = not found and subject.facts.gpu_devices and "CUDA_VISIBLE_DEVICES" not in subject.env
    if not found and (expected or hidden):
        on_purpose = subject.env.get("IMGKIT_DEVICE") == "cpu"
        yield Check(name="gpus", verdict="warn" if on_purpose else "fail", evidence=evidence, fix=fix)
    elif found < expected:
        yield Check(name="gpus", verdict="warn", evidence=evidence, fix=fix)
    else:
        models = sorted({gpu.model for gpu in subject.facts.gpu_devices if gpu.model}) if found else []
        yield Check(name="gpus", verdict="ok", evidence=", ".join([evidence, *models]))


def driver(subject: Subject) -> Iterator[Check]:
    """The driver is new enough for the image's CUDA."""
    if not subject.facts.gpus:
        return
    cuda = subject.env.get("CUDA_VERSION", "")
    version = re.search(r"\b([0-9]{3,9})\.[0-9]+", subject.facts.driver)
    least = DRIVERS.get(int(cuda.split(".")[0])) if re.match(r"[0-9]{1,9}(\.|$)", cuda) else None
    evidence = f"/proc/driver/nvidia/version: {subject.facts.driver or 'does not exist'}; CUDA_VERSION={cuda}"
    if version is None or least is None:
        yield Check(
            name="driver", verdict="unknown", evidence=evidence, fix="compare both versions: nvidia-smi"
        )
    elif int(version[1]) >= least:
        yield Check(name="driver", verdict="ok", evidence=evidence)
    elif any(item.variable == library_path.COMPAT_KEY and item.used for item in subject.plan.decisions):
        shown = f"{evidence}, which needs driver {least}; workers use {host_libs.COMPAT}"
        yield Check(name="driver", verdict="ok", evidence=shown)
    elif subject.reader.exists(host_libs.COMPAT):
        fix = "for data-centre GPUs: system.runtime.cuda_compat: auto in the recipe, or "
        fix += "IMGKIT_CUDA_COMPAT=auto; for others use an older base image"
        yield Check(
            name="driver", verdict="warn", evidence=f"{evidence}, which needs driver {least}", fix=fix
        )
    else:
        fix = "use an older base image, or one with cuda-compat"
        yield Check(
            name="driver", verdict="fail", evidence=f"{evidence}, which needs driver {least}", fix=fix
        )


def cpus(subject: Subject) -> Iterator[Check]:
    """There are enough processors to feed the GPUs."""
    per_gpu = (subject.system.node.cpus_per_gpu if subject.system else None) or 1
    needed = per_gpu * subject.facts.gpus
    evidence = f"{subject.facts.cpus} allowed ({subject.facts.cpus_source})"
    if subject.facts.cpus >= needed:
        yield Check(name="processors", verdict="ok", evidence=evidence)
        return
    yield Check(
        name="processors",
        verdict="warn",
        evidence=f"{evidence}; {subject.facts.gpus} GPUs need {per_gpu} each",
        fix=f"Slurm: --cpus-per-task={needed}, for srun as well; mpirun: --bind-to none; docker: --cpus",
    )


def memlock(subject: Subject) -> Iterator[Check]:
    """RDMA may lock enough memory, because it registers buffers."""
    limit = subject.facts.memlock
    if not subject.rdma:
        return
    if limit == Limit():
        evidence = "/proc/self/limits has no line Max locked memory"
        yield Check(
            name="memlock", verdict="unknown", evidence=evidence, fix="read the limit in KiB: ulimit -l"
        )
        return
    evidence = f"/proc/self/limits: Max locked memory {_shown(limit)}"
    if limit.unlimited:
        yield Check(name="memlock", verdict="ok", evidence=evidence)
        return
    small = limit.value is not None and limit.value < GIB
    yield Check(
        name="memlock",
        verdict="fail" if small else "warn",
        evidence=f"{evidence}: RDMA fails in ibv_reg_mr or ibv_create_qp",
        fix="docker: --ulimit memlock=-1. On a node: memlock in /etc/security/limits.conf. Slurm: "
        "LimitMEMLOCK=infinity for slurmd, and PropagateResourceLimitsExcept=MEMLOCK",
    )


def shm(subject: Subject) -> Iterator[Check]:
    """Shared memory is large enough for the ranks of a node and for data workers."""
    size = subject.facts.shm_bytes
    fix = "docker: --shm-size=8g or --ipc=host; Kubernetes: an emptyDir of medium Memory (RunAI: --large-shm)"
    if size is None:
        yield Check(
            name=SHM,
            verdict="unknown",
            evidence="the size cannot be read",
            fix="read the size: df -h /dev/shm",
        )
    elif size >= SHM_BYTES:
        yield Check(name=SHM, verdict="ok", evidence=f"{size / GIB:.1f} GiB")
    else:
        fails = size <= DOCKER_SHM_BYTES and subject.facts.gpus > 1
        evidence = f"{size / MIB:.0f} MiB; NCCL fails with: failed to extend /dev/shm/nccl-..."
        yield Check(name=SHM, verdict="fail" if fails else "warn", evidence=evidence, fix=fix)


def disk(subject: Subject) -> Iterator[Check]:
    """Temporary files can be written; a saved tree does not show it."""
    if not subject.reader.live:
        return
    folder = tempfile.gettempdir()
    try:
        rate_MBps = storage.write_MBps(Path(folder))
    except OSError as error:
        yield Check(
            name="disk",
            verdict="warn",
            evidence=f"{folder} cannot be written: {error.strerror}",
            fix="free some space, or name a writable folder of this node in TMPDIR",
        )
    else:
        yield Check(name="disk", verdict="ok", evidence=f"{folder}: {rate_MBps:.0f} MB/s written")


def limits(subject: Subject) -> Iterator[Check]:
    """Stack and open files are large enough, and the kernel does not hand out the job's ports."""
    for name, limit, least, flag in (
        ("stack", subject.facts.stack, STACK_BYTES, "-s 8192"),
        ("open files", subject.facts.open_files, OPEN_FILES, "-n 65536; docker: --ulimit nofile=16384"),
    ):
        if limit == Limit():
            continue
        good = limit.unlimited or (limit.value or 0) >= least
        yield Check(
            name=name,
            verdict="ok" if good else "warn",
            evidence=f"/proc/self/limits: {_shown(limit)}",
            fix="" if good else f"before the launch: ulimit {flag}",
        )
    found = subject.facts.ephemeral_ports
    if found is not None:
        last = FIRST_PORT + PORTS - 1
        good = found[0] > last or found[1] < FIRST_PORT
        evidence = f"/proc/sys/net/ipv4/ip_local_port_range: {found[0]} {found[1]}"
        taken = f"{evidence} overlaps the ports of jobs, {FIRST_PORT} to {last}"
        fix = "choose a port outside the range with --port, or start again if a port is busy"
        yield Check(
            name="ports",
            verdict="ok" if good else "warn",
            evidence=evidence if good else taken,
            fix="" if good else fix,
        )


def processes(subject: Subject) -> Iterator[Check]:
    """The user and the container may have enough processes and threads."""
    most, source = subject.facts.processes, subject.facts.processes_source
    least = max(PROCESSES, 4 * subject.facts.cpus)
    if most == Limit():
        return
    if most.value is None or most.value >= least:
        yield Check(name="processes", verdict="ok", evidence=source or _shown(most))
        return
    raised = f"before the launch: ulimit -u {least}"
    if "pids.max" in source:
        raised = "docker: --pids-limit=-1; Kubernetes: the kubelet's podPidsLimit; systemd: TasksMax"
    yield Check(
        name="processes",
        verdict="warn",
        evidence=f"{source or most.value}; the threads of torch, NCCL and data workers may need {least}",
        fix=raised,
    )


def iommu(subject: Subject) -> Iterator[Check]:
    """An IOMMU may slow traffic between GPUs; only a measurement shows whether it does."""
    found = subject.reader.names("/sys/class/iommu") if subject.facts.gpus > 1 else ()
    if found:
        yield Check(
            name="iommu",
            verdict="unknown",
            evidence=f"/sys/class/iommu: {', '.join(found)}; an IOMMU can slow down or hang traffic between "
            "GPUs",
            fix="if dist-bench is slow on one node, SrcValid+ must be off: sudo lspci -vvv | grep ACSCtl",
        )


def nccl(subject: Subject) -> Iterator[Check]:
    """The version of NCCL is known; settings of nccl.conf files are reported."""
    if subject.facts.nccl_version:
        yield Check(
            name="nccl", verdict="ok", evidence=f"{subject.facts.nccl_version} ({subject.facts.nccl_source})"
        )
    elif subject.facts.gpus:
        yield Check(
            name="nccl",
            verdict="unknown",
            evidence="there is no libnccl.so.2 and no NCCL wheel",
            fix="set the version, for example: IMGKIT_NCCL_VERSION=2.20.5",
        )
    if subject.facts.nccl_settings:
        shown = ", ".join(f"{item.name}={item.value} ({item.path})" for item in subject.facts.nccl_settings)
        yield Check(name="nccl.conf", verdict="ok", evidence=shown)


def _shown(limit: Limit) -> str:
    return "unlimited" if limit.unlimited else str(limit.value)

"""The node itself: image, GPUs, processors, limits."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from imgkit_entrypoints.doctor.checks.check import Check, Subject
from imgkit_entrypoints.facts import Limit
from imgkit_entrypoints.schedulers.placement import FIRST_PORT, PORTS

MIB, GIB = 1 << 20, 1 << 30
STACK_BYTES = 8 * MIB
"""With 2 MB NCCL's graph search overflows."""
OPEN_FILES = 1024
SHM = "/dev/shm"  # noqa: S108 - its size is asked for, nothing is put there
SHM_BYTES = GIB
DOCKER_SHM_BYTES = 64 * MIB
DRIVERS = {13: 580, 12: 525, 11: 450}
"""CUDA's major version -> the first driver that runs it (NVIDIA, "CUDA compatibility")."""
MACHINES = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}


def image(it: Subject) -> Iterator[Check]:
    """The recipe's facts, and the architecture that the image was built for."""
    if it.system is None:
        yield Check(
            name="image",
            verdict="unknown",
            evidence="/opt/imgkit/system.json: not there, so nothing says what this system should have",
            fix="run inside an image made by imgkit build",
        )
        return
    text = it.reader.text("/opt/imgkit/manifest.json")
    try:
        platform = str(json.loads(text or "{}").get("platform", ""))
    except (ValueError, AttributeError):
        platform = ""
    wanted = MACHINES.get("/".join(platform.split("/")[:2]))
    evidence = f"/opt/imgkit/manifest.json: {platform or 'no platform'}, this machine is {it.facts.arch}"
    if wanted is None:
        yield Check(
            name="image", verdict="unknown", evidence=evidence, fix="build the image again with imgkit build"
        )
    elif wanted != it.facts.arch:
        yield Check(
            name="image", verdict="fail", evidence=evidence, fix="imgkit build --platform, for this machine"
        )
    else:
        yield Check(name="image", verdict="ok", evidence=f"{it.system.title or 'imgkit'}; {evidence}")


def gpus(it: Subject) -> Iterator[Check]:
    """As many as the recipe says."""
    expected = it.system.node.gpus if it.system else 0
    found, source = it.facts.gpus, it.facts.gpus_source
    evidence = f"{found} visible ({source})" + (f", the recipe says {expected} a node" if expected else "")
    wanted = expected or len(it.facts.gpu_devices)
    fix = f"start the container with --nv and ask for GPUs (Slurm: --gres=gpu:{wanted})"
    hidden = not found and it.facts.gpu_devices and "CUDA_VISIBLE_DEVICES" not in it.env
    if not found and (expected or hidden):
        on_purpose = it.env.get("IMGKIT_DEVICE") == "cpu"
        yield Check(name="gpus", verdict="warn" if on_purpose else "fail", evidence=evidence, fix=fix)
    elif found < expected:
        yield Check(name="gpus", verdict="warn", evidence=evidence, fix=fix)
    else:
        models = sorted({gpu.model for gpu in it.facts.gpu_devices if gpu.model}) if found else []
        yield Check(name="gpus", verdict="ok", evidence=", ".join([evidence, *models]))


def driver(it: Subject) -> Iterator[Check]:
    """New enough for the image's CUDA."""
    if not it.facts.gpus:
        return
    cuda = it.env.get("CUDA_VERSION", "")
    version = re.search(r"\b(\d{3,})\.\d+", it.facts.driver)
    least = DRIVERS.get(int(cuda.split(".")[0])) if re.match(r"\d+(\.|$)", cuda) else None
    evidence = f"/proc/driver/nvidia/version: {it.facts.driver or 'not there'}; CUDA_VERSION={cuda}"
    if version is None or least is None:
        yield Check(name="driver", verdict="unknown", evidence=evidence, fix="nvidia-smi shows both versions")
    elif int(version[1]) >= least:
        yield Check(name="driver", verdict="ok", evidence=evidence)
    elif it.reader.exists("/usr/local/cuda/compat"):
        fix = "data-centre GPUs run it by /usr/local/cuda/compat; others need an older base image"
        yield Check(name="driver", verdict="warn", evidence=f"{evidence}, which needs {least}", fix=fix)
    else:
        fix = "take an older base image, or one with cuda-compat"
        yield Check(name="driver", verdict="fail", evidence=f"{evidence}, which needs {least}", fix=fix)


def cpus(it: Subject) -> Iterator[Check]:
    """Enough to feed the GPUs."""
    per_gpu = (it.system.node.cpus_per_gpu if it.system else None) or 1
    needed = per_gpu * it.facts.gpus
    evidence = f"{it.facts.cpus} allowed ({it.facts.cpus_source})"
    if it.facts.cpus >= needed:
        yield Check(name="processors", verdict="ok", evidence=evidence)
        return
    yield Check(
        name="processors",
        verdict="warn",
        evidence=f"{evidence} for {it.facts.gpus} GPUs, {per_gpu} each",
        fix=f"Slurm: --cpus-per-task={needed} for srun too; mpirun: --bind-to none; docker: --cpus",
    )


def memlock(it: Subject) -> Iterator[Check]:
    """RDMA registers memory, which locks it."""
    limit = it.facts.memlock
    if not it.rdma:
        return
    if limit == Limit():
        evidence = "/proc/self/limits: no Max locked memory"
        yield Check(name="memlock", verdict="unknown", evidence=evidence, fix="ulimit -l")
        return
    evidence = f"/proc/self/limits: Max locked memory {_shown(limit)}"
    if limit.unlimited:
        yield Check(name="memlock", verdict="ok", evidence=evidence)
        return
    small = limit.value is not None and limit.value < GIB
    yield Check(
        name="memlock",
        verdict="fail" if small else "warn",
        evidence=f"{evidence}: RDMA fails with ibv_reg_mr or ibv_create_qp",
        fix="docker: --ulimit memlock=-1; a node: memlock in /etc/security/limits.conf; Slurm: "
        "LimitMEMLOCK=infinity for slurmd, PropagateResourceLimitsExcept=MEMLOCK",
    )


def shm(it: Subject) -> Iterator[Check]:
    """Ranks of one node, and data workers, share memory there."""
    size = it.facts.shm_bytes
    fix = "docker: --shm-size=8g or --ipc=host; Kubernetes: an emptyDir of medium Memory (RunAI: --large-shm)"
    if size is None:
        yield Check(name=SHM, verdict="unknown", evidence="its size cannot be read", fix="df -h /dev/shm")
    elif size >= SHM_BYTES:
        yield Check(name=SHM, verdict="ok", evidence=f"{size / GIB:.1f} GiB")
    else:
        fails = size <= DOCKER_SHM_BYTES and it.facts.gpus > 1
        evidence = f"{size / MIB:.0f} MiB; NCCL says: failed to extend /dev/shm/nccl-..."
        yield Check(name=SHM, verdict="fail" if fails else "warn", evidence=evidence, fix=fix)


def limits(it: Subject) -> Iterator[Check]:
    """Stack, open files, and the ports that the kernel gives away."""
    for name, limit, least, flag in (
        ("stack", it.facts.stack, STACK_BYTES, "-s 8192"),
        ("open files", it.facts.open_files, OPEN_FILES, "-n 65536"),
    ):
        if limit == Limit():
            continue
        good = limit.unlimited or (limit.value or 0) >= least
        yield Check(
            name=name,
            verdict="ok" if good else "warn",
            evidence=f"/proc/self/limits: {_shown(limit)}",
            fix="" if good else f"ulimit {flag}, before the launch",
        )
    found = it.facts.ephemeral_ports
    if found is not None:
        last = FIRST_PORT + PORTS - 1
        good = found[0] > last or found[1] < FIRST_PORT
        evidence = f"/proc/sys/net/ipv4/ip_local_port_range: {found[0]} {found[1]}"
        taken = f"{evidence}, and jobs take theirs from {FIRST_PORT} to {last}"
        fix = "give --port with one outside that range, or start again if a port is busy"
        yield Check(
            name="ports",
            verdict="ok" if good else "warn",
            evidence=evidence if good else taken,
            fix="" if good else fix,
        )


def iommu(it: Subject) -> Iterator[Check]:
    """An IOMMU in the way of traffic between GPUs; only a measurement can tell."""
    found = it.reader.names("/sys/class/iommu") if it.facts.gpus > 1 else ()
    if found:
        yield Check(
            name="iommu",
            verdict="unknown",
            evidence=f"/sys/class/iommu: {', '.join(found)}; it can slow or hang traffic between GPUs",
            fix="if dist-bench on one node is slow: sudo lspci -vvv | grep ACSCtl, SrcValid+ must be off",
        )


def nccl(it: Subject) -> Iterator[Check]:
    """Its version, and what files set behind everyone's back."""
    if it.facts.nccl_version:
        yield Check(name="nccl", verdict="ok", evidence=f"{it.facts.nccl_version} ({it.facts.nccl_source})")
    elif it.facts.gpus:
        yield Check(
            name="nccl",
            verdict="unknown",
            evidence="no libnccl.so.2 and no wheel of it were found",
            fix="IMGKIT_NCCL_VERSION=2.20.5 says it",
        )
    if it.facts.nccl_settings:
        shown = ", ".join(f"{item.name}={item.value} ({item.path})" for item in it.facts.nccl_settings)
        yield Check(name="nccl.conf", verdict="ok", evidence=shown)


def _shown(limit: Limit) -> str:
    return "unlimited" if limit.unlimited else str(limit.value)

"""Read the facts about this machine: its hardware, limits, network and software.

Only this package reads /sys, /proc, /dev and /opt/imgkit. With ``IMGKIT_ROOT=/some/dir``, all files are read
below this folder instead. If the folder holds copies of another machine's files, this shows how imgkit would
decide on that machine.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

from imgkit_entrypoints import files, system
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.facts import compute, host_libs, network, software
from imgkit_entrypoints.facts.host_facts import HostFacts
from imgkit_entrypoints.facts.reader import Reader, root_of

__all__ = ["HostFacts", "Reader", "gather", "root_of", "system_facts"]


def gather(root: Path | None = None, env: Mapping[str, str] = os.environ) -> HostFacts:
    """Read the facts about this machine from files and from the environment `env`.

    A missing file is not an error. The fact is empty in this case, and decisions that depend on it report
    that it is unknown.

    Parameters
    ----------
    root : folder that replaces ``/``. The default is ``IMGKIT_ROOT``, or ``/`` if the variable is not set.

    Raises
    ------
    UsageError : ``IMGKIT_ROOT`` is not a folder, or ``IMGKIT_NCCL_VERSION`` is not a version.
    """
    reader = Reader(root=root_of(env) if root is None else root)
    inaccessible_gpus = software.inaccessible_gpus(reader, env)
    gpus = compute.count_gpus(reader, env, inaccessible_gpus)
    gpu_devices = compute.read_gpu_devices(reader)
    cpus, cpus_source = compute.count_cpus(reader)
    processes, processes_source = compute.read_process_limit(reader)
    image_nccl = software.image_nccl(reader, env)
    nccl = software.loaded_nccl(reader, env, image_nccl)
    nccl_settings = software.nccl_settings(reader, env)
    # The recipe and nccl.conf may name NCCL plug-ins, so both are read before the search for libraries.
    recipe = software.read_recipe(reader)
    libraries = software.find_libraries(reader, env, software.named_plugins(recipe, env, nccl_settings))
    return HostFacts(
        hostname=reader.text("/proc/sys/kernel/hostname") or platform.node(),
        arch=platform.machine(),
        python=platform.python_version(),
        cpus=cpus,
        gpus=gpus.count,
        gpus_source=gpus.source,
        gpus_problem=gpus.problem,
        cpus_source=cpus_source,
        amd_gpus=compute.find_amd_gpus(reader),
        allowed_cpus=compute.read_allowed_cpus(reader),
        numa_cpus=compute.read_numa_cpus(reader),
        worker_gpus=compute.order_worker_gpus(reader, env, gpu_devices, gpus, inaccessible_gpus),
        gpu_devices=gpu_devices,
        driver=compute.read_driver(reader),
        kernel=reader.text("/proc/sys/kernel/osrelease") or "",
        boot_id=reader.text("/proc/sys/kernel/random/boot_id") or "",
        memlock=compute.read_limit(reader, "Max locked memory"),
        stack=compute.read_limit(reader, "Max stack size"),
        open_files=compute.read_limit(reader, "Max open files"),
        processes=processes,
        processes_source=processes_source,
        shm_bytes=compute.read_shm_bytes(reader),
        ephemeral_ports=compute.read_ephemeral_ports(reader),
        rdma=network.read_rdma_devices(reader),
        rdma_cm=network.can_open(reader, "/dev/infiniband/rdma_cm"),
        cxi=network.read_cxi_devices(reader),
        interfaces=network.read_interfaces(reader),
        routes=network.read_routes(reader),
        peermem=software.find_peermem(reader),
        dmabuf=software.supports_dmabuf(reader),
        libraries=libraries,
        verbs_providers=software.verbs_providers(reader, env),
        torch_version=software.torch_version(reader),
        torch_cuda=software.torch_cuda(reader),
        rocm=software.rocm_evidence(reader),
        nccl_version=nccl.version,
        nccl_source=nccl.source,
        nccl_of=nccl.owner,
        image_nccl=image_nccl.version,
        numa_fault=software.find_numa_fault(reader),
        has_cuda_compat=reader.exists(host_libs.COMPAT) or "compat" in env.get("LD_LIBRARY_PATH", ""),
        nccl_settings=nccl_settings,
        image_env=software.image_env(reader),
        host_libraries=host_libs.find_host_libraries(reader, recipe, env),
        cuda_compat=host_libs.find_cuda_compat(reader, recipe, env),
    )


def system_facts(path: Path | None = None, env: Mapping[str, str] = os.environ) -> system.SystemFacts | None:
    """Return what the image's recipe says about the cluster, for the partition of this job and this node.

    If the image was not built by imgkit, return None.

    Parameters
    ----------
    path : the file with these facts. The default is /opt/imgkit/system.json.

    Raises
    ------
    UsageError : the file is not valid, or names a variable that is not set.
    """
    path = path or Reader(root=root_of(env)).real_path(str(system.SYSTEM_JSON))
    try:
        facts = system.from_json(files.read_text(path)).in_partition(env.get(system.PARTITION, ""))
    except FileNotFoundError:  # imgkit has not built this image, or this is no image
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"cannot read the system facts: {error}", where=str(path)) from error
    return facts.on_node(env)

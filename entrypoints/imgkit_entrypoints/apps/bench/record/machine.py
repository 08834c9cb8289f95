"""The fingerprint of the node that a run is saved with."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass

from imgkit_entrypoints import __version__, fabric, facts
from imgkit_entrypoints.errors import ImgkitError


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The facts of this node that a benchmark needs."""

    fingerprint: Mapping[str, str]
    line_rate_Gbps: float | None
    fabric: str
    cpus: int


def machine(env: Mapping[str, str], nodes: int, ranks_per_node: int, software: Mapping[str, str]) -> Machine:
    """Read this node. The fingerprint holds named facts only, never the environment, which holds secrets."""
    try:
        host, system = facts.gather(env=env), facts.system_facts(env=env)
        network = fabric.choose(host, system, env, nnodes=nodes, head=env.get("MASTER_ADDR", ""))
    except ImgkitError:
        return Machine(
            fingerprint={"imgkit": __version__, **software},
            line_rate_Gbps=None,
            fabric="",
            cpus=ranks_per_node,
        )
    gpus = sorted({gpu.model for gpu in host.gpu_devices})
    found = {
        "imgkit": __version__,
        **software,
        "driver": host.driver,
        "gpu": ", ".join(gpus),
        "image": system.title or system.scheduler if system else "",
        "fabric": network.kind,
        "fabric_devices": ",".join(network.devices),
        "arch": host.arch,
        "python": platform.python_version(),
        "cpus_per_rank": str(max(1, host.cpus // ranks_per_node)),
        "omp_num_threads": env.get("OMP_NUM_THREADS", ""),
    }
    return Machine(
        fingerprint={name: text for name, text in found.items() if text},
        line_rate_Gbps=network.line_rate_Gbps,
        fabric=network.kind,
        cpus=host.cpus,
    )

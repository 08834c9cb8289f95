"""What this machine shows: the only reader of /proc, /dev and /opt/imgkit."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from imgkit_entrypoints import system
from imgkit_entrypoints.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """The machine as this process sees it."""

    hostname: str
    arch: str
    """As ``uname -m`` says: x86_64, aarch64."""
    python: str
    cpus: int
    """Processors this process may run on, not those of the node."""
    gpus: int
    """GPUs a worker could use: CUDA_VISIBLE_DEVICES where set, else the driver's device files."""
    gpus_source: str


def gather(root: Path = Path("/"), env: Mapping[str, str] = os.environ) -> HostFacts:
    """Look at the machine under `root` and at `env`."""
    gpus, source = _gpus(root, env)
    return HostFacts(
        hostname=platform.node(),
        arch=platform.machine(),
        python=platform.python_version(),
        # Not os.cpu_count(): a job step owns a part of the node, and torch would start threads for all of it.
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        gpus=gpus,
        gpus_source=source,
    )


def _gpus(root: Path, env: Mapping[str, str]) -> tuple[int, str]:
    try:
        devices = sorted(
            path.name for path in (root / "dev").iterdir() if re.fullmatch(r"nvidia\d+", path.name)
        )
    except OSError:
        devices = []
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return len(devices), f"{root / 'dev'}: {' '.join(devices) or 'no nvidia device'}"
    # Slurm sets the variable also where the container was started without --nv: no device file, no GPU.
    wanted = [item for item in visible.split(",") if item.strip() and item.strip() != "-1"]
    return min(len(wanted), len(devices)), f"CUDA_VISIBLE_DEVICES={visible!r}, {len(devices)} device files"


def system_facts(path: Path = system.SYSTEM_JSON) -> system.SystemFacts | None:
    """The recipe's facts baked into this image; None outside an image made by imgkit.

    Raises
    ------
    UsageError : the file is there and is not what imgkit wrote.
    """
    try:
        return system.from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"cannot read the system facts: {error}", where=str(path)) from error

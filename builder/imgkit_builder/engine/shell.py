"""The docker command of an interactive shell."""

from __future__ import annotations

import shutil

from imgkit_builder.engine import address
from imgkit_builder.engine.contexts import Endpoint

_SHM_SIZE = "8g"
"""Shared memory is taken only where it is used; 8 GiB is enough for eight GPUs' NCCL and loaders."""


def shell_argv(image: str, *, gpus: bool, host: bool, place: Endpoint) -> list[str]:
    """The command that opens bash in `image` of the engine at `place`; `host` shares network and IPC.

    NCCL and data loader workers use shared memory, and Docker's default of 64 MB is too small. RDMA needs
    unlimited locked memory (NVIDIA's advice for its PyTorch containers). Docker 29 lowers open files to
    1,024.
    """
    shared = ["--ipc=host"] if host else ["--network", "none", f"--shm-size={_SHM_SIZE}"]
    limits = ("memlock=-1", "stack=67108864", "nofile=16384")
    words = [*_program(place), "run", *shared, *(word for limit in limits for word in ("--ulimit", limit))]
    return [*words, "-it", "--rm", *(["--gpus", "all"] if gpus else []), image, "bash"]


def _program(place: Endpoint) -> list[str]:
    """The program docker, which follows variables and contexts by itself; podman where only that is there."""
    if shutil.which("podman") and not shutil.which("docker"):
        return ["podman", "--url", place.host]
    found_here = not place.source and place.host != address.DEFAULT_HOST
    return ["docker", *(["--host", place.host] if found_here else [])]

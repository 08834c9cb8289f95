"""The docker command of an interactive shell."""

from __future__ import annotations


def shell_argv(image: str, *, gpus: bool) -> list[str]:
    """The command that opens bash in `image`.

    NCCL and data loader workers use shared memory, and Docker's default of 64 MB is too small: the container
    uses the host's IPC. RDMA needs unlimited locked memory (NVIDIA's advice for its PyTorch containers).
    """
    words = [
        "docker",
        "run",
        "--ipc=host",
        "--ulimit",
        "memlock=-1",
        "--ulimit",
        "stack=67108864",
        "-it",
        "--rm",
    ]
    return [*words, *(["--gpus", "all"] if gpus else []), image, "bash"]

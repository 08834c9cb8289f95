"""The docker command of an interactive shell."""

from __future__ import annotations


def shell_argv(image: str, *, gpus: bool) -> list[str]:
    """The words that open bash in `image`.

    NCCL and the workers of a data loader share memory: the default of 64 MB is too small, so the host's IPC
    is used; RDMA needs memory that is locked, without a limit (NVIDIA's advice for its PyTorch containers).
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

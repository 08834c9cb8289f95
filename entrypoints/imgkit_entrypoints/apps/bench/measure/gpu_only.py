"""CUDA graphs and registered buffers: both need GPUs, NCCL and a torch that has them.

No GPU was at hand when this was written, so nothing here has run yet. Sources: torch/cuda/graphs.py, torch's
test/distributed/test_c10d_nccl.py, and "User Buffer Registration" in NCCL's user guide.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from imgkit_entrypoints.apps.bench.measure.groups import RankGroup
from imgkit_entrypoints.errors import ToolFailed, UsageError

if TYPE_CHECKING:
    from imgkit_entrypoints.apps.bench.measure.operations import Launch


def captured(launch: Launch, count: int) -> Launch:
    """Record `count` launches as one CUDA graph, and return the function that replays it.

    Another thread of torch asks CUDA about finished work meanwhile. Only calls of this thread are recorded.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(count):
            launch()
    return lambda async_op=False: graph.replay()


class RegisteredMemory:
    """Memory that NCCL allocates and knows, so that it can send without copies; one allocation at a time."""

    def __init__(self, groups: Sequence[RankGroup], device: torch.device) -> None:
        found = [(group.torch_group or dist.group.WORLD)._get_backend(device) for group in groups]
        self._backends: list[Any] = found
        self._pool: Any = None
        if not (hasattr(torch.cuda, "MemPool") and all(hasattr(one, "register_mem_pool") for one in found)):
            raise UsageError(
                f"torch {torch.__version__} cannot register buffers with NCCL",
                where="--registered-buffers",
                hint="use an image with a newer torch, or leave it out",
            )

    @contextlib.contextmanager
    def allocating(self) -> Iterator[None]:
        """Register what is allocated in this block, and no longer what an earlier block allocated.

        Raises
        ------
        ToolFailed : NCCL cannot register it.
        """
        self.release()
        pool = torch.cuda.MemPool(self._backends[0].mem_allocator)
        with torch.cuda.use_mem_pool(pool):
            yield
        try:
            for backend in self._backends:
                backend.register_mem_pool(pool)
        except RuntimeError as error:  # not what a lack of memory raises, although the type is the same
            hint = "NCCL_DEBUG=WARN says more; or leave it out"
            raise ToolFailed(
                f"NCCL cannot register the buffers: {error}", where="--registered-buffers", hint=hint
            ) from error
        self._pool = pool

    def release(self) -> None:
        """End the registration: memory must not be freed before."""
        if self._pool is not None:
            torch.cuda.synchronize()
            for backend in self._backends:
                backend.deregister_mem_pool(self._pool)
            self._pool = None

"""Connect the ranks of a run, and exchange values between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from imgkit_entrypoints.errors import CheckFailed, UsageError

# Number of names that a message lists. It only counts the rest.
MAX_NAMES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The rank numbers, device and process group of this worker. A single rank needs no process group."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    group: Any = None
    """The process group for tensors on `device`. None means the default process group."""

    def synchronize(self) -> None:
        """Wait until the GPU has finished its work. Otherwise a timer would measure only kernel launches."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def gather(self, value: Any, *, call: str = "") -> list[Any]:
        """Return the values of all ranks, in the order of the ranks.

        This is a collective call: all ranks must make it.

        Parameters
        ----------
        call : the call of the program, such as ``run.save``, in which the ranks exchange values. The ranks
            compare it, to notice that they are in different calls.

        Raises
        ------
        CheckFailed : (on every rank) the ranks are in different calls.
        """
        if self.world_size == 1:
            return [value]
        rows: list[Any] = [None] * self.world_size
        # The name of the call is sent, too. If a rank is in another call, its value means something else.
        dist.all_gather_object(rows, (call, value), group=self.group)
        calls, values = zip(*rows, strict=True)
        refuse_different_calls(calls)
        return list(values)

    def gather_on_rank_0(self, value: Any) -> list[Any]:
        """Return the values of all ranks on rank 0, and ``[]`` on other ranks.

        This is a collective call: all ranks must make it.
        """
        if self.world_size == 1:
            return [value]
        values: list[Any] | None = None
        if self.rank == 0:
            values = [None] * self.world_size
        dist.gather_object(value, values, dst=0, group=self.group)
        return values or []

    def scatter(self, values: Sequence[Any]) -> Any:
        """Send one item of rank 0's `values` to each rank, and return this rank's item.

        This is a collective call: all ranks must make it.
        """
        if self.world_size == 1:
            return values[0]
        items = None
        if self.rank == 0:
            items = list(values)
        received: list[Any] = [None]
        dist.scatter_object_list(received, items, src=0, group=self.group)
        return received[0]

    def broadcast(self, value: Any) -> Any:
        """Return the `value` of rank 0 on all ranks. This is a collective call: all ranks must make it."""
        if self.world_size == 1:
            return value
        received = [value]
        dist.broadcast_object_list(received, src=0, group=self.group)
        return received[0]

    def broadcast_tensor(self, tensor: torch.Tensor) -> None:
        """Overwrite `tensor`, in host memory, with the tensor of rank 0.

        This is a collective call: all ranks must make it.
        """
        if self.world_size > 1 and tensor.numel():
            # Send the bytes, because gloo does not support every type of element.
            content = tensor.reshape(-1).view(torch.uint8)
            dist.broadcast(content, src=0, group=self.group)


def refuse_different_calls(calls: Sequence[str]) -> None:
    """Raise CheckFailed if the ranks are not all in the same call of the program."""
    if len(set(calls)) > 1:
        raise CheckFailed(
            f"the ranks are at different calls: {ranks_by_value(calls)}",
            hint="let all ranks take the same number of steps, and call run.restore, run.steps, run.pause "
            "and run.save equally often",
        )


def connect_ranks(env: Mapping[str, str], expected_rank: int) -> Ranks:
    """Return the ranks of the program's process group, with a new gloo group for the calls of the run.

    Raises
    ------
    UsageError : the program has not opened its process group yet, or the rank of this process in the group
        differs from `expected_rank`.
    """
    rank = 0
    world_size = 1
    if _has_process_group():
        rank = dist.get_rank()
        world_size = dist.get_world_size()
    elif int(env.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            "the ranks are not connected yet",
            hint="call torch.distributed.init_process_group() before run.restore and run.steps",
        )
    if rank != expected_rank:
        raise UsageError(
            f"this is rank {rank} of the process group, but RANK said {expected_rank} at Run.start",
            hint="start the program by dist-run or torchrun, or set RANK and LOCAL_RANK before Run.start",
        )
    local_rank = int(env.get("LOCAL_RANK", "0"))
    ranks = Ranks(rank=rank, local_rank=local_rank, world_size=world_size, device=torch.device("cpu"))
    # With a group of its own, the calls of the run cannot mix with those of the program, and use no GPU.
    return with_new_group(ranks)


def with_new_group(ranks: Ranks) -> Ranks:
    """Return the same ranks with a new gloo group, for example for a thread.

    This is a collective call: all ranks must make it.
    """
    group = None
    if _has_process_group():
        group = dist.new_group(backend="gloo")
    return dataclasses.replace(ranks, device=torch.device("cpu"), group=group)


def _has_process_group() -> bool:
    return bool(dist.is_available() and dist.is_initialized())


def ranks_by_value(values: Sequence[object]) -> str:
    """Return a text with the ranks that have each value. The most frequent value comes last.

    If three ranks have the values 4, 3 and 4, the text is ``rank 1: 3, ranks 0, 2: 4``.
    """
    ranks_of: dict[object, list[str]] = {}
    for rank, value in enumerate(values):
        ranks_of.setdefault(value, []).append(str(rank))
    parts = []
    for value in sorted(ranks_of, key=lambda value: (len(ranks_of[value]), str(value))):
        ranks = ranks_of[value]
        noun = "rank" if len(ranks) == 1 else "ranks"
        parts.append(f"{noun} {', '.join(ranks)}: {value}")
    return ", ".join(parts)

"""The ranks of a run, and the values that they exchange."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from imgkit_entrypoints.errors import CheckFailed, UsageError

MAX_NAMES = 5
"""Names that a message lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Ranks and device of this worker. One rank alone needs no process group."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    group: Any = None
    """The process group whose tensors lie on `device`; None: the default one."""

    def synchronize(self) -> None:
        """Wait until the device has finished its work; an earlier clock measures only the launch."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def gather(self, value: Any, *, call: str = "") -> list[Any]:
        """Return the values of all ranks, in their order; a collective call.

        Parameters
        ----------
        call : the program's call that this belongs to, for the message if the ranks differ in it.

        Raises
        ------
        CheckFailed : on every rank, if they are at different calls; names them.
        """
        if self.world_size == 1:
            return [value]
        rows: list[Any] = [None] * self.world_size
        dist.all_gather_object(rows, (call, value), group=self.group)
        refuse_different_calls([row[0] for row in rows])
        return [row[1] for row in rows]

    def collect(self, value: Any) -> list[Any]:
        """Return the values of all ranks on rank 0, and an empty list elsewhere; a collective call."""
        if self.world_size == 1:
            return [value]
        rows: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(value, rows, dst=0, group=self.group)
        return rows or []

    def scatter(self, values: Sequence[Any]) -> Any:
        """Return this rank's item of rank 0's `values`; a collective call."""
        if self.world_size == 1:
            return values[0]
        received: list[Any] = [None]
        dist.scatter_object_list(received, list(values) if self.rank == 0 else None, src=0, group=self.group)
        return received[0]

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value; a collective call."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def broadcast_tensor(self, tensor: torch.Tensor) -> None:
        """Overwrite `tensor`, which lies in host memory, with that of rank 0; a collective call."""
        if self.world_size > 1 and tensor.numel():
            # As bytes: gloo does not know every type.
            dist.broadcast(tensor.reshape(-1).view(torch.uint8), src=0, group=self.group)


def refuse_different_calls(calls: Sequence[str]) -> None:
    """Raise CheckFailed if the ranks are not all at the same call of the program."""
    if len(set(calls)) > 1:
        raise CheckFailed(
            f"the ranks are at different calls: {ranks_by_value(calls)}",
            hint="let all ranks take the same number of steps, and call run.restore, run.steps, run.pause "
            "and run.save equally often",
        )


def connect(env: Mapping[str, str], expected_rank: int) -> Ranks:
    """Return the ranks of the process group that the program has opened, with a gloo group of their own.

    Raises
    ------
    UsageError : there is no process group yet, or it knows this process by another rank.
    """
    has_group = dist.is_available() and dist.is_initialized()
    if not has_group and int(env.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            "the ranks are not connected yet",
            hint="call torch.distributed.init_process_group() before run.restore and run.steps",
        )
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if has_group else (0, 1)
    if rank != expected_rank:
        raise UsageError(
            f"this is rank {rank} of the process group, but RANK said {expected_rank} at Run.start",
            hint="start the program by dist-run or torchrun, or set RANK and LOCAL_RANK before Run.start",
        )
    ranks = Ranks(
        rank=rank,
        local_rank=int(env.get("LOCAL_RANK", "0")),
        world_size=world_size,
        device=torch.device("cpu"),
    )
    return with_new_group(ranks)  # its calls mix with none of the program's, and use no GPU


def with_new_group(ranks: Ranks) -> Ranks:
    """Return the same ranks with another gloo group, for example for a thread; a collective call."""
    group = dist.new_group(backend="gloo") if dist.is_available() and dist.is_initialized() else None
    return dataclasses.replace(ranks, device=torch.device("cpu"), group=group)


def first_names(names: Sequence[str]) -> str:
    """Return the first names for a message: ``a, b and 7 more``."""
    rest = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + rest


def ranks_by_value(values: Sequence[object]) -> str:
    """Name the ranks of each value, the most frequent one last: ``rank 1: 3, ranks 0, 2: 4``."""
    texts = []
    for value in sorted(set(values), key=lambda value: (values.count(value), str(value))):
        ranks = [str(rank) for rank, item in enumerate(values) if item == value]
        texts.append(f"rank{'s' if ranks[1:] else ''} {', '.join(ranks)}: {value}")
    return ", ".join(texts)

"""The ranks of a run, and the values that they exchange. Nothing that arrives is unpickled."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import CheckFailed, ToolFailed, UsageError

LONGEST = 1 << 20
"""Most bytes of one rank's value in `Ranks.gather`; the longest is the state of the generators, 24 KiB."""

LONGEST_CALL = 24
"""Letters of the longest name of a call."""


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

    def gather(self, mine: Any, kind: Any, *, call: str = "") -> list[Any]:
        """Give every rank the values of all ranks, in their order; a collective call.

        The values travel as JSON in tensors of bytes. torch's own collectives of objects unpickle what
        arrives, so a process that poses as a rank could run code.

        Parameters
        ----------
        mine : value of the type `kind`, from which JSON can be made; dataclasses included.
        kind : type hint of every value, as `json_text.read` takes it.
        call : the program's call that this belongs to, in ASCII, for the message where ranks differ in it.

        Raises
        ------
        CheckFailed : on every rank, if they are at different calls; names them.
        ToolFailed : on every rank, if one sent too much or something else than a `kind`; names it.
        """
        sent = json.dumps(mine, default=dataclasses.asdict, allow_nan=False).encode()
        own = len(sent).to_bytes(8, "little") + call.encode().ljust(LONGEST_CALL)
        heads = [bytes(row.tolist()) for row in self._gathered(torch.tensor(list(own), dtype=torch.uint8))]
        calls = [head[8:].decode(errors="replace").rstrip() for head in heads]
        if len(set(calls)) > 1:
            raise CheckFailed(
                f"the ranks are at different calls: {told(calls)}",
                hint="let all ranks take the same number of steps, and call run.restore, run.steps and "
                "run.save equally often",
            )
        sizes = [int.from_bytes(head[:8], "little") for head in heads]
        for rank, size in enumerate(sizes):
            if not 0 < size <= LONGEST:
                raise _refused(rank, f"{size} bytes, not 1 to {LONGEST}")
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(sent)] = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
        values = []
        for rank, row in enumerate(self._gathered(padded)):
            text = bytes(row[: sizes[rank]].tolist())
            try:
                values.append(json_text.read(kind, json_text.parse(text), "value"))
            except ValueError as error:
                raise _refused(rank, str(error)) from None
        return values

    def collect(self, data: bytes) -> list[bytes]:
        """Give rank 0 the bytes of all ranks, in their order, and the others nothing; a collective call."""
        sizes = self.gather(len(data), int)
        if self.world_size == 1:
            return [data]
        own = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        if data:
            own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        own = own.to(self.device)
        rows = [torch.empty_like(own) for _ in sizes] if self.rank == 0 else None
        dist.gather(own, rows, dst=0, group=self.group)
        return [_bytes_of(row, size) for row, size in zip(rows or (), sizes, strict=False)]

    def _gathered(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """All ranks' tensors, which have one size, in host memory."""
        if self.world_size == 1:
            return [mine]
        own = mine.to(self.device)
        rows = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(rows, own, group=self.group)
        return [row.cpu() for row in rows]

    def broadcast(self, data: bytes, source: int) -> bytes:
        """Give every rank the bytes of rank `source`; a collective call."""
        if self.world_size == 1:
            return data
        size = torch.tensor([len(data)], device=self.device)
        dist.broadcast(size, source, group=self.group)
        received = bytearray(data) if self.rank == source else bytearray(int(size.item()))
        if not received:
            return b""
        host = torch.frombuffer(received, dtype=torch.uint8)
        sent = host.to(self.device)
        dist.broadcast(sent, source, group=self.group)
        host.copy_(sent)
        return bytes(received)


def _bytes_of(row: torch.Tensor, size: int) -> bytes:
    """The first `size` bytes of a tensor."""
    content = bytearray(size)
    if size:
        torch.frombuffer(content, dtype=torch.uint8).copy_(row[:size])
    return bytes(content)


def told(values: Sequence[object]) -> str:
    """Name the ranks of each value, the most frequent one last: ``rank 1: 3, ranks 0, 2: 4``."""
    known = sorted(set(values), key=lambda value: (values.count(value), str(value)))
    groups = [(value, [str(rank) for rank, one in enumerate(values) if one == value]) for value in known]
    return ", ".join(f"rank{'s' if ranks[1:] else ''} {', '.join(ranks)}: {one}" for one, ranks in groups)


def _refused(rank: int, what: str) -> ToolFailed:
    return ToolFailed(
        f"rank {rank} sent a value that is not from this program: {what}",
        hint="start the same image on every node; if it is the same, a stranger may have joined the run",
    )


def connected(env: Mapping[str, str], own_rank: int) -> Ranks:
    """The ranks of the process group that the program has opened, with a gloo group for calls of their own.

    Raises
    ------
    UsageError : there is no process group yet, or it knows this process by another rank than `own_rank`.
    """
    grouped = dist.is_available() and dist.is_initialized()
    if not grouped and int(env.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            "the ranks are not connected yet",
            hint="call torch.distributed.init_process_group() before run.restore and run.steps",
        )
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
    if rank != own_rank:
        raise UsageError(
            f"this is rank {rank} of the process group, but RANK said {own_rank} at Run.start",
            hint="start the program by dist-run or torchrun, or set RANK and LOCAL_RANK before Run.start",
        )
    return Ranks(
        rank=rank,
        local_rank=int(env.get("LOCAL_RANK", "0")),
        world_size=world_size,
        device=torch.device("cpu"),
        # Its calls mix with none of the program's, and use no GPU.
        group=dist.new_group(backend="gloo") if world_size > 1 else None,
    )

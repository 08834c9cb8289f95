"""The collectives as torch runs them: buffers, and one function a run calls again and again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from imgkit_entrypoints.apps.bench.measure.collectives import ROOT, Collective
from imgkit_entrypoints.apps.bench.measure.teams import Team

Launch = Callable[..., Any]
"""``launch()`` runs it, ``launch(async_op=True)`` gives what can be waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """This rank's memory for one operation; `output` is `input` where it works in place."""

    input: torch.Tensor
    output: torch.Tensor


class Works:
    """Several works as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self.works = works

    def wait(self) -> None:
        """Wait for all."""
        for work in self.works:
            work.wait()


def allocated(op: Collective, count: int, dtype: torch.dtype, team: Team, device: torch.device) -> Buffers:
    """Buffers for `count` elements, written once: memory that nobody has touched is not there yet."""
    given = torch.empty(op.input_elements(count, team.size, team.rank), dtype=dtype, device=device).zero_()
    size = op.output_elements(count, team.size, team.rank)
    return Buffers(
        input=given,
        output=torch.empty(size, dtype=dtype, device=device).zero_() if op.separate else given,
    )


def launch(op: Collective, buffers: Buffers, team: Team) -> Launch:
    """The function that runs `op` once on `buffers`."""
    group, given, made = team.group, buffers.input, buffers.output
    root = team.ranks[ROOT]
    if op.name == "all_reduce":
        return lambda async_op=False: dist.all_reduce(given, group=group, async_op=async_op)
    if op.name == "all_gather":
        # torch 2.13 has deprecated the older name.
        gather_all = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return lambda async_op=False: gather_all(made, given, group=group, async_op=async_op)
    if op.name == "reduce_scatter":
        scatter_sum = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return lambda async_op=False: scatter_sum(made, given, group=group, async_op=async_op)
    if op.name == "broadcast":
        return lambda async_op=False: dist.broadcast(given, root, group=group, async_op=async_op)
    if op.name == "reduce":
        return lambda async_op=False: dist.reduce(given, root, group=group, async_op=async_op)
    if op.name == "alltoall":
        return lambda async_op=False: dist.all_to_all_single(made, given, group=group, async_op=async_op)
    if op.name == "gather":
        parts = list(made.chunk(team.size)) if team.rank == ROOT else None
        return lambda async_op=False: dist.gather(given, parts, root, group=group, async_op=async_op)
    if op.name == "scatter":
        parts = list(given.chunk(team.size)) if team.rank == ROOT else None
        return lambda async_op=False: dist.scatter(made, parts, root, group=group, async_op=async_op)
    return _ring(given, made, team)


def _ring(given: torch.Tensor, made: torch.Tensor, team: Team) -> Launch:
    if team.size == 1:
        return lambda async_op=False: Works(()) if made.copy_(given) is made else None
    ranks, size = team.ranks, team.size
    # Receive first: gloo sends when the other end has said that it is ready, and that word would wait behind
    # the data, so that the two directions of a link took turns (50 % of a wire between two nodes).
    pair = [
        dist.P2POp(dist.irecv, made, ranks[(team.rank - 1) % size], team.group),
        dist.P2POp(dist.isend, given, ranks[(team.rank + 1) % size], team.group),
    ]

    def run(async_op: bool = False) -> Works | None:
        works = Works(dist.batch_isend_irecv(pair))
        if async_op:
            return works
        works.wait()
        return None

    return run

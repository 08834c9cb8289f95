"""``--matrix``: sendrecv between every two nodes, to find the one slow link among many.

A round-robin tournament: every node has one partner in each round, so N nodes need N - 1 rounds instead of
N (N - 1) / 2, and every link carries one exchange at a time. One rank represents each node.
``--matrix rails`` holds one tournament for each local rank, since each usually has a network port of its own.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from imgkit_entrypoints.apps.bench import sizes
from imgkit_entrypoints.apps.bench.measure.counts import LEAST_BATCHES
from imgkit_entrypoints.launch.preflight import stages

if TYPE_CHECKING:
    from imgkit_entrypoints.apps.bench.measure.measurement import Measurer

MOST_BYTES = {"gloo": 4 << 20, "nccl": 64 << 20}
_MOST = 200

Matrix = tuple[tuple[float, ...], ...]
"""GBps (1e9 B/s) that the row's node sends to the column's while it receives as much; 0 on the diagonal."""


def rounds(nodes: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The pairs of every round; with an odd number of nodes, one rests in each round."""
    return tuple(stages.pairs(nodes, turn) for turn in range(nodes + nodes % 2 - 1))


def table(matrix: Matrix, hosts: Sequence[str], size_bytes: int, rail: int | None = None) -> list[str]:
    """The lines of the matrix as a table; `rail` is the local rank that it is of."""
    width = max(8, *(len(host) for host in hosts))
    who = "nodes" if rail is None else f"the ranks with local rank {rail}"
    lines = [
        f"sendrecv of {sizes.both(size_bytes)} between {who}, GBps (1e9 B/s) in each direction at once",
        " ".join(f"{text:>{width}}" for text in ("", *hosts)),
    ]
    for host, row in zip(hosts, matrix, strict=True):
        cells = ("-" if not value else f"{value:.3f}" for value in row)
        lines.append(" ".join(f"{text:>{width}}" for text in (host, *cells)))
    return lines


def measure(measurer: Measurer, size_bytes: int, players: Sequence[int]) -> Matrix:
    """Measure every pair of nodes; a collective call. Each of the ranks in `players` represents its node."""
    import torch
    import torch.distributed as dist

    from imgkit_entrypoints.apps.bench.measure import timing

    here, nodes = measurer.here, len(players)
    kind = getattr(torch, measurer.dtype.torch)
    playing = here.rank in players
    count = size_bytes // measurer.dtype.item_bytes if playing else 1
    given, made = (torch.empty(count, dtype=kind, device=here.device).zero_() for _ in range(2))
    measurer.noise.fill(given, here.rank, 0)
    seconds = torch.zeros(nodes * nodes, dtype=torch.float64, device=here.device)
    for pairs in rounds(nodes):
        mine = [pair for pair in pairs if here.rank in (players[pair[0]], players[pair[1]])]
        both = []
        if mine:
            one, other = (players[node] for node in mine[0])
            peer = other if here.rank == one else one
            # Receive first, as operations._ring does: with gloo, the directions would otherwise take turns.
            both = [dist.P2POp(dist.irecv, made, peer), dist.P2POp(dist.isend, given, peer)]
        play = _player(both)
        play()  # the first exchange sets up the connection
        took = timing.batch(play, 1, here)
        slowest = torch.tensor([took], dtype=torch.float64, device=here.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        fitting = int(measurer.options.seconds / max(slowest.item(), 1e-7))
        turns = measurer.options.iters or min(_MOST, fitting)
        each = max(1, turns // LEAST_BATCHES)
        took = statistics.median(timing.batch(play, each, here) for _ in range(LEAST_BATCHES))
        if mine:
            seconds[mine[0][0] * nodes + mine[0][1]] = took / each
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)  # the slower of the two that measured it
    flat = seconds.tolist()
    return tuple(
        tuple(size_bytes / flat[min(a, b) * nodes + max(a, b)] / 1e9 if a != b else 0.0 for b in range(nodes))
        for a in range(nodes)
    )


def _player(both: list[Any]) -> Callable[..., None]:
    """The exchange of a node with its partner; does nothing for a node that rests."""
    import torch.distributed as dist

    def play() -> None:
        for work in dist.batch_isend_irecv(both) if both else ():
            work.wait()

    return play

"""``--matrix``: sendrecv between every two nodes, to find the one slow link among many.

A round-robin tournament: in each of its rounds every node has one partner, so N nodes need N - 1 rounds and
not N (N - 1) / 2, and every link carries one exchange at a time. One rank stands for its node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from imgkit_entrypoints.apps.bench import sizes

if TYPE_CHECKING:
    from imgkit_entrypoints.apps.bench.measure.one_size import Bench

SLOW = 0.7
"""Of what is to be expected of a link; below, it is named."""
MOST_BYTES = {"gloo": 4 << 20, "nccl": 64 << 20}
_LEAST, _MOST = 3, 200

Matrix = tuple[tuple[float, ...], ...]
"""GBps (1e9 B/s) that row sends to column while it receives as much; 0 on the diagonal."""


def rounds(nodes: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The tournament: pairs of every round (circle method; of an odd number one rests)."""
    seats: list[int | None] = [*range(nodes), *([None] if nodes % 2 else [])]
    half = len(seats) // 2
    found = []
    for _ in range(len(seats) - 1):
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        found.append(
            tuple((min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None)
        )  # fmt: skip
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return tuple(found)


def sentences(matrix: Matrix, hosts: Sequence[str]) -> list[str]:
    """What is slow: a node whose best link is, or a single link between two nodes that are not."""
    if len(hosts) < 3:
        return ["With two nodes there is one link, and no other to hold it against."]
    best = [max(row) for row in matrix]
    top = max(best)
    slow = [node for node, value in enumerate(best) if value < SLOW * top]
    told = [
        f"SLOW NODE: {hosts[node]} exchanges at most {best[node]:.3g} GBps with any other, "
        f"{100 * best[node] / top:.0f} % of the best link here: its own port or cable."
        for node in slow
    ]
    for one in range(len(hosts)):
        for other in range(one + 1, len(hosts)):
            expected = min(best[one], best[other])
            if one not in slow and other not in slow and matrix[one][other] < SLOW * expected:
                told.append(
                    f"SLOW LINK: {hosts[one]} - {hosts[other]} at {matrix[one][other]:.3g} GBps, "
                    f"{100 * matrix[one][other] / expected:.0f} % of what both reach with others: the path "
                    "between them."
                )
    return told or [f"No slow link: all are above {100 * SLOW:.0f} % of the best."]


def table(matrix: Matrix, hosts: Sequence[str], size_bytes: int) -> str:
    """The matrix as text."""
    width = max(8, *(len(host) for host in hosts))
    lines = [
        f"sendrecv of {sizes.both(size_bytes)} between nodes, GBps (1e9 B/s) each way at once",
        " ".join(f"{text:>{width}}" for text in ("", *hosts)),
    ]
    for host, row in zip(hosts, matrix, strict=True):
        cells = ("-" if not value else f"{value:.3f}" for value in row)
        lines.append(" ".join(f"{text:>{width}}" for text in (host, *cells)))
    return "\n".join(lines)


def measure(bench: Bench, size_bytes: int, first_ranks: Sequence[int]) -> Matrix:
    """Play the tournament; a collective call. `first_ranks` stand for their nodes."""
    import torch
    import torch.distributed as dist

    from imgkit_entrypoints.apps.bench.measure import timing

    here, nodes = bench.here, len(first_ranks)
    kind = getattr(torch, bench.dtype.torch)
    playing = here.rank in first_ranks
    count = size_bytes // bench.dtype.item_bytes if playing else 1
    given, made = (torch.empty(count, dtype=kind, device=here.device).zero_() for _ in range(2))
    seconds = torch.zeros(nodes * nodes, dtype=torch.float64, device=here.device)
    for pairs in rounds(nodes):
        mine = [pair for pair in pairs if here.rank in (first_ranks[pair[0]], first_ranks[pair[1]])]
        both = []
        if mine:
            one, other = (first_ranks[node] for node in mine[0])
            peer = other if here.rank == one else one
            # Receive first, as operations._ring does: gloo would let the directions take turns.
            both = [dist.P2POp(dist.irecv, made, peer), dist.P2POp(dist.isend, given, peer)]
        play = _player(both)
        play()  # the first exchange connects
        took = timing.batch(play, 1, here)
        slowest = torch.tensor([took], dtype=torch.float64, device=here.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        fitting = int(bench.options.seconds / max(slowest.item(), 1e-7))
        turns = bench.options.iters or min(_MOST, max(_LEAST, fitting))
        took = timing.batch(play, turns, here)
        if mine:
            seconds[mine[0][0] * nodes + mine[0][1]] = took / turns
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)  # the slower of the two that measured it
    flat = seconds.tolist()
    return tuple(
        tuple(size_bytes / flat[min(a, b) * nodes + max(a, b)] / 1e9 if a != b else 0.0 for b in range(nodes))
        for a in range(nodes)
    )


def _player(both: list[Any]) -> Callable[..., None]:
    """The exchange of a node with its partner; of a node that rests, nothing."""
    import torch.distributed as dist

    def play() -> None:
        for work in dist.batch_isend_irecv(both) if both else ():
            work.wait()

    return play

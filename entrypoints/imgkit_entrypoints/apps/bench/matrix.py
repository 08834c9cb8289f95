"""``--matrix``: sendrecv between every two nodes, to find the one slow link among many.

A round-robin tournament: every node has one partner in each round, so N nodes need N - 1 rounds instead of
N (N - 1) / 2, and every link carries one exchange at a time. One rank represents each node.
``--matrix rails`` holds one tournament for each local rank, since each usually has a network port of its own.
`slow` names the slow nodes, rails and links in the measured bandwidths.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from imgkit_entrypoints.apps.bench import sizes
from imgkit_entrypoints.apps.bench.sizes import LEAST_BATCHES
from imgkit_entrypoints.launch.preflight import verdict

if TYPE_CHECKING:
    from imgkit_entrypoints.apps.bench.measurement import Measurer

MOST_BYTES = {"gloo": 4 << 20, "nccl": 64 << 20}
_MOST = 200

Matrix = tuple[tuple[float, ...], ...]
"""GBps (1e9 B/s) that the row's node sends to the column's while it receives as much; 0 on the diagonal."""


def rounds(nodes: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The pairs of every round; with an odd number of nodes, one rests in each round."""
    return tuple(verdict.pairs(nodes, turn) for turn in range(nodes + nodes % 2 - 1))


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

    from imgkit_entrypoints.apps.bench import measurement

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
            # Receive first, as collectives._ring does: with gloo, the directions would otherwise take turns.
            both = [dist.P2POp(dist.irecv, made, peer), dist.P2POp(dist.isend, given, peer)]
        play = _player(both)
        play()  # the first exchange sets up the connection
        took = measurement.time_batch(play, 1, here)
        slowest = torch.tensor([took], dtype=torch.float64, device=here.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        fitting = int(measurer.options.seconds / max(slowest.item(), 1e-7))
        turns = measurer.options.iters or min(_MOST, fitting)
        each = max(1, turns // LEAST_BATCHES)
        took = statistics.median(measurement.time_batch(play, each, here) for _ in range(LEAST_BATCHES))
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


SLOW = 0.7
"""Share of a link's expected bandwidth below which it is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowPart:
    """A node, a rail, one end of a rail or a link that is slow."""

    name: str
    sentence: str


def slow(rails: Sequence[Matrix], hosts: Sequence[str]) -> tuple[SlowPart, ...]:
    """Name what is slow, each cause once: a rail on all nodes, a node, one node's end of a rail, a link.

    `rails` holds one matrix for each local rank, or a single one that stands for the nodes.
    """
    if _alone(rails, hosts):
        return ()
    best = [[max(row) for row in matrix] for matrix in rails]
    top = max(map(max, best))
    bad = {
        (rail, node)
        for rail, ends in enumerate(best)
        for node, value in enumerate(ends)
        if value < SLOW * top
    }
    nodes = range(len(hosts))
    whole_rails = [rail for rail in range(len(rails)) if all((rail, node) in bad for node in nodes)]
    whole_nodes = [node for node in nodes if all((rail, node) in bad for rail in range(len(rails)))]
    parts: list[SlowPart] = []
    for rail in whole_rails:
        at_most = _share(max(best[rail]), top)
        name = f"local rank {rail}"
        parts.append(
            _part("RAIL", name, f"{at_most} on every node. Check the switch and ports of that rail.")
        )
    for node in whole_nodes:
        at_most = _share(max(ends[node] for ends in best), top)
        parts.append(_part("NODE", hosts[node], f"{at_most}. Check its port and cable."))
    for rail, node in sorted(bad):
        if rail not in whole_rails and node not in whole_nodes:
            name = f"local rank {rail} on {hosts[node]}"
            at_most = _share(best[rail][node], top)
            parts.append(_part("RAIL", name, f"{at_most}. Check the network port next to it, and its cable."))
    return (*parts, *_links(rails, hosts, best, bad))


def sentences(rails: Sequence[Matrix], hosts: Sequence[str]) -> list[str]:
    """The sentence of everything that is slow, or that nothing is."""
    if _alone(rails, hosts):
        return ["Two nodes have one link, so there is nothing to compare it with."]
    found = [part.sentence for part in slow(rails, hosts)]
    return found or [f"No slow link: every link reaches at least {100 * SLOW:.0f} % of its nodes' best."]


def _alone(rails: Sequence[Matrix], hosts: Sequence[str]) -> bool:
    return len(hosts) < 3 and len(rails) < 2


def _part(kind: str, name: str, rest: str) -> SlowPart:
    return SlowPart(name=name, sentence=f"SLOW {kind}: {name} exchanges {rest}")


def _share(value: float, top: float) -> str:
    return f"at most {value:.3g} GBps with any other node, {100 * value / top:.0f} % of the best link"


def _links(
    rails: Sequence[Matrix],
    hosts: Sequence[str],
    best: Sequence[Sequence[float]],
    bad: set[tuple[int, int]],
) -> Iterator[SlowPart]:
    """The slow links between two ends that are not slow themselves."""
    for rail, matrix in enumerate(rails):
        where = f" by local rank {rail}" if len(rails) > 1 else ""
        for one in range(len(hosts)):
            for other in range(one + 1, len(hosts)):
                expected = min(best[rail][one], best[rail][other])
                value = matrix[one][other]
                if {(rail, one), (rail, other)} & bad or value >= SLOW * expected:
                    continue
                name = f"{hosts[one]} - {hosts[other]}{where}"
                yield SlowPart(
                    name=name,
                    sentence=f"SLOW LINK: {name} at {value:.3g} GBps, {100 * value / expected:.0f} % "
                    "of what both reach with other nodes. Check the path between them.",
                )

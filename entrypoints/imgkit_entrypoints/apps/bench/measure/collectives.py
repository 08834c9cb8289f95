"""The nine collectives: what nccl-tests calls their size and their bus bandwidth, and what must be where.

Definitions after NVIDIA/nccl-tests, doc/PERFORMANCE.md and src/*.cu (v2.19).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

ROOT = 0
"""Root of broadcast, reduce, gather and scatter; nccl-tests' default too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One of them, with n ranks."""

    name: str
    parts: bool = False
    """The size is that of n chunks, one a rank; else that of every rank's own buffer."""
    sums: bool = False
    separate: bool = False
    """Input and output are two buffers; else one."""
    rooted: bool = False
    """One rank's part differs: how long the others wait says nothing about them."""

    def factor(self, ranks: int) -> float:
        """busbw / algbw: what the links must carry of each byte, by nccl-tests' definition."""
        share = Fraction(ranks - 1, ranks)
        if self.name == "all_reduce":
            return float(2 * share)
        return float(share) if self.parts else 1.0

    def elements(self, size_bytes: int, item_bytes: int, ranks: int) -> int:
        """Elements of the whole size: where it is cut into parts, as many for each rank."""
        count = size_bytes // item_bytes
        return max(1, count // ranks) * ranks if self.parts else max(1, count)

    def least_traffic(self, nodes: int, per_node: int) -> float:
        """Bytes that must leave (or enter) the busiest node for each byte of the size, over `nodes` nodes.

        What a hierarchical algorithm sends; 0 on one node.
        """
        if nodes == 1:
            return 0.0
        share = (nodes - 1) / nodes
        return {
            "all_reduce": 2 * share,
            "all_gather": share,
            "reduce_scatter": share,
            "alltoall": per_node * share,
            "gather": share,
            "scatter": share,
            # In a ring of ranks, placed node by node, one neighbour of each node's last rank is outside.
            "sendrecv": 1.0,
            "broadcast": 1.0,
            "reduce": 1.0,
        }[self.name]

    def ring_traffic(self, nodes: int, per_node: int) -> float:
        """The same where the algorithm is one flat ring over all ranks; never below the least."""
        if nodes == 1:
            return 0.0
        ranks = nodes * per_node
        ring = self.factor(ranks) if self.name in ("all_reduce", "all_gather", "reduce_scatter") else 0.0
        return max(ring, self.least_traffic(nodes, per_node))

    def input_elements(self, count: int, ranks: int, rank: int) -> int:
        """Elements of the buffer that `rank` hands in; `count` are those of the whole size."""
        if self.name in ("all_gather", "gather"):
            return count // ranks
        return 0 if self.name == "scatter" and rank != ROOT else count

    def output_elements(self, count: int, ranks: int, rank: int) -> int:
        """Elements of its separate output buffer."""
        if not self.separate or (self.name == "gather" and rank != ROOT):
            return 0
        return count // ranks if self.name in ("reduce_scatter", "scatter") else count

    def buffer_bytes(self, size_bytes: int, ranks: int) -> int:
        """What the rank with the most buffers holds."""
        return sum(
            kind(size_bytes, ranks, ROOT) for kind in (self.input_elements, self.output_elements)
        )  # both are linear in the count, so bytes do as well

    def result(self, count: int, ranks: int, rank: int) -> tuple[Segment, ...]:
        """What `rank`'s output buffer must hold afterwards; empty where the operation leaves it open."""
        part = count // ranks
        if self.name == "all_reduce" or (self.name == "reduce" and rank == ROOT):
            return (Segment(start=0, count=count, source=None, offset=0),)
        if self.name == "reduce_scatter":
            return (Segment(start=0, count=part, source=None, offset=rank * part),)
        if self.name == "all_gather" or (self.name == "gather" and rank == ROOT):
            return tuple(
                Segment(start=source * part, count=part, source=source, offset=0) for source in range(ranks)
            )
        if self.name == "alltoall":
            return tuple(
                Segment(start=source * part, count=part, source=source, offset=rank * part)
                for source in range(ranks)
            )
        if self.name == "broadcast":
            return (Segment(start=0, count=count, source=ROOT, offset=0),)
        if self.name == "scatter":
            return (Segment(start=0, count=part, source=ROOT, offset=rank * part),)
        if self.name == "sendrecv":
            return (Segment(start=0, count=count, source=(rank - 1) % ranks, offset=0),)
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of output elements and the input that they come from."""

    start: int
    count: int
    source: int | None
    """Rank whose input this is; None: the sum over all ranks."""
    offset: int
    """Where in that input it begins."""


COLLECTIVES: tuple[Collective, ...] = (
    Collective(name="all_reduce", sums=True),
    Collective(name="all_gather", parts=True, separate=True),
    Collective(name="reduce_scatter", parts=True, sums=True, separate=True),
    Collective(name="broadcast", rooted=True),
    Collective(name="reduce", sums=True, rooted=True),
    Collective(name="alltoall", parts=True, separate=True),
    Collective(name="sendrecv", separate=True),
    Collective(name="gather", parts=True, separate=True, rooted=True),
    Collective(name="scatter", parts=True, separate=True, rooted=True),
)
NAMES = tuple(item.name for item in COLLECTIVES)


def named(name: str) -> Collective:
    """The collective of that name."""
    return next(item for item in COLLECTIVES if item.name == name)

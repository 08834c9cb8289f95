"""The collectives: their size and bus bandwidth as nccl-tests defines them, and their expected results.

Definitions: NVIDIA/nccl-tests, doc/PERFORMANCE.md and src/*.cu (v2.19).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from fractions import Fraction

CHUNK_BYTES = 16
"""Chunks are whole multiples of this, as in nccl-tests."""
ROOT = 0
"""Root of broadcast, reduce, gather and scatter; nccl-tests' default too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective."""

    name: str
    parts: bool = False
    """The size counts one chunk per rank; otherwise it is the size of each rank's buffer."""
    sums: bool = False
    separate: bool = False
    """Input and output are two buffers; otherwise one."""
    redop: str = "sum"
    """How the values of all ranks are combined: one of `REDOPS`."""
    copied: bool = False
    """The input is copied into the output first: torch runs this operation in place only."""
    skew: float = 0.0
    """alltoallv: rank k receives (1 + k)^-skew of what rank 0 receives, as from popular experts."""

    @property
    def variant(self) -> str:
        """What differs from the plain operation, in words; empty for the plain one."""
        parts = (
            self.redop if self.redop != "sum" else "",
            "out of place" if self.copied else "",
            f"skew {self.skew:g}" if self.name == "alltoallv" else "",
        )
        return ", ".join(part for part in parts if part)

    def exact(self, ranks: int) -> bool:
        """True if the result does not depend on rounding: averages of 2, 4, 8, ... ranks do not."""
        return self.redop != "avg" or ranks & (ranks - 1) == 0

    def factor(self, ranks: int) -> float:
        """busbw / algbw: bytes that the links must carry for each byte, by nccl-tests' definition."""
        share = Fraction(ranks - 1, ranks)
        if self.name == "all_reduce":
            return float(2 * share)
        return float(share) if self.parts else 1.0

    def elements(self, size_bytes: int, item_bytes: int, ranks: int) -> int:
        """Elements of the whole size; whole chunks of 16 bytes per rank if the size is cut into parts."""
        count = size_bytes // item_bytes
        if not self.parts:
            return max(1, count)
        least = CHUNK_BYTES // item_bytes
        return max(least, count // ranks // least * least) * ranks

    def least_traffic(self, nodes: int, per_node: int) -> float:
        """Bytes that must leave (or enter) the busiest of `nodes` nodes for each byte of the size.

        A hierarchical algorithm sends this much; 0 on one node.
        """
        if nodes == 1:
            return 0.0
        share = (nodes - 1) / nodes
        if self.name == "alltoallv":
            return share * sum(self._share(rank) for rank in range(per_node))
        return {
            "all_reduce": 2 * share,
            "all_gather": share,
            "reduce_scatter": share,
            "alltoall": per_node * share,
            "gather": share,
            "scatter": share,
            # In a ring of ranks in node order, only each node's last rank sends to another node.
            "sendrecv": 1.0,
            "broadcast": 1.0,
            "reduce": 1.0,
        }[self.name]

    def ring_traffic(self, nodes: int, per_node: int) -> float:
        """The same for one flat ring over all ranks; never below `least_traffic`."""
        if nodes == 1:
            return 0.0
        ranks = nodes * per_node
        ring = self.factor(ranks) if self.name in ("all_reduce", "all_gather", "reduce_scatter") else 0.0
        return max(ring, self.least_traffic(nodes, per_node))

    def input_elements(self, count: int, ranks: int, rank: int) -> int:
        """Elements of the input buffer of `rank`; `count` is the whole size in elements."""
        if self.name == "alltoallv":
            return sum(self.splits(count, ranks))
        if self.name in ("all_gather", "gather"):
            return count // ranks
        return 0 if self.name == "scatter" and rank != ROOT else count

    def output_elements(self, count: int, ranks: int, rank: int) -> int:
        """Elements of the separate output buffer of `rank`."""
        if not self.separate or (self.name == "gather" and rank != ROOT):
            return 0
        if self.name == "alltoallv":
            return self.splits(count, ranks)[rank] * ranks
        return count // ranks if self.name in ("reduce_scatter", "scatter") else count

    def splits(self, count: int, ranks: int) -> tuple[int, ...]:
        """Elements that each rank sends to rank 0, 1, ... in an alltoallv; rank 0 receives `count`."""
        part = count // ranks
        least = min(part, CHUNK_BYTES)  # of any type a multiple of 16 bytes
        cut = (int(part * self._share(rank)) // CHUNK_BYTES * CHUNK_BYTES for rank in range(1, ranks))
        return (part, *(max(least, elements) for elements in cut)) if self.skew else (part,) * ranks

    def _share(self, rank: int) -> float:
        """Bytes for `rank` as a share of those for rank 0."""
        return float((1 + rank) ** -self.skew)

    def buffer_bytes(self, size_bytes: int, ranks: int) -> int:
        """Bytes of all buffers of the rank that needs most."""
        return sum(
            kind(size_bytes, ranks, ROOT) for kind in (self.input_elements, self.output_elements)
        )  # both are linear in the count, so they take bytes as well

    def result(self, count: int, ranks: int, rank: int) -> tuple[Segment, ...]:
        """The expected content of the output buffer of `rank`; empty if the operation leaves it undefined."""
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
        if self.name == "alltoallv":
            splits = self.splits(count, ranks)
            mine, before = splits[rank], sum(splits[:rank])
            return tuple(
                Segment(start=source * mine, count=mine, source=source, offset=before)
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
    """Consecutive output elements, and the input that they come from."""

    start: int
    count: int
    source: int | None
    """Rank whose input the elements are; None: all ranks' inputs, combined."""
    offset: int
    """Position of the first element in that input."""


COLLECTIVES: tuple[Collective, ...] = (
    Collective(name="all_reduce", sums=True),
    Collective(name="all_gather", parts=True, separate=True),
    Collective(name="reduce_scatter", parts=True, sums=True, separate=True),
    Collective(name="broadcast"),
    Collective(name="reduce", sums=True),
    Collective(name="alltoall", parts=True, separate=True),
    Collective(name="alltoallv", parts=True, separate=True),
    Collective(name="sendrecv", separate=True),
    Collective(name="gather", parts=True, separate=True),
    Collective(name="scatter", parts=True, separate=True),
)
NAMES = tuple(item.name for item in COLLECTIVES)
EVERY = tuple(name for name in NAMES if name != "alltoallv")
"""The collectives of ``dist-bench all``."""
REDOPS = ("sum", "min", "max", "avg")


def named(name: str) -> Collective:
    """Return the collective with this name."""
    return next(item for item in COLLECTIVES if item.name == name)


def asked(name: str, *, redop: str = "sum", out_of_place: bool = False, skew: float = 0.0) -> Collective:
    """Return the collective with this name, in the variant that the options ask for where it has one."""
    op = named(name)
    if op.sums:
        op = dataclasses.replace(op, redop=redop)
    if out_of_place and not op.separate:
        op = dataclasses.replace(op, separate=True, copied=True)
    return dataclasses.replace(op, skew=skew) if name == "alltoallv" else op

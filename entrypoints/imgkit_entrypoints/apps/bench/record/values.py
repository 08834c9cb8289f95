"""The values of a saved run; fields: docs/bench-report.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from imgkit_entrypoints.apps.bench.judge.percentiles import Spread, spread

SCHEMA = 1
TOOL = "dist-bench"

Timing = Literal["batched", "iteration"]
TIMINGS: tuple[Timing, ...] = ("batched", "iteration")


BAND = ("low_us", "median_us", "high_us")
"""Fields that the file has for programs, calculated from the times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The ranks and the nodes they ran on."""

    ranks: int
    nodes: int
    ranks_per_node: int
    hosts: tuple[str, ...]
    backend: str
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One collective at one size, with one kind of timing. GBps is 1e9 B/s."""

    op: str
    size_bytes: int
    dtype: str
    group: str
    timing: Timing
    iterations: int
    time_us: float
    algbw_GBps: float
    busbw_GBps: float
    wrong: int | None
    """Elements that differ from the expected ones; None: values were not verified."""
    p50_us: float | None = None
    p95_us: float | None = None
    p99_us: float | None = None
    cv: float | None = None
    times_us: tuple[float, ...] = ()
    """The slowest rank's time of each iteration; empty for batched timing."""
    batches_us: tuple[float, ...] = ()
    """The slowest rank's time of one operation in each batch; empty for timing per iteration."""

    variant: str = ""
    """What differs from the plain operation, in words: "avg, out of place"."""

    @property
    def spread_us(self) -> Spread:
        """The spread of the batches or iterations."""
        return spread(self.batches_us or self.times_us)

    @property
    def median_us(self) -> float:
        """The median of the batches or iterations."""
        return self.spread_us.median if self.batches_us else self.time_us

    @property
    def median_algbw_GBps(self) -> float:
        """The bandwidth that belongs to `median_us`."""
        return self.algbw_GBps * self.time_us / self.median_us

    @property
    def median_busbw_GBps(self) -> float:
        """The bus bandwidth that belongs to `median_us`."""
        return self.busbw_GBps * self.time_us / self.median_us

    def undecided(self, other: Result) -> bool:
        """True if the ratio of both may be chance: their spreads overlap."""
        return self.spread_us.overlaps(other.spread_us)

    @property
    def key(self) -> tuple[str, str, str, str, int, Timing]:
        """Identifies the result: two runs' results with equal keys can be compared."""
        return self.op, self.group, self.dtype, self.variant, self.size_bytes, self.timing


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRun:
    """One saved run."""

    where: str
    """The file's path, for errors and labels."""
    version: str
    complete: bool
    started: str
    command: tuple[str, ...]
    world: World
    fingerprint: Mapping[str, str]
    line_rate_Gbps: float | None
    results: tuple[Result, ...]
    sentences: tuple[str, ...]
    """The run's own verdict."""
    arm: str = ""
    """Arm of ``--compare``; empty otherwise."""
    transport: tuple[str, ...] = ()
    """The transports that NCCL's log names: ``network IB``, ``via NET/IB with GDRDMA``."""
    carried: Mapping[str, int] = field(default_factory=dict)
    """Bytes that left the nodes through each port during the batches of the largest sizes."""
    seen: bool = False
    """True if the ports counted all network traffic, so that `carried` is complete."""

"""The values of a saved run; fields: docs/bench-report.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

SCHEMA = 1
TOOL = "dist-bench"

Timing = Literal["batched", "iteration"]
TIMINGS: tuple[Timing, ...] = ("batched", "iteration")


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

    @property
    def key(self) -> tuple[str, str, str, int, Timing]:
        """Identifies the result: two runs' results with equal keys can be compared."""
        return self.op, self.group, self.dtype, self.size_bytes, self.timing


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
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

"""Stragglers: ranks whose own work takes longer than that of the others, look after look. No torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

SHARE = 0.2
"""Part of the usual time by which a straggler exceeds it."""
MADS = 5
"""Median absolute deviations by which a straggler exceeds the median."""
FLOOR_S = 0.001
"""A straggler loses more than this in a step: short steps differ by more than `SHARE` from chance."""
LOOKS = 3
"""Looks in a row that make a rank a straggler, and usual again."""
FEW = 4
"""Fewer ranks than this have no meaningful median: the fastest is the usual one."""
LINES = 8
"""Most ranks that one look reports by a line each."""
MAX_REPORTS = 3
"""Times that the log names the same rank; ranks that share a processor become stragglers in turn."""
ROWS = 100
"""Most ranks in a line of ``metrics.jsonl``, which readers bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOnNode:
    """Where a rank runs."""

    node: str
    local_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that is or was a straggler, as ``metrics.jsonl`` and ``summary.json`` have it."""

    rank: int
    node: str
    local_rank: int
    from_step: int
    """Step of the first look at which it was slow."""
    to_step: int
    """Step of the last one."""
    times: int
    """Number of times that it was named."""
    own_work_s: float
    """Seconds of own work in a step, at the last look at which it was slow."""
    usual_s: float
    """The same of the others: the median, or that of the fastest of fewer than 4 ranks."""

    @property
    def name(self) -> str:
        """The rank and its node."""
        return f"rank {self.rank} on {self.node} (local rank {self.local_rank})"

    @property
    def excess(self) -> str:
        """Its time beside that of the others."""
        return (
            f"its own work takes {_milliseconds(self.own_work_s)} a step, not {_milliseconds(self.usual_s)}"
        )


def usual(own_s: Sequence[float]) -> tuple[float, float]:
    """The usual seconds of own work, and the limit of stragglers; infinite if nothing compares.

    Parameters
    ----------
    own_s : seconds of each rank in a step; what is not a positive number is unknown.
    """
    measured = sorted(seconds for seconds in own_s if 0 < seconds < math.inf)
    if len(measured) < 2:
        return math.nan, math.inf
    if len(measured) < FEW:
        return measured[0], max(measured[0] * (1 + SHARE), measured[0] + FLOOR_S)
    middle = (measured[(len(measured) - 1) // 2] + measured[len(measured) // 2]) / 2
    limit = max(middle * (1 + SHARE), middle + FLOOR_S)
    if measured[-1] > limit:  # else nobody is slow, and thousands of ranks need no second order
        limit = max(limit, middle + MADS * statistics.median(abs(seconds - middle) for seconds in measured))
    return middle, limit


class Stragglers:
    """Names the stragglers of one start, and those that recover."""

    def __init__(self, placements: Sequence[RankOnNode], say: Callable[[str], None]) -> None:
        self._placements, self._say = placements, say
        self._contradictions: dict[int, list[int]] = {}
        """Steps of the latest looks at which a rank was slow and is not named, or usual and is named."""
        self._named: set[int] = set()
        self._stragglers: dict[int, Straggler] = {}

    def note(self, step: int, own_s: Sequence[float]) -> float:
        """Judge the look at `step` by the own work of each rank, and return the usual seconds."""
        usual_s, limit_s = usual(own_s)
        if math.isinf(limit_s):
            return usual_s
        slow = {rank for rank, seconds in enumerate(own_s) if limit_s < seconds < math.inf}
        contradictions = {
            rank: [*self._contradictions.get(rank, ()), step] for rank in sorted(slow ^ self._named)
        }
        changed = [rank for rank, steps in contradictions.items() if len(steps) == LOOKS]
        for rank in changed:
            first_step = contradictions.pop(rank)[0]
            self._named ^= {rank}
            if rank in self._named:
                self._name(rank, first_step)
        self._contradictions = contradictions
        for rank in slow & self._named:
            self._stragglers[rank] = replace(
                self._stragglers[rank], to_step=step, own_work_s=own_s[rank], usual_s=usual_s
            )
        self._report(step, changed)
        return usual_s

    def _name(self, rank: int, from_step: int) -> None:
        earlier = self._stragglers.get(rank)
        self._stragglers[rank] = Straggler(
            rank=rank,
            **asdict(self._placements[rank]),
            from_step=earlier.from_step if earlier else from_step,
            to_step=from_step,
            times=earlier.times + 1 if earlier else 1,
            own_work_s=0.0,
            usual_s=0.0,
        )

    def _report(self, step: int, changed: Sequence[int]) -> None:
        comparison = "as that of the fastest" if len(self._placements) < FEW else "the median of all ranks"
        reported = [self._stragglers[rank] for rank in changed if self._stragglers[rank].times <= MAX_REPORTS]
        for straggler in reported[:LINES]:
            if straggler.rank in self._named:
                self._say(
                    f"{straggler.name} is a straggler: {straggler.excess}, {comparison} (step {step});"
                    f" check {straggler.node} with dist-doctor"
                )
            else:
                self._say(f"{straggler.name} is as fast as the others again (step {step})")
        if len(reported) > LINES:
            self._say(f"{len(reported) - LINES} more ranks became stragglers or recovered at step {step}")

    def now(self) -> list[dict[str, Any]]:
        """Return the ranks that are slow now, the slowest first, for ``metrics.jsonl``."""
        rows = [asdict(self._stragglers[rank]) for rank in self._named]
        return sorted(rows, key=lambda row: -row["own_work_s"])[:ROWS]

    def all(self) -> list[dict[str, Any]]:
        """Return the ranks that were slow at any time of this start, for ``summary.json``."""
        return [asdict(self._stragglers[rank]) for rank in sorted(self._stragglers)]


def _milliseconds(seconds: float) -> str:
    """Write a duration with three digits, such as ``131 ms`` or ``4.56 ms``."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds * 1e3:.0f} ms"

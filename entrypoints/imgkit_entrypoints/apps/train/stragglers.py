"""Stragglers: ranks whose own work takes longer than the work of others, again and again. No torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence, Set
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

# Part of the usual time by which a straggler exceeds it, at least.
SHARE = 0.2
# Median absolute deviations by which a straggler exceeds the median.
MADS = 5
# A straggler loses more than this in a step: short steps differ by more than `SHARE` from chance.
FLOOR_S = 0.001
# Comparisons in a row that make a rank a straggler, and usual again.
COMPARISONS = 3
# Fewer ranks than this have no meaningful median: the fastest is the usual one.
FEW = 4
# Most ranks that one comparison reports by a line each.
LINES = 8
# Times that the log names the same rank; ranks that share a processor become stragglers in turn.
MAX_REPORTS = 3
# Most ranks in a line of ``metrics.jsonl``, which readers bound.
ROWS = 100


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
    """Step of the first comparison in which it was slow."""
    to_step: int
    """Step of the last such comparison."""
    times: int
    """Number of times that it was named."""
    own_work_s: float
    """Seconds of own work in a step, in the last comparison in which it was slow."""
    usual_s: float
    """The seconds of the others: their median, or those of the fastest of fewer than 4 ranks."""

    @property
    def name(self) -> str:
        """The rank and its node."""
        return f"rank {self.rank} on {self.node} (local rank {self.local_rank})"

    @property
    def excess(self) -> str:
        """Its time beside the usual time, for a message."""
        return (
            f"its own work takes {_milliseconds(self.own_work_s)} a step, not {_milliseconds(self.usual_s)}"
        )


class UsualWork(NamedTuple):
    """The seconds of own work that are usual in a step, and those above which a rank is slow."""

    usual_s: float
    limit_s: float


def find_usual_work(own_s: Sequence[float]) -> UsualWork:
    """Return the usual seconds of own work, and the seconds above which a rank is slow.

    Own work is what a rank computes in a step, without its wait for others. Usual is the median of all ranks,
    or the fastest of fewer than `FEW`. With fewer than two known values there is nothing to compare, and the
    results are NaN and infinity.

    Parameters
    ----------
    own_s : seconds of each rank in a step; what is not a positive number is unknown.
    """
    measured = sorted(seconds for seconds in own_s if 0 < seconds < math.inf)
    if len(measured) < 2:
        return UsualWork(math.nan, math.inf)
    if len(measured) < FEW:
        fastest = measured[0]
        return UsualWork(fastest, _least_limit(fastest))
    median = statistics.median(measured)
    limit = _least_limit(median)
    # If even the slowest rank is below this limit, nobody is slow. That saves sorting thousands of values.
    if measured[-1] > limit:
        deviation = statistics.median(abs(seconds - median) for seconds in measured)
        limit = max(limit, median + MADS * deviation)
    return UsualWork(median, limit)


def _least_limit(usual_s: float) -> float:
    """Return the seconds that a straggler exceeds at least."""
    return max(usual_s * (1 + SHARE), usual_s + FLOOR_S)


class Stragglers:
    """Names the stragglers of one start, and those that recover."""

    def __init__(self, placements: Sequence[RankOnNode], say: Callable[[str], None]) -> None:
        self._placements = placements
        self._say = say
        # Steps of the latest comparisons in a row that contradict what a rank is named, by rank: it was slow
        # and is no straggler, or usual and is one.
        self._contradictions: dict[int, list[int]] = {}
        self._named: set[int] = set()
        self._stragglers: dict[int, Straggler] = {}

    def judge(self, step: int, own_s: Sequence[float]) -> float:
        """Compare the seconds of own work of all ranks up to a step, and return the usual seconds.

        A rank that was slow in `COMPARISONS` comparisons in a row is named as a straggler. After as many in
        which it was as fast as the others, it is a straggler no longer.
        """
        usual_s, limit_s = find_usual_work(own_s)
        if math.isinf(limit_s):
            return usual_s
        slow = {rank for rank, seconds in enumerate(own_s) if limit_s < seconds < math.inf}
        changed = self._find_changes(step, slow)
        for rank, first_step in changed.items():
            if rank in self._named:
                self._named.remove(rank)
            else:
                self._named.add(rank)
                self._add_straggler(rank, first_step)
        for rank in slow & self._named:
            self._stragglers[rank] = replace(
                self._stragglers[rank], to_step=step, own_work_s=own_s[rank], usual_s=usual_s
            )
        self._report(step, tuple(changed))
        return usual_s

    def _find_changes(self, step: int, slow: Set[int]) -> dict[int, int]:
        """Return the ranks that become or stop being stragglers now, each with the first step of the change.

        Parameters
        ----------
        slow : ranks that are slow in this comparison.
        """
        contradictions = {}
        changed = {}
        # Ranks that are slow and not named as stragglers, or named and not slow.
        for rank in sorted(slow ^ self._named):
            steps = [*self._contradictions.get(rank, ()), step]
            if len(steps) < COMPARISONS:
                contradictions[rank] = steps
            else:
                changed[rank] = min(steps)
        self._contradictions = contradictions
        return changed

    def _add_straggler(self, rank: int, from_step: int) -> None:
        """Add a rank that is named from now on, or count it again. `judge` fills in its seconds."""
        earlier = self._stragglers.get(rank)
        if earlier is not None:
            self._stragglers[rank] = replace(earlier, to_step=from_step, times=earlier.times + 1)
            return
        placement = self._placements[rank]
        self._stragglers[rank] = Straggler(
            rank=rank,
            node=placement.node,
            local_rank=placement.local_rank,
            from_step=from_step,
            to_step=from_step,
            times=1,
            own_work_s=0.0,
            usual_s=0.0,
        )

    def _report(self, step: int, changed: Sequence[int]) -> None:
        """Report ranks that were slow, or are usual again, but the same rank only a few times."""
        comparison = "the median of all ranks"
        if len(self._placements) < FEW:
            comparison = "as that of the fastest"
        stragglers = [self._stragglers[rank] for rank in changed]
        reported = [straggler for straggler in stragglers if straggler.times <= MAX_REPORTS]
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

    def current_rows(self) -> list[dict[str, Any]]:
        """Return the ranks that are slow now, the slowest first, for ``metrics.jsonl``."""
        rows = [asdict(self._stragglers[rank]) for rank in self._named]
        return sorted(rows, key=lambda row: -row["own_work_s"])[:ROWS]

    def all_rows(self) -> list[dict[str, Any]]:
        """Return the ranks that were slow at any time of this start, for ``summary.json``."""
        return [asdict(self._stragglers[rank]) for rank in sorted(self._stragglers)]


def _milliseconds(seconds: float) -> str:
    """Write a duration with three digits, such as ``131 ms`` or ``4.56 ms``."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e3:.0f} ms"  # :.3g would write 1.2e+03

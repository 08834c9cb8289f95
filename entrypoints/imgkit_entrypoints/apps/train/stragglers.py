"""Find stragglers: ranks that are repeatedly slower than the others in their own work.

Own work is what a rank computes in a step, without its wait for other ranks. This module does not import
torch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence, Set
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

# A rank is slow only if its time exceeds the usual time by more than this share.
SHARE = 0.2
# A rank is slow only if its time exceeds the median by more than this many median absolute deviations.
MADS = 5
# A rank is slow only if it exceeds the usual time by more than this. Very short steps differ by more than
# `SHARE` by chance.
FLOOR_S = 0.001
# A rank becomes a straggler if it is slow in this many successive comparisons. After as many comparisons in
# which it is not slow, it is no straggler any more.
COMPARISONS_FOR_CHANGE = 3
# With fewer ranks than this, the median is not meaningful, so the fastest rank defines the usual time.
FEW = 4
# Most ranks for which one comparison writes a line each.
LINES = 8
# How often the log reports the same rank. Ranks that share a processor may become stragglers by turns.
MAX_REPORTS = 3
# Most ranks in a line of ``metrics.jsonl``, because programs that read the file limit the length of a line.
ROWS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOnNode:
    """The node on which a rank runs, and its number on this node."""

    node: str
    local_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that is or was a straggler. The fields are saved in ``metrics.jsonl`` and ``summary.json``."""

    rank: int
    node: str
    local_rank: int
    from_step: int
    """Step of the first comparison in which it was slow."""
    to_step: int
    """Step of the last comparison in which it was slow."""
    times: int
    """How often it has become a straggler."""
    own_work_s: float
    """Own work in a step in seconds, from the last comparison in which it was slow."""
    usual_s: float
    """Usual own work in seconds: the median of all ranks, or the fastest of fewer than 4 ranks."""

    @property
    def name(self) -> str:
        """The rank and its node, for a message."""
        return f"rank {self.rank} on {self.node} (local rank {self.local_rank})"

    @property
    def excess(self) -> str:
        """Its own work in comparison with the usual time, for a message."""
        return f"its own work takes {_format_ms(self.own_work_s)} a step, not {_format_ms(self.usual_s)}"


class UsualWork(NamedTuple):
    """The usual own work in a step, and the limit above which a rank is slow, in seconds."""

    usual_s: float
    limit_s: float


def find_usual_work(own_s: Sequence[float]) -> UsualWork:
    """Return the usual time of own work in a step, and the limit above which a rank is slow.

    Own work is what a rank computes in a step, without its wait for other ranks. The usual time is the median
    of all ranks, or the time of the fastest rank if there are fewer than `FEW` ranks. If fewer than two times
    are known, there is nothing to compare, and the results are NaN and infinity.

    Parameters
    ----------
    own_s : own work of each rank in a step, in seconds. Values that are not positive and finite are unknown.
    """
    measured = sorted(seconds for seconds in own_s if 0 < seconds < math.inf)
    if len(measured) < 2:
        return UsualWork(math.nan, math.inf)
    if len(measured) < FEW:
        fastest = measured[0]
        return UsualWork(fastest, _compute_least_limit(fastest))
    median = statistics.median(measured)
    limit = _compute_least_limit(median)
    # If even the slowest rank is not above the lowest possible limit, no rank is slow. In this case, there is
    # no need to sort thousands of deviations.
    if measured[-1] > limit:
        deviation = statistics.median(abs(seconds - median) for seconds in measured)
        limit = max(limit, median + MADS * deviation)
    return UsualWork(median, limit)


def _compute_least_limit(usual_s: float) -> float:
    """Return the lowest possible limit above which a rank is slow, in seconds."""
    return max(usual_s * (1 + SHARE), usual_s + FLOOR_S)


class Stragglers:
    """Compares the ranks of a run repeatedly, and reports stragglers and ranks that have recovered.

    Parameters
    ----------
    placements : the node of each rank.
    say : function that prints a message.
    """

    def __init__(self, placements: Sequence[RankOnNode], say: Callable[[str], None]) -> None:
        self._placements = placements
        self._say = say
        # For each rank, the steps of the latest successive comparisons that contradict its state: it was slow
        # but is not a straggler, or it was not slow but is a straggler.
        self._contradictions: dict[int, list[int]] = {}
        # Ranks that are stragglers now.
        self._current_ranks: set[int] = set()
        # All ranks that are or were stragglers.
        self._stragglers: dict[int, Straggler] = {}

    def compare_ranks(self, step: int, own_s: Sequence[float]) -> float:
        """Compare the own work of all ranks, report changes, and return the usual time in seconds.

        If a rank is slow in three successive comparisons, it is reported as a straggler. After as many
        comparisons in which it is not slow, it is reported as recovered. If fewer than two times are known,
        nothing is compared, and the result is NaN.

        Parameters
        ----------
        step : the latest step that `own_s` includes.
        own_s : own work of each rank in a step, in seconds.
        """
        usual_s, limit_s = find_usual_work(own_s)
        if math.isnan(usual_s):
            return usual_s
        slow_ranks = {rank for rank, seconds in enumerate(own_s) if limit_s < seconds < math.inf}
        self._contradictions = self._find_contradictions(step, slow_ranks)
        changed_ranks = []
        for rank, steps in self._contradictions.items():
            if len(steps) == COMPARISONS_FOR_CHANGE:
                changed_ranks.append(rank)
        for rank in changed_ranks:
            first_step, *_ = self._contradictions.pop(rank)
            if rank in self._current_ranks:
                self._current_ranks.remove(rank)
            else:
                self._add_straggler(rank, first_step)
        # Update the times before they are reported, also those of stragglers that were just added.
        for rank in slow_ranks & self._current_ranks:
            self._stragglers[rank] = replace(
                self._stragglers[rank], to_step=step, own_work_s=own_s[rank], usual_s=usual_s
            )
        self._report_changes(step, changed_ranks)
        return usual_s

    def _find_contradictions(self, step: int, slow_ranks: Set[int]) -> dict[int, list[int]]:
        """Return the ranks whose state this comparison contradicts, with the steps of all such comparisons.

        A comparison contradicts the state of a rank if the rank is slow but is not a straggler, or if it is a
        straggler but is not slow. Only successive comparisons count, up to this one. So a rank whose state is
        not contradicted now is left out, and begins again at its next contradiction.
        """
        contradictions = {}
        # The symmetric difference of two sets, which has the elements that are in only one of them.
        for rank in sorted(slow_ranks ^ self._current_ranks):
            contradictions[rank] = [*self._contradictions.get(rank, ()), step]
        return contradictions

    def _add_straggler(self, rank: int, from_step: int) -> None:
        """Make a rank a straggler, or make it one again, which increases its count.

        `compare_ranks` sets the times in seconds and `to_step` afterwards, after each comparison in which the
        rank is slow.
        """
        self._current_ranks.add(rank)
        earlier = self._stragglers.get(rank)
        if earlier is not None:
            self._stragglers[rank] = replace(earlier, times=earlier.times + 1)
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

    def _report_changes(self, step: int, changed_ranks: Sequence[int]) -> None:
        """Report the ranks that have become stragglers or have recovered.

        For example: ``rank 2 on node1 (local rank 0) is a straggler: its own work takes 131 ms a step, not
        100 ms, the median of all ranks (step 30); check node1 with dist-doctor``. The same rank is reported
        only a few times, and only a few ranks are reported at once.
        """
        # With few ranks, they are compared with the fastest one (see `find_usual_work`).
        reference = "the median of all ranks"
        if len(self._placements) < FEW:
            reference = "as that of the fastest"
        stragglers = [self._stragglers[rank] for rank in changed_ranks]
        reported = [straggler for straggler in stragglers if straggler.times <= MAX_REPORTS]
        for straggler in reported[:LINES]:
            if straggler.rank in self._current_ranks:
                self._say(
                    f"{straggler.name} is a straggler: {straggler.excess}, {reference} (step {step});"
                    f" check {straggler.node} with dist-doctor"
                )
            else:
                self._say(f"{straggler.name} is as fast as the others again (step {step})")
        if len(reported) > LINES:
            self._say(f"{len(reported) - LINES} more ranks became stragglers or recovered at step {step}")

    def current_rows(self) -> list[dict[str, Any]]:
        """Return the ranks that are stragglers now, for ``metrics.jsonl``. The slowest comes first."""
        rows = [asdict(self._stragglers[rank]) for rank in self._current_ranks]
        return sorted(rows, key=lambda row: -row["own_work_s"])[:ROWS]

    def all_rows(self) -> list[dict[str, Any]]:
        """Return the ranks that were stragglers at any time since this start, for ``summary.json``."""
        return [asdict(self._stragglers[rank]) for rank in sorted(self._stragglers)]


def _format_ms(seconds: float) -> str:
    """Format a duration with three digits, such as ``131 ms`` or ``4.56 ms``."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e3:.0f} ms"  # with .3g, 1200 would be printed as 1.2e+03

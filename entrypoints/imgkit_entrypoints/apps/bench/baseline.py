"""``--baseline``: compare a run with a saved one. Is it slower, and by more than both runs vary?

The spread is that of the iterations. Confidence intervals of the medians would be narrower, but they assume
independent iterations, and the slow phases of a machine last longer than one iteration. Between equal runs on
a busy machine, such intervals were apart at every fourth size (docs/bench-report.md).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from imgkit_entrypoints.apps.bench import sizes
from imgkit_entrypoints.apps.bench.record import BenchRun, Result, Spread, spread
from imgkit_entrypoints.errors import UsageError

LEAST_TIMES = 6
"""Two sets of six times of equal runs are apart by chance once in 924 cases, of five once in 252."""
HINT = "measure both runs in the same way on the same machines, or save a new baseline with --save"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One op and size in both runs."""

    op: str
    group: str
    dtype: str
    size_bytes: int
    old_us: Spread
    new_us: Spread
    ratio: float
    """Bandwidth now divided by the baseline's, from the medians; below 1 is slower."""
    regressed: bool
    undecided: bool
    """Slower by more than the tolerance, but the spreads overlap."""

    def __str__(self) -> str:
        kind = "slower" if self.ratio < 1 else "faster"
        return (
            f"{self.op} {self.dtype} {sizes.both(self.size_bytes)}: {abs(1 - self.ratio):.0%} {kind} than "
            f"the baseline, {self.old_us.median:.1f} us then and {self.new_us.median:.1f} us now (median)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineVerdict:
    """The result of the comparison with a baseline."""

    tolerance: float
    changes: tuple[Change, ...]
    not_compared: int
    """Results that the other run lacks, or that have too few times."""

    @property
    def regressions(self) -> tuple[Change, ...]:
        """The changes that are regressions, the worst first."""
        return tuple(sorted((one for one in self.changes if one.regressed), key=lambda one: one.ratio))

    @property
    def visible(self) -> float:
        """Factor by which half of the sizes would have to be slower to leave the baseline's spread."""
        return statistics.median(one.old_us.high / one.old_us.low for one in self.changes)

    @property
    def sentences(self) -> tuple[str, ...]:
        """The result as sentences; the first one is the answer."""
        bad = self.regressions
        answer = (
            f"slower than the baseline by more than {self.tolerance:.0%}, beyond the spread of both runs, at "
            f"{len(bad)} of {len(self.changes)} sizes"
            if bad
            else f"no regression: none of {len(self.changes)} sizes is slower than the baseline by more than "
            f"{self.tolerance:.0%} and beyond the spread of both runs"
        )
        result = [answer, *map(str, bad)]
        if unsure := sum(one.undecided for one in self.changes):
            result.append(
                f"undecided at {unsure} of {len(self.changes)} sizes: slower by more than "
                f"{self.tolerance:.0%}, but the spreads of both runs overlap"
            )
        if self.visible > 1 / (1 - self.tolerance):
            result.append(
                f"the baseline's iterations vary: at half of the sizes, only a run at least "
                f"{self.visible:.2g} times slower stands out from that"
            )
        if self.not_compared:
            result.append(
                f"{self.not_compared} results were not compared: the other run lacks them, or they have "
                "too few times"
            )
        return tuple(result)


def compare(new: BenchRun, old: BenchRun, tolerance: float) -> BaselineVerdict:
    """Compare the results that both runs timed per iteration; batched times have no spread.

    A regression meets two conditions. The bandwidth from the medians is below ``1 - tolerance`` of the
    baseline's. The spreads are apart: nine tenths of the iterations are slower than nine tenths of the
    baseline's.

    Raises
    ------
    UsageError : the runs cannot be compared; names every difference.
    """
    _same_place(new, old)
    if faulty := [one for one in old.results if one.wrong]:
        raise UsageError(
            f"the baseline had {faulty[0].wrong} wrong elements in {faulty[0].op}, so its times are "
            "meaningless",
            where=old.where,
            hint=HINT,
        )
    new_spread, old_spread = _with_spread(new), _with_spread(old)
    _same_timing(new, old, new_spread, old_spread)
    both = [key for key in new_spread if key in old_spread]
    judged = [
        _change(new_spread[key], old_spread[key], tolerance)
        for key in both
        if min(len(new_spread[key].times_us), len(old_spread[key].times_us)) >= LEAST_TIMES
    ]
    if not judged:
        said = (
            f"fewer than {LEAST_TIMES} iterations each" if both else "no op, size, type and group in common"
        )
        raise UsageError(f"nothing to compare: {said}", where=f"{new.where} and {old.where}", hint=HINT)
    apart = len(new_spread.keys() ^ old_spread.keys()) + len(both) - len(judged)
    return BaselineVerdict(tolerance=tolerance, changes=tuple(judged), not_compared=apart)


_Key = tuple[str, str, str, str, int]


def _with_spread(run: BenchRun) -> Mapping[_Key, Result]:
    return {one.key[:-1]: one for one in run.results if one.timing == "iteration"}


def _change(new: Result, old: Result, tolerance: float) -> Change:
    now, then = spread(new.times_us), spread(old.times_us)
    ratio = then.median / now.median
    slower = ratio < 1 - tolerance
    return Change(
        op=new.op,
        group=new.group,
        dtype=new.dtype,
        size_bytes=new.size_bytes,
        old_us=then,
        new_us=now,
        ratio=ratio,
        regressed=slower and not now.overlaps(then),
        undecided=slower and now.overlaps(then),
    )


def _same_place(new: BenchRun, old: BenchRun) -> None:
    """Raise UsageError unless both used the same software on as many ranks; the hosts may differ."""

    def facts(run: BenchRun) -> dict[str, str]:
        world = {name: str(value) for name, value in asdict(run.world).items() if name != "hosts"}
        return {**world, **run.fingerprint}

    here, there = facts(new), facts(old)
    differ = [
        f"{name}: {there.get(name, 'unknown')} then, {here.get(name, 'unknown')} now"
        for name in sorted(here.keys() | there.keys())
        if here.get(name) != there.get(name)
    ]
    if differ:
        raise UsageError(
            f"the baseline was measured under other conditions: {'; '.join(differ)}",
            where=old.where,
            hint=HINT,
        )


def _same_timing(
    new: BenchRun, old: BenchRun, new_spread: Mapping[_Key, Result], old_spread: Mapping[_Key, Result]
) -> None:
    for run, other, mine, others in ((new, old, new_spread, old_spread), (old, new, old_spread, new_spread)):
        batched = {one.key[:-1] for one in run.results if one.timing == "batched"}
        if not mine and batched & others.keys():
            raise UsageError(
                f"this run has only batched times, {other.where} has times per iteration: "
                "they cannot be compared",
                where=run.where,
                hint=HINT,
            )
    if not new_spread and not old_spread:
        raise UsageError(
            "both runs have only batched times, which have no spread",
            where=f"{new.where} and {old.where}",
            hint="both runs need times per iteration",
        )

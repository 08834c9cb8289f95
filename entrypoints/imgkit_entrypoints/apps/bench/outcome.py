"""The outcome of a run while it grows: results and remarks, printed and saved as soon as they are known."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imgkit_entrypoints import json_text, terminal
from imgkit_entrypoints.apps.bench import baseline, matrix, nccl_log, record, sizes, soak, verdict
from imgkit_entrypoints.apps.bench.collectives import Collective
from imgkit_entrypoints.apps.bench.compute import OverlapTimes
from imgkit_entrypoints.apps.bench.nccl_log import NcclChoice
from imgkit_entrypoints.apps.bench.node_state import NodeConditions
from imgkit_entrypoints.apps.bench.record import Result, World
from imgkit_entrypoints.apps.bench.verify import Dtype
from imgkit_entrypoints.errors import EXIT_NO, UsageError

if TYPE_CHECKING:
    from imgkit_entrypoints.apps.bench.measurement import Measurement
    from imgkit_entrypoints.apps.bench.setup import RunSetup


class Outcome:
    """Everything that a run has found; rank 0 alone prints and saves it."""

    def __init__(self, setup: RunSetup) -> None:
        self._setup = setup
        self.record = setup.new_record()
        self.late: tuple[verdict.LateRank, ...] = ()
        self.nccl_choices: dict[str, NcclChoice] = {}
        self.conditions: tuple[NodeConditions, ...] = ()
        self._largest: dict[str, verdict.Largest] = {}
        self._rails: list[matrix.Matrix] = []
        self._moments: list[soak.Moment] = []
        self._overlaps: list[OverlapTimes] = []
        self._wrong = 0
        self._remarks: list[str] = []

    def print(self, *lines: str) -> None:
        """Print on rank 0."""
        if self._setup.here.rank == 0:
            terminal.out(*lines)

    def remark(self, text: str) -> None:
        """Print a sentence that the saved file keeps too."""
        self._remarks.append(text)
        self.print(text)

    def add(self, op: Collective, measured: Measurement) -> None:
        """Take in one size of one collective: print it, and save what there is."""
        setup = self._setup
        factor = op.factor(setup.group.size)
        common: dict[str, Any] = {
            "size_bytes": measured.size_bytes,
            "dtype": setup.dtype.name,
            "group": setup.options.group,
            "variant": setup.variant(op),
        }
        batch_s = sum(measured.batches)
        batched = record.new_result(
            op.name,
            factor,
            batch_s / measured.counts.total,
            iterations=measured.counts.total,
            wrong=None,
            batches=[took / measured.counts.launches for took in measured.batches],
            **common,
        )
        seconds = batched.median_us / 1e6
        single = record.new_result(
            op.name,
            factor,
            sorted(measured.times)[(len(measured.times) - 1) // 2],
            iterations=len(measured.times),
            wrong=measured.wrong,
            times=measured.times,
            **common,
        )
        self.record.results += [batched, single]
        before = self._largest.get(op.name)
        self._largest[op.name] = verdict.Largest(
            op=op,
            size_bytes=measured.size_bytes,
            seconds=seconds,
            batch_s=batch_s,
            busbw_GBps=batched.median_busbw_GBps,
            ports=measured.nodes,
            times=(*(before.times if before else ()), (measured.size_bytes, seconds)),
        )
        self.print(result_row(batched, single))
        self._add_wrong(measured)
        self.save()

    def add_matrix(self, measured: matrix.Matrix, size_bytes: int) -> None:
        """Take in the bandwidths between nodes, and print them."""
        rail = len(self._rails) if self._setup.options.matrix == "rails" else None
        self._rails.append(measured)
        self.print(*matrix.table(measured, self._setup.hosts, size_bytes, rail))

    def add_moment(self, op: Collective, moment: soak.Moment, found: Sequence[Measurement]) -> None:
        """Take in one part of a long run: print it, and save what there is."""
        setup = self._setup
        self._moments.append(moment)
        self.print(soak.line(moment))
        mine = [one for one in self._moments if one.op == op.name]
        checked = [one.wrong for one in mine if one.wrong is not None]
        result = record.new_result(
            op.name,
            op.factor(setup.group.size),
            statistics.fmean(one.median_us for one in mine) / 1e6,
            size_bytes=moment.size_bytes,
            dtype=setup.dtype.name,
            group=setup.options.group,
            variant=setup.variant(op),
            iterations=sum(one.iterations for one in mine),
            wrong=sum(checked) if checked else None,
            batches=[one.median_us / 1e6 for one in mine],
        )
        self.record.results = [*(one for one in self.record.results if one.key != result.key), result]
        self._largest[op.name] = verdict.Largest(
            op=op,
            size_bytes=moment.size_bytes,
            seconds=result.median_us / 1e6,
            batch_s=sum(found[-1].batches),
            busbw_GBps=result.median_busbw_GBps,
            ports=found[-1].nodes,
        )
        for one in found:
            self._add_wrong(one)
        self.save()

    def judge_timeline(self) -> None:
        """Print what the timeline shows."""
        for sentence in soak.sentences(self._moments):
            self.remark(sentence)

    def add_overlap(self, found: OverlapTimes) -> None:
        """Take in a collective beside computing, and print it."""
        self._overlaps.append(found)
        alone, computing, both = (
            f"{1e3 * value:.3g} ms" for value in (found.communication_s, found.computation_s, found.both_s)
        )
        self.remark(
            f"{found.op} of {sizes.both(found.size_bytes)}: {alone} alone, {computing} of computing alone, "
            f"{both} at once. {100 * found.hidden:.0f} % of the shorter one is hidden."
        )

    def _add_wrong(self, measured: Measurement) -> None:
        self._wrong += measured.wrong or 0
        for element in measured.first:
            self.remark(f"{element} (on {self._setup.locations[element.rank].host})")

    def judge_matrix(self) -> None:
        """Print the slow nodes, rails and links."""
        for sentence in matrix.sentences(self._rails, self._setup.hosts):
            self.remark(sentence)

    def save(self, *, ended: bool = False) -> None:
        """Save what there is. A run that is killed leaves a file that says so."""
        if self._setup.here.rank == 0 and self._setup.options.save:
            self.record.verdict = self._judge()
            self.record.verdict["sentences"] += self._remarks
            if not ended:
                self.record.verdict["sentences"] += [
                    "INCOMPLETE: the run was still in progress, or was killed."
                ]
            self.record.save(Path(self._setup.options.save))

    def finish(self) -> int:
        """Print the verdict and save the run; returns the exit code."""
        for sentence in self._judge()["sentences"]:
            self.print(sentence)
        reasons = [*verdict.wrong_values(self._wrong)]
        if self.record.complete and self._setup.here.rank == 0:  # only its node's line rate counts
            reasons += [*self._slower_than_baseline(), *self._missed()]
        if reasons:
            self.remark(verdict.failed_line(reasons))
        self.save(ended=True)
        return 0 if self.record.complete and not reasons else EXIT_NO

    def _missed(self) -> Iterator[str]:
        """Yield what is slow, and what misses ``--require``."""
        asked, hosts = self._setup.options.require, self._setup.hosts
        if self._setup.options.matrix:
            yield from verdict.slow_parts(self._rails, hosts)
            yield from verdict.slow_exchanges(asked, self._rails, hosts)
        else:
            yield from verdict.missed(asked, list(self._largest.values()), self._context())

    def _context(self) -> verdict.RunContext:
        setup = self._setup
        return verdict.RunContext(
            hosts=setup.hosts,
            ranks=setup.here.world_size,
            group=setup.options.group,
            together=setup.group.size,
            device=setup.here.device.type,
            fabric=setup.machine.fabric,
            line_rate_Gbps=self.record.line_rate_Gbps,
            late_from_s=setup.late_from_s,
            carried_by=nccl_log.sentences(self.record.transport),
            decided=self.nccl_choices,
            conditions=self.conditions,
            communicators=setup.options.communicators,
        )

    def _judge(self) -> dict[str, Any]:
        hosts_by_rank = [one.host for one in self._setup.locations]
        largest = list(self._largest.values())
        judged = verdict.judge(largest, self._context(), self.late, hosts_by_rank)
        judged["overlap"] = [{**dataclasses.asdict(one), "hidden": one.hidden} for one in self._overlaps]
        judged["timeline"] = [dataclasses.asdict(one) for one in self._moments]
        tables = [[list(row) for row in measured] for measured in self._rails]
        if self._setup.options.matrix == "rails":
            judged["rails_GBps"] = tables
        elif tables:
            judged["matrix_GBps"] = tables[0]
        return judged

    def _slower_than_baseline(self) -> Iterator[str]:
        """Compare with ``--baseline``, and yield the reason if the run is slower. Only rank 0 has one."""
        saved = self._setup.baseline
        if saved is None:
            return
        try:
            new = record.parse(json_text.parse(self.record.to_json()), "this run")
            compared = baseline.compare(new, saved, self._setup.options.tolerance)
        except UsageError as error:
            self.remark(f"NOT COMPARED: {error}")
            yield "not comparable with --baseline"
            return
        for sentence in compared.sentences:
            self.remark(f"baseline: {sentence}")
        if compared.regressions:
            yield f"{len(compared.regressions)} of {len(compared.changes)} sizes are slower than --baseline"


HEADER = (
    f"{'size':>32}  {'batches: median, slowest rank':^61}  {'each iteration, after a barrier':^39}",
    f"{'bytes':>12} {'x1024':>9} {'x1000':>9}  {'n':>5} {'us':>11} {'band %':>9} {'algbw GBps':>10} "
    f"{'busbw GBps':>10} {'Gbps':>9}  {'n':>5} {'p50 us':>11} {'p95':>9} {'p99':>9} {'cv %':>5} {'wrong':>7}",
)


def title(op: Collective, dtype: Dtype, world: World, group: str, ranks: int, variant: str) -> str:
    """The line above the table: the collective, its variant, the ranks and the unit."""
    number = "1 rank" if world.ranks == 1 else f"{world.ranks} ranks"
    kind = f"{op.name} {dtype.torch}{' sum' if op.sums and not op.variant else ''}, {number}, {world.backend}"
    if group != "world":
        kind += f", {world.ranks // ranks} groups of {ranks} at once ({group})"
    if variant:
        kind += f"; {variant}"
    return (
        f"{kind}, {world.nodes} nodes; 1 GBps = 1e9 B/s" if world.nodes > 1 else f"{kind}; 1 GBps = 1e9 B/s"
    )


def result_row(batched: Result, single: Result) -> str:
    """The row of one size, with both timings."""
    size, wrong = batched.size_bytes, single.wrong
    return (
        f"{size:12} {sizes.binary(size):>9} {sizes.decimal(size):>9}  {batched.iterations:5} "
        f"{batched.median_us:11.1f} {band(batched):>9} {batched.median_algbw_GBps:10.3f} "
        f"{batched.median_busbw_GBps:10.3f} {8 * batched.median_busbw_GBps:9.2f}  "
        f"{single.iterations:5} {single.p50_us or 0:11.1f} {single.p95_us or 0:9.1f} "
        f"{single.p99_us or 0:9.1f} {100 * (single.cv or 0):5.0f} "
        f"{'-' if wrong is None else wrong:>7}"
    )


def band(one: Result) -> str:
    """The spread of the batches around their median, in percent: ``-3 +12``."""
    found = one.spread_us
    low, high = (100 * (value / found.median - 1) for value in (found.low, found.high))
    return f"{low:.0f} {high:+.0f}".replace("-0 ", "0 ")

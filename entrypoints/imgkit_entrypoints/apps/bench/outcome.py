"""The outcome of a run while it grows: results and remarks, printed and saved as soon as they are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from imgkit_entrypoints.apps.bench import baseline, table
from imgkit_entrypoints.apps.bench.judge import slow_links, stragglers, transport, verdict
from imgkit_entrypoints.apps.bench.measure import matrix
from imgkit_entrypoints.apps.bench.measure.collectives import Collective
from imgkit_entrypoints.apps.bench.measure.measurement import Measurement
from imgkit_entrypoints.apps.bench.measure.nccl_log import NcclChoice
from imgkit_entrypoints.apps.bench.measure.node_conditions import NodeConditions
from imgkit_entrypoints.apps.bench.record import reader, writer
from imgkit_entrypoints.apps.bench.setup import RunSetup
from imgkit_entrypoints.errors import EXIT_NO, UsageError


class Outcome:
    """Everything that a run has found; rank 0 alone prints and saves it."""

    def __init__(self, setup: RunSetup) -> None:
        self._setup = setup
        self.record = setup.new_record()
        self.late: tuple[stragglers.Late, ...] = ()
        self.nccl_choices: dict[str, NcclChoice] = {}
        self.conditions: tuple[NodeConditions, ...] = ()
        self._largest: dict[str, verdict.Largest] = {}
        self._matrix: matrix.Matrix = ()
        self._wrong = 0
        self._remarks: list[str] = []

    def print(self, text: str) -> None:
        """Print on rank 0."""
        if self._setup.here.rank == 0:
            print(text, flush=True)

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
        }
        seconds = measured.batch_s / measured.batch_iterations
        batched = writer.result(
            op.name, factor, seconds, iterations=measured.batch_iterations, wrong=None, **common
        )
        single = writer.result(
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
            op=op.name,
            size_bytes=measured.size_bytes,
            seconds=seconds,
            batch_s=measured.batch_s,
            busbw_GBps=batched.busbw_GBps,
            ports=measured.nodes,
            times=(*(before.times if before else ()), (measured.size_bytes, seconds)),
        )
        self.print(table.line(batched, single))
        self._wrong += measured.wrong or 0
        for element in measured.first:
            self.remark(f"{element} (on {setup.locations[element.rank].host})")
        self.save()

    def add_matrix(self, measured: matrix.Matrix, size_bytes: int) -> None:
        """Take in the bandwidths between nodes, and print them."""
        self._matrix = measured
        self.print(matrix.table(measured, self._setup.hosts, size_bytes))
        for sentence in slow_links.sentences(measured, self._setup.hosts):
            self.remark(sentence)

    def save(self, *, ended: bool = False) -> None:
        """Save what there is. A run that is killed leaves a file that says so."""
        if self._setup.here.rank == 0 and self._setup.options.save:
            self.record.verdict = self._judge()
            self.record.verdict["sentences"] += self._remarks
            if not ended:
                self.record.verdict["sentences"] += ["INCOMPLETE: the run was still going on, or was killed."]
            self.record.save(Path(self._setup.options.save))

    def finish(self) -> int:
        """Print the verdict and save the run; returns the exit code."""
        for sentence in self._judge()["sentences"]:
            self.print(sentence)
        if self._wrong:
            self.remark(f"FAILED: {self._wrong} elements were wrong. Run dist-doctor before you train here.")
        slower = self._slower_than_baseline() if self.record.complete else False
        self.save(ended=True)
        return 0 if self.record.complete and not self._wrong and not slower else EXIT_NO

    def _judge(self) -> dict[str, Any]:
        setup = self._setup
        context = verdict.RunContext(
            hosts=setup.hosts,
            ranks=setup.here.world_size,
            group=setup.options.group,
            together=setup.group.size,
            device=setup.here.device.type,
            fabric=setup.machine.fabric,
            line_rate_Gbps=self.record.line_rate_Gbps,
            late_from_s=setup.late_from_s,
            carried_by=transport.sentences(self.record.transport),
            decided=self.nccl_choices,
            conditions=self.conditions,
        )
        hosts_by_rank = [one.host for one in setup.locations]
        judged = verdict.judge(list(self._largest.values()), context, self.late, hosts_by_rank)
        if self._matrix:
            judged["matrix_GBps"] = [list(row) for row in self._matrix]
        return judged

    def _slower_than_baseline(self) -> bool:
        """Compare with ``--baseline``; False without one. Only rank 0 has it."""
        saved = self._setup.baseline
        if saved is None:
            return False
        try:
            new = reader.parse(json.loads(self.record.to_json()), "this run")
            compared = baseline.compare(new, saved, self._setup.options.tolerance)
        except UsageError as error:
            self.remark(f"NOT COMPARED: {error}")
            return True
        for sentence in compared.sentences:
            self.remark(f"baseline: {sentence}")
        return bool(compared.regressions)

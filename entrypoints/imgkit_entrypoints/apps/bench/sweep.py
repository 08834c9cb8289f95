"""The run: sizes and collectives in order, everything finished is printed and saved at once."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from imgkit_entrypoints.apps.bench import sizes, table
from imgkit_entrypoints.apps.bench.ending import Ending
from imgkit_entrypoints.apps.bench.judge import baseline, conditions, nccl_log, stragglers, verdict
from imgkit_entrypoints.apps.bench.measure import (
    collectives,
    dtypes,
    matrix,
    memory,
    operations,
    teams,
    timing,
)
from imgkit_entrypoints.apps.bench.measure.collectives import Collective
from imgkit_entrypoints.apps.bench.measure.one_size import Bench, Measured, OutOfMemory, Stopped
from imgkit_entrypoints.apps.bench.measure.verify import Truth
from imgkit_entrypoints.apps.bench.options import MOST_BYTES, Options
from imgkit_entrypoints.apps.bench.record import schema, writer
from imgkit_entrypoints.apps.bench.record.schema import World
from imgkit_entrypoints.errors import ImgkitError, UsageError
from imgkit_entrypoints.facts import Reader, root_of

if TYPE_CHECKING:
    from imgkit_entrypoints.apps.ranks import Ranks

PROGRESS_S = 5.0


class Sweep:
    """One run on this rank; rank 0 alone prints and saves."""

    def __init__(self, options: Options, here: Ranks, ending: Ending, log: Path | None = None) -> None:
        self.options, self.here, self.ending, self.log = options, here, ending, log
        self.seats = teams.seats(here)
        self.team = teams.joined(options.group, self.seats, here)
        self.dtype = dtypes.named(options.dtype)
        nodes = 1 + max(seat.node for seat in self.seats)
        self.hosts = tuple(next(seat.host for seat in self.seats if seat.node == n) for n in range(nodes))
        first = min(seat.rank for seat in self.seats if seat.node == self.seats[here.rank].node)
        self.speaks = here.rank == first
        self.bench = Bench(
            options=options,
            here=here,
            team=self.team,
            dtype=self.dtype,
            truth=Truth(self.dtype, self.team.size, here.device) if options.check else None,
            counting=nodes > 1 and self.speaks,
            nodes=nodes,
        )
        per_node = -(-here.world_size // nodes)
        free = memory.free_bytes(here, per_node)
        smallest = torch.tensor([float("inf") if free is None else float(free)], device=here.device)
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
        self.free_bytes: float = smallest.item()
        machine = writer.machine(os.environ, nodes, per_node, _software(here))
        self.fabric = machine.fabric
        shared = per_node > machine.cpus
        self.late_from_s = stragglers.LEAST_SHARED_S if shared else stragglers.LEAST_S
        self.record = writer.Record(
            started=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            command=("dist-bench", *sys.argv[1:]),
            world=World(
                ranks=here.world_size,
                nodes=nodes,
                ranks_per_node=per_node,
                hosts=self.hosts,
                backend=str(dist.get_backend()),
                device=here.device.type,
            ),
            fingerprint=machine.fingerprint,
            line_rate_Gbps=options.line_rate_Gbps or machine.line_rate_Gbps,
        )
        self.late: tuple[stragglers.Late, ...] = ()
        self.largest: dict[str, verdict.Largest] = {}
        self.baseline: schema.Run | None = None
        self.matrix: matrix.Matrix = ()
        self.decided: dict[str, nccl_log.Decision] = {}
        self.before = self._condition()
        self.conditions: tuple[conditions.Node, ...] = ()
        self.wrong = 0
        self.remarks: list[str] = []
        self.told = time.monotonic()
        ending.tell = self._ended

    def run(self) -> int:
        """Measure everything; the exit code of this worker."""
        lost = ""
        self._prepare()
        try:
            self.late = stragglers.late(self.bench.waits(), self.late_from_s)
            if self.options.matrix:
                self._matrix()
            # A collective that runs out of memory does not keep the next one from its smaller sizes.
            ops = () if self.options.matrix else self.options.ops
            ended = [self._collective(collectives.named(name)) for name in ops]
            self.record.complete = all(ended)
            self._look_back()
        except Stopped:  # of all ranks
            self._remark("INCOMPLETE: stopped on request; the sizes above are whole.")
            self._look_back()
        except RuntimeError as error:  # whatever the backend raises when a peer is gone
            said = (str(error).strip().splitlines() or ["no reason given"])[0]
            lost = re.sub(r"^\[\S+\] ", "", said).partition(". ")[0][
                :300
            ]  # no place in gloo, no advice of it
        with self.ending.own():
            if lost:
                self._remark(f"INCOMPLETE: the collective failed, the sizes above are whole: {lost}")
            code = self._finish()
            if lost:
                sys.stdout.flush()
                os._exit(code)  # a group that has lost a member would hang again in its destructor
        return code

    def _ended(self) -> None:
        self._remark(
            "INCOMPLETE: ended from outside, as when a rank or node is lost; the sizes above are whole."
        )
        self._finish()

    def _prepare(self) -> None:
        """Look at the files now: after an hour of measuring it is too late.

        Raises
        ------
        UsageError : on all ranks.
        """
        problem: ImgkitError | None = None
        if self.here.rank == 0:
            try:
                if self.options.save:
                    writer.writable(Path(self.options.save))
                if self.options.baseline:
                    self.baseline = schema.load(Path(self.options.baseline))
            except ImgkitError as error:
                problem = error
        if timing.agreed(lambda: (float(problem is not None),), 1, self.here)[0]:
            raise problem or UsageError("rank 0 cannot use its files")

    def _collective(self, op: Collective) -> bool:
        """Sweep one; False if it ended early."""
        planned = self._sizes(op)
        self._print(table.title(op, self.dtype, self.record.world, self.options.group, self.team.size))
        refused = self._refused(op, planned[0])
        if refused:
            self._remark(f"{op.name}: not supported by {self.record.world.backend}: {refused}")
            return True
        self._print(table.HEADER)
        for place, asked in enumerate(planned):
            began = time.monotonic()
            try:
                if op.buffer_bytes(asked, self.team.size) > memory.AT_MOST * self.free_bytes:
                    raise OutOfMemory
                found = self.bench.measure(op, asked)
            except OutOfMemory:
                need = sizes.both(op.buffer_bytes(asked, self.team.size))
                self._remark(
                    f"OUT OF MEMORY: {op.name} of {sizes.both(asked)} needs {need} a rank, and "
                    f"{sizes.both(int(self.free_bytes))} were free: its sweep ends here."
                )
                return False
            self._take(op, found)
            self._progress(op, planned, place, time.monotonic() - began)
        self._decision(op, planned[-1])
        return True

    def _sizes(self, op: Collective) -> list[int]:
        """The sizes to measure, each once: small ones grow to an element a rank."""
        most = self.options.most_bytes
        if most is None:
            most = MOST_BYTES.get(self.record.world.backend, MOST_BYTES["gloo"])
            room = memory.BY_DEFAULT * self.free_bytes
            while most > self.options.least_bytes and op.buffer_bytes(most, self.team.size) > room:
                most //= 2
        swept = sizes.swept(
            self.options.least_bytes, max(most, self.options.least_bytes), self.options.factor
        )
        return list(dict.fromkeys(self.bench.size_bytes(op, asked) for asked in swept))

    def _refused(self, op: Collective, size_bytes: int) -> str:
        """The backend's words if it has no such operation, or not for this type; a collective call."""
        try:
            operations.launch(
                op, self.bench.buffers(op, min(size_bytes, self.bench.size_bytes(op, 1))), self.team
            )()
            self.here.synchronize()
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            if isinstance(error, RuntimeError) and not any(
                word in said.lower() for word in ("support", "implement", "invalid scalar type", "unhandled")
            ):
                raise
            return said
        return ""

    def _take(self, op: Collective, found: Measured) -> None:
        factor = op.factor(self.team.size)
        common: dict[str, Any] = {
            "size_bytes": found.size_bytes,
            "dtype": self.dtype.name,
            "group": self.options.group,
        }
        seconds = found.batch_s / found.batch_iterations
        batched = writer.result(
            op.name, factor, seconds, iterations=found.batch_iterations, wrong=None, **common
        )
        single = writer.result(
            op.name,
            factor,
            sorted(found.times)[(len(found.times) - 1) // 2],
            iterations=len(found.times),
            wrong=found.wrong,
            times=found.times,
            **common,
        )
        self.record.results += [batched, single]
        before = self.largest.get(op.name)
        self.largest[op.name] = verdict.Largest(
            op=op.name,
            size_bytes=found.size_bytes,
            seconds=seconds,
            batch_s=found.batch_s,
            busbw_GBps=batched.busbw_GBps,
            ports=found.nodes,
            times=(*(before.times if before else ()), (found.size_bytes, seconds)),
        )
        self._print(table.line(batched, single))
        self.wrong += found.wrong or 0
        for item in found.first:
            self._remark(f"{item} (on {self.seats[item.rank].host})")
        self._save()

    def _matrix(self) -> None:
        if len(self.hosts) < 2:
            self._remark("--matrix compares links between nodes: start it on three or more.")
            return
        most = matrix.MOST_BYTES.get(self.record.world.backend, matrix.MOST_BYTES["gloo"])
        asked = min(self.options.most_bytes or most, int(memory.BY_DEFAULT * self.free_bytes / 2))
        size_bytes = max(1, asked // self.dtype.item_bytes) * self.dtype.item_bytes
        first = [next(seat.rank for seat in self.seats if seat.node == n) for n in range(len(self.hosts))]
        self.matrix = matrix.measure(self.bench, size_bytes, first)
        self._print(matrix.table(self.matrix, self.hosts, size_bytes))
        self.remarks += matrix.sentences(self.matrix, self.hosts)
        self._print("\n".join(self.remarks))

    def _decision(self, op: Collective, size_bytes: int) -> None:
        """By what NCCL does it: one more launch, untimed, its decision logged; a collective call."""
        if self.here.device.type != "cuda":
            return
        with contextlib.suppress(OutOfMemory), nccl_log.deciding(self.log, os.environ) as begin:
            operations.launch(op, self.bench.buffers(op, size_bytes), self.team)()
            self.here.synchronize()
            if how := nccl_log.decided(self.log, begin):
                self.decided[op.name] = how

    def _condition(self) -> conditions.Condition | None:
        """Of this node, by one of its ranks."""
        if not self.speaks:
            return None
        return conditions.read(Reader(root=root_of(os.environ)), gpus=self.here.device.type == "cuda")

    def _look_back(self) -> None:
        """What all ranks' NCCL logs say, and the nodes' conditions beside those before; a collective call."""
        now, node = self._condition(), None
        if self.before and now:
            node = conditions.Node(host=self.seats[self.here.rank].host, before=self.before, after=now)
        told: list[Any] = [None] * self.here.world_size
        dist.all_gather_object(told, (nccl_log.found(self.log), node))
        self.record.transport = tuple(sorted({word for words, _ in told for word in words}))
        self.conditions = tuple(node for _, node in told if node is not None)

    def _judge(self) -> dict[str, Any]:
        hosts = [seat.host for seat in self.seats]
        setting = verdict.Setting(
            hosts=self.hosts,
            ranks=self.here.world_size,
            group=self.options.group,
            together=self.team.size,
            device=self.here.device.type,
            fabric=self.fabric,
            line_rate_Gbps=self.record.line_rate_Gbps,
            late_from_s=self.late_from_s,
            carried_by=nccl_log.sentences(self.record.transport),
            decided=self.decided,
            conditions=self.conditions,
        )
        found = verdict.judge(list(self.largest.values()), setting, self.late, hosts)
        if self.matrix:
            found["matrix_GBps"] = [list(row) for row in self.matrix]
        return found

    def _finish(self) -> int:
        """Say what it means; the exit code."""
        for sentence in self._judge()["sentences"]:
            self._print(sentence)
        if self.wrong:
            self._remark(f"FAILED: {self.wrong} elements were wrong: see dist-doctor before training.")
        slower = self._compare() if self.baseline and self.record.complete else False
        self._save(ended=True)
        return 0 if self.record.complete and not self.wrong and not slower else 1

    def _compare(self) -> bool:
        """Hold the run against --baseline; True if it is slower. Only rank 0 has it."""
        assert self.baseline is not None
        new = schema.parse(json.loads(self.record.to_json()), "this run")
        try:
            found = baseline.compare(new, self.baseline, self.options.tolerance)
        except UsageError as error:
            self._remark(f"NOT COMPARED: {error}")
            return True
        for sentence in found.sentences:
            self._remark(f"baseline: {sentence}")
        return bool(found.regressions)

    def _save(self, *, ended: bool = False) -> None:
        """Write what there is: whoever is killed leaves a file that says so."""
        if self.here.rank == 0 and self.options.save:
            self.record.verdict = self._judge()
            self.record.verdict["sentences"] += self.remarks
            if not ended:
                self.record.verdict["sentences"] += ["INCOMPLETE: the run was still going on, or was killed."]
            self.record.save(Path(self.options.save))

    def _print(self, text: str) -> None:
        if self.here.rank == 0:
            print(text, flush=True)

    def _remark(self, text: str) -> None:
        self.remarks.append(text)
        self._print(text)

    def _progress(self, op: Collective, planned: Sequence[int], place: int, took_s: float) -> None:
        now = time.monotonic()
        rest = planned[place + 1 :]
        if self.here.rank == 0 and rest and now - self.told >= PROGRESS_S:
            self.told = now
            # Small sizes take as long as their budget allows; then the time grows with the size.
            left = sum(took_s * max(1.0, size / max(planned[place], 8 << 20)) for size in rest)
            print(
                f"{op.name}: {place + 1} of {len(planned)} sizes, about {left:.0f} s left",
                file=sys.stderr,
                flush=True,
            )


def _software(here: Ranks) -> Mapping[str, str]:
    found = {"torch": torch.__version__}
    if here.device.type == "cuda":
        found["cuda"] = str(torch.version.cuda)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["gpu"] = torch.cuda.get_device_name(here.device)
    return found


def main(ending: Ending) -> int:
    """Run as one worker; the exit code."""
    from imgkit_entrypoints.apps import ranks
    from imgkit_entrypoints.apps.bench import options

    asked = options.read()
    try:
        with nccl_log.collected(os.environ) as log, ranks.opened(asked.timeout_s) as here:
            return Sweep(asked, here, ending, log).run()
    except ImgkitError as error:
        ranks.refuse(f"dist-bench: {error}", error.exit_code)

"""One run: collectives and sizes in order. Everything that is finished is printed and saved at once."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from imgkit_entrypoints import terminal
from imgkit_entrypoints.apps.bench import (
    compute,
    machine,
    matrix,
    nccl_log,
    node_state,
    outcome,
    sizes,
    soak,
    verdict,
)
from imgkit_entrypoints.apps.bench.collectives import Collective
from imgkit_entrypoints.apps.bench.measurement import OutOfMemory, Stopped
from imgkit_entrypoints.apps.bench.options import MOST_BYTES
from imgkit_entrypoints.apps.bench.outcome import Outcome
from imgkit_entrypoints.apps.bench.setup import RunSetup, set_up
from imgkit_entrypoints.apps.bench.sighup import HangupThread
from imgkit_entrypoints.apps.bench.sizes import Counts
from imgkit_entrypoints.errors import ImgkitError
from imgkit_entrypoints.facts import Reader, root_of

PROGRESS_S = 5.0
"""Least time between two lines of progress."""


class Sweep:
    """One run on this rank."""

    def __init__(self, setup: RunSetup, log: Path | None = None) -> None:
        self._setup, self._log = setup, log
        self._measurer, self._here = setup.measurer, setup.here
        self._outcome = Outcome(setup)
        self._progress_told = time.monotonic()

    def run(self, hangup: HangupThread) -> int:
        """Measure everything; returns the exit code of this worker."""
        hangup.last_words = self._hung_up
        lost = ""
        before = self._condition()
        try:
            self._measure()
            self._look_back(before)
        except OutOfMemory:  # beyond the sizes of a sweep; raised on all ranks
            self._outcome.remark("OUT OF MEMORY: --duration and --overlap need another --size or --max here.")
        except Stopped:  # raised on all ranks
            self._outcome.remark("INCOMPLETE: stopped on request. The sizes above are complete.")
            self._look_back(before)
        except RuntimeError as error:  # whatever the backend raises when a peer is gone
            lost = _first_sentence(error)
        with hangup.held_off():
            if lost:
                self._outcome.remark(
                    f"INCOMPLETE: a collective failed. The sizes above are complete. The error: {lost}"
                )
            code = self._outcome.finish()
            if lost:
                sys.stdout.flush()
                os._exit(code)  # the destructor of a group that has lost a member would hang again
        return code

    def _hung_up(self) -> None:
        self._outcome.remark(
            "INCOMPLETE: the node agent ended this rank, as it does when a rank or node is lost. "
            "The sizes above are complete."
        )
        self._outcome.finish()

    def _measure(self) -> None:
        setup = self._setup
        self._outcome.late = verdict.late_ranks(self._measurer.waits(), setup.late_from_s)
        if setup.options.compute:
            self._measure_devices()
            self._outcome.record.complete = True
            return
        if setup.options.matrix:
            self._measure_matrix()
            self._outcome.record.complete = True
            return
        if setup.options.duration_s:
            self._soak(setup.options.duration_s)
            self._outcome.record.complete = True
            return
        # One collective that runs out of memory does not keep the next one from its smaller sizes.
        ended = [self._collective(setup.collective(name)) for name in setup.options.ops]
        self._outcome.record.complete = all(ended)

    def _title(self, op: Collective) -> str:
        setup = self._setup
        group, variant = setup.options.group, setup.variant(op)
        return outcome.title(op, setup.dtype, setup.world, group, setup.group.size, variant)

    def _soak(self, total_s: float) -> None:
        """Measure the largest size of each collective in turn until the time is over."""
        ops = [self._setup.collective(name) for name in self._setup.options.ops]
        sized = [(op, self._sizes(op)[-1]) for op in ops]
        for op, _ in sized:
            self._outcome.print(self._title(op))
        soak.run(self._measurer, sized, total_s, self._outcome.add_moment)
        self._outcome.judge_timeline()

    def _collective(self, op: Collective) -> bool:
        """Measure all sizes of one collective; False if it ended early."""
        setup = self._setup
        planned = self._sizes(op)
        self._outcome.print(self._title(op))
        if refused := self._refused(op, planned[0]):
            self._outcome.remark(f"{op.name}: {setup.world.backend} does not support it: {refused}")
            return True
        self._outcome.print(*outcome.HEADER)
        before: Counts | None = None
        for place, asked in enumerate(planned):
            began = time.monotonic()
            try:
                if self._measurer.needed_bytes(op, asked) > machine.SHARE_AT_MOST * setup.free_bytes:
                    raise OutOfMemory
                measured = self._measurer.measure(op, asked, before)
            except OutOfMemory:
                need = sizes.both(self._measurer.needed_bytes(op, asked))
                self._outcome.remark(
                    f"OUT OF MEMORY: {op.name} of {sizes.both(asked)} needs {need} per rank, and "
                    f"{sizes.both(int(setup.free_bytes))} were free. Its sweep ends here."
                )
                return False
            self._outcome.add(op, measured)
            before = measured.counts
            self._progress(op, planned, place, time.monotonic() - began)
        self._note_nccl_choice(op, planned[-1])
        if setup.options.overlap:
            self._outcome.add_overlap(compute.measure_overlap(self._measurer, op, planned[-1]))
        return True

    def _sizes(self, op: Collective) -> list[int]:
        """The sizes to measure, each once. Small ones grow to one element, or one chunk per rank."""
        options = self._setup.options
        most = options.most_bytes
        if most is None:
            most = MOST_BYTES.get(self._setup.world.backend, MOST_BYTES["gloo"])
            room = machine.SHARE_BY_DEFAULT * self._setup.free_bytes
            while most > options.least_bytes and self._measurer.needed_bytes(op, most) > room:
                most //= 2
        swept = sizes.swept(options.least_bytes, max(most, options.least_bytes), options.factor)
        return list(dict.fromkeys(self._measurer.size_bytes(op, asked) for asked in swept))

    def _refused(self, op: Collective, size_bytes: int) -> str:
        """The backend's error if it lacks this operation or type, else ""; a collective call."""
        least = min(size_bytes, self._measurer.size_bytes(op, 1))
        try:
            self._measurer.once(op, least)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            if isinstance(error, RuntimeError) and not any(
                word in said.lower() for word in ("support", "implement", "invalid scalar type", "unhandled")
            ):
                raise
            return said
        return ""

    def _measure_devices(self) -> None:
        """Measure every rank's device, all at once; a collective call."""
        mine = compute.measure_device(self._here, self._setup.options.seconds)
        places = zip(self._setup.locations, self._here.gather(mine, compute.DeviceSpeed), strict=True)
        self._outcome.print(f"{'rank':>6} {'matmul TFLOP/s':>15} {'memory GB/s':>12}  node")
        for place, speed in places:
            figures = f"{speed.matmul_TFLOPs:15.4g} {speed.memory_GBps:12.4g}"
            self._outcome.print(f"{place.rank:6} {figures}  {place.host}")

    def _measure_matrix(self) -> None:
        setup = self._setup
        if len(setup.hosts) < 2:
            self._outcome.remark("--matrix compares links between nodes. Start it on three or more nodes.")
            return
        most = matrix.MOST_BYTES.get(setup.world.backend, matrix.MOST_BYTES["gloo"])
        asked = min(setup.options.most_bytes or most, int(machine.SHARE_BY_DEFAULT * setup.free_bytes / 2))
        size_bytes = max(1, asked // setup.dtype.item_bytes) * setup.dtype.item_bytes
        for players in setup.rails:
            measured = matrix.measure(self._measurer, size_bytes, players)
            self._outcome.add_matrix(measured, size_bytes)
        self._outcome.judge_matrix()

    def _note_nccl_choice(self, op: Collective, size_bytes: int) -> None:
        """Launch once more, untimed, and log NCCL's algorithm and protocol; a collective call."""
        if self._here.device.type != "cuda":
            return
        with contextlib.suppress(OutOfMemory), nccl_log.deciding(self._log, os.environ) as begin:
            self._measurer.once(op, size_bytes)
            if choice := nccl_log.decided(self._log, begin):
                self._outcome.nccl_choices[op.name] = choice

    def _condition(self) -> node_state.Condition | None:
        """This node's condition, on one of its ranks."""
        if not self._setup.speaks:
            return None
        gpus = self._here.device.type == "cuda"
        return node_state.read_condition(Reader(root=root_of(os.environ)), gpus=gpus)

    def _look_back(self, before: node_state.Condition | None) -> None:
        """Collect all ranks' NCCL logs, and the nodes' conditions before and now; a collective call."""
        now, node = self._condition(), None
        if before and now:
            host = self._setup.locations[self._here.rank].host
            node = node_state.NodeConditions(host=host, before=before, after=now)
        transports = self._here.gather(sorted(nccl_log.found(self._log)), list[str])
        self._outcome.record.transport = tuple(sorted({word for words in transports for word in words}))
        conditions = self._here.gather(node, node_state.NodeConditions | None)
        self._outcome.conditions = tuple(one for one in conditions if one is not None)

    def _progress(self, op: Collective, planned: Sequence[int], place: int, took_s: float) -> None:
        now = time.monotonic()
        rest = planned[place + 1 :]
        if self._here.rank == 0 and rest and now - self._progress_told >= PROGRESS_S:
            self._progress_told = now
            # Small sizes take as long as their time budget allows; beyond them the time grows with the size.
            left_s = sum(took_s * max(1.0, size / max(planned[place], 8 << 20)) for size in rest)
            terminal.err(f"{op.name}: {place + 1} of {len(planned)} sizes, about {left_s:.0f} s left")


def _first_sentence(error: RuntimeError) -> str:
    """The first sentence of a backend's error, without gloo's source position in front of it."""
    first_line = (str(error).strip().splitlines() or ["no reason given"])[0]
    return re.sub(r"^\[\S+\] ", "", first_line).partition(". ")[0][:300]


def main(hangup: HangupThread) -> int:
    """Run as one worker; returns the exit code."""
    from imgkit_entrypoints.apps import ranks
    from imgkit_entrypoints.apps.bench import options

    asked = options.read()
    try:
        with nccl_log.collected(os.environ) as log, ranks.opened(asked.timeout_s) as here:
            return Sweep(set_up(asked, here), log).run(hangup)
    except ImgkitError as error:
        ranks.refuse(f"dist-bench: {error}", error.exit_code)

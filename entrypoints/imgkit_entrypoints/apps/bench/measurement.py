"""Measure one collective at one size on all ranks: warm up, agree on the counts, time batches, verify.

A batch is a number of launches (calls of the collective) after which a rank waits once. Times on a GPU come
from CUDA events, and times on a CPU from the monotonic clock. `time_batch` measures the time on this rank.
`Measurer` uses the time of the slowest rank for every batch.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from imgkit_entrypoints.apps.bench import collectives
from imgkit_entrypoints.apps.bench.collectives import Buffers, Collective, Launch, Shape
from imgkit_entrypoints.apps.bench.options import BenchOptions
from imgkit_entrypoints.apps.bench.sizes import Counts, plan_counts
from imgkit_entrypoints.apps.bench.verify import Dtype, ExpectedValues, Noise, WrongElement
from imgkit_entrypoints.launch import stop_protocol
from imgkit_entrypoints.run.ranks import Ranks

# Memory for the copies of buffers that launches use in turn. It is larger than most caches.
ROTATED_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
# If a launch takes longer than this, the ranks check for a stop request before each batch and verified
# iteration.
_SLOW_S = 0.1


class OutOfMemory(Exception):
    """A rank does not have enough memory for the buffers."""


class Stopped(Exception):
    """The node agent (imgkit's process on each node) has requested that the run saves its state and ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The measured times and wrong values of one collective at one size, over all ranks."""

    counts: Counts
    batches: tuple[float, ...]
    """Duration of each batch on the slowest rank, in seconds."""
    wrong: int | None
    """Number of wrong elements on all ranks together. None means that values were not verified."""
    first_wrong: tuple[WrongElement, ...]
    """The first wrong element of every rank that has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurer:
    """Measures collectives with the same options, ranks and element type, one size at a time."""

    options: BenchOptions
    ranks: Ranks
    dtype: Dtype
    expected: ExpectedValues | None
    """None means that values are not verified."""
    noise: Noise
    rotated_bytes: int
    """Memory for the copies of buffers that launches use in turn."""

    def size_bytes(self, collective: Collective, requested_bytes: int) -> int:
        """Round a size to whole elements, or to whole chunks for every rank, and return it in bytes."""
        item_bytes = self.dtype.item_bytes
        return collective.round_to_elements(requested_bytes, item_bytes, self.ranks.world_size) * item_bytes

    def needed_bytes(self, collective: Collective, size_bytes: int) -> int:
        """Return how many bytes of memory one launch needs, on the rank that needs most."""
        return collective.buffer_bytes(size_bytes, self.ranks.world_size)

    def allocate(self, collective: Collective, size_bytes: int, copies: int = 1) -> tuple[Buffers, ...]:
        """Allocate buffers for `copies` launches. All ranks must call this method.

        Raises
        ------
        OutOfMemory : on all ranks, if any rank has too little memory.
        """
        buffers: tuple[Buffers, ...] = ()
        failures = torch.zeros(1, device=self.ranks.device)
        count = size_bytes // self.dtype.item_bytes
        dtype = getattr(torch, self.dtype.torch)
        try:
            buffers = collectives.allocate(collective, count, dtype, self.ranks, copies)
        except (RuntimeError, MemoryError):  # the errors of CUDA and of the CPU allocator are RuntimeErrors
            failures += 1
        # A rank that raised the error alone would leave the others waiting in the next collective.
        dist.all_reduce(failures)  # on every rank, the sum is the number of ranks that failed
        if failures.item():
            raise OutOfMemory
        return buffers

    def run_once(self, collective: Collective, size_bytes: int) -> None:
        """Run `collective` once without timing it. All ranks must call this method."""
        (buffers,) = self.allocate(collective, size_bytes)
        collectives.bind(collective, buffers, self.ranks)()
        self.ranks.synchronize()

    def measure(
        self, collective: Collective, requested_bytes: int, previous: Counts | None = None
    ) -> Measurement:
        """Time and verify `collective` at one size. All ranks must call this method.

        Parameters
        ----------
        requested_bytes : the size before it is rounded to whole elements or chunks.
        previous : counts of the previous size, or None for the first size.

        Raises
        ------
        Stopped : on all ranks, after a request to stop. The measurement is discarded.
        OutOfMemory : on all ranks, if any rank has too little memory.
        """
        size_bytes = self.size_bytes(collective, requested_bytes)
        buffers = self.allocate(collective, size_bytes)
        launch_s = self._warm_up(collectives.bind(collective, buffers[0], self.ranks))
        counts, is_slow = self._agree_on_counts(size_bytes, launch_s, previous)
        # Launches use several buffers in turn, so that the data of a launch is not in a cache already.
        copies = min(counts.launches, self.rotated_bytes // self.needed_bytes(collective, size_bytes))
        if copies > 1:
            del buffers  # first free the old buffers, because the memory may not be enough for both
            buffers = self.allocate(collective, size_bytes, copies)
        batches = self._time_batches(collective, buffers, counts, is_slow)
        wrong = 0
        first_wrong = None
        if self.expected:
            wrong, first_wrong = self._verify_iterations(
                self.expected, collective, buffers[0], counts, is_slow
            )
        return self._join_results(counts, batches, wrong, first_wrong)

    def _join_results(
        self, counts: Counts, batches: Sequence[float], wrong: int, first_wrong: WrongElement | None
    ) -> Measurement:
        """Exchange the results of all ranks, and return them as one measurement.

        Parameters
        ----------
        batches : duration of each batch on this rank, in seconds. The slowest rank counts.
        wrong : number of wrong elements on this rank.
        first_wrong : the first wrong element on this rank, or None if there is none.
        """
        # Exchange the number of wrong elements together with the times, to save one collective.
        rows = self.gather_rows([float(wrong), *batches])
        wrong_counts, *batch_times = zip(*rows, strict=True)
        total_wrong = int(sum(wrong_counts))
        first_elements: tuple[WrongElement, ...] = ()
        if total_wrong:
            first_elements = self._gather_first(first_wrong)
        return Measurement(
            counts=counts,
            batches=tuple(map(max, batch_times)),
            wrong=total_wrong if self.expected else None,
            first_wrong=first_elements,
        )

    def gather_rows(self, row: list[float]) -> list[list[float]]:
        """Return the row of numbers of every rank. All ranks must call this method."""
        numbers = torch.tensor(row, dtype=torch.float64, device=self.ranks.device)
        rows = [torch.empty_like(numbers) for _ in range(self.ranks.world_size)]
        dist.all_gather(rows, numbers)
        return [numbers.tolist() for numbers in rows]

    def _warm_up(self, launch: Launch) -> float:
        """Run the iterations that do not count, and return an estimate of the seconds of one launch."""
        if self.options.warmup_iters:
            launch()
        rounds = max(1, self.options.warmup_iters - 1)
        return statistics.median(time_batch(launch, 1, self.ranks) for _ in range(rounds))

    def _agree_on_counts(
        self, size_bytes: int, launch_s: float, previous: Counts | None
    ) -> tuple[Counts, bool]:
        """Return the counts that rank 0 has planned, and whether launches are slow.

        All ranks must call this method, so that they use the same counts. If launches are slow, the ranks
        have to check for a request to stop before each batch.

        Parameters
        ----------
        launch_s : this rank's estimate of the seconds of one launch.
        previous : counts of the previous size, or None for the first size.
        """
        # A coarse clock may measure 0 s, hence the minimum.
        launches_that_fit = self.options.seconds / max(launch_s, 1e-7)
        own_values = (launches_that_fit, launch_s > _SLOW_S, is_stop_requested())
        # Each rank has measured another time, so all ranks use the values of rank 0.
        launches_that_fit, is_slow, must_stop = broadcast_numbers(own_values, self.ranks)
        if must_stop:
            raise Stopped
        counts = plan_counts(size_bytes, launches_that_fit, iters=self.options.iters, previous=previous)
        return counts, bool(is_slow)

    def _time_batches(
        self, collective: Collective, buffers: Sequence[Buffers], counts: Counts, is_slow: bool
    ) -> list[float]:
        """Run all batches, and return the duration of each on this rank, in seconds.

        The launches (calls of the collective) of a batch use `buffers` in turn, which are filled with random
        data.

        Parameters
        ----------
        is_slow : True if a launch takes so long that the ranks check for a request to stop before each batch.
        """
        # If sums are written to the input buffer, the values grow with each launch and would become infinite.
        # So these buffers are filled again before each batch.
        sums_in_place = collective.adds_values and not collective.has_separate_output
        launches = [collectives.bind(collective, copy, self.ranks) for copy in buffers]
        seconds = []
        for batch in range(counts.batches):
            self._raise_if_stopped(is_slow)
            if batch == 0 or sums_in_place:
                for index, copy in enumerate(buffers):
                    self.noise.fill(copy.input, self.ranks.rank, index)
            rotated_launch = collectives.rotate(launches)  # each batch begins with the first buffer
            seconds.append(time_batch(rotated_launch, counts.launches, self.ranks))
        return seconds

    def _verify_iterations(
        self,
        expected: ExpectedValues,
        collective: Collective,
        buffers: Buffers,
        counts: Counts,
        is_slow: bool,
    ) -> tuple[int, WrongElement | None]:
        """Run the verified iterations, and return the number of wrong elements and the first of them.

        In each iteration, the inputs are filled with known values, and this rank's output is compared with
        the expected result. With `is_slow`, the ranks check for a request to stop before each iteration.
        """
        launch = collectives.bind(collective, buffers, self.ranks)
        rank = self.ranks.rank
        count = counts.size_bytes // self.dtype.item_bytes
        expected_segments = collective.result(Shape(count=count, ranks=self.ranks.world_size, rank=rank))
        wrong_count = 0
        first_wrong = None
        for iteration in range(counts.verified):
            self._raise_if_stopped(is_slow)
            expected.fill(buffers.input, rank, iteration)
            launch()
            self.ranks.synchronize()
            wrong_count += expected.count_wrong(buffers.output, expected_segments, iteration)
            if wrong_count and first_wrong is None:
                difference = expected.find_first_wrong(buffers.output, expected_segments, iteration)
                assert difference is not None
                first_wrong = WrongElement(
                    collective=collective.name,
                    size_bytes=counts.size_bytes,
                    iteration=iteration,
                    rank=rank,
                    index=difference.element,
                    expected=f"{difference.expected:g}",
                    actual=f"{difference.actual:g}",
                )
        return wrong_count, first_wrong

    def _raise_if_stopped(self, is_slow: bool) -> None:
        """Raise Stopped on all ranks if the node agent of rank 0 has requested a stop.

        This is only checked if launches are slow, because the check is a collective that costs time.
        """
        if not is_slow:
            return
        (must_stop,) = broadcast_numbers((is_stop_requested(),), self.ranks)
        if must_stop:
            raise Stopped

    def _gather_first(self, first_wrong: WrongElement | None) -> tuple[WrongElement, ...]:
        """Return the first wrong element of each rank that has one. All ranks must call this method."""
        elements = self.ranks.gather(first_wrong)
        return tuple(element for element in elements if element is not None)


def is_stop_requested() -> bool:
    """Return whether the node agent (imgkit's process on this node) has requested that workers stop."""
    folder = os.environ.get("IMGKIT_STOP_DIR")
    if not folder:
        return False
    return Path(folder, stop_protocol.STOP).exists()


def wait_for_ranks(ranks: Ranks) -> None:
    """Wait until all ranks have called this function and their devices have finished all work."""
    ranks.synchronize()
    dist.barrier()
    ranks.synchronize()


def time_batch(launch: Launch, count: int, ranks: Ranks) -> float:
    """Run `count` launches, wait for all of them, and return the duration in seconds.

    The timing begins when all ranks have called this function.
    """
    wait_for_ranks(ranks)
    if ranks.device.type != "cuda":
        start_s = time.perf_counter()
        for _ in range(count):
            launch()
        return time.perf_counter() - start_s
    # On a GPU, a launch only queues the work. An event is queued, too, and records when the GPU reaches it.
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        launch()
    end.record()
    ranks.synchronize()
    elapsed_ms = float(start.elapsed_time(end))
    return elapsed_ms / 1e3


def broadcast_numbers(values: Sequence[float], ranks: Ranks) -> tuple[float, ...]:
    """Return the values of rank 0 on all ranks.

    This lets all ranks take the same decisions. If each rank decided alone, ranks could wait for each other
    forever.
    """
    numbers = torch.tensor(values, dtype=torch.float64, device=ranks.device)
    dist.broadcast(numbers, 0)
    return tuple(numbers.tolist())

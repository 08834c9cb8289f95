"""What a step spends its time on: the clock of this rank's own work and of its wait, and traces.

Nothing waits for the clock. Own work lasts from the end of the last optimizer step, or from the arrival of
the step's samples if that is later, until this rank's last gradient is ready. The wait lasts from there to
the end of the reduction. Before the forward pass, DDP copies the buffers of rank 0 (BatchNorm's statistics);
this copying counts as neither. ``--profile`` writes traces of some steps, one file per rank, for
chrome://tracing or ui.perfetto.dev.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from imgkit_entrypoints import files
from imgkit_entrypoints.apps.train.config import Config
from imgkit_entrypoints.apps.train.order import Position
from imgkit_entrypoints.run.ranks import Ranks

# Steps timed between two calls of `take_times`, the first ones: more would cost many events on a GPU.
MAX_STEPS = 64

# Start and end: times of the host's clock on a CPU, events on a GPU.
Interval = tuple[Any, Any]


class StepTimes(NamedTuple):
    """Seconds a step, on average over the timed steps. 0 means that none was timed."""

    own_s: float = 0.0
    wait_s: float = 0.0


class WorkClock:
    """Times the steps of one rank; with one rank, it does nothing."""

    def __init__(self, ranks: Ranks) -> None:
        self._is_on = ranks.world_size > 1
        self._is_cuda = ranks.device.type == "cuda"
        self._is_running = False
        # Own work of the present step before the latest copying of buffers.
        self._work: list[Interval] = []
        # Start of the own work since then; None while buffers are copied.
        self._start: Any = None
        self._ready: Any = None
        # Own work and wait of each step.
        self._timed: list[tuple[list[Interval], Interval]] = []
        # Steps before the last call of `take_times`, whose events a GPU may not have reached yet.
        self._pending: list[tuple[list[Interval], Interval]] = []

    def exclude_buffer_copies(self, model: DistributedDataParallel, *, compiled: bool) -> None:
        """Let own work leave out the time in which DDP copies the buffers of a model from rank 0.

        Parameters
        ----------
        compiled : the model will be compiled.
        """
        if not self._is_on or next(model.buffers(), None) is None:
            return

        def before_copy(*_: object) -> None:
            if self._is_running:
                self._work.append((self._start, self._timestamp()))
                self._start = None

        def after_copy(*_: object) -> None:
            if self._is_running and self._start is None:
                self._start = self._timestamp()

        if compiled:
            after_copy = torch.compiler.disable(after_copy)
        model.register_forward_pre_hook(before_copy)
        # DDP copies the buffers between these two.
        model.module.register_forward_pre_hook(after_copy)

    def run_first_backward(self, parameters: Sequence[nn.Parameter], backward: Callable[[], object]) -> None:
        """Run the first backward pass. From then on, note in each step when the last gradient is ready.

        The order of gradients is the same in every step of the same model. So one parameter has a hook, which
        runs before DDP hears of the gradient; a hook on each would cost 2 % of a step of 10 ms.
        """
        order: list[Tensor] = []
        hooks = [parameter.register_post_accumulate_grad_hook(order.append) for parameter in parameters]
        backward()
        for hook in hooks:
            hook.remove()
        if order and self._is_on:
            order[-1].register_post_accumulate_grad_hook(self._on_last_gradient)

    def start_step(self) -> None:
        """Note that the forward pass starts."""
        self._is_running = self._is_on and len(self._timed) < MAX_STEPS
        if self._is_running:
            self._work = []
            self._start = self._timestamp()
            self._ready = None

    def _on_last_gradient(self, _: Tensor) -> None:
        # Each micro-batch comes here; the last one counts.
        if self._is_running:
            self._ready = self._timestamp()

    def end_step(self) -> None:
        """Note that the gradients of all ranks are added up."""
        if self._is_running and self._ready is not None:
            work = [*self._work, (self._start, self._ready)]
            self._timed.append((work, (self._ready, self._timestamp())))
        self._is_running = False

    def take_times(self) -> StepTimes:
        """Return what the steps since the last call took; on a GPU, the steps before that call.

        A GPU may not have passed the events of the latest steps. It has passed the earlier ones: the caller
        has read a sum that the GPU has computed after them.
        """
        latest_steps = self._timed
        self._timed = []
        steps = latest_steps
        if self._is_cuda:
            steps = self._pending
            self._pending = latest_steps
        if not steps:
            return StepTimes()
        own_s = 0.0
        wait_s = 0.0
        for work, wait in steps:
            own_s += sum(map(self._seconds, work))
            wait_s += self._seconds(wait)
        return StepTimes(own_s / len(steps), wait_s / len(steps))

    def _timestamp(self) -> Any:
        """Return the present time, as one end of an `Interval`."""
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, interval: Interval) -> float:
        """Return the length of an interval."""
        start, end = interval
        if not self._is_cuda:
            return float(end - start)
        return float(start.elapsed_time(end)) / 1e3


Batch = TypeVar("Batch")


def trace_steps(
    steps: Iterable[tuple[Position, Batch]], config: Config, ranks: Ranks
) -> Iterable[tuple[Position, Batch]]:
    """Return the steps unchanged, and record a trace of the steps that ``--profile`` names."""
    # A generator around the steps would cost time in each.
    if config.profile is None:
        return steps
    return _record_steps(steps, config, ranks)


def _record_steps(
    steps: Iterable[tuple[Position, Batch]], config: Config, ranks: Ranks
) -> Iterator[tuple[Position, Batch]]:
    """Yield the steps, and write one trace of those in ``--profile``: ``100:5`` are the steps 101 to 105."""
    traced_steps = config.traced_steps()
    recorder: profile | None = None
    try:
        for position, batch in steps:
            if recorder is None and position.step in traced_steps:
                recorder = _start_recorder(ranks)
            yield position, batch
            is_last = position.step + 1 not in traced_steps
            if recorder is not None and is_last:
                _write_trace(recorder, config, ranks)
                recorder = None
    finally:  # the run ended within the traced steps: keep what there is
        if recorder is not None:
            _write_trace(recorder, config, ranks)


def _start_recorder(ranks: Ranks) -> profile:
    """Start torch's profiler for this process, and for the GPU if the rank has one."""
    activities = [ProfilerActivity.CPU]
    if ranks.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    recorder = profile(activities=activities)
    recorder.start()
    return recorder


def _write_trace(recorder: profile, config: Config, ranks: Ranks) -> None:
    """Stop a recorder, and write its trace into the run folder: ``traces/rank-0.json``."""
    ranks.synchronize()
    recorder.stop()
    assert config.run_dir is not None  # the options refuse --profile without a run folder
    target = config.run_dir / "traces" / f"rank-{ranks.rank}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = files.temporary_name(target)
    recorder.export_chrome_trace(str(temporary))
    files.publish_file(temporary, target)

"""Measure how long each rank works and waits in a step, and record traces of steps.

A step of a rank consists of its own work and of a wait for other ranks. Own work begins after the last
optimizer step, or when the samples have arrived if that is later. It ends when the last gradient of this rank
is ready. The wait lasts from then until the gradients of all ranks are added up. Before the forward pass, DDP
copies the buffers of rank 0 (such as BatchNorm's statistics) to all ranks. This time counts neither as work
nor as wait. The measurement does not delay the training.

``--profile`` writes traces of some steps, one file per rank, for chrome://tracing or ui.perfetto.dev.
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

# Only this many steps are timed after each call of `take_times`, because each timed step needs events on a
# GPU.
MAX_STEPS = 64

# Start and end of an interval: two times of the clock on a CPU, or two CUDA events on a GPU.
Interval = tuple[Any, Any]


class TimedStep(NamedTuple):
    """The intervals of a step on this rank."""

    work: list[Interval]
    """Own work, which the copying of buffers interrupts."""
    wait: Interval
    """The wait for the gradients of other ranks."""


class StepTimes(NamedTuple):
    """Own work and wait of a step in seconds, averaged over the timed steps. 0 means that none was timed."""

    own_s: float = 0.0
    wait_s: float = 0.0


class WorkClock:
    """Measures the own work and the wait of this rank in each step.

    If the run has only one rank, there is nothing to compare, and nothing is measured.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._is_on = ranks.world_size > 1
        self._is_cuda = ranks.device.type == "cuda"
        self._is_running = False
        # Intervals of own work in the current step that have ended. Copying of buffers interrupts the work.
        self._work: list[Interval] = []
        # Start of the current interval of own work, or None while buffers are copied.
        self._start: Any = None
        # Time at which the last gradient was ready, or None.
        self._ready: Any = None
        # The timed steps since the last call of `take_times`.
        self._latest_steps: list[TimedStep] = []
        # The timed steps before that call, whose times have not been read yet (GPU only).
        self._pending_steps: list[TimedStep] = []

    def exclude_buffer_copies(self, model: DistributedDataParallel, *, compiled: bool) -> None:
        """Pause the clock while DDP copies the buffers of a model from rank 0, in each forward pass.

        The copying waits for rank 0, so it must not count as own work of this rank.

        Parameters
        ----------
        compiled : True if the model will be compiled with torch.compile.
        """
        has_buffers = next(model.buffers(), None) is not None
        if not self._is_on or not has_buffers:
            return
        resume_work = self._resume_work
        # Only the module inside DDP is compiled, with its hook. But the hook must run as Python code.
        if compiled:
            resume_work = torch.compiler.disable(resume_work)
        # DDP copies the buffers after its own forward pre-hook, and before the one of the module inside it.
        model.register_forward_pre_hook(self._pause_work)
        model.module.register_forward_pre_hook(resume_work)

    # The next two methods also run in evaluations, in which the clock does not run.
    def _pause_work(self, *_: object) -> None:
        """End the current interval of own work."""
        if self._is_running:
            self._work.append((self._start, self._take_timestamp()))
            self._start = None

    def _resume_work(self, *_: object) -> None:
        """Begin the next interval of own work, if the work was paused."""
        if self._is_running and self._start is None:
            self._start = self._take_timestamp()

    def run_first_backward(self, parameters: Sequence[nn.Parameter], backward: Callable[[], object]) -> None:
        """Run the first backward pass, and find the parameter whose gradient is ready last.

        In later steps, a hook on this parameter records when the last gradient is ready. One hook is enough,
        because the order of the gradients is the same in every step. A hook on each parameter would cost 2 %
        of a step of 10 ms. The hook runs before DDP processes the gradient.
        """
        order: list[Tensor] = []
        hooks = [parameter.register_post_accumulate_grad_hook(order.append) for parameter in parameters]
        backward()
        for hook in hooks:
            hook.remove()
        if order and self._is_on:
            order[-1].register_post_accumulate_grad_hook(self._on_last_gradient)

    def start_step(self) -> None:
        """Record that the forward pass of a step begins."""
        # A mean of a few steps is enough, so the time of later steps is not measured.
        self._is_running = self._is_on and len(self._latest_steps) < MAX_STEPS
        if self._is_running:
            self._work = []
            self._start = self._take_timestamp()
            self._ready = None

    def _on_last_gradient(self, _: Tensor) -> None:
        """Record the time at which the last gradient of a micro-batch is ready."""
        # This is called for each micro-batch of a step, and the last call counts.
        if self._is_running:
            self._ready = self._take_timestamp()

    def end_step(self) -> None:
        """Record that the gradients of all ranks are added up, which ends the wait."""
        if self._is_running and self._ready is not None:
            # Own work ends when the last gradient is ready. From then on, this rank waits for the others.
            work = [*self._work, (self._start, self._ready)]
            wait = (self._ready, self._take_timestamp())
            self._latest_steps.append(TimedStep(work, wait))
        self._is_running = False

    def take_times(self) -> StepTimes:
        """Return the mean times of the steps since the last call. On a GPU, use the steps before that call.

        Only some steps are timed. After this call, the next steps are timed again.
        """
        steps = self._take_readable_steps()
        if not steps:
            return StepTimes()
        own_s = 0.0
        wait_s = 0.0
        for step in steps:
            own_s += sum(map(self._seconds, step.work))
            wait_s += self._seconds(step.wait)
        return StepTimes(own_s / len(steps), wait_s / len(steps))

    def _take_readable_steps(self) -> list[TimedStep]:
        """Return the timed steps whose times can be read now, and forget them.

        The times of CUDA events can only be read after the GPU has reached the events. For the latest steps,
        this may not be the case yet. The events before the last call have been reached, because the caller
        has since read a sum that the GPU has computed after them.
        """
        latest_steps = self._latest_steps
        self._latest_steps = []
        if not self._is_cuda:
            return latest_steps
        readable_steps = self._pending_steps
        self._pending_steps = latest_steps  # for the next call
        return readable_steps

    def _take_timestamp(self) -> Any:
        """Return the current time as the start or the end of an `Interval`."""
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, interval: Interval) -> float:
        """Return the length of an interval in seconds."""
        start, end = interval
        if not self._is_cuda:
            return float(end - start)
        return float(start.elapsed_time(end)) / 1e3  # CUDA returns milliseconds


Batch = TypeVar("Batch")


def trace_steps(
    steps: Iterable[tuple[Position, Batch]], config: Config, ranks: Ranks
) -> Iterable[tuple[Position, Batch]]:
    """Return the steps unchanged, and record a trace while those of ``--profile`` are taken."""
    # Without --profile, return the iterable itself, because a generator would cost some time in each step.
    if config.profile is None:
        return steps
    return _record_steps(steps, config, ranks)


def _record_steps(
    steps: Iterable[tuple[Position, Batch]], config: Config, ranks: Ranks
) -> Iterator[tuple[Position, Batch]]:
    """Yield the steps, and record a trace of those that ``--profile`` selects.

    For example, ``100:5`` selects the steps 101 to 105. Each rank writes its trace to the run folder after
    the last of them. A `Position` has the number of its step, which is 1 for the first step of a run.
    """
    traced_steps = config.traced_steps()
    recorder: profile | None = None
    try:
        for position, batch in steps:
            if recorder is None and position.step in traced_steps:
                recorder = _start_recorder(ranks)
            yield position, batch
            # The caller takes the step before it asks for the next one, so the code below runs after it.
            is_next_traced = position.step + 1 in traced_steps
            if recorder is not None and not is_next_traced:
                _write_trace(recorder, config, ranks)
                recorder = None
    finally:  # if the run has ended during the traced steps, write what was recorded so far
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

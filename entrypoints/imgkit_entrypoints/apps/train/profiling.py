"""What a step spends its time on: the clock of this rank's own work and of its wait, and traces.

Nothing waits for the clock. Own work lasts from the end of the last optimizer step, or from the arrival of
the step's samples if that is later, until this rank's last gradient is ready. The wait lasts from there to
the end of the reduction. Before the forward pass, DDP copies the buffers of rank 0 (BatchNorm's statistics);
this copying counts as neither. ``--profile`` writes traces of some steps, one file per rank, for
chrome://tracing or ui.perfetto.dev.
"""

from __future__ import annotations

import itertools
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

MOST = 64
"""Steps timed between two looks, the first ones: many short steps would cost many events on a GPU."""


class Spent(NamedTuple):
    """Seconds a step, on average over the timed steps; 0: none was timed."""

    own_s: float = 0.0
    wait_s: float = 0.0


class _Timed(NamedTuple):
    """The marks of one step: times of the host's clock on a CPU, events on a GPU."""

    start: Any
    copied: Sequence[tuple[Any, Any]]
    """Begin and end of each copying of buffers."""
    ready: Any
    end: Any


class WorkClock:
    """Times the steps of one rank; with one rank, it does nothing."""

    def __init__(self, ranks: Ranks) -> None:
        self._on, self._cuda = ranks.world_size > 1, ranks.device.type == "cuda"
        self._timed: list[_Timed] = []
        self._under_way: list[_Timed] = []
        """Steps before the last look, whose events a GPU may not have reached yet."""
        self._unused: list[torch.cuda.Event] = []
        self._running = False
        self._start: Any = None
        self._ready: Any = None
        self._entered: Any = None
        self._copied: list[tuple[Any, Any]] = []

    def attach(self, model: DistributedDataParallel, *, compiled: bool) -> None:
        """Time the copying of buffers in `model`, if it has any; `compiled`: it will be compiled."""
        plain = model.module
        if not self._on or next(plain.buffers(), None) is None:
            return

        def before(*_: object) -> None:
            if self._running:
                self._entered = self._mark()

        def after(*_: object) -> None:
            if self._running and self._entered is not None:
                self._copied.append((self._entered, self._mark()))
                self._entered = None

        model.register_forward_pre_hook(before)
        plain.register_forward_pre_hook(torch.compiler.disable(after) if compiled else after)

    def backward(self, parameters: Sequence[nn.Parameter], backward: Callable[[], object]) -> None:
        """Run the first backward pass, and time from now on when the gradient that came last is ready.

        The order of gradients is the same in every step of the same model. So one parameter has a hook, which
        runs before DDP hears of the gradient; a hook on each would cost 2 % of a step of 10 ms.
        """
        if not self._on:
            backward()
            return
        order: list[Tensor] = []
        hooks = [parameter.register_post_accumulate_grad_hook(order.append) for parameter in parameters]
        backward()
        for hook in hooks:
            hook.remove()
        if order:
            order[-1].register_post_accumulate_grad_hook(self._is_ready)

    def begins(self) -> None:
        """Note that the forward pass starts."""
        self._running = self._on and len(self._timed) < MOST
        if self._running:
            self._copied = []
            self._start, self._ready, self._entered = self._mark(), None, None

    def _is_ready(self, _: Tensor) -> None:
        if self._running:  # each micro-batch comes here; the last one counts
            if self._cuda and self._ready is not None:
                self._ready.record()
            else:
                self._ready = self._mark()

    def reduced(self) -> None:
        """Note that the gradients are those of all ranks."""
        if self._running and self._ready is not None:
            self._timed.append(
                _Timed(start=self._start, copied=self._copied, ready=self._ready, end=self._mark())
            )
        self._running = False

    def take(self) -> Spent:
        """Return what the steps since the last call took; on a GPU, the steps before that call.

        The device has passed those events: the caller has read a sum that it computed after them.
        """
        steps, self._timed = self._timed, []
        if self._cuda:
            steps, self._under_way = self._under_way, steps
        if not steps:
            return Spent()
        own_s = wait_s = 0.0
        for step in steps:
            own_s += self._between(step.start, step.ready) - sum(self._between(*pair) for pair in step.copied)
            wait_s += self._between(step.ready, step.end)
            if self._cuda:
                self._unused += (step.start, *itertools.chain(*step.copied), step.ready, step.end)
        return Spent(own_s / len(steps), wait_s / len(steps))

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = self._unused.pop() if self._unused else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1e3 if self._cuda else end - start


Batch = TypeVar("Batch")


def traced(
    steps: Iterable[tuple[Position, Batch]], config: Config, ranks: Ranks
) -> Iterable[tuple[Position, Batch]]:
    """Pass `steps` on unchanged, and record a trace of those that ``--profile`` names."""
    return _traced(steps, config, ranks) if config.profile is not None else steps


def _traced(
    steps: Iterable[tuple[Position, Batch]], config: Config, ranks: Ranks
) -> Iterator[tuple[Position, Batch]]:
    traced_steps, recorder = config.profiled(), None
    try:
        for position, batch in steps:
            if recorder is None and position.step in traced_steps:
                recorder = _started(ranks)
            yield position, batch
            if recorder is not None and position.step + 1 not in traced_steps:
                _write(recorder, config, ranks)
                recorder, traced_steps = None, range(0)
    finally:  # the run ended within the traced steps: keep what there is
        if recorder is not None:
            _write(recorder, config, ranks)


def _started(ranks: Ranks) -> profile:
    cuda = [ProfilerActivity.CUDA] if ranks.device.type == "cuda" else []
    recorder = profile(activities=[ProfilerActivity.CPU, *cuda])
    recorder.start()
    return recorder


def _write(recorder: profile, config: Config, ranks: Ranks) -> None:
    ranks.synchronize()
    recorder.stop()
    assert config.run_dir is not None  # options.read has checked it
    target = config.run_dir / "traces" / f"rank-{ranks.rank}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = files.temporary_name(target)
    recorder.export_chrome_trace(str(temporary))
    files.publish(temporary, target)

"""The metrics of a run, and the line of progress that shows them. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The sums over the latest `steps` steps, up to `step`."""

    step: int
    steps: int
    loss: float
    """Mean over the steps that were not skipped; NaN if one loss was NaN."""
    skipped: int
    seconds: float
    """Duration of the steps on this rank's clock."""
    grad_norm: float = math.nan
    """Norm of the last step's gradient, before clipping; NaN if it was not measured."""
    numbers: tuple[float, ...] = ()
    """Means of the user's numbers, as that of the loss."""
    own_s: tuple[float, ...] = ()
    """Seconds of own work of each rank in a step; 0: not measured. Empty with one rank."""
    wait_s: float = math.nan
    """Seconds that a rank waits for the gradients of the others in a step; the mean of all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """One line of ``metrics.jsonl``."""

    time: str
    """The time of the line, UTC."""
    step: int
    epoch: float
    """Passes over the data so far."""
    loss: float | None
    """Mean since the previous line; None if it is not a number, or if every step was skipped."""
    numbers: dict[str, float | None]
    """Numbers of the user's step, each a mean over all ranks as that of the loss."""
    lr: float
    """Learning rate of this step."""
    grad_norm: float | None
    """Norm of this step's gradient, before clipping; None if it is not a number or was not measured."""
    samples_per_s: float
    """Rate of all ranks together."""
    tokens_per_s: float | None
    """The same in tokens; None if the samples are not rows of tokens."""
    data_wait: float
    """Share of the time in which rank 0 had no data to compute on, 0 to 1."""
    own_work_s: float | None
    """Seconds of a rank's own work in a step: the median of all ranks, or the fastest of fewer than 4."""
    wait_s: float | None
    """Seconds that a rank waits for the gradients of the others in a step; the mean of all ranks."""
    slow: list[dict[str, Any]]
    """The ranks that are slow now, each a `SlowRank`; the slowest 100."""
    memory_MiB: float
    """Peak memory of rank 0 so far: tensors on the GPU, or the process on CPU."""
    skipped: int
    """Steps that this start skipped because a gradient was not a number."""
    mfu: float | None
    """Model FLOP/s as a share of the devices' peak; None if either is unknown."""


def line(metrics: Metrics, *, steps: int, ranks: int, left_s: float) -> str:
    """Write one line of progress."""
    rate = metrics.samples_per_s
    loss = "none" if metrics.loss is None else f"{metrics.loss:.6f}"
    numbers = "".join(
        f"  {name} {'none' if value is None else format(value, '.6g')}"
        for name, value in metrics.numbers.items()
    )
    skipped = f"  {metrics.skipped} skipped" if metrics.skipped else ""
    mfu = "" if metrics.mfu is None else f"  {metrics.mfu:.1%} MFU"
    return (
        f"step {metrics.step:>{len(str(steps))}}/{steps}  loss {loss}{numbers}  {rate:.0f} samples/s"
        f" ({rate / ranks:.0f} per rank)  data {metrics.data_wait:.0%}  {metrics.memory_MiB:.0f} MiB"
        f"{mfu}{skipped}  {clock(left_s)} left"
    )


def clock(seconds: float) -> str:
    """Write a duration as ``5s``, ``3m20s`` or ``2h05m``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}m{rest:02}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02}m"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """Functions that are read for every line."""

    waited_s: Callable[[], float]
    """Seconds without data since the start."""
    memory_MiB: Callable[[], float]
    samples_per_s_at_peak: float | None = None
    """Samples per second of one rank at its device's peak; None: unknown."""
    tokens_a_sample: int | None = None
    """Tokens of a sample; None: the samples are not rows of tokens."""
    names: tuple[str, ...] = ()
    """Names of the user's numbers."""

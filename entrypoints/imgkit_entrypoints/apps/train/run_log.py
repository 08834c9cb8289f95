"""The log of a run: progress lines, ``metrics.jsonl``, ``summary.json`` and ``curves.svg``. No torch."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from imgkit_entrypoints import __version__, files, json_text, terminal
from imgkit_entrypoints.apps.train import curves
from imgkit_entrypoints.apps.train.config import LINE_EVERY_S, Config, learning_rate
from imgkit_entrypoints.apps.train.loggers import Loggers
from imgkit_entrypoints.apps.train.stragglers import Stragglers
from imgkit_entrypoints.launch.start_up import StartUp
from imgkit_entrypoints.run.metrics import METRICS, MetricsFile, now

SCHEMA = 1
CURVES = "curves.svg"


class RunLog:
    """Writes a line every `log_every` steps or `LINE_EVERY_S` seconds; used by rank 0 alone."""

    def __init__(
        self,
        config: Config,
        *,
        start: int,
        steps: int,
        steps_per_epoch: int,
        ranks: int,
        gauges: Gauges,
        slow: Stragglers,
        started: StartUp,
        say: Callable[[str], None],
    ) -> None:
        assert config.global_batch is not None
        self._config, self._log_every = config, config.log_every
        self._steps_per_epoch = steps_per_epoch
        self._start, self._steps, self._ranks, self._gauges = start, steps, ranks, gauges
        self._samples_a_step, self._metrics = config.global_batch, MetricsFile(config.run_dir, say)
        self.first_loss, self.last_loss, self.eval_loss, self.skipped = math.nan, math.nan, math.nan, 0
        self._slow, self._usual_s = slow, math.nan
        self._started = started
        self._since: list[Seen] = []
        self._training_s, self._evaluation_s, self._trained_steps = 0.0, 0.0, 0
        self._waited_s = gauges.waited_s()
        self._loggers = Loggers(config, start, say)
        self._start_s = time.perf_counter()
        self._metrics.write(lambda folder: folder.mkdir(parents=True, exist_ok=True))
        self._metrics.write(lambda folder: files.put(folder / "config.json", config.to_json()))
        self._metrics.write(lambda folder: _forget_after(folder / METRICS, start))

    def note(self, *news: Seen) -> None:
        """Add the sums over the latest steps."""
        for seen in news:
            if math.isnan(self.first_loss):
                self.first_loss = seen.loss
            self.skipped += seen.skipped
            self._since.append(seen)
            self._training_s += seen.seconds
            self._trained_steps += seen.steps
            self._usual_s = self._slow.note(seen.step, seen.own_s)
            at_its_time = sum(seen.seconds for seen in self._since) >= LINE_EVERY_S
            at_its_step = seen.step % self._log_every == 0 or seen.step in (self._start + 1, self._steps)
            if at_its_time or at_its_step:
                self._write_line(seen.step)

    def held_out(self, step: int, loss: float, seconds: float) -> None:
        """Report the loss on held-out data, which took `seconds` to compute."""
        self.eval_loss, self._evaluation_s = loss, self._evaluation_s + seconds
        terminal.out(f"step {step:>{len(str(self._steps))}}/{self._steps}  held out: loss {loss:.6f}")
        position = {"time": now(), "step": step, "epoch": step / self._steps_per_epoch}
        self._metrics.add({**position, "eval_loss": _number(loss)})
        self._loggers.log(step, {"eval_loss": loss})

    def _write_line(self, step: int) -> None:
        parts = [
            ((seen.loss, *seen.numbers), seen.steps - seen.skipped)
            for seen in self._since
            if seen.steps > seen.skipped
        ]
        counted = sum(count for _, count in parts)
        columns = zip(*([value * count for value in values] for values, count in parts), strict=True)
        averages = [sum(column) / counted for column in columns]
        if counted:
            self.last_loss = averages[0]
        seconds = sum(seen.seconds for seen in self._since)
        samples = sum(seen.steps for seen in self._since) * self._samples_a_step
        tokens = self._gauges.tokens_a_sample
        waited_s, at_peak = self._gauges.waited_s(), self._gauges.samples_per_s_at_peak
        metrics = Metrics(
            time=now(),
            step=step,
            epoch=step / self._steps_per_epoch,
            loss=_number(self.last_loss) if counted else None,
            numbers=dict.fromkeys(self._gauges.names)
            | dict(zip(self._gauges.names, map(_number, averages[1:]), strict=False)),
            lr=learning_rate(self._config, step - 1, self._steps),
            grad_norm=_number(self._since[-1].grad_norm),
            samples_per_s=samples / seconds,
            tokens_per_s=None if tokens is None else tokens * samples / seconds,
            data_wait=min(1.0, (waited_s - self._waited_s) / seconds),
            own_work_s=_number(self._usual_s),
            wait_s=_number(self._since[-1].wait_s) if self._ranks > 1 else None,
            slow=self._slow.now(),
            memory_MiB=self._gauges.memory_MiB(),
            skipped=self.skipped,
            mfu=None if at_peak is None else samples / seconds / self._ranks / at_peak,
        )
        self._since, self._waited_s = [], waited_s
        a_step_s = (time.perf_counter() - self._start_s) / (step - self._start)
        left_s = a_step_s * (self._steps - step)
        terminal.out(line(metrics, steps=self._steps, ranks=self._ranks, left_s=left_s))
        values = asdict(metrics)
        self._metrics.add(values)
        del values["step"]
        self._loggers.log(step, {**values, **values.pop("numbers")})

    def close(self, *, step: int, reason: str, saved_step: int, saving_s: float, stall_s: float) -> None:
        """Write the last line, and the summary of this start."""
        if self._since:
            self._write_line(self._since[-1].step)
        self._loggers.close()
        seconds = time.perf_counter() - self._start_s
        trained = self._trained_steps * self._samples_a_step
        rate = trained / self._training_s if trained else 0.0
        summary = {
            "schema": SCHEMA,
            "imgkit": __version__,
            "ended": now(),
            "reason": reason,
            "step": step,
            "steps": self._steps,
            "started_after_step": self._start,
            "saved_step": saved_step if saved_step >= 0 else None,
            "first_loss": _number(self.first_loss),
            "last_loss": _number(self.last_loss),
            "eval_loss": _number(self.eval_loss),
            "ranks": self._ranks,
            "samples_per_s": rate,
            "seconds": seconds,
            "start_s": {name: round(spent, 3) for name, spent in self._started.parts.items()},
            "training_s": self._training_s,
            "evaluation_s": self._evaluation_s,
            "saving_s": saving_s,
            "skipped": self.skipped,
            "stragglers": self._slow.all(),
            "longest_save_stall_s": stall_s,
        }
        self._metrics.write(
            lambda folder: files.put(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
        )
        self._metrics.write(_draw)
        largest = max(self._started.parts.items(), key=lambda part: part[1], default=("", 0.0))
        durations = (
            (sum(self._started.parts.values()), f"starting ({largest[0]} {largest[1]:.1f} s)"),
            (self._training_s, "training"),
            (self._evaluation_s, "evaluation"),
            (saving_s, "saving"),
        )
        breakdown = ", ".join(f"{spent:.1f} s {name}" for spent, name in durations if spent)
        losses = f"loss {self.first_loss:.6f} -> {self.last_loss:.6f}"
        terminal.out(f"{losses}, {self._ranks} ranks, {rate:.0f} samples/s while training; {breakdown}")


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no NaN


def _forget_after(path: Path, step: int) -> None:
    """Drop the lines of steps that will now be repeated."""
    try:
        with files.open_own(path) as stream:
            lines = stream.read().decode(errors="replace").splitlines(keepends=True)
    except FileNotFoundError:
        return
    files.put(path, "".join(line_text for line_text in lines if _step(line_text) <= step))


def _step(text: str) -> float:
    try:
        row: Any = json_text.parse(text)
        return float(row["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf  # half a line, left by a run that was killed


def _draw(folder: Path) -> None:
    with files.open_own(folder / METRICS) as stream:
        rows = [json_text.parse(text) for text in stream.read().decode().splitlines()]

    def curve(label: str, key: str) -> curves.StepCurve:
        points = tuple((row["step"], row[key]) for row in rows if row.get(key) is not None)
        return curves.StepCurve(label=label, points=points)

    loss = curves.StepChart(
        "loss", (curve("trained on", "loss"), curve("held out", "eval_loss")), from_zero=False
    )
    files.put(
        folder / CURVES, curves.document((loss, curves.StepChart("samples/s", (curve("", "samples_per_s"),))))
    )


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
    """The ranks that are slow now, each a `Straggler`; the slowest 100."""
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
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded}s"
    minutes, rest = divmod(rounded, 60)
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


PEAKS: Mapping[str, float] = {
    r"\bV100-SXM2": 125e12,
    r"\bA100\b": 312e12,
    r"\bA30\b": 165e12,
    r"\bL40S\b": 362e12,
    r"\bH100 PCIe\b": 756e12,
    r"\bH100 80GB HBM3\b": 989e12,
    r"\bH200$": 989e12,
    r"\bGH200\b": 990e12,
}
"""Dense FLOP/s of 16-bit tensor cores with 32-bit sums, by the device name that CUDA reports.

Source: NVIDIA's data sheets (V100 January 2020, A100 and A30 2021, H100, L40S and GH200 2023, H200 2024; half
of the figure "with sparsity"), read in November 2026. V100 has no bf16. Variants with other clocks, such as
NVL and custom parts, are left out: no figure is better than a wrong one.
"""


def peak(device: str, amp: str) -> float | None:
    """Peak FLOP/s of `device`; None if unknown, as for 32-bit types and CPUs."""
    if amp not in ("bf16", "fp16") or ("V100" in device and amp == "bf16"):
        return None
    return next((value for pattern, value in PEAKS.items() if re.search(pattern, device)), None)

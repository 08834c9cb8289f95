"""The log of a run: progress lines, ``metrics.jsonl``, ``summary.json`` and ``curves.svg``. No torch."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from imgkit_entrypoints import __version__, files, json_text, terminal
from imgkit_entrypoints.apps.train.config import LINE_EVERY_S, Config
from imgkit_entrypoints.apps.train.report import curves
from imgkit_entrypoints.apps.train.report.loggers import Loggers
from imgkit_entrypoints.apps.train.report.metrics import Gauges, Metrics, Seen, line
from imgkit_entrypoints.apps.train.report.slow_ranks import SlowRanks
from imgkit_entrypoints.apps.train.schedule import learning_rate
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
        slow: SlowRanks,
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
        self._began = time.perf_counter()
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
            at_its_time = sum(one.seconds for one in self._since) >= LINE_EVERY_S
            at_its_step = seen.step % self._log_every == 0 or seen.step in (self._start + 1, self._steps)
            if at_its_time or at_its_step:
                self._write_line(seen.step)

    def held_out(self, step: int, loss: float, seconds: float) -> None:
        """Report the loss on held-out data, which took `seconds` to compute."""
        self.eval_loss, self._evaluation_s = loss, self._evaluation_s + seconds
        terminal.out(f"step {step:>{len(str(self._steps))}}/{self._steps}  held out: loss {loss:.6f}")
        place = {"time": now(), "step": step, "epoch": step / self._steps_per_epoch}
        self._metrics.add({**place, "eval_loss": _number(loss)})
        self._loggers.log(step, {"eval_loss": loss})

    def _write_line(self, step: int) -> None:
        parts = [
            ((one.loss, *one.numbers), one.steps - one.skipped)
            for one in self._since
            if one.steps > one.skipped
        ]
        counted = sum(count for _, count in parts)
        columns = zip(*([value * count for value in values] for values, count in parts), strict=True)
        means = [sum(column) / counted for column in columns]
        if counted:
            self.last_loss = means[0]
        seconds = sum(one.seconds for one in self._since)
        samples = sum(one.steps for one in self._since) * self._samples_a_step
        tokens = self._gauges.tokens_a_sample
        waited_s, at_peak = self._gauges.waited_s(), self._gauges.samples_per_s_at_peak
        metrics = Metrics(
            time=now(),
            step=step,
            epoch=step / self._steps_per_epoch,
            loss=_number(self.last_loss) if counted else None,
            numbers=dict.fromkeys(self._gauges.names)
            | dict(zip(self._gauges.names, map(_number, means[1:]), strict=False)),
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
        a_step_s = (time.perf_counter() - self._began) / (step - self._start)
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
        seconds = time.perf_counter() - self._began
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
            "slow_ranks": self._slow.all(),
            "longest_save_stall_s": stall_s,
        }
        self._metrics.write(
            lambda folder: files.put(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
        )
        self._metrics.write(_draw)
        largest = max(self._started.parts.items(), key=lambda part: part[1], default=("", 0.0))
        times = (
            (sum(self._started.parts.values()), f"starting ({largest[0]} {largest[1]:.1f} s)"),
            (self._training_s, "training"),
            (self._evaluation_s, "evaluation"),
            (saving_s, "saving"),
        )
        told = ", ".join(f"{spent:.1f} s {what}" for spent, what in times if spent)
        losses = f"loss {self.first_loss:.6f} -> {self.last_loss:.6f}"
        terminal.out(f"{losses}, {self._ranks} ranks, {rate:.0f} samples/s while training; {told}")


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no NaN


def _forget_after(path: Path, step: int) -> None:
    """Drop the lines of steps that will now be repeated."""
    try:
        with files.open_own(path) as stream:
            lines = stream.read().decode(errors="replace").splitlines(keepends=True)
    except FileNotFoundError:
        return
    files.put(path, "".join(one for one in lines if _step(one) <= step))


def _step(text: str) -> float:
    try:
        found: Any = json_text.parse(text)
        return float(found["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf  # half a line, left by a run that was killed


def _draw(folder: Path) -> None:
    with files.open_own(folder / METRICS) as stream:
        known = [json_text.parse(text) for text in stream.read().decode().splitlines()]

    def curve(label: str, key: str) -> curves.StepCurve:
        points = tuple((one["step"], one[key]) for one in known if one.get(key) is not None)
        return curves.StepCurve(label=label, points=points)

    loss = curves.StepChart(
        "loss", (curve("trained on", "loss"), curve("held out", "eval_loss")), from_zero=False
    )
    files.put(
        folder / CURVES, curves.document((loss, curves.StepChart("samples/s", (curve("", "samples_per_s"),))))
    )

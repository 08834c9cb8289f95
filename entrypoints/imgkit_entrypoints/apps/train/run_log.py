"""Write the log of a run: lines of progress, ``metrics.jsonl``, ``summary.json`` and ``curves.svg``.

This module does not import torch.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imgkit_entrypoints import __version__, files, json_text, terminal
from imgkit_entrypoints.apps.train import curves
from imgkit_entrypoints.apps.train.config import LINE_EVERY_S, Config, learning_rate
from imgkit_entrypoints.apps.train.loggers import Loggers
from imgkit_entrypoints.apps.train.stragglers import RankOnNode, Stragglers
from imgkit_entrypoints.launch.start_up import StartUp
from imgkit_entrypoints.run.metrics import METRICS, MetricsFile, utc_timestamp

# Version of ``summary.json``.
SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LatestSteps:
    """Sums over the latest steps. There are `steps` steps, and the last one has the number `step`."""

    step: int
    steps: int
    skipped: int
    seconds: float
    """Duration of the steps, measured on this rank."""
    sums: tuple[float, ...]
    """The sum of the losses, then the sum of each of the user's numbers. Skipped steps are left out."""
    grad_norm: float = math.nan
    """Norm of the gradient in the last step, before clipping; NaN if it was not measured."""
    own_s: tuple[float, ...] = ()
    """Own work of each rank in a step, in seconds. 0 means not measured. Empty if there is only one rank."""
    wait_s: float = math.nan
    """Time in seconds that a rank waits for the gradients of other ranks in a step; the mean of all ranks."""

    @property
    def loss(self) -> float:
        """The mean loss of the steps that were not skipped, or NaN if all steps were skipped."""
        counted_steps = self.steps - self.skipped
        if not counted_steps:
            return math.nan
        return self.sums[0] / counted_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The facts about model, data and ranks that the log needs."""

    start: int
    """Number of steps that earlier starts of the run have done."""
    steps: int
    steps_per_epoch: int
    placements: Sequence[RankOnNode]
    """Where each rank runs."""
    waited_s: Callable[[], float]
    """Returns the total time in seconds that the training has waited for data."""
    memory_MiB: Callable[[], float]
    """Returns the peak memory of rank 0 so far: that of tensors on a GPU, or that of the process on a CPU."""
    tokens_per_sample: int | None = None
    """None if the samples are not rows of tokens."""
    names: tuple[str, ...] = ()
    """Names of the numbers that the user's function returns in addition to the loss."""


class RunLog:
    """Writes a line of progress every `log_every` steps and every `LINE_EVERY_S` seconds, and the summary.

    Only rank 0 uses it.
    """

    def __init__(
        self,
        config: Config,
        workload: Workload,
        start_up: StartUp,
        say: Callable[[str], None],
        first_loss: float = math.nan,
    ) -> None:
        assert config.global_batch is not None
        self._config = config
        self._workload = workload
        self._start_up = start_up
        self._ranks = len(workload.placements)
        self._global_batch = config.global_batch
        self._metrics = MetricsFile(config.run_dir, say)
        self._stragglers = Stragglers(workload.placements, say)
        self._loggers = Loggers(config, workload.start, say)
        self._first_loss = first_loss
        self._last_loss = math.nan
        self._eval_loss = math.nan
        self._skipped = 0
        self._usual_work_s = math.nan
        self._unwritten: list[LatestSteps] = []
        self._training_s = 0.0
        self._evaluation_s = 0.0
        self._trained_steps = 0
        self._waited_s = workload.waited_s()
        self._start_s = time.perf_counter()
        self._metrics.write(lambda folder: folder.mkdir(parents=True, exist_ok=True))
        self._metrics.write(lambda folder: files.write_file(folder / "config.json", config.to_json()))
        self._metrics.write(lambda folder: _drop_lines_after(folder / METRICS, workload.start))

    def add(self, latest: LatestSteps) -> None:
        """Add the sums of the latest steps, report slow ranks, and write a line of progress if it is due."""
        if math.isnan(self._first_loss):
            self._first_loss = latest.loss
        self._skipped += latest.skipped
        self._training_s += latest.seconds
        self._trained_steps += latest.steps
        # The usual work of a rank in a step is part of the next line.
        self._usual_work_s = self._stragglers.compare_ranks(latest.step, latest.own_s)
        self._unwritten.append(latest)  # for the means of the next line
        if self._is_line_due(latest.step):
            self._write_line(latest.step)

    def _is_line_due(self, step: int) -> bool:
        """Return whether a line of progress must be written after `step`.

        This is the case every `log_every` steps, every `LINE_EVERY_S` seconds, after the first step of this
        start, and after the last step of the run.
        """
        first_step = self._workload.start + 1
        last_step = self._workload.steps
        if step in (first_step, last_step) or step % self._config.log_every == 0:
            return True
        return sum(entry.seconds for entry in self._unwritten) >= LINE_EVERY_S

    def report_evaluation(self, step: int, loss: float, seconds: float) -> None:
        """Report the loss on held-out data. `seconds` is the duration of the evaluation."""
        self._eval_loss = loss
        self._evaluation_s += seconds
        terminal.print_results(f"{self._progress(step)}  held out: loss {loss:.6f}")
        self._metrics.add({**self._position(step), "eval_loss": _drop_infinite(loss)})
        self._loggers.log(step, {"eval_loss": loss})

    def _position(self, step: int) -> dict[str, Any]:
        """Return the fields with which each line of ``metrics.jsonl`` begins."""
        return {"time": utc_timestamp(), "step": step, "epoch": step / self._workload.steps_per_epoch}

    def _progress(self, step: int) -> str:
        """Return the beginning of a line on the terminal: ``step  10/100``."""
        return f"step {step:>{len(str(self._workload.steps))}}/{self._workload.steps}"

    def _write_line(self, step: int) -> None:
        """Write a line of progress to the terminal, to ``metrics.jsonl`` and to the loggers.

        It contains the means over all steps since the last line.
        """
        workload = self._workload
        unwritten = self._unwritten
        self._unwritten = []
        latest = unwritten[-1]
        seconds = sum(entry.seconds for entry in unwritten)
        steps = sum(entry.steps for entry in unwritten)
        loss, numbers = self._average_steps(unwritten)
        if loss is not None:
            self._last_loss = loss
        waited_s = workload.waited_s() - self._waited_s
        self._waited_s = workload.waited_s()
        rate = steps * self._global_batch / seconds
        tokens_per_s = None
        if workload.tokens_per_sample is not None:
            tokens_per_s = workload.tokens_per_sample * rate
        values = {
            **self._position(step),
            "loss": None if loss is None else _drop_infinite(loss),
            "numbers": numbers,
            "lr": learning_rate(self._config, step - 1, workload.steps),
            "grad_norm": _drop_infinite(latest.grad_norm),
            "samples_per_s": rate,
            "tokens_per_s": tokens_per_s,
            "data_wait": min(1.0, waited_s / seconds),
            "own_work_s": _drop_infinite(self._usual_work_s),
            "wait_s": _drop_infinite(latest.wait_s) if self._ranks > 1 else None,
            "slow": self._stragglers.current_rows(),
            "memory_MiB": workload.memory_MiB(),
            "skipped": self._skipped,
        }
        self._metrics.add(values)
        # Loggers get the step as an argument. Each of the user's numbers gets a key of its own.
        self._loggers.log(values.pop("step"), {**values, **numbers})
        terminal.print_results(self._format_line(step, values))

    def _average_steps(self, entries: Sequence[LatestSteps]) -> tuple[float | None, dict[str, float | None]]:
        """Return the mean loss over steps, and the mean of each of the user's numbers by name.

        Skipped steps do not count. If all steps were skipped, all means are None.
        """
        names = self._workload.names
        counted_steps = sum(entry.steps - entry.skipped for entry in entries)
        if counted_steps == 0:
            return None, dict.fromkeys(names)
        # The sums of an entry are those of the loss and of each number, such as (loss, accuracy). Each column
        # has the sums of all entries: (loss, loss, ...) and (accuracy, accuracy, ...).
        columns = zip(*[entry.sums for entry in entries], strict=True)
        mean_loss, *number_means = [sum(column) / counted_steps for column in columns]
        # JSON has no infinite numbers. The loss stays as it is, because None means that there is no loss.
        json_means = map(_drop_infinite, number_means)
        return mean_loss, dict(zip(names, json_means, strict=True))

    def _format_line(self, step: int, values: Mapping[str, Any]) -> str:
        """Return the line of progress for the terminal: ``step 10/100  loss 0.123456  ...  5s left``.

        `values` are the values that are written to ``metrics.jsonl``.
        """
        columns = [self._progress(step), _format_number("loss", values["loss"], ".6f")]
        for name, value in values["numbers"].items():
            columns.append(_format_number(name, value, ".6g"))
        rate = values["samples_per_s"]
        columns.append(f"{rate:.0f} samples/s ({rate / self._ranks:.0f} per rank)")
        columns.append(f"data {values['data_wait']:.0%}")
        columns.append(f"{values['memory_MiB']:.0f} MiB")
        if self._skipped:
            columns.append(f"{self._skipped} skipped")
        columns.append(f"{format_duration(self._estimate_left_s(step))} left")
        return "  ".join(columns)

    def _estimate_left_s(self, step: int) -> float:
        """Estimate the time in seconds from `step` to the end of the run, including evaluations and saves."""
        elapsed_s = time.perf_counter() - self._start_s
        step_s = elapsed_s / (step - self._workload.start)
        return step_s * (self._workload.steps - step)

    def close(self, *, step: int, reason: str, saved_step: int, saving_s: float, stall_s: float) -> None:
        """Write the last line of progress, the summary of this start, and the charts.

        Parameters
        ----------
        step : number of the last step that is done.
        reason : why this start has ended.
        saved_step : step of the latest checkpoint, or -1 if there is none.
        saving_s : total time in seconds that the training has waited for saves.
        stall_s : longest single wait for a save.
        """
        if self._unwritten:
            self._write_line(self._unwritten[-1].step)
        self._loggers.close()
        rate = 0.0
        if self._trained_steps:
            rate = self._trained_steps * self._global_batch / self._training_s
        summary = {
            "schema": SCHEMA,
            "imgkit": __version__,
            "ended": utc_timestamp(),
            "reason": reason,
            "step": step,
            "steps": self._workload.steps,
            "started_after_step": self._workload.start,
            "saved_step": saved_step if saved_step >= 0 else None,
            "first_loss": _drop_infinite(self._first_loss),
            "last_loss": _drop_infinite(self._last_loss),
            "eval_loss": _drop_infinite(self._eval_loss),
            "ranks": self._ranks,
            "samples_per_s": rate,
            "seconds": time.perf_counter() - self._start_s,
            "start_s": {name: round(seconds, 3) for name, seconds in self._start_up.parts.items()},
            "training_s": self._training_s,
            "evaluation_s": self._evaluation_s,
            "saving_s": saving_s,
            "skipped": self._skipped,
            "stragglers": self._stragglers.all_rows(),
            "longest_save_stall_s": stall_s,
        }
        text = json.dumps(summary, indent=2) + "\n"
        self._metrics.write(lambda folder: files.write_file(folder / "summary.json", text))
        self._metrics.write(_write_curves)
        losses = f"loss {self._first_loss:.6f} -> {self._last_loss:.6f}"
        speed = f"{self._ranks} ranks, {rate:.0f} samples/s while training"
        terminal.print_results(f"{losses}, {speed}; {self._format_durations(saving_s)}")

    def _format_durations(self, saving_s: float) -> str:
        """Return how long each part of this start took: ``2.1 s starting (imports 1.5 s), 9.0 s training``.

        `saving_s` is the time in seconds that the training has waited for saves.
        """
        starts = self._start_up.parts
        longest_part = max(starts, key=lambda name: starts[name], default="")
        durations = {
            f"starting ({longest_part} {starts.get(longest_part, 0.0):.1f} s)": sum(starts.values()),
            "training": self._training_s,
            "evaluation": self._evaluation_s,
            "saving": saving_s,
        }
        return ", ".join(f"{seconds:.1f} s {name}" for name, seconds in durations.items() if seconds)


def _drop_infinite(value: float) -> float | None:
    """Return the number, or None if it is NaN or infinite, because JSON does not have such values."""
    return value if math.isfinite(value) else None


def _format_number(name: str, value: float | None, format_spec: str) -> str:
    """Return a text with a name and a number: ``loss 0.123456``, or ``loss none`` if the number is None."""
    if value is None:
        return f"{name} none"
    return f"{name} {value:{format_spec}}"


def _drop_lines_after(path: Path, step: int) -> None:
    """Remove the lines after `step` from ``metrics.jsonl``.

    This start resumes after `step`, so it repeats the later steps and writes their lines again.
    """
    try:
        with files.open_own(path) as stream:
            lines = stream.read().decode(errors="replace").splitlines(keepends=True)
    except FileNotFoundError:
        return
    files.write_file(path, "".join(line for line in lines if _step_of_line(line) <= step))


def _step_of_line(line: str) -> float:
    """Return the step in a line of ``metrics.jsonl``, or infinity if the line cannot be parsed."""
    try:
        row: Any = json_text.parse(line)
        return float(row["step"])
    except (ValueError, KeyError, TypeError):
        # The line is incomplete, because the run was killed while writing it. Infinity means that it is
        # removed.
        return math.inf


def _write_curves(folder: Path) -> None:
    """Draw the curves of the loss and the speed over all starts of the run, and write ``curves.svg``."""
    with files.open_own(folder / METRICS) as stream:
        rows = [json_text.parse(line) for line in stream.read().decode().splitlines()]
    losses = {"trained on": _list_points(rows, "loss"), "held out": _list_points(rows, "eval_loss")}
    rates = {"": _list_points(rows, "samples_per_s")}
    charts = (curves.Chart("loss", losses), curves.Chart("samples/s", rates, from_zero=True))
    files.write_file(folder / "curves.svg", curves.draw_charts(charts))


def _list_points(rows: Sequence[Mapping[str, Any]], key: str) -> list[tuple[int, float]]:
    """Return the step and the value of `key` for each row of the metrics that has this value."""
    return [(row["step"], row[key]) for row in rows if row.get(key) is not None]


def format_duration(seconds: float) -> str:
    """Format a duration, as in ``5s``, ``3m20s`` or ``2h05m``."""
    minutes, rest_s = divmod(round(seconds), 60)
    hours, rest_minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{rest_minutes:02}m"
    if minutes:
        return f"{minutes}m{rest_s:02}s"
    return f"{rest_s}s"

"""``metrics.jsonl`` and its neighbours in a run's folder, and a loop's lines on the terminal. No torch.

A full disk does not end the run. Rank 0 alone writes.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from imgkit_entrypoints import files, terminal

METRICS = "metrics.jsonl"


class MetricsFile:
    """Writes into a run's folder; tells once if that fails, as on a full disk. Without a folder, nothing."""

    def __init__(self, folder: Path | None, say: Callable[[str], None]) -> None:
        self._folder, self._say, self._failed = folder, say, False

    def write(self, write: Callable[[Path], object]) -> None:
        """Call `write` with the folder."""
        if self._folder is None:
            return
        try:
            write(self._folder)
        except OSError as error:
            if not self._failed:
                self._say(f"metrics are incomplete: {error.filename or self._folder}: {error.strerror}")
            self._failed = True

    def add(self, values: Mapping[str, Any]) -> None:
        """Append a line to the metrics."""
        text = json.dumps(values) + "\n"
        self.write(lambda folder: files.append(folder / METRICS, text.encode()))


def now() -> str:
    """The time of a line, UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


EVERY_S = 5.0
"""Time between two lines."""


class ProgressLines:
    """Averages what is logged between two lines."""

    def __init__(self, metrics: MetricsFile) -> None:
        self._metrics = metrics
        self._averages: list[tuple[int, Mapping[str, float]]] = []
        self._steps, self._seconds, self._last = 0, 0.0, -math.inf

    def note(
        self, step: int, epoch: float, steps: int, seconds: float, averages: Mapping[str, float]
    ) -> None:
        """Add the averages of the latest `steps` steps; write a line when it is time."""
        self._averages.append((max(1, steps), averages))  # what a GPU has sent late comes without steps
        self._steps, self._seconds = self._steps + steps, self._seconds + seconds
        if time.monotonic() - self._last >= EVERY_S:
            self.write(step, epoch)

    def write(self, step: int, epoch: float) -> None:
        """Write the line of what was noted since the last one, if anything was."""
        logged = [(steps, averages) for steps, averages in self._averages if averages]
        if logged:
            count = sum(steps for steps, _ in logged)
            numbers = {
                name: sum(steps * averages[name] for steps, averages in logged) / count
                for name in logged[-1][1]
            }
            rate = self._steps / self._seconds if self._seconds else 0.0
            text = "".join(f"  {name} {value:.6g}" for name, value in numbers.items())
            terminal.out(f"step {step}{text}  {rate:.1f} steps/s")
            values = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
            self._metrics.add({"time": now(), "step": step, "epoch": epoch, "steps_per_s": rate, **values})
            self._last = time.monotonic()
            self._averages, self._steps, self._seconds = [], 0, 0.0

"""The lines of a loop of one's own: on the terminal and in ``metrics.jsonl``; rank 0 alone writes them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from imgkit_entrypoints import terminal
from imgkit_entrypoints.run.metrics_file import MetricsFile, now

EVERY_S = 5.0
"""Time between two lines."""


class ProgressLines:
    """Averages what is logged between two lines."""

    def __init__(self, metrics: MetricsFile) -> None:
        self._metrics = metrics
        self._means: list[tuple[int, Mapping[str, float]]] = []
        self._steps, self._seconds, self._last = 0, 0.0, -math.inf

    def note(self, step: int, epoch: float, steps: int, seconds: float, means: Mapping[str, float]) -> None:
        """Add the averages of the latest `steps` steps; write a line when it is time."""
        self._means.append((max(1, steps), means))  # what a GPU has sent late comes without steps
        self._steps, self._seconds = self._steps + steps, self._seconds + seconds
        if time.monotonic() - self._last >= EVERY_S:
            self.write(step, epoch)

    def write(self, step: int, epoch: float) -> None:
        """Write the line of what was noted since the last one, if anything was."""
        logged = [(steps, means) for steps, means in self._means if means]
        if logged:
            count = sum(steps for steps, _ in logged)
            numbers = {
                name: sum(steps * means[name] for steps, means in logged) / count for name in logged[-1][1]
            }
            rate = self._steps / self._seconds if self._seconds else 0.0
            shown = "".join(f"  {name} {value:.6g}" for name, value in numbers.items())
            terminal.out(f"step {step}{shown}  {rate:.1f} steps/s")
            kept = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
            self._metrics.add({"time": now(), "step": step, "epoch": epoch, "steps_per_s": rate, **kept})
            self._last = time.monotonic()
            self._means, self._steps, self._seconds = [], 0, 0.0

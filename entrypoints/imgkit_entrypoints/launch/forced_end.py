"""The end of a program by force: HUP, QUIT, then KILL, from a deadline on."""

from __future__ import annotations

import signal
import time

END_STEP_S = 5.0
"""Seconds between HUP, QUIT and KILL."""


class ForcedEnd:
    """The deadline of a program and the steps that follow it."""

    def __init__(self) -> None:
        self.deadline = float("inf")
        """Time of the next step, on the monotonic clock."""
        self.begun = False
        self.why = ""
        self._steps = [f"signal {int(signal.SIGHUP)}", f"signal {int(signal.SIGQUIT)}", "kill"]

    def within(self, seconds: float, why: str) -> None:
        """Begin in `seconds`, unless an earlier end is set or has begun."""
        at = time.monotonic() + seconds
        if not self.begun and at < self.deadline:
            self.deadline, self.why = at, why

    def due(self) -> bool:
        """Whether the next step is due."""
        return time.monotonic() >= self.deadline

    def step(self) -> str:
        """Take the next step; the guard's word for it."""
        self.begun = True
        step = self._steps.pop(0)
        self.deadline = time.monotonic() + END_STEP_S if self._steps else float("inf")
        return step

"""The end of a program by force, from a deadline on: HUP, QUIT, then KILL; quickly, HUP and KILL."""

from __future__ import annotations

import signal
import time

END_STEP_S = 5.0
"""Seconds between HUP, QUIT and KILL."""
QUICK_STEP_S = 2.0
"""Seconds between HUP and KILL where the program could save nothing: others of its run are gone."""
_HUP, _QUIT = (f"signal {int(number)}" for number in (signal.SIGHUP, signal.SIGQUIT))


class ForcedEnd:
    """The deadline of a program and the steps that follow it."""

    def __init__(self) -> None:
        self.deadline = float("inf")
        """Time of the next step, on the monotonic clock."""
        self.begun = False
        self.why = ""
        self._steps = [_HUP, _QUIT, "kill"]
        self._step_s = END_STEP_S

    def within(self, seconds: float, why: str) -> None:
        """Begin in `seconds`, unless an earlier end is set or has begun."""
        at = time.monotonic() + seconds
        if not self.begun and at < self.deadline:
            self.deadline, self.why = at, why

    def now(self, why: str) -> None:
        """Begin at once, and quickly; an end that has begun goes on quickly."""
        if not self.begun:
            self.why, self.deadline = why, time.monotonic()
        self._step_s, self._steps = QUICK_STEP_S, [step for step in self._steps if step != _QUIT]
        self.deadline = min(self.deadline, time.monotonic() + QUICK_STEP_S)

    def due(self) -> bool:
        """Whether the next step is due."""
        return time.monotonic() >= self.deadline

    def step(self) -> str:
        """Take the next step; the guard's word for it."""
        self.begun = True
        step = self._steps.pop(0)
        self.deadline = time.monotonic() + self._step_s if self._steps else float("inf")
        return step

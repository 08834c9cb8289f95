"""Signals that ask for a stop, and the launcher's collector for them. Standard library only.

user_program.py runs this file by path, see there. guard.py needs no list: it inherits the mask of blocked
signals from the launcher and hands it on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
REPEAT_S = 2.0
"""A signal that repeats sooner is the same one: launchers forward what the scheduler sends to all anyway."""


class CollectedSignals:
    """The stop signals that this process has received, in order."""

    def __init__(self) -> None:
        self.got: list[int] = []
        self.again = False
        """TERM or INT came a second time: the user wants the end now."""
        self._at: dict[int, float] = {}
        self._reader, self._writer = os.pipe()
        for descriptor in (self._reader, self._writer):
            os.set_blocking(descriptor, False)

    def note(self, number: int, _frame: FrameType | None) -> None:
        """Handle signal `number`."""
        now = time.monotonic()
        last = self._at.get(number)
        self._at[number] = now
        if last is None:
            self.got.append(number)
        elif now - last > REPEAT_S and number in (signal.SIGTERM, signal.SIGINT):
            self.again = True

    def first(self) -> str:
        """Name of the first signal; empty while there is none."""
        return signal.Signals(self.got[0]).name if self.got else ""

    def fileno(self) -> int:
        """Descriptor that becomes readable when a signal arrives."""
        return self._reader

    def drain(self) -> None:
        """Read away the bytes that the signals have left in the descriptor."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 4096)

    @contextlib.contextmanager
    def collecting(self) -> Iterator[CollectedSignals]:
        """Collect signals within this context; afterwards the old handlers are back."""
        before = {number: signal.signal(number, self.note) for number in STOP_SIGNALS}
        woken = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        try:
            yield self
        finally:
            signal.set_wakeup_fd(woken)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(self._reader)
            os.close(self._writer)

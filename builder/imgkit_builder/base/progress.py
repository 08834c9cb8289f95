"""How library functions report progress without printing: the verbs choose the output."""

from __future__ import annotations

from typing import Protocol


class Reporter(Protocol):
    """Receives progress; implementations are in ``cli/progress.py``."""

    def stage(self, text: str) -> None:
        """Begin a stage, for example ``squash``, and end the one before."""

    def advance(self, done_bytes: int, total_bytes: int | None = None) -> None:
        """Report the bytes done so far in this stage; called often."""

    def line(self, text: str) -> None:
        """Report one line of a tool's output."""

    def note(self, text: str) -> None:
        """Report a sentence that the user should always see."""


class Silent:
    """Reports nothing."""

    def stage(self, text: str) -> None:
        """Ignore."""

    def advance(self, done_bytes: int, total_bytes: int | None = None) -> None:
        """Ignore."""

    def line(self, text: str) -> None:
        """Ignore."""

    def note(self, text: str) -> None:
        """Ignore."""


SILENT = Silent()
"""The default of functions that report progress."""

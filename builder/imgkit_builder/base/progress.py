"""How library functions tell what they are doing, without printing: the verbs choose the shape."""

from __future__ import annotations

from typing import Protocol


class Reporter(Protocol):
    """Receives progress; implementations are in ``cli/progress.py``."""

    def stage(self, text: str) -> None:
        """A new stage begins, for example ``squash``; the one before is over."""

    def advance(self, done_bytes: int, total_bytes: int | None = None) -> None:
        """Bytes done so far in this stage; called often."""

    def line(self, text: str) -> None:
        """One line of a tool's own output."""

    def note(self, text: str) -> None:
        """A sentence the user should see, whatever the verbosity."""


class Silent:
    """Tells nobody; the default of library functions."""

    def stage(self, text: str) -> None:
        """Ignore."""

    def advance(self, done_bytes: int, total_bytes: int | None = None) -> None:
        """Ignore."""

    def line(self, text: str) -> None:
        """Ignore."""

    def note(self, text: str) -> None:
        """Ignore."""

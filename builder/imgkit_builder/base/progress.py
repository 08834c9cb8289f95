"""The interface through which library functions report progress.

The functions print nothing themselves. A verb of the command line passes them a reporter, which prints lines,
a progress bar or JSON.
"""

from __future__ import annotations

from typing import Protocol


class Reporter(Protocol):
    """Receives the progress of a function. The implementations that print it are in ``cli/progress.py``."""

    def stage(self, text: str) -> None:
        """Begin a stage, for example ``squash``. This ends the stage before it."""

    def advance(self, done_bytes: int, total_bytes: int | None = None) -> None:
        """Report how many bytes of this stage are done, and how many there are. This is called often."""

    def line(self, text: str) -> None:
        """Report one line of a tool's output."""

    def note(self, text: str) -> None:
        """Report a sentence that the user should always see."""


class Silent:
    """A reporter that ignores everything."""

    def stage(self, text: str) -> None:
        """Ignore."""

    def advance(self, done_bytes: int, total_bytes: int | None = None) -> None:
        """Ignore."""

    def line(self, text: str) -> None:
        """Ignore."""

    def note(self, text: str) -> None:
        """Ignore."""


SILENT = Silent()
"""The default value of the parameter `report` of functions that report progress."""

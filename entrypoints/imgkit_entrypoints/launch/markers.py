"""Words in a launch plan's command that stand for values which the supervisor alone knows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

PORT_PENDING = "<port from the roll call>"
"""Stands for torchrun's port: the head chooses a free one during the roll call."""
LOGS_PENDING = "<log folder of this run>"
"""Stands for a folder that the supervisor removes after the run. torchrun would leave its own behind."""


def filled(argv: Sequence[str], *, port: str, logs: Path) -> list[str]:
    """Return `argv` with the values in place of the markers."""
    values = {PORT_PENDING: port, LOGS_PENDING: str(logs)}
    return [values.get(word, word) for word in argv]

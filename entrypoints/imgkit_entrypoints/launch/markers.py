"""Words in a launch plan's command that stand for values which the supervisor alone knows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

PORT_PENDING = "<port from the roll call>"
"""Stands for torchrun's port: the head chooses a free one during the roll call."""
NNODES_PENDING = "<number of nodes of this attempt>"
"""Stands for the nodes that train, where a range or spares let attempts differ."""
NODE_RANK_PENDING = "<node rank of this attempt>"
"""Stands for this node's number among them."""
ATTEMPT_PENDING = "<attempt>"
"""Stands for the attempt's number, also within a path."""
LOGS_PENDING = "<log folder of this run>"
"""Stands for a folder that the supervisor removes after the run. torchrun would leave its own behind."""


def filled(
    argv: Sequence[str], *, attempt: int, port: int, nnodes: int, node_rank: int, logs: Path
) -> list[str]:
    """Return `argv` with the values in place of the markers."""
    values = {
        PORT_PENDING: str(port),
        NNODES_PENDING: str(nnodes),
        NODE_RANK_PENDING: str(node_rank),
        LOGS_PENDING: str(logs),
    }
    return [values.get(word, word).replace(ATTEMPT_PENDING, f"attempt{attempt}") for word in argv]

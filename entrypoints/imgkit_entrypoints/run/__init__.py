"""The run as a library: stop, save, resume and the hang watch for a training loop of one's own.

    from imgkit_entrypoints.run import Run

torch is imported at the first use of `Run`, so that this package costs nothing where nobody trains.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from imgkit_entrypoints.run.checkpoint import Checkpoint

if TYPE_CHECKING:
    from imgkit_entrypoints.run.run import Run

__all__ = ["Checkpoint", "Run"]


def __getattr__(name: str) -> Any:
    if name == "Run":
        from imgkit_entrypoints.run.run import Run

        return Run
    raise AttributeError(f"module {__name__} has no attribute {name}")

"""The run library for a custom training loop: stop, save, resume, and the watchdog for ranks that hang.

    from imgkit_entrypoints.run import Run

torch is imported at the first use of `Run`. So importing this package is fast in programs that do not train.
"""

from __future__ import annotations

from typing import Any

from imgkit_entrypoints.run.library import LibraryCheckpoint

__all__ = ["LibraryCheckpoint", "Run"]


def __getattr__(name: str) -> Any:
    if name == "Run":
        from imgkit_entrypoints.run.run import Run

        return Run
    raise AttributeError(f"module {__name__} has no attribute {name}")

"""One module per launcher: the words that start one process per node, and how that process finds its place.

`place` asks the right one. Every module is pure: environment and files come in as arguments.
"""

from __future__ import annotations

from imgkit_entrypoints.schedulers.launchers import NAMES, Scheduler, claims, unseen
from imgkit_entrypoints.schedulers.resolve import place, warnings

__all__ = ["NAMES", "Scheduler", "claims", "place", "unseen", "warnings"]

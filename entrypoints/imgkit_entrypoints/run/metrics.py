"""``metrics.jsonl`` and its neighbours in a run's folder. No torch.

A full disk does not end the run. Rank 0 alone writes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from imgkit_entrypoints import files

METRICS = "metrics.jsonl"


class MetricsFile:
    """Writes into a run's folder; tells once if that fails, as on a full disk. Without a folder, nothing."""

    def __init__(self, folder: Path | None, say: Callable[[str], None]) -> None:
        self._folder, self._say, self._failed = folder, say, False

    def write(self, write: Callable[[Path], object]) -> None:
        """Call `write` with the folder."""
        if self._folder is None:
            return
        try:
            write(self._folder)
        except OSError as error:
            if not self._failed:
                self._say(f"metrics are incomplete: {error.filename or self._folder}: {error.strerror}")
            self._failed = True

    def add(self, values: Mapping[str, Any]) -> None:
        """Append a line to the metrics."""
        text = json.dumps(values) + "\n"
        self.write(lambda folder: files.append(folder / METRICS, text.encode()))


def now() -> str:
    """Return the time of a line, UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")

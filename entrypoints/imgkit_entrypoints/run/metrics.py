"""Write ``metrics.jsonl`` and similar files into a run's folder, without importing torch.

Only rank 0 writes. A full disk does not end the run.
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
    """Writes metrics into a run's folder.

    If writing fails, for example on a full disk, only the first failure is reported, and training continues.

    Parameters
    ----------
    folder : the run's folder. If None, nothing is written.
    say : a function that receives the message about the first failure.
    """

    def __init__(self, folder: Path | None, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._say = say
        self._has_failed = False

    def write(self, write_into: Callable[[Path], object]) -> None:
        """Call `write_into` with the run's folder.

        An OSError of `write_into` is not raised. Only the first error of all calls is reported.
        """
        if self._folder is None:
            return
        try:
            write_into(self._folder)
        except OSError as error:
            if not self._has_failed:
                self._say(f"metrics are incomplete: {error.filename or self._folder}: {error.strerror}")
            self._has_failed = True

    def add(self, values: Mapping[str, Any]) -> None:
        """Append `values` to ``metrics.jsonl`` as one line of JSON."""
        line = json.dumps(values) + "\n"
        self.write(lambda folder: files.append_file(folder / METRICS, line.encode()))


def utc_timestamp() -> str:
    """Return the current time in UTC for a line of the metrics: ``2026-01-31T12:00:00+00:00``."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")

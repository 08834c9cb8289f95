"""Where the time of a start went: until the first step, in steps, and in saves.

The program notes its steps and saves in shared memory (`ProgressNotes`). The head's node agent reads these
notes after each attempt, and prints one line at the end (`StepTimer`), if the program has noted a step.
"""

from __future__ import annotations

import contextlib
import math
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from imgkit_entrypoints import files
from imgkit_entrypoints.launch.watchdog import shared

PROGRESS_FILE = "progress"
PROGRESS_LAYOUT = struct.Struct("3d")
ROUNDED_S = 100.0
"""A start of this length or more is shown in whole seconds."""


class ProgressNotes:
    """The notes, as the worker writes them. Without a node agent they go nowhere."""

    def __init__(self, folder: str | None, rank: int) -> None:
        self._notes = memoryview(bytearray(PROGRESS_LAYOUT.size)).cast("d")
        if folder and rank == 0:
            with contextlib.suppress(OSError):
                self._notes = memoryview(shared(Path(folder) / PROGRESS_FILE, PROGRESS_LAYOUT.size)).cast("d")

    def trains(self) -> None:
        """Note that a step begins."""
        if not self._notes[0]:
            self._notes[1] = time.monotonic()
            self._notes[0] = self._notes[1]  # last: from now on the notes count

    def moved(self) -> None:
        """Note that a step is done."""
        self._notes[1] = time.monotonic()

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Note the time for which training waits for a save."""
        began_s = time.monotonic()
        yield
        self._notes[1] = time.monotonic()
        self._notes[2] += self._notes[1] - began_s


def clear_progress(folder: Path) -> None:
    """Forget the notes of an earlier attempt."""
    with contextlib.suppress(OSError):
        (folder / PROGRESS_FILE).unlink(missing_ok=True)


def read_progress(folder: Path) -> tuple[float, float, float] | None:
    """Return the notes of an attempt; None before its first step, and where the program writes none.

    They are the beginning of the first step and the end of the latest step or save, both of `time.monotonic`,
    and the seconds between the two in which training waited for a save.
    """
    try:
        with files.open_regular(folder / PROGRESS_FILE) as file:
            first_s, last_s, saving_s = PROGRESS_LAYOUT.unpack(file.read(PROGRESS_LAYOUT.size))
    except (OSError, struct.error):
        return None
    notes = (first_s, last_s, saving_s)
    return notes if first_s and all(map(math.isfinite, notes)) else None


class StepTimer:
    """Adds up the notes of a start's attempts.

    Parameters
    ----------
    began_s : beginning of the start.
    """

    def __init__(self, began_s: float) -> None:
        self._began_s = self._attempt_s = began_s
        self._first_attempt_s: float | None = None
        self._parts = {"starting": 0.0, "training": 0.0, "saving": 0.0}
        self._has_steps = False

    def start_attempt(self, folder: Path) -> float:
        """Begin an attempt whose program notes its steps in `folder`; return when the first attempt began."""
        clear_progress(folder)
        now_s = time.monotonic()
        if self._first_attempt_s is None:
            self._first_attempt_s = now_s  # what came before belongs to this attempt's starting
        else:
            self._attempt_s = now_s
        return self._first_attempt_s

    def end_attempt(self, folder: Path) -> None:
        """Add the notes of the attempt."""
        notes, end_s = read_progress(folder), time.monotonic()
        if notes is None:
            return
        self._has_steps = True
        first_s, last_s, saving_s = notes
        # The program has written these numbers: none of them may make a part negative, or too long.
        first_s = min(max(first_s, self._attempt_s), end_s)
        steps_s = min(max(last_s, first_s), end_s) - first_s
        saving_s = min(max(saving_s, 0.0), steps_s)
        self._parts["starting"] += first_s - self._attempt_s
        self._parts["training"] += steps_s - saving_s
        self._parts["saving"] += saving_s

    def summary(self, nodes: int) -> str:
        """Return the line for a start on `nodes` nodes; empty if its program has noted no step."""
        if not self._has_steps:
            return ""
        total_s = time.monotonic() - self._began_s
        decimals = 0 if total_s >= ROUNDED_S else 1
        texts = (
            f"{name} {part_s:.{decimals}f} s ({100 * part_s / total_s:.0f} %)"
            for name, part_s in self._parts.items()
        )
        where = f"{nodes} node" + ("s" if nodes > 1 else "")
        return f"{total_s:.{decimals}f} s on {where}: {', '.join(texts)}"

"""Measure how the time of a run is spent: before the first step, in steps, and in saves.

The program writes notes about its steps and saves into shared memory (`ProgressNotes`). The node agent of the
head reads these notes after each attempt (`StepTimer`). If the program has recorded a step, the head prints
one line at the end.
"""

from __future__ import annotations

import contextlib
import math
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from imgkit_entrypoints import files
from imgkit_entrypoints.errors import count_text
from imgkit_entrypoints.launch.watchdog import map_shared_file

# Name of the file in the stop folder that rank 0 and the node agent share.
PROGRESS_FILE = "progress"
# Beginning of the first step and end of the latest step or save, both of time.monotonic, and the seconds
# spent in saves.
PROGRESS_LAYOUT = struct.Struct("3d")
ROUNDED_S = 100.0
"""If the whole time is at least this long, all times are shown in whole seconds."""


class ProgressNotes:
    """The notes of a worker about its steps and saves. The node agent reads only those of rank 0.

    On other ranks, without a node agent, or on a full disk, the notes stay in this process.
    """

    def __init__(self, folder: str | None, rank: int) -> None:
        self._notes = memoryview(bytearray(PROGRESS_LAYOUT.size)).cast("d")
        if folder and rank == 0:
            with contextlib.suppress(OSError):
                self._notes = memoryview(
                    map_shared_file(Path(folder) / PROGRESS_FILE, PROGRESS_LAYOUT.size)
                ).cast("d")

    def note_step_begin(self) -> None:
        """Record that a step begins."""
        if not self._notes[0]:  # it is the first step
            self._notes[1] = time.monotonic()
            # Written last, since the node agent ignores the notes while this number is 0.
            self._notes[0] = self._notes[1]

    def note_step_end(self) -> None:
        """Record that a step has ended."""
        self._notes[1] = time.monotonic()

    @contextlib.contextmanager
    def time_save(self) -> Iterator[None]:
        """Record the duration of this context as time in which training waits for a save."""
        began_s = time.monotonic()
        yield
        self._notes[1] = time.monotonic()
        self._notes[2] += self._notes[1] - began_s


class Progress(NamedTuple):
    """The notes of an attempt in shared memory (`PROGRESS_LAYOUT`)."""

    first_step_s: float
    """Beginning of the first step, on the clock `time.monotonic`."""
    last_s: float
    """End of the latest step or save, on the clock `time.monotonic`."""
    saving_s: float
    """Seconds between these two times in which training waited for a save."""


def read_progress(folder: Path) -> Progress | None:
    """Return the notes that the program has written in an attempt, from the stop folder `folder`.

    Return None if the program has not begun a step yet, or writes no notes at all.
    """
    try:
        with files.open_regular(folder / PROGRESS_FILE) as file:
            progress = Progress(*PROGRESS_LAYOUT.unpack(file.read(PROGRESS_LAYOUT.size)))
    except (OSError, struct.error):
        return None
    if not progress.first_step_s or not all(map(math.isfinite, progress)):
        return None
    return progress


def remove_notes(folder: Path) -> None:
    """Remove the notes that the program has written in an earlier attempt into the stop folder `folder`."""
    with contextlib.suppress(OSError):
        (folder / PROGRESS_FILE).unlink(missing_ok=True)


class StepTimer:
    """Adds up the time of all attempts of a run, from the notes that the program has written.

    Parameters
    ----------
    start_s : time at which the run started, on the monotonic clock.
    """

    def __init__(self, start_s: float) -> None:
        self._start_s = start_s
        self._attempt_start_s = start_s
        """Time at which the wait for a first step began: the start of the run, or of a later attempt."""
        self.first_attempt_start_s = start_s
        """Time at which the first attempt on this node began. Before that, the time of the run's start."""
        self._attempt_count = 0
        self._parts = {"starting": 0.0, "training": 0.0, "saving": 0.0}
        self._has_steps = False

    def start_attempt(self) -> None:
        """Begin to measure an attempt, after the notes of the previous one were removed (`remove_notes`)."""
        now_s = time.monotonic()
        self._attempt_count += 1
        if self._attempt_count == 1:
            # The wait for the first step counts from the start of the run, so `_attempt_start_s` stays there.
            self.first_attempt_start_s = now_s
        else:
            self._attempt_start_s = now_s

    def end_attempt(self, folder: Path) -> None:
        """Add the times of an attempt that has ended: for starting, training and saving.

        They are computed from the notes in `folder`. If the program has written none, nothing is added.
        """
        progress = read_progress(folder)
        if progress is None:
            return
        self._has_steps = True
        # The numbers come from the program and may be wrong. No number may make a part negative or too long.
        end_s = time.monotonic()
        first_s = _clamp(progress.first_step_s, self._attempt_start_s, end_s)
        last_s = _clamp(progress.last_s, first_s, end_s)
        saving_s = _clamp(progress.saving_s, 0.0, last_s - first_s)
        self._parts["starting"] += first_s - self._attempt_start_s
        self._parts["training"] += last_s - first_s - saving_s
        self._parts["saving"] += saving_s

    def summary(self, nodes: int) -> str:
        """Return one line about how the time of a run on `nodes` nodes was spent, or "" if there was no step.

        An example is ``412 s on 2 nodes: starting 31 s (8 %), training 370 s (90 %), saving 11 s (3 %)``.
        """
        if not self._has_steps:
            return ""
        total_s = time.monotonic() - self._start_s
        # Tenths of a second matter only in short runs.
        decimals = 0 if total_s >= ROUNDED_S else 1
        part_texts = []
        for name, seconds in self._parts.items():
            percent = 100 * seconds / total_s
            part_texts.append(f"{name} {seconds:.{decimals}f} s ({percent:.0f} %)")
        return f"{total_s:.{decimals}f} s on {count_text(nodes, 'node')}: {', '.join(part_texts)}"


def _clamp(value: float, low: float, high: float) -> float:
    """Return the number between `low` and `high` that is closest to `value`."""
    return min(max(value, low), high)

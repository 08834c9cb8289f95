"""How far the training of this start has come: five times that rank 0 of dist-train keeps for the launcher.

They lie in shared memory, as the places of the hang watch do: a note costs one store, and the notes of a
worker that was killed can still be read. All are times of `time.monotonic`, which a node's processes share.
"""

from __future__ import annotations

import contextlib
import math
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from imgkit_entrypoints import files
from imgkit_entrypoints.launch.hang_watch import shared

NAME = "progress"
LAYOUT = struct.Struct("5d")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The notes, as the launcher reads them."""

    first_s: float
    """Beginning of the first step of this attempt."""
    last_s: float
    """End of the latest step or save."""
    saving_s: float
    """Seconds between the two in which training waited for a save."""
    kept_s: float
    """End of the step whose state is safely written; 0: this attempt has written none."""
    kept_saving_s: float
    """`saving_s` at that time."""


class ProgressNotes:
    """The notes, as the worker writes them. Without a launcher they go nowhere."""

    def __init__(self, folder: str | None, rank: int) -> None:
        self._notes = memoryview(bytearray(LAYOUT.size)).cast("d")
        self._states: dict[int, tuple[float, float]] = {}
        if folder and rank == 0:
            with contextlib.suppress(OSError):
                self._notes = memoryview(shared(Path(folder) / NAME, LAYOUT.size)).cast("d")

    def trains(self) -> None:
        """A step begins."""
        if not self._notes[0]:
            self._notes[1] = time.monotonic()
            self._notes[0] = self._notes[1]  # last: from now on the notes count

    def moved(self) -> None:
        """A step is done."""
        self._notes[1] = time.monotonic()

    @contextlib.contextmanager
    def saving(self, step: int | None = None) -> Iterator[None]:
        """Note the time for which training waits for a save, of the state after `step`."""
        began_s = time.monotonic()
        if step is not None:
            self._states[step] = began_s, self._notes[2]
        yield
        self._notes[1] = time.monotonic()
        self._notes[2] += self._notes[1] - began_s

    def keeps(self, step: int) -> None:
        """The state after `step` is safely written."""
        self._notes[4], self._notes[3] = reversed(self._states.pop(step, (0.0, 0.0)))


def clear(folder: Path) -> None:
    """Forget the notes of an earlier attempt."""
    with contextlib.suppress(OSError):
        (folder / NAME).unlink(missing_ok=True)


def read(folder: Path) -> Progress | None:
    """Return the notes of the attempt; None before its first step, and where the program writes none."""
    try:
        with files.open_regular(folder / NAME) as file:
            found = LAYOUT.unpack(file.read(LAYOUT.size))
    except (OSError, struct.error):
        return None
    if not found[0] or not all(map(math.isfinite, found)):
        return None
    first_s, last_s, saving_s, kept_s, kept_saving_s = found
    return Progress(
        first_s=first_s, last_s=last_s, saving_s=saving_s, kept_s=kept_s, kept_saving_s=kept_saving_s
    )

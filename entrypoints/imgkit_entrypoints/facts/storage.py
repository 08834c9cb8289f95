"""How fast this node writes: for dist-doctor and the preflight only, because a launch has no time for it."""

from __future__ import annotations

import time
from pathlib import Path

from imgkit_entrypoints import files

WRITTEN_BYTES = 16 << 20
TURNS = 3
"""Files of `WRITTEN_BYTES`; the fastest counts, since a busy moment says nothing about the disk."""
ENOUGH_S = 2.0
"""Time after which no further file is written."""
_PIECE = bytes(1 << 20)


def write_MBps(folder: Path) -> float:
    """Write new files into `folder` that nobody else sees; return 1e6 bytes a second.

    The time of a file ends when it is on the disk (fsync).

    Raises
    ------
    OSError : a file cannot be written.
    """
    end, times = time.perf_counter() + ENOUGH_S, [_write_s(folder)]
    while len(times) < TURNS and time.perf_counter() < end:
        times.append(_write_s(folder))
    return WRITTEN_BYTES / min(times) / 1e6


def _write_s(folder: Path) -> float:
    path = files.temporary_name(folder / "imgkit-written")
    with files.create(path, mode=0o600) as stream:
        path.unlink()  # the space is free again even after a kill
        began = time.perf_counter()
        for _ in range(WRITTEN_BYTES // len(_PIECE)):
            stream.write(_PIECE)
        files.sync(stream)
        return time.perf_counter() - began

"""The instants of one start, from which goodput.py computes; the head keeps the result in the run's folder.

The file is written when the start begins, again and again while it runs, and at the end. So a start that is
killed is there too, without its last moments, and as if a fault had ended it then.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType

from imgkit_entrypoints import files
from imgkit_entrypoints.arguments import digits
from imgkit_entrypoints.errors import EXIT_SAVED, ImgkitError
from imgkit_entrypoints.launch import goodput, progress
from imgkit_entrypoints.launch.goodput import Attempt, CountedStart, Goodput
from imgkit_entrypoints.schedulers.placement import Placement

EVERY_S, SHARE = 60.0, 0.1
"""The file is written again after a minute, or sooner, after a tenth of the time that the start has taken."""
_LONGEST_S = 400 * 86400
"""No job is older."""


class Timekeeper:
    """Notes when what began and ended. On other nodes than the head it tells nobody."""

    def __init__(
        self,
        env: Mapping[str, str],
        place: Placement,
        say: Callable[[str], None],
        source: str,
    ) -> None:
        """Begin to count; `source` is that of `CountedStart`, or empty: nobody asks for the goodput."""
        self._say, self._job, self._source = say, place.job_id, source
        self._head = bool(source) and place.node_rank == 0
        self._folder = Path(env["IMGKIT_RUN_DIR"]) if env.get("IMGKIT_RUN_DIR") else None
        self._attempts: list[Attempt] = []
        self._notes: Path | None = None
        self._written_s, self._warned = 0.0, False
        self.nodes = place.nnodes
        """Nodes of the run, also those that wait."""
        self.code: int | None = None
        """Exit code of the start."""
        self._earlier = self._read() if self._head and self._folder else Goodput()
        now = time.time()
        self._began_at = _began(env, self._earlier, now) if self._folder else now
        self.began_s = time.monotonic() - (now - self._began_at)
        """Start of the time that is counted: the job's, or this node's own."""

    def __enter__(self) -> Timekeeper:
        self._write()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, ImgkitError):
            self.code = error.exit_code
        self._write()
        if self._head and self._attempts:
            self._say(str(self._now()))

    def attempt(self, notes: Path, nodes: int) -> float:
        """Torchrun starts on `nodes` nodes; the workers' notes of their progress will be in `notes`.

        Returns the time at which the first attempt on this node began.
        """
        progress.clear(notes)
        self._notes = notes
        began_s = time.monotonic()
        self._attempts.append(Attempt(began_s=began_s, nodes=nodes))
        return self._attempts[0].began_s

    def ended(self, code: int) -> None:
        """The attempt is over, on this node with the exit code `code`."""
        self._attempts[-1] = dataclasses.replace(
            self._latest(), ended_s=time.monotonic(), well=code in (0, EXIT_SAVED)
        )

    def refresh(self) -> None:
        """Write the file again, if it is time."""
        now_s = time.monotonic()
        due_s = min(EVERY_S, max(1.0, SHARE * (now_s - self.began_s)))
        if now_s - self._written_s >= due_s:
            self._write()

    def _latest(self) -> Attempt:
        last = self._attempts[-1]
        if self._notes is None or last.ended_s is not None:
            return last
        return dataclasses.replace(last, progress=progress.read(self._notes))

    def _now(self) -> Goodput:
        attempts = [*self._attempts[:-1], self._latest()] if self._attempts else []
        now_s = time.monotonic()
        began = datetime.fromtimestamp(self._began_at, timezone.utc).isoformat(timespec="milliseconds")
        start = CountedStart(
            job=self._job,
            began=began,
            seconds=round(now_s - self.began_s, 3),
            nodes=self.nodes,
            attempts=len(attempts),
            code=self.code,
            source=goodput.TOLD if any(one.progress for one in attempts) else self._source,
            node_s=goodput.parts(self.began_s, now_s, self.nodes, attempts),
        )
        return self._earlier.with_start(start)

    def _read(self) -> Goodput:
        """The earlier starts in the run's folder; none where their file is damaged."""
        assert self._folder is not None  # noqa: S101 - the caller has asked
        path = self._folder / goodput.FILE
        try:
            return goodput.read(path)
        except FileNotFoundError:
            return Goodput()
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            self._say(f"warning: {path} does not count: {why}; goodput is that of this start alone")
            return Goodput()

    def _write(self) -> None:
        if not self._head or self._folder is None:
            return
        self._written_s = time.monotonic()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            files.put(self._folder / goodput.FILE, self._now().to_json())
        except OSError as error:
            if not self._warned:
                self._say(f"warning: {self._folder / goodput.FILE} cannot be written: {error.strerror}")
            self._warned = True


def _began(env: Mapping[str, str], earlier: Goodput, now: float) -> float:
    """Return when the time of this start began, in seconds of the epoch.

    It is the scheduler's start of the job, where that is known, or the end of an earlier start in that job.
    """
    given = digits(env.get("SLURM_JOB_START_TIME", ""))
    if given is None or not 0 <= now - given <= _LONGEST_S:
        return now
    ends = (start.ended.timestamp() for start in earlier.starts)
    return max((float(given), *(end for end in ends if end <= now)))

"""Stop requests in a run's folder (IMGKIT_RUN_DIR), which people, job scripts and all nodes share.

A person's request is ``touch RUN_DIR/stop``: the run saves and ends with 0, nobody requeues it, and it does
not start again while the file is there. A job script touches ``stop-for-requeue`` before its time limit: the
run saves and ends with 85, and the next start clears the file. Reasons: docs/adr/0009-one-stop-file.md.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from imgkit_entrypoints import fence, files, terminal
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.launch import stop_protocol

STOP, FOR_REQUEUE = "stop", "stop-for-requeue"
RESULT = "result"
"""Name of the file that tells a job script how a run with a range or spares has ended: ``JOB_ID CODE``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequest:
    """A reason to save and end."""

    reason: str
    requeue: bool
    """The run is to go on later: it ends with 85. False: a person wants it to stay ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """A folder whose files ask a run to stop."""

    path: Path
    say: Callable[[str], None] = field(default=terminal.err, compare=False)
    """Tells the user why a file does not count, once for each."""
    _told: set[str] = field(default_factory=set, compare=False)

    @classmethod
    def of(cls, env: Mapping[str, str], say: Callable[[str], None]) -> RunFolder | None:
        """The folder that IMGKIT_RUN_DIR names, if any."""
        given = env.get("IMGKIT_RUN_DIR")
        return cls(path=Path(given), say=say) if given else None

    def stop_file(self) -> Path | None:
        """The file by which a person has asked this run to stop, and not to start."""
        return self.path / STOP if self._has(STOP) else None

    def refuse_stopped(self) -> None:
        """Raise UsageError where a person has asked the run not to start."""
        if file := self.stop_file():
            raise UsageError(
                "this file keeps the run from starting",
                where=str(file),
                hint=f"rm {shlex.quote(str(file))}",
            )

    def clear(self) -> None:
        """Remove the marks and the script's request of an earlier start.

        Raises
        ------
        UsageError : one is there and cannot be removed.
        """
        for name in (FOR_REQUEUE, stop_protocol.SAVED, RESULT, fence.FILE):
            try:
                (self.path / name).unlink(missing_ok=True)
            except OSError as error:
                if not self._has(name):
                    continue  # what does not count may stay
                raise UsageError(
                    f"the marks of an earlier run cannot be removed: {error.strerror}",
                    where=f"IMGKIT_RUN_DIR: {error.filename}",
                    hint="name a writable folder that all nodes share",
                ) from error

    def request(self) -> StopRequest | None:
        """The request that is there now; of two, the one of a person counts."""
        for name in (STOP, FOR_REQUEUE):
            if self._has(name):
                return StopRequest(reason=str(self.path / name), requeue=name == FOR_REQUEUE)
        return None

    def _has(self, name: str) -> bool:
        try:
            why = files.foreign(self.path / name)
        except OSError:  # also where a network disk fails
            return False
        if why and name not in self._told:
            self._told.add(name)
            self.say(f"warning: {self.path / name} does not count: {why}")
        return not why

    def hand_on(self, stop_folder: Path) -> None:
        """Copy the mark of a saved state from a node's stop folder to here, whole or not at all.

        A scheduler's exit code does not tell a job script that the state was saved: Slurm reports the code of
        a task that it has killed.

        Raises
        ------
        OSError : the mark cannot be read or written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        files.put(self.path / stop_protocol.SAVED, files.read_own(stop_folder / stop_protocol.SAVED))

    def end(self, job_id: str, code: int) -> None:
        """Leave the exit code of the whole run.

        Raises
        ------
        OSError : it cannot be written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        files.put(self.path / RESULT, f"{job_id} {code}\n")

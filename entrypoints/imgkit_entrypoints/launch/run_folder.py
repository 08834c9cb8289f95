"""Stop requests in a run's folder (IMGKIT_RUN_DIR), which people, job scripts and all nodes share.

A person's request is ``touch RUN_DIR/stop``: the run saves and ends with 0, nobody requeues it, and it does
not start again while the file is there. A job script touches ``stop-for-requeue`` before its time limit: the
run saves and ends with 85, and the next start clears the file. Reasons: docs/adr/0009-one-stop-file.md.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from imgkit_entrypoints import fence, files
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.launch import stop_protocol

STOP, FOR_REQUEUE = "stop", "stop-for-requeue"
RESULT = "result"
"""Name of the file that tells a job script how a run with a range or spares has ended: ``JOB_ID CODE``."""
OLD_STOP = "STOP"
"""Name of a person's request to dist-train of imgkit 0.1."""
SCRIPT_SPEAKS = "IMGKIT_STOP_FILES"
"""Variable of a job script that uses `FOR_REQUEUE`. The Slurm script of imgkit 0.1 asks by `STOP`."""


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
    old_script: bool = False
    """The job script is of imgkit 0.1, whose request for a requeue is a file `stop`."""
    say: Callable[[str], None] = field(default=print, compare=False)
    """Tells the user why a file does not count, once for each."""
    _told: set[str] = field(default_factory=set, compare=False)

    @classmethod
    def of(cls, env: Mapping[str, str], say: Callable[[str], None]) -> RunFolder | None:
        """The folder that IMGKIT_RUN_DIR names, if any."""
        given, job = env.get("IMGKIT_RUN_DIR"), env.get("SLURM_JOB_ID")
        if not given:
            return None
        # That script calls the folder so; a folder that somebody chose by hand has another name.
        by_script = bool(job) and Path(given).name.endswith(f"-{job}")
        return cls(path=Path(given), old_script=by_script and SCRIPT_SPEAKS not in env, say=say)

    def stop_file(self) -> Path | None:
        """The file by which a person has asked this run to stop, and not to start."""
        # In this order: on a disk that ignores case, the new name finds both.
        names = (OLD_STOP,) if self.old_script else (STOP, OLD_STOP)
        return next((self.path / name for name in names if self._has(name)), None)

    def refuse_stopped(self) -> None:
        """Raise UsageError where a person has asked the run not to start."""
        if file := self.stop_file():
            old = f" ({OLD_STOP} is the old name of the file `{STOP}`)" if file.name == OLD_STOP else ""
            raise UsageError(
                "this file keeps the run from starting",
                where=str(file),
                hint=f"rm {shlex.quote(str(file))}{old}",
            )

    def clear(self) -> None:
        """Remove the marks and the script's request of an earlier start.

        Raises
        ------
        UsageError : one is there and cannot be removed.
        """
        of_script = (STOP,) if self.old_script else ()
        for name in (FOR_REQUEUE, stop_protocol.SAVED, RESULT, fence.FILE, *of_script):
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
        """The request that is there now; the script's goes first, since it may have made both files."""
        person = self.stop_file()  # looked for first: the script makes its own file before `stop`
        for name in (FOR_REQUEUE, *((STOP,) if self.old_script else ())):
            if self._has(name):
                return StopRequest(reason=str(self.path / name), requeue=True)
        return StopRequest(reason=str(person), requeue=False) if person else None

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


def warning(file: str) -> str:
    """Return the warning about a request by the file's old name; empty for others."""
    if os.path.basename(file) != OLD_STOP:  # noqa: PTH119 - it comes as text
        return ""
    return f"warning: {file}: {OLD_STOP} is the old name of this file, use `{STOP}`"

"""How a run is stopped: signals, files in the run's folder, and the protocol between node agent and program.

**The program's side** is two files in ``IMGKIT_STOP_DIR``, a node's folder. The node agent makes ``stop``
when the program should save and end; its one line is the reason. A program that has saved writes
``state-saved`` with one line ``JOB_ID STEP`` (the job id is in ``IMGKIT_JOB_ID``) and exits with 0. The
node agent then exits with 85, "requeue me", or with 0 if a person requested it. At a step boundary::

    stop, job = Path(os.environ["IMGKIT_STOP_DIR"]), os.environ["IMGKIT_JOB_ID"]
    if (stop / "stop").exists():
        save(step)
        (stop / "state-saved").write_text(f"{job} {step}")
        sys.exit(0)

Ranks see the file at slightly different times, so they must agree on the step by an all-reduce first.

**Requests** come as signals (`CollectedSignals`) or as files in the run's folder (IMGKIT_RUN_DIR,
`RunFolder`), which people, job scripts and all nodes share. A person's request is ``touch RUN_DIR/stop``:
the run saves and ends with 0, nobody requeues it, and it does not start again while the file is there. A
job script touches ``stop-for-requeue`` before its time limit: the run saves and ends with 85, and the
next start clears the file. Reasons: docs/adr/0009-one-stop-file.md.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from imgkit_entrypoints import fence, files, terminal
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.launch import failures
from imgkit_entrypoints.launch.user_program import STOP_SIGNALS

STOP, SAVED = "stop", "state-saved"
PHASE = "torchrun"
"""How far torchrun is (start_up.py); no part of the protocol."""
LOCAL_JOB = "local"
"""Value of IMGKIT_JOB_ID if no scheduler gave one."""


@contextlib.contextmanager
def folder(wanted: Path | None, node_rank: int) -> Iterator[Path]:
    """Yield this node's stop folder without old marks; a temporary one is removed at the end.

    Raises
    ------
    UsageError : the folder cannot be written.
    """
    try:
        # A container may have a read-only root without /tmp.
        made = _first_writable((None, "/dev/shm", os.curdir)) if wanted is None else None  # noqa: S108
        # `wanted` may lie on a file system that all nodes share.
        place = made or (wanted or Path()) / f"node{node_rank}"
        if made is None:
            files.make_own_folder(place)
        clear(place)
    except OSError as error:
        raise UsageError(
            f"the stop folder cannot be used: {error.strerror}",
            where=str(error.filename or wanted),
            hint="name a writable folder of this node in IMGKIT_STOP_DIR, or set TMPDIR",
        ) from error
    try:
        yield place
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)


def clear(place: Path) -> None:
    """Remove the marks of an earlier run.

    Raises
    ------
    OSError : a mark cannot be removed.
    """
    for name in (STOP, SAVED, PHASE):
        (place / name).unlink(missing_ok=True)
    failures.clear(place)


def _first_writable(places: tuple[str | None, ...]) -> Path:
    last: OSError | None = None
    for place in places:
        try:
            return Path(tempfile.mkdtemp(prefix="imgkit-stop-", dir=place)).absolute()
        except OSError as error:
            last = error
    assert last is not None  # noqa: S101 - places is not empty
    raise last


def raise_flag(place: Path, reason: str) -> None:
    """Ask the program to save and end."""
    with contextlib.suppress(OSError):
        files.put(place / STOP, f"{reason}\n")


def saved_step(place: Path, job_id: str) -> tuple[str | None, str]:
    """Return the step that this job's program has saved, or None, and why an existing mark does not count."""
    try:
        words = files.read_own(place / SAVED).split()
    except FileNotFoundError:
        return None, ""
    except OSError as error:
        return None, f"{place / SAVED} is ignored: {error.strerror}"
    except UnicodeDecodeError as error:
        return None, f"{place / SAVED} cannot be read: {error}"
    if words[:1] != [job_id]:
        found = words[0] if words else "nothing"
        return None, f"{place / SAVED} names job {found}, not {job_id} (IMGKIT_JOB_ID), so it is ignored"
    return (words[1] if len(words) > 1 else "?"), ""


BY_PERSON, FOR_REQUEUE = "stop", "stop-for-requeue"
RESULT = "result"
"""Name of the file that says how a run has ended: ``JOB_ID CODE``."""


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
        return self.path / BY_PERSON if self._has(BY_PERSON) else None

    def refuse_stopped(self) -> None:
        """Raise UsageError where a person has asked the run not to start."""
        if file := self.stop_file():
            raise UsageError(
                "this file prevents the run from starting",
                where=str(file),
                hint=f"rm {shlex.quote(str(file))}",
            )

    def refuse_unusable(self) -> None:
        """Raise UsageError where a run cannot write the folder, before its workers start."""
        where, hint = f"IMGKIT_RUN_DIR: {self.path}", "name a writable folder that all nodes share"
        files.refuse_unusable_folder(self.path, "run folder", where=where, hint=hint)

    def clear(self) -> None:
        """Remove the marks and the script's request of an earlier start.

        Raises
        ------
        UsageError : one is there and cannot be removed.
        """
        for name in (FOR_REQUEUE, SAVED, RESULT, fence.FILE):
            try:
                (self.path / name).unlink(missing_ok=True)
            except OSError as error:
                if not self._has(name):
                    continue  # what does not count may stay
                raise UsageError(
                    f"files of an earlier run cannot be removed: {error.strerror}",
                    where=f"IMGKIT_RUN_DIR: {error.filename}",
                    hint="name a writable folder that all nodes share",
                ) from error

    def request(self) -> StopRequest | None:
        """The request that is there now; of two, the one of a person counts."""
        for name in (BY_PERSON, FOR_REQUEUE):
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
            self.say(f"warning: {self.path / name} is ignored: {why}")
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
        files.put(self.path / SAVED, files.read_own(stop_folder / SAVED))

    def last_change_s(self) -> float:
        """Return when an earlier start has last written here, in seconds of the epoch; 0: it has not."""
        times = [0.0]
        for name in (RESULT, fence.FILE):
            with contextlib.suppress(OSError):
                times.append((self.path / name).lstat().st_mtime)
        return max(times)

    def end(self, job_id: str, code: int) -> None:
        """Leave the exit code of the whole run.

        Raises
        ------
        OSError : it cannot be written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        files.put(self.path / RESULT, f"{job_id} {code}\n")


def result_code(text: str) -> int | None:
    """Return the exit code in the text of a run folder's `RESULT`; None where the text is another one."""
    match = re.fullmatch(r"\S+ ([0-9]{1,3})\n?", text, re.ASCII)
    return int(match[1]) if match else None


REPEAT_S = 2.0
"""A signal that repeats sooner is the same one: launchers forward what the scheduler sends to all anyway."""


class CollectedSignals:
    """The stop signals that this process has received, in order."""

    def __init__(self) -> None:
        self.got: list[int] = []
        self.again = False
        """TERM or INT came a second time: the user wants the end now."""
        self._at: dict[int, float] = {}
        self._reader, self._writer = os.pipe()
        for descriptor in (self._reader, self._writer):
            os.set_blocking(descriptor, False)

    def note(self, number: int, _frame: FrameType | None) -> None:
        """Handle signal `number`."""
        now = time.monotonic()
        last = self._at.get(number)
        self._at[number] = now
        if last is None:
            self.got.append(number)
        elif now - last > REPEAT_S and number in (signal.SIGTERM, signal.SIGINT):
            self.again = True

    def first(self) -> str:
        """Name of the first signal; empty while there is none."""
        return signal.Signals(self.got[0]).name if self.got else ""

    def fileno(self) -> int:
        """Descriptor that becomes readable when a signal arrives."""
        return self._reader

    def drain(self) -> None:
        """Read away the bytes that the signals have left in the descriptor."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 4096)

    @contextlib.contextmanager
    def collecting(self) -> Iterator[CollectedSignals]:
        """Collect signals within this context; afterwards the old handlers are back."""
        before = {number: signal.signal(number, self.note) for number in STOP_SIGNALS}
        woken = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        try:
            yield self
        finally:
            signal.set_wakeup_fd(woken)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(self._reader)
            os.close(self._writer)

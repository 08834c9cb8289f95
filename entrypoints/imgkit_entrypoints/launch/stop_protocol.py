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
next start clears the file. A run with a new state leaves ``requeue``, upon which the script requeues the
job. Reasons: docs/adr/0009-one-stop-file.md.
"""

from __future__ import annotations

import contextlib
import fcntl
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
from imgkit_entrypoints.errors import EXIT_SAVED, UsageError
from imgkit_entrypoints.launch import failures
from imgkit_entrypoints.launch.per_node import RAY_PREFIX
from imgkit_entrypoints.launch.user_program import STOP_SIGNALS

STOP, SAVED = "stop", "state-saved"
PHASE, RELEASE = "torchrun", "others-have-ended"
"""How far torchrun is (start_up.py), and whether the head's may leave; no part of the protocol."""
LOST_OUTPUT = "lost-output"
"""Why torchrun could not print the output of its workers; no part of the protocol."""
TEMPORARY = "imgkit-stop-"
"""How the name of a temporary stop folder begins."""
LOCK, NEW_S = "lock", 60.0
"""File that the node agent locks in it, and seconds in which a folder may not be locked yet."""
LOCAL_JOB = "local"
"""Value of IMGKIT_JOB_ID if no scheduler gave one."""


@contextlib.contextmanager
def folder(parent: Path | None, node_rank: int) -> Iterator[Path]:
    """Yield this node's stop folder without old marks; without `parent`, a temporary one.

    Raises
    ------
    UsageError : the folder cannot be written.
    """
    with contextlib.ExitStack() as stack:
        try:
            if parent is None:
                path = _temporary_folder()
                stack.enter_context(locked_folder(path))
                _remove_abandoned(path.parent)
            else:  # it may lie on a file system that all nodes share
                path = parent / f"node{node_rank}"
                files.make_own_folder(path)
            clear(path)
        except OSError as error:
            raise UsageError(
                f"the stop folder cannot be used: {error.strerror}",
                where=str(error.filename or parent),
                hint="name a writable folder of this node in IMGKIT_STOP_DIR, or set TMPDIR",
            ) from error
        yield path


@contextlib.contextmanager
def locked_folder(path: Path) -> Iterator[None]:
    """Make a folder of this user unless it is there, lock it, and remove it afterwards.

    Nodes that share the file system share the folder, which the first of them locks. A later start of this
    user removes a folder whose lock nobody holds, since its node agent was killed.

    Raises
    ------
    OSError : it cannot be made, or belongs to another user.
    """
    files.make_own_folder(path)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(FileExistsError):
            lock = stack.enter_context(files.create_file(path / LOCK))
            with contextlib.suppress(OSError):  # a file system without locks: nobody removes the folder then
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            yield
        finally:
            shutil.rmtree(path, ignore_errors=True)


def _temporary_folder() -> Path:
    last: OSError | None = None
    for parent in (None, "/dev/shm", os.curdir):  # noqa: S108 - a container may have a read-only root without /tmp
        try:
            return Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=parent)).absolute()
        except OSError as error:
            last = error
    assert last is not None  # noqa: S101 - the loop has run
    raise last


def _remove_abandoned(parent: Path) -> None:
    """Remove the stop folders of this user's node agents that were killed.

    Slurm kills all processes of a cancelled job that hangs, so nobody can remove its folder at once.
    """
    for path in (*parent.glob(f"{TEMPORARY}*"), *parent.glob(f"{RAY_PREFIX}*")):
        try:
            with files.open_own(path / LOCK) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                age_s = time.time() - os.fstat(lock.fileno()).st_mtime
        except OSError:  # in use, of another user, or of an imgkit without locks
            continue
        if age_s > NEW_S and not files.foreign_folder_reason(path):
            shutil.rmtree(path, ignore_errors=True)


def clear(stop_folder: Path) -> None:
    """Remove the marks of an earlier run.

    Raises
    ------
    OSError : a mark cannot be removed.
    """
    for name in (STOP, SAVED, PHASE, RELEASE, LOST_OUTPUT):
        (stop_folder / name).unlink(missing_ok=True)
    failures.clear(stop_folder)


def raise_flag(stop_folder: Path, reason: str) -> None:
    """Ask the program to save and end."""
    with contextlib.suppress(OSError):
        files.write_file(stop_folder / STOP, f"{reason}\n")


def release(stop_folder: Path) -> None:
    """Let torchrun of the head leave, whose store the workers of other nodes have used until now."""
    if not (stop_folder / RELEASE).exists():
        with contextlib.suppress(OSError):
            files.write_file(stop_folder / RELEASE, "")


def lost_output(stop_folder: Path) -> str:
    """Return why torchrun could not print the output of its workers; empty if all of it is printed."""
    try:
        return files.read_text(stop_folder / LOST_OUTPUT)
    except (OSError, UnicodeDecodeError):
        return ""


def saved_step(stop_folder: Path, job_id: str) -> tuple[str | None, str]:
    """Return the step that this job's program has saved, or None, and why an existing mark does not count."""
    mark = stop_folder / SAVED
    try:
        job, *steps = files.read_own(mark).split() or ["nothing"]
    except FileNotFoundError:
        return None, ""
    except OSError as error:
        return None, f"{mark} is ignored: {error.strerror}"
    except UnicodeDecodeError as error:
        return None, f"{mark} cannot be read: {error}"
    if job != job_id:
        return None, f"{mark} names job {job}, not {job_id} (IMGKIT_JOB_ID), so it is ignored"
    return (steps[0] if steps else "?"), ""


BY_PERSON, FOR_REQUEUE = "stop", "stop-for-requeue"
RESULT = "result"
"""Name of the file that says how a run has ended: ``JOB_ID CODE``."""
GPU_USE = "gpu-use.json"
"""Name of the file that says how much the GPUs of all nodes were used until now (gpu_use.py)."""
REQUEUE = "requeue"
"""Name of the file upon which the job script requeues the job."""
REQUEUED = "requeued"
"""Name of the file with the state of the last requeue: ``JOB_ID STEP``."""


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
    say: Callable[[str], None] = field(default=terminal.print_messages, compare=False)
    """Takes the reason why a file does not count, once for each."""
    _reported: set[str] = field(default_factory=set, compare=False)

    @classmethod
    def of(cls, env: Mapping[str, str], say: Callable[[str], None]) -> RunFolder | None:
        """Return the folder that IMGKIT_RUN_DIR names, if any."""
        path = env.get("IMGKIT_RUN_DIR")
        return cls(path=Path(path), say=say) if path else None

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
        """Remove the files of an earlier start, by which script and run talk to each other.

        Raises
        ------
        UsageError : one is there and cannot be removed.
        """
        for name in (FOR_REQUEUE, REQUEUE, RESULT, GPU_USE, fence.FILE):
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
        """Return the request that is there now; of two, the one of a person counts."""
        for name in (BY_PERSON, FOR_REQUEUE):
            if self._has(name):
                return StopRequest(reason=str(self.path / name), requeue=name == FOR_REQUEUE)
        return None

    def _has(self, name: str) -> bool:
        try:
            problem = files.foreign_file_reason(self.path / name)
        except OSError:  # also where a network disk fails
            return False
        if problem and name not in self._reported:
            self._reported.add(name)
            self.say(f"warning: {self.path / name} is ignored: {problem}")
        return not problem

    def write(self, name: str, text: str) -> None:
        """Write a file for people and for the job script.

        Raises
        ------
        OSError : it cannot be written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        files.write_file(self.path / name, text)

    def request_requeue(self, state: str) -> int:
        """Ask the job script to requeue the job, and return the exit code of the run, whose state is saved.

        A job whose last requeue had the same state makes no progress: it is not requeued again. Neither is
        one that a person has asked to stop; its exit code is 0.

        Parameters
        ----------
        state : job id and step of the saved state: ``4711.0 300``.

        Raises
        ------
        OSError : the request cannot be written.
        """
        file = self.stop_file()
        if file:
            self.say(f"state saved ({state}), not requeued: {file} prevents the run from starting")
            return 0
        if state == self._last_requeued_state():
            self.say(f"state saved ({state}) where it was at the last start: not requeued")
            return EXIT_SAVED
        self.write(REQUEUED, f"{state}\n")
        self.write(REQUEUE, "")
        return EXIT_SAVED

    def _last_requeued_state(self) -> str:
        """Return the state of the last requeue; empty if there was none."""
        try:
            return files.read_own(self.path / REQUEUED).strip()
        except (OSError, UnicodeDecodeError):
            return ""

    def last_change_s(self) -> float:
        """Return when an earlier start has last written here, in seconds of the epoch; 0: it has not."""
        latest = 0.0
        for name in (RESULT, fence.FILE):
            with contextlib.suppress(OSError):
                latest = max(latest, (self.path / name).lstat().st_mtime)
        return latest


def result_code(text: str) -> int | None:
    """Return the exit code in the text of a run folder's `RESULT`; None where the text is another one."""
    match = re.fullmatch(r"\S+ ([0-9]{1,3})\n?", text, re.ASCII)
    return int(match[1]) if match else None


REPEAT_S = 2.0
"""A signal that repeats sooner is the same one: launchers forward what the scheduler sends to all anyway."""


class CollectedSignals:
    """The stop signals that this process has received, in order."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.is_repeated = False
        """TERM or INT came a second time: the user wants the end now."""
        self._last: dict[int, float] = {}
        self._reader, self._writer = os.pipe()
        for descriptor in (self._reader, self._writer):
            os.set_blocking(descriptor, False)

    def note(self, number: int, _frame: FrameType | None) -> None:
        """Handle signal `number`."""
        now = time.monotonic()
        last = self._last.get(number)
        self._last[number] = now
        if last is None:
            self.received.append(number)
        elif now - last > REPEAT_S and number in (signal.SIGTERM, signal.SIGINT):
            self.is_repeated = True

    def first(self) -> str:
        """Return the name of the first signal; empty while there is none."""
        return signal.Signals(self.received[0]).name if self.received else ""

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when a signal arrives."""
        return self._reader

    def drain(self) -> None:
        """Read away the bytes that the signals have left in the descriptor."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 4096)

    @contextlib.contextmanager
    def collecting(self) -> Iterator[CollectedSignals]:
        """Collect signals within this context, and ignore them afterwards.

        srun ends the other tasks by TERM when the first one has ended: a process that is about to leave keeps
        its own exit code.
        """
        for number in STOP_SIGNALS:
            signal.signal(number, self.note)
        wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        try:
            yield self
        finally:
            signal.set_wakeup_fd(wakeup)
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            os.close(self._reader)
            os.close(self._writer)

"""How a run is stopped: signals, files in the run's folder, and the protocol between node agent and program.

**The program** uses two files in the node's stop folder, whose path is in ``IMGKIT_STOP_DIR``. The node agent
creates the file ``stop`` when the program should save and end. Its only line is the reason. After saving, the
program writes the file ``state-saved`` with one line ``JOB_ID STEP``, and exits with 0. The job id is in
``IMGKIT_JOB_ID``. The node agent then exits with 85 ("requeue me"), or with 0 if a person requested the stop.
The program runs this code between two steps::

    stop, job = Path(os.environ["IMGKIT_STOP_DIR"]), os.environ["IMGKIT_JOB_ID"]
    if (stop / "stop").exists():
        save(step)
        (stop / "state-saved").write_text(f"{job} {step}")
        sys.exit(0)

Ranks see the file at slightly different times. So they must first agree on the step, with an all-reduce.

**Requests to stop** are signals (`CollectedSignals`) or files in the run's folder (IMGKIT_RUN_DIR,
`RunFolder`), which people, job scripts and all nodes share:

* A person types ``touch RUN_DIR/stop``. The run saves, ends with 0 and is not requeued. It does not start
  again as long as the file exists.
* A job script creates ``stop-for-requeue`` before its time limit. The run saves and ends with 85. The next
  start removes the file.

If a run has saved a new state, it creates the file ``requeue``, and the job script then requeues the job. The
reasons for this protocol are in docs/adr/0009-one-stop-file.md.
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
from typing import BinaryIO

from imgkit_entrypoints import fence, files, terminal
from imgkit_entrypoints.errors import EXIT_SAVED, UsageError
from imgkit_entrypoints.launch import failures
from imgkit_entrypoints.launch.per_node import RAY_PREFIX
from imgkit_entrypoints.launch.user_program import STOP_SIGNALS

STOP = "stop"
"""File of the protocol in a stop folder that asks the program to save and end."""
SAVED = "state-saved"
"""File of the protocol in a stop folder that says what the program has saved."""
PHASE = "torchrun"
"""File in a stop folder with the phase of torchrun (start_up.py). It is not part of the protocol."""
RELEASE = "others-have-ended"
"""File in a stop folder that lets the head's torchrun exit. It is not part of the protocol."""
LOST_OUTPUT = "lost-output"
"""File with the reason why torchrun could not print its workers' output. It is not part of the protocol."""
TEMPORARY = "imgkit-stop-"
"""Prefix of the name of a temporary stop folder."""
LOCK = "lock"
"""File that the node agent locks in a temporary folder."""
NEW_S = 60.0
"""Age in seconds from which a temporary folder without a lock is abandoned. A start locks it much sooner."""
LOCAL_JOB = "local"
"""Value of IMGKIT_JOB_ID if no scheduler gave a job id."""


@contextlib.contextmanager
def use_stop_folder(parent: str, node_rank: int) -> Iterator[Path]:
    """Yield the stop folder of this node, without files of an earlier run.

    In the stop folder, the node agent asks the program to stop, and the program says what it has saved. The
    folder is ``PARENT/nodeRANK``, because all nodes may share the file system of `parent`. If `parent` is
    empty, the folder is a temporary one, which is removed at the end of the context.

    Raises
    ------
    UsageError : the folder cannot be written.
    """
    with contextlib.ExitStack() as stack:
        try:
            if parent:
                path = Path(parent, f"node{node_rank}")
                files.make_own_folder(path)
            else:
                path = _temporary_folder()
                # The own folder is locked first, so that another start does not take it for an abandoned one.
                stack.enter_context(locked_folder(path))
                _remove_abandoned(path.parent)
            clear_stop_folder(path)
        except OSError as error:
            raise UsageError(
                f"the stop folder cannot be used: {error.strerror}",
                where=str(error.filename or parent),
                hint="name a writable folder of this node in IMGKIT_STOP_DIR, or set TMPDIR",
            ) from error
        yield path


@contextlib.contextmanager
def locked_folder(path: Path) -> Iterator[None]:
    """Create a private folder, lock it while the context lasts, and remove it at the end.

    The lock shows that the folder is in use. If a node agent is killed, its lock is released, and a later
    start by this user removes the folder (`_remove_abandoned`).

    If `path` exists already, because several nodes of the run share the file system, the nodes share the
    folder, and only the first of them holds the lock. The contexts last until the end of the run, when no
    node needs the folder any more. So whichever node ends first may remove it.

    Raises
    ------
    OSError : the folder cannot be made, or belongs to another user.
    """
    files.make_own_folder(path)
    lock = _create_lock(path / LOCK)
    try:
        yield
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if lock:
            lock.close()


def _create_lock(path: Path) -> BinaryIO | None:
    """Create the lock file `path`, and return it with a lock. Return None if another node has created it.

    Some file systems have no locks. The file is then returned without one, and the folder of a killed node
    agent stays there.
    """
    try:
        lock = files.create_file(path)
    except FileExistsError:
        return None
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return lock


def _temporary_folder() -> Path:
    """Create a temporary folder, and return its path.

    Its parent is the first folder that can be written: the usual one for temporary files, /dev/shm, or the
    current folder.

    Raises
    ------
    OSError : none of them can be written.
    """
    for parent in (None, "/dev/shm"):  # noqa: S108 - a container may have a read-only root without /tmp
        with contextlib.suppress(OSError):
            return Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=parent)).absolute()
    return Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=os.curdir)).absolute()


def _remove_abandoned(parent: Path) -> None:
    """Remove stop folders and Ray folders in `parent` that killed node agents of this user have left.

    When Slurm cancels a job that hangs, it kills all processes. The node agent then cannot remove its folder
    itself.
    """
    for path in (*parent.glob(f"{TEMPORARY}*"), *parent.glob(f"{RAY_PREFIX}*")):
        try:
            with files.open_own(path / LOCK) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while a node agent uses the folder
                age_s = time.time() - os.fstat(lock.fileno()).st_mtime
        except OSError:  # in use, another user's folder, or a folder of an imgkit without locks
            continue
        # Another start creates its folder before it locks it, so a new folder without a lock may be in use.
        if age_s > NEW_S and not files.is_foreign_folder(path):
            shutil.rmtree(path, ignore_errors=True)


def clear_stop_folder(stop_folder: Path) -> None:
    """Remove the files of an earlier run or attempt from the stop folder.

    Otherwise the program would take an old stop request for a new one.

    Raises
    ------
    OSError : a file cannot be removed.
    """
    for name in (STOP, SAVED, PHASE, RELEASE, LOST_OUTPUT):
        (stop_folder / name).unlink(missing_ok=True)
    failures.clear_records(stop_folder)


def write_stop_file(stop_folder: Path, reason: str) -> None:
    """Create the file ``stop``, which asks the program to save and end. Its content is `reason`."""
    with contextlib.suppress(OSError):
        files.write_file(stop_folder / STOP, f"{reason}\n")


def release_torchrun(stop_folder: Path) -> None:
    """Allow the torchrun of the head to exit.

    That torchrun serves the store, which workers of other nodes use until they end. So it waits for the file
    that this function creates.
    """
    if not (stop_folder / RELEASE).exists():
        with contextlib.suppress(OSError):
            files.write_file(stop_folder / RELEASE, "")


def lost_output_reason(stop_folder: Path) -> str:
    """Return why torchrun could not print the output of its workers, or "" if it has printed everything."""
    try:
        return files.read_text(stop_folder / LOST_OUTPUT)
    except (OSError, UnicodeDecodeError):
        return ""


def read_saved_step(stop_folder: Path, job_id: str) -> tuple[str | None, str]:
    """Return the step that the program has saved, and a message about a problem with the record of it.

    The record is the file ``state-saved``, which contains the job id and the step, such as ``4711.0 300``.
    The step is None if nothing was saved, and ``?`` if the file names no step. The message is "" if there is
    no problem. A problem is, for example, a file that another job has left.
    """
    path = stop_folder / SAVED
    try:
        fields = files.read_own(path).split()  # "4711.0 300"
    except FileNotFoundError:
        return None, ""
    except OSError as error:
        return None, f"{path} is ignored: {error.strerror}"
    except UnicodeDecodeError as error:
        return None, f"{path} cannot be read: {error}"
    # Another job may have left the file in the same folder. Its state would be counted as this run's.
    saved_job = fields[0] if fields else "nothing"
    if saved_job != job_id:
        return None, f"{path} names job {saved_job}, not {job_id} (IMGKIT_JOB_ID), so it is ignored"
    if len(fields) == 1:
        return "?", ""
    return fields[1], ""


BY_PERSON = "stop"
"""Name of the file in the run's folder by which a person asks the run to stop, and never to start again."""
FOR_REQUEUE = "stop-for-requeue"
"""Name of the file in the run's folder by which a job script asks the run to stop before its time limit."""
RESULT = "result"
"""Name of the file with the exit code of the run: ``JOB_ID CODE``."""
GPU_USE = "gpu-use.json"
"""Name of the file with the use of the GPUs of all nodes so far (gpu_use.py)."""
REQUEUE = "requeue"
"""Name of the file that tells the job script to requeue the job."""
REQUEUED = "requeued"
"""Name of the file with the saved state at the last requeue: ``JOB_ID STEP``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequest:
    """A request to save and end."""

    reason: str
    """The source of the request: the name of a signal or the path of a file."""
    requeue: bool
    """True if the job should be requeued, so that the run continues later. The exit code is then 85.

    False if a person has ended the run for good.
    """

    def takes_precedence(self, previous: StopRequest | None) -> bool:
        """Return whether this request replaces `previous`, which is None if there was none.

        After a request for a requeue, only a person's request counts, because the job must then not start
        again.
        """
        return previous is None or (previous.requeue and not self.requeue)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """The run's folder, in which the run, the job script and people leave files for each other."""

    path: Path
    log: Callable[[str], None] = field(default=terminal.print_messages, compare=False)
    """Prints messages, such as the reason why a file is ignored."""
    _reported: set[str] = field(default_factory=set, compare=False)

    @classmethod
    def from_env(cls, env: Mapping[str, str], log: Callable[[str], None]) -> RunFolder | None:
        """Return the folder that IMGKIT_RUN_DIR names, or None if the variable is not set."""
        path = env.get("IMGKIT_RUN_DIR")
        return cls(path=Path(path), log=log) if path else None

    def stop_file(self) -> Path | None:
        """Return the path of a person's stop file, or None if there is none.

        A person creates this file to make the run stop, or to keep it from starting.
        """
        return self.path / BY_PERSON if self._has_own_file(BY_PERSON) else None

    def refuse_if_stopped(self) -> None:
        """Raise UsageError if a person's stop file forbids the run to start."""
        file = self.stop_file()
        if file:
            raise UsageError(
                "this file prevents the run from starting",
                where=str(file),
                hint=f"rm {shlex.quote(str(file))}",
            )

    def refuse_if_unusable(self) -> None:
        """Raise UsageError if the run cannot write into the folder. Called before the workers start."""
        where, hint = f"IMGKIT_RUN_DIR: {self.path}", "name a writable folder that all nodes share"
        files.refuse_unusable_folder(self.path, "run folder", where=where, hint=hint)

    def clear(self) -> None:
        """Remove the files that an earlier start of this run and its job script have left.

        A file of another user may stay, because such files are ignored anyway.

        Raises
        ------
        UsageError : a file of this user cannot be removed.
        """
        for name in (FOR_REQUEUE, REQUEUE, RESULT, GPU_USE, fence.ATTEMPT_FILE):
            try:
                (self.path / name).unlink(missing_ok=True)
            except OSError as error:
                if not self._has_own_file(name):
                    continue
                raise UsageError(
                    f"files of an earlier run cannot be removed: {error.strerror}",
                    where=f"IMGKIT_RUN_DIR: {error.filename}",
                    hint="name a writable folder that all nodes share",
                ) from error

    def stop_request(self) -> StopRequest | None:
        """Return the stop request that is in the folder now, or None. A person's request takes precedence."""
        for name in (BY_PERSON, FOR_REQUEUE):
            if self._has_own_file(name):
                return StopRequest(reason=str(self.path / name), requeue=name == FOR_REQUEUE)
        return None

    def _has_own_file(self, name: str) -> bool:
        """Return whether the file `name` is in the run's folder and belongs to this user.

        Other users may be able to write into the folder, so their files are ignored. For each such file, one
        warning is printed.
        """
        try:
            problem = files.foreign_file_reason(self.path / name)
        except OSError:  # there is no such file, or a network disk fails
            return False
        if not problem:
            return True
        if name not in self._reported:
            self._reported.add(name)
            self.log(f"warning: {self.path / name} is ignored: {problem}")
        return False

    def write(self, name: str, text: str) -> None:
        """Write a file into the run's folder, for people and the job script. Create the folder if needed.

        Raises
        ------
        OSError : the file cannot be written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        files.write_file(self.path / name, text)

    def request_requeue(self, state: str) -> int:
        """Ask the job script to requeue the job of a run that has saved its state, and return the exit code.

        In two cases, there is no request. If the saved state is the same as at the last requeue, the run
        makes no progress. If a person has asked the run to stop, it must not start again, and the exit code
        is 0.

        Parameters
        ----------
        state : job id and step of the saved state, such as ``4711.0 300``.

        Raises
        ------
        OSError : the request cannot be written.
        """
        # This file belongs to a person, whose request takes precedence over the requeue.
        file = self.stop_file()
        if file:
            self.log(f"state saved ({state}), not requeued: {file} prevents the run from starting")
            return 0
        if state == self._last_requeued_state():
            self.log(f"state saved ({state}) where it was at the last start: not requeued")
            return EXIT_SAVED
        # `REQUEUE` comes last, because the job script acts on it. If it came first and the second write
        # failed, a run without progress could be requeued again and again.
        self.write(REQUEUED, f"{state}\n")
        self.write(REQUEUE, "")
        return EXIT_SAVED

    def _last_requeued_state(self) -> str:
        """Return the saved state at the last requeue, or "" if there was none."""
        try:
            return files.read_own(self.path / REQUEUED).strip()
        except (OSError, UnicodeDecodeError):
            return ""

    def last_change_epoch_s(self) -> float:
        """Return when an earlier start of the run last wrote into this folder, in seconds of the epoch.

        Return 0 if there was no earlier start.
        """
        latest = 0.0
        for name in (RESULT, fence.ATTEMPT_FILE):
            with contextlib.suppress(OSError):
                latest = max(latest, (self.path / name).lstat().st_mtime)
        return latest


def parse_result_code(text: str) -> int | None:
    """Return the exit code in the text of the file `RESULT`, such as 85 for ``4711.0 85``.

    Return None for any other text.
    """
    match = re.fullmatch(r"\S+ ([0-9]{1,3})\n?", text, re.ASCII)
    return int(match[1]) if match else None


REPEAT_S = 2.0
"""Seconds within which a repeated signal counts as the same request.

Schedulers signal every process, and launchers forward the signal as well, so a process may get it twice.
"""


class CollectedSignals:
    """The stop signals that this process has received, in order."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.is_repeated = False
        """True once TERM or INT has arrived a second time: the user wants the run to end immediately."""
        self._received_at: dict[int, float] = {}
        """Time at which each signal last arrived, on the monotonic clock."""
        # Python writes a byte into this pipe for each signal, which wakes `select`.
        self._reader, self._writer = os.pipe()
        for descriptor in (self._reader, self._writer):
            os.set_blocking(descriptor, False)

    def record(self, number: int, _frame: FrameType | None) -> None:
        """Record signal `number`. Python calls this method as the signal handler.

        A second TERM or INT means that the user wants the run to end immediately. Two signals in quick
        succession count as one, because launchers forward signals that the process also gets directly.
        """
        # A signal handler runs between any two instructions of the program, so it only stores what happened.
        now = time.monotonic()
        previous_at = self._received_at.get(number)
        self._received_at[number] = now
        if previous_at is None:
            self.received.append(number)
        elif now - previous_at > REPEAT_S and number in (signal.SIGTERM, signal.SIGINT):
            self.is_repeated = True

    def first_name(self) -> str:
        """Return the name of the first signal, such as ``SIGTERM``, or "" if none has arrived."""
        return signal.Signals(self.received[0]).name if self.received else ""

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when a signal arrives."""
        return self._reader

    def drain(self) -> None:
        """Discard the bytes that signals have written to the descriptor."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 4096)

    @contextlib.contextmanager
    def collect(self) -> Iterator[CollectedSignals]:
        """Collect stop signals within this context, and ignore them afterwards.

        srun sends TERM to the other tasks of a step once the first one has ended. A process that is about to
        exit must ignore it, because it would lose its own exit code if the signal killed it. An object can
        collect only once, because the end of the context closes its pipe.
        """
        for stop_signal in STOP_SIGNALS:
            signal.signal(stop_signal, self.record)
        # For each signal, Python writes a byte into the pipe, which wakes a `select` for `fileno`.
        previous_wakeup_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        try:
            yield self
        finally:
            signal.set_wakeup_fd(previous_wakeup_fd)
            for stop_signal in STOP_SIGNALS:
                signal.signal(stop_signal, signal.SIG_IGN)
            os.close(self._reader)
            os.close(self._writer)

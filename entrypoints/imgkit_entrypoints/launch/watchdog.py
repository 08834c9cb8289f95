"""Find workers that no longer make progress, and report where they are stuck.

Each worker writes its position (the number of its current step) into a few bytes of shared memory, and the
node agent reads them. The position stays readable while a C call blocks the worker's interpreter, and even
while the process is stopped. Writing a position costs the worker a single store to memory. The node agents
learn the positions of workers on other nodes from each other's heartbeats (rollcall/session.py).

A user program of dist-run writes no positions (user_program.py), so the watchdog judges it by its main
thread. Each time the thread waits, for example for a lock or for data, the kernel counts it. If the count
does not grow between two checks, the program is stuck or in one long call.

The stacks in a report come from faulthandler's signal handler. It is written in C, so it needs no interpreter
either. It writes only the stack of the main thread, because the handler runs in that thread. Other threads go
on running in the meantime, so their frames cannot be read safely.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import mmap
import os
import re
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from imgkit_entrypoints import files
from imgkit_entrypoints.launch.user_program import STACK_SIGNAL

if TYPE_CHECKING:
    from imgkit_entrypoints.launch.nccl import Question
    from imgkit_entrypoints.rollcall.messages import Positions


LAYOUT = struct.Struct("qqq")
"""Layout of the shared memory: process id, position, and number of signs of life at that position.

The position is twice the number of completed steps, or one less while a step runs. For example, it is 5
during step 3 and 6 after step 3. Before the first step, it is negative. A user program writes no positions
and has -1 as its number of signs of life.
"""
# The position of a worker before its first step.
BEFORE = -1
USER_PROGRAM_FACTOR = 3
"""Factor on ``--hang-after`` for a user program, which writes no positions."""
LONGEST_STEP_FACTOR = 3
"""Factor on the duration of a worker's longest step. The worker is not late before this time has passed."""
FIRST_STEP_FACTOR = 10
"""Factor on ``--hang-after`` before a worker's first step, because the worker may still be compiling code.

While a worker waits for other ranks in `CONNECTS`, it is late after ``--hang-after``, without either factor.
"""
CONNECTS = "init_process_group"
"""Torch function in which the ranks find each other through torch's key-value store.

The call may never return, since anyone who can reach the store's port can delete its keys (SECURITY.md).
"""
CONNECT_LOOK_S = 10.0
"""Seconds between two checks of whether a worker without a sign of life waits in `CONNECTS`."""
IDLE_S = 3.0
"""Seconds with almost no processor use after which a worker counts as idle, that is, as waiting for others.

Before their first step, only idle workers are asked for their stacks, because the frames of running threads
cannot be read safely.
"""
IDLE_SHARE = 0.05
"""Largest share of a processor that a waiting worker uses: 5 %."""
MAX_IDLE_WAITS = 5
"""A main thread with up to this many waits since the last check may still be stuck. Signals wake it, too."""
ANSWER_S = 5.0
"""Longest time in seconds that the watchdog waits for a requested stack."""
WAKE_S = 1.5
"""Seconds after a request for a stack during which waits of the main thread are not signs of life.

The signal that requests the stack wakes the thread itself.
"""
MAX_FRAMES = 12
"""Largest number of innermost frames of one stack that a report shows."""
WHY_NO_STACK = {
    "T": "it is stopped (SIGSTOP); to continue it: kill -CONT {pid}",
    "t": "it is stopped by a debugger",
}
"""Why a process sends no stack, by the first letter of its state in /proc/PID/status."""
_STACK_HEADING = "stack, innermost first:"
# Frames of Python and of imgkit that start the program: "<frozen runpy>:88 _run_code".
_START_FRAME = re.compile(r"(?:<frozen runpy>|.*/(?:runpy|user_program)\.py):\d+ ")


class Pulse:
    """The position of this worker, in memory that the worker shares with its node agent.

    Without a node agent, or if the file cannot be created, the position stays in this process.
    """

    def __init__(self, folder: str | None, rank: int) -> None:
        """Open the files that this worker shares with its node agent, in the stop folder `folder`.

        If there is no folder, or the files cannot be created, the worker keeps its position in private
        memory.
        """
        self._memory: mmap.mmap | bytearray = bytearray(LAYOUT.size)
        if folder:
            with contextlib.suppress(OSError):
                self._memory = map_shared_file(Path(folder) / f"pulse-{rank}", LAYOUT.size)
                self._stacks = _replace_file(Path(folder) / f"stacks-{rank}")
                faulthandler.register(STACK_SIGNAL, file=self._stacks, all_threads=False)
        self._notes = memoryview(self._memory).cast("q")
        self._notes[1] = BEFORE
        self._notes[0] = os.getpid()  # written last, since the watchdog ignores notes without a process id

    @property
    def progress(self) -> tuple[int, int]:
        """Return the position of this worker, and the number of its signs of life there."""
        return self._notes[1], self._notes[2]

    def begin_step(self, step: int) -> None:
        """Record that this worker has begun `step`."""
        self._notes[1] = 2 * step - 1

    def end_step(self, step: int) -> None:
        """Record that this worker has completed `step`."""
        self._notes[1] = 2 * step

    def count_sign_of_life(self) -> None:
        """Record that this worker is alive, although its position has not changed."""
        self._notes[2] += 1

    def end_watch(self) -> None:
        """Record that the watchdog should no longer watch this worker."""
        self._notes[0] = 0


@contextlib.contextmanager
def connecting(env: Mapping[str, str]) -> Iterator[None]:
    """Let the watchdog watch this worker while the worker opens the process group within this context.

    Opening the process group can hang, because every rank waits there for all others. If the worker already
    has a file for the watchdog, the context does nothing.
    """
    folder, rank = env.get("IMGKIT_STOP_DIR"), env.get("RANK", "0")
    if folder is None or Path(folder, f"pulse-{rank}").exists():
        yield
        return
    pulse = Pulse(folder, int(rank))
    yield
    # After an error, this is not reached: the watchdog then watches the worker until its process has ended.
    pulse.end_watch()


def _replace_file(path: Path) -> BinaryIO:
    """Create a new file at `path` in place of an old one, and return it open for writing."""
    path.unlink(missing_ok=True)  # a worker of an earlier attempt may still write to the old file
    return files.create_file(path)


def map_shared_file(path: Path, size: int) -> mmap.mmap:
    """Create the file `path` with `size` zero bytes, and return it as memory that other processes can read.

    Raises
    ------
    OSError : the file cannot be created, for example because the file system is full.
    """
    with _replace_file(path) as file:
        # Writing the zeros allocates the space. Otherwise, on a full file system, the first store into the
        # memory would kill the worker with SIGBUS.
        file.write(bytes(size))
        file.flush()
        return mmap.mmap(file.fileno(), size)


# The fields of /proc/PID/stat that we use, by their number in proc_pid_stat(5).
_STAT_FIELDS = {14: "utime", 15: "stime", 22: "starttime"}


def read_stat(pid: int | str) -> dict[str, str]:
    """Return the processor times and the start time of a process, in clock ticks.

    The keys are the field names in `_STAT_FIELDS`, as in ``{"utime": "310", ...}``.

    Raises
    ------
    OSError : the process has ended.
    """
    # An example is "4711 (python3) S 1 ...". The name in parentheses may contain spaces and parentheses, so
    # only the text after the last ")" is split. It begins with field 3.
    _, _, later_fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
    numbered_fields = enumerate(later_fields.split(), start=3)
    return {_STAT_FIELDS[number]: value for number, value in numbered_fields if number in _STAT_FIELDS}


class _IdleTimer:
    """Measures for how long a process has used almost no processor time."""

    def __init__(self) -> None:
        self._last_cpu_s = 0.0  # processor time that the process had used at the last reading
        self._last_read_at = 0.0
        self._idle_since: float | None = None  # None before the first reading

    def measure_s(self, pid: int, now: float) -> float:
        """Return for how many seconds process `pid` has been idle until `now`, on the monotonic clock.

        A process is idle while it uses at most `IDLE_SHARE` of a processor. The processor time is measured
        between two calls, so call this method about once a second. If the process has ended, return minus
        infinity, so that it never counts as idle.
        """
        try:
            fields = read_stat(pid)
            user_ticks, system_ticks = int(fields["utime"]), int(fields["stime"])
        except (OSError, ValueError, KeyError):  # the process has ended
            return -math.inf
        cpu_s = (user_ticks + system_ticks) / os.sysconf("SC_CLK_TCK")
        was_busy = cpu_s - self._last_cpu_s > IDLE_SHARE * (now - self._last_read_at)
        if was_busy or self._idle_since is None:
            self._idle_since = now  # idle time begins now
        self._last_cpu_s, self._last_read_at = cpu_s, now
        return now - self._idle_since


class _Note(NamedTuple):
    """What a worker has written into shared memory (`LAYOUT`)."""

    rank: int
    pid: int
    position: int
    signs: int
    """Number of signs of life at this position. For a user program, the waits of its main thread."""
    writes_no_positions: bool
    """True for a user program."""


@dataclass(slots=True, kw_only=True)
class _Worker:
    """The state of one worker when the watchdog last checked it. All times are on the monotonic clock."""

    note: _Note
    """What the worker had written at its last sign of life."""
    last_sign_at: float
    """Time of the last sign of life."""
    longest_s: float = 0.0
    """Longest time between two signs of life since the first step. Reported hangs are not counted."""
    stacks_from: int | None = None
    """Size of the worker's stack file when the watchdog asked for a new stack. None if it has not asked."""
    asked_at: float = 0.0
    """Time at which the watchdog last asked for stacks."""
    is_connecting: bool = False
    """True if the worker waits in `CONNECTS`."""
    idle_timer: _IdleTimer = field(default_factory=_IdleTimer)

    @property
    def was_asked(self) -> bool:
        """Return whether the watchdog has asked for this worker's stack since its last sign of life."""
        return self.stacks_from is not None

    @property
    def has_begun_steps(self) -> bool:
        """Return whether this worker has reached its first step. A user program never reports that it has."""
        return self.note.position >= 0

    def was_woken(self, now: float) -> bool:
        """Return whether new waits of a user program come from the watchdog's own request for a stack.

        The request is a signal, which wakes the main thread. Such a wait is not a sign of life.
        """
        return self.note.writes_no_positions and now - self.asked_at <= WAKE_S

    def has_moved(self, note: _Note) -> bool:
        """Return whether `note`, the worker's latest data, shows a sign of life since the previous note."""
        if note.writes_no_positions:
            return note.signs - self.note.signs > MAX_IDLE_WAITS
        return note != self.note

    def update(self, note: _Note, now: float) -> None:
        """Record the data of a worker that has given a sign of life, and forget the request for its stack."""
        self.note, self.last_sign_at, self.stacks_from = note, now, None
        # A user program that moves again no longer waits in `CONNECTS`. Workers that write positions keep the
        # flag, because they leave the watch when the context manager `connecting` ends.
        if note.writes_no_positions:
            self.is_connecting = False

    def patience_s(self, hang_after_s: float) -> float:
        """Return after how many seconds without a sign of life this worker counts as late.

        The limit is `hang_after_s` times a factor, which leaves more time where the worker may be busy with
        something else. It is also at least a multiple of the worker's longest step so far.
        """
        if self.is_connecting:  # it waits for other ranks, so it is not busy
            factor = 1
        elif self.note.writes_no_positions:
            factor = USER_PROGRAM_FACTOR
        elif not self.has_begun_steps:
            factor = FIRST_STEP_FACTOR
        else:
            factor = 1
        return max(hang_after_s * factor, self.longest_s * LONGEST_STEP_FACTOR)

    def is_late(self, hang_after_s: float, now: float) -> bool:
        """Return whether this worker has given no sign of life for too long."""
        return now - self.last_sign_at >= self.patience_s(hang_after_s)


class Watchdog:
    """Watches the workers of one node, and reports those that have stopped moving (`collect_reports`)."""

    def __init__(
        self,
        folder: Path,
        host: str,
        hang_after_s: float,
        ask_nccl: Callable[[], Question | None],
    ) -> None:
        """Watch the workers that write their positions into `folder`.

        Position files of an earlier attempt (an earlier start of the workers) are removed.

        Parameters
        ----------
        host : name of this node in reports.
        hang_after_s : the value of ``--hang-after``. With 0, nothing is reported.
        ask_nccl : starts a query about NCCL's state, or returns None if NCCL cannot be asked.
        """
        self._folder, self._host, self._hang_after_s, self._ask_nccl = folder, host, hang_after_s, ask_nccl
        self._stack_interval_s = CONNECT_LOOK_S
        """Shortest time in seconds between two requests for the stack of an idle worker."""
        if hang_after_s:
            # A request wakes the worker for up to `WAKE_S` seconds, during which its signs of life are
            # ignored. So the time must be longer.
            self._stack_interval_s = max(2 * WAKE_S, min(CONNECT_LOOK_S, hang_after_s))
        self._nccl_question: Question | None = None
        self._workers: dict[int, _Worker] = {}
        self._stacks_requested_at = 0.0
        self._reported: set[int] = set()
        """Ranks that were reported as late and have not moved since."""
        for path in folder.glob("pulse-*"):
            path.unlink(missing_ok=True)

    @property
    def positions(self) -> Positions | None:
        """Return the positions of this node's slowest and furthest worker, or None without workers."""
        positions = [worker.note.position for worker in self._workers.values()]
        return (min(positions), max(positions)) if positions else None

    def furthest_position(self) -> int | None:
        """Return the furthest position of a worker of this node, or None if no worker has written one.

        Workers that have already ended are included.
        """
        return max((note.position for note in self._read_notes()), default=None)

    def are_all_connecting(self, nproc: int) -> bool:
        """Return whether all `nproc` workers of this node wait in `CONNECTS`."""
        workers = self._workers.values()
        return len(workers) == nproc and all(worker.is_connecting for worker in workers)

    def collect_reports(self, run_positions: Positions | None = None) -> list[str]:
        """Check all workers, and return new reports about workers that hang, or that move again.

        Call it once a second. The list is empty if there is nothing to report.

        Parameters
        ----------
        run_positions : positions of the slowest and the furthest worker of the whole run, or None if unknown.
            A position is twice the number of completed steps, or one less during a step.
        """
        now = time.monotonic()
        # The workers are updated first, because the two other methods judge by their latest signs of life.
        # With ``--hang-after 0``, this is needed as well, since heartbeats contain `positions`.
        reports = self._update_workers(now)
        self._update_connecting_workers(now)
        if self.positions is None or not self._hang_after_s:
            return reports
        low, high = self.positions
        # A worker of another node may be behind all workers of this node. Then that node reports the hang.
        if run_positions:
            run_low, run_high = run_positions
            low, high = min(low, run_low), max(high, run_high)
        report = self._check_for_hang(low, high, now)
        if report:
            reports.append(report)
        return reports

    def _check_for_hang(self, low: int, high: int, now: float) -> str:
        """Return a report about workers of this node that hang, or "" if there is nothing to report now.

        A report contains stacks, and a worker needs time to write its stack. The first call that finds a hang
        therefore only requests the stacks, and a later call returns the report. `collect_reports` calls this
        method about once a second. Each hang is reported only once.

        Parameters
        ----------
        low : position of the slowest worker of the whole run. A position is twice the number of completed
            steps, or one less during a step.
        high : position of the furthest worker of the whole run.
        """
        # Only the workers at the lowest position can be the cause, since all others wait for them.
        slowest = [worker for worker in self._workers.values() if worker.note.position == low]
        late = [worker for worker in slowest if worker.is_late(self._hang_after_s, now)]
        if not self._should_report(slowest, late):
            return ""
        if not all(worker.was_asked for worker in slowest):
            self._ask_for_reasons(slowest, now, some_are_ahead=low < high)
            return ""
        stacks = self._collect_stacks(slowest, now)
        if stacks is None:  # not all workers have answered, and they may still do so
            return ""
        # `_make_title` reads `is_connecting`, and `_should_report` reads `_reported` in the next call.
        for worker in slowest:
            worker.is_connecting = CONNECTS in stacks[worker.note.rank]
        self._reported |= {worker.note.rank for worker in late}
        silent_s = min(now - worker.last_sign_at for worker in late)
        lines = [self._make_title(late, silent_s, low, high), *self._describe_stacks(slowest, stacks)]
        if self._nccl_question:  # its thread has ended or its time is up, as `_collect_stacks` has checked
            lines += self._nccl_question.lines
        return "\n".join(lines)

    def _ask_for_reasons(self, workers: Sequence[_Worker], now: float, *, some_are_ahead: bool) -> None:
        """Ask workers that hang for their stacks, and ask NCCL for its state. The answers are read later.

        `_collect_stacks` reads the answers. The time of this call starts its time limit.

        Parameters
        ----------
        some_are_ahead : True if other workers of the run are at a later position.
        """
        for worker in workers:
            if not worker.was_asked:  # another request would lose the answer to the first one
                self._request_stack(worker, now)
        self._stacks_requested_at = now
        # If some ranks are ahead, only the nodes of the slowest ranks report a hang, and each asks NCCL.
        # Otherwise, every node reports one. One answer of NCCL is enough then, so the node of rank 0 asks.
        has_rank_0 = any(worker.note.rank == 0 for worker in workers)
        must_ask_nccl = some_are_ahead or has_rank_0
        self._nccl_question = self._ask_nccl() if must_ask_nccl else None

    def _collect_stacks(self, workers: Sequence[_Worker], now: float) -> Mapping[int, str] | None:
        """Return the stacks of workers that hang, by rank, or None while an answer may still arrive.

        The stack of a worker that has not answered within `ANSWER_S` seconds is "".
        """
        if self._nccl_question is not None and self._nccl_question.is_open:  # NCCL may still answer
            return None
        stacks = {worker.note.rank: self._read_stack(worker) for worker in workers}
        # An empty stack means that the worker has not answered yet.
        if not all(stacks.values()) and now - self._stacks_requested_at < ANSWER_S:
            return None
        return stacks

    def _should_report(self, slowest: Sequence[_Worker], late: Sequence[_Worker]) -> bool:
        """Return whether the late workers are a hang that has not been reported yet.

        A worker is late if it has given no sign of life for too long. Usually, all workers at the lowest
        position must be late, because the run may just be slow while one of them still moves. For user
        programs, one late worker is enough: the other workers may be waiting for it in short naps, which look
        like signs of life.

        Parameters
        ----------
        slowest : the workers of this node at the lowest position of the run.
        late : the workers in `slowest` that are late.
        """
        if not late:
            return False
        # Without positions, nothing shows which worker is the cause. So report all of them once, and again
        # only after all reported workers have moved (`_update_workers` removes them from `_reported`).
        if any(worker.note.writes_no_positions for worker in late):
            return not self._reported
        is_new = any(worker.note.rank not in self._reported for worker in late)
        are_all_late = len(late) == len(slowest)
        return is_new and are_all_late

    def _update_connecting_workers(self, now: float) -> None:
        """Update `is_connecting` of the workers: they wait for other ranks in `CONNECTS`, before any step.

        The stack of such a worker contains that function, so idle workers are asked for their stacks. Late
        workers are skipped, because `_check_for_hang` asks them for their stacks.
        """
        for worker in self._workers.values():
            is_late = self._hang_after_s > 0 and worker.is_late(self._hang_after_s, now)
            # A worker that has reached its first step is connected already.
            if worker.has_begun_steps or worker.is_connecting or is_late:
                continue
            if worker.was_asked:
                self._update_is_connecting(worker, now)
            else:
                self._request_stack_if_idle(worker, now)

    def _request_stack_if_idle(self, worker: _Worker, now: float) -> None:
        """Ask a worker for its stack if it is idle, and has neither moved nor been asked recently."""
        idle_s = worker.idle_timer.measure_s(worker.note.pid, now)
        quiet_s = now - max(worker.last_sign_at, worker.asked_at)
        if idle_s >= IDLE_S and quiet_s >= self._stack_interval_s:
            self._request_stack(worker, now)

    def _update_is_connecting(self, worker: _Worker, now: float) -> None:
        """Update `is_connecting` of a worker that was asked for its stack.

        Do nothing while the stack may still arrive.
        """
        stack = self._read_stack(worker)  # or a reason for a missing stack, which does not contain `CONNECTS`
        may_still_arrive = now - worker.asked_at < ANSWER_S
        if not stack and may_still_arrive:
            return
        worker.is_connecting = CONNECTS in stack
        if not worker.is_connecting:
            worker.stacks_from = None  # the watchdog may then ask this worker again (`was_asked`)

    def _update_workers(self, now: float) -> list[str]:
        """Read what all workers have written, and update the state of each worker.

        Each worker writes a note into shared memory: its position (the number of its step) and its signs of
        life. Return one line for each group of workers that were reported as late and now move again.
        """
        # Workers that move again, grouped by the length of their hang in whole seconds.
        moved_workers: dict[int, list[_Worker]] = {}
        # While a hang is reported, the other workers wait for it, and their steps take long. These steps must
        # not raise `longest_s`: it lengthens the time until a worker counts as late (`patience_s`), so the
        # next hang would be reported too late. This is read first, because ranks are removed below.
        is_calm = not self._reported
        notes = list(self._read_running_notes())
        self._replace_ended_workers(notes, now)
        for note in notes:
            worker = self._workers[note.rank]
            # Waits that our own request for a stack has caused are no sign of life. `has_moved` compares with
            # the stored note, so storing the new one now makes the two equal.
            if worker.was_woken(now):
                worker.note = note
            if not worker.has_moved(note):
                continue
            silent_s = now - worker.last_sign_at
            if note.rank in self._reported:
                self._reported.remove(note.rank)
                moved_workers.setdefault(round(silent_s), []).append(worker)
            elif is_calm and worker.has_begun_steps:
                worker.longest_s = max(worker.longest_s, silent_s)
            worker.update(note, now)  # this sets `last_sign_at`, so `silent_s` is computed above
        return [
            f"{self._describe_ranks(workers)} moved again after {seconds} s"
            for seconds, workers in moved_workers.items()
        ]

    def _replace_ended_workers(self, notes: Sequence[_Note], now: float) -> None:
        """Stop watching workers that have ended, and start watching new ones.

        `notes` are the latest notes of all workers that are running.
        """
        for rank in self._workers.keys() - {note.rank for note in notes}:
            self._forget(rank)
        for note in notes:
            worker = self._workers.get(note.rank)
            # A new process id means that a worker of a new attempt has taken over the rank.
            if worker is None or worker.note.pid != note.pid:
                self._forget(note.rank)
                self._workers[note.rank] = _Worker(note=note, last_sign_at=now)

    def _forget(self, rank: int) -> None:
        """Stop watching a worker that has ended or was replaced by a new process."""
        self._workers.pop(rank, None)
        self._reported.discard(rank)

    def _read_running_notes(self) -> Iterator[_Note]:
        """Yield the notes of all workers whose processes are still running.

        A user program counts no signs of life. The number of its main thread's waits, which the kernel
        counts, is used instead.
        """
        for note in self._read_notes():
            status = _read_process_status(note.pid)
            if not status:  # the process has ended
                continue
            if note.writes_no_positions:
                yield note._replace(signs=int(status.get("voluntary_ctxt_switches", "0")))
            else:
                yield note

    def _read_notes(self) -> Iterator[_Note]:
        """Yield the note of each worker, except of workers that should no longer be watched."""
        for path in self._folder.glob("pulse-*"):
            # The file may vanish meanwhile, or be incomplete while the worker creates it.
            with contextlib.suppress(OSError, struct.error):
                pid, position, signs = LAYOUT.unpack(files.read_bytes(path))
                if pid:  # 0 means that the worker has left the watch, or has not written its first note yet
                    rank = int(path.name.removeprefix("pulse-"))
                    yield _Note(rank, pid, position, signs, writes_no_positions=signs < 0)

    def _request_stack(self, worker: _Worker, now: float) -> None:
        """Ask a worker for its stack by sending `STACK_SIGNAL`.

        The worker's signal handler appends the stack to the file ``stacks-RANK``. That file may already
        contain older stacks, so this method records its current size: the answer begins there. A worker
        without such a handler is not signalled, and so counts as one that does not answer.
        """
        path = self._folder / f"stacks-{worker.note.rank}"
        worker.stacks_from = path.stat().st_size if path.exists() else 0
        worker.asked_at = now
        # Without a handler, the signal would kill the process, or another process that has got the same id in
        # the meantime.
        if _handles_signal(worker.note.pid, STACK_SIGNAL):
            with contextlib.suppress(OSError):
                os.kill(worker.note.pid, STACK_SIGNAL)

    def _read_stack(self, worker: _Worker) -> str:
        """Return the stack of `worker`, or the reason why the worker cannot write one.

        A stopped process, for example, cannot write its stack. Return "" while the stack may still arrive.
        """
        with contextlib.suppress(OSError):
            file_content = files.read_bytes(self._folder / f"stacks-{worker.note.rank}")
            # The file also contains older stacks. The answer begins where the file ended before the request.
            new_data = file_content[worker.stacks_from :]
            stack = _cut_main_stack(new_data.decode(errors="replace"))
            if stack:
                return stack
        state = _read_process_status(worker.note.pid).get("State", "")  # "T (stopped)"
        reason = WHY_NO_STACK.get(state[:1], "")
        return reason.format(pid=worker.note.pid)

    def _make_title(self, late: list[_Worker], silent_s: float, low: int, high: int) -> str:
        """Return the first line of a report about workers that have given no sign of life for too long.

        Parameters
        ----------
        late : the workers that the report is about.
        silent_s : seconds since their last sign of life.
        low : position of the slowest worker of the run. A position is twice the number of completed steps, or
            one less during a step: 6 after step 3, 5 during it.
        high : position of the furthest worker of the run.
        """
        name = self._describe_ranks(late)
        # This case comes first, because it is the only one in which the cause is known.
        are_all_connecting = all(worker.is_connecting for worker in late)
        if are_all_connecting:
            reason = "ranks are missing, or torch's store has lost their keys"
            return f"{name} in {CONNECTS} for {silent_s:.0f} s: {reason}"
        # A user program writes no positions, so `low` and `high` mean nothing.
        is_user_program = any(worker.note.writes_no_positions for worker in late)
        if is_user_program:
            return f"{name} without a sign of life for {silent_s:.0f} s; all ranks of this node:"
        slowest, furthest = _describe_position(low), _describe_position(high)
        if low < high:
            return f"{name} did not move from {slowest} for {silent_s:.0f} s (others: {furthest})"
        return f"no rank has moved from {slowest} for {silent_s:.0f} s"

    def _describe_stacks(self, workers: list[_Worker], stacks: Mapping[int, str]) -> Iterator[str]:
        """Yield each different stack once, after the ranks of all workers that have this stack.

        `stacks` contains the stack of each worker by rank, or "" if the worker has not sent one.

        The most likely causes come first. These are workers without a stack, and then the stacks that few
        workers have: most workers wait for the others, and have the same stack.
        """
        workers_by_text: dict[str, list[_Worker]] = {}
        for worker in workers:
            text = stacks[worker.note.rank] or _explain_missing_stack(worker)
            workers_by_text.setdefault(text, []).append(worker)
        # Reasons for missing stacks come first, because they have no heading (False comes before True).
        texts = sorted(workers_by_text, key=lambda text: (_STACK_HEADING in text, len(workers_by_text[text])))
        for text in texts:
            same_workers = workers_by_text[text]
            pids = ", ".join(str(worker.note.pid) for worker in same_workers)
            yield f"  {self._describe_ranks(same_workers)} (process {pids}): {text}"

    def _describe_ranks(self, workers: list[_Worker]) -> str:
        """Return a description of workers of this node, such as ``ranks 4, 6 on n2``."""
        ranks = sorted(worker.note.rank for worker in workers)
        label = "rank" if len(ranks) == 1 else "ranks"
        return f"{label} {', '.join(map(str, ranks))} on {self._host}"


def _handles_signal(pid: int, number: int) -> bool:
    """Return whether a process has set a handler for the signal `number`."""
    # SigCgt is the mask of signals with a handler, in hexadecimal. Bit n - 1 stands for signal n.
    caught_signals = int(_read_process_status(pid).get("SigCgt", "0"), 16)
    return bool(caught_signals & 1 << (number - 1))


def _explain_missing_stack(worker: _Worker) -> str:
    """Return why a worker has not answered the request for its stack."""
    # The kernel delivers no signal to a process in the state "D (disk sleep)".
    if _read_process_status(worker.note.pid).get("State", "").startswith("D"):
        return "no stack: it hangs in the kernel, in a file system or a driver"
    return f"no stack: it did not answer signal {STACK_SIGNAL} in {ANSWER_S:g} s"


def _describe_position(position: int) -> str:
    """Return a position in words: -1 is ``its start``, 5 is ``step 3``, and 6 is ``the end of step 3``."""
    if position < 0:
        return "its start"
    if position % 2 == 0:
        return f"the end of step {position // 2}"
    return f"step {(position + 1) // 2}"


def _read_process_status(pid: int) -> dict[str, str]:
    """Return the fields of /proc/PID/status by name, such as ``{"State": "S (sleeping)"}``.

    The result is empty if the process has ended.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    fields = [line.partition(":") for line in lines]
    status = {name: value.strip() for name, _, value in fields}
    # "Z" (zombie) and "X" (dead): the process has ended, but its parent has not read its exit code yet.
    if status.get("State", "Z")[:1] in ("Z", "X"):
        return {}
    return status


def _cut_main_stack(text: str) -> str:
    """Return the innermost frames of the main thread from faulthandler's output, or "" if there are none.

    faulthandler is the module of Python that writes a stack when it gets a signal. The result begins with the
    heading `_STACK_HEADING`. In it, ``File "train.py", line 12 in step`` is ``train.py:12 step``.
    """
    match = re.search(r"(?m)^Stack \(most recent call first\):\n((?:  .*\n)+)", text)
    if match is None:
        return ""
    frames = []
    for line in match[1].splitlines():
        # 'File "train.py", line 12 in step' -> "train.py:12 step"
        frame = re.sub(r'^File "(.*)", line (\d+) in (.*)$', r"\1:\2 \3", line.strip())
        if not _START_FRAME.match(frame):  # frames that only start the program say nothing about the hang
            frames.append(frame)
    if len(frames) > MAX_FRAMES:
        frames[MAX_FRAMES:] = [f"and {len(frames) - MAX_FRAMES} more"]
    return f"{_STACK_HEADING}\n" + "\n".join(f"    {frame}" for frame in frames)

"""The watchdog: which workers no longer move, and where they stand.

Each worker notes its place in a few bytes of shared memory, and the node agent reads them. This needs neither
the worker's interpreter, which a C call may hold, nor a running process; a note costs one store to memory.
The stacks come from faulthandler's handler, which is C as well. The node agents' heartbeat carries the places
of the other nodes (rollcall/session.py).
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import re
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from imgkit_entrypoints import files

if TYPE_CHECKING:
    from imgkit_entrypoints.launch.nccl import Question
    from imgkit_entrypoints.rollcall.messages import Positions


SIGNAL = 40
"""Asks for the stacks. No scheduler sends a real-time signal, and glibc uses only 32 and 33."""
LAYOUT = struct.Struct("qqqq")
"""Process id, main thread, place, signs of life at this place.

The place is twice the number of steps done, less one within a step, and negative before the first step."""
BEFORE = -1
PATIENCE, PATIENCE_BEFORE = 3, 10
"""A worker is late after three times its longest step. Before its first step it may be compiling, and is late
after ten times ``--hang-after``; not where it waits for other ranks in `CONNECTS`."""
CONNECTS = "init_process_group"
"""Where ranks meet in torch's store, whose keys everybody can delete who reaches its port (SECURITY.md)."""
ANSWER_S = 5.0
FRAMES = 12
"""Number of innermost frames in a report."""
STOPPED = {
    "T": "it is stopped (SIGSTOP); to continue it: kill -CONT {pid}",
    "t": "it is stopped by a debugger",
}
"""Reasons by the state in /proc/PID/status."""
_STACK = "stack, innermost first:"


class Pulse:
    """This worker's place, as the node agent sees it. No node agent or no room: the notes go nowhere."""

    def __init__(self, folder: str | None, rank: int) -> None:
        self._memory: mmap.mmap | bytearray = bytearray(LAYOUT.size)
        if folder:
            with contextlib.suppress(OSError):
                self._memory = shared(Path(folder) / f"pulse-{rank}", LAYOUT.size)
                self._stacks = _new(Path(folder) / f"stacks-{rank}")
                faulthandler.register(SIGNAL, file=self._stacks, all_threads=True)
        self._place = memoryview(self._memory).cast("q")
        self._place[1], self._place[2] = threading.main_thread().ident or 0, BEFORE
        self._place[0] = os.getpid()  # last: from now on it counts

    def begins(self, step: int) -> None:
        """This worker is in `step`."""
        self._place[2] = 2 * step - 1

    def done(self, step: int) -> None:
        """This worker is done with `step`."""
        self._place[2] = 2 * step

    def lives(self) -> None:
        """This worker is busy between two steps."""
        self._place[3] += 1

    def ends(self) -> None:
        """This worker is no longer watched."""
        self._place[0] = 0


@contextlib.contextmanager
def connecting(env: Mapping[str, str]) -> Iterator[None]:
    """Have this worker watched while it opens the process group; one with a run is watched already."""
    folder, rank = env.get("IMGKIT_STOP_DIR"), env.get("RANK", "0")
    watched = folder is None or Path(folder, f"pulse-{rank}").exists()
    pulse = None if watched else Pulse(folder, int(rank))
    yield
    if pulse:
        pulse.ends()


def _new(path: Path) -> BinaryIO:
    path.unlink(missing_ok=True)  # a worker before this one may still write to its own
    return files.create(path)


def shared(path: Path, size: int) -> mmap.mmap:
    """Make the file `path` of `size` zeros, whose bytes other processes see as they change.

    Raises
    ------
    OSError : there is no room for it.
    """
    with _new(path) as file:
        file.write(bytes(size))  # a hole in a full file system would end the worker by SIGBUS
        file.flush()
        return mmap.mmap(file.fileno(), size)


@dataclass(slots=True, kw_only=True)
class _Worker:
    rank: int
    pid: int
    thread: int
    place: int
    signs: int
    since: float
    longest_s: float = 0.0
    """Longest time between two signs of life since its first step, reported hangs left out."""
    requested_from: int | None = None
    """Size of its file of stacks when the node agent asked for new ones."""
    looked: float = 0.0
    """Time of the last look at its stack before its first step."""
    connects: bool = False
    """It waits in `CONNECTS`."""

    def patience_s(self, after_s: float) -> float:
        patient = self.place < 0 and not self.connects
        return max(after_s * (PATIENCE_BEFORE if patient else 1), self.longest_s * PATIENCE)


class Watchdog:
    """The workers of one node, as its node agent sees them."""

    def __init__(
        self, folder: Path, host: str, after_s: float, nccl: Callable[[], Question | None] = lambda: None
    ) -> None:
        """Watch the workers that note their places in `folder`; `nccl` asks NCCL, where it can be asked."""
        self._folder, self._host, self._after_s, self._nccl = folder, host, after_s, nccl
        self._question: Question | None = None
        self._workers: dict[int, _Worker] = {}
        self._asked = 0.0
        self._told: set[int] = set()
        """Ranks that are reported as late."""
        for path in folder.glob("pulse-*"):
            path.unlink(missing_ok=True)

    @property
    def span(self) -> Positions | None:
        """Places of this node's workers; None while there are none."""
        places = [worker.place for worker in self._workers.values()]
        return (min(places), max(places)) if places else None

    def furthest(self) -> int | None:
        """Return the furthest place that a worker of this node has noted, also one that has ended."""
        return max((place for _, _, _, place, _ in self._notes()), default=None)

    def look(self, others: Positions | None = None) -> list[str]:
        """Return new reports, mostly none; call it about once a second."""
        if not self._after_s:
            return []
        now = time.monotonic()
        told = self._read(now)
        own = self.span
        if own is None:
            return told
        for worker in self._workers.values():
            if worker.place < 0 and not worker.connects:
                self._look_at_start(worker, now)
        low, high = (min(own[0], others[0]), max(own[1], others[1])) if others else own
        late = [worker for worker in self._workers.values() if worker.place == low]
        patient = any(now - worker.since < worker.patience_s(self._after_s) for worker in late)
        if not late or patient or all(worker.rank in self._told for worker in late):
            return told
        asked = [worker for worker in late if worker.requested_from is None]
        for worker in asked:
            self._ask(worker)
        if asked:
            self._asked = now
            # Where all ranks wait, all nodes report, and one answer is enough.
            self._question = self._nccl() if low < high or any(not worker.rank for worker in late) else None
            return told
        patient = now - self._asked < ANSWER_S
        answers = {worker.rank: self._answer(worker) for worker in late}
        if (patient and not all(answers.values())) or (self._question and self._question.open):
            return told
        self._told |= set(answers)
        nccl = self._question.lines() if self._question else []
        return [*told, "\n".join((self._text(late, answers, now, low, high), *nccl))]

    def _look_at_start(self, worker: _Worker, now: float) -> None:
        """Find out whether a worker waits in `CONNECTS`, once in a while."""
        if worker.requested_from is None:
            if now - max(worker.since, worker.looked) >= self._after_s:
                worker.looked = now
                self._ask(worker)
        elif (answer := self._answer(worker)) or now - worker.looked >= ANSWER_S:
            worker.connects = CONNECTS in answer
            worker.requested_from = worker.requested_from if worker.connects else None

    def _read(self, now: float) -> list[str]:
        moving: dict[float, list[_Worker]] = {}
        calm = not self._told  # else others have waited for the reported ones
        notes = list(self._notes())
        for rank in self._workers.keys() - {rank for rank, *_ in notes}:
            del self._workers[rank]
            self._told.discard(rank)
        for rank, pid, thread, place, signs in notes:
            before = self._workers.get(rank)
            if not _status(pid):  # ended
                self._workers.pop(rank, None)
                self._told.discard(rank)
            elif before is None or before.pid != pid:
                self._workers[rank] = _Worker(
                    rank=rank, pid=pid, thread=thread, place=place, signs=signs, since=now
                )
                self._told.discard(rank)
            elif (before.place, before.signs) != (place, signs):
                seconds = now - before.since
                if rank in self._told:
                    self._told.remove(rank)
                    moving.setdefault(round(seconds), []).append(before)
                elif calm and before.place >= 0:
                    before.longest_s = max(before.longest_s, seconds)
                before.place, before.signs, before.since, before.requested_from = place, signs, now, None
        return [f"{self._who(some)} moved again after {seconds} s" for seconds, some in moving.items()]

    def _notes(self) -> Iterator[tuple[int, int, int, int, int]]:
        """The rank of each worker, and what it has noted."""
        for path in self._folder.glob("pulse-*"):
            with contextlib.suppress(OSError, struct.error):
                pid, thread, place, signs = LAYOUT.unpack(files.read_bytes(path))
                if pid:
                    yield int(path.name.partition("-")[2]), pid, thread, place, signs

    def _ask(self, worker: _Worker) -> None:
        path = self._folder / f"stacks-{worker.rank}"
        worker.requested_from = path.stat().st_size if path.exists() else 0
        caught = int(_status(worker.pid).get("SigCgt", "0"), 16)
        if caught >> (SIGNAL - 1) & 1:  # else the signal would end it, or a new process with its id
            with contextlib.suppress(OSError):
                os.kill(worker.pid, SIGNAL)

    def _answer(self, worker: _Worker) -> str:
        """Return why `worker` stands, as far as one can see; empty while its stacks may still come."""
        with contextlib.suppress(OSError):
            text = files.read_bytes(self._folder / f"stacks-{worker.rank}")[worker.requested_from :]
            if found := _main_stack(text.decode(errors="replace"), worker.thread):
                return found
        return STOPPED.get(_status(worker.pid).get("State", "")[:1], "").format(pid=worker.pid)

    def _text(self, late: list[_Worker], answers: Mapping[int, str], now: float, low: int, high: int) -> str:
        seconds = min(now - worker.since for worker in late)
        who, moved = (self._who(late), "did not move") if low < high else ("no rank", "has moved")
        others = f" (others: {_named(high)})" if low < high else ""
        lines = [f"{who} {moved} from {_named(low)} for {seconds:.0f} s{others}"]
        if all(worker.connects for worker in late):
            why = "ranks are missing, or torch's store has lost their keys"
            lines = [f"{self._who(late)} in {CONNECTS} for {seconds:.0f} s: {why}"]
        groups: dict[str, list[_Worker]] = {}
        for worker in late:
            groups.setdefault(answers[worker.rank] or _silence(worker), []).append(worker)
        # The few that differ from the rest are more likely the cause; the rest wait for them.
        for answer, workers in sorted(groups.items(), key=lambda one: (_STACK in one[0], len(one[1]))):
            pids = ", ".join(str(worker.pid) for worker in workers)
            lines.append(f"  {self._who(workers)} (process {pids}): {answer}")
        return "\n".join(lines)

    def _who(self, workers: list[_Worker]) -> str:
        ranks = sorted(worker.rank for worker in workers)
        return f"rank{'s' if ranks[1:] else ''} {', '.join(map(str, ranks))} on {self._host}"


def _silence(worker: _Worker) -> str:
    if _status(worker.pid).get("State", "").startswith("D"):
        return "no stack: it hangs in the kernel, in a file system or a driver"
    return f"no stack: it did not answer signal {SIGNAL} in {ANSWER_S:g} s"


def _named(place: int) -> str:
    if place < 0:
        return "its start"
    return f"the end of step {place // 2}" if place % 2 == 0 else f"step {(place + 1) // 2}"


def _status(pid: int) -> dict[str, str]:
    """Read /proc/PID/status; empty when the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    found = dict(_pairs(lines))
    return {} if found.get("State", "Z")[:1] in "ZX" else found


def _pairs(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    for line in lines:
        name, _, value = line.partition(":")
        yield name, value.strip()


def _main_stack(text: str, thread: int) -> str:
    """Return the main thread's innermost frames in faulthandler's text; empty while it is not there yet."""
    found = re.search(rf"(?m)^(?:Current t|T)hread 0x0*{thread:x}\b.*\n((?:  .*\n)+)", text)
    if found is None:
        return ""
    frames = [
        re.sub(r'^File "(.*)", line (\d+) in (.*)$', r"\1:\2 \3", line.strip())
        for line in found[1].splitlines()
    ]
    shown = frames[:FRAMES] + ([f"and {len(frames) - FRAMES} more"] if len(frames) > FRAMES else [])
    return f"{_STACK}\n" + "\n".join(f"    {line}" for line in shown)

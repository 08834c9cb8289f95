"""The run of a training loop: when it stops, what it saves, and where it goes on."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch.distributed as dist

from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.launch.hang_watch import Pulse
from imgkit_entrypoints.launch.progress import ProgressNotes
from imgkit_entrypoints.run import (
    ending,
    folder_lock,
    ranks,
    rehearsal,
    stop_requests,
)
from imgkit_entrypoints.run.agreement import AddedNumbers
from imgkit_entrypoints.run.kept_state import KeptState
from imgkit_entrypoints.run.number_log import NumberLog
from imgkit_entrypoints.run.ranks import Ranks
from imgkit_entrypoints.run.snapshots import FoundSnapshot, SnapshotWriter
from imgkit_entrypoints.run.stepping import Stepping
from imgkit_entrypoints.run.stop_requests import StopRequests

WAIT_TOLD_S = 30.0
"""Time after which a rank that waits for the others at the end of its loop says so."""


def _say(text: str) -> None:
    print(f"run: {text}", file=sys.stderr, flush=True)


class Run:
    """A run: it stops on request, saves its state, and goes on from it. `start` makes one.

    All ranks call `restore`, `steps`, `due`, `save` and what else is a collective call equally often; `track`
    comes first.
    """

    def __init__(
        self, folder: Path, keep: int, env: Mapping[str, str], until: float, say: Callable[[str], None]
    ) -> None:
        self.folder = folder
        """The run's folder."""
        self._env, self._say, self._rank = env, say, int(env.get("RANK", "0"))
        self._here: Ranks | None = None
        self._rehearses = False
        kept = folder if keep else None
        own = stop_requests.own_folder(kept, env, say)
        if own:
            own.refuse_stopped()
        self._lock: BinaryIO | None = None
        if self._rank == 0:
            self._lock = folder_lock.hold(kept, say, env) if kept else None
            if own:
                own.clear()
        self._requests = StopRequests(env, own if self._rank == 0 else None, say, until)
        node = env.get("IMGKIT_STOP_DIR")
        notes = ProgressNotes(node, self._rank)
        self._state = KeptState(kept, keep, notes, say)
        self._place = self._state.place
        self._stepping = Stepping(self._place, kept, Pulse(node, self._rank), notes, say)
        self._requests.listen()

    @classmethod
    def start(
        cls,
        folder: str | Path | None = None,
        *,
        keep: int = 2,
        stop_after_s: float = math.inf,
        say: Callable[[str], None] = _say,
    ) -> Run:
        """Look out for requests to stop, and open the run's folder. Needs no process group.

        Parameters
        ----------
        folder : the run's folder, which all nodes share; by default IMGKIT_RUN_DIR, else
            ``runs/NAME-OF-THE-PROGRAM``. A new run needs a folder of its own.
        keep : number of snapshots that stay; 0: the run needs no folder and saves nothing.
        stop_after_s : seconds after which the run saves and stops by itself.
        say : gets the run's messages; by default they go to stderr.

        Raises
        ------
        UsageError : a person's file `stop` is in the folder, or another run writes into it.
        """
        program = Path(sys.argv[0]).stem or "program"
        chosen = folder or os.environ.get("IMGKIT_RUN_DIR") or Path("runs") / program
        return cls(Path(chosen), keep, os.environ, time.monotonic() + stop_after_s, say)

    @property
    def step(self) -> int:
        """Steps done."""
        return self._place.step

    @property
    def epoch(self) -> int:
        """Passes over the loader that are done."""
        return self._place.epoch

    @property
    def stopping(self) -> str:
        """Why the run stops at the next `save`; empty: it goes on. All ranks see the same."""
        return self._stepping.agreement.stop if self._here else ""

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        here = self._here
        try:
            if kind is None and here is not None:
                ending.finish(self._state, self._stepping, here, self._tell)
        finally:
            self._requests.deaf()
            in_step = kind is None or self.stopping  # after an error, others may still use it
            if in_step and here is not None and here.group is not None:
                with contextlib.suppress(ValueError, AssertionError):  # the program has destroyed all groups
                    dist.destroy_process_group(here.group)
            if self._lock is not None:
                self._lock.close()

    def track(self, **parts: Any) -> None:
        """Name the objects whose state belongs to the run: model, optimizer, scheduler, scaler, loader.

        Random states of torch, Python and NumPy always belong to it. A DDP model is saved without its
        wrapper. A DataLoader over a map-style dataset needs no state: `steps` counts its batches.

        Raises
        ------
        UsageError : an object has no state_dict and load_state_dict, or is sharded over the ranks.
        """
        if self._state.may_write or self._stepping.has_begun:
            raise UsageError("run.track comes too late", hint="call it before run.restore and run.steps")
        for name, value in parts.items():
            self._state.tracked.add(name, value)

    def connect(self, here: Ranks) -> None:
        """Use a process group of the program, not a gloo group of the run's own: fewer connections.

        Its calls and the program's must then come in the same order on all ranks.
        """
        self._here = here
        self._stepping.connect(here, self._requests.asked)

    def _join(self) -> Ranks:
        """Connect the ranks, once the program has opened its process group."""
        if self._here is not None:
            return self._here
        here = ranks.connected(self._env, self._rank)
        self.connect(here)
        return here

    def find(self, where: str | Path | None = None) -> FoundSnapshot | None:
        """Find the newest whole snapshot, for a program that needs it before its objects exist.

        `tensors("NAME.pt")` of the result is the state of what was tracked as NAME. A collective call.

        Parameters
        ----------
        where : the folder of another run, or one snapshot; by default this run's folder.
        """
        folder = self._state.folder if where is None else Path(where)
        return None if folder is None else self._state.find(folder, self._join())

    def restore(self, found: FoundSnapshot | None = None) -> bool:
        """Take over `found`, or the newest whole snapshot; False if there is none. A collective call.

        Raises
        ------
        UsageError : the snapshot holds other objects, or cannot be read.
        """
        here, newest = self._join(), found or self.find()
        self._state.may_write = True
        if newest is None:
            return False
        self._state.restore(newest, here)
        self._stepping.saved_step = self.step
        # With two ranks, the order of a sum does not matter.
        self._rehearses = self._state.tracked.sums_gradients and here.world_size > 2
        if found is None:
            self._tell(f"resumes after step {self.step}: {newest.where}")
        return True

    def steps(self, loader: Any, *, save_every: int = 0, accumulate: int = 1) -> Iterator[tuple[int, Any]]:
        """Iterate once over `loader`; yield the number of each step, from 1, and its batch.

        After a restore, the first call goes on where the snapshot was taken. After the body of a step, the
        ranks save if it is time, and stop if any of them was asked to: then the state is saved and the
        program ends, with nothing behind the loop but ``finally``. A ``break`` counts its step as done.

        Parameters
        ----------
        save_every : steps between two snapshots; 0: save only at a stop and at the end of the run.
        accumulate : batches of an update of the weights; the run stops and saves only between updates.

        Raises
        ------
        UsageError : the loader cannot resume, or the ranks have loaders of different lengths.
        CheckFailed : the ranks have taken different numbers of steps.
        """
        here = self._join()
        if self._stepping.has_begun:  # as at the end of the run, where another rank may be
            self._stepping.agreement.meet(self.step)
        batches = self._state.open_pass(loader, save_every, accumulate, here)
        self._stepping.begin(save_every)
        for batch in batches:
            if self._rehearses:
                self._rehearses, log, self._stepping.log = False, self._stepping.log, NumberLog()
                for again in rehearsal.rehearsed(batch, accumulate, loader, self._state.tracked):
                    yield self.step + 1, again
                self._stepping.log = log
            self._stepping.enter()
            try:
                yield self.step + 1, batch
            except GeneratorExit:
                self._count()
                raise
            self._count()
            if self._place.between_updates(accumulate) and self._stepping.agree(save_every):
                self.save()
        waits = threading.Timer(WAIT_TOLD_S, self._tell_wait)
        waits.daemon = True
        waits.start()
        self._stepping.agreement.meet(self.step)
        waits.cancel()
        if self.stopping:
            self.save()
        self._place.close()

    def log(self, **numbers: Any) -> None:
        """Note numbers of this step, such as the loss; no call waits for a device or another rank.

        Their means over steps and ranks go to the terminal and to ``metrics.jsonl`` in the run's folder.
        Every rank logs the same names, or one rank alone logs.
        """
        self._stepping.log.add(numbers)

    def add_up(self, numbers: AddedNumbers, *, every: int) -> None:
        """Add up `numbers` over all ranks in place of what `log` gets; a collective call.

        What their `arrived` raises ends the run on all ranks alike, and nothing is saved.

        Parameters
        ----------
        every : most steps between two exchanges, which come at its multiples and at those of a divisor.
        """
        self._join()
        self._stepping.add_up(numbers, every)

    def lives(self) -> None:
        """Tell the hang watch that this rank is busy between two steps, for example in an evaluation."""
        self._stepping.pulse.lives()

    def begins(self) -> None:
        """Tell the hang watch that this rank has the next batch; optional in a loop with `due`."""
        self._begin(0)
        self._stepping.enter()

    def looks(self) -> bool:
        """Whether the numbers of the step that begins are sent at its end, so that costly ones pay off."""
        return self._stepping.agreement.looks(self._place.step + 1)

    def due(self, *, save_every: int = 0) -> bool:
        """End a step of a loop that is not over `steps`; True if the loop has to call `save` now."""
        self._begin(save_every)
        self._count()
        return self._stepping.agree(save_every)

    def _begin(self, save_every: int) -> None:
        if not self._stepping.has_begun:
            self._join()
            self._stepping.begin(save_every)

    def _count(self) -> None:
        self._stepping.count()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Do something between two steps that is no training, such as an evaluation; a collective call.

        All numbers of the steps before have arrived, and the time in it counts for no step.
        """
        self._stepping.agreement.settle(self.step)
        yield
        self._stepping.go_on()

    def save(self) -> None:
        """Save the state; a collective call. After a request to stop this does not return.

        The snapshot is written in the background. At a stop, the run waits until it is whole, and raises
        SystemExit.

        Raises
        ------
        UsageError : nothing is tracked, or the folder holds snapshots that nobody has restored.
        """
        here = self._join()
        self._state.save(here)
        if self.stopping:
            ending.leave(self._state, self._stepping, here, self._env, self._tell)
        self._stepping.saved_step = self.step
        self._stepping.go_on()

    def refuse_older(self) -> None:
        """Insist on a new run, in place of `restore`; a collective call.

        Raises
        ------
        UsageError : the folder holds snapshots.
        """
        self._state.refuse_older(self._join())

    def saving(self) -> contextlib.AbstractContextManager[None]:
        """Count the time in it as saving in ``goodput.json``, for files of the program's own."""
        return self._state.notes.saving()

    def wait(self) -> SnapshotWriter:
        """Wait until the last snapshot is whole; the result has its step. A collective call."""
        return self._state.wait(self._join())

    def _tell(self, text: str) -> None:
        if self._rank == 0:
            self._say(text)

    def _tell_wait(self) -> None:
        self._say(f"rank {self._rank} has no batch after step {self.step}, and waits for the other ranks")

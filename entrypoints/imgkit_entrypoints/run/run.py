"""The run of a training loop: when it stops, what it saves, and where it goes on."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
import torch.distributed as dist

from imgkit_entrypoints.errors import CheckFailed, UsageError
from imgkit_entrypoints.launch.hang_watch import Pulse
from imgkit_entrypoints.launch.progress import ProgressNotes
from imgkit_entrypoints.run import (
    ending,
    folder_lock,
    place,
    random_state,
    resumable,
    snapshot_files,
    snapshots,
    stop_requests,
)
from imgkit_entrypoints.run.agreement import Agreed, Agreement
from imgkit_entrypoints.run.number_log import NumberLog
from imgkit_entrypoints.run.place import PassOptions, RunPosition
from imgkit_entrypoints.run.progress_lines import ProgressLines
from imgkit_entrypoints.run.random_state import SentState
from imgkit_entrypoints.run.ranks import Ranks
from imgkit_entrypoints.run.stop_requests import StopRequests, reason_of
from imgkit_entrypoints.run.tracked import Tracked

MOST_STEPS = 1000
"""Most steps between two looks."""
WAIT_TOLD_S = 30.0
"""Time after which a rank that waits for the others at the end of its loop says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Resumed:
    """Random states of a snapshot, for the first pass after it."""

    pass_drawn: Mapping[str, Any]
    drawn: Mapping[str, Any]


class Run:
    """A run: it stops on request, saves its state, and goes on from it. `start` makes one.

    All ranks call `restore`, `steps`, `due` and `save` equally often; `track` comes first.
    """

    def __init__(self, folder: Path, keep: int, env: Mapping[str, str]) -> None:
        self.folder = folder
        """The run's folder."""
        self.step = 0
        """Steps done."""
        self.epoch = 0
        """Passes over the loader that are done."""
        self._env, self._keep, self._rank = env, keep, int(env.get("RANK", "0"))
        self._tracked, self._log = Tracked(), NumberLog()
        self._batch, self._loader, self._length = 0, None, -1
        self._batch_size: int | None = None
        self._pass_drawn: Mapping[str, Any] | None = None
        self._resumed: _Resumed | None = None
        self._may_write = self._has_written = self._rehearses = False
        self._saved = RunPosition()
        self._stop = ""
        self._here: Ranks | None = None
        self._agreement: Agreement
        self._keeper: snapshots.SnapshotWriter
        own = stop_requests.own_folder(folder, env, _say)
        if own:
            own.refuse_stopped()
        self._lock: BinaryIO | None = None
        self._lines: ProgressLines | None = None
        if self._rank == 0:
            self._lock, self._lines = folder_lock.hold(folder, _say), ProgressLines(folder, _say)
            if own:
                own.clear()
        self._requests = StopRequests(env, own if self._rank == 0 else None, _say)
        self._pulse = Pulse(env.get("IMGKIT_STOP_DIR"), self._rank)
        self._progress = ProgressNotes(env.get("IMGKIT_STOP_DIR"), self._rank)
        self._requests.listen()

    @classmethod
    def start(cls, folder: str | Path | None = None, *, keep: int = 2) -> Run:
        """Look out for requests to stop, and open the run's folder. Needs no process group.

        Parameters
        ----------
        folder : the run's folder, which all nodes share; by default IMGKIT_RUN_DIR, else
            ``runs/NAME-OF-THE-PROGRAM``. A new run needs a folder of its own.
        keep : number of snapshots that stay.

        Raises
        ------
        UsageError : a person's file `stop` is in the folder, or another run writes into it.
        """
        program = Path(sys.argv[0]).stem or "program"
        chosen = folder or os.environ.get("IMGKIT_RUN_DIR") or Path("runs") / program
        return cls(Path(chosen), keep, os.environ)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        here = self._here
        try:
            if kind is None and here is not None:
                self._finish(here)
        finally:
            self._requests.deaf()
            in_step = kind is None or self._stop  # after an error, others may still use it
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
        if self._here is not None:
            raise UsageError("run.track comes too late", hint="call it before run.restore and run.steps")
        for name, value in parts.items():
            self._tracked.add(name, value)

    def restore(self) -> bool:
        """Take over the newest whole snapshot; False if there is none. A collective call.

        Raises
        ------
        UsageError : the snapshot holds other objects, or cannot be read.
        """
        here = self._join()
        self._may_write = True
        found = snapshots.newest(self.folder, here, self._tell)
        if found is None:
            return False
        position = place.position_in(found)
        self._tracked.load(self._tracked.read(found, here), str(found.where))
        drawn, pass_drawn = found.tensors("random.pt"), found.tensors("pass.pt")
        self.step, self.epoch, self._batch = position.step, position.epoch, position.batch
        self._batch_size = position.batch_size
        if len(drawn) == here.world_size:
            random_state.restore(drawn[here.rank])
            own = drawn[here.rank]
        else:
            own = self._of_other_ranks(len(drawn), drawn[0], here)
        self._resumed = _Resumed(pass_drawn=pass_drawn[here.rank % len(pass_drawn)], drawn=own)
        self._saved = self._now()
        # With two ranks, the order of a sum does not matter.
        self._rehearses = self._tracked.sums_gradients and here.world_size > 2
        self._tell(f"resumes after step {self.step}: {found.where}")
        return True

    def _of_other_ranks(self, ranks: int, drawn: Mapping[str, Any], here: Ranks) -> Mapping[str, Any]:
        """Convert the place of each of `ranks` ranks, and draw new random numbers for every rank."""
        batches = self._batch * ranks
        self._batch = batches // here.world_size
        if batches % here.world_size:
            self._tell(f"{here.world_size} ranks instead of {ranks}: some samples of this epoch come again")
        random_state.restore(drawn)
        random_state.seed_everything(int(torch.randint(1 << 62, ()).item()) + here.rank)
        return random_state.current()

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
        for batch in self._opened(loader, save_every, accumulate, here):
            if self._rehearses:
                yield from self._rehearsal(batch, accumulate)
            self._pulse.begins(self.step + 1)
            self._progress.trains()
            try:
                yield self.step + 1, batch
            except GeneratorExit:
                self._count()
                raise
            self._count()
            if (self._batch % accumulate == 0 or self._batch == self._length) and self._agree(save_every):
                self.save()
        waits = threading.Timer(WAIT_TOLD_S, self._tell_wait)
        waits.daemon = True
        waits.start()
        self._look(everything=True)
        waits.cancel()
        if self._stop:
            self.save()
        self.epoch, self._batch, self._loader, self._pass_drawn = self.epoch + 1, 0, None, None

    def _opened(self, loader: Any, save_every: int, accumulate: int, here: Ranks) -> Iterator[Any]:
        resumable.refuse_without_position(loader)
        if resumable.has_state(loader) and not self._tracked.has(loader):
            raise UsageError(
                f"run.steps: the state of this {type(loader).__name__} is not tracked",
                hint="run.track(loader=loader, ...)",
            )
        length = len(loader) if hasattr(loader, "__len__") else -1
        own = PassOptions(batches=length, save_every=save_every, accumulate=accumulate, step=self.step)
        place.refuse_different(here.gather(own, PassOptions))
        self._loader, self._length, more = loader, length, resumable.generators(loader)
        self._agreement.begin(self.step, save_every or MOST_STEPS)
        self._pulse.done(self.step)
        resumed, self._resumed = self._resumed, None
        size = resumable.batch_size(loader)
        if resumed is None or not self._batch:
            self._batch_size, self._pass_drawn = size, random_state.current(more)
            return iter(loader)
        self._batch = self._now().batches_of(size)
        self._batch_size, self._pass_drawn = size, resumed.pass_drawn
        return resumable.rest(
            loader,
            self._batch,
            rewind=lambda: random_state.restore(resumed.pass_drawn, more),
            wind=lambda: random_state.restore(resumed.drawn, more),
        )

    def _rehearsal(self, batch: Any, accumulate: int) -> Iterator[tuple[int, Any]]:
        """Let the loop take the first step after a restore once before it counts, and undo its effects.

        DDP arranges the gradients in other buckets after its first backward pass, which changes the order of
        sums. Without this, a resumed run on 3 or more ranks would not equal an undisturbed one bit by bit.
        """
        more = resumable.generators(self._loader)
        drawn, before = random_state.current(more), snapshots.on_host(self._tracked.of_all())
        log, self._log = self._log, NumberLog()
        for _ in range(accumulate):
            yield self.step + 1, copy.deepcopy(batch)
        self._log, self._rehearses = log, False
        self._tracked.load(before, "the state before the first step")
        self._tracked.drop_gradients()
        random_state.restore(drawn, more)

    def log(self, **numbers: Any) -> None:
        """Note numbers of this step, such as the loss; no call waits for a device or another rank.

        Their means over steps and ranks go to the terminal and to ``metrics.jsonl`` in the run's folder.
        Every rank logs the same names, or one rank alone logs.
        """
        self._log.add(numbers)

    def lives(self) -> None:
        """Tell the hang watch that this rank is busy between two steps, for example in an evaluation."""
        self._pulse.lives()

    def due(self, *, save_every: int = 0) -> bool:
        """End a step of a loop that is not over `steps`; True if the loop has to call `save` now."""
        self._join()
        self._count()
        return self._agree(save_every)

    def _count(self) -> None:
        self.step, self._batch = self.step + 1, self._batch + (self._loader is not None)
        self._pulse.done(self.step)
        self._progress.moved()

    def _agree(self, save_every: int) -> bool:
        self._look()
        return bool(self._stop) or (
            save_every > 0 and self.step // save_every > self._saved.step // save_every
        )

    def _look(self, *, everything: bool = False) -> None:
        if everything or self._agreement.looks(self.step):
            self._take(self._agreement.receive())
            self._agreement.send(self.step, self._log.take(everything=everything))
            if everything:
                self._take(self._agreement.receive())

    def _take(self, agreed: Agreed | None) -> None:
        if agreed is not None:
            means = self._log.means(agreed.sums)
            self._stop = self._stop or reason_of(agreed.asked)
            if self._lines:
                self._lines.note(agreed.step, self._passes(), agreed.steps, agreed.seconds, means)

    def _passes(self) -> float:
        return self.epoch + (self._batch / self._length if self._length > 0 else 0.0)

    def save(self) -> None:
        """Save the state; a collective call. After a request to stop this does not return.

        The snapshot is written in the background. At a stop, the run waits until it is whole, and raises
        SystemExit.

        Raises
        ------
        UsageError : nothing is tracked, or the folder holds snapshots that nobody has restored.
        """
        here = self._join()
        if not len(self._tracked):
            raise UsageError("nothing is tracked", hint="run.track(model=model, optimizer=optimizer)")
        if not self._may_write:
            older = snapshot_files.newest_first(self.folder / snapshots.FOLDER)
            if any(here.gather(bool(older), bool)):
                raise UsageError(
                    "this run would replace the snapshots of another one",
                    where=str(self.folder),
                    hint="call run.restore() after run.track(), or name another folder",
                )
        drawn = random_state.current(resumable.generators(self._loader))
        pass_drawn = drawn if self._pass_drawn is None else self._pass_drawn
        by_rank = self._tracked.of_ranks(here)
        self._saved, self._may_write, self._has_written = self._now(), True, True
        with self._progress.saving(self.step):
            self._keeper.save(
                self.step,
                tensors=lambda: {
                    f"{name}.pt": one for name, one in {**self._tracked.of_all(), **by_rank}.items()
                },
                drawn={"random.pt": SentState.of(drawn), "pass.pt": SentState.of(pass_drawn)},
                about={"run": dataclasses.asdict(self._saved)},
            )
        if self._stop:
            self._leave(here)

    def _now(self) -> RunPosition:
        return RunPosition(step=self.step, epoch=self.epoch, batch=self._batch, batch_size=self._batch_size)

    def _leave(self, here: Ranks) -> None:
        self._look(everything=True)
        if self._lines:
            self._lines.write(self.step, self._passes())
        saved = self._keeper.close()
        kept = f"the state of step {saved} is saved" if saved >= 0 else "this start saved no state"
        self._tell(f"stopped after step {self.step}: {self._stop}; {kept}")
        ending.leave(ending.code_of(self.step, saved, self._stop, self.folder, here, self._env))

    def _finish(self, here: Ranks) -> None:
        """Save the last state, after the loop."""
        moved = self._saved != self._now() and len(self._tracked) > 0
        if here.world_size > 1 and not dist.is_initialized():
            if moved:
                self._tell(
                    "warning: the last state is not saved: there is no process group at the end of `with`"
                )
            return
        self._look(everything=True)
        if self._lines:
            self._lines.write(self.step, self._passes())
        self._stop = ""  # all is done
        if moved:
            self.save()
        if self._has_written and self._keeper.close() != self.step:
            raise CheckFailed(f"the state of step {self.step} is not saved", where=str(self.folder))

    def _join(self) -> Ranks:
        """Connect the ranks, once the program has opened its process group."""
        if self._here is not None:
            return self._here
        grouped = dist.is_available() and dist.is_initialized()
        if not grouped and int(self._env.get("WORLD_SIZE", "1")) > 1:
            raise UsageError(
                "the ranks are not connected yet",
                hint="call torch.distributed.init_process_group() before run.restore and run.steps",
            )
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
        if rank != self._rank:
            raise UsageError(
                f"this is rank {rank} of the process group, but RANK said {self._rank} at Run.start",
                hint="start the program by dist-run or torchrun, or set RANK and LOCAL_RANK before Run.start",
            )
        self._here = here = Ranks(
            rank=rank,
            local_rank=int(self._env.get("LOCAL_RANK", "0")),
            world_size=world_size,
            device=torch.device("cpu"),
            # A group of its own: its calls mix with none of the program's, and use no GPU.
            group=dist.new_group(backend="gloo") if world_size > 1 else None,
        )
        self._agreement = Agreement(here, self._requests.asked)
        self._keeper = snapshots.SnapshotWriter(self.folder, self._keep, here, _say, self._progress.keeps)
        return here

    def _tell(self, text: str) -> None:
        if self._rank == 0:
            _say(text)

    def _tell_wait(self) -> None:
        _say(f"rank {self._rank} has no batch after step {self.step}, and waits for the other ranks")


def _say(text: str) -> None:
    print(f"run: {text}", file=sys.stderr, flush=True)

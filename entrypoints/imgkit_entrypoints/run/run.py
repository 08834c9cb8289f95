"""The run of a training loop: when it stops, what it saves, and where it goes on."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch.distributed as dist

from imgkit_entrypoints import terminal
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.files import in_job_folder
from imgkit_entrypoints.launch.progress import ProgressNotes
from imgkit_entrypoints.launch.start_up import first_attempt_s
from imgkit_entrypoints.launch.watchdog import Pulse
from imgkit_entrypoints.run import disk, random_state, ranks, stepping, stop_requests
from imgkit_entrypoints.run.agreement import AddedNumbers, NumberLog
from imgkit_entrypoints.run.checkpoints import CheckpointWriter, DoneCalls, FoundCheckpoint
from imgkit_entrypoints.run.program import ProgramRecord
from imgkit_entrypoints.run.ranks import Ranks
from imgkit_entrypoints.run.rehearsal import DdpModels
from imgkit_entrypoints.run.stepping import RunState, Stepping
from imgkit_entrypoints.run.stop_requests import StopRequests
from imgkit_entrypoints.run.updates import Updates

WAIT_TOLD_S = 30.0
"""Time after which a rank that waits for the others at the end of its loop says so."""


def _say(text: str) -> None:
    terminal.err(f"run: {text}")


class Run:
    """A run: it stops on request, saves its state, and goes on from it. `start` makes one.

    All ranks call `restore`, `steps`, `due`, `save` and what else is a collective call equally often; `track`
    comes first.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        env: Mapping[str, str],
        until: float,
        say: Callable[[str], None],
        program: ProgramRecord,
    ) -> None:
        self.folder = folder
        """The run's folder."""
        self._env, self._say, self._rank = env, say, int(env.get("RANK", "0"))
        self._here: Ranks | None = None
        self._ddp = DdpModels()
        self._rehearses = self._watches = self._in_step = self._has_looked = False
        self._position_is_read = True
        kept = folder if keep else None
        own = stop_requests.own_folder(kept, env, say)
        if own:
            own.refuse_stopped()
        self._lock: BinaryIO | None = None
        if self._rank == 0:
            self._lock = disk.lock(kept, say, env) if kept else None
            if own:
                own.clear()
        self._requests = StopRequests(env, own if self._rank == 0 else None, until)
        node = env.get("IMGKIT_STOP_DIR")
        notes = ProgressNotes(node, self._rank)
        self._state = RunState(kept, keep, notes, say, program)
        self._position = self._state.position
        self._stepping = Stepping(self._position, kept, Pulse(node, self._rank), notes, say)
        self._updates = Updates(self._state.tracked, self._tell)
        self._requests.listen()

    @classmethod
    def start(
        cls,
        folder: str | Path | None = None,
        *,
        keep: int = 2,
        stop_after_s: float = math.inf,
        options: Mapping[str, object] | None = None,
        say: Callable[[str], None] = _say,
    ) -> Run:
        """Look out for requests to stop, and open the run's folder. Needs no process group.

        Parameters
        ----------
        folder : the run's folder, which all nodes share; by default IMGKIT_RUN_DIR, else
            ``runs/NAME-OF-THE-PROGRAM``. A new run needs a folder of its own. A relative path starts at
            the job's folder, also where the program starts elsewhere (``--workdir``).
        keep : number of checkpoints that stay; 0: the run needs no folder and saves nothing.
        stop_after_s : seconds after which the run saves and stops by itself. Under dist-run they count from
            the first attempt, also after a failure; a job that was requeued counts anew.
        options : the program's options, such as ``vars(args)``; by default those of the command line. A
            checkpoint keeps them, and `restore` names those that have changed.
        say : gets the run's messages; by default they go to stderr.

        Raises
        ------
        UsageError : a person's file `stop` is in the folder, or another run writes into it.
        """
        program = Path(sys.argv[0]).stem or "program"
        chosen = folder or os.environ.get("IMGKIT_RUN_DIR") or Path("runs") / program
        return cls(
            in_job_folder(Path(chosen), os.environ),
            keep,
            os.environ,
            first_attempt_s(os.environ) + stop_after_s,
            say,
            ProgramRecord(options, sys.argv[1:]),
        )

    @property
    def step(self) -> int:
        """Steps done."""
        self._position_is_read = True
        return self._position.step

    @property
    def epoch(self) -> int:
        """Epochs that are done: one pass of each loop over `steps`, to its end or to a ``break``."""
        self._position_is_read = True
        return self._position.epoch

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
                self._break_off()
                stepping.finish(self._state, self._stepping, here, self._tell)
        finally:
            self._requests.deaf()
            self._updates.close()
            in_step = kind is None or self.stopping  # after an error, others may still use it
            if in_step and here is not None and here.group is not None:
                with contextlib.suppress(ValueError, AssertionError):  # the program has destroyed all groups
                    self._state.close()
                    dist.destroy_process_group(here.group)
            if self._lock is not None:
                self._lock.close()

    def track(self, **parts: Any) -> None:
        """Name the objects whose state belongs to the run: model, optimizer, scheduler, scaler, loader.

        A checkpoint keeps rank 0's state of each, and a resume gives it to all ranks; of a loader it keeps
        one for each rank. Of models and optimizers that FSDP2 shards it keeps the pieces of all ranks. Random
        states of torch, Python and NumPy always belong to it. A model is saved
        without the wrappers of DDP and torch.compile. A DataLoader over a map-style dataset needs no
        state: `steps` counts its batches.

        Raises
        ------
        UsageError : an object has no state_dict and load_state_dict, or is sharded otherwise than by FSDP2.
        """
        self._track(parts, by_rank=False)

    def track_per_rank(self, **parts: Any) -> None:
        """Name objects whose state each rank keeps for itself, such as its position in the data.

        Another number of ranks can resume only if the object has a method ``regroup_state_dicts(states,
        rank, world_size)``. It gets the states of all ranks before, and returns that of `rank`.

        Raises
        ------
        UsageError : as `track`.
        """
        self._track(parts, by_rank=True)

    def _track(self, parts: Mapping[str, Any], *, by_rank: bool) -> None:
        if self._state.may_write or self._stepping.has_begun:
            raise UsageError("run.track comes too late", hint="call it before run.restore and run.steps")
        for name, value in parts.items():
            self._state.tracked.add(name, value, by_rank=by_rank)
            self._state.program.add(name, value)

    def checkpoint_done(self, call: Callable[[Path, int], object]) -> None:
        """Let `call` get the folder and the step of each checkpoint that is safely written, to upload it.

        It runs on rank 0, in a thread of its own, and no step waits for it. Its checkpoint stays meanwhile.
        If several come during a call, the newest is next, and the others are passed over. The end of the run
        waits for it. What it raises is reported.

        Raises
        ------
        UsageError : it is called twice, or after the first checkpoint.
        """
        if self._state.done is not None or self._state.has_written:
            raise UsageError(
                "run.checkpoint_done is called twice, or too late", hint="call it once, after run.track"
            )
        if self._rank == 0:
            self._state.done = DoneCalls(call, self._say)

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

    def find(self, where: str | Path | None = None) -> FoundCheckpoint | None:
        """Find the newest whole checkpoint, for a program that needs it before its objects exist.

        `tensors("NAME.pt")` of the result is the state of what was tracked as NAME. A collective call.

        Parameters
        ----------
        where : the folder of another run, or one checkpoint; by default this run's folder.
        """
        folder = self._state.folder if where is None else Path(where)
        return None if folder is None else self._state.find(folder, self._join())

    def restore(self, found: FoundCheckpoint | None = None) -> bool:
        """Take over `found`, or the newest whole checkpoint; False if there is none. A collective call.

        Raises
        ------
        UsageError : the checkpoint holds other objects, or cannot be read; rank 0's state of an object cannot
            count for all; or a scheduler is not tracked.
        """
        self._updates.refuse_unknown_scheduler()
        here = self._join()
        self._state.prove_shared(here)
        newest = found or self.find()
        self._state.may_write = True
        self._look_for_ddp(here, before_steps=True)
        if newest is None:
            if self._state.folder is not None:
                self._state.tracked.agreed(here, "run.restore")
            return False
        self._state.restore(newest, here)
        self._updates.restored()
        self._position_is_read = self._position.epoch == 0
        self._stepping.saved_step = self._position.step
        self._rehearses = here.world_size > 2
        if found is None:
            self._tell(f"resumes after step {self._position.step}: {newest.where}")
        return True

    def steps(
        self, loader: Any, *, name: str = "", save_every: int = 0, accumulate: int = 1
    ) -> Iterator[tuple[int, Any]]:
        """Iterate once over `loader`; yield the number of each step, from 1, and its batch.

        After a restore, the first call goes on where the checkpoint was taken. After the body of a step, the
        ranks save if it is time, and stop if any of them was asked to: then the state is saved and the
        program ends, with nothing behind the loop but ``finally``. While gradients wait for an optimizer
        that is tracked, both wait for it. A ``break`` counts its step as done, and the pass, too.

        Parameters
        ----------
        name : of this loop, where an epoch has several; each epoch has the same ones, in the same order.
            A resume passes over those that were done.
        save_every : steps between two checkpoints; 0: save only at a stop and at the end of the run.
        accumulate : batches of an update of the weights. Of an optimizer that is tracked, the run sees when
            it is called.

        Raises
        ------
        UsageError : the loader cannot resume, the ranks have loaders of different lengths, another loop comes
            now, or something that takes part in the updates of the weights is not tracked.
        CheckFailed : the ranks have taken different numbers of steps.
        """
        if not name:
            self._position.refuse_other_caller(sys._getframe(1))
        return self._pass(loader, name, save_every, accumulate)

    def _pass(self, loader: Any, name: str, save_every: int, accumulate: int) -> Iterator[tuple[int, Any]]:
        here = self._join()

        def may_save() -> bool:
            return (
                not self._wait(here) if self._updates.are_seen else self._position.between_updates(accumulate)
            )

        if self._stepping.has_begun:  # as at the end of the run, where another rank may be
            self._stepping.agreement.meet(self._position.step)
        options = self._state.next_pass(loader, name, save_every, accumulate, here)
        if options is None:
            return
        late = self._position.was_broken_off or self._stepping.wants_save
        if late and self._stepping.agree(save_every, may_save):
            self._save(here, at_start=True)
        try:
            batches = self._state.open_pass(loader, options, here)
            self._begin_loop(save_every)
            passes = 0
            if self._rehearses:
                self._ddp.look()
                passes = max(here.gather(self._ddp.passes, int, call="run.steps"))
            for batch in batches:
                self._rehearses, self._in_step = False, True
                if passes:
                    times, passes = passes * accumulate, 0
                    log, self._stepping.log = self._stepping.log, NumberLog()
                    again = self._state.rehearsed(batch, times, loader)
                    yield from enumerate(again, self._position.step + 1)
                    self._stepping.log = log
                self._state.first_step()
                self._stepping.enter()
                self._updates.forget()
                yield self._position.step + 1, batch
                self._end_step()
                self._look_at_loaders(loader)
                if self._stepping.agree(save_every, may_save):
                    self._save(here)
            waits = threading.Timer(WAIT_TOLD_S, self._tell_wait)
            waits.daemon = True
            waits.start()
            self._stepping.agreement.meet(self._position.step)
            waits.cancel()
            if self.stopping and not self._wait(here):
                self._save(here)
            self._position.close()
        except GeneratorExit:
            self._break_off()
            raise
        finally:
            self._position.leave()

    def _end_step(self) -> None:
        if self._in_step:
            self._in_step = False
            self._count()

    def _break_off(self) -> None:
        """End the step and the pass that the program has left by a ``break``."""
        self._end_step()
        if self._position.is_open:
            self._position.close(broken_off=True)

    def _wait(self, here: Ranks) -> bool:
        """Whether gradients of a rank wait for their optimizer; a collective call."""
        return self._updates.are_seen and any(
            here.gather(self._updates.wait(), bool, call="the end of a step")
        )

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
        """Tell the watchdog that this rank is busy between two steps, for example in an evaluation."""
        self._stepping.pulse.lives()

    def begins(self) -> None:
        """Tell the watchdog that this rank has the next batch; optional in a loop with `due`."""
        self._begin(0, before_step=True)
        self._stepping.enter()

    def looks(self) -> bool:
        """Whether the numbers of the step that begins are sent at its end, so that costly ones pay off."""
        return self._stepping.agreement.looks(self._position.step + 1)

    def due(self, *, save_every: int = 0) -> bool:
        """End a step of a loop that is not over `steps`; True if the loop has to call `save` now.

        Raises
        ------
        UsageError : a resume of this loop would not be exact, because of DDP on 3 ranks or more.
        """
        self._begin(save_every, before_step=False)
        self._count()
        self._state.first_step()
        self._look_at_loaders(None)
        if self._watches:
            self._refuse_unsettled()
        here = self._join()
        due = self._stepping.agree(save_every, lambda: not self._wait(here))
        self._updates.forget()
        return due

    def _begin(self, save_every: int, *, before_step: bool) -> None:
        if self._stepping.has_begun:
            return
        self._watches = self._look_for_ddp(self._join(), before_steps=before_step)
        self._begin_loop(save_every)

    def _begin_loop(self, save_every: int) -> None:
        if not self._stepping.has_begun:
            self._updates.check()
        if not self._position_is_read:
            self._position_is_read = True
            self._tell(
                f"warning: a pass begins in epoch {self._position.epoch}, but the program never read "
                "run.epoch: write `for epoch in range(run.epoch, EPOCHS)`"
            )
        self._stepping.begin(save_every)

    def _look_at_loaders(self, own: Any) -> None:
        if not self._has_looked:
            self._has_looked = True
            self._updates.warn_of_loaders(own)

    def _look_for_ddp(self, here: Ranks, *, before_steps: bool) -> bool:
        """Look for DDP models whose order of sums will matter; with two ranks it does not."""
        matters = here.world_size > 2 and self._state.folder is not None
        if matters:
            self._ddp.look(before_steps=before_steps)
        return matters

    def _refuse_unsettled(self) -> None:
        self._watches = self._ddp.passes > 0
        try:
            self._ddp.refuse_unsettled()
        except UsageError as error:
            if not self._state.tracked.only_checkpoints:
                raise
            self._watches = False
            self._tell(f"warning: {error}")  # the libraries that keep these may have no such pass

    def _count(self) -> None:
        self._stepping.count()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Do something between two steps that is no training, such as an evaluation; a collective call.

        All numbers of the steps before have arrived, the time in it counts for no step, and the training
        does not see the random numbers that it draws.
        """
        self._stepping.agreement.settle(self._position.step)
        drawn = random_state.current()
        yield
        random_state.restore(drawn)
        self._stepping.go_on()

    def save(self) -> None:
        """Save the state; a collective call. After a request to stop this does not return.

        The checkpoint is written in the background. At a stop, the run waits until it is whole, and raises
        SystemExit. In the body of a loop over `steps`, and while gradients wait for their optimizer, the
        checkpoint is taken at the end of the first step where it can be; after a loop with a name in the
        first epoch, where the next pass begins.

        Raises
        ------
        UsageError : nothing is tracked, or the folder holds checkpoints that nobody has restored; or weights
            were updated in a step that no call of `due` has ended.
        """
        here = self._join()
        if self._updates.are_ahead and not self._position.has_loops:
            raise UsageError(
                "run.save comes after an optimizer.step() that the run has not counted",
                where="run.save",
                hint="call run.due() at the end of each step and run.save() after it, or loop over run.steps",
            )
        if self._position.repeats:  # the checkpoint holds this already
            return
        if self._in_step or self._position.may_have_more_loops or self._wait(here):
            self._stepping.wants_save = True
        else:
            self._save(here)

    def _save(self, here: Ranks, *, at_start: bool = False) -> None:
        self._state.save(here, at_start=at_start)
        if self.stopping:
            stepping.leave(self._state, self._stepping, here, self._env, self._tell)
        self._stepping.saved_step, self._stepping.wants_save = self._position.step, False
        self._stepping.go_on()

    def refuse_older(self) -> None:
        """Insist on a new run, in place of `restore`; a collective call.

        Raises
        ------
        UsageError : the folder holds checkpoints.
        """
        here = self._join()
        self._state.refuse_older(here)
        self._look_for_ddp(here, before_steps=True)

    def saving(self) -> contextlib.AbstractContextManager[None]:
        """Count the time in it as saving in the line at the end, for files of the program's own."""
        return self._state.notes.saving()

    def wait(self) -> CheckpointWriter:
        """Wait until the last checkpoint is whole; the result has its step. A collective call."""
        return self._state.wait(self._join())

    def _tell(self, text: str) -> None:
        if self._rank == 0:
            self._say(text)

    def _tell_wait(self) -> None:
        self._say(
            f"rank {self._rank} has no batch after step {self._position.step}, and waits for the other ranks"
        )

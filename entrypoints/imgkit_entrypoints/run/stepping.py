"""The steps of a run: what each reports, when ranks exchange numbers, what is saved, and how it ends."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from imgkit_entrypoints.errors import EXIT_NO, EXIT_SAVED, CheckFailed, UsageError
from imgkit_entrypoints.launch.progress import ProgressNotes
from imgkit_entrypoints.launch.watchdog import Pulse
from imgkit_entrypoints.run import checkpoints, ranks, rehearsal, resumable, shared_folder, stop_requests
from imgkit_entrypoints.run.agreement import AddedNumbers, Agreed, Agreement, NumberLog
from imgkit_entrypoints.run.checkpoints import CheckpointWriter, DoneCalls, FoundCheckpoint
from imgkit_entrypoints.run.disk import newest_first
from imgkit_entrypoints.run.metrics import MetricsFile, ProgressLines
from imgkit_entrypoints.run.position import (
    LivePosition,
    PassOptions,
    RunPosition,
    position_in,
    refuse_different,
)
from imgkit_entrypoints.run.program import ProgramRecord
from imgkit_entrypoints.run.ranks import Ranks
from imgkit_entrypoints.run.tracked import Tracked

MOST_STEPS = 1000
"""Most steps between two looks."""


class Stepping:
    """Counts the steps at `position`, and notes both ends of each. `connect` comes before the first step.

    Parameters
    ----------
    folder : the run's folder, for metrics; None: there is none.
    notes : get the times of the steps.
    """

    def __init__(
        self,
        position: LivePosition,
        folder: Path | None,
        pulse: Pulse,
        notes: ProgressNotes,
        say: Callable[[str], None],
    ) -> None:
        self._position, self.pulse, self._notes = position, pulse, notes
        self._lines, self.log = ProgressLines(MetricsFile(folder, say)), NumberLog(self._note)
        self._may_save, self._most = folder is not None, 0
        self._writes_lines = self.has_begun = self.wants_save = False
        self.saved_step = 0
        """Step of the last save, or of the checkpoint from which the run goes on."""
        self.agreement: Agreement

    def connect(self, here: Ranks, asked: Callable[[], Sequence[bool]]) -> None:
        """Meet the other ranks; `asked` says whether this one is asked to stop."""
        self.agreement, self._writes_lines = Agreement(here, asked, self.log), here.rank == 0

    def add_up(self, numbers: AddedNumbers, every: int) -> None:
        """Add up these numbers in place of the logged ones; at most `every` steps lie between two looks."""
        self.agreement.numbers, self._most = numbers, every

    def begin(self, save_every: int) -> None:
        """Start the clock before the first step of a loop."""
        self.has_begun = True
        self.agreement.begin(self._position.step, self._most or save_every or MOST_STEPS)
        self.pulse.done(self._position.step)

    def go_on(self) -> None:
        """Start the clock again after a save or a pause."""
        self.agreement.restart(self._position.step)
        self.pulse.done(self._position.step)

    def enter(self) -> None:
        """This rank has its batch of the next step."""
        self.pulse.begins(self._position.step + 1)
        self._notes.trains()

    def count(self) -> None:
        """This rank is done with its step."""
        self._position.count()
        self.pulse.done(self._position.step)
        self._notes.moved()

    def agree(self, save_every: int, may_save: Callable[[], bool]) -> bool:
        """Look if it is time; True if all ranks save now, with all numbers of the steps before.

        Parameters
        ----------
        may_save : whether no rank has gradients that wait; else the ranks save after one of the next steps.
        """
        step = self._position.step
        self.agreement.after(step)
        saves = self._may_save and save_every > 0 and step // save_every > self.saved_step // save_every
        if not (saves or self.agreement.stop or self.wants_save) or not may_save():
            return False
        self.agreement.settle(step)
        self.saved_step = step
        return True

    def end(self) -> None:
        """Wait for the last numbers of ranks that may have taken different numbers of steps."""
        self.agreement.meet(self._position.step)
        if self._writes_lines:
            self._lines.write(self._position.step, self._position.passes())

    def _note(self, agreed: Agreed, means: Mapping[str, float]) -> None:
        if self._writes_lines:
            self._lines.note(agreed.step, self._position.passes(), agreed.steps, agreed.seconds, means)


class RunState:
    """The state of a run, and its checkpoints. Collective calls take the ranks.

    Parameters
    ----------
    folder : the run's folder; None: nothing is written.
    keep : number of checkpoints that stay.
    notes : get the time that saving takes.
    program : what checkpoints record of the program.
    """

    def __init__(
        self,
        folder: Path | None,
        keep: int,
        notes: ProgressNotes,
        say: Callable[[str], None],
        program: ProgramRecord,
    ) -> None:
        self.folder, self._keep, self.notes, self._say = folder, keep, notes, say
        self.program = program
        self.done: DoneCalls | None = None
        """Gets each checkpoint that is whole, on rank 0."""
        self.tracked, self.position = Tracked(), LivePosition()
        self.may_write = self.has_written = False
        self._saved = RunPosition()
        self._restored: FoundCheckpoint | None = None
        """The checkpoint from which the run goes on, until its first step."""
        self._is_proven = False
        """Whether all ranks see the folder, if that matters."""
        self._warned: set[str] = set()
        self._loader: Callable[[], Any] = lambda: None
        """Returns the loader of the latest pass, if the program still has it."""
        self._writer: CheckpointWriter | None = None
        self._together: Ranks | None = None

    @property
    def has_moved(self) -> bool:
        """Whether there is a state that no checkpoint has."""
        return self._saved != self.position.kept() and len(self.tracked) > 0

    def find(self, folder: Path, here: Ranks) -> FoundCheckpoint | None:
        """Find the newest whole checkpoint in `folder`, which may also be a checkpoint."""
        return checkpoints.newest(folder, here, self._say if here.rank == 0 else lambda _: None)

    def restore(self, found: FoundCheckpoint, here: Ranks) -> None:
        """Take over a checkpoint.

        Raises
        ------
        UsageError : it holds other objects, or cannot be read.
        """
        position = position_in(found)
        changes = self.program.changes(found)
        self.tracked.restore(found, here)
        self.position.take_over(position, found, here, self._say)
        self._saved, self._restored = self.position.kept(), found
        for text in changes if here.rank == 0 else ():
            self._say(f"warning: {text}")

    def rehearsed(self, batch: Any, times: int, loader: Any) -> Iterator[Any]:
        """Yield `batch` so often, and undo what the loop's body did with it; a collective call."""
        found = self._restored
        return rehearsal.rehearsed(batch, times, loader, self.tracked, found) if found else iter(())

    def first_step(self) -> None:
        """Forget the checkpoint from which the run goes on: nothing needs it any more."""
        self._restored = None

    def next_pass(
        self, loader: Any, name: str, save_every: int, accumulate: int, here: Ranks
    ) -> PassOptions | None:
        """Compare the options of a pass, and return those of rank 0; None: it was done before the checkpoint.

        Raises
        ------
        UsageError : the loader cannot resume, the ranks have different loaders or options, or another loop
            comes now.
        """
        resumable.refuse_without_position(loader)
        if resumable.has_state(loader) and not any(one is loader for one in self.tracked):
            raise UsageError(
                f"run.steps: the state of this {type(loader).__name__} is not tracked",
                hint="run.track(loader=loader, ...)",
            )
        own = PassOptions(
            name=name,
            batches=resumable.length(loader),
            samples=resumable.samples(loader),
            save_every=save_every,
            accumulate=accumulate,
            step=self.position.step,
            tracked=", ".join(self.tracked.names()),
        )
        every = here.gather(own, PassOptions, call="run.steps")
        refuse_different(every)
        return every[0] if self.position.is_next(name) else None

    def open_pass(self, loader: Any, options: PassOptions, here: Ranks) -> Iterator[Any]:
        """Iterate over `loader` from its beginning, or from where the checkpoint was taken.

        Raises
        ------
        UsageError : the checkpoint was taken in a pass over another loader.
        """
        if self._restored and self.position.repeats:
            # What the program has done in this epoch was done before the checkpoint already.
            self.tracked.restore(self._restored, here)
        if here.rank == 0:
            self._warn(loader, options)
        return self.position.open(loader, options)

    def _warn(self, loader: Any, options: PassOptions) -> None:
        """Warn, once each, of what may differ after a resume."""
        name = options.name
        warnings = [
            f"the loader's {one} draws random numbers that no checkpoint keeps: after a resume within a pass "
            "they are others; docs/howto/own-loop.md names what else the run cannot see"
            for one in resumable.unseen_generators(loader)
        ]
        if self.position.is_between_passes and resumable.is_stateful_loader(loader):
            warnings.append(
                f"after a checkpoint between two passes, {type(loader).__name__} draws other random numbers "
                "than without the stop"
            )
        if self.position.draws_before_pass():
            warnings.append(
                "the program has drawn random numbers between run.restore and run.steps: at the beginning of "
                "this pass, before the checkpoint, they were others; seed them by the epoch"
            )
        if other := self.position.other_data(name, loader, options.samples):
            of = f" of the loop {name}" if name else ""
            warnings.append(f"the data set{of} is not the one in the checkpoint: it {other}")
        before = self._loader()
        if not name and before is not None and before is not loader:
            warnings.append(
                "a pass over another loader than the one before: where an epoch has both, name each, "
                "run.steps(loader, name=...); where one replaces the other, by the same name"
            )
        with contextlib.suppress(TypeError):  # a list has no weak references
            self._loader = weakref.ref(loader)
        for text in warnings:
            if text not in self._warned:
                self._say(f"warning: {text}")
        self._warned.update(warnings)

    def refuse_older(self, here: Ranks) -> None:
        """Raise UsageError, on every rank, if the folder holds checkpoints on any node."""
        older = self.folder and newest_first(self.folder / checkpoints.FOLDER)
        if any(here.gather(bool(older), bool, call="run.save")):
            raise UsageError(
                "this run would replace the checkpoints of another run",
                where=str(self.folder),
                hint="call run.restore() after run.track(), or name another folder",
            )

    def save(self, here: Ranks, *, at_start: bool = False) -> None:
        """Write a checkpoint in the background; `at_start`: a pass of `Run.steps` begins now.

        Raises
        ------
        UsageError : nothing is tracked, or the folder holds checkpoints that nobody has restored.
        """
        if self.folder is None:
            return
        if not len(self.tracked):
            raise UsageError("nothing is tracked", hint="run.track(model=model, optimizer=optimizer)")
        if not self.may_write:
            self.refuse_older(here)
            self.may_write = True
        self.prove_shared(here)
        step = self.position.step
        with self.notes.saving():
            parts, rows = self.tracked.kept(here)
            self._saved, self.has_written = self.position.kept(at_start=at_start), True
            self.writer(here).save(
                step,
                tensors=lambda: parts,
                rows={**rows, **self.position.drawn()},
                about={"run": dataclasses.asdict(self._saved), "program": self.program.kept()},
                shards=(lambda: self.tracked.staged(here)) if self.tracked.has_shards else None,
            )

    def writer(self, here: Ranks) -> CheckpointWriter:
        """What writes the checkpoints; made at the first call, which may come before any `save`."""
        if self._writer is None:
            self._together = ranks.with_own_group(here) if self.tracked.has_shards else None
            self._writer = CheckpointWriter(
                self.folder or Path(),
                self._keep,
                here,
                self._say,
                self.done,
                self._together,
            )
        return self._writer

    def prove_shared(self, here: Ranks) -> None:
        """Prove, once, that all ranks see the folder, if they have sharded state; a collective call.

        Raises
        ------
        UsageError : they do not; names the hosts.
        """
        if self.folder is None or self._is_proven:
            return
        self._is_proven = True
        if any(here.gather(self.tracked.has_shards, bool, call="run.restore")):
            shared_folder.prove(self.folder, here)

    def close(self) -> None:
        """Free the group of the threads that write shards."""
        if self._together is not None and self._together.group is not None:
            dist.destroy_process_group(self._together.group)

    def wait(self, here: Ranks) -> CheckpointWriter:
        """Wait until the last checkpoint is whole."""
        writer = self.writer(here)
        with self.notes.saving():
            writer.close()
        return writer

    def wait_for_calls(self) -> None:
        """Wait until the program's `checkpoint_done` is done."""
        if self.done is not None:
            self.done.wait()


_EXIT_CODES: list[int] = []
"""Exit codes of runs that were stopped."""


class NotSaved(CheckFailed):
    """The last state of a run that is done could not be written; all ranks raise it."""


def code_of(step: int, saved: int, why: str, folder: Path, here: Ranks, env: Mapping[str, str]) -> int:
    """Leave the mark of a saved state where somebody reads it, and return the exit code that fits.

    Under dist-run the node agent reads the mark and exits with 85. torchrun turns every code but 0 into 1, so
    its mark is in the run folder. Elsewhere the code 85 says that the state is saved.
    """
    if saved != step:
        return EXIT_NO
    if why == stop_requests.FOR_GOOD or stop_requests.report_saved(step, here.local_rank, env):
        return 0
    if "TORCHELASTIC_RUN_ID" not in env:
        return EXIT_SAVED
    if here.rank == 0:
        stop_requests.mark_saved(folder, step, env)
    return 0


def leave(
    state: RunState, stepping: Stepping, here: Ranks, env: Mapping[str, str], tell: Callable[[str], None]
) -> None:
    """Raise SystemExit once the saved state is whole. Whatever destructors do then, its code stays."""
    stepping.end()
    step, why = state.position.step, stepping.agreement.stop
    saved = state.wait(here).saved_step
    if state.folder is None:
        tell(f"stopped after step {step}: {why}")
        code = EXIT_NO
    else:
        kept = f"the state of step {saved} is saved" if saved >= 0 else "this start saved no state"
        tell(f"stopped after step {step}: {why}; {kept}")
        code = code_of(step, saved, why, state.folder, here, env)
    state.wait_for_calls()
    _EXIT_CODES.append(code)
    raise SystemExit(code)


def finish(state: RunState, stepping: Stepping, here: Ranks, tell: Callable[[str], None]) -> None:
    """Save the last state of a run that is done.

    Raises
    ------
    NotSaved : it could not be written.
    """
    if here.world_size > 1 and not dist.is_initialized():
        if state.has_moved:
            tell("warning: the last state is not saved: there is no process group at the end of `with`")
        return
    stepping.end()
    here.gather("", str, call="the end of the run")
    stepping.agreement.stop = ""  # all is done
    if state.has_moved:
        state.save(here)
    saved = state.wait(here).saved_step if state.has_written else state.position.step
    state.wait_for_calls()
    if saved != state.position.step:
        raise NotSaved(f"the state of step {state.position.step} is not saved", where=str(state.folder))


def _end_in_order() -> None:
    """Free the process group before the interpreter is finalized.

    gloo's threads release their last works late. A thread that asks a finalizing interpreter for its lock
    ends the process by SIGABRT, also after a correct run of a bare DDP loop.
    """
    gc.collect()
    if _EXIT_CODES:  # a model in a global variable still keeps its group
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_EXIT_CODES[-1])


atexit.register(_end_in_order)

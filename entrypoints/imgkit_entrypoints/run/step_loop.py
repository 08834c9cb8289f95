"""The steps of a run: what it does at the beginning and the end of each step and of each pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.launch.progress import ProgressNotes
from imgkit_entrypoints.launch.watchdog import Pulse
from imgkit_entrypoints.run.agreement import PASS_END, STEP_END
from imgkit_entrypoints.run.connection import RunConnection
from imgkit_entrypoints.run.gradients import PendingGradients
from imgkit_entrypoints.run.loaders import find_unrepeatable_sampler, loader_length
from imgkit_entrypoints.run.ranks import ranks_by_value
from imgkit_entrypoints.run.run_checkpoints import RunCheckpoints
from imgkit_entrypoints.run.tracked import has_state

# Most steps between two exchanges, in which the ranks add up their numbers and requests to stop. Saves and
# numbers of the program ask for more frequent ones.
MAX_INTERVAL = 1000


class StepLoop:
    """Counts the steps of a run. At the end of each, it agrees with the other ranks on saves and stops."""

    def __init__(
        self, checkpoints: RunCheckpoints, connection: RunConnection, pulse: Pulse, progress: ProgressNotes
    ) -> None:
        self._checkpoints = checkpoints
        self._position = checkpoints.position
        self._connection = connection
        self._pulse = pulse
        self._progress = progress
        self._gradients = PendingGradients(checkpoints.tracked, connection.report)
        self.max_interval = 0
        """Most steps between two exchanges of the program's own numbers. 0 means that it has none."""
        self.is_started = False
        """Whether the program has begun its first step."""
        self._is_in_step = False
        # Whether the program has asked for a save that has to wait.
        self._should_save = False
        # Whether the program has to read the position first, since a checkpoint has finished epochs.
        self._must_read_position = False
        self._has_read_step = False
        # Whether the program has read the epoch since the latest pass began.
        self._has_read_epoch = False
        self._has_warned_of_sampler = False

    def read_step(self) -> int:
        """Return the steps that are done, and note that the program knows them."""
        self._must_read_position = False
        self._has_read_step = True
        return self._position.step

    def read_epoch(self) -> int:
        """Return the epochs that are done, and note that the program knows them."""
        self._must_read_position = False
        self._has_read_epoch = True
        return self._position.epoch

    def require_position(self) -> None:
        """Let `start` refuse a program that would begin the finished epochs of a loaded checkpoint again."""
        self._must_read_position = self._position.epoch != 0

    def close(self) -> None:
        """Stop watching the optimizers."""
        self._gradients.close()

    def iterate(self, loader: Any, name: str, save_every: int, line: str) -> Iterator[tuple[int, Any]]:
        """Iterate over one pass of `Run.steps`: the number of each step, from 1, and its batch.

        Nothing comes if the restored checkpoint was taken after this pass.

        Parameters
        ----------
        line : where the program calls `Run.steps`, as FILE:LINE.
        """
        position = self._position
        agreement = self._connection.agreement
        if self.is_started:  # another rank may be in another call, such as the end of the run
            agreement.wait_for_ranks(position.step, "run.steps")
        self._refuse_different_passes(loader, name, save_every)
        position.end_last_pass(name)
        if position.was_finished(name):
            position.repeats_epoch = True
            return
        position.add_loop(name)
        self._prepare_pass(loader, save_every, line)
        try:
            batches = position.open_pass(loader, name)
            self.start(save_every)
            for batch in batches:
                self._open_step()
                yield position.step + 1, batch
                self.end_open_step()
                self._save_if_due(save_every)
            self._end_pass(loader)
        except GeneratorExit:  # the program has left the loop by a ``break``
            self.end_open_step()
            position.was_left = True
            raise
        finally:
            position.is_open = False

    def _open_step(self) -> None:
        """Begin a step of a loop over `steps`, which `end_open_step` counts."""
        self._refuse_step_after_break()
        self._checkpoints.restored = None
        self._is_in_step = True
        self.begin_step()
        self._gradients.begin_step()

    def _end_pass(self, loader: Any) -> None:
        """Meet the other ranks at the end of a pass, save if the run stops, and count the pass as done."""
        self._connection.agreement.wait_for_ranks(self._position.step, PASS_END)
        # From the state of a loader after its last batch, no resume could end this pass. So a run with such
        # a loader saves in the next pass.
        should_save = self._connection.stop and not has_state(loader)
        if should_save and not self._agree_to_wait():
            self.save_now()
        self._position.finish_pass()

    def _prepare_pass(self, loader: Any, save_every: int, line: str) -> None:
        """Prepare a new pass: check that a resume could find it, and save if a save has waited for it.

        Parameters
        ----------
        line : where the program calls `Run.steps`, as FILE:LINE.
        """
        position = self._position
        if list(position.loops) == [""]:  # there is one loop, without a name
            position.begin_unnamed_pass(loader, line, is_next_epoch=self._has_read_epoch)
        self._has_read_epoch = False
        self._warn_of_sampler(loader)
        if self._should_save:
            self._save_if_due(save_every, at_start=True)
        self._checkpoints.prepare_pass()

    def _warn_of_sampler(self, loader: Any) -> None:
        """Warn once of a sampler whose random numbers a resume may not repeat."""
        sampler = find_unrepeatable_sampler(loader)
        if not sampler or self._has_warned_of_sampler:
            return
        self._has_warned_of_sampler = True
        self._connection.report(
            f"warning: the sampler {sampler} has neither set_epoch nor a torch.Generator: if it draws "
            "random numbers while a pass goes on, a resumed pass gets other samples"
        )

    def _refuse_different_passes(self, loader: Any, name: str, save_every: int) -> None:
        """Raise UsageError, on every rank, if the ranks begin different passes; a collective call.

        Ranks in different passes would wait for each other for ever.
        """
        loop = f"loop {name}, " if name else ""
        tracked = ", ".join(sorted(self._checkpoints.tracked.objects))
        own_pass = (
            f"{loop}{loader_length(loader)} batches after step {self._position.step}, "
            f"save_every={save_every}, tracking {tracked}"
        )
        passes = self._connection.ranks.gather(own_pass, call="run.steps")
        if len(set(passes)) > 1:
            raise UsageError(
                f"the ranks begin different passes: {ranks_by_value(passes)}",
                where="run.steps",
                hint="all ranks must do the same; DistributedSampler gives them equal loaders",
            )

    def start(self, save_every: int) -> None:
        """Begin to count steps. A loop over `Run.steps` does so at the start of each pass.

        Raises
        ------
        UsageError : a learning rate scheduler is not tracked, or the program has never read `Run.epoch` and
            so would train epochs again that the checkpoint has finished.
        """
        if self._checkpoints.keep and not self.is_started:
            self._checkpoints.scheduler_search.refuse_untracked(self._checkpoints.tracked.objects)
        if self._must_read_position:
            raise UsageError(
                f"the checkpoint has {self._position.epoch} finished epochs, and the program never read "
                "run.epoch: it would begin another one",
                where="run.steps",
                hint="for epoch in range(run.epoch, EPOCHS), also where there is one epoch",
            )
        self.is_started = True
        self.start_clock(self.max_interval or save_every or MAX_INTERVAL)

    def _refuse_step_after_break(self) -> None:
        """Raise UsageError for a step after the restore of a run that a ``break`` had ended.

        A program with ``if run.step >= STEPS: break`` at the end of its loop would train one step more at
        each start. If it has read `Run.step` before the loop, it has checked that itself.
        """
        restored = self._checkpoints.restored
        if restored is None or self._has_read_step or not restored.position.get("was_left"):
            return
        raise UsageError(
            f"this run ended by a break after step {self._position.step}, and the program never read "
            "run.step: it would train one more",
            where="run.steps",
            hint="while run.step < STEPS: around the loop, or if run.step >= STEPS: before it",
        )

    def start_clock(self, max_interval: int | None = None) -> None:
        """Start the clock before the first step of a loop, or again after a save or a pause."""
        self._connection.agreement.start_clock(self._position.step, max_interval)
        self._pulse.end_step(self._position.step)

    def begin_step(self) -> None:
        """Note that this rank has its batch of the next step."""
        self._pulse.begin_step(self._position.step + 1)
        self._progress.note_step_begin()

    def end_open_step(self) -> None:
        """Count the step of a loop over `steps` whose body has ended."""
        if self._is_in_step:
            self._is_in_step = False
            self._count_step()

    def _count_step(self) -> None:
        self._position.count_step()
        self._pulse.end_step(self._position.step)
        self._progress.note_step_end()

    def end_step(self, save_every: int) -> bool:
        """End a step of a loop that is not over `steps`; return whether all ranks save now."""
        if not self.is_started:
            self.start(save_every)
        self._count_step()
        self._checkpoints.restored = None  # the run has moved on from the restored checkpoint
        saves_now = self._agree_on_save(save_every)
        self._gradients.begin_step()
        return saves_now

    def _save_if_due(self, save_every: int, *, at_start: bool = False) -> None:
        """Save the state if all ranks agree that it is time; a collective call."""
        if self._agree_on_save(save_every):
            self.save_now(at_start=at_start)

    def _agree_on_save(self, save_every: int) -> bool:
        """Exchange numbers with the other ranks if it is time; return whether all save after this step.

        They save after a request to stop or to save, and every `save_every` steps, unless a rank has to wait.
        Before a save, the numbers of all ranks up to this step have arrived.
        """
        step = self._position.step
        agreement = self._connection.agreement
        agreement.exchange_if_due(step)
        is_due = bool(agreement.stop) or self._should_save
        if self._checkpoints.keep and save_every:
            # Compare multiples of `save_every`: a save that had to wait has come after its step, and must not
            # delay the next one.
            is_due = is_due or step // save_every > self._checkpoints.saved_step // save_every
        if not is_due or self._agree_to_wait():
            return False
        agreement.wait_for_ranks(step, "run.save")
        self._checkpoints.saved_step = step
        return True

    def _agree_to_wait(self) -> bool:
        """Return whether a save that is due has to wait because a rank cannot save yet; a collective call.

        A rank cannot save while gradients wait for their optimizer, since a checkpoint has no gradients, nor
        at the end of a loader that could not go on from its state.
        """
        must_wait = self._gradients.delay_save() or self._position.has_unusable_loader_state()
        return any(self._connection.ranks.gather(must_wait, call=STEP_END))

    def request_save(self) -> None:
        """Save as soon as it is possible: now, or at the end of a step; a collective call.

        Raises
        ------
        UsageError : weights were updated in a step that no call of `Run.due` has ended.
        """
        position = self._position
        uses_steps = bool(position.loops)
        if self._gradients.has_stepped and not uses_steps:
            raise UsageError(
                "run.save comes after an optimizer.step() that the run has not counted",
                where="run.save",
                hint="call run.due() at the end of each step and run.save() after it, or loop over run.steps",
            )
        if position.repeats_epoch:  # the checkpoint holds this state already
            return
        if self._is_in_step or uses_steps or self._agree_to_wait():
            self._should_save = True
        else:
            self.save_now()

    def save_now(self, *, at_start: bool = False) -> None:
        """Save the state, and leave the program after a request to stop; a collective call."""
        self._checkpoints.write(at_start=at_start)
        if self._connection.stop:
            self._checkpoints.leave()
        self._checkpoints.saved_step = self._position.step
        self._should_save = False
        self.start_clock()

"""Do the work of a run at the beginning and the end of each step and of each pass over a loader."""

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

# The largest number of steps between two exchanges of numbers and requests to stop between the ranks. A
# program that saves or adds up numbers gets more frequent exchanges.
MAX_INTERVAL = 1000


class StepLoop:
    """Counts the steps of a run. After each step, it agrees with the other ranks on saves and stops."""

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
        """Largest number of steps between two exchanges of the program's numbers, or 0 if it has none."""
        self.is_started = False
        """Whether the program has begun its first step."""
        self._is_in_step = False
        # Whether the program has requested a save that could not be done yet.
        self._has_waiting_save = False
        # Step at which a save was last due or done, or of the checkpoint from which the run was resumed.
        self._last_due_step = 0
        # Whether the restored checkpoint has finished epochs, and the program has read neither `Run.step` nor
        # `Run.epoch` yet.
        self._ignores_finished_epochs = False
        self._has_read_step = False
        # Whether the program has read `Run.epoch` since the latest pass began.
        self._has_read_epoch = False
        self._has_warned_of_sampler = False

    def read_step(self) -> int:
        """Return the number of finished steps, and record that the program has read it."""
        self._ignores_finished_epochs = False
        self._has_read_step = True
        return self._position.step

    def read_epoch(self) -> int:
        """Return the number of finished epochs, and record that the program has read it."""
        self._ignores_finished_epochs = False
        self._has_read_epoch = True
        return self._position.epoch

    def note_restore(self) -> None:
        """Continue after the step of the restored checkpoint.

        `start` raises an error if the program would repeat the finished epochs of the checkpoint.
        """
        self._last_due_step = self._position.step
        self._ignores_finished_epochs = self._position.epoch != 0

    def close(self) -> None:
        """Stop watching the optimizers."""
        self._gradients.close()

    def iterate(self, loader: Any, name: str, save_every: int, line: str) -> Iterator[tuple[int, Any]]:
        """Yield the number of each step (from 1) and its batch, for one pass over `loader` in `Run.steps`.

        If the restored checkpoint was taken after this pass, nothing is yielded.

        Parameters
        ----------
        name : name of the loop, or ``""``.
        save_every : number of steps between two checkpoints, or 0.
        line : the line of the program that calls `Run.steps`, as FILE:LINE.
        """
        position = self._position
        agreement = self._connection.agreement
        # Another rank may be in another call, such as the end of the run. That would raise an error here.
        if self.is_started:
            agreement.exchange_and_wait(position.step, "run.steps")
        self._refuse_different_passes(loader, name, save_every)
        # Each of the following calls may raise an error, so they come before the pass is opened.
        position.end_last_pass(name)
        if position.was_finished(name):
            # `open_pass` and `request_save` read this: the checkpoint contains what the program does now.
            position.repeats_epoch = True
            return
        position.check_and_add_loop(name)
        self._prepare_pass(loader, save_every, line)
        yield from self._iterate_prepared_pass(loader, name, save_every)

    def _iterate_prepared_pass(self, loader: Any, name: str, save_every: int) -> Iterator[tuple[int, Any]]:
        """Open a pass over `loader`, and yield the number of each step (from 1) and its batch.

        After the body of each step, save if a save is due. The parameters are those of `iterate`.
        """
        position = self._position
        try:
            batches = position.open_pass(loader, name)
            self.start(save_every)
            for batch in batches:
                self._open_step()
                yield position.step + 1, batch
                self.end_open_step()
                self._save_if_due(save_every)
            self._end_pass(loader)
        except GeneratorExit:  # the program has left the loop with ``break``
            # The step in which it left counts as done.
            self.end_open_step()
            position.was_left = True
            raise
        finally:
            position.is_open = False

    def _open_step(self) -> None:
        """Begin a step of a loop over `Run.steps`. `end_open_step` counts the step."""
        self._refuse_step_after_break()
        self._checkpoints.restored = None
        self._is_in_step = True
        self.begin_step()
        self._gradients.forget_optimizer_steps()

    def _end_pass(self, loader: Any) -> None:
        """Wait for the other ranks at the end of a pass, save if the run stops, and count the pass as done.

        This is a collective call: all ranks must make it.
        """
        self._connection.agreement.exchange_and_wait(self._position.step, PASS_END)
        # A loader with a state of its own is after its last batch now. A resume from this state could not
        # finish the pass. So a run with such a loader does not save here, but in the next pass.
        should_save = self._connection.stop and not has_state(loader)
        if should_save and not self._must_any_rank_wait():
            # Before the pass counts as finished: a resume then finishes it, and runs what follows the loop.
            self.save_now()
        self._position.finish_pass()

    def _prepare_pass(self, loader: Any, save_every: int, line: str) -> None:
        """Prepare a new pass: check that a resume could identify it, and do a save that is still waiting.

        Parameters
        ----------
        line : the line of the program that calls `Run.steps`, as FILE:LINE.
        """
        position = self._position
        has_only_unnamed_loop = list(position.loops) == [""]
        if has_only_unnamed_loop:
            # A program that has read `Run.epoch` since the latest pass is assumed to be in the next epoch.
            position.begin_unnamed_pass(loader, line, is_next_epoch=self._has_read_epoch)
        self._has_read_epoch = False
        self._warn_of_sampler(loader)
        if self._has_waiting_save:  # `Run.save` was called after the last pass
            self._save_if_due(save_every, at_start=True)
        self._checkpoints.undo_or_refuse_changes()

    def _warn_of_sampler(self, loader: Any) -> None:
        """Warn once if a resume may not be able to repeat the random numbers of the loader's sampler.

        A sampler draws the order of samples. A resume draws the order again, and skips what was done.
        """
        sampler = find_unrepeatable_sampler(loader)
        if not sampler or self._has_warned_of_sampler:
            return
        self._has_warned_of_sampler = True
        self._connection.report(
            f"warning: the sampler {sampler} has neither set_epoch nor a torch.Generator: if it draws "
            "random numbers while a pass goes on, a resumed pass gets other samples"
        )

    def _refuse_different_passes(self, loader: Any, name: str, save_every: int) -> None:
        """Raise UsageError on every rank if the ranks begin different passes.

        This is a collective call: all ranks must make it.

        Ranks in different passes would wait for each other forever.
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
        """Begin to count steps. A loop over `Run.steps` calls this at the start of each pass.

        Raises
        ------
        UsageError : a learning rate scheduler is not tracked. Or the program has read neither `Run.epoch` nor
            `Run.step`, so it would repeat epochs that the checkpoint has finished.
        """
        if self._checkpoints.keep and not self.is_started:
            self._checkpoints.scheduler_search.refuse_untracked(self._checkpoints.tracked.objects)
        if self._ignores_finished_epochs:
            raise UsageError(
                f"the checkpoint has {self._position.epoch} finished epochs, and the program never read "
                "run.epoch: it would begin another one",
                where="run.steps",
                hint="for epoch in range(run.epoch, EPOCHS), also where there is one epoch",
            )
        self.is_started = True
        # The program's numbers are added up, or else the state saved, at multiples of this number of steps.
        max_interval = self.max_interval or save_every or MAX_INTERVAL
        self.start_clock(max_interval)

    def _refuse_step_after_break(self) -> None:
        """Raise UsageError if a restored run had ended with a ``break``, and the program trains another step.

        A program with ``if run.step >= STEPS: break`` at the end of its loop would train one more step at
        each start. No error is raised if the program has read `Run.step` before the loop. It is then assumed
        that it has checked the number of steps.
        """
        restored = self._checkpoints.restored
        if restored is None or self._has_read_step:
            return
        if not restored.position.get("was_left"):  # the pass was not left with ``break``
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
        """Tell the watchdog and the progress notes that this rank has the batch of its next step."""
        self._pulse.begin_step(self._position.step + 1)
        self._progress.note_step_begin()

    def end_open_step(self) -> None:
        """Count the current step of a loop over `Run.steps`, if there is one, as done."""
        if self._is_in_step:
            self._is_in_step = False
            self._count_step()

    def _count_step(self) -> None:
        """Count a step as done, and tell the watchdog and the progress notes."""
        self._position.count_step()
        self._pulse.end_step(self._position.step)
        self._progress.note_step_end()

    def end_step(self, save_every: int) -> bool:
        """End a step of a loop that does not use `Run.steps`. Return whether all ranks must save now."""
        if not self.is_started:
            self.start(save_every)
        self._count_step()
        self._checkpoints.restored = None  # from now on, the state differs from the restored checkpoint
        # `_agree_on_save` must still know which optimizers have taken a step, so forget them after it.
        saves_now = self._agree_on_save(save_every)
        self._gradients.forget_optimizer_steps()
        return saves_now

    def _save_if_due(self, save_every: int, *, at_start: bool = False) -> None:
        """Save the state if all ranks agree that a save is due.

        This is a collective call: all ranks must make it.
        """
        if self._agree_on_save(save_every):  # the same on all ranks
            self.save_now(at_start=at_start)

    def _agree_on_save(self, save_every: int) -> bool:
        """Exchange numbers with the other ranks if due, and return whether all ranks save after this step.

        The ranks save after a request to stop or to save, and every `save_every` steps. If a rank cannot save
        yet, all ranks wait. Before a save, the numbers of all ranks up to this step have been added up.
        """
        step = self._position.step
        agreement = self._connection.agreement
        agreement.exchange_if_due(step)  # may set `agreement.stop`, on all ranks at the same step
        # All ranks agree on `is_due`, so they all make the collective call in the next condition or none.
        is_due = agreement.stop or self._has_waiting_save or self._has_passed_multiple(save_every)
        if not is_due or self._must_any_rank_wait():
            return False
        agreement.exchange_and_wait(step, "run.save")
        self._last_due_step = step
        return True

    def _has_passed_multiple(self, save_every: int) -> bool:
        """Return whether a multiple of `save_every` steps was reached since a save was last due.

        Multiples are compared instead of the distance to the last save. A save that had to wait came later
        than its step, but must not delay the next save. If `save_every` is 0, the result is False.
        """
        if not self._checkpoints.keep or not save_every:
            return False
        return self._position.step // save_every > self._last_due_step // save_every

    def _must_any_rank_wait(self) -> bool:
        """Return whether a due save must wait because a rank cannot save yet. Count the steps of the wait.

        This is a collective call: all ranks must make it.

        A checkpoint does not contain gradients. So a rank cannot save while its optimizer has not used the
        latest gradients. It also cannot save at the end of a loader that could not continue from its state.
        """
        must_wait = self._gradients.count_waiting_save() or self._position.has_unusable_loader_state()
        return any(self._connection.ranks.gather(must_wait, call=STEP_END))

    def request_save(self) -> None:
        """Save as soon as possible: now, or at the end of a step.

        This is a collective call: all ranks must make it.

        Raises
        ------
        UsageError : an optimizer has updated weights, but the program has not called `Run.due` since then.
        """
        position = self._position
        uses_steps = bool(position.loops)
        if self._gradients.has_stepped and not uses_steps:
            raise UsageError(
                "run.save comes after an optimizer.step() that the run has not counted",
                where="run.save",
                hint="call run.due() at the end of each step and run.save() after it, or loop over run.steps",
            )
        # The program repeats what it had done before the checkpoint from which it was resumed. So that
        # checkpoint already contains this state, and this save was done in the earlier run.
        if position.repeats_epoch:
            return
        # A loop over `Run.steps` saves at the end of a step or before its next pass. `uses_steps` is the same
        # on all ranks, so they all make the collective call after it or none.
        if uses_steps or self._must_any_rank_wait():
            self._has_waiting_save = True
        else:
            self.save_now()

    def save_now(self, *, at_start: bool = False) -> None:
        """Save the state. After a request to stop, end the program.

        This is a collective call: all ranks must make it.

        Parameters
        ----------
        at_start : whether this is directly before a pass of `Run.steps`. The checkpoint then contains what
            the program does before that pass.
        """
        self._checkpoints.write(at_start=at_start)
        if self._connection.stop:
            self._checkpoints.leave()  # raises SystemExit
        self._last_due_step = self._position.step
        self._has_waiting_save = False
        self.start_clock()  # the time of the save must not count as time of a step

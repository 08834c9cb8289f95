"""Take the steps of a run: train, evaluate, save checkpoints, and end.

This uses the run library (imgkit_entrypoints.run). In addition to the model and the optimizer, a checkpoint
of dist-train contains a `Course`: the position in the data, and the options of the run.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from imgkit_entrypoints.apps.train.batches import MicroBatch
from imgkit_entrypoints.apps.train.config import Config, is_due, parse_interval
from imgkit_entrypoints.apps.train.order import Position
from imgkit_entrypoints.apps.train.run_log import LatestSteps, RunLog, Workload
from imgkit_entrypoints.apps.train.trainer import Evaluation, LossIsNoNumber, Trainer
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.launch.start_up import StartUp
from imgkit_entrypoints.run import Run
from imgkit_entrypoints.run.checkpoint import Checkpoint
from imgkit_entrypoints.run.run_checkpoints import NotSaved

# Name under which a checkpoint contains the course.
COURSE = "course"
Steps = Iterable[tuple[Position, list[MicroBatch]]]


@dataclass(slots=True, kw_only=True)
class Course:
    """The progress of a run and its options, as a checkpoint keeps them.

    The course is separate from model and optimizer, because it is read before these are created.
    """

    position: Position = field(default_factory=Position)
    first_loss: float = math.nan
    config: Mapping[str, Any] = field(default_factory=dict)
    """The options as values that JSON supports."""
    samples: int = 0
    """Number of samples in the data."""

    def state_dict(self) -> dict[str, Any]:
        """Return the values that are saved in a checkpoint."""
        return {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}

    def load_state_dict(self, _: Mapping[str, Any]) -> None:
        """Do nothing. `read_course` has already read the course before the run library restores the state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How a run ended. It is the same on all ranks."""

    reason: str = "all steps are done"
    exit_code: int = 0
    hint: str = ""


@dataclass(frozen=True, slots=True)
class MainLoop:
    """Takes the steps of a run, and evaluates and saves checkpoints at regular intervals."""

    run: Run
    trainer: Trainer
    course: Course
    """The progress, which is updated after each step."""
    report: RunLog | None
    """The log of the run on rank 0. None on other ranks."""
    evaluation: Evaluation | None
    start_up: StartUp

    def log_steps(self, latest: LatestSteps) -> None:
        """Log the sums of the latest steps, and remember the first loss of the run."""
        if math.isnan(self.course.first_loss):
            # All ranks remember it, because the courses of all ranks must be equal in a checkpoint.
            self.course.first_loss = latest.loss
        if self.report:
            self.report.add(latest)

    def run_to_end(self, steps: Steps, config: Config, workload: Workload) -> RunEnd:
        """Take the remaining steps, save the state, and return how the run ended.

        A request to stop, a failed save or a loss that is not finite may end the run earlier.
        """
        try:
            with self.run:  # saves the state when the block ends
                self._take_steps(steps, config, workload)
        except (LossIsNoNumber, NotSaved) as error:
            return RunEnd(reason=error.what, exit_code=error.exit_code, hint=error.hint or "")
        except SystemExit as exit_request:
            # The run library exits after a request to stop. Otherwise, a function of the user has called
            # sys.exit.
            if not self.run.stopping:
                raise
            return RunEnd(reason=self.run.stopping, exit_code=int(str(exit_request.code)))
        return RunEnd()

    def _take_steps(self, steps: Steps, config: Config, workload: Workload) -> None:
        """Take all steps, and evaluate and save after a step if this is due.

        The state after the last step is not saved here, but when ``with self.run`` ends.
        """
        run = self.run
        last_step = workload.steps
        save_every = parse_interval(config.save_every, workload.steps_per_epoch)
        eval_every = parse_interval(config.eval_every, workload.steps_per_epoch)
        for position, micro_batches in steps:
            run.begins()  # tells the watchdog, which detects hangs, that the batch is there
            step = position.step  # the position is that after the step, so the first step has the number 1
            is_evaluation_due = is_due(step, eval_every, last_step)
            is_save_due = is_due(step, save_every, last_step)
            will_log = run.looks()  # the ranks will add up and log their numbers after this step
            # An evaluation or a save also logs numbers. The norm of the gradient is only needed for the log.
            is_measured = will_log or is_evaluation_due or is_save_due
            self.trainer.take_step(step - 1, micro_batches, measure_norm=is_measured)
            if step == workload.start + 1:
                self.start_up.record("first_step")
            # Set the position before anything is saved: the course is part of a checkpoint.
            self.course.position = position
            # `due` ends the step for the run library, on all ranks together. It may also set `run.stopping`.
            must_save = run.due(save_every=save_every)
            if is_evaluation_due:
                self._evaluate(step)
            if (must_save or run.stopping) and step < last_step:
                run.save()  # does not return if the run is stopping

    def _evaluate(self, step: int) -> None:
        """Compute and report the loss on held-out data, unless there is none or the run is stopping.

        All ranks must call this method, because `Run.pause` is a collective call.
        """
        with self.run.pause():  # the time of this block does not count for a step; it may set `run.stopping`
            if self.evaluation is None or self.run.stopping:
                return
            start_s = time.perf_counter()
            # `lives` tells the watchdog after each batch that this rank is busy.
            loss = self.evaluation.compute_loss(on_batch=self.run.lives)
            if self.report:  # only rank 0 has a log
                self.report.report_evaluation(step, loss, time.perf_counter() - start_s)


def find_checkpoint(config: Config, run: Run) -> Checkpoint | None:
    """Find the checkpoint that ``--resume`` selects, or return None for a new run.

    All ranks must call this function.

    Raises
    ------
    UsageError : the path of ``--resume`` has no valid checkpoint on any node, the run folder has checkpoints
        but none can be read, or ``--resume never`` would replace the checkpoints of another run.
    """
    if config.resume == "never":
        run.refuse_older()
        return None
    checkpoint: Checkpoint | None = run.find(None if config.resume == "auto" else config.resume)
    if checkpoint is None and config.resume != "auto":
        raise UsageError(
            "no valid checkpoint found",
            where=str(Path(config.resume)),
            hint="--resume auto, or --resume never to start over",
        )
    return checkpoint


def read_course(checkpoint: Checkpoint) -> Course:
    """Read the course (the position in the data and the options) from a checkpoint.

    All ranks must call this function.

    Raises
    ------
    UsageError : the checkpoint was written by another program.
    """
    if COURSE not in checkpoint.names:
        raise UsageError(
            "this checkpoint was written by another program: it has no training state of dist-train",
            where=str(checkpoint.folder),
            hint="name another folder by --run-dir",
        )
    return Course(**checkpoint.state(COURSE))

"""The steps of a run on the run library: train, evaluate, save, and end.

`Course` is the part ``course`` of dist-train's checkpoints: the position in the data, and the options that
led there.
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

# Name of the course in a checkpoint.
COURSE = "course"
Steps = Iterable[tuple[Position, list[MicroBatch]]]


@dataclass(slots=True, kw_only=True)
class Course:
    """What a checkpoint keeps beside model and optimizer; it is needed before these exist."""

    position: Position = field(default_factory=Position)
    first_loss: float = math.nan
    config: Mapping[str, Any] = field(default_factory=dict)
    """The options, as JSON has them."""
    samples: int = 0
    """Number of samples in the data."""

    def state_dict(self) -> dict[str, Any]:
        """Return the values in a checkpoint."""
        return {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}

    def load_state_dict(self, _: Mapping[str, Any]) -> None:
        """Do nothing: `read_course` has read it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How a run ended, the same on all ranks."""

    reason: str = "all steps are done"
    exit_code: int = 0
    hint: str = ""


@dataclass(frozen=True, slots=True)
class MainLoop:
    """Takes the steps of a run, and saves and evaluates every so many of them."""

    run: Run
    trainer: Trainer
    course: Course
    """Kept at the step that the run has reached."""
    report: RunLog | None
    """Gets the numbers on rank 0. None on other ranks."""
    evaluation: Evaluation | None
    start_up: StartUp

    def log_steps(self, latest: LatestSteps) -> None:
        """Log the sums of the latest steps, and note the first loss of the run."""
        if math.isnan(self.course.first_loss):
            # On all ranks: their courses are equal.
            self.course.first_loss = latest.loss
        if self.report:
            self.report.add(latest)

    def run_to_end(self, steps: Steps, config: Config, workload: Workload) -> RunEnd:
        """Take all steps, or those until a request to stop, save the state, and return how the run ended."""
        try:
            with self.run:
                self._take_steps(steps, config, workload)
        except (LossIsNoNumber, NotSaved) as error:
            return RunEnd(reason=error.what, exit_code=error.exit_code, hint=error.hint or "")
        except SystemExit as exit_request:
            if not self.run.stopping:  # not the run library, but a function of the user has called sys.exit
                raise
            return RunEnd(reason=self.run.stopping, exit_code=int(str(exit_request.code)))
        return RunEnd()

    def _take_steps(self, steps: Steps, config: Config, workload: Workload) -> None:
        """Take all steps. After each, evaluate and save if it is time.

        The state after the last step is saved by the end of ``with self.run``, and not here.
        """
        run = self.run
        last_step = workload.steps
        save_every = parse_interval(config.save_every, workload.steps_per_epoch)
        eval_every = parse_interval(config.eval_every, workload.steps_per_epoch)
        for position, micro_batches in steps:
            run.begins()
            step = position.step
            is_evaluated = is_due(step, eval_every, last_step)
            # Numbers go into the log only after these steps, so only they measure the gradient's norm.
            is_measured = is_evaluated or is_due(step, save_every, last_step) or run.looks()
            self.trainer.step(step - 1, micro_batches, measured=is_measured)
            if step == workload.start + 1:
                self.start_up.record("first_step")
            self.course.position = position
            is_saved = run.due(save_every=save_every)
            if is_evaluated:
                self._evaluate(step)
            # The end of `with self.run` saves the last state.
            if (is_saved or run.stopping) and step < last_step:
                run.save()

    def _evaluate(self, step: int) -> None:
        """Report the loss on held-out data, if there is any; a collective call in any case."""
        with self.run.pause():
            if self.evaluation and not self.run.stopping:
                start_s = time.perf_counter()
                loss = self.evaluation.loss(self.run.lives)
                if self.report:
                    self.report.report_evaluation(step, loss, time.perf_counter() - start_s)


def find_checkpoint(config: Config, run: Run) -> Checkpoint | None:
    """Find the checkpoint that ``--resume`` selects; a collective call.

    Raises
    ------
    UsageError : the path of ``--resume`` holds no valid checkpoint on any node, none in the run folder can be
        read, or ``--resume never`` would replace those of another run.
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
    """Read the course that a checkpoint keeps; a collective call.

    Raises
    ------
    UsageError : another program has written it.
    """
    if COURSE not in checkpoint.names:
        raise UsageError(
            "this checkpoint was written by another program: it has no training state of dist-train",
            where=str(checkpoint.folder),
            hint="name another folder by --run-dir",
        )
    return Course(**checkpoint.state(COURSE))

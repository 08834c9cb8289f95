"""The steps of a run: what each reports, when ranks exchange numbers, and when they save."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from imgkit_entrypoints.launch.progress import ProgressNotes
from imgkit_entrypoints.launch.watchdog import Pulse
from imgkit_entrypoints.run.agreement import AddedNumbers, Agreed, Agreement, NumberLog
from imgkit_entrypoints.run.metrics import MetricsFile, ProgressLines
from imgkit_entrypoints.run.position import DataPosition
from imgkit_entrypoints.run.ranks import Ranks

MAX_INTERVAL = 1000
"""Most steps between two looks."""


class Stepping:
    """Counts the steps at `position`, and reports both ends of each. `connect` comes before the first step.

    Parameters
    ----------
    folder : the run's folder, for metrics; None: there is none.
    progress : gets the times of the steps.
    """

    def __init__(
        self,
        position: DataPosition,
        folder: Path | None,
        pulse: Pulse,
        progress: ProgressNotes,
        say: Callable[[str], None],
    ) -> None:
        self._position, self.pulse, self._progress = position, pulse, progress
        self._lines, self.log = ProgressLines(MetricsFile(folder, say)), NumberLog(self._on_means)
        self._has_folder, self._max_interval = folder is not None, 0
        self._writes_lines = self.is_started = self.should_save = False
        self.saved_step = 0
        """Step of the last save, or of the checkpoint from which the run goes on."""
        self.agreement: Agreement

    def connect(self, ranks: Ranks, answers: Callable[[], Sequence[bool]]) -> None:
        """Meet the other ranks; `answers` says whether this one is asked to stop."""
        self.agreement, self._writes_lines = Agreement(ranks, answers, self.log), ranks.rank == 0

    def add_up(self, numbers: AddedNumbers, every: int) -> None:
        """Add up these numbers in place of the logged ones; at most `every` steps lie between two looks."""
        self.agreement.numbers, self._max_interval = numbers, every

    def start(self, save_every: int) -> None:
        """Start the clock before the first step of a loop."""
        self.is_started = True
        self.agreement.begin(self._position.step, self._max_interval or save_every or MAX_INTERVAL)
        self.pulse.done(self._position.step)

    def resume(self) -> None:
        """Start the clock again after a save or a pause."""
        self.agreement.restart(self._position.step)
        self.pulse.done(self._position.step)

    def begin_step(self) -> None:
        """Note that this rank has its batch of the next step."""
        self.pulse.begins(self._position.step + 1)
        self._progress.trains()

    def end_step(self) -> None:
        """Note that this rank is done with its step."""
        self._position.count()
        self.pulse.done(self._position.step)
        self._progress.moved()

    def agree(self, save_every: int, may_save: Callable[[], bool]) -> bool:
        """Look if it is time; return whether all ranks save now, with all numbers of the steps before.

        Parameters
        ----------
        may_save : whether no rank has gradients that wait; else the ranks save after one of the next steps.
        """
        step = self._position.step
        self.agreement.after(step)
        is_due = save_every > 0 and step // save_every > self.saved_step // save_every and self._has_folder
        if not (is_due or self.agreement.stop or self.should_save) or not may_save():
            return False
        self.agreement.settle(step)
        self.saved_step = step
        return True

    def end(self) -> None:
        """Wait for the last numbers of ranks that may have taken different numbers of steps."""
        self.agreement.meet(self._position.step)
        if self._writes_lines:
            self._lines.write(self._position.step, self._position.passes)

    def _on_means(self, agreed: Agreed, means: Mapping[str, float]) -> None:
        if self._writes_lines:
            self._lines.note(agreed.step, self._position.passes, agreed.steps, agreed.seconds, means)

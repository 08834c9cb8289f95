"""The steps of a run: what each tells the launcher, and when the ranks look at their numbers and requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from imgkit_entrypoints.launch.hang_watch import Pulse
from imgkit_entrypoints.launch.progress import ProgressNotes
from imgkit_entrypoints.run.agreement import AddedNumbers, Agreed, Agreement
from imgkit_entrypoints.run.metrics_file import MetricsFile
from imgkit_entrypoints.run.number_log import NumberLog
from imgkit_entrypoints.run.place import LivePlace
from imgkit_entrypoints.run.progress_lines import ProgressLines
from imgkit_entrypoints.run.ranks import Ranks

MOST_STEPS = 1000
"""Most steps between two looks."""


class Stepping:
    """Counts the steps at `place`, and notes both ends of each. `connect` comes before the first step.

    Parameters
    ----------
    folder : the run's folder, for metrics; None: there is none.
    notes : get the times of the steps.
    """

    def __init__(
        self,
        place: LivePlace,
        folder: Path | None,
        pulse: Pulse,
        notes: ProgressNotes,
        say: Callable[[str], None],
    ) -> None:
        self._place, self.pulse, self._notes = place, pulse, notes
        self._lines, self.log = ProgressLines(MetricsFile(folder, say)), NumberLog(self._note)
        self._may_save, self._most = folder is not None, 0
        self._writes_lines = self.has_begun = False
        self.saved_step = 0
        """Step of the last save, or of the snapshot from which the run goes on."""
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
        self.agreement.begin(self._place.step, self._most or save_every or MOST_STEPS)
        self.pulse.done(self._place.step)

    def go_on(self) -> None:
        """Start the clock again after a save or a pause."""
        self.agreement.restart(self._place.step)
        self.pulse.done(self._place.step)

    def enter(self) -> None:
        """This rank has its batch of the next step."""
        self.pulse.begins(self._place.step + 1)
        self._notes.trains()

    def count(self) -> None:
        """This rank is done with its step."""
        self._place.count()
        self.pulse.done(self._place.step)
        self._notes.moved()

    def agree(self, save_every: int) -> bool:
        """Look if it is time; True if all ranks save now, with all numbers of the steps before."""
        step = self._place.step
        self.agreement.after(step)
        saves = self._may_save and save_every > 0 and step // save_every > self.saved_step // save_every
        if not saves and not self.agreement.stop:
            return False
        self.agreement.settle(step)
        self.saved_step = step
        return True

    def end(self) -> None:
        """Wait for the last numbers of ranks that may have taken different numbers of steps."""
        self.agreement.meet(self._place.step)
        if self._writes_lines:
            self._lines.write(self._place.step, self._place.passes())

    def _note(self, agreed: Agreed, means: Mapping[str, float]) -> None:
        if self._writes_lines:
            self._lines.note(agreed.step, self._place.passes(), agreed.steps, agreed.seconds, means)

"""The steps of a run: what each tells the launcher, and when the ranks look at numbers and requests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.launch.hang_watch import Pulse
from imgkit_entrypoints.launch.progress import ProgressNotes
from imgkit_entrypoints.run.agreement import AddedNumbers, Agreed, Agreement
from imgkit_entrypoints.run.metrics_file import MetricsFile
from imgkit_entrypoints.run.number_log import NumberLog
from imgkit_entrypoints.run.place import LivePlace
from imgkit_entrypoints.run.progress_lines import ProgressLines
from imgkit_entrypoints.run.ranks import Ranks
from imgkit_entrypoints.run.tracked import Tracked

MOST_STEPS = 1000
"""Most steps between two looks."""
MOST_WAIT = 256
"""Most steps by which a save waits for an optimizer that uses the gradients."""
SAMPLES = 8
"""Gradients of an optimizer that are looked at."""
_USED = "_imgkit_used"
"""Attribute of a gradient: its version when the optimizer used it."""


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
        self._writes_lines = self.has_begun = self.wants_save = False
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

    def agree(self, save_every: int, may_save: Callable[[], bool]) -> bool:
        """Look if it is time; True if all ranks save now, with all numbers of the steps before.

        Parameters
        ----------
        may_save : whether no rank has gradients that wait; else the ranks save after one of the next steps.
        """
        step = self._place.step
        self.agreement.after(step)
        saves = self._may_save and save_every > 0 and step // save_every > self.saved_step // save_every
        if not (saves or self.agreement.stop or self.wants_save) or not may_save():
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


class Updates:
    """The updates of the weights by the optimizers that are tracked.

    A snapshot keeps no gradients, so none is taken where some wait for their optimizer; and it cannot keep a
    scheduler that is not tracked.
    """

    def __init__(self, tracked: Tracked, say: Callable[[str], None]) -> None:
        self._tracked, self._say = tracked, say
        self._stepped: set[int] = set()
        """Optimizers that were called since the latest step of the run began."""
        self._rates: list[float] | None = None
        self._waited = 0
        self._hook = register_optimizer_step_post_hook(self._note)

    def close(self) -> None:
        """See no more updates."""
        self._hook.remove()

    @property
    def are_seen(self) -> bool:
        """Whether an optimizer is tracked."""
        return next(self._optimizers(), None) is not None

    @property
    def are_ahead(self) -> bool:
        """Whether an optimizer was called since then."""
        return bool(self._stepped)

    def forget(self) -> None:
        """A step of the run begins."""
        self._stepped.clear()

    def wait(self) -> bool:
        """Whether an optimizer has gradients that it did not use yet."""
        waiting = any(
            _key(one) not in self._stepped
            and any(getattr(grad, _USED, None) != grad._version for grad in _gradients(one))
            for one in self._optimizers()
        )
        self._waited = self._waited + 1 if waiting else 0
        if self._waited == MOST_WAIT:
            self._say(
                f"warning: no optimizer.step() for {MOST_WAIT} steps; the run saves without the gradients"
            )
        return waiting and self._waited < MOST_WAIT

    def _note(self, optimizer: Optimizer, *_: Any) -> None:
        if _key(optimizer) not in map(_key, self._optimizers()):
            return
        self._stepped.add(_key(optimizer))
        for grad in _gradients(optimizer):
            setattr(grad, _USED, grad._version)  # a later backward pass changes it, or makes another tensor

    def _optimizers(self) -> Iterator[Optimizer]:
        return (one for one in self._tracked if isinstance(one, Optimizer))

    def _have_unknown_scheduler(self) -> bool:
        return any(
            "initial_lr" in group and not any(_schedules(one, optimizer) for one in self._tracked)
            for optimizer in self._optimizers()
            for group in optimizer.param_groups
        )

    def refuse_unknown_scheduler(self) -> None:
        """Raise UsageError if a scheduler exists that is not tracked; before a restore, which hides it."""
        if self._have_unknown_scheduler():
            raise _unknown_scheduler("it would begin anew after a resume")

    def restored(self) -> None:
        """Note the learning rates of a snapshot."""
        self._rates = self._learning_rates()

    def check_schedulers(self) -> None:
        """Refuse, before the first step, a scheduler that was made after the restore and has begun anew.

        Raises
        ------
        UsageError : it has changed a learning rate of the snapshot.
        """
        if not self._have_unknown_scheduler():
            return
        if self._rates not in (None, self._learning_rates()):
            raise _unknown_scheduler("it has begun anew, with another learning rate than in the snapshot")
        error = _unknown_scheduler("it begins anew after a resume, unless its last_epoch says otherwise")
        self._say(f"warning: {error}")

    def _learning_rates(self) -> list[float]:
        return [float(group["lr"]) for one in self._optimizers() for group in one.param_groups]


def _key(optimizer: Optimizer) -> int:
    weights = (one for group in optimizer.param_groups for one in group["params"])
    return id(next(weights, optimizer))  # a wrapper around the optimizer has the same


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    """A few of its gradients; one backward pass makes all of them."""
    weights = (one for group in optimizer.param_groups for one in group["params"])
    return list(itertools.islice((one.grad for one in weights if one.grad is not None), SAMPLES))


def _schedules(one: object, optimizer: Optimizer) -> bool:
    """Whether `one` is a scheduler of the optimizer, or has one."""
    if isinstance(one, Optimizer):
        return False
    parts = (one, *getattr(one, "__dict__", {}).values())
    owners = (getattr(part, "optimizer", None) for part in parts)
    return any(getattr(owner, "param_groups", None) is optimizer.param_groups for owner in owners)


def _unknown_scheduler(why: str) -> UsageError:
    return UsageError(
        f"the optimizer has a learning rate scheduler that is not tracked: {why}",
        where="run.track",
        hint="make the scheduler before run.restore, and run.track(scheduler=scheduler, ...)",
    )

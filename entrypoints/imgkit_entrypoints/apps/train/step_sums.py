"""The numbers of dist-train's steps, added up over all ranks: losses, skipped steps, own work.

With the sums comes the own work of each rank: each adds its seconds to a place of its own, where all others
add 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from imgkit_entrypoints.apps.train.loop import Trainer
from imgkit_entrypoints.apps.train.report.metrics import Seen
from imgkit_entrypoints.apps.train.work_clock import WorkClock
from imgkit_entrypoints.errors import CheckFailed
from imgkit_entrypoints.run.agreement import Agreed
from imgkit_entrypoints.run.ranks import Ranks


class LossIsNoNumber(CheckFailed):
    """A loss was NaN or infinite; all ranks raise it at the same step."""


class StepSums:
    """What the ranks add up at each look; `note` gets it, on every rank."""

    def __init__(
        self, trainer: Trainer, work: WorkClock, here: Ranks, note: Callable[[Seen], object]
    ) -> None:
        self._trainer, self._work, self._note = trainer, work, note
        self._rank, self._ranks = here.rank, here.world_size
        self._places = self._ranks if self._ranks > 1 else 0
        """Numbers that hold the own work of one rank each; a single rank has nobody to compare with."""

    def take(self, *, everything: bool) -> Tensor:
        """This rank's numbers since the last look, on its device; no call waits for it."""
        window = self._trainer.window
        count = len(window) + 1
        numbers = torch.zeros(count + self._places, dtype=window.dtype, device=window.device)
        spent = self._work.take()
        mine = torch.tensor([spent.wait_s, spent.own_s], dtype=window.dtype)
        mine = mine.to(window.device, non_blocking=True)
        numbers[: len(window)] = window
        numbers[len(window)] = mine[0]
        if self._places:
            numbers[count + self._rank] = mine[1]
        window.zero_()
        window[1] = math.nan  # no norm of the gradient until one is measured
        return numbers

    def arrived(self, agreed: Agreed) -> None:
        """Note the means over all ranks.

        Raises
        ------
        LossIsNoNumber : a loss of these steps is not finite.
        """
        if not agreed.steps:
            return
        count = len(agreed.sums) - self._places
        skipped, norm, loss, *numbers, wait_s = (one / self._ranks for one in agreed.sums[:count])
        skips = round(skipped)
        counted = agreed.steps - skips
        self._note(
            Seen(
                step=agreed.step,
                steps=agreed.steps,
                loss=loss / counted if counted else math.nan,
                numbers=tuple(one / counted if counted else math.nan for one in numbers),
                grad_norm=norm,
                skipped=skips,
                seconds=agreed.seconds,
                own_s=agreed.sums[count:],
                wait_s=wait_s,
            )
        )
        if not math.isfinite(loss):
            raise LossIsNoNumber(
                "a loss is not a number", hint="try a smaller --lr, --clip 1, or --on-nan skip"
            )

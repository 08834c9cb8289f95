"""DDP's first step after a resume, which must add up the gradients in the order of the steps before the stop.

DDP arranges the gradients in other buckets after its first backward pass, which changes the order of sums.
With three ranks or more, a resumed run would otherwise not equal an undisturbed one bit by bit. So `steps`
takes the first step twice; a loop with `due`, whose body no one can repeat, has to run a pass by itself.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.run import random_state, resumable
from imgkit_entrypoints.run.checkpoints import FoundCheckpoint
from imgkit_entrypoints.run.tracked import Tracked
from imgkit_entrypoints.run.updates import live


def rehearsed(batch: Any, times: int, loader: Any, tracked: Tracked, found: FoundCheckpoint) -> Iterator[Any]:
    """Yield `batch` so often, and undo what the loop's body did with it.

    Parameters
    ----------
    found : the checkpoint from which the run has just been restored.
    """
    more = {"": resumable.generators(loader)}
    drawn, bring_back = random_state.current(more), tracked.noted(loader, found)
    for _ in range(times):
        yield copy.deepcopy(batch)
    for one in tracked:
        if isinstance(one, nn.Module):
            one.zero_grad(set_to_none=True)
    bring_back()
    random_state.restore(drawn, more)


class DdpModels:
    """The DDP models of this process whose order of sums changes after their first backward pass.

    They are looked for among all objects: a program may track the model inside, or a compiled one around it.
    """

    def __init__(self) -> None:
        self._all: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._settled: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()

    def look(self, *, before_steps: bool = False) -> None:
        """Look for them; `before_steps`: those that have had a backward pass had it before the loop."""
        found = live(("DistributedDataParallel",))
        self._all.update(one for one in found if one.static_graph or not one.find_unused_parameters)
        if before_steps:
            self._settled.update(one for one in self._all if _has_summed(one))

    @property
    def passes(self) -> int:
        """Passes after which the order stays: DDP notes it in the second one if the graph is static."""
        return max((1 + one.static_graph for one in self._all if not _has_summed(one)), default=0)

    def refuse_unsettled(self) -> None:
        """Raise UsageError if one has had its first backward pass in the loop."""
        if any(_has_summed(one) and one not in self._settled for one in self._all):
            raise UsageError(
                "on 3 ranks or more, DDP adds up the gradients of the first step after a resume in another "
                "order: the weights would differ in their last bits from those of a run without a stop",
                where="run.due",
                hint="before run.restore(), run a forward and backward pass (two with static_graph) and "
                "optimizer.zero_grad(); or use DistributedDataParallel(..., find_unused_parameters=True); or "
                "loop over run.steps",
            )


def _has_summed(model: DistributedDataParallel) -> bool:
    return any(model.reducer.get_backward_stats())  # times of the last pass in which gradients were in order

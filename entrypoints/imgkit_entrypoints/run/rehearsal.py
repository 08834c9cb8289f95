"""The first step after a restore, taken once before it counts."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from imgkit_entrypoints.run import random_state, resumable, snapshots
from imgkit_entrypoints.run.tracked import Tracked


def rehearsed(batch: Any, times: int, loader: Any, tracked: Tracked) -> Iterator[Any]:
    """Yield `batch` so often, and undo what the loop's body did with it.

    DDP arranges the gradients in other buckets after its first backward pass, which changes the order of
    sums. Without this, a resumed run on 3 or more ranks would not equal an undisturbed one bit by bit.
    """
    more = resumable.generators(loader)
    drawn, before = random_state.current(more), snapshots.on_host(tracked.of_all())
    for _ in range(times):
        yield copy.deepcopy(batch)
    tracked.load(before, "the state before the first step")
    tracked.drop_gradients()
    random_state.restore(drawn, more)

"""Learning rate schedulers of the tracked optimizers: one that is not tracked starts over after a resume."""

from __future__ import annotations

import gc
from collections.abc import Container, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from imgkit_entrypoints.errors import UsageError

MAX_DEPTH = 5
"""Levels of attributes and lists below a tracked object at which a scheduler belongs to its state, such as
that of a SequentialLR in a ChainedScheduler."""
MAX_MEMBERS = 100
"""Members of an object that are looked at: a list with more of them has no schedulers but data."""


def refuse_untracked_schedulers(objects: Mapping[str, Any]) -> None:
    """Raise UsageError if a tracked optimizer has a scheduler that no tracked object has in its state."""
    optimizers = {name: value for name, value in objects.items() if isinstance(value, Optimizer)}
    tracked = {id(value) for value in objects.values()}
    if _find_untracked_schedulers(optimizers, tracked):
        tracked = {id(part) for value in objects.values() for part in _parts(value, MAX_DEPTH)}
        gc.collect()  # the program may have dropped a scheduler that is part of a cycle
        for name, scheduler in _find_untracked_schedulers(optimizers, tracked):
            raise _refusal(f"{name} has a {type(scheduler).__name__} that is not tracked")
    for name, optimizer in optimizers.items():
        if _has_unknown_scheduler(optimizer, objects):
            raise _refusal(f"{name} has a learning rate scheduler that is not tracked")


def _refusal(problem: str) -> UsageError:
    return UsageError(
        f"{problem}: it would start over after a resume",
        where="run.track",
        hint="make the scheduler before run.restore, and run.track(scheduler=scheduler, ...)",
    )


def _find_untracked_schedulers(
    optimizers: Mapping[str, Optimizer], tracked: Container[int]
) -> list[tuple[str, LRScheduler]]:
    """Return the schedulers whose ids are not `tracked`, with the names of their optimizers.

    An optimizer has no list of its schedulers, so all objects of this process are looked at, once for all.
    """
    return [
        (name, value)
        for value in gc.get_objects()
        if issubclass(type(value), LRScheduler) and id(value) not in tracked
        for name, optimizer in optimizers.items()
        if _has_optimizer(value, optimizer)
    ]


def _has_unknown_scheduler(optimizer: Optimizer, objects: Mapping[str, Any]) -> bool:
    """Return whether a scheduler of another library, such as timm's, is missing in `objects`."""
    if not any("initial_lr" in group for group in optimizer.param_groups):
        return False
    return not any(
        _has_optimizer(part, optimizer)
        for value in objects.values()
        if not isinstance(value, Optimizer)  # a wrapper around the optimizer has it too
        for part in _parts(value, 1)
    )


def _has_optimizer(value: object, optimizer: Optimizer) -> bool:
    owner = getattr(value, "optimizer", None)  # or a wrapper around it, which has the same groups
    return getattr(owner, "param_groups", None) is optimizer.param_groups


def _parts(value: Any, depth: int) -> Iterator[Any]:
    """Yield `value` and what it contains, down to `depth` levels."""
    yield value
    if depth == 0 or isinstance(value, (Optimizer, nn.Module, Tensor)):
        return
    if isinstance(value, (list, tuple)):
        members = list(value)
    elif isinstance(value, Mapping):
        members = list(value.values())
    else:
        members = list(getattr(value, "__dict__", {}).values())
    if len(members) <= MAX_MEMBERS:
        for member in members:
            yield from _parts(member, depth - 1)

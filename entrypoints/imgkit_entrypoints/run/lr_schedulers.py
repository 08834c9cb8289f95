"""Find learning rate schedulers that a program does not track. They would start over after a resume."""

from __future__ import annotations

import gc
import sys
from collections.abc import Container, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from imgkit_entrypoints.errors import UsageError

# How many levels of attributes and lists below a tracked object are searched. For example, a tracked
# ChainedScheduler may contain a SequentialLR, which contains more schedulers.
MAX_DEPTH = 5
# The largest number of members of an object that are searched. A longer list contains data, not schedulers.
MAX_MEMBERS = 100


class SchedulerSearch:
    """Searches for untracked schedulers when a run is restored and before it saves.

    A search looks at all objects of the process, which takes 0.1 s or more. So it is repeated only if an
    optimizer has more references than at the last search, because every scheduler refers to its optimizer.
    """

    def __init__(self) -> None:
        # Number of references to each optimizer at the last search, by name.
        self._reference_counts: dict[str, int] = {}

    def refuse_untracked(self, objects: Mapping[str, Any]) -> None:
        """Raise UsageError if a tracked optimizer has a scheduler that no checkpoint would save.

        After a resume, such a scheduler would start over. A scheduler is saved if it is tracked itself, or if
        it is a part of a tracked object. A search takes 0.1 s or more, so it is left out if no optimizer has
        got a new reference since the last search. A scheduler has a reference to its optimizer.
        """
        optimizers = {name: value for name, value in objects.items() if isinstance(value, Optimizer)}
        # This function adds the same references to an optimizer at each call, so the counts are comparable.
        counts = {name: sys.getrefcount(optimizer) for name, optimizer in optimizers.items()}
        # An optimizer that was tracked since the last search counts as one with new references.
        names_to_search = [name for name in counts if counts[name] > self._reference_counts.get(name, 0)]
        if names_to_search:
            _refuse_untracked_torch_schedulers(optimizers, objects)
            for name, optimizer in optimizers.items():
                if _has_foreign_scheduler(optimizer, objects):
                    raise _untracked_error(f"{name} has a learning rate scheduler that is not tracked")
        # Store the counts even if they are lower than before, so that one new reference is noticed next time.
        self._reference_counts = counts


def _refuse_untracked_torch_schedulers(
    optimizers: Mapping[str, Optimizer], objects: Mapping[str, Any]
) -> None:
    """Raise UsageError if a scheduler of torch belongs to a tracked optimizer but is not tracked."""
    # By id and not by equality, because an object may define `==` in its own way.
    tracked_ids = {id(value) for value in objects.values()}
    if not _find_untracked_schedulers(optimizers, tracked_ids):
        return
    # The first search found something, so do a second, slower search. It accepts schedulers inside of tracked
    # objects, and ignores schedulers that the program has dropped.
    for value in objects.values():
        tracked_ids.update(map(id, _iterate_parts(value, MAX_DEPTH)))
    gc.collect()  # a dropped scheduler may still exist as a part of a reference cycle
    untracked = _find_untracked_schedulers(optimizers, tracked_ids)
    if untracked:
        name, scheduler = untracked[0]
        raise _untracked_error(f"{name} has a {type(scheduler).__name__} that is not tracked")


def _untracked_error(problem: str) -> UsageError:
    return UsageError(
        f"{problem}: it would start over after a resume",
        where="run.track",
        hint="make the scheduler before run.restore, and run.track(scheduler=scheduler, ...)",
    )


def _find_untracked_schedulers(
    optimizers: Mapping[str, Optimizer], tracked_ids: Container[int]
) -> list[tuple[str, LRScheduler]]:
    """Return the schedulers of torch whose ids are not in `tracked_ids`, with the names of their optimizers.

    An optimizer has no list of its schedulers, so the function looks at all objects of the process. The
    result may contain schedulers that the program no longer uses.
    """
    untracked = []
    for value in gc.get_objects():
        # Use type() here: isinstance() reads the attribute __class__, which may raise for a proxy object.
        if not issubclass(type(value), LRScheduler) or id(value) in tracked_ids:
            continue
        for name, optimizer in optimizers.items():
            if _has_optimizer(value, optimizer):
                untracked.append((name, value))
    return untracked


def _has_foreign_scheduler(optimizer: Optimizer, objects: Mapping[str, Any]) -> bool:
    """Return whether an optimizer has an untracked scheduler of another library, such as timm.

    The only sign of such a scheduler is the ``initial_lr`` that it sets in the optimizer's groups.
    """
    if not any("initial_lr" in group for group in optimizer.param_groups):
        return False
    for value in objects.values():
        # A wrapper around the optimizer has the same groups, but is not a scheduler.
        if not isinstance(value, Optimizer) and _is_scheduler_of(value, optimizer):
            return False
    return True


def _is_scheduler_of(value: object, optimizer: Optimizer) -> bool:
    """Return whether `value`, or one of its attributes or members, is a scheduler of `optimizer`."""
    return any(_has_optimizer(part, optimizer) for part in _iterate_parts(value, depth=1))


def _has_optimizer(value: object, optimizer: Optimizer) -> bool:
    """Return whether the attribute ``optimizer`` of `value` is `optimizer`, or a wrapper around it."""
    # A wrapper is another object, but it has the same list of groups.
    owner = getattr(value, "optimizer", None)
    return getattr(owner, "param_groups", None) is optimizer.param_groups


def _iterate_parts(value: Any, depth: int) -> Iterator[Any]:
    """Yield `value` and the objects in its lists, mappings and attributes, down to `depth` levels.

    An object may come several times. The limits on levels and members also end a search in a cycle.
    """
    yield value
    # These classes have many members, and none of them is a scheduler.
    if depth == 0 or isinstance(value, (Optimizer, nn.Module, Tensor)):
        return
    members = _list_members(value)
    if len(members) <= MAX_MEMBERS:
        for member in members:
            yield from _iterate_parts(member, depth - 1)


def _list_members(value: Any) -> list[Any]:
    """Return the items of a list, the values of a mapping, or the attributes of another object."""
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, Mapping):
        return list(value.values())
    return list(getattr(value, "__dict__", {}).values())

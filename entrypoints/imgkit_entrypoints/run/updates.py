"""The updates of the weights by the program's optimizers, and what takes part in them untracked."""

from __future__ import annotations

import gc
import itertools
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.run import sharded
from imgkit_entrypoints.run.tracked import Tracked, is_a

MOST_WAIT = 256
"""Most steps by which a save waits for an optimizer that uses the gradients."""
SAMPLES = 8
"""Gradients of an optimizer that are looked at."""
DEPTH = 4
"""Attributes and containers within each other in which a tracked object's parts are looked for."""
SCHEDULERS = ("LRScheduler", "_LRScheduler")
WITHOUT_EPOCH = ("ReduceLROnPlateau",)
"""Schedulers that start over wherever they are made."""
WITH_STATE = {
    "GradScaler": "its scale",
    "AveragedModel": "its average",
    "ModelEma": "its average",
    "ModelEmaV2": "its average",
    "ModelEmaV3": "its average",
}
"""Classes of other objects that take part in updates, and what starts over if they are not tracked."""
_USED = "_imgkit_used"
"""Attribute of a gradient: its version when the optimizer used it."""


class Updates:
    """The updates of the weights by the optimizers that are tracked.

    A checkpoint keeps no gradients, so none is taken where some wait for their optimizer; and it cannot keep
    a scheduler that is not tracked.
    """

    def __init__(self, tracked: Tracked, say: Callable[[str], None]) -> None:
        self._tracked, self._say = tracked, say
        self._stepped: set[int] = set()
        """Optimizers that were called since the latest step of the run began."""
        self._untracked: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """Other optimizers, and the first step of the run in which each was called; -1: it may be."""
        self._turn = 0
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
        self._turn += 1

    def wait(self) -> bool:
        """Whether an optimizer has gradients that it did not use yet."""
        waiting = any(
            _key(one) not in self._stepped
            and any(getattr(grad, _USED, None) != grad._version for grad in _gradients(one))
            for one in self._optimizers()
        ) or any(sharded.holds_back_gradients(one) for one in self._tracked if isinstance(one, nn.Module))
        self._waited = self._waited + 1 if waiting else 0
        if self._waited == MOST_WAIT:
            self._say(
                f"warning: no optimizer.step() for {MOST_WAIT} steps; the run saves without the gradients"
            )
        return waiting and self._waited < MOST_WAIT

    def _note(self, optimizer: Optimizer, *_: Any) -> None:
        if _key(optimizer) not in map(_key, self._optimizers()):
            self._refuse_untracked(optimizer)
            return
        self._stepped.add(_key(optimizer))
        for grad in _gradients(optimizer):
            setattr(grad, _USED, grad._version)  # a later backward pass changes it, or makes another tensor

    def _optimizers(self) -> Iterator[Optimizer]:
        return (one for one in self._tracked if isinstance(one, Optimizer))

    @property
    def _are_ours(self) -> bool:
        """Whether the state is the run's, and no other library keeps a part of it."""
        return len(self._tracked) > 0 and not any(is_a(one, ("LibraryCheckpoint",)) for one in self._tracked)

    def _refuse_untracked(self, optimizer: Optimizer) -> None:
        """Raise UsageError if it has kept a state from one step to the next; a new one in each may be."""
        first = self._untracked.setdefault(optimizer, self._turn)
        kept = [
            one
            for own in optimizer.state.values()
            for one in (own.values() if isinstance(own, dict) else [own])
        ]
        # torch 2.3 keeps None in place of a momentum that is not used.
        if first == self._turn or first < 0 or all(one is None for one in kept):
            return
        if not self._are_ours or any(one is optimizer for one in self._parts()):
            self._untracked[optimizer] = -1  # another object keeps its state
            return
        raise UsageError(
            f"an optimizer is called that is not tracked ({type(optimizer).__name__}): its state would begin "
            "anew after a resume",
            where="run.track",
            hint="run.track(optimizer=optimizer, ...)",
        )

    def check(self) -> None:
        """Refuse, before the first step, what takes part in updates and would start over after a resume.

        Raises
        ------
        UsageError : an optimizer updates weights of no tracked object; an object of `WITH_STATE` is not
            tracked; or a scheduler is not, and has started over.
        """
        if not self._are_ours:
            self._check_schedulers([])
            return
        parts = list(self._parts())
        self._refuse_untracked_weights(parts)
        others = _without({*SCHEDULERS, *WITH_STATE}, parts)
        self._check_schedulers([one for one in others if self._schedules_ours(one)])
        for one in others:
            kind = next((kind.__name__ for kind in type(one).__mro__ if kind.__name__ in WITH_STATE), None)
            if kind and getattr(one, "is_enabled", lambda: True)():
                what = WITH_STATE[kind]
                raise UsageError(
                    f"the program's {kind} is not tracked: {what} would start over after a resume",
                    where="run.track",
                    hint="run.track(scaler=scaler, ...), or (average=average, ...)",
                )

    def _refuse_untracked_weights(self, parts: Collection[Any]) -> None:
        known = {id(one) for part in parts if isinstance(part, nn.Module) for one in part.parameters()}
        known |= {id(part) for part in parts if isinstance(part, Tensor)}
        for optimizer in self._optimizers():
            weights = [one for group in optimizer.param_groups for one in group["params"]]
            if lost := [one for one in weights if id(one) not in known]:
                raise UsageError(
                    f"{len(lost)} of {len(weights)} weights that the optimizer updates are of no tracked "
                    f"object, one of shape {tuple(lost[0].shape)}: they would start over after a resume",
                    where="run.track",
                    hint="run.track(model=model, ...) with each model that it updates; for weights of no "
                    "model, track an object whose state_dict has them and whose attribute they are",
                )

    def _parts(self) -> Iterator[Any]:
        """The tracked objects and what they consist of."""
        return _within(list(self._tracked))

    def _schedules_ours(self, one: Any) -> bool:
        """Whether `one` is a scheduler of a tracked optimizer."""
        groups = getattr(getattr(one, "optimizer", None), "param_groups", None)
        return is_a(one, SCHEDULERS) and any(groups is own.param_groups for own in self._optimizers())

    def _have_unknown_scheduler(self) -> bool:
        return any(
            "initial_lr" in group and not any(_schedules(one, optimizer) for one in self._tracked)
            for optimizer in self._optimizers()
            for group in optimizer.param_groups
        )

    def warn_of_loaders(self, own: Any = None) -> None:
        """Warn, after the first step, of a DataLoader in the middle of a pass that is not `own`.

        An object of the program's own that is tracked may keep its position.
        """
        if not self._are_ours or any(_is_of_program(one) for one in self._tracked):
            return
        data = getattr(own, "dataset", None)
        for one in live(("_BaseDataLoaderIter",)):
            if getattr(one, "_dataset", None) is not data and 0 < one._num_yielded < _length(one):
                self._say(
                    "warning: the program reads a DataLoader by itself, and no checkpoint keeps its "
                    "position: a resume starts it over; let run.steps iterate over it"
                )
                return

    def refuse_unknown_scheduler(self) -> None:
        """Raise UsageError if a scheduler exists that is not tracked; before a restore, which hides it."""
        if self._have_unknown_scheduler():
            raise _unknown_scheduler("it would start over after a resume")

    def restored(self) -> None:
        """Note the learning rates of a checkpoint."""
        self._rates = self._learning_rates()

    def _check_schedulers(self, unknown: Collection[Any]) -> None:
        """Raise UsageError for schedulers that have started over; `unknown` are in no tracked object."""
        are_all_unknown = self._have_unknown_scheduler()
        if any(is_a(one, WITHOUT_EPOCH) for one in unknown) or (unknown and not are_all_unknown):
            raise _unknown_scheduler("it would start over after a resume")
        if not are_all_unknown:
            return
        if self._rates not in (None, self._learning_rates()):
            raise _unknown_scheduler("it has started over, with another learning rate than in the checkpoint")
        error = _unknown_scheduler("it starts over after a resume, unless its last_epoch says otherwise")
        self._say(f"warning: {error}")

    def _learning_rates(self) -> list[float]:
        return [float(group["lr"]) for one in self._optimizers() for group in one.param_groups]


def live(kinds: Collection[str]) -> list[Any]:
    """The objects of this process whose class, or one that it extends, has one of these names."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()  # frozen objects are in no list
    every = gc.get_objects()
    if frozen:
        gc.freeze()
    types = {kind for kind in {*map(type, every)} if any(one.__name__ in kinds for one in kind.__mro__)}
    return [one for one in every if type(one) in types] if types else []


def _without(kinds: Collection[str], parts: Collection[Any]) -> list[Any]:
    """The live objects of these kinds that are not among `parts`."""
    known = {id(one) for one in parts}
    for again in (True, False):
        found = [one for one in live(kinds) if id(one) not in known]
        if found and again:
            gc.collect()  # some may be left from an earlier part of the program
        else:
            break
    return found


def _within(values: Iterable[Any], depth: int = DEPTH, seen: set[int] | None = None) -> Iterator[Any]:
    """The values and, of objects of the program's own, what is in their attributes."""
    seen = set() if seen is None else seen
    for one in values:
        if id(one) in seen or isinstance(one, str | bytes | int | float | type(None)):
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, nn.Module):
            yield from one.modules()
        elif depth and not isinstance(one, Optimizer | Tensor):
            yield from _within(_inside(one), depth - 1, seen)


def _inside(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple | set):
        return list(value)
    attributes = getattr(value, "__dict__", {})
    if is_a(value, SCHEDULERS):  # its state has nothing of its optimizer's
        return list(attributes.get("_schedulers", ()))
    return [] if isinstance(value, type | ModuleType) else list(attributes.values())


def _is_of_program(value: Any) -> bool:
    """Whether a class of the program's own, or of a loader, keeps the state."""
    return not isinstance(value, nn.Module | Optimizer) and not is_a(value, {*SCHEDULERS, *WITH_STATE})


def _length(batches: Any) -> float:
    try:
        return len(batches)
    except (TypeError, NotImplementedError):  # a stream
        return math.inf


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

"""Inspect a loader (whether it can resume, its sampler, its random generators), and resume a pass over it.

A resumed pass draws the order of its samples again, and continues after the batches that were done.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.run import random_state
from imgkit_entrypoints.run.random_state import GeneratorStates, restore_generators
from imgkit_entrypoints.run.tracked import has_state

# The length of a loader without ``len()``. Checkpoints contain this value, so it must not change.
UNKNOWN_LENGTH = -1
# Attributes of torch's samplers that determine the order of samples.
ORDER_OPTIONS = ("shuffle", "seed", "replacement")
_RESUMABLE_LOADERS = (
    "give a DataLoader over a map-style dataset, a sequence, or a loader with state_dict and "
    "load_state_dict, such as torchdata's StatefulDataLoader"
)


def steps_error(problem: str, hint: str) -> UsageError:
    """Return an error about a call of `Run.steps`."""
    return UsageError(problem, where="run.steps", hint=hint)


def refuse_without_position(loader: Any) -> None:
    """Raise UsageError if a resumed run could not continue a pass over `loader` at the same sample.

    A run can continue if the loader has a state of its own, or if its batches can be counted and skipped.
    """
    name = type(loader).__name__
    if any(kind.__module__.startswith("accelerate") for kind in type(loader).__mro__):
        raise _position_error(
            f"{name} is a loader that accelerate has prepared",
            "use accelerate's own save_state with a LibraryCheckpoint: docs/guides/resume.md",
        )
    # A count of batches does not say which ones were done.
    if _gives_random_order(loader):
        problem = f"{name} with in_order=False gives batches as they come"
        raise _position_error(problem, f"{name}(..., in_order=True)")
    if has_state(loader) or _is_sequence(loader):
        return
    if not isinstance(loader, DataLoader):
        raise _position_error(name, _RESUMABLE_LOADERS)
    _refuse_uncountable(loader)


def _gives_random_order(loader: Any) -> bool:
    """Return whether a DataLoader gives batches in the order in which its worker processes finish them."""
    # Only DataLoaders of torch 2.6 and newer have the option. Without workers, it has no effect.
    return not getattr(loader, "in_order", True) and loader.num_workers > 0


def _is_sequence(loader: Any) -> bool:
    """Return whether `loader` is a list or a similar object, whose items are the batches."""
    # DataLoaders are checked separately. The items of a mapping have no positions.
    has_items = hasattr(loader, "__getitem__") and hasattr(loader, "__len__")
    return has_items and not isinstance(loader, DataLoader | Mapping)


def _refuse_uncountable(loader: DataLoader[Any]) -> None:
    """Raise UsageError if the run cannot count and skip the batches of a DataLoader without a state."""
    if isinstance(loader.dataset, IterableDataset):
        kind = type(loader.dataset).__name__
        raise _position_error(f"a DataLoader over the IterableDataset {kind}", _RESUMABLE_LOADERS)
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise _position_error(
            f"{type(loader).__name__} has an __iter__ of its own, which hides its position",
            "use DataLoader itself, with persistent_workers=True to keep the workers, and change batches in "
            "collate_fn or in the loop",
        )


def _position_error(problem: str, hint: str) -> UsageError:
    return steps_error(f"this loader cannot resume at its sample: {problem}", hint)


def loader_length(loader: Any) -> int:
    """Return the number of batches in a pass over `loader`, or `UNKNOWN_LENGTH`."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return UNKNOWN_LENGTH


def _list_samplers(loader: Any) -> list[Any]:
    """Return the samplers of a loader: its sampler, its batch sampler, and the sampler inside the latter.

    Samplers that the loader does not have are left out.
    """
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    return [sampler for sampler in samplers if sampler is not None]


def custom_batch_sampler(loader: Any) -> Any:
    """Return the batch sampler that a program has given to a loader, or None if it is torch's default."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    if type(batch_sampler) is BatchSampler:
        return None
    return batch_sampler


def sampler_epoch(loader: Any) -> int | None:
    """Return the epoch that ``set_epoch`` has set in a sampler of the loader, or None if there is none."""
    for sampler in _list_samplers(loader):
        epoch = getattr(sampler, "epoch", None)
        if type(epoch) is int:  # not a bool or a method of the same name
            return epoch
    return None


def find_unrepeatable_sampler(loader: Any) -> str:
    """Return the class name of a sampler whose random numbers a resume could not repeat, or ``""``.

    Only samplers of the program are checked. A sampler can repeat its random numbers if the epoch is its
    seed, or if it uses a generator of its own, which checkpoints save.
    """
    if has_state(loader):
        return ""
    for sampler in _list_samplers(loader):
        kind = type(sampler)
        package, _, _ = kind.__module__.partition(".")
        if package in ("builtins", "torch", "torchdata"):
            continue
        if not _find_generators(sampler) and not hasattr(sampler, "set_epoch"):
            return kind.__name__
    return ""


def describe_sampler(loader: Any) -> str:
    """Return a text with the class of the sampler and the options that determine the order of samples.

    An example is ``DistributedSampler(shuffle=True, seed=0)``. If there is no sampler, the text is empty.
    """
    sampler = custom_batch_sampler(loader)
    if sampler is None:
        sampler = getattr(loader, "sampler", None)
    if sampler is None:
        return ""
    options = []
    for name in ORDER_OPTIONS:
        option_value = getattr(sampler, name, None)
        if isinstance(option_value, int):  # a bool is an int, too
            options.append(f"{name}={option_value}")
    return f"{type(sampler).__name__}({', '.join(options)})"


def _find_generators(owner: Any) -> list[torch.Generator]:
    """Return the random generators of torch that are attributes of `owner`."""
    attributes = getattr(owner, "__dict__", {})
    return [value for value in attributes.values() if isinstance(value, torch.Generator)]


def list_generators(loader: Any) -> list[torch.Generator]:
    """Return the random generators that a pass over `loader` uses in this process.

    They belong to the loader, its samplers or its data set.
    """
    owners = [loader, *_list_samplers(loader)]
    if isinstance(loader, DataLoader) and loader.num_workers == 0:  # worker processes use copies
        owners.append(loader.dataset)
    by_id: dict[int, torch.Generator] = {}  # a loader and its sampler may share a generator
    for owner in owners:
        for generator in _find_generators(owner):
            by_id[id(generator)] = generator
    return list(by_id.values())


@dataclass(frozen=True, slots=True)
class RandomNumbers:
    """The states of all random generators at one moment: those of this process and those of a loader."""

    process: Mapping[str, Any]
    generators: Sequence[torch.Generator]
    states: GeneratorStates
    """The states of the generators."""

    def restore(self) -> None:
        """Restore all states, so that the process and the loader draw the same random numbers again."""
        random_state.restore(self.process)
        restore_generators(self.generators, self.states)


class PassRandom(NamedTuple):
    """The random states that are needed to resume a pass."""

    start: RandomNumbers
    """The states at the start of the pass. Samplers draw the order of samples with them."""
    latest: RandomNumbers
    """The states with which the pass continues after the batches that were done."""


def iterate_from(loader: Any, skip: int, pass_random: PassRandom, *, is_first_pass: bool) -> Iterator[Any]:
    """Return an iterator over `loader` without its first `skip` batches.

    The skipped batches are drawn with the random states from the start of the pass. Then the latest states
    are restored for the other batches. If no batch is skipped, the pass begins with the current states.

    Parameters
    ----------
    is_first_pass : whether an uninterrupted run would start the loader's workers for this pass.
    """
    if isinstance(loader, DataLoader):
        # An uninterrupted run would still have the persistent workers of the previous pass.
        lacks_workers = not is_first_pass and loader.persistent_workers and loader._iterator is None
        if skip or lacks_workers:  # the function restores both random states itself
            return _iterate_without_reading(loader, skip, pass_random, starts_workers=lacks_workers)
    if not skip:
        return iter(loader)
    pass_random.start.restore()
    batches: Iterator[Any] = iter(loader)
    skip_items(batches, skip)
    pass_random.latest.restore()
    return batches


def skip_items(items: Iterator[Any], count: int) -> None:
    """Drop the next `count` items of an iterator."""
    for _ in itertools.islice(items, count):
        pass


def _iterate_without_reading(
    loader: DataLoader[Any], skip: int, pass_random: PassRandom, *, starts_workers: bool
) -> Iterator[Any]:
    """Return an iterator over a DataLoader without its first `skip` batches.

    The samples of skipped batches are not read. Only the sampler draws their indices. It also restores the
    latest random states after that.

    Parameters
    ----------
    starts_workers : whether persistent workers must be started before the pass.
    """
    # The loader draws its indices from the batch sampler if it has one.
    attribute = "sampler" if loader.batch_sampler is None else "batch_sampler"
    # Workers draw this many items before their batches are used.
    items_ahead = (loader.prefetch_factor or 0) * loader.num_workers
    skipping_sampler = _SkippingSampler(getattr(loader, attribute), skip, items_ahead, pass_random)
    if starts_workers:
        # Before restoring the random states: starting workers draws a random number, which the same pass of
        # an uninterrupted run would not draw. With an empty sampler, the workers have nothing to read.
        with _replaced_sampler(loader, attribute, ()):
            next(iter(loader), None)
    pass_random.start.restore()
    with _replaced_sampler(loader, attribute, skipping_sampler):
        batches = iter(loader)
        # The sampler skips at the first read, so read the first batch (if there is one) before the loader
        # gets its own sampler back.
        first_batches = list(itertools.islice(batches, 1))
    return itertools.chain(first_batches, batches)


@contextlib.contextmanager
def _replaced_sampler(loader: DataLoader[Any], attribute: str, sampler: Any) -> Iterator[None]:
    """Replace the attribute ``sampler`` or ``batch_sampler`` of a DataLoader within this context."""
    own_sampler = getattr(loader, attribute)
    _set_sampler(loader, attribute, sampler)
    try:
        yield
    finally:  # the loader belongs to the program, so it gets its own sampler back even after an error
        _set_sampler(loader, attribute, own_sampler)


def _set_sampler(loader: DataLoader[Any], attribute: str, sampler: Any) -> None:
    """Replace the attribute ``sampler`` or ``batch_sampler`` of a DataLoader."""
    vars(loader)[attribute] = sampler  # DataLoader.__setattr__ does not allow to change these attributes
    if loader._iterator is not None:  # persistent workers have an iterator with its own reference
        loader._iterator._index_sampler = sampler


@dataclass(frozen=True, slots=True)
class _SkippingSampler:
    """A sampler that leaves out the first `skip` items of another sampler. It can be iterated only once."""

    sampler: Any
    skip: int
    items_ahead: int
    """Number of items that workers request before they return the first batch.

    Before the stop, the same number of items had been drawn ahead. So the latest random states are restored
    after these items.
    """
    random: PassRandom

    def __iter__(self) -> Iterator[Any]:
        # `iter(self.sampler)` is called here and not in the generator. A sampler may draw random numbers in
        # `__iter__`, and this must happen before the loader draws a seed for its workers.
        return self._iterate_rest(iter(self.sampler))

    def _iterate_rest(self, items: Iterator[Any]) -> Iterator[Any]:
        """Skip the first items, restore the latest random states, and yield the other items."""
        if self.skip:
            skip_items(items, self.skip)
            items_ahead = list(itertools.islice(items, self.items_ahead))
            self.random.latest.restore()
            yield from items_ahead
        yield from items

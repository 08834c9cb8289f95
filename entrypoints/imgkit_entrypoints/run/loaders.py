"""What a run knows of a loader: whether it can resume, its sampler and its generators.

A resumed pass draws the order of its samples again, and goes on after the batches that were done.
"""

from __future__ import annotations

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

# The length of a loader that does not tell it. Checkpoints have this value too.
UNKNOWN_LENGTH = -1
# Attributes of torch's samplers that decide about the order of samples.
ORDER_OPTIONS = ("shuffle", "seed", "replacement")
_RESUMABLE_LOADERS = (
    "give a DataLoader over a map-style dataset, a sequence, or a loader with state_dict and "
    "load_state_dict, such as torchdata's StatefulDataLoader"
)


def steps_error(problem: str, hint: str) -> UsageError:
    """Return the error of a call of `Run.steps`."""
    return UsageError(problem, where="run.steps", hint=hint)


def refuse_without_position(loader: Any) -> None:
    """Raise UsageError if a resumed run could not go on with a pass over `loader` at the same sample.

    It can if the loader has a state of its own, or if its batches can be counted and skipped.
    """
    name = type(loader).__name__
    if any(kind.__module__.startswith("accelerate") for kind in type(loader).__mro__):
        raise _position_error(
            f"{name} is a loader that accelerate has prepared",
            "use accelerate's own save_state with a LibraryCheckpoint: docs/guides/resume.md",
        )
    if not getattr(loader, "in_order", True) and loader.num_workers:
        problem = f"{name} with in_order=False gives batches as they come"
        raise _position_error(problem, f"{name}(..., in_order=True)")
    if has_state(loader) or _is_sequence(loader):
        return
    if not isinstance(loader, DataLoader):
        raise _position_error(name, _RESUMABLE_LOADERS)
    _refuse_uncountable(loader)


def _is_sequence(loader: Any) -> bool:
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
    """Return the number of batches in a pass, or `UNKNOWN_LENGTH`."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return UNKNOWN_LENGTH


def _samplers(loader: Any) -> list[Any]:
    """Return the sampler of a loader, its batch sampler, and the sampler within that, without absent ones."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    return [sampler for sampler in samplers if sampler is not None]


def custom_batch_sampler(loader: Any) -> Any:
    """Return the batch sampler that a program has given to a loader, or None if there is only torch's."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    if type(batch_sampler) is BatchSampler:
        return None
    return batch_sampler


def sampler_epoch(loader: Any) -> int | None:
    """Return the epoch that ``set_epoch`` has given to a sampler of the loader, or None if there is none."""
    for sampler in _samplers(loader):
        epoch = getattr(sampler, "epoch", None)
        if type(epoch) is int:
            return epoch
    return None


def find_unrepeatable_sampler(loader: Any) -> str:
    """Return the class of a sampler of the program whose random numbers no resume could repeat, or "".

    A sampler can repeat them if it is seeded by the epoch, or draws from a generator of its own.
    """
    if has_state(loader):
        return ""
    for sampler in _samplers(loader):
        kind = type(sampler)
        package, _, _ = kind.__module__.partition(".")
        if package in ("builtins", "torch", "torchdata"):
            continue
        if not _generators_in(sampler) and not hasattr(sampler, "set_epoch"):
            return kind.__name__
    return ""


def describe_sampler(loader: Any) -> str:
    """Return the class of the sampler with the options that decide about the order of samples.

    An example is ``DistributedSampler(shuffle=True, seed=0)``. The text is empty if there is no sampler.
    """
    sampler = custom_batch_sampler(loader)
    if sampler is None:
        sampler = getattr(loader, "sampler", None)
    if sampler is None:
        return ""
    options = []
    for name in ORDER_OPTIONS:
        value = getattr(sampler, name, None)
        if isinstance(value, int):  # or a bool
            options.append(f"{name}={value}")
    return f"{type(sampler).__name__}({', '.join(options)})"


def _generators_in(owner: Any) -> list[torch.Generator]:
    """Return the generators that are attributes of an object."""
    attributes = getattr(owner, "__dict__", {})
    return [value for value in attributes.values() if isinstance(value, torch.Generator)]


def list_generators(loader: Any) -> list[torch.Generator]:
    """Return the generators of a loader, its samplers and its dataset that a pass uses in this process."""
    owners = [loader, *_samplers(loader)]
    if isinstance(loader, DataLoader) and loader.num_workers == 0:  # workers draw from copies
        owners.append(loader.dataset)
    by_id: dict[int, torch.Generator] = {}  # loader and sampler may share one
    for owner in owners:
        for generator in _generators_in(owner):
            by_id[id(generator)] = generator
    return list(by_id.values())


@dataclass(frozen=True, slots=True)
class RandomNumbers:
    """The random numbers of one moment: the states of this process, and of a loader's own generators."""

    process: Mapping[str, Any]
    generators: Sequence[torch.Generator]
    states: GeneratorStates
    """The states of the generators."""

    def restore(self) -> None:
        """Let this process and the generators draw these numbers again."""
        random_state.restore(self.process)
        restore_generators(self.generators, self.states)


class PassRandom(NamedTuple):
    """The random numbers of a pass."""

    start: RandomNumbers
    """The numbers at the start of the pass, from which samplers draw."""
    latest: RandomNumbers
    """The numbers with which the pass goes on after the batches that were done."""


def iterate_from(loader: Any, skip: int, random: PassRandom, *, is_first_pass: bool) -> Iterator[Any]:
    """Iterate over `loader` without its first `skip` batches.

    Skipped batches get the random numbers at the start of the pass, and the rest then gets the latest ones.

    Parameters
    ----------
    is_first_pass : whether a run without a stop would start the loader's workers for this pass.
    """
    if isinstance(loader, DataLoader):
        # A run without a stop would still have the workers of the pass before.
        lacks_workers = not is_first_pass and loader.persistent_workers and loader._iterator is None
        if skip or lacks_workers:
            return _iterate_without_reading(loader, skip, random, starts_workers=lacks_workers)
    if not skip:
        return iter(loader)
    random.start.restore()
    batches: Iterator[Any] = iter(loader)
    skip_items(batches, skip)
    random.latest.restore()
    return batches


def skip_items(items: Iterator[Any], count: int) -> None:
    """Drop the next `count` items of an iterator."""
    for _ in itertools.islice(items, count):
        pass


def _iterate_without_reading(
    loader: DataLoader[Any], skip: int, random: PassRandom, *, starts_workers: bool
) -> Iterator[Any]:
    """Iterate over a DataLoader without its first `skip` batches, whose samples are not read.

    Parameters
    ----------
    starts_workers : whether persistent workers start before the pass.
    """
    attribute = "sampler" if loader.batch_sampler is None else "batch_sampler"
    sampler = getattr(loader, attribute)
    items_ahead = (loader.prefetch_factor or 0) * loader.num_workers
    try:
        if starts_workers:
            # Start the workers before the random numbers are restored. Their start draws a number, which the
            # pass of a run without a stop does not draw. An empty sampler gives them nothing to read.
            _set_sampler(loader, attribute, ())
            next(iter(loader), None)
        random.start.restore()
        _set_sampler(loader, attribute, _SkippingSampler(sampler, skip, items_ahead, random))
        batches = iter(loader)
        first_batches = list(itertools.islice(batches, 1))  # the first read makes the sampler skip
    finally:
        _set_sampler(loader, attribute, sampler)
    return itertools.chain(first_batches, batches)


def _set_sampler(loader: DataLoader[Any], attribute: str, sampler: Any) -> None:
    vars(loader)[attribute] = sampler  # DataLoader's own __setattr__ refuses this
    if loader._iterator is not None:  # of workers that are kept
        loader._iterator._index_sampler = sampler


@dataclass(frozen=True, slots=True)
class _SkippingSampler:
    """A sampler without its first `skip` items, which can be read once."""

    sampler: Any
    skip: int
    items_ahead: int
    """Items that workers get before the first batch arrives.

    Before the stop, as many were drawn ahead too. So the latest random numbers are restored after them.
    """
    random: PassRandom

    def __iter__(self) -> Iterator[Any]:
        # Here, and not at the first item: a sampler may draw before the loader draws a seed for its workers.
        return self._iterate_rest(iter(self.sampler))

    def _iterate_rest(self, items: Iterator[Any]) -> Iterator[Any]:
        if self.skip:
            skip_items(items, self.skip)
            items_ahead = list(itertools.islice(items, self.items_ahead))
            self.random.latest.restore()
            yield from items_ahead
        yield from items

"""Loops over data that resume at the batch where an earlier start ended."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.run.tracked import has_state

_INDEXED = (list.__iter__, tuple.__iter__, range.__iter__, Sequence.__iter__, None)
"""`__iter__` of sequences whose items come in the order of their numbers; None: there is no `__iter__`."""
_ACCELERATE = "use accelerate's own save_state with a LibraryCheckpoint: docs/guides/resume.md"


def refuse_without_position(loader: Any) -> None:
    """Raise UsageError if a pass over `loader` could not resume where it ended."""
    hint = (
        "give a DataLoader over a map-style dataset, a sequence, or a loader with state_dict and "
        "load_state_dict, such as torchdata's StatefulDataLoader"
    )
    name = type(loader).__name__
    if any(kind.__module__.startswith("accelerate") for kind in type(loader).__mro__):
        raise _unfit(f"{name} is a loader that accelerate has prepared", _ACCELERATE)
    if has_state(loader):
        return
    if isinstance(loader, DataLoader):
        if isinstance(loader.dataset, IterableDataset):
            raise _unfit(f"a DataLoader over the IterableDataset {type(loader.dataset).__name__}", hint)
        if type(loader).__iter__ is not DataLoader.__iter__:
            raise _unfit(
                f"{name} has an __iter__ of its own, which hides its position",
                "use DataLoader itself, with persistent_workers=True to keep the workers, and change batches "
                "in collate_fn or in the loop",
            )
    elif isinstance(loader, Mapping) or not (hasattr(loader, "__getitem__") and hasattr(loader, "__len__")):
        raise _unfit(name, hint)


def _unfit(what: str, hint: str) -> UsageError:
    return UsageError(f"this loader cannot resume at its sample: {what}", where="run.steps", hint=hint)


def length(loader: Any) -> int:
    """Return the batches of a pass; -1: unknown."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return -1


def sample_count(loader: Any) -> int:
    """Return the size of the data under a loader; -1: unknown, or without importance."""
    if isinstance(loader, DataLoader):
        return length(loader.dataset)
    return -1 if has_state(loader) else length(loader)


def has_fixed_length(loader: Any) -> bool:
    """Return whether the batches of a pass are as many in every pass."""
    return isinstance(loader, DataLoader) and type(loader.batch_sampler) in (BatchSampler, type(None))


def batch_size(loader: Any) -> int | None:
    """Return the samples in a rank's batch, except an epoch's last one; None: unknown."""
    size = getattr(loader, "batch_size", None) if isinstance(loader, DataLoader) else 1
    return size if isinstance(size, int) else None


def _samplers(loader: Any) -> list[Any]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    return [getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]


def sampler_epoch(loader: Any) -> int | None:
    """Return the epoch that a DistributedSampler, or one like it, has been told; None: there is none."""
    epochs = (getattr(sampler, "epoch", None) for sampler in _samplers(loader))
    return next((epoch for epoch in epochs if type(epoch) is int), None)


def generators(loader: Any) -> list[torch.Generator]:
    """Return the generators that a pass uses in this process, each once: of loader, samplers and dataset."""
    owners = [loader, *_samplers(loader)]
    if isinstance(loader, DataLoader) and loader.num_workers == 0:  # workers draw from copies
        owners.append(loader.dataset)
    attributes = [value for owner in owners for value in getattr(owner, "__dict__", {}).values()]
    return list({id(value): value for value in attributes if isinstance(value, torch.Generator)}.values())


def iterate(
    loader: Any,
    skip: int,
    *,
    keeps_workers: bool,
    rewind: Callable[[], None],
    forward: Callable[[], None],
) -> Iterator[Any]:
    """Iterate over `loader` without its first `skip` batches.

    Parameters
    ----------
    keeps_workers : the pass of an undisturbed run goes on with the workers of the one before.
    rewind : sets the random numbers to those at the start of the pass, from which samplers draw.
    forward : sets them to those of now, before the first batch is read. Only called if some are skipped.
    """
    if isinstance(loader, DataLoader) and not has_state(loader):
        starts_workers = keeps_workers and loader.persistent_workers and loader._iterator is None
        if skip or starts_workers:
            return _iterate_rest(loader, skip, starts_workers, rewind, forward)
    if not skip:
        return iter(loader)
    batches: Iterator[Any]
    if has_state(loader):  # its state is loaded
        batches = iter(loader)
    elif getattr(type(loader), "__iter__", None) in _INDEXED:
        batches = (loader[number] for number in range(skip, len(loader)))
    else:
        rewind()
        batches = iter(loader)
        for _ in itertools.islice(batches, skip):
            pass
    forward()
    return batches


def _iterate_rest(
    loader: DataLoader[Any],
    skip: int,
    starts_workers: bool,
    rewind: Callable[[], None],
    forward: Callable[[], None],
) -> Iterator[Any]:
    """Let the loader take its indices from a sampler that skips; no skipped sample is read."""
    attribute = "sampler" if loader.batch_sampler is None else "batch_sampler"
    sampler = getattr(loader, attribute)
    rest = _Rest(sampler, skip, (loader.prefetch_factor or 0) * loader.num_workers, forward)
    try:
        if starts_workers:
            # That draws a random number, which the pass of an undisturbed run does not draw.
            _set_sampler(loader, attribute, ())
            next(iter(loader), None)
        rewind()
        _set_sampler(loader, attribute, rest)
        batches = iter(loader)
        first = list(itertools.islice(batches, 1))
    finally:
        _set_sampler(loader, attribute, sampler)
    return itertools.chain(first, batches)


def _set_sampler(loader: DataLoader[Any], attribute: str, sampler: Any) -> None:
    vars(loader)[attribute] = sampler  # DataLoader's own __setattr__ refuses this
    if loader._iterator is not None:  # of workers that are kept
        loader._iterator._index_sampler = sampler


class _Rest:
    """A sampler without its first `skip` items; read once.

    Parameters
    ----------
    ahead : items that workers get before the first batch arrives; as many more were drawn before the stop.
    forward : called after these.
    """

    def __init__(self, sampler: Any, skip: int, ahead: int, forward: Callable[[], None]) -> None:
        self._sampler, self._skip, self._ahead, self._forward = sampler, skip, ahead, forward

    def __iter__(self) -> Iterator[Any]:
        # Here, and not at the first item: a sampler may draw before the loader draws a seed for its workers.
        return self._without_first(iter(self._sampler))

    def _without_first(self, items: Iterator[Any]) -> Iterator[Any]:
        for _ in itertools.islice(items, self._skip):
            pass
        if self._skip:
            drawn = list(itertools.islice(items, self._ahead))
            self._forward()
            yield from drawn
        yield from items

    def __len__(self) -> int:
        return max(0, len(self._sampler) - self._skip)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

"""Loops over data that go on at the batch where an earlier start ended."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from imgkit_entrypoints.errors import UsageError


def has_state(value: object) -> bool:
    """Whether `value` can save and load its state by itself."""
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def refuse_without_position(loader: Any) -> None:
    """Raise UsageError if a loop over `loader` could not go on where it ended."""
    if has_state(loader) or (hasattr(loader, "__getitem__") and hasattr(loader, "__len__")):
        if not isinstance(loader, Mapping):
            return
    elif isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        return
    what = type(loader).__name__
    if isinstance(loader, DataLoader):
        what = f"a DataLoader over the IterableDataset {type(loader.dataset).__name__}"
    raise UsageError(
        f"this loader cannot resume at its sample: {what}",
        hint="give a DataLoader over a map-style dataset, a sequence, or a loader with state_dict and "
        "load_state_dict, such as torchdata's StatefulDataLoader",
    )


def generators(loader: Any) -> list[torch.Generator]:
    """The generators of a DataLoader and its samplers, each once."""
    inner = getattr(loader, "batch_sampler", None)
    owners = (loader, getattr(loader, "sampler", None), inner, getattr(inner, "sampler", None))
    found = {id(one): one for owner in owners if (one := getattr(owner, "generator", None)) is not None}
    return [one for one in found.values() if isinstance(one, torch.Generator)]


def batch_size(loader: Any) -> int | None:
    """Samples in a rank's batch, except an epoch's last one; None: unknown."""
    size = getattr(loader, "batch_size", None) if isinstance(loader, DataLoader) else 1
    return size if isinstance(size, int) else None


def rest(loader: Any, skip: int, rewind: Callable[[], None], wind: Callable[[], None]) -> Iterator[Any]:
    """Iterate over `loader` without its first `skip` batches, and read no sample of them.

    Parameters
    ----------
    rewind : sets the random numbers to those at the start of the pass, from which samplers draw.
    wind : sets them to those of now, before the first batch is read.
    """
    if not skip:
        return iter(loader)
    if has_state(loader):  # its state is loaded
        batches: Iterator[Any] = iter(loader)
        wind()
        return batches
    if not isinstance(loader, DataLoader):
        return (loader[number] for number in range(skip, len(loader)))
    rewind()
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    later = _Later(sampler, skip)
    more = {} if loader.num_workers == 0 else {"prefetch_factor": loader.prefetch_factor}
    left: DataLoader[Any] = DataLoader(
        loader.dataset,
        **(
            {"sampler": later, "batch_size": None}
            if loader.batch_sampler is None
            else {"batch_sampler": later}
        ),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        **more,
    )
    batches = iter(left)
    later.start()  # an iterator without workers would draw the order at its first batch
    wind()
    return batches


class _Later:
    """A sampler without its first `skip` items; read once."""

    def __init__(self, sampler: Any, skip: int) -> None:
        self._sampler, self._skip = sampler, skip
        self._items: Iterator[Any] | None = None

    def start(self) -> Iterator[Any]:
        """Skip now, if that is not done yet."""
        if self._items is None:
            self._items = iter(self._sampler)
            for _ in itertools.islice(self._items, self._skip):
                pass
        return self._items

    def __iter__(self) -> Iterator[Any]:
        yield from self.start()  # draws the order at the first item, as a sampler of torch does

    def __len__(self) -> int:
        return max(0, len(self._sampler) - self._skip)

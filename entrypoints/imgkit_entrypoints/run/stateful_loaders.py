"""Passes over a loader with a state of its own, and what the state of torchdata's StatefulDataLoader lacks.

Seen with torchdata 0.11 over an IterableDataset. Without a state of the data set, a resume reads on to its
position and counts those batches twice: the run counts them itself. With one, the state after the last batch
of a pass, or of one of its workers, may be that of a data set that begins or of one that has ended: no
checkpoint is taken there. A data set may also take its state after a whole pass for a position, and give no
batch in the next: that pass begins again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from imgkit_entrypoints.run.state_tree import leaves

DATASET_STATES = {"dataset_state", "dataset_iter_state"}
"""Keys in a state of StatefulDataLoader."""


def iterate_stateful(
    loader: Any, skip: int, *, keeps_workers: bool, rewind: Callable[[], None], forward: Callable[[], None]
) -> Iterator[Any]:
    """Iterate over a loader whose state a resume has loaded; the parameters are those of `iterate`."""
    state = _unread_state(loader)
    is_counted = state is not None and _is_stream(loader) and not _has_dataset_state(state)
    if is_counted:
        loader.load_state_dict({})  # drops its iterator, and
        loader.next_iter_state = None  # its count
        if skip:
            rewind()
    elif state is not None and state.get("_iterator_finished"):
        loader.state_dict()  # makes the iterator that has finished, which draws a random number
        forward()
        return _iterate_again_if_empty(loader, forward)
    batches: Iterator[Any] = iter(loader)
    if is_counted:
        for _ in itertools.islice(batches, skip):
            pass
    # Workers that an undisturbed run keeps draw no random number when they start anew.
    starts_workers = state is not None and keeps_workers and loader.persistent_workers
    if skip or starts_workers:
        forward()
    return batches


def _unread_state(loader: Any) -> Mapping[str, Any] | None:
    """Return the state from which a StatefulDataLoader begins its first pass; None: it has begun one."""
    state: Mapping[str, Any] | None = getattr(loader, "next_iter_state", None)
    if state is None and getattr(loader, "_initial_iter_for_state_dict", False):
        state = loader.state_dict()
    return state


def _iterate_again_if_empty(loader: Any, forward: Callable[[], None]) -> Iterator[Any]:
    is_empty = True
    for batch in loader:
        is_empty = False
        yield batch
    if is_empty:
        forward()
        yield from loader


def has_unclear_state(loader: Any) -> bool:
    """Return whether no pass could go on from the state of a loader, since a worker is at its end."""
    if not _is_stream(loader):
        return False
    state = loader.state_dict()
    has_ended = any(path[-1:] == ("fetcher_ended",) and leaf for path, leaf in leaves(state))
    workers = getattr(loader._iterator, "_workers_status", ())
    return _has_dataset_state(state) and (has_ended or False in workers)


def _is_stream(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)


def _has_dataset_state(state: Any) -> bool:
    return any(leaf is not None and DATASET_STATES.intersection(path) for path, leaf in leaves(state))

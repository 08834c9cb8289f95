"""Passes over a loader with a state of its own, and what the state of torchdata's StatefulDataLoader lacks.

This is what torchdata 0.11 does over an IterableDataset:

* Where the data set has no state, a resumed loader reads on to its position and counts those batches twice.
  So the run counts and skips them.
* Where the data set has a state, the state after the last batch of a pass, or of one of its workers, may be
  that of a data set that begins or of one that has ended. So no checkpoint is taken there.
* A data set may take its state after a whole pass for a position, and give no batch in the next pass. So a
  pass without a batch begins again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from imgkit_entrypoints.run.loaders import PassRandom, skip_items
from imgkit_entrypoints.run.state_tree import list_leaves

# Keys of the data set's own state in a state of StatefulDataLoader.
DATASET_STATES = {"dataset_state", "dataset_iter_state"}


def iterate_stateful(loader: Any, skip: int, random: PassRandom, *, is_first_pass: bool) -> Iterator[Any]:
    """Iterate over a loader with a state of its own, which a resume may have loaded.

    Parameters
    ----------
    skip : batches of this pass that were done before the checkpoint.
    is_first_pass : whether a run without a stop would start the loader's workers for this pass.
    """
    state = _unread_state(loader)
    starts_workers = False
    if state is None:  # another kind of loader, or a later pass: the loader goes on by itself
        batches: Iterator[Any] = iter(loader)
    elif _is_stream(loader) and not _has_dataset_state(state):
        batches = _iterate_from_start(loader, skip, random)
    elif state.get("_iterator_finished"):
        loader.state_dict()  # makes the iterator that has finished, which draws a random number
        random.latest.restore()
        return _iterate_again_if_empty(loader, random)
    else:
        batches = iter(loader)
    if state is not None:
        # An undisturbed run keeps its workers. Workers that start anew draw a random number.
        starts_workers = not is_first_pass and loader.persistent_workers
    if skip or starts_workers:
        random.latest.restore()
    return batches


def _iterate_from_start(loader: Any, skip: int, random: PassRandom) -> Iterator[Any]:
    """Let a loader forget its iterator and its count of batches, and skip the first batches of its pass."""
    loader.load_state_dict({})
    loader.next_iter_state = None
    if skip:
        random.start.restore()
    batches: Iterator[Any] = iter(loader)
    skip_items(batches, skip)
    return batches


def _unread_state(loader: Any) -> Mapping[str, Any] | None:
    """Return the state from which a StatefulDataLoader begins its first pass.

    The result is None for other loaders, and once the first pass has begun.
    """
    state: Mapping[str, Any] | None = getattr(loader, "next_iter_state", None)
    if state is None and getattr(loader, "_initial_iter_for_state_dict", False):
        state = loader.state_dict()
    return state


def _iterate_again_if_empty(loader: Any, random: PassRandom) -> Iterator[Any]:
    """Iterate over a loader, and once more if its first pass gives no batch."""
    is_empty = True
    for batch in loader:
        is_empty = False
        yield batch
    if is_empty:
        random.latest.restore()
        yield from loader


def has_unusable_state(loader: Any) -> bool:
    """Return whether no pass could go on from a loader's state, because a worker has no more batches."""
    if not _is_stream(loader):
        return False
    state = loader.state_dict()
    if not _has_dataset_state(state):
        return False
    if False in getattr(loader._iterator, "_workers_status", ()):  # a worker has no more batches
        return True
    return any(path[-1] == "fetcher_ended" and value for path, value in list_leaves(state))


def _is_stream(loader: Any) -> bool:
    """Return whether a loader is a DataLoader over an IterableDataset."""
    return isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)


def _has_dataset_state(state: Any) -> bool:
    """Return whether the state of a loader has values of its data set's own state."""
    paths = [path for path, value in list_leaves(state) if value is not None]
    return any(map(DATASET_STATES.intersection, paths))

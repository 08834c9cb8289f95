"""Resume passes over a loader with a state of its own, such as torchdata's StatefulDataLoader.

For an IterableDataset, the state of torchdata 0.11 is not always enough:

* If the data set has no state, a resumed loader reads up to its position and counts those batches twice. So
  the run counts and skips the batches itself.
* If the data set has a state, its state after the last batch of a pass, or of one worker, is ambiguous. It
  may belong to a data set that begins or to one that has ended. So no checkpoint is taken at this point.
* After a complete pass, a data set may interpret its state as a position at the end, and give no batch in the
  next pass. So a pass without a batch is started again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from imgkit_entrypoints.run.loaders import PassRandom, skip_items
from imgkit_entrypoints.run.state_tree import list_leaves

# Keys under which the state of a StatefulDataLoader contains the state of its data set.
DATASET_STATES = {"dataset_state", "dataset_iter_state"}


def iterate_stateful(loader: Any, skip: int, random: PassRandom, *, is_first_pass: bool) -> Iterator[Any]:
    """Return an iterator over a loader with a state of its own, which a resume may have loaded.

    Usually, the loaded state makes the loader continue at the right batch. Then this function only restores
    the random states of the checkpoint at the right moment.

    Parameters
    ----------
    skip : number of batches of this pass that were done before the checkpoint.
    random : the random states at the start of the pass and at the checkpoint.
    is_first_pass : whether an uninterrupted run would start the loader's workers for this pass.
    """
    state = _get_unread_state(loader)
    starts_workers = False
    if state is None:  # another kind of loader, or not the first pass: the loader continues by itself
        batches: Iterator[Any] = iter(loader)
    elif _is_stream(loader) and not _has_dataset_state(state):
        # The state does not contain the position in the stream, so the batches must be read and skipped.
        batches = _iterate_from_start(loader, skip, random)
    elif state.get("_iterator_finished"):
        loader.state_dict()  # creates the finished iterator now, because that draws a random number
        random.latest.restore()
        return _iterate_again_if_empty(loader, random)
    else:
        batches = iter(loader)
    if state is not None:
        # An uninterrupted run would still have its workers. Starting workers again draws a random number.
        starts_workers = not is_first_pass and loader.persistent_workers
    # After the iterator was created, because that draws a random number.
    if skip or starts_workers:
        random.latest.restore()
    return batches


def _iterate_from_start(loader: Any, skip: int, random: PassRandom) -> Iterator[Any]:
    """Return an iterator that begins a new pass over `loader` and skips its first `skip` batches.

    The loader first forgets its loaded state: its iterator and its count of batches.
    """
    loader.load_state_dict({})
    loader.next_iter_state = None
    if skip:
        random.start.restore()
    batches: Iterator[Any] = iter(loader)
    skip_items(batches, skip)
    return batches


def _get_unread_state(loader: Any) -> Mapping[str, Any] | None:
    """Return the state from which a StatefulDataLoader will begin its first pass.

    The result is None for other loaders, and after the first pass has begun.
    """
    # These attributes are private. torchdata has no public way to ask for this state.
    state: Mapping[str, Any] | None = getattr(loader, "next_iter_state", None)
    if state is None and getattr(loader, "_initial_iter_for_state_dict", False):
        state = loader.state_dict()
    return state


def _iterate_again_if_empty(loader: Any, random: PassRandom) -> Iterator[Any]:
    """Yield the batches of `loader`. If there are none, restore the random states and start a second pass."""
    is_empty = True
    for batch in loader:
        is_empty = False
        yield batch
    if is_empty:
        random.latest.restore()
        yield from loader


def has_unusable_state(loader: Any) -> bool:
    """Return whether a pass could not be resumed from the loader's current state.

    This is the case if the loader or one of its workers has no more batches.
    """
    if not _is_stream(loader):
        return False
    state = loader.state_dict()
    if not _has_dataset_state(state):
        return False
    # torch sets the status of a worker to False when the worker has no more batches.
    if False in getattr(loader._iterator, "_workers_status", ()):
        return True
    return any(path[-1] == "fetcher_ended" and value for path, value in list_leaves(state))


def _is_stream(loader: Any) -> bool:
    """Return whether `loader` is a DataLoader over an IterableDataset."""
    return isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)


def _has_dataset_state(state: Any) -> bool:
    """Return whether the state of a loader contains a state of its data set."""
    paths = [path for path, value in list_leaves(state) if value is not None]
    return any(map(DATASET_STATES.intersection, paths))

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


def iterate_stateful(
    loader: Any, skip: int, pass_random: PassRandom, *, is_first_pass: bool
) -> Iterator[Any]:
    """Return an iterator over a loader with a state of its own, which a resume may have loaded.

    Usually, the loaded state makes the loader continue at the right batch. Then this function only restores
    the random states of the checkpoint at the right moment.

    Parameters
    ----------
    skip : number of batches of this pass that were done before the checkpoint.
    pass_random : the random states at the start of the pass and at the checkpoint.
    is_first_pass : whether an uninterrupted run would start the loader's workers for this pass.
    """
    state = _get_unread_state(loader)
    if state is None:  # another kind of loader, or not the first pass: the loader continues by itself
        batches: Iterator[Any] = iter(loader)
        starts_workers = False
    else:  # the first pass of a StatefulDataLoader
        batches = _iterate_from_state(loader, state, skip, pass_random)
        # An uninterrupted run would still have its workers. Starting workers again draws a random number.
        starts_workers = not is_first_pass and loader.persistent_workers
    # Only now, because creating the iterator draws a random number, too.
    if skip or starts_workers:
        pass_random.latest.restore()
    return batches


def _iterate_from_state(
    loader: Any, state: Mapping[str, Any], skip: int, pass_random: PassRandom
) -> Iterator[Any]:
    """Return an iterator over a StatefulDataLoader that continues at `state`, which the loader has loaded.

    The caller then restores the latest random states.

    Parameters
    ----------
    skip : number of batches of this pass that were done before the checkpoint.
    """
    # The state does not contain the position in the stream, so the batches must be read and skipped.
    if _is_stream(loader) and not _has_dataset_state(state):
        return _iterate_from_start(loader, skip, pass_random)
    if not state.get("_iterator_finished"):
        return iter(loader)
    # The state is from the end of a pass. `state_dict` makes torchdata create the finished iterator, which
    # draws a random number. The generator below would do so only at its first batch, after the restore.
    loader.state_dict()
    pass_random.latest.restore()
    return _iterate_again_if_empty(loader, pass_random)


def _iterate_from_start(loader: Any, skip: int, pass_random: PassRandom) -> Iterator[Any]:
    """Return an iterator that begins a new pass over a StatefulDataLoader and skips its first `skip` batches.

    The random states are then those after the skipped batches. The caller restores the latest ones.
    """
    # Forget the state that a resume has loaded: the iterator, and the state for the next one.
    loader.load_state_dict({})
    loader.next_iter_state = None
    if skip:
        pass_random.start.restore()
    batches: Iterator[Any] = iter(loader)
    skip_items(batches, skip)
    return batches


def _get_unread_state(loader: Any) -> Mapping[str, Any] | None:
    """Return the state from which a StatefulDataLoader will begin its first pass.

    The result is None for other loaders, and after the first pass has begun.
    """
    # These attributes are private. torchdata has no public way to ask for this state. The first has the state
    # of `load_state_dict` until an iterator is created.
    state: Mapping[str, Any] | None = getattr(loader, "next_iter_state", None)
    # The second is True if `state_dict` has created the iterator, and no pass has used it yet.
    if state is None and getattr(loader, "_initial_iter_for_state_dict", False):
        state = loader.state_dict()
    return state


def _iterate_again_if_empty(loader: Any, pass_random: PassRandom) -> Iterator[Any]:
    """Yield the batches of `loader`. If there are none, restore the random states and start a second pass."""
    is_empty = True
    for batch in loader:
        is_empty = False
        yield batch
    if is_empty:
        pass_random.latest.restore()
        yield from loader


def has_unusable_state(loader: Any) -> bool:
    """Return whether a pass could not be resumed from the loader's current state.

    This is the case if the loader reads a stream that stores its position, and the loader or one of its
    workers has no more batches.
    """
    if not _is_stream(loader):
        return False
    state = loader.state_dict()
    if not _has_dataset_state(state):  # then a resume counts and skips the batches, without this state
        return False
    # torch sets the status of a worker to False when the worker has no more batches.
    if False in getattr(loader._iterator, "_workers_status", ()):
        return True
    # torchdata stores under this key whether the loader or a worker has read its data set to the end.
    return any(path[-1] == "fetcher_ended" and value for path, value in list_leaves(state))


def _is_stream(loader: Any) -> bool:
    """Return whether `loader` is a DataLoader over an IterableDataset."""
    return isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)


def _has_dataset_state(state: Any) -> bool:
    """Return whether the state of a loader contains a state of its data set."""
    paths = [path for path, value in list_leaves(state) if value is not None]
    return any(map(DATASET_STATES.intersection, paths))

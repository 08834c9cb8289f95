"""Loops over data that resume at the batch where an earlier start ended."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePath
from types import ModuleType
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from imgkit_entrypoints.errors import UsageError

_INDEXED = (list.__iter__, tuple.__iter__, range.__iter__, Sequence.__iter__, None)
"""Methods of a sequence whose items come in the order of their numbers; None: it has no `__iter__`."""


def has_state(value: object) -> bool:
    """Whether `value` can save and load its state by itself."""
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def is_stateful_loader(value: object) -> bool:
    """Whether `value` is one of torchdata's."""
    return isinstance(value, DataLoader) and has_state(value)


def refuse_without_position(loader: Any) -> None:
    """Raise UsageError if a loop over `loader` could not resume where it ended."""
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


def length(loader: Any) -> int:
    """Batches of a pass; -1: unknown."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return -1


def samples(loader: Any) -> int:
    """Size of the data under a loader; -1: unknown, or without importance."""
    if isinstance(loader, DataLoader):
        return length(loader.dataset)
    return -1 if has_state(loader) or isinstance(loader, range) else length(loader)  # a range may grow


MOST_DEPTH, MOST_ATTRIBUTES = 6, 64
"""How far `fingerprint` looks into a data set."""


def fingerprint(loader: Any) -> str:
    """A digest of a few values in the data set under a loader; empty: it has none that can be compared.

    It reads no sample, which may draw random numbers, but arrays, lists and file names in the data set's
    attributes: their lengths, and of each the first, the middle and the last value.
    """
    data = loader.dataset if isinstance(loader, DataLoader) else loader
    if data is loader and (has_state(loader) or isinstance(loader, range)):
        return ""
    found: list[str] = []
    _describe(data, found, MOST_DEPTH)
    return hashlib.sha256("\n".join(found).encode()).hexdigest()[:16] if found else ""


def _describe(value: Any, found: list[str], depth: int) -> None:
    own = getattr(value, "_fingerprint", None)  # of the data sets of Hugging Face, which hash their content
    if isinstance(own, str):
        found.append(own)
    elif isinstance(value, torch.Tensor) or type(value).__module__ == "numpy":
        if getattr(value, "shape", ()) and len(value) and getattr(value, "device", "cpu") in ("cpu", _CPU):
            some = [repr(value[at].reshape(-1)[:8].tolist()) for at in (0, len(value) // 2, -1)]
            found.append(f"{value.dtype} {tuple(value.shape)} {some}")
    elif isinstance(value, list | tuple):
        found.append(f"{len(value)} values")
        for at in (0, len(value) // 2, -1) if value and depth else ():
            _describe(value[at], found, depth - 1)
    elif isinstance(value, str | PurePath):  # a copy on a node's own disk has another folder
        found.append("/".join(str(value).split("/")[-2:]))
    elif isinstance(value, bool | int | float | None):
        found.append(repr(value))
    elif depth and not isinstance(value, Mapping | set | torch.nn.Module):
        for name, one in sorted(_attributes(value).items())[:MOST_ATTRIBUTES]:
            is_data = isinstance(one, torch.Tensor | list | tuple) or hasattr(one, "__getitem__")
            if is_data and not isinstance(one, str) and not name.startswith("_") and "cache" not in name:
                _describe(one, found, depth - 1)


_CPU = torch.device("cpu")


def has_fixed_length(loader: Any) -> bool:
    """Whether the batches of a pass are as many in every pass."""
    return isinstance(loader, DataLoader) and type(loader.batch_sampler) in (BatchSampler, type(None))


def batch_size(loader: Any) -> int | None:
    """Samples in a rank's batch, except an epoch's last one; None: unknown."""
    size = getattr(loader, "batch_size", None) if isinstance(loader, DataLoader) else 1
    return size if isinstance(size, int) else None


def _samplers(loader: Any) -> dict[str, Any]:
    inner = getattr(loader, "batch_sampler", None)
    names = {"sampler": loader, "batch_sampler": loader, "batch_sampler.sampler": inner}
    return {name: getattr(owner, name.rpartition(".")[2], None) for name, owner in names.items()}


def sampler_epoch(loader: Any) -> int | None:
    """The epoch that a DistributedSampler, or one like it, has been told; None: there is none."""
    epochs = (getattr(one, "epoch", None) for one in _samplers(loader).values())
    return next((one for one in epochs if type(one) is int), None)


def generators(loader: Any) -> list[torch.Generator]:
    """The generators that a pass uses in this process, each once: of loader, samplers and dataset."""
    owners = [loader, *_samplers(loader).values()]
    if isinstance(loader, DataLoader) and loader.num_workers == 0:  # workers draw from copies
        owners.append(loader.dataset)
    found = {id(one): one for owner in owners for one in _attributes(owner).values()}
    return [one for one in found.values() if isinstance(one, torch.Generator)]


def unseen_generators(loader: Any) -> list[str]:
    """Names of the generators in a loader's objects, and in their attributes, that `generators` lacks."""
    known = {id(one) for one in generators(loader)}
    owners = {**_samplers(loader), "dataset": getattr(loader, "dataset", None)}
    found = {
        id(one): f"{name}.{attribute}{more}"
        for name, owner in owners.items()
        for attribute, value in _attributes(owner).items()
        for more, one in (("", value), *((f".{key}", inner) for key, inner in _attributes(value).items()))
        if isinstance(one, torch.Generator | random.Random) or type(one).__module__.startswith("numpy.random")
    }
    return sorted(name for one, name in found.items() if one not in known)


def _attributes(value: object) -> dict[str, Any]:
    return {} if isinstance(value, type | ModuleType) else getattr(value, "__dict__", {})


def opened(
    loader: Any,
    skip: int,
    *,
    keeps_workers: bool,
    rewind: Callable[[], None],
    wind: Callable[[], None],
) -> Iterator[Any]:
    """Iterate over `loader` without its first `skip` batches.

    Parameters
    ----------
    keeps_workers : the pass of an undisturbed run goes on with the workers of the one before.
    rewind : sets the random numbers to those at the start of the pass, from which samplers draw.
    wind : sets them to those of now, before the first batch is read. Only called if some are skipped.
    """
    if isinstance(loader, DataLoader) and not has_state(loader):
        starts = keeps_workers and loader.persistent_workers and loader._iterator is None
        if skip or starts or type(loader) is not DataLoader:
            return _fed(loader, skip, starts, rewind, wind)
        return iter(loader)
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
    wind()
    return batches


def _fed(
    loader: DataLoader[Any],
    skip: int,
    starts_workers: bool,
    rewind: Callable[[], None],
    wind: Callable[[], None],
) -> Iterator[Any]:
    """Let the loader's own `__iter__` take its indices from a sampler that skips; no skipped sample is read.

    Raises
    ------
    UsageError : it takes none from there, or yields another number of batches.
    """
    slot = "sampler" if loader.batch_sampler is None else "batch_sampler"
    own = getattr(loader, slot)
    later = _Later(own, skip, (loader.prefetch_factor or 0) * loader.num_workers, wind)
    try:
        if starts_workers:
            # That draws a random number, which the pass of an undisturbed run does not draw.
            _set_sampler(loader, slot, ())
            next(iter(loader), None)
        rewind()
        _set_sampler(loader, slot, later)
        batches = iter(loader)
        first = list(itertools.islice(batches, 1))
    finally:
        _set_sampler(loader, slot, own)
    if not later.has_begun:
        raise _unlike_its_sampler(
            loader, "starts a pass without its sampler; it may keep one iterator for all"
        )
    count = 0
    for batch in itertools.chain(first, batches):
        count += 1
        yield batch
    if count != later.count:
        raise _unlike_its_sampler(loader, f"makes {count} batches of {later.count} of its sampler")


def _set_sampler(loader: DataLoader[Any], slot: str, sampler: Any) -> None:
    vars(loader)[slot] = sampler  # DataLoader's own __setattr__ refuses this
    if loader._iterator is not None:  # of workers that are kept
        loader._iterator._index_sampler = sampler


def _unlike_its_sampler(loader: object, how: str) -> UsageError:
    return UsageError(
        f"this loader cannot resume at its sample: {type(loader).__name__} {how}",
        where="run.steps",
        hint="use DataLoader itself, with persistent_workers=True to keep the workers; or give the loader "
        "state_dict and load_state_dict, and track it",
    )


class _Later:
    """A sampler without its first `skip` items; read once.

    Parameters
    ----------
    ahead : items that workers get before the first batch arrives; as many more were drawn before the stop.
    wind : called after these.
    """

    def __init__(self, sampler: Any, skip: int, ahead: int, wind: Callable[[], None]) -> None:
        self._sampler, self._skip, self._ahead, self._wind = sampler, skip, ahead, wind
        self.has_begun, self.count = False, 0

    def __iter__(self) -> Iterator[Any]:
        self.has_begun = True
        items = iter(self._sampler)
        if self._skip:
            for _ in itertools.islice(items, self._skip):
                pass
            items = itertools.chain(list(itertools.islice(items, self._ahead)), items)
            self._wind()
        for item in items:
            self.count += 1
            yield item

    def __len__(self) -> int:
        return max(0, len(self._sampler) - self._skip)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

"""From the data to batches on the device, in the order of order.py, each sample with its own randomness."""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate

from imgkit_entrypoints.apps.ranks import Ranks
from imgkit_entrypoints.apps.train.config import Config
from imgkit_entrypoints.apps.train.data import Sliced
from imgkit_entrypoints.apps.train.order import Order, Position, seed_of
from imgkit_entrypoints.errors import CheckFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What a rank computes at once."""

    batch: Any
    weight: float
    """Factor of its mean loss; 0 where the rank has no sample of this step and computes for company."""
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failed:
    """A sample that cannot be had. A value: an exception arrives wrapped in its process' traceback."""

    text: str


class _Seeded:
    """Samples one by one, each with random numbers of (seed, epoch, index), whichever process makes it."""

    def __init__(self, samples: Any, seed: int) -> None:
        self.samples, self.seed = samples, seed

    def __len__(self) -> int:
        return len(self.samples)

    def __getitems__(self, wanted: list[tuple[int, int]]) -> Any:
        samples = []
        with _random_kept():
            for epoch, index in wanted:
                self._draw(epoch, index)
                try:
                    samples.append(self.samples[index])
                except Exception as error:
                    return _Failed(text=f"sample {index} of the data: {type(error).__name__}: {error}")
            return default_collate(samples)

    def _draw(self, epoch: int, index: int) -> None:
        number = seed_of(self.seed, "sample", epoch, index)
        torch.default_generator.manual_seed(number)  # torch.manual_seed would reset the GPU's too
        random.seed(number)
        if "numpy" in sys.modules:
            import_module("numpy").random.seed(number % 2**32)


@contextlib.contextmanager
def _random_kept() -> Iterator[None]:
    """The model's own random numbers go on after this as if nothing had been drawn in between."""
    kept, python = torch.get_rng_state(), random.getstate()
    numpy = import_module("numpy") if "numpy" in sys.modules else None
    others = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(kept)
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(others)


class Feed:
    """The batches of one rank."""

    def __init__(
        self, samples: Any, order: Order, config: Config, here: Ranks, *, channels_last: bool
    ) -> None:
        self._order, self._config, self._here = order, config, here
        self._dtype = torch.float64 if config.dtype == "fp64" else torch.float32
        self._format = torch.channels_last if channels_last else torch.contiguous_format
        if isinstance(samples, TensorDataset):
            samples = Sliced(*samples.tensors)
        if isinstance(samples, Sliced):
            samples = Sliced(*(self._as_wanted(tensor, torch.device("cpu")) for tensor in samples.tensors))
        self._samples = samples
        self._as_it_is = isinstance(samples, Sliced) and here.device.type == "cpu" and not channels_last
        self.waited_s = 0.0
        """In which the device had nothing to compute on."""

    def steps(self, start: Position, steps: int) -> Iterator[tuple[Position, list[MicroBatch]]]:
        """From `start` up to `steps`: the micro-batches of each step, with the position after it."""
        batches = self._batches(start, steps)
        position = start
        while position.step < steps:
            began = time.perf_counter()
            micro_batches = [
                MicroBatch(
                    batch=self._on_device(next(batches)),
                    weight=self._order.weight(position, part),
                    last=part.last,
                )
                for part in self._order.parts(position, self._here.rank)
            ]
            self.waited_s += time.perf_counter() - began
            position = self._order.after(position)
            yield position, micro_batches

    def _wanted(self, start: Position, steps: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Epoch and sample indices of each micro-batch."""
        position, epoch, permutation = start, -1, torch.empty(0)
        while position.step < steps:
            if position.epoch != epoch:
                epoch = position.epoch
                draw = torch.Generator().manual_seed(seed_of(self._config.seed, "order", epoch))
                permutation = torch.randperm(self._order.size, generator=draw)
            for part in self._order.parts(position, self._here.rank):
                # A rank without samples computes on one of the others', at weight 0: all must take part.
                first, end = (
                    (part.first, part.end)
                    if part.end > part.first
                    else (position.consumed, position.consumed + 1)
                )
                yield epoch, permutation[first:end]
            position = self._order.after(position)

    def _batches(self, start: Position, steps: int) -> Iterator[Any]:
        wanted = self._wanted(start, steps)
        if hasattr(self._samples, "batch"):
            return (self._samples.batch(indices) for _, indices in wanted)
        loader = DataLoader(
            _Seeded(self._samples, self._config.seed),
            batch_sampler=_Lists(wanted),
            collate_fn=_as_it_is,
            num_workers=self._config.workers,
            pin_memory=self._here.device.type == "cuda",
            generator=torch.Generator(),  # else it draws from the model's random numbers
        )
        return self._loaded(loader)

    def _loaded(self, loader: Any) -> Iterator[Any]:
        try:
            for batch in loader:
                if isinstance(batch, _Failed):
                    raise CheckFailed(batch.text, where=f"rank {self._here.rank}")
                yield batch
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise CheckFailed(
                f"a process that fetches samples died: {error}",
                where=f"rank {self._here.rank}",
                hint="--workers 0 shows a sample's own error; often memory or /dev/shm ran out",
            ) from error

    def _on_device(self, batch: Any) -> Any:
        if self._as_it_is:
            return batch
        if isinstance(batch, torch.Tensor):
            if self._here.device.type == "cuda" and not batch.is_pinned():
                batch = batch.pin_memory()
            return self._as_wanted(batch, self._here.device)
        if isinstance(batch, dict):
            return {key: self._on_device(one) for key, one in batch.items()}
        return tuple(self._on_device(one) for one in batch)

    def _as_wanted(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
        layout = self._format if tensor.dim() == 4 else torch.preserve_format
        return tensor.to(device, dtype, non_blocking=True, memory_format=layout)


class _Lists:
    """The wanted samples as the loader takes them: read once, in the main process."""

    def __init__(self, wanted: Iterator[tuple[int, torch.Tensor]]) -> None:
        self._wanted = wanted

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return ([(epoch, index) for index in indices.tolist()] for epoch, indices in self._wanted)


def _as_it_is(batch: Any) -> Any:
    return batch

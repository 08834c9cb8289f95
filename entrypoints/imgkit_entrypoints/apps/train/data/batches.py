"""Batches on the device, in the order of `order`."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import TensorDataset

from imgkit_entrypoints.apps.train.config import Config
from imgkit_entrypoints.apps.train.data.built_in import TensorSamples
from imgkit_entrypoints.apps.train.data.loader import one_by_one
from imgkit_entrypoints.apps.train.data.order import Order, Position, seed_of
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.run.ranks import Ranks


class MicroBatch(NamedTuple):
    """The samples a rank computes at once. A tuple: each step makes one, and a dataclass is slower."""

    batch: Any
    weight: float
    """Factor of its mean loss; 0 if the rank has no sample of this step and only takes part."""
    last: bool


class Batches:
    """The batches of one rank."""

    def __init__(
        self, samples: Any, order: Order, config: Config, here: Ranks, *, channels_last: bool
    ) -> None:
        self._order, self._config, self._here = order, config, here
        self._dtype = torch.float64 if config.dtype == "fp64" else torch.float32
        self._format = torch.channels_last if channels_last else torch.contiguous_format
        if isinstance(samples, TensorDataset):
            samples = TensorSamples(*samples.tensors)
        if isinstance(samples, TensorSamples):
            samples = TensorSamples(
                *(self._converted(tensor, torch.device("cpu")) for tensor in samples.tensors)
            )
        self._samples = samples
        if config.workers and (isinstance(samples, TensorSamples) or hasattr(samples, "batch")):
            raise UsageError(
                "--workers would have no effect: this data gives whole batches, not single samples",
                where=f"--data {config.data}",
                hint="leave --workers out",
            )
        self._ready = isinstance(samples, TensorSamples) and here.device.type == "cpu" and not channels_last
        self._parts = functools.cache(functools.partial(order.parts, rank=here.rank))
        self._permutation = functools.lru_cache(maxsize=1)(self._permute)
        self.waited_s = 0.0
        """Seconds in which the device had no data to compute on."""

    def steps(self, start: Position, steps: int) -> Iterator[tuple[Position, list[MicroBatch]]]:
        """Yield the micro-batches of each step from `start` up to `steps`, and the position after it."""
        batches = self._batches(start, steps)
        position, clock = start, time.perf_counter
        while position.step < steps:
            began = clock()
            parts = self._parts(self._order.count(position))
            micro_batches = [MicroBatch(next(batches), part.weight, part.last) for part in parts]
            position = self._order.after(position)
            self.waited_s += clock() - began
            yield position, micro_batches

    def _batches(self, start: Position, steps: int) -> Iterator[Any]:
        if isinstance(self._samples, TensorSamples):
            return self._cut(self._samples, start, steps)
        wanted = self._indices(start, steps)
        if hasattr(self._samples, "batch"):
            return (self._on_device(self._samples.batch(indices)) for _, indices in wanted)
        return map(self._on_device, one_by_one(self._samples, wanted, self._config, self._here))

    def _cut(self, samples: TensorSamples, start: Position, steps: int) -> Iterator[Any]:
        """Gather the samples of several steps at once and cut them up: gathering costs more than cutting."""
        position = start
        while position.step < steps:
            count = self._order.count(position)
            parts = self._parts(count)
            sizes = [part.end - part.first for part in parts]
            left = min((self._order.size - position.consumed) // count, steps - position.step)
            ahead = min(left, samples.steps_at_once(sizes))
            end = position.consumed + ahead * count
            block = self._permutation(position.epoch)[position.consumed : end].view(ahead, count)
            rows = torch.cat([block[:, part.first : part.end] for part in parts], dim=1).flatten()
            whole = self._on_device(samples.batch(rows))
            yield from zip(*(tensor.split(sizes * ahead) for tensor in whole), strict=True)
            position = self._order.after(position, ahead)

    def _indices(self, start: Position, steps: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the epoch and the sample indices of each micro-batch."""
        position = start
        while position.step < steps:
            ahead = self._permutation(position.epoch)[position.consumed :]
            for part in self._parts(self._order.count(position)):
                yield position.epoch, ahead[part.first : part.end]
            position = self._order.after(position)

    def _permute(self, epoch: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(seed_of(self._config.seed, "order", epoch))
        return torch.randperm(self._order.size, generator=draw)

    def _on_device(self, batch: Any) -> Any:
        if self._ready:
            return batch
        if isinstance(batch, torch.Tensor):
            if self._here.device.type == "cuda" and not batch.is_pinned():
                batch = batch.pin_memory()
            return self._converted(batch, self._here.device)
        if isinstance(batch, dict):
            return {key: self._on_device(one) for key, one in batch.items()}
        return tuple(self._on_device(one) for one in batch)

    def _converted(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
        layout = self._format if tensor.dim() == 4 else torch.preserve_format
        return tensor.to(device, dtype, non_blocking=True, memory_format=layout)

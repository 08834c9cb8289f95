"""Batches on the device, in the order of `order`.

Samples are loaded one by one, in this process or in workers, each with its own random numbers.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate, get_worker_info

from imgkit_entrypoints.apps.train.config import Config
from imgkit_entrypoints.apps.train.datasets import TensorSamples
from imgkit_entrypoints.apps.train.order import Order, Position, seed_of
from imgkit_entrypoints.errors import CheckFailed, UsageError
from imgkit_entrypoints.launch import user_program
from imgkit_entrypoints.run.ranks import Ranks


class BadSample(CheckFailed):
    """A sample of the data cannot be loaded."""

    def __init__(self, what: str, *, where: str, trace: str) -> None:
        super().__init__(what, where=where)
        self.trace = trace
        """The traceback of the data set's own error."""


class MicroBatch(NamedTuple):
    """The samples a rank computes at once. A tuple: each step makes one, and a dataclass is slower."""

    batch: Any
    weight: float
    """Factor of its mean loss; 0 if the rank has no sample of this step and only takes part."""
    last: bool


class Batches:
    """The batches of one rank."""

    def __init__(
        self, samples: Any, order: Order, config: Config, ranks: Ranks, *, channels_last: bool
    ) -> None:
        self._order, self._config, self._ranks = order, config, ranks
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
        self._ready = isinstance(samples, TensorSamples) and ranks.device.type == "cpu" and not channels_last
        self._parts = functools.cache(functools.partial(order.parts, rank=ranks.rank))
        self._permutation = functools.lru_cache(maxsize=1)(self._permute)
        self.waited_s = 0.0
        """Seconds in which the device had no data to compute on."""

    def steps(self, start: Position, steps: int) -> Iterator[tuple[Position, list[MicroBatch]]]:
        """Yield the micro-batches of each step from `start` up to `steps`, and the position after it."""
        batches = self._batches(start, steps)
        position, clock = start, time.perf_counter
        while position.step < steps:
            start_s = clock()
            parts = self._parts(self._order.count(position))
            micro_batches = [MicroBatch(next(batches), part.weight, part.last) for part in parts]
            position = self._order.after(position)
            self.waited_s += clock() - start_s
            yield position, micro_batches

    def _batches(self, start: Position, steps: int) -> Iterator[Any]:
        if isinstance(self._samples, TensorSamples):
            return self._cut(self._samples, start, steps)
        requests = self._indices(start, steps)
        if hasattr(self._samples, "batch"):
            return (self._on_device(self._samples.batch(indices)) for _, indices in requests)
        return map(self._on_device, one_by_one(self._samples, requests, self._config, self._ranks))

    def _cut(self, samples: TensorSamples, start: Position, steps: int) -> Iterator[Any]:
        """Gather the samples of several steps at once and cut them up: gathering costs more than cutting."""
        position = start
        while position.step < steps:
            count = self._order.count(position)
            parts = self._parts(count)
            sizes = [part.end - part.first for part in parts]
            steps_left = min((self._order.size - position.consumed) // count, steps - position.step)
            ahead = min(steps_left, samples.steps_at_once(sizes))
            end = position.consumed + ahead * count
            block = self._permutation(position.epoch)[position.consumed : end].view(ahead, count)
            rows = torch.cat([block[:, part.first : part.end] for part in parts], dim=1).flatten()
            tensors = self._on_device(samples.batch(rows))
            yield from zip(*(tensor.split(sizes * ahead) for tensor in tensors), strict=True)
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
            if self._ranks.device.type == "cuda" and not batch.is_pinned():
                batch = batch.pin_memory()
            return self._converted(batch, self._ranks.device)
        if isinstance(batch, dict):
            return {key: self._on_device(part) for key, part in batch.items()}
        return tuple(self._on_device(part) for part in batch)

    def _converted(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
        layout = self._format if tensor.dim() == 4 else torch.preserve_format
        return tensor.to(device, dtype, non_blocking=True, memory_format=layout)


def one_by_one(
    samples: Any, requests: Iterator[tuple[int, torch.Tensor]], config: Config, ranks: Ranks
) -> Iterator[Any]:
    """Yield a batch for each of the `wanted` pairs of an epoch and indices.

    Raises
    ------
    BadSample : a sample cannot be loaded. CheckFailed : a worker died; names the sample.
    """
    seeded = _Seeded(samples, config.seed, config.workers)
    loader = DataLoader(
        seeded,
        batch_sampler=_Lists(requests),
        collate_fn=_as_it_is,
        num_workers=config.workers,
        pin_memory=ranks.device.type == "cuda",
        generator=torch.Generator(),  # its own, so that it does not draw from the model's
    )
    try:
        for batch in loader:
            if isinstance(batch, _Failed):
                where = "" if batch.line is None or ":" not in config.data else f" ({batch.line})"
                raise BadSample(f"{batch.text}{where}", where=f"rank {ranks.rank}", trace=batch.trace)
            yield batch
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise CheckFailed(
            f"a data worker died{seeded.last_of(str(error))}: {error}",
            where=f"rank {ranks.rank}",
            hint="often memory or /dev/shm ran out; --workers 0 shows the error of a bad sample",
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failed:
    """A sample that cannot be loaded. It is a value, because an exception would arrive as a traceback."""

    text: str
    line: str | None
    """File and line of the first function below this module: of the user's data set."""
    trace: str


def _failed(index: int, error: Exception) -> _Failed:
    frame = user_program.own_frames(error.__traceback__)
    return _Failed(
        text=f"sample {index} of the data: {type(error).__name__}: {error}",
        line=f"{frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}" if frame else None,
        trace=user_program.described(error, error.__traceback__),
    )


class _Seeded:
    """Loads each sample with random numbers that depend only on (seed, epoch, index), not on the process."""

    def __init__(self, samples: Any, seed: int, workers: int) -> None:
        self.samples, self.seed = samples, seed
        # Process id and current sample of each worker, because a dead worker cannot report them.
        self.at = torch.zeros(workers, 2, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitems__(self, requests: list[tuple[int, int]]) -> Any:
        samples = []
        worker = get_worker_info()
        with _random_kept():
            for epoch, index in requests:
                self._draw(epoch, index)
                if worker is not None:
                    self.at[worker.id, 0], self.at[worker.id, 1] = os.getpid(), index
                try:
                    samples.append(self.samples[index])
                except Exception as error:
                    return _failed(index, error)
            return default_collate(samples)

    def _draw(self, epoch: int, index: int) -> None:
        number = seed_of(self.seed, "sample", epoch, index)
        torch.default_generator.manual_seed(number)  # torch.manual_seed would reset the GPU's generator too
        random.seed(number)
        if "numpy" in sys.modules:
            import_module("numpy").random.seed(number % 2**32)

    def last_of(self, message: str) -> str:
        """The samples that the dead processes in torch's `message` were loading."""
        dead = set(map(int, re.findall(r"\d+", message)))
        samples = [str(index) for process, index in self.at.tolist() if process in dead]
        return f" at sample {', '.join(samples)} of the data" if samples else ""


@contextlib.contextmanager
def _random_kept() -> Iterator[None]:
    """Restore the random state afterwards, so that the model's random numbers are unaffected."""
    torch_state, python = torch.get_rng_state(), random.getstate()
    numpy = import_module("numpy") if "numpy" in sys.modules else None
    numpy_state = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


class _Lists:
    """The wanted samples in the loader's form; read once, in the main process."""

    def __init__(self, requests: Iterator[tuple[int, torch.Tensor]]) -> None:
        self._requests = requests

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return ([(epoch, index) for index in indices.tolist()] for epoch, indices in self._requests)


def _as_it_is(batch: Any) -> Any:
    return batch

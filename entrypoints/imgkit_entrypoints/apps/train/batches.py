"""Make the batches of a rank, and move them to its device.

The module `order` decides which samples are in which batch. If the data has a method `batch`, this method
returns a whole batch for a list of indices. Otherwise, samples are loaded one by one, in this process or in
worker processes. Each sample has its own random numbers.
"""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate, get_worker_info

from imgkit_entrypoints.apps.train import plugins
from imgkit_entrypoints.apps.train.config import Config
from imgkit_entrypoints.apps.train.datasets import TensorSamples
from imgkit_entrypoints.apps.train.order import MicroBatchSlice, Order, Position, seed_of
from imgkit_entrypoints.errors import CheckFailed, UsageError
from imgkit_entrypoints.launch import user_program
from imgkit_entrypoints.run import random_state
from imgkit_entrypoints.run.ranks import Ranks

# If all samples together have at most this size, they are sorted once per epoch. A batch is then a slice,
# which is cheaper than indexing.
SMALL_BYTES = 64 << 20


class BadSample(CheckFailed):
    """A sample of the data cannot be loaded."""

    def __init__(self, message: str, *, where: str, trace: str) -> None:
        super().__init__(message, where=where)
        self.trace = trace
        """The traceback of the error that the data set has raised."""


class MicroBatch(NamedTuple):
    """The samples that a rank computes at once.

    It is a tuple, because steps create many micro-batches and a dataclass is slower.
    """

    batch: Any
    weight: float
    """Factor for the mean loss of these samples.

    It is 0 if the rank has no samples in this step, and only takes part in the collectives.
    """
    last: bool
    """True if this is the last micro-batch of the step."""


class Batches:
    """Makes the batches of one rank, in the order of the training."""

    def __init__(
        self, samples: Any, order: Order, config: Config, ranks: Ranks, *, channels_last: bool
    ) -> None:
        self._order = order
        self._config = config
        self._ranks = ranks
        self._dtype = torch.float64 if config.dtype == "fp64" else torch.float32
        self._format = torch.channels_last if channels_last else torch.contiguous_format
        if isinstance(samples, TensorDataset):
            samples = TensorSamples(*samples.tensors)
        self._samples = samples
        if config.workers and hasattr(self._samples, "batch"):
            raise UsageError(
                "--workers would have no effect: this data gives whole batches, not single samples",
                where=f"--data {config.data}",
                hint="leave --workers out",
            )
        # Caches: all steps except the last of an epoch have the same slices, and an epoch has one
        # permutation.
        self._slices = functools.cache(functools.partial(order.micro_batches, rank=ranks.rank))
        self._permutation = functools.lru_cache(maxsize=1)(self._draw_permutation)
        self._is_small = isinstance(self._samples, TensorSamples) and self._samples.size_bytes <= SMALL_BYTES
        self._shuffled_on_device = functools.lru_cache(maxsize=1)(self._shuffle_all)
        self.waited_s = 0.0
        """Total time in seconds that the training has waited for batches."""

    def iterate_steps(self, start: Position, last_step: int) -> Iterator[tuple[Position, list[MicroBatch]]]:
        """Yield the micro-batches of each step, together with the position in the data after the step.

        Parameters
        ----------
        start : position at which the run begins, or from which it resumes.
        last_step : number of steps of the whole run.
        """
        loaded_batches = self._load_batches(start, last_step)
        position = start
        while position.step < last_step:
            start_s = time.perf_counter()
            micro_batches = []
            for slice_of_step in self._slices(self._order.samples_at(position)):
                if loaded_batches is None:  # the data returns whole batches
                    batch = self._take_batch(position, slice_of_step)
                else:  # these batches are in the order of this loop
                    batch = self._move_to_device(next(loaded_batches))
                micro_batches.append(MicroBatch(batch, slice_of_step.weight, slice_of_step.last))
            position = self._order.next_position(position)
            # The caller computes during the `yield`, so that time does not count.
            self.waited_s += time.perf_counter() - start_s
            yield position, micro_batches

    def _take_batch(self, position: Position, slice_of_step: MicroBatchSlice) -> Any:
        """Return the samples of a micro-batch on the device, from data that returns whole batches.

        Parameters
        ----------
        position : position in the data at which the step begins.
        slice_of_step : the range of the micro-batch's samples, relative to the step.
        """
        first = position.consumed + slice_of_step.first
        end = position.consumed + slice_of_step.end
        # If all samples together are small (64 MiB), the device has them, already in the order of the epoch.
        if self._is_small:
            return tuple(tensor[first:end] for tensor in self._shuffled_on_device(position.epoch))
        indices = self._permutation(position.epoch)[first:end]
        return self._move_to_device(self._samples.batch(indices))

    def _load_batches(self, start: Position, last_step: int) -> Iterator[Any] | None:
        """Return the batches of all micro-batches, in the order of the steps, each when it is loaded.

        This is for data from which samples are loaded one by one. Return None for data with a method `batch`.
        """
        if hasattr(self._samples, "batch"):
            return None
        requests = self._iterate_requests(start, last_step)
        return load_samples(self._samples, requests, self._config, self._ranks)

    def _iterate_requests(self, start: Position, last_step: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the epoch and the indices of the samples of each micro-batch, for `load_samples`."""
        position = start
        while position.step < last_step:
            permutation = self._permutation(position.epoch)[position.consumed :]
            for slice_of_step in self._slices(self._order.samples_at(position)):
                yield position.epoch, permutation[slice_of_step.first : slice_of_step.end]
            position = self._order.next_position(position)

    def _draw_permutation(self, epoch: int) -> torch.Tensor:
        """Return the indices of all samples in random order, which depends on the seed and the epoch."""
        generator = torch.Generator().manual_seed(seed_of(self._config.seed, "order", epoch))
        return torch.randperm(self._order.size, generator=generator)

    def _shuffle_all(self, epoch: int) -> Any:
        """Return all samples on the device, in the random order of an epoch."""
        return self._move_to_device(self._samples.batch(self._draw_permutation(epoch)))

    def _move_to_device(self, batch: Any) -> Any:
        """Move all tensors of a batch to the device, and return the batch.

        A batch is a tensor, or a dict, list or tuple of batches. Floating-point tensors are converted to the
        type of ``--dtype``. Tensors with four dimensions are treated as images, and get the memory format of
        the model.
        """
        if isinstance(batch, dict):
            return {key: self._move_to_device(value) for key, value in batch.items()}
        if not isinstance(batch, torch.Tensor):
            return tuple(self._move_to_device(value) for value in batch)
        # From pinned memory, the copy to the GPU can run in the background (`non_blocking`).
        # Batches from a `DataLoader` are pinned already (its option pin_memory).
        if self._ranks.device.type == "cuda" and not batch.is_pinned():
            batch = batch.pin_memory()
        dtype = self._dtype if batch.is_floating_point() else batch.dtype
        layout = torch.preserve_format
        if batch.dim() == 4:  # images
            layout = self._format
        return batch.to(self._ranks.device, dtype, non_blocking=True, memory_format=layout)


def load_samples(
    samples: Any, requests: Iterator[tuple[int, torch.Tensor]], config: Config, ranks: Ranks
) -> Iterator[Any]:
    """Load samples one by one, and yield a batch for each request.

    Parameters
    ----------
    samples : the data, which returns one sample for an index.
    requests : for each batch, the epoch and the indices of the samples.

    Raises
    ------
    BadSample : a sample cannot be loaded.
    CheckFailed : a process that loads samples has died. The message names the sample.
    """
    # Each sample is loaded with random numbers of its own, which do not depend on the number of workers.
    seeded = _SeededSamples(samples, config.seed, config.workers)
    loader = DataLoader(
        seeded,
        batch_sampler=_sample_keys(requests),
        collate_fn=_return_batch,  # `_SeededSamples` has already combined the samples to a batch
        num_workers=config.workers,
        pin_memory=ranks.device.type == "cuda",
        # Without its own generator, the loader would change the random numbers that the model uses.
        generator=torch.Generator(),
    )
    where = f"rank {ranks.rank}"
    try:
        for batch in loader:
            # A worker process returns an error instead of raising it, because only a traceback would arrive.
            if isinstance(batch, _Failure):
                raise _sample_error(batch, config, where)
            yield batch
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise CheckFailed(
            f"a data worker died{seeded.describe_lost_samples(str(error))}: {error}",
            where=where,
            hint="often memory or /dev/shm ran out; --workers 0 shows the error of a bad sample",
        ) from error


def _sample_error(failure: _Failure, config: Config, where: str) -> BadSample:
    """Return the error for a sample that cannot be loaded.

    If the data set is the user's, the message includes the file and the line in the user's code.
    """
    text = failure.text
    if failure.line and plugins.is_plugin(config.data):
        text += f" ({failure.line})"
    return BadSample(text, where=where, trace=failure.trace)


def _sample_keys(requests: Iterator[tuple[int, torch.Tensor]]) -> Iterator[list[tuple[int, int]]]:
    """Yield a list of keys for each batch. The key of a sample is its epoch and its index.

    `_SeededSamples` takes such keys instead of indices, because random numbers depend on the epoch, too.
    """
    for epoch, indices in requests:
        yield [(epoch, index) for index in indices.tolist()]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """The report about a sample that cannot be loaded.

    Worker processes return this value instead of raising an exception, of which only a traceback would
    arrive.
    """

    text: str
    line: str
    """File and line in the code of the user's data set."""
    trace: str


class _SeededSamples:
    """Loads samples with reproducible random numbers, for example for random cropping.

    The random numbers of a sample depend only on the seed, the epoch and the index. The number of worker
    processes makes no difference.
    """

    def __init__(self, samples: Any, seed: int, workers: int) -> None:
        self._samples = samples
        self._seed = seed
        # A row for each worker process, in shared memory: its process id, and the index of its sample. If a
        # worker process dies, it cannot report its sample, so the main process reads it here.
        self._current_samples = torch.zeros(workers, 2, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return len(self._samples)

    def __getitems__(self, keys: list[tuple[int, int]]) -> Any:
        """Return the batch with these samples, or a `_Failure` if one of them cannot be loaded.

        Each key is an epoch and the index of a sample. torch calls this method if it exists.
        """
        worker = get_worker_info()
        # Without worker processes, samples are loaded in the process that trains the model. The seeds below
        # change its random numbers, so their state is restored afterwards.
        state = None
        if worker is None:
            state = random_state.capture()
        samples = []
        for epoch, index in keys:
            random_state.seed_everything(seed_of(self._seed, "sample", epoch, index))
            if worker is not None:
                self._current_samples[worker.id] = torch.tensor([os.getpid(), index])
            try:
                samples.append(self._samples[index])
            except Exception as error:  # the data set is the user's
                return _describe_failure(index, error)
        batch = default_collate(samples)
        if state is not None:
            random_state.restore(state)
        return batch

    def describe_lost_samples(self, message: str) -> str:
        """Return a clause that names the samples which dead worker processes were loading, or "".

        An example is `` at sample 3, 7 of the data``.

        Parameters
        ----------
        message : torch's message with the ids of these processes, such as ``DataLoader worker (pid(s) 71, 72)
            exited unexpectedly``.
        """
        # Any number counts as a process id. Other numbers do no harm, as no row below has them as its id.
        dead_process_ids = set(map(int, re.findall(r"\d+", message)))
        lost_indices = []
        for process_id, index in self._current_samples.tolist():
            if process_id in dead_process_ids:
                lost_indices.append(str(index))
        if not lost_indices:
            return ""
        return f" at sample {', '.join(lost_indices)} of the data"


def _describe_failure(index: int, error: Exception) -> _Failure:
    """Return the report about an error that the data set has raised for the sample `index`."""
    own_traceback = user_program.user_frames(error.__traceback__)
    line = ""
    if own_traceback:
        line = f"{own_traceback.tb_frame.f_code.co_filename}:{own_traceback.tb_lineno}"
    return _Failure(
        text=f"sample {index} of the data: {type(error).__name__}: {error}",
        line=line,
        trace=user_program.format_error(error, error.__traceback__),
    )


def _return_batch(batch: Any) -> Any:
    """Return the batch unchanged."""
    return batch

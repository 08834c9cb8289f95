"""Load samples one by one, in this process or in workers, each with its own random numbers."""

from __future__ import annotations

import contextlib
import os
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate, get_worker_info

from imgkit_entrypoints.apps.train.config import Config
from imgkit_entrypoints.apps.train.data.order import seed_of
from imgkit_entrypoints.errors import CheckFailed
from imgkit_entrypoints.run.ranks import Ranks


def one_by_one(
    samples: Any, wanted: Iterator[tuple[int, torch.Tensor]], config: Config, here: Ranks
) -> Iterator[Any]:
    """Yield a batch for each of the `wanted` pairs of an epoch and indices.

    Raises
    ------
    CheckFailed : a sample cannot be loaded, or a worker died; names the sample.
    """
    seeded = _Seeded(samples, config.seed, config.workers)
    loader = DataLoader(
        seeded,
        batch_sampler=_Lists(wanted),
        collate_fn=_as_it_is,
        num_workers=config.workers,
        pin_memory=here.device.type == "cuda",
        generator=torch.Generator(),  # its own, so that it does not draw from the model's
    )
    try:
        for batch in loader:
            if isinstance(batch, _Failed):
                raise CheckFailed(batch.text, where=f"rank {here.rank}")
            yield batch
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise CheckFailed(
            f"a data worker died{seeded.last_of(str(error))}: {error}",
            where=f"rank {here.rank}",
            hint="often memory or /dev/shm ran out; --workers 0 shows the error of a bad sample",
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failed:
    """A sample that cannot be loaded. It is a value, because an exception would arrive as a traceback."""

    text: str


class _Seeded:
    """Loads each sample with random numbers that depend only on (seed, epoch, index), not on the process."""

    def __init__(self, samples: Any, seed: int, workers: int) -> None:
        self.samples, self.seed = samples, seed
        # Process id and current sample of each worker, because a dead worker cannot report them.
        self.at = torch.zeros(workers, 2, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitems__(self, wanted: list[tuple[int, int]]) -> Any:
        samples = []
        worker = get_worker_info()
        with _random_kept():
            for epoch, index in wanted:
                self._draw(epoch, index)
                if worker is not None:
                    self.at[worker.id, 0], self.at[worker.id, 1] = os.getpid(), index
                try:
                    samples.append(self.samples[index])
                except Exception as error:
                    return _Failed(text=f"sample {index} of the data: {type(error).__name__}: {error}")
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


class _Lists:
    """The wanted samples in the loader's form; read once, in the main process."""

    def __init__(self, wanted: Iterator[tuple[int, torch.Tensor]]) -> None:
        self._wanted = wanted

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return ([(epoch, index) for index in indices.tolist()] for epoch, indices in self._wanted)


def _as_it_is(batch: Any) -> Any:
    return batch

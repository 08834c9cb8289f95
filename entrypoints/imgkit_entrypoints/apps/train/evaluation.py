"""The loss on held-out data. It leaves the training state unchanged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from imgkit_entrypoints.apps.train.config import Config
from imgkit_entrypoints.apps.train.data.batches import Batches
from imgkit_entrypoints.apps.train.data.order import Order, Position
from imgkit_entrypoints.apps.train.loop import Trainer
from imgkit_entrypoints.run.ranks import Ranks


class Evaluation:
    """Evaluates all held-out samples, each once, shared by the ranks in batches of the training's size."""

    def __init__(self, samples: Any, order: Order, config: Config, trainer: Trainer, here: Ranks) -> None:
        at_once = min(order.batch_size * order.world_size, order.global_batch)
        self._order = dataclasses.replace(order, size=len(samples), global_batch=at_once)
        self._trainer, self._here = trainer, here
        self._feed = Batches(samples, self._order, config, here, channels_last=trainer.channels_last)

    def loss(self, lives: Callable[[], object]) -> float:
        """The mean loss over all samples, equal on every rank; a collective call.

        Calls `lives` after each batch, so that the hang watch sees progress.
        """
        total = torch.zeros((), dtype=torch.float64, device=self._here.device)
        position = Position()
        with self._trainer.resting():
            for after, micro_batches in self._feed.steps(position, self._order.steps_per_epoch):
                samples = self._order.count(position) / self._order.world_size
                for micro in micro_batches:
                    total += self._trainer.loss(micro.batch) * (micro.weight * samples)
                position = after
                lives()
        dist.all_reduce(total)
        return float(total.item()) / self._order.size

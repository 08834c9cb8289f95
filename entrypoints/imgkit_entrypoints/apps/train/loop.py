"""The model, its optimizer, and one step of them: on one rank or many, on CPU or GPU by the same code."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from imgkit_entrypoints.apps.ranks import Ranks
from imgkit_entrypoints.apps.train.config import Config
from imgkit_entrypoints.apps.train.data.batches import MicroBatch
from imgkit_entrypoints.apps.train.data.order import seed_of
from imgkit_entrypoints.apps.train.schedule import factor
from imgkit_entrypoints.apps.train.state import snapshot
from imgkit_entrypoints.errors import UsageError

Loss = Callable[[nn.Module, Any], Tensor]
NOTHING = contextlib.nullcontext()


class Trainer:
    """Everything that a step changes."""

    def __init__(self, config: Config, model: nn.Module, loss: Loss, steps: int, here: Ranks) -> None:
        self._config, self._loss, self._steps = config, loss, steps
        dtype = torch.float64 if config.dtype == "fp64" else torch.float32
        self.channels_last = any(isinstance(part, nn.Conv2d) for part in model.modules())
        layout = torch.channels_last if self.channels_last else torch.preserve_format
        self.plain = model.to(here.device, dtype, memory_format=layout)
        cuda = here.device.type == "cuda"
        self.model = DistributedDataParallel(
            self.plain, device_ids=[here.device] if cuda else None, gradient_as_bucket_view=True
        )
        self._parameters = [one for one in self.plain.parameters() if one.requires_grad]
        self._optimizer, self._fused = _optimizer(config, self._parameters)
        amp = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}[config.amp]
        self._lower: contextlib.AbstractContextManager[Any] = (
            NOTHING if amp is None else torch.autocast(here.device.type, dtype=amp)
        )
        self._scaler = torch.amp.GradScaler(here.device.type, enabled=amp is torch.float16)
        self.window = torch.zeros(2, dtype=torch.float64, device=here.device)
        """Since somebody looked: the sum of this rank's parts of the steps' losses, and the number of steps
        that were skipped. On the device: nobody waits for it in a step."""
        self._losses, self._skips = self.window  # views, made once: a step is short
        snapshot.seed_everything(
            seed_of(config.seed, "rank", here.rank)
        )  # from here on, ranks differ: dropout

    def settle(self, micro_batch: MicroBatch) -> None:
        """One forward and backward whose result is thrown away, before the first step and after every start.

        DDP arranges its buckets anew after the first backward, and sums then run in another order: without
        this, a run that goes on is not bitwise the run that was not interrupted, from 3 ranks on.
        """
        buffers = [buffer.detach().clone() for buffer in self.plain.buffers()]
        drawn = snapshot.random_state()
        if self._config.compile:
            self.plain.compile()  # in its place: the names of its weights stay
        with self._lower:
            loss = self._loss(self.model, micro_batch.batch)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            found = (
                f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            )
            raise UsageError(
                f"the loss must be a tensor with one number, this is {found}",
                where=f"--step {self._config.step}",
            )
        loss.backward()
        self._drop_gradients()
        for buffer, before in zip(self.plain.buffers(), buffers, strict=True):
            buffer.copy_(before)
        snapshot.set_random_state(drawn)

    def step(self, number: int, micro_batches: list[MicroBatch]) -> None:
        """The step after `number` others."""
        if self._config.schedule != "constant" or self._config.warmup:
            rate = self._config.lr * factor(self._config.schedule, number, self._steps, self._config.warmup)
            for group in self._optimizer.param_groups:
                group["lr"] = rate
        total: Tensor | None = None
        for micro in micro_batches:
            with NOTHING if micro.last else self.model.no_sync():
                with self._lower:
                    loss = self._loss(self.model, micro.batch)
                weighed = loss if micro.weight == 1.0 else loss * micro.weight
                self._scaler.scale(weighed).backward()
            total = weighed.detach() if total is None else total + weighed.detach()
        assert total is not None
        self._update(total)
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        """zero_grad() does the same, with a record for the profiler: a twentieth of a short step."""
        for parameter in self._parameters:
            parameter.grad = None

    def _update(self, loss: Tensor) -> None:
        norm: Tensor | None = None
        if self._config.clip is not None:
            self._scaler.unscale_(self._optimizer)  # the norm to clip is that of the true gradient
            norm = nn.utils.clip_grad_norm_(self._parameters, self._config.clip)
        if self._config.on_nan == "skip" and not self._scaler.is_enabled():
            self._update_if_finite(loss, norm)
            return
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._losses += loss

    def _update_if_finite(self, loss: Tensor, norm: Tensor | None) -> None:
        """All ranks agree without a word: each has the sum of all gradients, and a NaN anywhere is in it."""
        if norm is None:
            norm = nn.utils.clip_grad_norm_(self._parameters, float("inf"))
        bad = ~torch.isfinite(norm)
        if self._fused:  # decided on the device, in the optimizer's kernel
            self._optimizer.grad_scale, self._optimizer.found_inf = None, bad.to(torch.float32)
            self._optimizer.step()
        elif not bad.item():
            self._optimizer.step()
        self._losses += torch.where(bad, 0.0, loss)
        self._skips += bad

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Nothing is learnt here, and training goes on afterwards as if this had not been."""
        drawn = snapshot.random_state()
        self.plain.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.plain.train()
            snapshot.set_random_state(drawn)

    def loss(self, batch: Any) -> Tensor:
        """Of one batch, as training computes it."""
        with self._lower:
            return self._loss(self.model, batch).detach()

    def flops_a_sample(self, batch: Any) -> float:
        """Floating-point operations that training needs: three times those of the forward pass."""
        from torch.utils.flop_counter import FlopCounterMode  # it imports much

        with self.resting(), FlopCounterMode(display=False) as counter, self._lower:
            self._loss(self.plain, batch)
        first = next(iter(batch.values() if isinstance(batch, dict) else batch))
        return 3 * float(counter.get_total_flops()) / len(first)

    def state(self) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
        """Weights with buffers; and what the optimizer and the scaler keep."""
        return self.plain.state_dict(), {
            "optimizer": self._optimizer.state_dict(),
            "scaler": self._scaler.state_dict(),
        }

    def restore(self, found: snapshot.Snapshot, here: Ranks) -> None:
        """Become what `found` was taken of.

        Raises
        ------
        UsageError : it is of another model.
        """
        if different := snapshot.first_difference(found.weights, self.plain.state_dict()):
            raise UsageError(
                f"the snapshot is of another model: {different}",
                where=str(found.where),
                hint="the same --model, or --resume never with another --run-dir for a new run",
            )
        self.plain.load_state_dict(found.weights)
        rates = [group["lr"] for group in self._optimizer.param_groups]
        self._optimizer.load_state_dict(found.optimizer["optimizer"])
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate  # this start's, should it be another
        self._scaler.load_state_dict(found.optimizer["scaler"])
        if here.world_size == len(found.random):
            snapshot.set_random_state(found.random[here.rank])
        else:  # no rank has a past: new random numbers, not those of the run's first steps again
            snapshot.seed_everything(seed_of(self._config.seed, "rank", here.rank, found.position.step))


def _optimizer(config: Config, parameters: list[nn.Parameter]) -> tuple[torch.optim.Optimizer, bool]:
    kinds: dict[str, tuple[Any, dict[str, float]]] = {
        "sgd": (torch.optim.SGD, {"momentum": config.momentum}),
        "adam": (torch.optim.Adam, {}),
        "adamw": (torch.optim.AdamW, {}),
    }
    kind, more = kinds[config.optimizer]
    more = {**more, "lr": config.lr, "weight_decay": config.weight_decay}
    # Measured on CPU: fused is up to 7 times as fast, but slower where there is only w -= lr * g to do.
    if config.optimizer != "sgd" or config.momentum or parameters[0].device.type == "cuda":
        with contextlib.suppress(RuntimeError):  # older torch on CPU
            return kind(parameters, fused=True, **more), True
    return kind(parameters, foreach=False, **more), False

"""One training step of the model and its optimizer, on one rank or many, on CPU or GPU by the same code.

`Evaluation` is the loss on held-out data; it leaves the training state unchanged. `StepSums` are the numbers
of the steps, added up over all ranks: losses, skipped steps, own work. With the sums comes the own work of
each rank: each adds its seconds to a slot of its own, where all others add 0.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from imgkit_entrypoints.apps.train.batches import Batches, MicroBatch
from imgkit_entrypoints.apps.train.config import Config, learning_rate
from imgkit_entrypoints.apps.train.order import Order, Position, seed_of
from imgkit_entrypoints.apps.train.profiling import WorkClock
from imgkit_entrypoints.apps.train.run_log import Seen
from imgkit_entrypoints.errors import CheckFailed, UsageError
from imgkit_entrypoints.run import random_state
from imgkit_entrypoints.run.agreement import Agreed
from imgkit_entrypoints.run.ranks import Ranks

Loss = Callable[[nn.Module, Any], Any]
NOTHING = contextlib.nullcontext()


class Trainer:
    """The model, the optimizer and everything else that a step changes."""

    def __init__(
        self, config: Config, model: nn.Module, loss: Loss, steps: int, ranks: Ranks, work: WorkClock
    ) -> None:
        self._config, self._loss, self._steps, self._work = config, loss, steps, work
        dtype = torch.float64 if config.dtype == "fp64" else torch.float32
        cuda = ranks.device.type == "cuda"
        # Measured with resnet18: 3 to 7 % slower on a CPU without AMX.
        self.channels_last = cuda and any(isinstance(part, nn.Conv2d) for part in model.modules())
        layout = torch.channels_last if self.channels_last else torch.preserve_format
        self.plain = model.to(ranks.device, dtype, memory_format=layout)
        self.model = DistributedDataParallel(
            self.plain, device_ids=[ranks.device] if cuda else None, gradient_as_bucket_view=True
        )
        work.attach(self.model, compiled=config.compile)
        self._parameters = [parameter for parameter in self.plain.parameters() if parameter.requires_grad]
        self._optimizer, self._fused = _optimizer(config, self._parameters)
        amp = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}[config.amp]
        self._lower: contextlib.AbstractContextManager[Any] = (
            NOTHING if amp is None else torch.autocast(ranks.device.type, dtype=amp)
        )
        self._scaler = torch.amp.GradScaler(ranks.device.type, enabled=amp is torch.float16)
        self.names: tuple[str, ...] = ()
        """Names of the numbers that the user's step returns beside the loss."""
        self._open_window(ranks.device)
        random_state.seed_everything(
            seed_of(config.seed, "rank", ranks.rank)
        )  # ranks differ from here on: dropout

    def _open_window(self, device: torch.device) -> None:
        self.window = torch.zeros(3 + len(self.names), dtype=torch.float64, device=device)
        """Sums since the last read: skipped steps, then this rank's share of the losses and of the user's
        numbers. The second value is the latest norm of the gradient. All stay on the device, so that no step
        waits."""
        self._skips, self._norm, self._losses = self.window[0], self.window[1], self.window[2:]
        self._norm.fill_(float("nan"))

    def settle(self, micro_batch: MicroBatch) -> None:
        """Run one forward and backward pass before the first step of every start, and discard the result.

        DDP rearranges its buckets after the first backward pass, which changes the order of sums. Without
        this call, a resumed run on 3 or more ranks would not equal an uninterrupted one bit by bit.
        """
        buffers = [buffer.detach().clone() for buffer in self.plain.buffers()]
        drawn = random_state.capture()
        if self._config.compile:
            self.plain.compile()  # in place, so that the names of the weights stay
        with self._lower:
            loss, numbers = _parted(self._loss(self.model, micro_batch.batch))
        self.names = tuple(numbers)
        self._open_window(self.window.device)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            kind_of_loss = (
                f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            )
            raise UsageError(
                f"the loss must be a tensor with one number, but it is {kind_of_loss}",
                where=f"--step {self._config.step}",
            )
        _refuse_others_than_numbers(numbers, f"--step {self._config.step}")
        self._work.backward(self._parameters, loss.backward)
        self._drop_gradients()
        for buffer, before in zip(self.plain.buffers(), buffers, strict=True):
            buffer.copy_(before)
        random_state.restore(drawn)

    def step(self, number: int, micro_batches: list[MicroBatch], *, measured: bool = False) -> None:
        """Take the step that follows `number` others; if `measured`, note the norm of its gradient."""
        if self._config.schedule != "constant" or self._config.warmup_steps:
            rate = learning_rate(self._config, number, self._steps)
            for group in self._optimizer.param_groups:
                group["lr"] = rate
        total: Tensor | None = None
        self._work.begins()
        for micro in micro_batches:
            with NOTHING if micro.last else self.model.no_sync():
                with self._lower:
                    loss, numbers = _parted(self._loss(self.model, micro.batch))
                weighed = loss if micro.weight == 1.0 else loss * micro.weight
                self._scaler.scale(weighed).backward()
            sums = self._with_numbers(weighed.detach(), numbers, micro.weight)
            total = sums if total is None else total + sums
        self._work.reduced()
        assert total is not None
        self._update(total, measured=measured)
        self._drop_gradients()

    def _with_numbers(self, loss: Tensor, numbers: Mapping[str, Any], weight: float) -> Tensor:
        if tuple(numbers) != self.names:
            raise UsageError(
                f"the step returned the numbers {_listed(tuple(numbers))}, "
                f"but {_listed(self.names)} at first",
                where=f"--step {self._config.step}",
                hint="return the same names in the same order from every call",
            )
        if not numbers:
            return loss
        kind = {"dtype": torch.float64, "device": loss.device}
        return torch.stack(
            [
                loss.double(),
                *(torch.as_tensor(number, **kind).detach() * weight for number in numbers.values()),
            ]
        )

    def _drop_gradients(self) -> None:
        """Do the same as zero_grad(), without its profiler record: a twentieth of a short step."""
        for parameter in self._parameters:
            parameter.grad = None

    def _update(self, loss: Tensor, *, measured: bool) -> None:
        norm: Tensor | None = None
        skips = self._config.on_nan == "skip"
        if self._config.clip is not None or measured or skips:
            self._scaler.unscale_(self._optimizer)  # the norm is that of the unscaled gradient
        if self._config.clip is not None:
            norm = nn.utils.clip_grad_norm_(self._parameters, self._config.clip)
        if measured:
            self._norm.copy_(self._gradient_norm() if norm is None else norm)
        if skips:
            self._update_if_finite(loss, norm)
            return
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._losses += loss

    def _gradient_norm(self) -> Tensor:
        gradients = (weight.grad for weight in self._parameters if weight.grad is not None)
        return torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients])
        )

    def _update_if_finite(self, loss: Tensor, norm: Tensor | None) -> None:
        """Skip the update if the gradient is not finite.

        Every rank has the sum of all gradients, which holds any NaN, so all decide alike without a message.
        """
        if norm is None:
            norm = nn.utils.clip_grad_norm_(self._parameters, float("inf"))
        bad = ~torch.isfinite(norm)
        if self._scaler.is_enabled():  # it skips such a gradient by itself
            self._scaler.step(self._optimizer)
            self._scaler.update()
        elif self._fused:  # the optimizer's kernel decides, on the device
            self._optimizer.grad_scale, self._optimizer.found_inf = None, bad.to(torch.float32)
            self._optimizer.step()
        elif not bad.item():
            self._optimizer.step()
        self._losses += torch.where(bad, 0.0, loss)
        self._skips += bad

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Switch to evaluation; training continues afterwards as if nothing had happened."""
        drawn = random_state.capture()
        self.plain.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.plain.train()
            random_state.restore(drawn)

    def loss(self, batch: Any) -> Tensor:
        """The loss of one batch, computed as in training."""
        with self._lower:
            loss: Tensor = _parted(self._loss(self.model, batch))[0]
            return loss.detach()

    def flops_a_sample(self, batch: Any) -> float:
        """Floating-point operations of training one sample: three times those of the forward pass."""
        from torch.utils.flop_counter import FlopCounterMode  # a heavy import

        with self.resting(), FlopCounterMode(display=False) as counter, self._lower:
            self._loss(self.plain, batch)
        first = next(iter(batch.values() if isinstance(batch, dict) else batch))
        return 3 * float(counter.get_total_flops()) / len(first)

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer and the gradient scaler."""
        return {"optimizer": self._optimizer.state_dict(), "scaler": self._scaler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over such a state, with the learning rate of this start if it has changed."""
        rates = [group["lr"] for group in self._optimizer.param_groups]
        self._optimizer.load_state_dict(state["optimizer"])
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self._scaler.load_state_dict(state["scaler"])


def _parted(returned: Any) -> tuple[Any, Mapping[str, Any]]:
    """Split what a step returned: the loss alone, or the loss and more numbers by name."""
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
        return returned[0], returned[1]
    return returned, {}


def _refuse_others_than_numbers(numbers: Mapping[str, Any], where: str) -> None:
    for name, value in numbers.items():
        if (isinstance(value, Tensor) and value.dim() == 0) or isinstance(value, int | float):
            continue
        kind = (
            f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        )
        raise UsageError(
            f"{name} must be one number, but it is {kind}",
            where=where,
            hint="return (loss, {name: number, ...}), for example the mean of the batch's samples",
        )


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "none"


def _optimizer(config: Config, parameters: list[nn.Parameter]) -> tuple[torch.optim.Optimizer, bool]:
    kinds: dict[str, tuple[Any, dict[str, float]]] = {
        "sgd": (torch.optim.SGD, {"momentum": config.momentum}),
        "adam": (torch.optim.Adam, {}),
        "adamw": (torch.optim.AdamW, {}),
    }
    kind, options = kinds[config.optimizer]
    options = {**options, "lr": config.lr, "weight_decay": config.weight_decay}
    on_gpu, kernel = parameters[0].device.type == "cuda", f"aten::_fused_{config.optimizer}_"
    # Measured on CPU: fused is up to 7 times as fast, but slower for plain SGD (w -= lr * g).
    is_faster = on_gpu or config.optimizer != "sgd" or config.momentum
    with contextlib.suppress(RuntimeError):  # older torch: no such operator, or not on this device
        # torch 2.3 takes fused=True for SGD on a CPU, and has no such kernel.
        if is_faster and (on_gpu or torch._C._dispatch_has_kernel_for_dispatch_key(kernel, "CPU")):
            return kind(parameters, fused=True, **options), True
    return kind(parameters, foreach=False, **options), False


class Evaluation:
    """Evaluates all held-out samples, each once, shared by the ranks in batches of the training's size."""

    def __init__(self, samples: Any, order: Order, config: Config, trainer: Trainer, ranks: Ranks) -> None:
        at_once = min(order.batch_size * order.world_size, order.global_batch)
        self._order = dataclasses.replace(order, size=len(samples), global_batch=at_once)
        self._trainer, self._ranks = trainer, ranks
        self._feed = Batches(samples, self._order, config, ranks, channels_last=trainer.channels_last)

    def loss(self, lives: Callable[[], object]) -> float:
        """The mean loss over all samples, equal on every rank; a collective call.

        Calls `lives` after each batch, so that the watchdog sees progress.
        """
        total = torch.zeros((), dtype=torch.float64, device=self._ranks.device)
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


class LossIsNoNumber(CheckFailed):
    """A loss was NaN or infinite; all ranks raise it at the same step."""


class StepSums:
    """What the ranks add up at each look; `note` gets it, on every rank."""

    def __init__(
        self, trainer: Trainer, work: WorkClock, ranks: Ranks, note: Callable[[Seen], object]
    ) -> None:
        self._trainer, self._work, self._note = trainer, work, note
        self._rank, self._ranks = ranks.rank, ranks.world_size
        self._slots = self._ranks if self._ranks > 1 else 0
        """Numbers that hold the own work of one rank each; a single rank has nobody to compare with."""

    def take(self) -> Tensor:
        """This rank's numbers since the last look, on its device; no call waits for it."""
        window = self._trainer.window
        count = len(window) + 1
        numbers = torch.zeros(count + self._slots, dtype=window.dtype, device=window.device)
        spent = self._work.take()
        spent_s = torch.tensor([spent.wait_s, spent.own_s], dtype=window.dtype)
        spent_s = spent_s.to(window.device, non_blocking=True)
        numbers[: len(window)] = window
        numbers[len(window)] = spent_s[0]
        if self._slots:
            numbers[count + self._rank] = spent_s[1]
        window.zero_()
        window[1] = math.nan  # no norm of the gradient until one is measured
        return numbers

    def arrived(self, agreed: Agreed) -> None:
        """Note the means over all ranks.

        Raises
        ------
        LossIsNoNumber : a loss of these steps is not finite.
        """
        if not agreed.steps:
            return
        count = len(agreed.sums) - self._slots
        skipped, norm, loss, *numbers, wait_s = (value / self._ranks for value in agreed.sums[:count])
        skips = round(skipped)
        counted = agreed.steps - skips
        self._note(
            Seen(
                step=agreed.step,
                steps=agreed.steps,
                loss=loss / counted if counted else math.nan,
                numbers=tuple(value / counted if counted else math.nan for value in numbers),
                grad_norm=norm,
                skipped=skips,
                seconds=agreed.seconds,
                own_s=agreed.sums[count:],
                wait_s=wait_s,
            )
        )
        if not math.isfinite(loss):
            raise LossIsNoNumber(
                "a loss is not a number", hint="try a smaller --lr, --clip 1, or --on-nan skip"
            )

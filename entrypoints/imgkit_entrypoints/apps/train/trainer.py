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
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from imgkit_entrypoints.apps.train.batches import Batches, MicroBatch
from imgkit_entrypoints.apps.train.config import Config, learning_rate
from imgkit_entrypoints.apps.train.order import Order, Position, seed_of
from imgkit_entrypoints.apps.train.profiling import WorkClock
from imgkit_entrypoints.apps.train.run_log import LatestSteps
from imgkit_entrypoints.errors import CheckFailed, UsageError
from imgkit_entrypoints.run import random_state
from imgkit_entrypoints.run.agreement import Agreed
from imgkit_entrypoints.run.ranks import Ranks

Loss = Callable[[nn.Module, Any], Any]
# One for all: a step enters it for each micro-batch.
NO_CONTEXT = contextlib.nullcontext()
# Types of mixed precision, by the names of ``--amp``.
AMP_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Trainer:
    """The model, the optimizer and everything else that a step changes."""

    def __init__(
        self, config: Config, model: nn.Module, loss: Loss, steps: int, ranks: Ranks, clock: WorkClock
    ) -> None:
        self._config = config
        self._loss = loss
        self._steps = steps
        self._clock = clock
        is_cuda = ranks.device.type == "cuda"
        dtype = torch.float64 if config.dtype == "fp64" else torch.float32
        has_convolutions = any(isinstance(module, nn.Conv2d) for module in model.modules())
        # Measured with resnet18: 3 to 7 % slower on a CPU without AMX.
        self.channels_last = is_cuda and has_convolutions
        layout = torch.channels_last if self.channels_last else torch.preserve_format
        self.plain = model.to(ranks.device, dtype, memory_format=layout)
        self.model = DistributedDataParallel(
            self.plain, device_ids=[ranks.device] if is_cuda else None, gradient_as_bucket_view=True
        )
        clock.exclude_buffer_copies(self.model, compiled=config.compile)
        self._parameters = [parameter for parameter in self.plain.parameters() if parameter.requires_grad]
        self._optimizer = _create_optimizer(config, self._parameters)
        self._autocast: contextlib.AbstractContextManager[Any] = NO_CONTEXT
        if config.amp != "off":
            self._autocast = torch.autocast(ranks.device.type, dtype=AMP_TYPES[config.amp])
        self._scaler = torch.amp.GradScaler(ranks.device.type, enabled=config.amp == "fp16")
        self._device = ranks.device
        self._open_sums(())
        # From here on, ranks draw different numbers, for dropout.
        random_state.seed_everything(seed_of(config.seed, "rank", ranks.rank))

    def _open_sums(self, number_names: tuple[str, ...]) -> None:
        """Open sums for the loss and for the numbers that the user's step returns beside it."""
        self.number_names = number_names
        """Names of the user's numbers."""
        self.sums = torch.zeros(3 + len(number_names), dtype=torch.float64, device=self._device)
        """Sums since the last exchange: skipped steps, then this rank's share of the losses and of the user's
        numbers. The second value is the latest norm of the gradient. All stay on the device, so that no step
        waits."""
        # These show the memory of the sums.
        self._skipped = self.sums[0]
        self._norm = self.sums[1]
        self._losses = self.sums[2:]
        self.reset_sums()

    def reset_sums(self) -> None:
        """Begin new sums, without a norm of the gradient until one is measured."""
        self.sums.zero_()
        self._norm.fill_(math.nan)

    def warm_up(self, micro_batch: MicroBatch) -> None:
        """Run one forward and backward pass before the first step of every start, and discard the result.

        DDP rearranges its buckets after the first backward pass, which changes the order of sums. Without
        this call, a resumed run on 3 or more ranks would not equal an uninterrupted one bit by bit.

        Raises
        ------
        UsageError : the user's step returns something else than a loss and numbers.
        """
        buffers = [buffer.detach().clone() for buffer in self.plain.buffers()]
        state = random_state.capture()
        if self._config.compile:
            # In place, so that the names of the weights stay.
            self.plain.compile()
        with self._autocast:
            loss, numbers = _loss_and_numbers(self._loss(self.model, micro_batch.batch))
        self._refuse_no_numbers(loss, numbers)
        self._open_sums(tuple(numbers))
        self._clock.run_first_backward(self._parameters, loss.backward)
        self._drop_gradients()
        for buffer, saved_buffer in zip(self.plain.buffers(), buffers, strict=True):
            buffer.copy_(saved_buffer)
        random_state.restore(state)

    def _refuse_no_numbers(self, loss: Any, numbers: Mapping[str, Any]) -> None:
        """Raise UsageError if the user's step returns something else than a loss and numbers."""
        if not isinstance(loss, Tensor):
            raise self._no_number_error("the loss", loss)
        for name, value in {"the loss": loss, **numbers}.items():
            has_shape = isinstance(value, Tensor) and value.dim() > 0
            if has_shape or not isinstance(value, Tensor | int | float):
                raise self._no_number_error(name, value)

    def _no_number_error(self, name: str, value: Any) -> UsageError:
        """Return the error for a value of the user's step that is not one number."""
        kind = f"a {type(value).__name__}"
        if isinstance(value, Tensor):
            kind += f" of shape {tuple(value.shape)}"
        return UsageError(
            f"{name} must be a tensor with one number, but it is {kind}",
            where=f"--step {self._config.step}",
            hint="return (loss, {name: number, ...}), for example the mean of the batch's samples",
        )

    def step(self, number: int, micro_batches: list[MicroBatch], *, measured: bool = False) -> None:
        """Take a step, and update the weights.

        Parameters
        ----------
        number : number of the step, from 0.
        measured : whether the norm of the gradient goes into the log.
        """
        if self._config.schedule != "constant" or self._config.warmup_steps:  # the rate changes
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate(self._config, number, self._steps)
        losses = []
        self._clock.start_step()
        for micro_batch in micro_batches:
            # DDP adds the gradients of all ranks up with the last micro-batch.
            with NO_CONTEXT if micro_batch.last else self.model.no_sync():
                losses.append(self._add_gradients(micro_batch))
        self._clock.end_step()
        loss = sum(losses[1:], start=losses[0])  # from 0, it would be one addition more
        self._update_weights(loss, measured=measured)
        self._drop_gradients()

    def _add_gradients(self, micro_batch: MicroBatch) -> Tensor:
        """Add the gradients of a micro-batch to those of the step, and return its loss and numbers."""
        with self._autocast:
            loss, numbers = _loss_and_numbers(self._loss(self.model, micro_batch.batch))
        if micro_batch.weight != 1.0:  # most have the weight 1, and a multiplication costs time
            loss = loss * micro_batch.weight
        self._scaler.scale(loss).backward()
        return self._join_numbers(loss.detach(), numbers, micro_batch.weight)

    def _join_numbers(self, loss: Tensor, numbers: Mapping[str, Any], weight: float) -> Tensor:
        """Return the loss and the weighted numbers of the user's step in one tensor.

        Raises
        ------
        UsageError : the step has returned other names than in the warm-up.
        """
        if tuple(numbers) != self.number_names:
            raise UsageError(
                f"the step returned the numbers {', '.join(numbers) or 'none'}, but "
                f"{', '.join(self.number_names) or 'none'} at first",
                where=f"--step {self._config.step}",
                hint="return the same names in the same order from every call",
            )
        if not numbers:
            return loss
        tensors = [loss.double()]
        for number in numbers.values():
            tensor = torch.as_tensor(number, dtype=torch.float64, device=loss.device).detach()
            tensors.append(tensor * weight)
        return torch.stack(tensors)

    def _drop_gradients(self) -> None:
        """Do the same as zero_grad(), without its profiler record: a twentieth of a short step."""
        for parameter in self._parameters:
            parameter.grad = None

    def _update_weights(self, loss: Tensor, *, measured: bool) -> None:
        """Update the weights, unless ``--on-nan skip`` is given and the gradient is not finite.

        Every rank has the sum of all gradients, which holds any NaN, so all decide alike without a message.
        """
        is_skippable = self._config.on_nan == "skip"
        norm: Tensor | None = None  # to measure it costs time, so only where it is needed
        if self._config.clip is not None or measured or is_skippable:
            norm = self._clip_gradient()
        if measured and norm is not None:
            self._norm.copy_(norm)
        if not is_skippable:
            self._losses += loss
        elif norm is not None:
            is_skipped = ~torch.isfinite(norm)
            self._skipped += is_skipped
            self._losses += torch.where(is_skipped, 0.0, loss)
            # An enabled scaler skips such a gradient itself.
            if not self._scaler.is_enabled() and is_skipped:
                return
        self._scaler.step(self._optimizer)
        self._scaler.update()

    def _clip_gradient(self) -> Tensor:
        """Limit the norm of the unscaled gradient to ``--clip``, and return the norm before that."""
        self._scaler.unscale_(self._optimizer)
        limit = math.inf  # measures the norm and changes nothing
        if self._config.clip is not None:
            limit = self._config.clip
        norm: Tensor = nn.utils.clip_grad_norm_(self._parameters, limit)
        return norm

    @contextlib.contextmanager
    def switch_to_evaluation(self) -> Iterator[None]:
        """Switch to evaluation; training continues afterwards as if nothing had happened."""
        state = random_state.capture()
        self.plain.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.plain.train()
            random_state.restore(state)

    def loss(self, batch: Any) -> Tensor:
        """Return the loss of one batch, computed as in training."""
        with self._autocast:
            loss, _ = _loss_and_numbers(self._loss(self.model, batch))
            detached: Tensor = loss.detach()
            return detached

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer and the gradient scaler."""
        return {"optimizer": self._optimizer.state_dict(), "scaler": self._scaler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned.

        The learning rate, the momentum and the weight decay stay those of this start's options.
        """
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({**state["optimizer"], "param_groups": groups})
        self._scaler.load_state_dict(state["scaler"])


def _loss_and_numbers(result: Any) -> tuple[Any, Mapping[str, Any]]:
    """Return the loss, and the numbers by name, from the result of a step: a loss, or a pair of both."""
    if isinstance(result, tuple) and len(result) == 2:
        loss, numbers = result
        if isinstance(numbers, Mapping):
            return loss, numbers
    return result, {}


def _create_optimizer(config: Config, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of the options, with the fastest of torch's implementations."""
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if _should_fuse(config, parameters[0].device):
        options["fused"] = True
    else:
        options["foreach"] = False
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, momentum=config.momentum, **options)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.optimizer]
    return kind(parameters, **options)


def _should_fuse(config: Config, device: torch.device) -> bool:
    """Return whether torch has a fused implementation of the optimizer that is faster than the plain one."""
    if device.type == "cuda":
        return True
    # Measured on CPU: fused is up to 7 times as fast, but slower for plain SGD (w -= lr * g).
    if config.optimizer == "sgd" and not config.momentum:
        return False
    # torch 2.3 takes fused=True for SGD on a CPU, and has no such kernel.
    kernel = f"aten::_fused_{config.optimizer}_"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(kernel, "CPU"))


class Evaluation:
    """Evaluates all held-out samples, each once, shared by the ranks in batches of the training's size."""

    def __init__(self, samples: Any, order: Order, config: Config, trainer: Trainer, ranks: Ranks) -> None:
        global_batch = min(order.batch_size * order.world_size, order.global_batch)
        self._order = dataclasses.replace(order, size=len(samples), global_batch=global_batch)
        self._trainer = trainer
        self._ranks = ranks
        self._feed = Batches(samples, self._order, config, ranks, channels_last=trainer.channels_last)

    def loss(self, on_batch: Callable[[], object]) -> float:
        """Return the mean loss over all samples, equal on every rank; a collective call.

        Calls `on_batch` after each batch, so that the watchdog sees progress.
        """
        total = torch.zeros((), dtype=torch.float64, device=self._ranks.device)
        position = Position()
        with self._trainer.switch_to_evaluation():
            for next_position, micro_batches in self._feed.steps(position, self._order.steps_per_epoch):
                # A micro-batch has the weight of its samples among those of one rank.
                samples_per_rank = self._order.samples_at(position) / self._order.world_size
                for micro_batch in micro_batches:
                    total += self._trainer.loss(micro_batch.batch) * (micro_batch.weight * samples_per_rank)
                position = next_position
                on_batch()
        dist.all_reduce(total)
        return float(total.item()) / self._order.size


class LossIsNoNumber(CheckFailed):
    """A loss was NaN or infinite; all ranks raise it at the same step."""


@dataclass(frozen=True, slots=True)
class StepSums:
    """What the ranks add up at each exchange; `on_sums` gets the sums, on every rank."""

    trainer: Trainer
    clock: WorkClock
    ranks: Ranks
    on_sums: Callable[[LatestSteps], object]

    def take(self) -> Tensor:
        """Return this rank's numbers since the last exchange, on its device; no call waits for it."""
        step_times = self.clock.take_times()
        sums = self.trainer.sums
        # The wait, and a slot for the own work of each rank.
        seconds = torch.zeros(1 + self.ranks.world_size, dtype=sums.dtype)
        seconds[0] = step_times.wait_s
        seconds[1 + self.ranks.rank] = step_times.own_s
        numbers = torch.cat([sums, seconds.to(sums.device, non_blocking=True)])
        self.trainer.reset_sums()
        return numbers

    def arrived(self, exchange: Agreed) -> None:
        """Hand the means over all ranks to the log.

        Raises
        ------
        LossIsNoNumber : a loss of these steps is not finite.
        """
        if not exchange.steps:
            return
        world_size = self.ranks.world_size
        # The last values are the own work of each rank. Each of the others is a sum over all ranks, of which
        # the log gets the mean.
        own_s = exchange.sums[-world_size:]
        if world_size == 1:
            own_s = ()
        averages = [total / world_size for total in exchange.sums[:-world_size]]
        skipped, norm, *numbers, wait_s = averages
        self.on_sums(
            LatestSteps(
                step=exchange.step,
                steps=exchange.steps,
                skipped=round(skipped),
                seconds=exchange.seconds,
                sums=tuple(numbers),
                grad_norm=norm,
                own_s=own_s,
                wait_s=wait_s,
            )
        )
        loss, *_ = numbers
        if not math.isfinite(loss):
            raise LossIsNoNumber(
                "a loss is not a number", hint="try a smaller --lr, --clip 1, or --on-nan skip"
            )

"""Training steps, the evaluation, and the sums over all ranks. The same code runs on CPUs and GPUs.

`Trainer` has the model and its optimizer. `Evaluation` computes the loss on held-out data, and leaves the
state of the training unchanged. `StepSums` adds up the numbers of steps over all ranks: losses, skipped
steps, and times.
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
# A shared object, because each step enters a context for every micro-batch.
NO_CONTEXT = contextlib.nullcontext()
# Element types of mixed precision, by the value of ``--amp``.
AMP_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Trainer:
    """Takes training steps. It contains the model, the optimizer, and all other state that a step changes."""

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
        # Only on GPUs, because on a CPU without AMX, this layout is 3 to 7 % slower (measured with resnet18).
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
        self._create_sums(())
        # All ranks have created the same model. From here on, their random numbers differ, for example for
        # dropout.
        random_state.seed_everything(seed_of(config.seed, "rank", ranks.rank))

    def _create_sums(self, number_names: tuple[str, ...]) -> None:
        """Create the tensor of the sums since the last exchange between ranks, and its views.

        Its values are the number of skipped steps, the latest norm of the gradient, this rank's share of the
        losses, and its share of each of the user's numbers. The user's numbers are those that the function of
        ``--step`` returns in addition to the loss.
        """
        self.number_names = number_names
        # The tensor stays on the device, so that no step waits for the GPU.
        self.sums = torch.zeros(3 + len(number_names), dtype=torch.float64, device=self._device)
        # These are views of the same memory, so a change of a view changes `sums`.
        self._skipped_count = self.sums[0]
        self._norm = self.sums[1]
        self._loss_and_numbers = self.sums[2:]
        self.reset_sums()

    def reset_sums(self) -> None:
        """Set the sums to 0, and the norm of the gradient to NaN, which means that it was not measured."""
        self.sums.zero_()
        self._norm.fill_(math.nan)

    def warm_up(self, micro_batch: MicroBatch) -> None:
        """Run one forward and backward pass before the first step, without an effect on the training.

        DDP rearranges its buckets of gradients after the first backward pass, which changes the order of
        additions. If this happened in the first step of each start, a resumed run on 3 or more ranks would
        not be equal to an uninterrupted run bit by bit. The pass also compiles the model, checks the result
        of the user's step, and shows which numbers it contains and which gradient is ready last.

        Raises
        ------
        UsageError : the user's step does not return a loss, optionally with numbers.
        """
        with self._restore_after_pass():
            if self._config.compile:
                # Compile the module in place, so that the names of the weights in checkpoints stay the same.
                self.plain.compile()
            with self._autocast:
                loss, numbers = _split_step_result(self._loss(self.model, micro_batch.batch))
            self._refuse_wrong_result(loss, numbers)
            # Only now are the names of the user's numbers known, of which the sums need a place for each.
            self._create_sums(tuple(numbers))
            self._clock.run_first_backward(self._parameters, loss.backward)
            self._drop_gradients()

    @contextlib.contextmanager
    def _restore_after_pass(self) -> Iterator[None]:
        """Restore buffers, such as the means of batch normalization, and random numbers after a block.

        A forward pass in the block changes both. The weights and the optimizer are not restored.
        """
        saved_buffers = [buffer.detach().clone() for buffer in self.plain.buffers()]
        state = random_state.capture()
        yield
        for buffer, saved_buffer in zip(self.plain.buffers(), saved_buffers, strict=True):
            buffer.copy_(saved_buffer)
        random_state.restore(state)

    def _refuse_wrong_result(self, loss: Any, numbers: Mapping[str, Any]) -> None:
        """Raise UsageError if the result of the user's step is not a loss, optionally with numbers."""
        if not isinstance(loss, Tensor):
            raise self._make_loss_error("the loss", loss)
        for name, value in {"the loss": loss, **numbers}.items():
            has_shape = isinstance(value, Tensor) and value.dim() > 0
            if has_shape or not isinstance(value, Tensor | int | float):
                raise self._make_loss_error(name, value)

    def _make_loss_error(self, name: str, value: Any) -> UsageError:
        """Return the error for a value from the user's step that is not a single number."""
        kind = f"a {type(value).__name__}"
        if isinstance(value, Tensor):
            kind += f" of shape {tuple(value.shape)}"
        return UsageError(
            f"{name} must be a tensor with one number, but it is {kind}",
            where=f"--step {self._config.step}",
            hint="return (loss, {name: number, ...}), for example the mean of the batch's samples",
        )

    def take_step(self, step_index: int, micro_batches: list[MicroBatch], *, measure_norm: bool) -> None:
        """Compute the gradients of all micro-batches of a step, and update the weights.

        Parameters
        ----------
        step_index : number of the step, counted from 0.
        micro_batches : the samples of this rank.
        measure_norm : True to measure the norm of the gradient for the log, which costs some time.
        """
        self._set_learning_rate(step_index)
        results = []
        # The clock measures this rank's own work, by which slow ranks are found. The update does not count.
        self._clock.start_step()
        for micro_batch in micro_batches:
            # DDP adds up the gradients of all ranks only once, in the backward pass of the last micro-batch.
            # Until then, they add up on this rank.
            with NO_CONTEXT if micro_batch.last else self.model.no_sync():
                results.append(self._add_gradients(micro_batch))
        self._clock.end_step()
        first_result, *other_results = results
        # Without this start, sum() would begin with 0, which costs one more addition of tensors.
        loss_and_numbers = sum(other_results, start=first_result)
        self._update_weights(loss_and_numbers, measure_norm=measure_norm)
        self._drop_gradients()

    def _set_learning_rate(self, step_index: int) -> None:
        """Set the learning rate of a step, unless it is the same in all steps."""
        if self._config.schedule == "constant" and not self._config.warmup_steps:
            return
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self._config, step_index, self._steps)

    def _add_gradients(self, micro_batch: MicroBatch) -> Tensor:
        """Compute the gradients of a micro-batch, and add them to the gradients of the step.

        Return the loss, or a tensor with the loss and the numbers that the user's step returns for the log.
        All are multiplied by the weight of the micro-batch.
        """
        with self._autocast:
            loss, numbers = _split_step_result(self._loss(self.model, micro_batch.batch))
        if micro_batch.weight != 1.0:  # avoid the multiplication in the usual case of the weight 1
            loss = loss * micro_batch.weight
        self._scaler.scale(loss).backward()
        # The loss contains the weight already, and the numbers get it now.
        return self._join_numbers(loss.detach(), numbers, micro_batch.weight)

    def _join_numbers(self, loss: Tensor, numbers: Mapping[str, Any], weight: float) -> Tensor:
        """Return a tensor with the loss and the numbers of the user's step, or only the loss if it has none.

        The numbers are multiplied by `weight`, the weight of the micro-batch. The loss already contains it.

        Raises
        ------
        UsageError : the names of the numbers differ from those in the warm-up.
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
        """Do the same as the optimizer's zero_grad(), but faster.

        zero_grad() also records an event for the profiler, which takes a twentieth of a short step.
        """
        for parameter in self._parameters:
            parameter.grad = None

    def _update_weights(self, loss_and_numbers: Tensor, *, measure_norm: bool) -> None:
        """Update the weights, and add the loss and the user's numbers of this step to the sums.

        With ``--on-nan skip``, a step whose gradient is not finite is only counted as skipped.
        """
        if self._config.on_nan == "skip":
            norm = self._clip_gradient(measure_norm=measure_norm)
            is_skipped = self._add_to_sums_if_finite(loss_and_numbers, norm)
            # If the gradient scaler is enabled (--amp fp16), its step() skips such a gradient itself, and its
            # update() must still be called. Otherwise `is_skipped` must be read, which waits for the GPU.
            if not self._scaler.is_enabled() and bool(is_skipped):
                return
        else:
            # The norm takes time, so it is only computed if it is needed.
            if measure_norm or self._config.clip is not None:
                self._clip_gradient(measure_norm=measure_norm)
            self._loss_and_numbers += loss_and_numbers
        self._scaler.step(self._optimizer)
        self._scaler.update()

    def _add_to_sums_if_finite(self, loss_and_numbers: Tensor, norm: Tensor) -> Tensor:
        """Add the results of a step to the sums, or count the step as skipped if the norm is not finite.

        Return whether it is skipped, as a tensor on the device, so that nothing here waits for the GPU. Every
        rank has the sum of the gradients of all ranks. If any gradient is NaN, the sum is NaN, too. So all
        ranks take the same decision without communication.
        """
        is_skipped = ~torch.isfinite(norm)
        self._skipped_count += is_skipped
        self._loss_and_numbers += torch.where(is_skipped, 0.0, loss_and_numbers)
        return is_skipped

    def _clip_gradient(self, *, measure_norm: bool) -> Tensor:
        """Limit the norm of the gradient to ``--clip``, and return the norm before clipping.

        With `measure_norm`, the norm is also stored for the log. The gradient scaler's factor is removed
        first.
        """
        self._scaler.unscale_(self._optimizer)
        limit = math.inf  # without --clip, the norm is measured, but the gradient does not change
        if self._config.clip is not None:
            limit = self._config.clip
        norm: Tensor = nn.utils.clip_grad_norm_(self._parameters, limit)
        if measure_norm:
            self._norm.copy_(norm)
        return norm

    @contextlib.contextmanager
    def switch_to_evaluation(self) -> Iterator[None]:
        """Switch the model to evaluation mode in a ``with`` block, without gradients.

        Afterwards, the random numbers are restored, so that the training continues as without an evaluation.
        """
        state = random_state.capture()
        self.plain.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.plain.train()
            random_state.restore(state)

    def compute_loss(self, batch: Any) -> Tensor:
        """Return the loss of one batch, with the same loss function and precision as in training."""
        with self._autocast:
            loss, _ = _split_step_result(self._loss(self.model, batch))
            detached: Tensor = loss.detach()
            return detached

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer and the gradient scaler."""
        return {"optimizer": self._optimizer.state_dict(), "scaler": self._scaler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` has returned.

        The learning rate, the momentum and the weight decay are not loaded. They come from the options of
        this start.
        """
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({**state["optimizer"], "param_groups": groups})
        self._scaler.load_state_dict(state["scaler"])


def _split_step_result(result: Any) -> tuple[Any, Mapping[str, Any]]:
    """Split the result of the user's step into the loss and the numbers by name.

    The result is either a loss, or a tuple of a loss and numbers.
    """
    # Any other tuple is returned as the loss, and `_refuse_wrong_result` reports it as a mistake.
    if isinstance(result, tuple) and len(result) == 2:
        loss, numbers = result
        if isinstance(numbers, Mapping):
            return loss, numbers
    return result, {}


def _create_optimizer(config: Config, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer that the options select, in the fastest of torch's implementations.

    The fused implementation updates all weights at once. Where it does not exist or is slower, the weights
    are updated one after the other.
    """
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
    """Return whether torch has a fused implementation of the optimizer that is faster than the default."""
    if device.type == "cuda":
        return True
    # Measured on a CPU: the fused implementation is up to 7 times as fast, but slower for SGD without
    # momentum (w -= lr * g).
    if config.optimizer == "sgd" and not config.momentum:
        return False
    # torch 2.3 accepts fused=True for SGD on a CPU, although it has no such kernel. So ask torch's
    # dispatcher.
    kernel = f"aten::_fused_{config.optimizer}_"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(kernel, "CPU"))


class Evaluation:
    """Computes the loss on all held-out samples.

    The samples are divided among the ranks. The batches have the same size as in training.
    """

    def __init__(self, samples: Any, order: Order, config: Config, trainer: Trainer, ranks: Ranks) -> None:
        global_batch = min(order.batch_size * order.world_size, order.global_batch)
        self._order = dataclasses.replace(order, size=len(samples), global_batch=global_batch)
        self._trainer = trainer
        self._ranks = ranks
        self._feed = Batches(samples, self._order, config, ranks, channels_last=trainer.channels_last)

    def compute_loss(self, on_batch: Callable[[], object]) -> float:
        """Return the mean loss over all held-out samples. It is equal on every rank.

        All ranks must call this method.

        Parameters
        ----------
        on_batch : function that is called after each batch, so that the watchdog sees progress.
        """
        total = torch.zeros((), dtype=torch.float64, device=self._ranks.device)
        position = Position()  # the position at which each step begins
        all_steps = self._feed.iterate_steps(position, self._order.steps_per_epoch)
        with self._trainer.switch_to_evaluation():
            for next_position, micro_batches in all_steps:
                mean_samples_of_rank = self._order.samples_at(position) / self._order.world_size
                for micro_batch in micro_batches:
                    # The weight is the number of samples, relative to the mean number of a rank in this step.
                    sample_count = micro_batch.weight * mean_samples_of_rank
                    total += self._trainer.compute_loss(micro_batch.batch) * sample_count
                position = next_position
                on_batch()
        dist.all_reduce(total)
        return float(total.item()) / self._order.size


class LossIsNoNumber(CheckFailed):
    """A loss is NaN or infinite. All ranks raise this error at the same step."""


@dataclass(frozen=True, slots=True)
class StepSums:
    """The numbers that the ranks add up in each exchange of the run library.

    Each rank also learns the own work of every other rank. For this, the tensor has a place for each rank, in
    which only this rank adds its time, and all others add 0. On every rank, `on_sums` is called with the
    results.
    """

    trainer: Trainer
    clock: WorkClock
    ranks: Ranks
    on_sums: Callable[[LatestSteps], object]

    def take(self) -> Tensor:
        """Return this rank's numbers since the last exchange as a tensor on its device, and begin new sums.

        The run library adds up the tensors of all ranks, and passes the sum to `arrived`. The values are
        those of `Trainer.sums`, the wait of this rank, and the own work of each rank. This does not wait for
        the device.
        """
        step_times = self.clock.take_times()
        sums = self.trainer.sums
        seconds = torch.zeros(1 + self.ranks.world_size, dtype=sums.dtype)
        seconds[0] = step_times.wait_s
        # The places of all other ranks are 0 here, so the sum over all ranks has the own work of each.
        seconds[1 + self.ranks.rank] = step_times.own_s
        rank_sums = torch.cat([sums, seconds.to(sums.device, non_blocking=True)])
        self.trainer.reset_sums()
        return rank_sums

    def arrived(self, exchange: Agreed) -> None:
        """Convert the sums over all ranks to means, and pass them to `on_sums`.

        Raises
        ------
        LossIsNoNumber : a loss in these steps is not finite.
        """
        if not exchange.steps:  # no step has ended since the last exchange
            return
        latest = self._average_sums(exchange)
        self.on_sums(latest)
        # The check comes last, so that the log shows the loss that ends the run.
        loss, *_ = latest.sums
        if not math.isfinite(loss):
            raise LossIsNoNumber(
                "a loss is not a number", hint="try a smaller --lr, --clip 1, or --on-nan skip"
            )

    def _average_sums(self, exchange: Agreed) -> LatestSteps:
        """Return the numbers of the latest steps, averaged over the ranks, and the own work of each rank."""
        world_size = self.ranks.world_size
        # The last values are the own work of each rank. All others are sums over all ranks, which are divided
        # by the number of ranks.
        own_s = exchange.sums[-world_size:]
        if world_size == 1:
            own_s = ()
        averages = [total / world_size for total in exchange.sums[:-world_size]]
        # The order is that of `Trainer.sums`, and of `take`, which appends the times.
        skipped, norm, *mean_numbers, wait_s = averages
        return LatestSteps(
            step=exchange.step,
            steps=exchange.steps,
            skipped=round(skipped),
            seconds=exchange.seconds,
            sums=tuple(mean_numbers),
            grad_norm=norm,
            own_s=own_s,
            wait_s=wait_s,
        )

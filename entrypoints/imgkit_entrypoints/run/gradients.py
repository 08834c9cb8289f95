"""Gradients that wait for their optimizer. A checkpoint has no gradients, so a save waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from imgkit_entrypoints.run.tracked import TrackedObjects, iterate_parameters

# Steps by which a save waits at most. A GAN may have gradients that it never uses.
MAX_WAITING_STEPS = 32
# Gradients of an optimizer that are looked at. One backward pass makes all of them, so a few are enough.
MAX_GRADIENTS = 8
# Attribute of a gradient with its version when the optimizer used it. A later backward pass changes the
# version, or makes another tensor.
_USED_VERSION = "_imgkit_used"


class PendingGradients:
    """Watches when the tracked optimizers use the gradients of their weights."""

    def __init__(self, tracked: TrackedObjects, say: Callable[[str], None]) -> None:
        self._tracked = tracked
        self._say = say
        # Keys of the optimizers that were called since the latest step of the run began.
        self._stepped: set[int] = set()
        # Steps by which the present save has waited.
        self._waiting_steps = 0
        self._has_reported = False
        self._hook = register_optimizer_step_post_hook(self._on_optimizer_step)

    def close(self) -> None:
        """Stop watching the optimizers."""
        self._hook.remove()

    def begin_step(self) -> None:
        """Forget the optimizers that were called in earlier steps of the run."""
        self._stepped.clear()

    @property
    def has_stepped(self) -> bool:
        """Whether a tracked optimizer was called since the latest step of the run began."""
        return bool(self._stepped)

    def delay_save(self) -> bool:
        """Return whether the save that is due now has to wait for an optimizer, and count the steps it waits.

        It waits while gradients are there that no optimizer step has used, since a checkpoint keeps none.
        The first such step reports that the save waits. After `MAX_WAITING_STEPS` a warning is reported, and
        the save no longer waits.
        """
        name = self._find_pending()
        if not name:
            self._waiting_steps = 0
            return False
        self._waiting_steps += 1
        if not self._has_reported:
            self._has_reported = True
            self._say(
                f"a save waits until an optimizer.step() has used the gradients of {name}, for at most "
                f"{MAX_WAITING_STEPS} steps"
            )
        if self._waiting_steps == MAX_WAITING_STEPS + 1:
            self._say(
                f"warning: no optimizer.step() has used the gradients of {name} for {MAX_WAITING_STEPS} "
                "steps; the run saves without them"
            )
        return self._waiting_steps <= MAX_WAITING_STEPS

    def _find_pending(self) -> str:
        """Return the name of a tracked object with gradients that no optimizer step has used yet, or ""."""
        for name, value in self._tracked.objects.items():
            if isinstance(value, Optimizer) and self._has_unused_gradients(value):
                return name
            if isinstance(value, nn.Module) and holds_back_gradients(value):
                return name
        return ""

    def _has_unused_gradients(self, optimizer: Optimizer) -> bool:
        """Return whether a backward pass has changed gradients since the last step of their optimizer."""
        if _optimizer_key(optimizer) in self._stepped:
            return False
        for gradient in _first_gradients(optimizer):
            if getattr(gradient, _USED_VERSION, None) != gradient._version:
                return True
        return False

    def _on_optimizer_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Note that an optimizer has used its gradients, if it is tracked. torch calls this for all."""
        key = _optimizer_key(optimizer)
        if key not in map(_optimizer_key, self._tracked.optimizers):
            return
        self._stepped.add(key)
        for gradient in _first_gradients(optimizer):
            setattr(gradient, _USED_VERSION, gradient._version)


def _optimizer_key(optimizer: Optimizer) -> int:
    """Return the id of an optimizer's first weight, which a wrapper around the optimizer has too."""
    return id(next(iterate_parameters(optimizer), optimizer))


def _first_gradients(optimizer: Optimizer) -> list[Tensor]:
    """Return the first gradients of an optimizer, at most `MAX_GRADIENTS`."""
    gradients: list[Tensor] = []
    for parameter in iterate_parameters(optimizer):
        if parameter.grad is not None:
            gradients.append(parameter.grad)
        if len(gradients) == MAX_GRADIENTS:
            break
    return gradients


def holds_back_gradients(model: nn.Module) -> bool:
    """Return whether a model has gradients that are not added up over the ranks yet.

    FSDP2 keeps them apart from the parameters after ``set_requires_gradient_sync(False)`` and
    ``set_requires_all_reduce(False)``, and has no public way to ask: these names are of torch 2.6 to 2.13.
    """
    for module in model.modules():
        for group in _fsdp_groups(module):
            if getattr(group, "_partial_reduce_output", None) is not None:
                return True
            if any(map(_has_own_gradient, group.fsdp_params)):
                return True
    return False


def _has_own_gradient(fsdp_param: Any) -> bool:
    """Return whether this rank has a gradient of a whole parameter that is not divided into shards yet."""
    if fsdp_param.unsharded_accumulated_grad is not None:
        return True
    unsharded_param = getattr(fsdp_param, "_unsharded_param", None)
    return getattr(unsharded_param, "grad", None) is not None


def _fsdp_groups(module: nn.Module) -> list[Any]:
    """Return FSDP2's groups of the parameters of a module, or [] if FSDP2 does not shard it."""
    if not hasattr(module, "_get_fsdp_state"):
        return []
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    group = getattr(state, "_fsdp_param_group", None)  # older releases have a single group for each module
    return [] if group is None else [group]

"""Delay a save while gradients wait for their optimizer, because a checkpoint does not contain gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from imgkit_entrypoints.run.tracked import TrackedObjects, iterate_parameters

# The largest number of steps for which a save waits. A GAN may have gradients that it never uses.
MAX_WAITING_STEPS = 32
# Number of gradients of an optimizer that are checked. A backward pass computes all gradients, so a few are
# enough.
MAX_GRADIENTS = 8
# Attribute of a gradient that stores its version when the optimizer used it. A later backward pass changes
# the version or creates another tensor.
_USED_VERSION = "_imgkit_used"


class PendingGradients:
    """Observes when the tracked optimizers use the gradients of their weights."""

    def __init__(self, tracked: TrackedObjects, say: Callable[[str], None]) -> None:
        self._tracked = tracked
        self._say = say
        # Keys of the optimizers that have taken a step since the latest step of the run began.
        self._stepped: set[int] = set()
        # Number of steps for which the current save has waited.
        self._waiting_steps = 0
        self._has_reported = False
        self._hook = register_optimizer_step_post_hook(self._on_optimizer_step)

    def close(self) -> None:
        """Stop observing the optimizers."""
        self._hook.remove()

    def forget_optimizer_steps(self) -> None:
        """Begin a new step of the run, in which no optimizer has taken a step yet."""
        self._stepped.clear()

    @property
    def has_stepped(self) -> bool:
        """Whether a tracked optimizer has taken a step since the latest step of the run began."""
        return bool(self._stepped)

    def count_waiting_save(self) -> bool:
        """Return whether a due save must wait for an optimizer, and count this step if it must.

        A save waits while there are gradients that no optimizer step has used, because a checkpoint does not
        contain gradients. After `MAX_WAITING_STEPS` steps, it no longer waits. Call this once in each step.
        """
        name = self._find_pending()
        if not name:
            self._waiting_steps = 0
            return False
        self._waiting_steps += 1
        self._report_wait(name)
        return self._waiting_steps <= MAX_WAITING_STEPS

    def _report_wait(self, name: str) -> None:
        """Tell the user that a save waits for the gradients of `name`, and warn when it no longer waits.

        Saves of one program usually wait for the same reason, so only the first one is reported.
        """
        if not self._has_reported:
            self._has_reported = True
            self._say(
                f"a save waits until an optimizer.step() has used the gradients of {name}, for at most "
                f"{MAX_WAITING_STEPS} steps"
            )
        if self._waiting_steps == MAX_WAITING_STEPS + 1:  # only once for each save
            self._say(
                f"warning: no optimizer.step() has used the gradients of {name} for {MAX_WAITING_STEPS} "
                "steps; the run saves without them"
            )

    def _find_pending(self) -> str:
        """Return the name of a tracked object whose gradients no optimizer step has used yet, or ``""``."""
        for name, value in self._tracked.objects.items():
            if isinstance(value, Optimizer) and self._has_unused_gradients(value):
                return name
            if isinstance(value, nn.Module) and holds_back_gradients(value):
                return name
        return ""

    def _has_unused_gradients(self, optimizer: Optimizer) -> bool:
        """Return whether a backward pass has changed gradients since the last step of `optimizer`."""
        if _optimizer_key(optimizer) in self._stepped:  # it has used them in this step of the run
            return False
        for gradient in _find_first_gradients(optimizer):
            if getattr(gradient, _USED_VERSION, None) != gradient._version:
                return True
        return False

    def _on_optimizer_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Record that a tracked optimizer has used its gradients. torch calls this for every optimizer."""
        key = _optimizer_key(optimizer)
        if key not in map(_optimizer_key, self._tracked.optimizers):
            return
        self._stepped.add(key)
        # `_has_unused_gradients` compares these versions with later ones.
        for gradient in _find_first_gradients(optimizer):
            setattr(gradient, _USED_VERSION, gradient._version)


def _optimizer_key(optimizer: Optimizer) -> int:
    """Return a key for an optimizer: the id of its first weight.

    A wrapper around the optimizer has the same weights, so it gets the same key. An optimizer without weights
    gets its own id.
    """
    return id(next(iterate_parameters(optimizer), optimizer))


def _find_first_gradients(optimizer: Optimizer) -> list[Tensor]:
    """Return the first gradients of an optimizer, at most `MAX_GRADIENTS`."""
    gradients: list[Tensor] = []
    for parameter in iterate_parameters(optimizer):
        if parameter.grad is not None:
            gradients.append(parameter.grad)
        if len(gradients) == MAX_GRADIENTS:
            break
    return gradients


def holds_back_gradients(model: nn.Module) -> bool:
    """Return whether a model has gradients that have not been added up over the ranks yet.

    FSDP2 stores such gradients separately from the parameters. There is no public function to find them. The
    private names below are valid for torch 2.6 to 2.13.
    """
    for module in model.modules():
        for group in _find_fsdp_groups(module):
            # After set_requires_all_reduce(False): in shards, but not yet added up over the replicas.
            if getattr(group, "_partial_reduce_output", None) is not None:
                return True
            # After set_requires_gradient_sync(False): still this rank's own gradients.
            if any(map(_has_own_gradient, group.fsdp_params)):
                return True
    return False


def _has_own_gradient(fsdp_param: Any) -> bool:
    """Return whether this rank has a gradient of a complete parameter, not yet divided into shards."""
    if fsdp_param.unsharded_accumulated_grad is not None:
        return True
    unsharded_param = getattr(fsdp_param, "_unsharded_param", None)
    return getattr(unsharded_param, "grad", None) is not None


def _find_fsdp_groups(module: nn.Module) -> list[Any]:
    """Return FSDP2's parameter groups of a module, or ``[]`` if FSDP2 does not shard the module."""
    if not hasattr(module, "_get_fsdp_state"):
        return []
    fsdp_state = module._get_fsdp_state()
    groups = getattr(fsdp_state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    group = getattr(fsdp_state, "_fsdp_param_group", None)  # older releases have one group per module
    return [] if group is None else [group]

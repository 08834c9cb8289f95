"""Gradients that wait for their optimizer: a checkpoint keeps none, so a save waits for the update."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from imgkit_entrypoints.run.tracked import Tracked

MAX_WAIT = 32
"""Steps by which a save waits at most: a GAN may have gradients that it never uses."""
SAMPLES = 8
"""Gradients of an optimizer that are looked at: one backward pass makes all of them."""
_USED = "_imgkit_used"
"""Attribute of a gradient: its version when the optimizer used it."""


class PendingGradients:
    """Sees when the tracked optimizers use the gradients of their weights."""

    def __init__(self, tracked: Tracked, say: Callable[[str], None]) -> None:
        self._tracked, self._say = tracked, say
        self._stepped: set[int] = set()
        """Optimizers that were called since the latest step of the run began."""
        self._waited = 0
        """Steps by which the present save has waited."""
        self._has_reported = False
        self._hook = register_optimizer_step_post_hook(self._on_step)

    def close(self) -> None:
        """See no more updates."""
        self._hook.remove()

    def begin_step(self) -> None:
        """Note that a step of the run begins."""
        self._stepped.clear()

    @property
    def has_stepped(self) -> bool:
        """Whether an optimizer was called since then."""
        return bool(self._stepped)

    def are_pending(self) -> bool:
        """Return whether a save should wait for an optimizer."""
        name = self._find_pending()
        self._waited = self._waited + 1 if name else 0
        if name and not self._has_reported:
            self._has_reported = True
            self._say(
                f"a save waits until an optimizer.step() has used the gradients of {name}, for at most "
                f"{MAX_WAIT} steps"
            )
        if self._waited == MAX_WAIT + 1:
            self._say(
                f"warning: no optimizer.step() has used the gradients of {name} for {MAX_WAIT} steps; the "
                "run saves without them"
            )
        return 0 < self._waited <= MAX_WAIT

    def _find_pending(self) -> str:
        """Return the name of an object whose gradients wait for their update; empty: there is none."""
        for name, value in self._tracked.objects.items():
            if isinstance(value, Optimizer) and self._waits(value):
                return name
            if isinstance(value, nn.Module) and holds_back_gradients(value):
                return name
        return ""

    def _waits(self, optimizer: Optimizer) -> bool:
        if _key(optimizer) in self._stepped:
            return False
        return any(getattr(gradient, _USED, None) != gradient._version for gradient in _gradients(optimizer))

    def _on_step(self, optimizer: Optimizer, *_: Any) -> None:
        if _key(optimizer) in map(_key, self._tracked.optimizers):
            self._stepped.add(_key(optimizer))
            for gradient in _gradients(optimizer):
                # A later backward pass changes the version, or makes another tensor.
                setattr(gradient, _USED, gradient._version)


def _key(optimizer: Optimizer) -> int:
    weights = (weight for group in optimizer.param_groups for weight in group["params"])
    return id(next(weights, optimizer))  # a wrapper around the optimizer has the same


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    weights = (weight for group in optimizer.param_groups for weight in group["params"])
    return list(itertools.islice((weight.grad for weight in weights if weight.grad is not None), SAMPLES))


def holds_back_gradients(model: nn.Module) -> bool:
    """Return whether gradients of a model are not added up over the ranks yet.

    FSDP2 keeps them apart from the parameters after ``set_requires_gradient_sync(False)`` and
    ``set_requires_all_reduce(False)``, and has no public way to ask: these names are of torch 2.6 to 2.13.
    """
    for module in model.modules():
        state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
        single = getattr(state, "_fsdp_param_group", None)
        for group in getattr(state, "_fsdp_param_groups", [single] if single else []):
            if getattr(group, "_partial_reduce_output", None) is not None:
                return True
            for param in group.fsdp_params:
                gathered = getattr(param, "_unsharded_param", None)
                if (
                    param.unsharded_accumulated_grad is not None
                    or getattr(gathered, "grad", None) is not None
                ):
                    return True
    return False

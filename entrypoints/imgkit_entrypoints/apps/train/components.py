"""The model, data and loss of a run: built in, or the user's own functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from imgkit_entrypoints.apps.train import models, plugins
from imgkit_entrypoints.apps.train.config import Config
from imgkit_entrypoints.apps.train.data import built_in
from imgkit_entrypoints.apps.train.data.order import seed_of
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.run.random_state import seed_everything


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """Functions that make the model and the data, and the loss."""

    model: Callable[[Config], nn.Module]
    data: Callable[[Config, str], Any]
    loss: Callable[[nn.Module, Any], Any]


def load(config: Config) -> Components:
    """Find the functions that `config` names, without calling them.

    Raises
    ------
    UsageError : a function of the user cannot be imported.
    """
    model: Callable[[Config], Any] = (
        plugins.load(config.model, plugins.MODEL) if plugins.is_plugin(config.model) else _built_in
    )
    samples = plugins.load(config.data, plugins.DATA) if plugins.is_plugin(config.data) else built_in.built_in
    loss = models.loss_of if config.step == "builtin" else plugins.load(config.step, plugins.STEP)

    def seeded_model(config: Config) -> nn.Module:
        seed_everything(config.seed)
        made = model(config)
        if not isinstance(made, nn.Module):
            raise _wrong(config.model, made, plugins.MODEL)
        return made

    def seeded_data(config: Config, split: str) -> Any:
        # Random data is the same on every rank, and differs between the splits.
        seed_everything(config.seed if split == "train" else seed_of(config.seed, split))
        made = samples(config, split)
        if not hasattr(made, "__len__") or not (hasattr(made, "__getitem__") or hasattr(made, "batch")):
            raise _wrong(config.data, made, plugins.DATA)
        return made

    return Components(model=seeded_model, data=seeded_data, loss=loss)


def _built_in(config: Config) -> nn.Module:
    made = models.BUILT_IN[config.model](built_in.classes(config))
    return models.checkpoint_blocks(made) if config.activation_checkpointing else made


def _wrong(place: str, made: object, contract: plugins.Contract) -> UsageError:
    return UsageError(
        f"the function returned a {type(made).__name__}", where=place, hint=f"expected {contract.signature}"
    )

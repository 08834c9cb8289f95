"""The random numbers of this process: torch's, Python's and NumPy's generators together."""

from __future__ import annotations

import contextlib
import importlib
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch


def seed_everything(seed: int) -> None:
    """Seed every generator of this process."""
    torch.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


def capture() -> dict[str, Any]:
    """Return the state of every generator of this process."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    if numpy := sys.modules.get("numpy"):  # otherwise nobody has drawn from it
        state["numpy"] = numpy.random.get_state()
    return state


def restore(state: Mapping[str, Any]) -> None:
    """Restore a state that `capture` returned."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state:
        with contextlib.suppress(ImportError):
            importlib.import_module("numpy").random.set_state(state["numpy"])


GeneratorStates = Sequence[torch.Tensor]


def states_of(generators: Sequence[torch.Generator]) -> GeneratorStates:
    """Return the states of generators that a program has made."""
    return [generator.get_state() for generator in generators]


def restore_generators(generators: Sequence[torch.Generator], states: GeneratorStates) -> None:
    """Restore as many generators as there are states."""
    for generator, state in zip(generators, states, strict=False):
        generator.set_state(state)

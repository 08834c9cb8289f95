"""Save and restore the random number generators of this process: those of torch, Python and NumPy."""

from __future__ import annotations

import contextlib
import importlib
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch


def seed_everything(seed: int) -> None:
    """Seed the generators of torch, Python and NumPy in this process."""
    torch.manual_seed(seed)
    random.seed(seed)
    # NumPy is seeded only if the program has already imported it, because the import takes time.
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)  # NumPy refuses larger seeds


def capture() -> dict[str, Any]:
    """Return the states of the generators of torch, Python and NumPy in this process."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    # If NumPy has not been imported, nothing has used its generator. Importing it here would take time.
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state()
    return state


def restore(state: Mapping[str, Any]) -> None:
    """Restore the states that `capture` returned."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state:
        with contextlib.suppress(ImportError):  # the image of the resumed run may not contain NumPy
            importlib.import_module("numpy").random.set_state(state["numpy"])


GeneratorStates = Sequence[torch.Tensor]


def capture_generators(generators: Sequence[torch.Generator]) -> GeneratorStates:
    """Return the states of `generators`, which a program has created itself."""
    return [generator.get_state() for generator in generators]


def restore_generators(generators: Sequence[torch.Generator], states: GeneratorStates) -> None:
    """Restore the states of `generators`. If there are fewer states, the last generators are not changed."""
    for generator, state in zip(generators, states, strict=False):
        generator.set_state(state)

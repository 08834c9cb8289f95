"""The random numbers of this process: torch's, Python's and NumPy's generators together."""

from __future__ import annotations

import contextlib
import importlib
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


def seed_everything(number: int) -> None:
    """Seed every generator of this process."""
    torch.manual_seed(number)
    random.seed(number)
    if "numpy" in sys.modules:
        importlib.import_module("numpy").random.seed(number % 2**32)


def current() -> dict[str, Any]:
    """The state of every generator, in types that torch.load(weights_only=True) reads."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:  # otherwise nothing here has used it
        kind, words, *rest = importlib.import_module("numpy").random.get_state()
        state["numpy"] = (kind, [int(word) for word in words], *rest)
    return state


def restore(state: Mapping[str, Any]) -> None:
    """Restore a state that `current` returned."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state:
        with contextlib.suppress(ImportError):
            importlib.import_module("numpy").random.set_state(state["numpy"])

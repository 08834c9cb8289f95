"""The random numbers of this process: torch's, Python's and NumPy's generators together."""

from __future__ import annotations

import contextlib
import importlib
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


def seed_everything(number: int) -> None:
    """Seed every generator of this process."""
    torch.manual_seed(number)
    random.seed(number)
    if "numpy" in sys.modules:
        importlib.import_module("numpy").random.seed(number % 2**32)


def current(more: Sequence[torch.Generator] = ()) -> dict[str, Any]:
    """The state of every generator and of `more`, in types that torch.load(weights_only=True) reads."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:  # otherwise nothing here has used it
        kind, words, *rest = importlib.import_module("numpy").random.get_state()
        state["numpy"] = (kind, [int(word) for word in words], *rest)
    if more:
        state["more"] = [one.get_state() for one in more]
    return state


@dataclass(frozen=True, slots=True, kw_only=True)
class NumpyState:
    """The state of NumPy's generator, as its ``get_state`` lists it."""

    kind: str
    words: list[int]
    place: int
    has_gauss: int
    gauss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SentState:
    """A state of `current` in values that JSON keeps exactly: ranks exchange it. Bytes are hexadecimal."""

    torch: str
    python: list[int]
    python_version: int
    python_gauss: float | None
    cuda: str | None
    numpy: NumpyState | None
    more: list[str] = field(default_factory=list)
    """States of generators of the program's own."""

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> SentState:
        """Make it from a state that `current` returned."""
        version, words, gauss = state["python"]
        numpy = None
        if "numpy" in state:
            names = ("kind", "words", "place", "has_gauss", "gauss")
            numpy = NumpyState(**dict(zip(names, state["numpy"], strict=True)))
        return cls(
            torch=_hexadecimal(state["torch"]),
            python=list(words),
            python_version=version,
            python_gauss=gauss,
            cuda=_hexadecimal(state["cuda"]) if "cuda" in state else None,
            numpy=numpy,
            more=[_hexadecimal(one) for one in state.get("more", ())],
        )

    def state(self) -> dict[str, Any]:
        """The state as `current` returned it."""
        python = (self.python_version, tuple(self.python), self.python_gauss)
        found: dict[str, Any] = {"torch": _bytes(self.torch), "python": python}
        if self.cuda is not None:
            found["cuda"] = _bytes(self.cuda)
        if self.numpy is not None:
            own = self.numpy
            found["numpy"] = (own.kind, own.words, own.place, own.has_gauss, own.gauss)
        if self.more:
            found["more"] = [_bytes(one) for one in self.more]
        return found


def _hexadecimal(state: torch.Tensor) -> str:
    return bytes(state.tolist()).hex()


def _bytes(text: str) -> torch.Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)


def restore(state: Mapping[str, Any], more: Sequence[torch.Generator] = ()) -> None:
    """Restore a state that `current` returned, with that of `more` generators as far as it has them."""
    for generator, one in zip(more, state.get("more", ()), strict=False):
        generator.set_state(one)
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state:
        with contextlib.suppress(ImportError):
            importlib.import_module("numpy").random.set_state(state["numpy"])

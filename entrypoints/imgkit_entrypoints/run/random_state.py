"""The random numbers of this process: torch's, Python's and NumPy's generators together."""

from __future__ import annotations

import contextlib
import importlib
import io
import random
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch


def seed_everything(number: int) -> None:
    """Seed every generator of this process."""
    torch.manual_seed(number)
    random.seed(number)
    if "numpy" in sys.modules:
        importlib.import_module("numpy").random.seed(number % 2**32)


Generators = Mapping[str, Sequence[torch.Generator]]
"""The program's own ones, by the name of the loop that uses them."""


def current(more: Generators = MappingProxyType({})) -> dict[str, Any]:
    """The state of every generator and of `more`, in types that torch.load(weights_only=True) reads."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:  # otherwise nothing here has used it
        kind, words, *rest = importlib.import_module("numpy").random.get_state()
        state["numpy"] = (kind, [int(word) for word in words], *rest)
    if more:
        state["more"] = {name: [one.get_state() for one in own] for name, own in more.items()}
    return state


def written(state: Mapping[str, Any]) -> bytes:
    """A state that `current` returned, as torch saves it: the row of this rank in a checkpoint."""
    content = io.BytesIO()
    torch.save(dict(state), content)
    return content.getvalue()


def restore(state: Mapping[str, Any], more: Generators = MappingProxyType({})) -> None:
    """Restore a state that `current` returned, with that of `more` generators as far as it has them."""
    for name, own in more.items():
        for generator, one in zip(own, state.get("more", {}).get(name, ()), strict=False):
            generator.set_state(one)
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state:
        with contextlib.suppress(ImportError):
            importlib.import_module("numpy").random.set_state(state["numpy"])


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two states are equal in the generators that both have."""
    numpy = [state["numpy"] for state in (one, other) if "numpy" in state]
    return (
        torch.equal(one["torch"], other["torch"])
        and one["python"] == other["python"]
        and (len(numpy) < 2 or list(numpy[0]) == list(numpy[1]))
    )


class LoopGenerators:
    """The generators that the loaders of each loop use, from one checkpoint to the next."""

    def __init__(self) -> None:
        self._live: dict[str, Sequence[torch.Generator]] = {}
        self._saved: dict[str, Sequence[torch.Tensor]] = {}
        """States in the checkpoint, of the loops without a pass since the restore."""
        self._at_start: dict[str, Sequence[torch.Tensor]] = {}

    def states(self) -> dict[str, Sequence[torch.Tensor]]:
        """The states now, by loop."""
        return {**self._saved, **current(self._live).get("more", {})}

    def at_start(self) -> Mapping[str, Sequence[torch.Tensor]]:
        """Those at the start of each loop's latest pass."""
        return self._at_start

    def take_over(
        self, saved: Mapping[str, Sequence[torch.Tensor]], at_start: Mapping[str, Sequence[torch.Tensor]]
    ) -> None:
        """Go on from what `states` and `at_start` returned, each loop at its first pass."""
        self._saved, self._at_start = dict(saved), dict(at_start)

    def has_saved(self, name: str) -> bool:
        """Whether this is the first pass of the loop since a restore."""
        return name in self._saved

    def open(
        self, name: str, own: Sequence[torch.Generator], was_kept: bool | None, *, in_pass: bool
    ) -> bool:
        """Begin a pass; return whether it uses the generators of the one before.

        Parameters
        ----------
        was_kept : whether it was so at the latest pass; None: there was one pass alone, or none.
        in_pass : the pass has begun before the checkpoint.
        """
        saved = self._saved.pop(name, None)
        if saved is None:
            kept = [*map(id, own)] == [*map(id, self._live.get(name, ()))]
        elif was_kept is None:  # one that the program makes for each pass seldom begins like the one before
            begun = self._at_start.get(name, ())
            kept = len(own) == len(begun) and all(
                torch.equal(one.get_state(), state) for one, state in zip(own, begun, strict=True)
            )
        else:
            kept = was_kept
        if saved and kept and not in_pass:
            used = {id(one) for others in self._live.values() for one in others}
            for one, state in zip(own, saved, strict=False):
                if id(one) not in used:  # else another loop has gone on with it
                    one.set_state(state)
        self._live[name] = own
        if not in_pass:
            self._at_start[name] = [one.get_state() for one in own]
        return kept

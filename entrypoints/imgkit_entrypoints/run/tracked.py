"""The objects whose state a run saves and restores."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.run import resumable
from imgkit_entrypoints.run.ranks import Ranks
from imgkit_entrypoints.run.snapshots import FoundSnapshot, first_difference

RESERVED = ("random", "pass")
"""Names of a snapshot's own parts."""
SHARDING = ("FullyShardedDataParallel", "DeepSpeedEngine")
"""Classes of wrappers that share a model among the ranks; parameters of FSDP2 are DTensors instead."""


class Tracked:
    """Objects by name. Rank 0's state counts for all; a loader with a state has one for each rank."""

    def __init__(self) -> None:
        self._parts: dict[str, Any] = {}
        self._by_rank: set[str] = set()
        self.sums_gradients = False
        """Whether a model is wrapped in DDP."""

    def __len__(self) -> int:
        return len(self._parts)

    def names(self) -> list[str]:
        """The names, sorted."""
        return sorted(self._parts)

    def has(self, value: object) -> bool:
        """Whether `value` is one of the objects."""
        return any(one is value for one in self._parts.values())

    def add(self, name: str, value: Any) -> None:
        """Add an object.

        Raises
        ------
        UsageError : it has no state that a snapshot can keep.
        """
        if name in RESERVED or name in self._parts:
            why = "a part of every snapshot" if name in RESERVED else "tracked already"
            raise UsageError(f"run.track: the name {name} is {why}", hint="choose another name")
        if isinstance(value, DistributedDataParallel):
            self.sums_gradients = True
            value = value.module
        if not resumable.has_state(value):
            if hasattr(value, "__iter__"):
                resumable.refuse_without_position(value)
                return  # `steps` counts its batches
            raise UsageError(
                f"run.track: {name} is a {type(value).__name__} without a state",
                hint="track objects with state_dict and load_state_dict",
            )
        if isinstance(value, nn.Module):
            _refuse_sharded(name, value)
        elif not isinstance(value, torch.optim.Optimizer):
            _read(name, _written(_state(name, value)))
            if hasattr(value, "__iter__"):
                self._by_rank.add(name)
        self._parts[name] = value

    def of_ranks(self, here: Ranks) -> dict[str, list[Any]]:
        """The states of the objects that have one for each rank; a collective call."""
        return {
            name: [
                _read(name, bytes.fromhex(one))
                for one in here.gather(_written(self._parts[name].state_dict()).hex(), str, call="run.save")
            ]
            for name in sorted(self._by_rank)
        }

    def of_all(self) -> dict[str, Any]:
        """The states of the other objects."""
        return {name: one.state_dict() for name, one in self._parts.items() if name not in self._by_rank}

    def read(self, found: FoundSnapshot, here: Ranks) -> dict[str, Any]:
        """Read this rank's states from a snapshot; a collective call.

        Raises
        ------
        UsageError : it holds other objects, or states of another number of ranks.
        """
        kept = {name.removesuffix(".pt") for name in found.parts if name.endswith(".pt")} - set(RESERVED)
        if kept != self._parts.keys():
            raise UsageError(
                f"the snapshot holds {_listed(kept)}, and this program tracks {_listed(self._parts)}",
                where=str(found.where),
                hint="track the same names, or start anew in another folder",
            )
        states = {name: found.tensors(f"{name}.pt") for name in sorted(kept)}
        for name in self._by_rank:
            if len(states[name]) != here.world_size:
                raise UsageError(
                    f"{name} has a state for each of {len(states[name])} ranks, but there are "
                    f"{here.world_size}",
                    where=str(found.where),
                    hint="start as many ranks, or use a DataLoader with a DistributedSampler",
                )
            states[name] = states[name][here.rank]
        return states

    def load(self, states: Mapping[str, Any], where: str) -> None:
        """Give every object its state.

        Raises
        ------
        UsageError : a state is that of another object.
        """
        for name, state in states.items():
            value = self._parts[name]
            if isinstance(value, nn.Module) and (other := first_difference(state, value.state_dict())):
                raise UsageError(
                    f"the snapshot holds another {name}: {other}",
                    where=where,
                    hint="build the same model, or start anew in another folder",
                )
            try:
                value.load_state_dict(state)
            except (ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
                raise UsageError(
                    f"the state of {name} does not fit: {str(error).partition(chr(10))[0]}",
                    where=where,
                    hint="build the same objects, or start anew in another folder",
                ) from error

    def drop_gradients(self) -> None:
        """Remove the gradients of all models."""
        for one in self._parts.values():
            if isinstance(one, nn.Module):
                one.zero_grad(set_to_none=True)


def _listed(names: Any) -> str:
    return ", ".join(sorted(names)) or "nothing"


def _refuse_sharded(name: str, model: nn.Module) -> None:
    parts = [f"{name}.{key}" for key, one in model.named_parameters() if type(one.data).__name__ == "DTensor"]
    if any(type(one).__name__ in SHARDING for one in model.modules()):
        parts = [name]  # the state_dict of these is a collective call, and rank 0 alone would wait in it
    if parts:
        raise UsageError(
            f"run.track: {parts[0]} is sharded over the ranks, and rank 0 has only a part of it",
            hint="let its library save to the place() of a Checkpoint(run) where run.due() says so",
        )


def _state(name: str, value: Any) -> Any:
    try:
        return value.state_dict()
    except Exception as error:  # the object is not ours
        raise UsageError(
            f"run.track: the state of {name}, a {type(value).__name__}, cannot be read: {error}",
            hint="a loader of accelerate has a state only with use_stateful_dataloader=True",
        ) from error


def _written(state: Any) -> bytes:
    content = io.BytesIO()
    torch.save(state, content)
    return content.getvalue()


def _read(name: str, content: bytes) -> Any:
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds
        raise UsageError(
            f"run.track: the state of {name} holds more than tensors and plain values",
            hint="return only numbers, texts, lists, dicts and tensors from its state_dict",
        ) from error

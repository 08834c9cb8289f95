"""The index of a sharded checkpoint: which objects it has, and all of their state that is no tensor."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from imgkit_entrypoints import json_text
from imgkit_entrypoints.run import shard_file
from imgkit_entrypoints.run.readable import unreadable

INDEX = "sharded.json"
"""Part of a checkpoint that says what its shards are."""
DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, own) for name, own in shard_file.TYPES.items()}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A tensor that is divided among the ranks."""

    dtype: str
    shape: list[int]
    placements: str
    """How it was divided over each dimension of its mesh, ``S0 R``; empty: rank 0 had all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A parameter group of an optimizer."""

    params: list[str]
    options: Mapping[str, str]
    """Values as `encoded` returns them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerIndex:
    """The state of an optimizer."""

    kind: str
    """Name of its class."""
    groups: list[Group]
    tensors: Mapping[str, Mapping[str, str]]
    """Names of its tensors, by parameter and key."""
    values: Mapping[str, Mapping[str, str]]
    """What is no tensor or has no dimension, as `encoded` returns it, by parameter and key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """What a checkpoint has of sharded objects."""

    models: Mapping[str, Mapping[str, str]]
    """Names of their tensors, by model and key; tied ones are one tensor."""
    optimizers: Mapping[str, OptimizerIndex]
    wholes: Mapping[str, Whole]

    def objects(self) -> list[str]:
        """The names of the objects."""
        return sorted({*self.models, *self.optimizers})

    @classmethod
    def parse(cls, text: bytes) -> Index:
        """Read it.

        Raises
        ------
        ValueError : it is none, or its objects have other tensors than it describes.
        """
        limits = {"most_bytes": shard_file.MOST_BYTES, "most_brackets": shard_file.MOST_BRACKETS}
        index: Index = json_text.read(cls, json_text.parse(text, **limits), INDEX, closed=True)
        named = [one for own in index.models.values() for one in {*own.values()}]
        for own in index.optimizers.values():
            named += [one for tensors in own.tensors.values() for one in tensors.values()]
            for values in (*own.values.values(), *(one.options for one in own.groups)):
                for value in values.values():
                    decoded(value)
        if sorted(named) != sorted(index.wholes):
            raise ValueError("its tensors are not those of its objects")
        for name, whole in index.wholes.items():
            if whole.dtype not in DTYPES or any(size < 0 for size in whole.shape):
                raise ValueError(f"{name} has an unknown type or shape")
        return index


def encoded(name: str, value: Any) -> str:
    """A value as JSON that keeps it exactly; what JSON does not have is in an object with one key."""
    return json.dumps(_for_json(name, value))


def _for_json(name: str, value: Any) -> Any:
    if isinstance(value, Tensor) and not value.dim() and value.dtype in DTYPE_NAMES:
        return {"number": [DTYPE_NAMES[value.dtype], _for_json(name, value.item())]}
    if type(value) in (tuple, list):
        return {type(value).__name__: [_for_json(f"{name}[{at}]", one) for at, one in enumerate(value)]}
    if type(value) is float and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise unreadable(name, value)


def decoded(text: str) -> Any:
    """The value that `encoded` got.

    Raises
    ------
    ValueError : it is none of those.
    """
    return _from_json(json_text.parse(text))


def _from_json(value: Any) -> Any:
    if not isinstance(value, dict | list):
        return value
    kind, inner = next(iter(value.items())) if isinstance(value, dict) and len(value) == 1 else ("", None)
    if kind == "float" and inner in ("nan", "inf", "-inf"):
        return float(inner)
    if isinstance(inner, list):
        if kind == "number" and len(inner) == 2 and type(inner[0]) is str and inner[0] in DTYPES:
            number = _from_json(inner[1])
            if isinstance(number, int | float):
                try:
                    return torch.tensor(number, dtype=DTYPES[inner[0]])
                except (RuntimeError, OverflowError) as error:
                    raise ValueError(str(error)) from None
        if kind in ("tuple", "list"):
            items = [_from_json(one) for one in inner]
            return tuple(items) if kind == "tuple" else items
    raise ValueError(f"{str(value)[:60]} is no value of an optimizer")

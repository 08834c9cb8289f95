"""The states of objects as trees of dicts, lists and tuples, whose tensors are stored apart.

torch's distributed checkpoints flatten nested states by themselves, but drop empty dicts on the way, and
give back nothing for a key that a fresh optimizer lacks. So a checkpoint has two kinds of keys: tensors under
``NAME.KEY``, and for each object one pickle, under ``NAME``, of its tree with a `TensorRef` for each tensor.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

LeafPath = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Stands for a tensor that is stored under `key`."""

    key: str
    stride: tuple[int, ...] | None = None
    """Strides of another memory format, such as channels_last; None: the tensor is contiguous."""


def map_leaves(value: Any, change: Callable[[Any, LeafPath], Any], *path: Any) -> Any:
    """Copy dicts, lists and tuples, with what `change` returns for each other value and its path.

    Subclasses, such as a named tuple or torch.Size, are values as a whole.
    """
    if type(value) in (dict, OrderedDict):
        return {key: map_leaves(item, change, *path, key) for key, item in value.items()}
    if type(value) in (list, tuple):
        items = [map_leaves(item, change, *path, number) for number, item in enumerate(value)]
        return items if type(value) is list else tuple(items)
    return change(value, path)


def leaves(value: Any) -> list[tuple[LeafPath, Any]]:
    """Return the values within dicts, lists and tuples, with their paths."""
    result: list[tuple[LeafPath, Any]] = []
    map_leaves(value, lambda leaf, path: result.append((path, leaf)))
    return result


def path_text(name: str, path: LeafPath) -> str:
    """Return a path for a message: ``optimizer['state'][0]``."""
    return name + "".join(f"[{key!r}]" for key in path)


def is_dtensor(value: object) -> bool:
    """Return whether `value` is a tensor that is divided among ranks."""
    return any(kind.__name__ == "DTensor" for kind in type(value).__mro__)


def local_part(tensor: Any) -> Tensor:
    """Return this rank's part of a DTensor; other tensors as they are."""
    part: Tensor = tensor.to_local() if is_dtensor(tensor) else tensor
    return part


def split(name: str, state: Any, used: Collection[str] = ()) -> tuple[Any, dict[str, Tensor]]:
    """Separate a state into its tree and its tensors by key; views of the same memory get one key.

    What torch cannot store by parts stays in the tree: sparse tensors and subclasses.

    Parameters
    ----------
    used : keys that other objects have.
    """
    tensors: dict[str, Tensor] = {}
    keys: dict[tuple[object, ...], str] = {}

    def replace(value: Any, path: LeafPath) -> Any:
        if not (
            is_dtensor(value) or (type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided)
        ):
            return value.detach().clone() if isinstance(value, Tensor) else value
        key = ".".join(map(str, (name, *path)))
        # {"a.b": x, "a": {"b": y}} and {1: x, "1": y}. The tree has the keys, so any that differ will do.
        while key in tensors or key in used:
            key += "'"
        view: tuple[object, ...] = (id(value),)
        if not is_dtensor(value) and value.numel():
            view = value.device, value.data_ptr(), value.dtype, value.shape, value.stride()
        first = keys.setdefault(view, key)
        if first == key:
            tensors[key] = value.detach()
        if is_dtensor(value) or value.is_contiguous():
            return TensorRef(first)
        # Dense, also where the tensor is a part of another one.
        return TensorRef(first, torch.empty_like(value, device="meta").stride())

    return map_leaves(state, replace), tensors


def join(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Put the tensors back into a tree, in the memory formats that they had.

    Fused optimizers refuse a state in another format than its weight.

    Raises
    ------
    KeyError : a tensor is missing.
    """

    def replace(value: Any, _: LeafPath) -> Any:
        if not isinstance(value, TensorRef):
            return value
        tensor = tensors[value.key]
        if value.stride is None or is_dtensor(tensor):
            return tensor
        return torch.empty_strided(tensor.shape, value.stride, dtype=tensor.dtype).copy_(tensor)

    return map_leaves(tree, replace)


def unpicklable(name: str, state: Any) -> str:
    """Return the path of the first value that pickle cannot write and read again; empty: it can."""
    tree, _ = split(name, state)
    if _survives(tree):
        return ""
    for path, value in leaves(tree):
        if not _survives(value):
            return f"{path_text(name, path)} is a {type(value).__name__}"
    return f"{name} has a key or a container of its own type"


def _survives(value: Any) -> bool:
    try:
        pickle.loads(pickle.dumps(value))  # noqa: S301 - it was made on the line itself
    except Exception:  # pickle and the classes of a program raise many kinds
        return False
    return True


def on_host(value: Any) -> Any:
    """Copy a state with every tensor in host memory of its own."""
    return map_leaves(
        value, lambda leaf, _: leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf
    )


class HostCopies:
    """Copies of tensors in host memory that stays from one checkpoint to the next; pinned for a GPU.

    From a GPU, the copy is work in its current stream, for which the host does not wait. What comes after it
    in the stream does, as the next optimizer step, so that it changes nothing that is not copied yet.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._events: list[Any] = []
        """CUDA events after the copies that are under way."""

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy `tensors`, over the copy before."""
        copies, devices = {}, set()
        for key, tensor in tensors.items():
            is_on_gpu = tensor.device.type == "cuda"
            buffer = self._buffers.get(key)
            if buffer is None or (buffer.dtype, buffer.shape) != (tensor.dtype, tensor.shape):
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_on_gpu)
            copies[key] = buffer.copy_(tensor, non_blocking=is_on_gpu)
            if is_on_gpu:
                devices.add(tensor.device)
        self._buffers = copies
        self._events = [torch.cuda.current_stream(device).record_event() for device in devices]
        return copies

    def wait(self) -> None:
        """Wait until the copies are complete."""
        for event in self._events:
            event.synchronize()

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

# Keys and numbers that lead to a value in a tree: ``("state", 0, "step")``.
LeafPath = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Stands in a tree for a tensor that is stored under `key`."""

    key: str
    stride: tuple[int, ...] | None = None
    """Strides of another memory format, such as channels_last. None means that the tensor is contiguous."""


def map_leaves(value: Any, change: Callable[[Any, LeafPath], Any], *path: Any) -> Any:
    """Copy dicts, lists and tuples, and replace each other value by what `change` returns for it.

    Subclasses, such as a named tuple or torch.Size, count as other values.
    """
    if type(value) in (dict, OrderedDict):
        return {key: map_leaves(item, change, *path, key) for key, item in value.items()}
    if type(value) in (list, tuple):
        items = [map_leaves(item, change, *path, number) for number, item in enumerate(value)]
        return type(value)(items)
    return change(value, path)


def list_leaves(value: Any) -> list[tuple[LeafPath, Any]]:
    """Return the values within dicts, lists and tuples, each after its path: ``(("state", 0), 1.5)``."""
    leaves: list[tuple[LeafPath, Any]] = []
    map_leaves(value, lambda leaf, path: leaves.append((path, leaf)))
    return leaves


def format_path(name: str, path: LeafPath) -> str:
    """Return the path of a value in the state of an object for a message: ``optimizer['state'][0]``."""
    return name + "".join(f"[{key!r}]" for key in path)


def is_dtensor(value: object) -> bool:
    """Return whether `value` is a DTensor, which is divided among the ranks.

    The class is compared by its name, since torch before 2.5 has it in another module.
    """
    return any(kind.__name__ == "DTensor" for kind in type(value).__mro__)


class _TensorSplitter:
    """Collects the tensors of one state under keys that no other tensor has."""

    def __init__(self, name: str, used_keys: Collection[str]) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._name = name
        self._used_keys = used_keys
        # The key of each tensor by the memory that it shows.
        self._keys: dict[tuple[object, ...], str] = {}

    def replace(self, value: Any, path: LeafPath) -> Any:
        """Return a reference for a tensor that torch can store by parts, and a copy of any other tensor.

        Two tensors that show the same memory, such as tied weights, get the same reference. Values that are
        no tensors stay as they are.
        """
        if not isinstance(value, Tensor):
            return value
        if not _can_divide(value):
            return value.detach().clone()
        memory = _memory_of(value)
        if memory not in self._keys:
            key = self._free_key(path)
            self._keys[memory] = key
            self.tensors[key] = value.detach()
        key = self._keys[memory]
        if is_dtensor(value) or value.is_contiguous():
            return TensorRef(key)
        # The strides of a dense tensor in this format. Those of a part of a larger tensor have gaps.
        return TensorRef(key, torch.empty_like(value, device="meta").stride())

    def _free_key(self, path: LeafPath) -> str:
        """Return the key of a tensor at `path`, such as ``model.layer.weight``."""
        key = ".".join(map(str, (self._name, *path)))
        # {"a.b": x, "a": {"b": y}} has the key "a.b" twice, and {1: x, "1": y} the key "1". Any other key
        # will do, since the tree notes it.
        while key in self.tensors or key in self._used_keys:
            key += "'"
        return key


def _can_divide(tensor: Tensor) -> bool:
    """Return whether torch can store a tensor by parts: it is not sparse, and of one of torch's classes."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    return is_plain or is_dtensor(tensor)


def _memory_of(tensor: Tensor) -> tuple[object, ...]:
    """Return a value that views of the same elements have in common."""
    if is_dtensor(tensor) or tensor.numel() == 0:
        return (id(tensor),)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def split_tensors(name: str, state: Any, used_keys: Collection[str] = ()) -> tuple[Any, dict[str, Tensor]]:
    """Return a state with a `TensorRef` in place of each tensor, and the tensors by key.

    ``{"weight": tensor}`` of `model` becomes ``{"weight": TensorRef("model.weight")}``. Views of the same
    memory get the same key. Sparse tensors and subclasses of Tensor are not replaced, since torch cannot
    store them by parts.

    Parameters
    ----------
    used_keys : keys that other objects have.
    """
    splitter = _TensorSplitter(name, used_keys)
    tree = map_leaves(state, splitter.replace)
    return tree, splitter.tensors


def join_tensors(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return a tree with the tensors in place of their references, in the memory formats that they had.

    Fused optimizers refuse a state in another format than its weight.

    Raises
    ------
    KeyError : a tensor is missing.
    """

    def replace_reference(value: Any, _: LeafPath) -> Any:
        if not isinstance(value, TensorRef):
            return value
        tensor = tensors[value.key]
        if value.stride is None or is_dtensor(tensor):
            return tensor
        return torch.empty_strided(tensor.shape, value.stride, dtype=tensor.dtype).copy_(tensor)

    return map_leaves(tree, replace_reference)


def find_unpicklable(name: str, state: Any) -> str:
    """Return a text on the first value of a state that pickle cannot write and read again.

    For example ``scheduler['lr_lambda'] is a function``. The text is empty if there is no such value.
    """
    tree, _ = split_tensors(name, state)
    if _can_pickle(tree):
        return ""
    for path, value in list_leaves(tree):
        if not _can_pickle(value):
            return f"{format_path(name, path)} is a {type(value).__name__}"
    return f"{name} has a key or a container of its own type"


def _can_pickle(value: Any) -> bool:
    """Return whether pickle can write a value, and read it again."""
    try:
        pickle.loads(pickle.dumps(value))  # noqa: S301 - it was made on the line itself
    except Exception:  # pickle and the classes of a program raise many kinds
        return False
    return True


def copy_to_host(state: Any) -> Any:
    """Copy a state, with every tensor in host memory of its own."""

    def copy_tensor(value: Any, _: LeafPath) -> Any:
        if isinstance(value, Tensor):
            return value.detach().to("cpu", copy=True)
        return value

    return map_leaves(state, copy_tensor)


class HostCopies:
    """Copies of tensors in host memory that stays from one checkpoint to the next. For a GPU it is pinned.

    From a GPU, the copy is work in the current stream, for which the host does not wait. What comes after it
    in the stream waits, such as the next optimizer step, so that it changes nothing that is not copied yet.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        # CUDA events after the copies that are under way.
        self._events: list[Any] = []

    def start_copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Start to copy `tensors` over the previous copy, and return the buffers; `wait` completes them."""
        copies = {key: self._copy(key, tensor) for key, tensor in tensors.items()}
        self._buffers = copies
        devices = {tensor.device for tensor in tensors.values() if tensor.device.type == "cuda"}
        self._events = [torch.cuda.current_stream(device).record_event() for device in devices]
        return copies

    def _copy(self, key: str, tensor: Tensor) -> Tensor:
        """Start to copy a tensor into the buffer of its key, or into a new one if it does not fit."""
        is_on_gpu = tensor.device.type == "cuda"
        buffer = self._buffers.get(key)
        if buffer is None or (buffer.dtype, buffer.shape) != (tensor.dtype, tensor.shape):
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_on_gpu)
        return buffer.copy_(tensor, non_blocking=is_on_gpu)

    def wait(self) -> None:
        """Wait until the copies are complete."""
        for event in self._events:
            event.synchronize()

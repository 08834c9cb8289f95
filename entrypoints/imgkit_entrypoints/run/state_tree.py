"""Separate the tensors from the states of objects, which are trees of dicts, lists and tuples.

torch's distributed checkpoints can flatten nested states. But they lose empty dicts, and return nothing for a
key that a new optimizer does not have yet. So a checkpoint stores two kinds of values. Each tensor is stored
under ``NAME.KEY``. For each object, the pickled tree is stored under ``NAME``, with a `TensorRef` in place of
each tensor.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# The keys and indices that lead to a value in a tree: ``("state", 0, "step")``.
LeafPath = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A reference, in a tree, to a tensor that is stored under `key`."""

    key: str
    stride: tuple[int, ...] | None = None
    """Strides of the tensor in a memory format such as channels_last. None means contiguous."""


def map_leaves(value: Any, change: Callable[[Any, LeafPath], Any], *path: Any) -> Any:
    """Copy a tree of dicts, lists and tuples, and replace each leaf by the result of ``change(leaf, path)``.

    Every value that is not a dict, list or tuple is a leaf. Instances of subclasses, such as named tuples or
    torch.Size, are leaves, too. They may have constructors of their own, so they cannot be copied here.

    Parameters
    ----------
    path : the keys and indices that lead to `value` in the whole tree. A caller leaves it out.
    """
    if type(value) in (dict, OrderedDict):
        return {key: map_leaves(item, change, *path, key) for key, item in value.items()}
    if type(value) in (list, tuple):
        items = [map_leaves(item, change, *path, index) for index, item in enumerate(value)]
        return type(value)(items)
    return change(value, path)


def list_leaves(value: Any) -> list[tuple[LeafPath, Any]]:
    """Return the leaves of a tree of dicts, lists and tuples, with their paths: ``(("state", 0), 1.5)``."""
    leaves: list[tuple[LeafPath, Any]] = []
    map_leaves(value, lambda leaf, path: leaves.append((path, leaf)))
    return leaves


def format_path(name: str, path: LeafPath) -> str:
    """Return the path of a value in the state of an object as text: ``optimizer['state'][0]``."""
    return name + "".join(f"[{key!r}]" for key in path)


def is_dtensor(value: object) -> bool:
    """Return whether `value` is a DTensor, a tensor that is divided among the ranks.

    Only the name of the class is compared, because the class is in another module before torch 2.5.
    """
    return any(kind.__name__ == "DTensor" for kind in type(value).__mro__)


class _TensorSplitter:
    """Collects the tensors of one state, and gives each a unique key."""

    def __init__(self, name: str, used_keys: Collection[str]) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._name = name
        self._used_keys = used_keys
        # The key of each tensor, by the memory that it uses.
        self._keys: dict[tuple[object, ...], str] = {}

    def replace(self, value: Any, path: LeafPath) -> Any:
        """Return the replacement of a leaf in the tree: for a tensor, a reference to it.

        The tensor is added to `tensors`. Two tensors that use the same memory, such as tied weights, get the
        same reference. A tensor that torch cannot store in parts is copied into the tree. Any other value is
        returned unchanged.
        """
        if not isinstance(value, Tensor):
            return value
        if not _can_store_in_parts(value):
            return value.detach().clone()
        # Tied weights use the same memory. They are stored once, under the key of the first.
        memory = _memory_of(value)
        if memory not in self._keys:
            key = self._find_free_key(path)
            self._keys[memory] = key
            self.tensors[key] = value.detach()
        key = self._keys[memory]
        if is_dtensor(value) or value.is_contiguous():
            return TensorRef(key)
        # `empty_like` gives the strides of a dense tensor in the same format. The tensor itself may be a part
        # of a larger tensor, whose strides have gaps.
        return TensorRef(key, torch.empty_like(value, device="meta").stride())

    def _find_free_key(self, path: LeafPath) -> str:
        """Return a key for the tensor at `path` that is not in use, such as ``model.layer.weight``."""
        key = ".".join(map(str, (self._name, *path)))
        # {"a.b": x, "a": {"b": y}} would give the key "a.b" twice, and {1: x, "1": y} the key "1". Any other
        # key is possible, because the tree stores it.
        while key in self.tensors or key in self._used_keys:
            key += "'"
        return key


def _can_store_in_parts(tensor: Tensor) -> bool:
    """Return whether torch can store a tensor in parts: it is not sparse, and its class is one of torch's."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    return is_plain or is_dtensor(tensor)


def _memory_of(tensor: Tensor) -> tuple[object, ...]:
    """Return a value that is equal for tensors with the same elements in memory."""
    # A DTensor or an empty tensor has no memory address that identifies it.
    if is_dtensor(tensor) or tensor.numel() == 0:
        return (id(tensor),)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def split_tensors(name: str, state: Any, used_keys: Collection[str] = ()) -> tuple[Any, dict[str, Tensor]]:
    """Return a state with a `TensorRef` in place of each tensor, and the tensors by key.

    For the object `model`, ``{"weight": tensor}`` becomes ``{"weight": TensorRef("model.weight")}``. Tensors
    with the same memory get the same key. Sparse tensors and subclasses of Tensor are copied instead, because
    torch cannot store them in parts.

    Parameters
    ----------
    used_keys : keys of other objects, which must not be used again.
    """
    splitter = _TensorSplitter(name, used_keys)
    tree = map_leaves(state, splitter.replace)
    return tree, splitter.tensors


def join_tensors(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return a tree in which the tensors replace their references, in their original memory formats.

    The format matters: fused optimizers refuse a state whose format differs from that of its weight.

    Raises
    ------
    KeyError : a tensor is missing.
    """

    def replace_reference(value: Any, _: LeafPath) -> Any:
        if not isinstance(value, TensorRef):
            return value
        tensor = tensors[value.key]
        if value.stride is None or is_dtensor(tensor):  # already in its format
            return tensor
        return torch.empty_strided(tensor.shape, value.stride, dtype=tensor.dtype).copy_(tensor)

    return map_leaves(tree, replace_reference)


def find_unpicklable(name: str, state: Any) -> str:
    """Return a text about the first value of a state that pickle cannot write and read again.

    An example is ``scheduler['lr_lambda'] is a function``. If there is no such value, the text is empty.
    """
    tree, _ = split_tensors(name, state)
    if _can_pickle(tree):  # usually the case, and much faster than testing each value
        return ""
    for path, value in list_leaves(tree):
        if not _can_pickle(value):
            return f"{format_path(name, path)} is a {type(value).__name__}"
    return f"{name} has a key or a container of its own type"


def _can_pickle(value: Any) -> bool:
    """Return whether pickle can write a value, and read it again."""
    try:
        pickle.loads(pickle.dumps(value))  # noqa: S301 - it was made on the line itself
    except Exception:  # pickle and the classes of a program raise many types of errors
        return False
    return True


def copy_to_host(state: Any) -> Any:
    """Return a copy of a state, in which each tensor is a copy in host memory."""

    def copy_tensor(value: Any, _: LeafPath) -> Any:
        if isinstance(value, Tensor):
            return value.detach().to("cpu", copy=True)
        return value

    return map_leaves(state, copy_tensor)


class HostCopies:
    """Copies of tensors in host memory, which is reused for each checkpoint and pinned for tensors on a GPU.

    A copy from a GPU runs in the current CUDA stream, and the host does not wait for it. Later work in the
    stream, such as the next optimizer step, waits for the copy. So it cannot change tensors that are not
    copied yet.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        # CUDA events that occur when the latest copies are complete.
        self._events: list[Any] = []

    def start_copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Start to copy `tensors` into buffers, and return the buffers. They are complete after `wait`."""
        copies = {key: self._copy_into_buffer(key, tensor) for key, tensor in tensors.items()}
        self._buffers = copies
        # Record the events after the copies were started, so that they occur when the copies are complete.
        devices = {tensor.device for tensor in tensors.values() if tensor.device.type == "cuda"}
        self._events = [torch.cuda.current_stream(device).record_event() for device in devices]
        return copies

    def _copy_into_buffer(self, key: str, tensor: Tensor) -> Tensor:
        """Start to copy a tensor into the buffer for its key, or into a new buffer if it does not fit."""
        is_on_gpu = tensor.device.type == "cuda"
        buffer = self._buffers.get(key)
        if buffer is None or (buffer.dtype, buffer.shape) != (tensor.dtype, tensor.shape):
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_on_gpu)
        return buffer.copy_(tensor, non_blocking=is_on_gpu)

    def wait(self) -> None:
        """Wait until the copies are complete."""
        for event in self._events:
            event.synchronize()

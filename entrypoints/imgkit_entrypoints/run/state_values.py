"""Describe values of a state by short texts and digests, to find changes and differences between ranks."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from imgkit_entrypoints.run.state_tree import format_path, is_dtensor, list_leaves

# If an object has more values, the ranks compare one digest of all values instead of each value.
MAX_COMPARED = 2048
# If a tensor of integers has more elements, the ranks do not compare it.
MAX_ELEMENTS = 8192
# If the tensors of an object are larger, the digest of its state does not include their values.
MAX_DIGESTED_BYTES = 1 << 20
# Largest length of a value in a message. A longer value is replaced by its beginning and a digest.
MAX_TEXT = 40
WORD_BYTES = 8
# Integer types by their size in bytes.
_INTEGER_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def has_weights(stateful: object) -> bool:
    """Return whether an object is a model or an optimizer."""
    return isinstance(stateful, nn.Module | Optimizer)


def describe_values(stateful: Any, state: Any) -> dict[str, str]:
    """Return the values of an object that must be equal on all ranks, as short texts by path.

    The ranks compare these texts, because a checkpoint stores only rank 0's state. For a scheduler, the
    result may be ``{"['last_epoch']": "7"}``. For a model, the result includes all parameters, but no
    buffers. For an optimizer, it includes all values. For other objects, it does not include large tensors
    and tensors of fractions. A result with too many items is replaced by one digest under the path ``""``.
    """
    descriptions: dict[str, str] = {}
    bit_sums: dict[str, Tensor] = {}
    for path, leaf in _list_compared_leaves(stateful, state).items():
        if has_weights(stateful) and _can_sum_bits(leaf):
            bit_sums[path] = _sum_bits(leaf)
            continue
        description = _describe_value(leaf)
        if description is not None:
            descriptions[path] = description
    # Read all sums together at the end: each copy from a GPU would wait for the GPU.
    for path, bit_sum in _read_numbers(bit_sums).items():
        descriptions[path] = f"bits {bit_sum:x}"
    if len(descriptions) > MAX_COMPARED:  # the ranks send the result to each other, so it must stay small
        return {"": digest_text(repr(descriptions))}
    return descriptions


def _list_compared_leaves(stateful: Any, state: Any) -> dict[str, Any]:
    """Return the parameters of a model, or the values in the state of any other object, by path."""
    if isinstance(stateful, nn.Module):
        return {f".{name}": parameter for name, parameter in stateful.named_parameters()}
    return {format_path("", path): leaf for path, leaf in list_leaves(state)}


def _can_sum_bits(leaf: Any) -> bool:
    """Return whether a value is a complete tensor in memory that is neither sparse nor sharded."""
    if not isinstance(leaf, Tensor) or is_dtensor(leaf):
        return False
    return leaf.layout == torch.strided and not leaf.is_meta


def _describe_value(leaf: Any) -> str | None:
    """Return a short text for a value, or None for a large tensor or a tensor of fractions.

    Values without a text may differ between the ranks. The text for a shard contains only its shape and
    placement, because the values of shards differ.
    """
    if not isinstance(leaf, Tensor):
        return _shorten_text(repr(_sort_set(leaf)))
    if is_dtensor(leaf):
        return f"{tuple(leaf.shape)} {leaf.placements}"
    is_fraction = leaf.is_floating_point() or leaf.is_complex()
    if is_fraction or leaf.numel() > MAX_ELEMENTS:
        return None
    return _shorten_text(repr(leaf.tolist()))


def _sum_bits(tensor: Tensor) -> Tensor:
    """Return the sum of the elements of a tensor, with their bits interpreted as integers.

    Equal tensors have equal sums, however they lie in memory on each rank. So the ranks compare one number
    instead of all weights. The result is on the device of the tensor.
    """
    elements = tensor.detach()
    if elements.is_complex():
        elements = torch.view_as_real(elements)
    # The bits are read as integers, because a sum of fractions is rounded and depends on the order.
    integers = elements.view(_INTEGER_TYPES[elements.element_size()])
    # Bytes can be read as words of 8 bytes only without gaps between them, and from the beginning of a word.
    integers_per_word = WORD_BYTES // integers.element_size()
    integers = integers.contiguous().reshape(-1)
    if integers.data_ptr() % WORD_BYTES != 0 or integers.storage_offset() % integers_per_word != 0:
        integers = integers.clone()
    # Add up complete words, and then the elements after the last one. On a CPU, this is 25 times as fast as
    # the sum of 32-bit integers, which torch converts one by one.
    end_of_words = integers.numel() - integers.numel() % integers_per_word
    whole_words = integers[:end_of_words].view(torch.int64)
    return whole_words.sum() + integers[end_of_words:].sum(dtype=torch.int64)


def _read_numbers(numbers: Mapping[str, Tensor]) -> dict[str, int]:
    """Copy numbers, by path, from their devices to the host.

    Every copy from a GPU waits for the GPU. So all numbers of a device are copied together.
    """
    by_device: dict[torch.device, dict[str, Tensor]] = {}
    for path, number in numbers.items():
        by_device.setdefault(number.device, {})[path] = number
    number_by_path: dict[str, int] = {}
    for device_numbers in by_device.values():
        numbers_on_host = torch.stack([*device_numbers.values()]).tolist()
        number_by_path.update(zip(device_numbers, numbers_on_host, strict=True))
    return number_by_path


def digest_state(state: Any) -> str:
    """Return a digest of a state, to find out whether it has changed in this process.

    If the tensors are larger than `MAX_DIGESTED_BYTES` in total, the digest includes only their shapes and
    types.
    """
    leaves = list_leaves(state)
    size_bytes = sum(leaf.nbytes for _, leaf in leaves if isinstance(leaf, Tensor))
    digest = hashlib.sha256()
    for path, leaf in leaves:
        digest.update(repr(path).encode())  # the same value at another path must give another digest
        digest.update(_encode_leaf(leaf, has_values=size_bytes <= MAX_DIGESTED_BYTES))
    return digest.hexdigest()


def _encode_leaf(leaf: Any, *, has_values: bool) -> bytes:
    """Return the bytes of a value for a digest.

    Parameters
    ----------
    has_values : whether to include the elements of a tensor. Those of a subclass of Tensor are never
        included.
    """
    if not isinstance(leaf, Tensor):
        return pickle.dumps(_sort_set(leaf))
    is_plain = type(leaf) in (Tensor, nn.Parameter) and not leaf.is_meta
    if has_values and is_plain:
        return f"{leaf.dtype} {leaf.tolist()}".encode()
    return f"{leaf.shape} {leaf.dtype}".encode()


def _sort_set(leaf: Any) -> Any:
    """Return a set as a list whose order is the same in each process. Return any other value unchanged."""
    if isinstance(leaf, set):
        return sorted(leaf, key=repr)
    return leaf


def _shorten_text(text: str) -> str:
    """Return `text`, or its beginning and a digest if it is too long for a message."""
    if len(text) <= MAX_TEXT:
        return text
    return f"{text[:20]}… {digest_text(text)}"


def digest_text(text: str) -> str:
    """Return 16 hexadecimal digits of the sha256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]

"""The file of one rank in a sharded checkpoint, in the safetensors format: no part is a pickle. No torch.

    8 bytes    length of the header, little endian
    header     JSON: for each tensor its dtype, shape and range of bytes; `__metadata__` has texts
    the bytes of all tensors, one after the other

A tensor here is a piece of a whole one. The offsets of the pieces are a text in `__metadata__`, under the
name that torch's own reader of this format expects (torch/distributed/checkpoint/_hf_utils.py of torch 2.13).
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imgkit_entrypoints import files, json_text

SUFFIX = ".safetensors"
TYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
"""torch's types of numbers by the format's names."""
BYTES_OF = {
    **dict.fromkeys(("F64", "I64"), 8),
    **dict.fromkeys(("F32", "I32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1),
}
"""Their bytes."""
MOST_BYTES, MOST_BRACKETS = 256 << 20, 8_000_000
"""Limits of a header and of the index of a checkpoint: a million pieces."""
_METADATA, _OFFSETS, _SAVED = "__metadata__", "DCP_SHARDING_INFO", "saved_offsets"
_MOST_DIMENSIONS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The part of a tensor that one file has."""

    name: str
    dtype: str
    offsets: tuple[int, ...]
    """Where it begins in the whole tensor."""
    sizes: tuple[int, ...]
    file: str = ""
    begin: int = 0
    """Position of its first byte in the file of that name."""

    @property
    def size_bytes(self) -> int:
        """Its bytes, row by row."""
        return math.prod(self.sizes) * BYTES_OF[self.dtype]


def name_of(rank: int, ranks: int) -> str:
    """Name of a rank's file; it counts from 1, as is usual for files of this format."""
    return f"shard-{rank + 1:05d}-of-{ranks:05d}{SUFFIX}"


def header(pieces: Sequence[Piece]) -> bytes:
    """The beginning of a file with these pieces; their bytes follow in the same order."""
    table: dict[str, Any] = {}
    offsets, end = {}, 0
    for one in pieces:
        begin, end = end, end + one.size_bytes
        table[one.name] = {"dtype": one.dtype, "shape": one.sizes, "data_offsets": [begin, end]}
        offsets[one.name] = {_SAVED: one.offsets}
    table[_METADATA] = {"format": "pt", _OFFSETS: json.dumps(offsets)}
    return framed(table)


def framed(table: Mapping[str, Any]) -> bytes:
    """A header as it stands in a file, with its length; what follows begins at a multiple of 8 bytes."""
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read(path: Path) -> list[Piece]:
    """Read the pieces in a file from its header.

    Raises
    ------
    OSError : it cannot be read, or is not a regular file.
    ValueError : it has another format.
    """
    with files.open_regular(path) as file:
        size_bytes = file.seek(0, 2)
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(MOST_BYTES, size_bytes - 8):
            raise ValueError(f"a header of {length} bytes in a file of {size_bytes}")
        table = _parsed(file.read(length))
    words = table.pop(_METADATA, None)
    if not isinstance(words, dict) or not isinstance(words.get(_OFFSETS), str):
        raise ValueError("the offsets of its pieces are missing")
    offsets = _parsed(words[_OFFSETS])
    if table.keys() != offsets.keys():
        raise ValueError("its tensors and their offsets do not match")
    pieces, end = [], 8 + length
    for name, row in table.items():
        piece = _piece(name, row, offsets[name], file=path.name, begin=end)
        if row["data_offsets"] != [end - 8 - length, end - 8 - length + piece.size_bytes]:
            raise ValueError(f"the bytes of {name} are not where those before it end")
        pieces.append(piece)
        end += piece.size_bytes
    if end != size_bytes:
        raise ValueError(f"its pieces end after {end} bytes, and it has {size_bytes}")
    return pieces


def _parsed(text: str | bytes) -> dict[str, Any]:
    value = json_text.parse(text, most_bytes=MOST_BYTES, most_brackets=MOST_BRACKETS)
    if not isinstance(value, dict):
        raise ValueError("a header that is not an object")
    return value


def _piece(name: str, row: Any, offset: Any, *, file: str, begin: int) -> Piece:
    keys = {"dtype", "shape", "data_offsets"}
    if not isinstance(row, dict) or row.keys() != keys or not isinstance(offset, dict):
        raise ValueError(f"{name} has other keys than {', '.join(sorted(keys))}")
    dtype = row["dtype"]
    if not isinstance(dtype, str) or dtype not in BYTES_OF:
        raise ValueError(f"{name} has an unknown type")
    sizes, offsets = _sizes(name, row["shape"]), _sizes(name, offset.get(_SAVED))
    if len(sizes) != len(offsets):
        raise ValueError(f"{name} has {len(sizes)} sizes and {len(offsets)} offsets")
    return Piece(name=name, dtype=dtype, offsets=offsets, sizes=sizes, file=file, begin=begin)


def _sizes(name: str, values: Any) -> tuple[int, ...]:
    if (
        not isinstance(values, list)
        or len(values) > _MOST_DIMENSIONS
        or not all(type(one) is int and 0 <= one < 1 << 62 for one in values)
    ):
        raise ValueError(f"{name} has a shape or offsets that are not whole numbers")
    return tuple(values)


def first_gap(pieces: Mapping[str, Sequence[Piece]], shapes: Mapping[str, tuple[str, Sequence[int]]]) -> str:
    """The reason why `pieces` are not exactly the tensors of these types and shapes; empty: they are."""
    for name, (dtype, shape) in shapes.items():
        own = pieces.get(name, ())
        for one in own:
            ends = zip(one.offsets, one.sizes, shape, strict=False)
            if one.dtype != dtype or len(one.sizes) != len(shape) or any(a + b > end for a, b, end in ends):
                return f"a piece of {name} does not fit into {dtype} of shape {tuple(shape)}"
        if sum(math.prod(one.sizes) for one in own) != math.prod(shape) or _overlap(own, shape):
            return f"the pieces of {name} do not make up the whole tensor"
    odd = sorted(pieces.keys() - shapes.keys())
    return f"there are pieces of {odd[0]}, which the index does not name" if odd else ""


def _overlap(pieces: Sequence[Piece], shape: Sequence[int]) -> bool:
    divided = {
        at
        for one in pieces
        for at, (size, whole) in enumerate(zip(one.sizes, shape, strict=True))
        if size < whole
    }
    if len(divided) == 1:  # the usual case, for which there may be thousands of pieces
        (at,) = divided
        ranges = sorted((one.offsets[at], one.offsets[at] + one.sizes[at]) for one in pieces)
        return any(end > begin for (_, end), (begin, _) in itertools.pairwise(ranges))
    return any(_meet(one, other) for number, one in enumerate(pieces) for other in pieces[number + 1 :])


def _meet(one: Piece, other: Piece) -> bool:
    return all(
        a < c + d and c < a + b
        for a, b, c, d in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )

"""Write the weights in a checkpoint to one safetensors file, in one process (``dist-train export``).

The format is that of huggingface/safetensors. A file begins with the length of a JSON header, in 8 bytes,
little-endian. The header lists the name, type, shape and byte range of each tensor. The bytes of the tensors
follow without gaps. An image may not contain the package safetensors, so this module writes the format
itself.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from imgkit_entrypoints import files, terminal
from imgkit_entrypoints.arguments import Option, add_options
from imgkit_entrypoints.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from imgkit_entrypoints.run.checkpoint import Checkpoint, TensorInfo

# Names of torch's types, with their names in a safetensors file.
TYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
# Names of tracked objects that are exported without ``--part``. dist-train and most programs use these names.
MODELS = ("weights", "model")
OPTIONS = (
    Option("checkpoint", "a checkpoint, a folder of them, or a run folder", Path),
    Option("file", "the file to write; it must not exist", Path),
    Option("--part", "name of the tracked model", metavar="NAME", unset=" or ".join(MODELS)),
)


def main(argv: Sequence[str]) -> int:
    """Write the file; return the exit code.

    Raises
    ------
    UsageError : as `export`.
    """
    parser = argparse.ArgumentParser(
        prog="dist-train export",
        description="Write the weights in the newest valid checkpoint to one safetensors file, on this "
        "machine alone. Checkpoints of a program on the run library work too. Like a resume, it trusts the "
        "folder as it would trust code.",
    )
    add_options(parser, OPTIONS)
    options = parser.parse_args(argv)
    step, count = export(options.checkpoint, options.file, options.part)
    terminal.print_results(f"{options.file}: {count} tensors of step {step}")
    return 0


def export(path: Path, target: Path, part: str | None = None) -> tuple[int, int]:
    """Write a model's weights from the newest valid checkpoint at `path` to the file `target`.

    Return the step of the checkpoint and the number of weights.

    Raises
    ------
    UsageError : there is no valid checkpoint, no such model in it, or `target` exists or cannot be written.
    """
    # Importing torch takes seconds, so it is done only here.
    import torch

    from imgkit_entrypoints.run.checkpoint import find_newest
    from imgkit_entrypoints.run.ranks import Ranks

    if os.path.lexists(target):
        raise UsageError("the file exists already", where=str(target), hint="remove it, or name another file")
    # As if the run had a single rank, this process. It has no process group, and reads all tensors itself.
    ranks = Ranks(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))
    checkpoint, problems = find_newest(path, ranks)
    for problem in problems.values():
        terminal.print_messages(f"dist-train export: checkpoint skipped: {problem}")
    if checkpoint is None:
        hint = "name a run folder, or checkpoints/step-N in it"
        raise UsageError("no valid checkpoint found", where=str(path), hint=hint)
    keys = find_weights(checkpoint, part)
    hint = "free space, or name a file in another folder"
    with files.replace_named_file(target, failed="cannot write the weights", hint=hint) as stream:
        write_safetensors(checkpoint, keys, stream)
    return checkpoint.step, len(keys)


def find_weights(checkpoint: Checkpoint, part: str | None = None) -> dict[str, str]:
    """Return a dict from the name of each weight of a model to its key in the checkpoint.

    Tied weights share a key. An example is one tensor that is both an embedding and an output layer.

    Parameters
    ----------
    part : name of the tracked model. None means the first of `MODELS` that is in the checkpoint.

    Raises
    ------
    UsageError : the checkpoint has no such object, the object is not a model, or a weight has a type that a
        safetensors file cannot store.
    """
    from imgkit_entrypoints.run.state_tree import TensorRef

    where = str(checkpoint.folder)
    name = _find_model(checkpoint, part)
    tree = checkpoint.unpickle_tree(name)
    # The state of a model is a flat dict of tensors. That of an optimizer, for example, is nested.
    if not isinstance(tree, dict) or any(isinstance(leaf, dict | list) for leaf in tree.values()):
        raise UsageError(f"{name} is not the state of a model", where=where, hint="name another: --part")
    keys = {}
    for weight, leaf in tree.items():
        if not isinstance(leaf, TensorRef):  # a value that is not a tensor, and so not a weight
            continue
        type_name = _type_name(checkpoint.tensors[leaf.key].dtype)
        if type_name not in TYPES:
            raise UsageError(
                f"{weight} is of the type {type_name}, which a safetensors file cannot hold",
                where=where,
                hint=f"its types are {', '.join(sorted(TYPES))}",
            )
        keys[str(weight)] = leaf.key
    return keys


def _find_model(checkpoint: Checkpoint, part: str | None) -> str:
    """Return the name of the tracked model: `part`, or the first of `MODELS` that the checkpoint has.

    `MODELS` are the names that most programs use. If there is no such object, UsageError is raised.
    """
    names = checkpoint.names
    requested = [part] if part else MODELS
    for name in requested:
        if name in names:
            return name
    missing = f"no {part}" if part else f"neither {' nor '.join(MODELS)}"
    raise UsageError(
        f"the checkpoint contains {missing}: it has {', '.join(names) or 'no objects'}",
        where=str(checkpoint.folder),
        hint="name the tracked model: --part NAME",
    )


def _type_name(dtype: torch.dtype) -> str:
    """Return the name of a type without the prefix: ``torch.bfloat16`` -> ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def write_safetensors(checkpoint: Checkpoint, weights: Mapping[str, str], stream: BinaryIO) -> None:
    """Write a safetensors file: the size of its header, the header as JSON, and the bytes of the tensors.

    Tied weights (several names of one tensor) are written once, under the first of their names.

    Parameters
    ----------
    weights : the name of each weight, with its key in the checkpoint.
    """
    first_names: dict[str, str] = {}  # by the key of the tensor
    for name, key in weights.items():
        first_names.setdefault(key, name)
    names = sorted(first_names.values())
    # Tensors with the largest elements come first. So each tensor begins at a multiple of its element size.
    # The sort is stable: among tensors of one size, the order by name remains.
    names.sort(key=lambda name: checkpoint.tensors[weights[name]].dtype.itemsize, reverse=True)
    tensors = {name: checkpoint.tensors[weights[name]] for name in names}
    # The metadata maps each other name of a tied weight to its first name, as safetensors.torch.save_model
    # does. Its load_model ties the weights again.
    tied_names = {name: first_names[key] for name, key in weights.items() if name != first_names[key]}
    metadata = {"format": "pt", "step": str(checkpoint.step), **tied_names}
    header_json = json.dumps({"__metadata__": metadata, **_make_entries(tensors)}).encode()
    header_json += b" " * (-len(header_json) % 8)  # in the format, the tensors begin at a multiple of 8 bytes
    stream.write(len(header_json).to_bytes(8, "little") + header_json)
    # The order must be that of the byte ranges in the header.
    for name in names:
        key = weights[name]
        # Read one tensor at a time, so that memory needs to hold only the largest one.
        tensor_by_key = checkpoint.read_tensors([key])
        stream.write(_pack_tensor(tensor_by_key[key]))


def _make_entries(tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """Return the type, shape and byte range of each tensor for the header of a safetensors file, by name.

    The bytes of the tensors follow each other in the order of `tensors`.
    """
    entries = {}
    start = 0
    for name, (shape, dtype) in tensors.items():
        end = start + math.prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": TYPES[_type_name(dtype)],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
        start = end
    return entries


def _pack_tensor(tensor: Tensor) -> bytearray:
    """Return the bytes of a tensor in host memory. NumPy is not used, as an image may not contain it."""
    import torch

    content = bytearray(tensor.numel() * tensor.element_size())
    if content:  # torch.frombuffer refuses an empty buffer
        source = tensor.reshape(-1).view(torch.uint8)
        torch.frombuffer(content, dtype=torch.uint8).copy_(source)
    return content

"""The weights in a checkpoint as one safetensors file: ``dist-train export``, in one process.

The format is that of huggingface/safetensors: the length of a JSON header in 8 bytes, little-endian; the
header, which names each tensor with its type, its shape and the range of its bytes; and these bytes, without
gaps. Images may lack the package, so this module writes the format itself.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from imgkit_entrypoints import files, terminal
from imgkit_entrypoints.errors import ImgkitError, UsageError

if TYPE_CHECKING:
    from imgkit_entrypoints.run.checkpoint import Checkpoint

TYPES = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
}
"""The format's name and the bytes of torch's types."""
MODELS = ("weights", "model")
"""Names of the objects that are taken without ``--part``: those of dist-train and of most programs."""
BATCH_BYTES = 1 << 30
"""Bytes of tensors that are read at once."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, a folder of them, or a run folder")
    parser.add_argument("file", type=Path, help="the file to write; it must not exist")
    parser.add_argument(
        "--part", metavar="NAME", help=f"name of the tracked model (default: {' or '.join(MODELS)})"
    )


def main(argv: Sequence[str]) -> int:
    """Write the file; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="dist-train export",
        description="Write the weights in the newest valid checkpoint to one safetensors file, on this "
        "machine alone. Checkpoints of a program on the run library work too. Like a resume, it trusts the "
        "folder as it would trust code.",
    )
    add_arguments(parser)
    options = parser.parse_args(argv)
    try:
        step, count = export(options.checkpoint, options.file, options.part)
    except ImgkitError as error:
        terminal.err(*f"dist-train export: {error}".split("\n"))
        return error.exit_code
    terminal.out(f"{options.file}: {count} tensors of step {step}")
    return 0


def export(path: Path, target: Path, part: str | None = None) -> tuple[int, int]:
    """Write a model's weights in the newest valid checkpoint at `path`; return its step and their number.

    Raises
    ------
    UsageError : there is no valid checkpoint, no such model in it, or `target` exists or cannot be written.
    """
    import torch

    from imgkit_entrypoints.run.checkpoint import find_newest
    from imgkit_entrypoints.run.ranks import Ranks

    if os.path.lexists(target):
        raise UsageError("the file exists already", where=str(target), hint="remove it, or name another file")
    ranks = Ranks(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))
    checkpoint = find_newest(path, ranks, lambda text: terminal.err(f"dist-train export: {text}"))
    if checkpoint is None:
        raise UsageError(
            "no valid checkpoint found",
            where=str(path),
            hint="name a run folder, or checkpoints/step-N in it",
        )
    keys = weight_keys(checkpoint, part)
    hint = "free space, or name a file in another folder"
    with files.replacing(target, failed="cannot write the weights", hint=hint) as stream:
        write(checkpoint, keys, stream)
    return checkpoint.step, len(keys)


def weight_keys(checkpoint: Checkpoint, part: str | None = None) -> dict[str, str]:
    """Return the names of a model's weights, each with its key in the checkpoint; tied ones share a key.

    Raises
    ------
    UsageError : the checkpoint has no such object, or that is not a model.
    """
    from imgkit_entrypoints.run.state_tree import TensorRef

    name = part or next((name for name in MODELS if name in checkpoint.names), "")
    if name not in checkpoint.names:
        missing = f"no {part}" if part else f"neither {' nor '.join(MODELS)}"
        raise UsageError(
            f"the checkpoint contains {missing}: it has {', '.join(checkpoint.names) or 'no objects'}",
            where=str(checkpoint.folder),
            hint="name the tracked model: --part NAME",
        )
    tree = checkpoint.tree(name)
    keys: dict[str, str] = {}
    for weight, leaf in tree.items() if isinstance(tree, dict) else ():
        if isinstance(leaf, TensorRef):
            keys[str(weight)] = leaf.key
        elif isinstance(leaf, dict | list):
            raise UsageError(
                f"{name} is not the state of a model",
                where=str(checkpoint.folder),
                hint="name another: --part",
            )
    for weight, key in keys.items():
        if (dtype := _type_name(checkpoint, key)) not in TYPES:
            raise UsageError(
                f"{weight} is of the type {dtype}, which a safetensors file cannot hold",
                where=str(checkpoint.folder),
                hint=f"its types are {', '.join(sorted(TYPES))}",
            )
    return keys


def _type_name(checkpoint: Checkpoint, key: str) -> str:
    return str(checkpoint.tensors[key][1]).removeprefix("torch.")


def write(checkpoint: Checkpoint, weights: Mapping[str, str], stream: BinaryIO) -> None:
    """Write the tensors one after the other; of tied ones the first, with the names of the others."""
    import torch

    names: dict[str, str] = {}
    # As safetensors.torch.save_model does it, whose load_model ties them again.
    metadata = {"format": "pt", "step": str(checkpoint.step)}
    for name, key in weights.items():
        if names.setdefault(key, name) != name:
            metadata[name] = names[key]
    # The largest elements first, so that each tensor begins at a multiple of their size.
    ordered = sorted(names, key=lambda key: (-TYPES[_type_name(checkpoint, key)][1], names[key]))
    header: dict[str, Any] = {"__metadata__": metadata}
    position = 0
    for key in ordered:
        end = position + size_bytes(checkpoint, key)
        shape, dtype = [*checkpoint.tensors[key][0]], TYPES[_type_name(checkpoint, key)][0]
        header[names[key]] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    stream.write(len(text).to_bytes(8, "little") + text)
    for keys in _batches(checkpoint, ordered):
        tensors = checkpoint.read(keys)
        for key in keys:
            content = bytearray(tensors[key].numel() * tensors[key].element_size())
            if content:
                flat = tensors.pop(key).reshape(-1).view(torch.uint8)
                torch.frombuffer(content, dtype=torch.uint8).copy_(flat)
            stream.write(content)


def size_bytes(checkpoint: Checkpoint, key: str) -> int:
    """Return the bytes of a tensor."""
    return int(math.prod(checkpoint.tensors[key][0])) * TYPES[_type_name(checkpoint, key)][1]


def _batches(checkpoint: Checkpoint, keys: Sequence[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for key in keys:
        batch.append(key)
        if sum(size_bytes(checkpoint, item) for item in batch) > BATCH_BYTES:
            yield batch
            batch = []
    if batch:
        yield batch


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

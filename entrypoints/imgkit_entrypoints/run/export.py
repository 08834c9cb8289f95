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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from imgkit_entrypoints import files, terminal
from imgkit_entrypoints.arguments import Option, add_options
from imgkit_entrypoints.errors import UsageError

if TYPE_CHECKING:
    from imgkit_entrypoints.run.checkpoint import Checkpoint

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
"""torch's types, and their names in the format."""
MODELS = ("weights", "model")
"""Names of the objects that are taken without ``--part``: those of dist-train and of most programs."""
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
    checkpoint, problems = find_newest(path, ranks)
    for problem in problems.values():
        terminal.err(f"dist-train export: checkpoint skipped: {problem}")
    if checkpoint is None:
        hint = "name a run folder, or checkpoints/step-N in it"
        raise UsageError("no valid checkpoint found", where=str(path), hint=hint)
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

    def unfit(problem: str, hint: str) -> UsageError:
        return UsageError(problem, where=str(checkpoint.folder), hint=hint)

    names = checkpoint.names
    name = part or next((name for name in MODELS if name in names), "")
    if name not in names:
        missing = f"no {part}" if part else f"neither {' nor '.join(MODELS)}"
        content = ", ".join(names) or "no objects"
        problem = f"the checkpoint contains {missing}: it has {content}"
        raise unfit(problem, "name the tracked model: --part NAME")
    tree = checkpoint.tree(name)
    if not isinstance(tree, dict) or any(isinstance(leaf, dict | list) for leaf in tree.values()):
        raise unfit(f"{name} is not the state of a model", "name another: --part")
    keys = {str(weight): leaf.key for weight, leaf in tree.items() if isinstance(leaf, TensorRef)}
    for weight, key in keys.items():
        if (dtype := type_name(checkpoint, key)) not in TYPES:
            problem = f"{weight} is of the type {dtype}, which a safetensors file cannot hold"
            raise unfit(problem, f"its types are {', '.join(sorted(TYPES))}")
    return keys


def type_name(checkpoint: Checkpoint, key: str) -> str:
    """Return torch's name of a tensor's type."""
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
    ordered = sorted(names, key=lambda key: (-checkpoint.tensors[key][1].itemsize, names[key]))
    header: dict[str, Any] = {"__metadata__": metadata}
    position = 0
    for key in ordered:
        shape, dtype = checkpoint.tensors[key]
        end = position + math.prod(shape) * dtype.itemsize
        offsets = {"shape": [*shape], "data_offsets": [position, end]}
        header[names[key]] = {"dtype": TYPES[type_name(checkpoint, key)], **offsets}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    stream.write(len(text).to_bytes(8, "little") + text)
    for key in ordered:
        tensor = checkpoint.read([key])[key]
        content = bytearray(tensor.numel() * tensor.element_size())
        if content:  # an image may lack NumPy
            torch.frombuffer(content, dtype=torch.uint8).copy_(tensor.reshape(-1).view(torch.uint8))
        stream.write(content)

"""The weights in a checkpoint as one safetensors file: ``dist-train export``, in one process.

The format is that of huggingface/safetensors: the length of a JSON header in 8 bytes, little-endian; the
header, which names each tensor with its type, its shape and the range of its bytes; and these bytes, without
gaps. Of sharded weights, some rows are in memory at a time; others are mapped.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from imgkit_entrypoints import files, terminal
from imgkit_entrypoints.errors import ImgkitError, UsageError
from imgkit_entrypoints.run import disk, shard_file

if TYPE_CHECKING:
    from torch import Tensor

    from imgkit_entrypoints.run.sharded import Contents

TYPES = {own: name for name, own in shard_file.TYPES.items()}
"""The format's names of torch's types."""
MODELS = ("weights", "model")
"""Names of the parts that are taken without ``--part``: those of dist-train and of most programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A tensor of a model, which is read when it is written."""

    name: str
    dtype: str
    """The name of its type in torch."""
    shape: tuple[int, ...]
    size_bytes: int
    read: Callable[[], Iterable[Tensor]]
    """Returns its values in order, in as many tensors as it takes."""
    same_as: str = ""
    """The name of an earlier one that is the same memory; such a one is written once."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, a folder of them, or a run folder")
    parser.add_argument("file", type=Path, help="the file to write; it must not exist")
    parser.add_argument(
        "--part", metavar="NAME", help=f"name of the tracked model (default: {' or '.join(MODELS)})"
    )


def main(words: Sequence[str]) -> int:
    """Write the file; the exit code."""
    parser = argparse.ArgumentParser(
        prog="dist-train export",
        description="Write the weights in the newest valid checkpoint to one safetensors file, on this "
        "machine alone. Checkpoints of a program on the run library work too.",
    )
    add_arguments(parser)
    chosen = parser.parse_args(words)
    try:
        step, count = export(chosen.checkpoint, chosen.file, chosen.part)
    except ImgkitError as error:
        terminal.err(*f"dist-train export: {error}".split("\n"))
        return error.exit_code
    terminal.out(f"{chosen.file}: {count} tensors of step {step}")
    return 0


def export(path: Path, target: Path, part: str | None = None) -> tuple[int, int]:
    """Write a model's weights in the newest valid checkpoint at `path`; return its step and their number.

    Raises
    ------
    UsageError : there is no valid checkpoint, no such model in it, or `target` exists or cannot be written.
    """
    if os.path.lexists(target):
        raise UsageError("the file exists already", where=str(target), hint="remove it, or name another file")
    found = next(_valid_ones(path), None)
    if found is None:
        raise UsageError(
            "no valid checkpoint found",
            where=str(path),
            hint="name a run folder, or checkpoints/step-N in it",
        )
    checkpoint, shards = found
    weights = list(weights_in(checkpoint, shards, part))
    hint = "free space, or name a file in another folder"
    with files.replacing(target, failed="cannot write the weights", hint=hint) as sink:
        write(weights, {"step": str(disk.step_of(checkpoint))}, sink)
    return disk.step_of(checkpoint), len(weights)


def _valid_ones(path: Path) -> Iterator[tuple[Path, Contents | None]]:
    """Valid checkpoints at `path` and their sharded parts, newest first."""
    import torch

    from imgkit_entrypoints.run import shard_index, shared_folder
    from imgkit_entrypoints.run.ranks import Ranks

    def say(text: str) -> None:
        terminal.err(f"dist-train export: {text}")

    alone = Ranks(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))
    for checkpoint in disk.valid_ones(path, say):
        if not (checkpoint / shard_index.INDEX).exists():
            yield checkpoint, None
        elif isinstance(found := shared_folder.verify(checkpoint, alone, 0), str):
            say(f"checkpoint skipped: {found}")
        else:
            yield checkpoint, found


def weights_in(checkpoint: Path, shards: Contents | None, part: str | None = None) -> Iterable[Weight]:
    """The weights of a model in a valid checkpoint; their bytes stay in its files until they are read.

    Raises
    ------
    UsageError : it has no such part, or that is not a model.
    """
    import torch

    from imgkit_entrypoints.run import shard_index

    unsharded = [one.name for one in checkpoint.glob("*.pt") if ".ranks." not in one.name]
    there = sorted(
        [one.removesuffix(".pt") for one in unsharded] + (shards.index.objects() if shards else [])
    )
    name = part or next((one for one in MODELS if one in there), None)
    if name not in there:
        what = f"no {part}" if part else f"neither {' nor '.join(MODELS)}"
        raise UsageError(
            f"the checkpoint contains {what}: it has {', '.join(there) or 'no parts of torch'}",
            where=str(checkpoint),
            hint="name the tracked model: --part NAME",
        )
    where = checkpoint / f"{name}.pt"
    if shards and name in shards.index.models:
        return _sharded_weights(shards, shards.index.models[name])
    if shards and name in shards.index.optimizers:
        raise _no_model(checkpoint / shard_index.INDEX)
    try:
        with files.open_regular(where) as stream:
            state = torch.load(
                f"/proc/self/fd/{stream.fileno()}", map_location="cpu", weights_only=True, mmap=True
            )
    except Exception as error:  # torch raises many kinds for bytes that it did not write
        what = str(error).partition("\n")[0]
        raise UsageError(f"this part of the checkpoint cannot be read: {what}", where=str(where)) from None
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise _no_model(where)
    return _weights(state, where)


def _no_model(where: Path) -> UsageError:
    return UsageError("this part is not the state of a model", where=str(where), hint="name another: --part")


def _sharded_weights(shards: Contents, tensors: Mapping[str, str]) -> Iterable[Weight]:
    first: dict[str, str] = {}

    def blocks(tensor: str) -> Iterator[Tensor]:
        try:
            yield from shards.blocks(tensor)
        except OSError as error:
            what = f"this checkpoint cannot be read: {error.strerror}"
            raise UsageError(what, where=str(error.filename or shards.folder)) from error

    for name, tensor in tensors.items():
        whole = shards.index.wholes[tensor]
        yield Weight(
            name=name,
            dtype=shard_file.TYPES[whole.dtype],
            shape=tuple(whole.shape),
            size_bytes=math.prod(whole.shape) * shard_file.BYTES_OF[whole.dtype],
            read=functools.partial(blocks, tensor),
            same_as=first.get(tensor, ""),
        )
        first.setdefault(tensor, name)


def _weights(state: dict[str, Any], where: Path) -> Iterable[Weight]:
    import torch

    known: dict[tuple[object, ...], str] = {}
    for name, one in state.items():
        dtype = str(getattr(one, "dtype", type(one).__name__)).removeprefix("torch.")
        if not isinstance(one, torch.Tensor) or one.layout != torch.strided or dtype not in TYPES:
            raise UsageError(
                f"{name} is of the type {dtype}, which a safetensors file cannot hold",
                where=str(where),
                hint=f"its types are {', '.join(sorted(TYPES))}; torch.load(FILE, weights_only=True) reads "
                "the part itself",
            )
        view = (one.data_ptr(), one.dtype, one.shape, one.stride()) if one.numel() else (name,)
        yield Weight(
            name=name,
            dtype=dtype,
            shape=tuple(one.shape),
            size_bytes=one.numel() * one.element_size(),
            read=functools.partial(_values, one),
            same_as=known.setdefault(view, name) if view in known else "",
        )
        known.setdefault(view, name)


def _values(one: Tensor) -> Iterator[Tensor]:
    yield one.contiguous()


def write(weights: Sequence[Weight], about: dict[str, str], sink: BinaryIO) -> None:
    """Write the tensors one after the other; of tied ones the first, with the names of the others."""
    import torch

    from imgkit_entrypoints.run.ranks import PIECE, bytes_of

    # As safetensors.torch.save_model does it, whose load_model ties them again.
    header: dict[str, Any] = {
        "__metadata__": {"format": "pt", **about, **{one.name: one.same_as for one in weights if one.same_as}}
    }
    # The largest elements first, so that each begins at a multiple of its size.
    once = sorted((one for one in weights if not one.same_as), key=lambda one: (-_width(one), one.name))
    at = 0
    for one in once:
        ends = at + one.size_bytes
        header[one.name] = {"dtype": TYPES[one.dtype], "shape": one.shape, "data_offsets": [at, ends]}
        at = ends
    sink.write(shard_file.framed(header))
    for one in once:
        for block in one.read():
            flat = block.reshape(-1).view(torch.uint8)
            for begin in range(0, len(flat), PIECE):
                piece = flat[begin : begin + PIECE]
                sink.write(bytes_of(piece, len(piece)))


def _width(one: Weight) -> int:
    count = math.prod(one.shape)
    return one.size_bytes // count if count else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

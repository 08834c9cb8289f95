"""State that is divided among the ranks by FSDP2 and HSDP: what each rank keeps of it, and how it comes back.

torch's planners (torch.distributed.checkpoint) say which piece a rank has, and which pieces it needs among
another number of ranks. Their storage is not used: `FileSystemReader` unpickles its metadata, and torch's
reader of safetensors needs a package that images may lack. Files are those of shard_file.py, and all that is
no tensor is in one JSON text. So nothing here is unpickled, neither from a file nor from another rank.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from imgkit_entrypoints import files
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.run import disk, shard_file
from imgkit_entrypoints.run.ranks import Ranks, some
from imgkit_entrypoints.run.readable import unfit
from imgkit_entrypoints.run.shard_file import Piece
from imgkit_entrypoints.run.shard_index import (
    DTYPE_NAMES,
    DTYPES,
    Group,
    Index,
    OptimizerIndex,
    Whole,
    decoded,
    encoded,
)

OLDEST_TORCH = (2, 6)
"""The first one whose `fully_shard` and DTensor are public."""
BLOCK_BYTES = 64 << 20
"""Bytes of a whole tensor that are in memory at once; more only if one row has more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The sharded part of a checkpoint, whose pieces make up all tensors."""

    folder: Path
    index: Index
    pieces: Mapping[str, Mapping[tuple[int, ...], Piece]]
    """The pieces, by tensor and offsets; a tensor without elements has none."""

    def blocks(self, name: str) -> Iterator[Tensor]:
        """Yield a whole tensor, some rows at a time: no more of it is in memory.

        Raises
        ------
        OSError : a file cannot be read.
        """
        whole, pieces = self.index.wholes[name], [*self.pieces.get(name, {}).values()]
        if not whole.shape:
            yield from (_part(self.folder, one, (), ()) for one in pieces)
            return
        rows, *others = whole.shape
        row_bytes = math.prod(others) * shard_file.BYTES_OF[whole.dtype]
        step = max(1, BLOCK_BYTES // max(1, row_bytes))
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            block = torch.empty((end - begin, *others), dtype=DTYPES[whole.dtype])
            for one in pieces:
                first, last = max(begin, one.offsets[0]), min(end, one.offsets[0] + one.sizes[0])
                if first < last:
                    target = block[first - begin : last - begin]
                    for at in range(1, len(one.sizes)):
                        target = target.narrow(at, one.offsets[at], one.sizes[at])
                    own = (first - one.offsets[0], *[0] * len(others)), (last - first, *one.sizes[1:])
                    target.copy_(_part(self.folder, one, *own))
            yield block


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """This rank's pieces, in host memory, and what rank 0 writes about those of all ranks."""

    rank: int
    ranks: int
    pieces: list[tuple[Piece, Tensor]]
    index: str

    @property
    def file(self) -> str:
        """Name of this rank's file."""
        return shard_file.name_of(self.rank, self.ranks)

    def write(self, sink: disk.Sink) -> None:
        """Write this rank's file."""
        sink.write(shard_file.header([piece for piece, _ in self.pieces]))
        for _, tensor in self.pieces:
            sink.write(_bytes_of(tensor))


def is_sharded(value: Any) -> bool:
    """Whether parameters of a model or an optimizer are DTensors."""
    if isinstance(value, nn.Module):
        return any(map(_is_dtensor, value.parameters()))
    return isinstance(value, Optimizer) and any(
        _is_dtensor(one) for group in value.param_groups for one in group["params"]
    )


def holds_back_gradients(model: nn.Module) -> bool:
    """Whether gradients of a model are not added up over the ranks yet.

    FSDP2 keeps them apart from the parameters after ``set_requires_gradient_sync(False)`` and
    ``set_requires_all_reduce(False)``, and has no public way to ask: these names are of torch 2.6 to 2.13.
    """
    for module in model.modules():
        state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
        one = getattr(state, "_fsdp_param_group", None)
        for group in getattr(state, "_fsdp_param_groups", [one] if one else []):
            if getattr(group, "_partial_reduce_output", None) is not None:
                return True
            for param in group.fsdp_params:
                gathered = getattr(param, "_unsharded_param", None)
                if (
                    param.unsharded_accumulated_grad is not None
                    or getattr(gathered, "grad", None) is not None
                ):
                    return True
    return False


def refuse_unfit(name: str, value: Any, ranks: int) -> None:
    """Raise UsageError if a sharded object cannot be kept."""
    version = tuple(int(one) for one in torch.__version__.split(".")[:2])
    if version < OLDEST_TORCH:
        raise unfit(
            f"{name} is sharded, and this is torch {torch.__version__}",
            f"use an image with torch {'.'.join(map(str, OLDEST_TORCH))} or newer (NGC 25.01), or wrap the "
            "model in DDP",
        )
    from torch.distributed.tensor import Replicate, Shard

    parameters = value.named_parameters() if isinstance(value, nn.Module) else ()
    for key, one in parameters:
        if one.is_meta:
            raise unfit(f"{name}.{key} is on the meta device", "call run.track after model.to_empty()")
        if not _is_dtensor(one):
            continue
        if odd := [str(place) for place in one.placements if type(place) not in (Shard, Replicate)]:
            raise unfit(
                f"{name}.{key} is divided by {odd[0]}", "shard it by fully_shard alone: FSDP2 or HSDP"
            )
        if one.device_mesh.size() != ranks:
            raise unfit(
                f"{name}.{key} is sharded over {one.device_mesh.size()} of {ranks} ranks",
                "use a mesh of all ranks, init_device_mesh(device, (REPLICAS, SHARDS))",
            )


class ShardedObjects:
    """The sharded models and optimizers of a run, by name, and the models whose weights they update."""

    def __init__(
        self,
        objects: Mapping[str, Any],
        plain_keys: Callable[[nn.Module, Mapping[str, Any]], dict[str, str]],
    ) -> None:
        """`plain_keys` returns the keys of a model's state, and what they would be without wrappers."""
        self._models = {name: one for name, one in objects.items() if isinstance(one, nn.Module)}
        self._optimizers = {name: one for name, one in objects.items() if name not in self._models}
        self._tensors: dict[str, Tensor] = {}
        self._keys: dict[str, dict[str, str]] = {}
        self._states: dict[str, dict[str, Any]] = {}
        self._names: dict[int, str] = {}
        self._tied: dict[str, dict[str, str]] = {}
        """The name under which each tensor of a model is kept, by key: tied ones have that of the first."""
        for name, model in self._models.items():
            # After this, parameters are sharded, also those that a pass has gathered.
            state = model.state_dict()
            weights = dict(model.named_parameters(remove_duplicate=False))
            plain = self._keys[name] = plain_keys(model, {**weights, **state})
            self._states[name] = {plain[key]: one for key, one in state.items()}
            own: dict[int, str] = {}
            for key, one in weights.items():
                own.setdefault(id(one), f"{name}.{plain[key]}")
            self._names.update(own)
            self._tied[name] = {
                plain[key]: own[id(weights[key])] if key in weights else f"{name}.{plain[key]}"
                for key in state
            }

    def index(self) -> Index:
        """Describe their state now.

        Raises
        ------
        UsageError : a part of it cannot be kept.
        """
        self._tensors = {}
        found = {
            name: {key: self._kept(self._tied[name][key], one) for key, one in state.items()}
            for name, state in self._states.items()
        }
        optimizers = {name: self._index_of(name, one) for name, one in self._optimizers.items()}
        wholes = {name: _whole(one) for name, one in self._tensors.items()}
        return Index(models=found, optimizers=optimizers, wholes=wholes)

    def compared(self) -> dict[str, str]:
        """What must not differ between ranks.

        Raises
        ------
        UsageError : as `index`.
        """
        return {"": json.dumps(dataclasses.asdict(self.index()), sort_keys=True)}

    def _kept(self, name: str, value: Any) -> str:
        if not isinstance(value, Tensor):
            raise unfit(
                f"{name} is a {type(value).__name__}", "keep only tensors in the state of a sharded model"
            )
        if value.dtype not in DTYPE_NAMES or value.layout != torch.strided:
            raise unfit(
                f"{name} is a {value.layout} tensor of {value.dtype}", f"use one of {', '.join(DTYPES)}"
            )
        self._tensors[name] = value
        return name

    def _index_of(self, name: str, optimizer: Optimizer) -> OptimizerIndex:
        state = optimizer.state_dict()
        if odd := sorted(state.keys() - {"state", "param_groups"}):
            raise unfit(f"{name}[{odd[0]!r}] is in no parameter group", "use an optimizer of torch.optim")
        params = self._params(name, optimizer)
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        names = dict(zip(numbers, [one for group in params for one in group], strict=True))
        weights = dict(
            zip(numbers, [one for group in optimizer.param_groups for one in group["params"]], strict=True)
        )
        tensors: dict[str, dict[str, str]] = {}
        values: dict[str, dict[str, str]] = {}
        for number, own in state["state"].items():
            param = names[number]
            for key, value in own.items():
                if isinstance(value, Tensor) and (value.dim() or _is_dtensor(value)):
                    if _is_dtensor(value) and not _is_divided_as(value, weights[number]):
                        raise unfit(
                            f"{name} keeps {key} of {param} in another shape than the weight",
                            "use an optimizer whose state has the shape of its weights, such as AdamW",
                        )
                    tensors.setdefault(param, {})[key] = self._kept(f"{name}.state.{param}.{key}", value)
                else:
                    values.setdefault(param, {})[key] = encoded(f"{name}['state'][{param!r}][{key!r}]", value)
        groups = [
            Group(
                params=own,
                options={
                    key: encoded(f"{name}['param_groups'][{number}][{key!r}]", value)
                    for key, value in group.items()
                    if key != "params"
                },
            )
            for number, (own, group) in enumerate(zip(params, state["param_groups"], strict=True))
        ]
        return OptimizerIndex(kind=type(optimizer).__name__, groups=groups, tensors=tensors, values=values)

    def _params(self, name: str, optimizer: Optimizer) -> list[list[str]]:
        """The names of the weights in each group."""
        try:
            return [[self._names[id(one)] for one in group["params"]] for group in optimizer.param_groups]
        except KeyError:
            raise unfit(
                f"{name} updates weights of no tracked model",
                "run.track(model=model, ...) with each model that it updates; shard a model before its "
                "optimizer is made",
            ) from None

    def staged(self, here: Ranks, copied: Callable[[Any], Any]) -> Staged:
        """Copy this rank's pieces by `copied`, which returns host memory of their own."""
        from torch.distributed.checkpoint import DefaultSavePlanner

        index = self.index()
        mine = {name: one for name, one in self._tensors.items() if _is_mine(name, one, here)}
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(mine, is_coordinator=True)
        pieces = []
        for item in planner.create_local_plan().items:
            name, data = item.index.fqn, item.tensor_data
            if data is None:
                raise unfit(f"{name} is no tensor", "keep only tensors in the state of a sharded model")
            if data.chunk.sizes.numel():
                piece = Piece(
                    name=name,
                    dtype=DTYPE_NAMES[mine[name].dtype],
                    offsets=tuple(data.chunk.offsets),
                    sizes=tuple(data.chunk.sizes),
                )
                pieces.append((piece, copied(planner.resolve_data(item).contiguous())))
        self._tensors = {}
        text = json.dumps(dataclasses.asdict(index)) if here.rank == 0 else ""
        return Staged(rank=here.rank, ranks=here.world_size, pieces=pieces, index=text)

    def loading(self, contents: Contents) -> Callable[[], None]:
        """Compare them with a checkpoint; the result takes its state over, and reads only this rank's pieces.

        Raises
        ------
        UsageError : they are others; nothing has changed then.
        """
        index, where = contents.index, str(contents.folder)
        for name, state in self._states.items():
            saved = {key: index.wholes[one] for key, one in index.models.get(name, {}).items()}
            _refuse_other(name, saved, {key: _whole(one) for key, one in state.items()}, where)
            own_of: dict[str, str] = {}
            for key, one in index.models[name].items():
                if own_of.setdefault(one, self._tied[name][key]) != self._tied[name][key]:
                    raise other(name, f"{key} is tied in the checkpoint, and not in the program", where)
        targets: dict[str, Tensor] = {
            index.models[name][key]: one for name, own in self._states.items() for key, one in own.items()
        }
        states = {}
        for name, optimizer in self._optimizers.items():
            own = index.optimizers.get(name)
            params = self._params(name, optimizer)
            if own is not None and own.kind != type(optimizer).__name__:
                raise other(name, f"{own.kind}, and the program has {type(optimizer).__name__}", where)
            if own is None or [one.params for one in own.groups] != params:
                saved_names = [one for group in own.groups for one in group.params] if own else []
                live_names = [one for group in params for one in group]
                raise other(name, _named(saved_names, live_names) or "its parameter groups differ", where)
            states[name] = self._state_of(optimizer, own, index, targets, where)

        def load() -> None:
            _fill(targets, contents)
            for name, model in self._models.items():
                state = self._states[name]
                model.load_state_dict(
                    {key: state[plain] for key, plain in self._keys[name].items() if plain in state}
                )
            for name, optimizer in self._optimizers.items():
                optimizer.load_state_dict(states[name])

        return load

    def _state_of(
        self,
        optimizer: Optimizer,
        own: OptimizerIndex,
        index: Index,
        targets: dict[str, Tensor],
        where: str,
    ) -> dict[str, Any]:
        """The state_dict of an optimizer, with new tensors that are `targets`."""
        params = [one for group in optimizer.param_groups for one in group["params"]]
        state: dict[int, dict[str, Any]] = {}
        for number, param in enumerate(params):
            name = self._names[id(param)]
            values = {key: decoded(value) for key, value in own.values.get(name, {}).items()}
            for key, tensor in own.tensors.get(name, {}).items():
                whole = index.wholes[tensor]
                if whole.placements and whole.shape != list(param.shape):
                    raise other(name, f"{key} has another shape than the weight", where)
                targets[tensor] = values[key] = _empty(whole, param)
            if values:
                state[number] = values
        at, groups = 0, []
        for group in own.groups:
            options = {key: decoded(value) for key, value in group.options.items()}
            groups.append({**options, "params": list(range(at, at + len(group.params)))})
            at += len(group.params)
        return {"state": state, "param_groups": groups}


def _fill(targets: dict[str, Tensor], contents: Contents) -> None:
    """Read the pieces that this rank has of each target into it."""
    from torch.distributed.checkpoint import DefaultLoadPlanner
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        TensorProperties,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.planner import LoadItemType

    metadata = Metadata(
        state_dict_metadata={
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=DTYPES[contents.index.wholes[name].dtype]),
                size=torch.Size(contents.index.wholes[name].shape),
                chunks=[
                    ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(piece.sizes))
                    for offsets, piece in contents.pieces.get(name, {}).items()
                ],
            )
            for name in targets
        }
    )
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(targets, metadata, is_coordinator=False)
    for item in planner.create_local_plan().items:
        if item.type != LoadItemType.TENSOR:
            raise other(item.storage_index.fqn, "it is no tensor", str(contents.folder))
        piece = contents.pieces[item.storage_index.fqn][tuple(item.storage_index.offset or ())]
        target = planner.resolve_tensor(item).detach()
        with torch.no_grad():
            target.copy_(_part(contents.folder, piece, item.storage_offsets, item.lengths))
        planner.commit_tensor(item, target)


def _part(folder: Path, piece: Piece, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Read a part of a piece: of its rows, no others."""
    sizes, begin = list(piece.sizes), piece.begin
    if sizes:
        row = math.prod(sizes[1:]) * shard_file.BYTES_OF[piece.dtype]
        begin, sizes[0] = begin + offsets[0] * row, lengths[0]
        offsets = [0, *offsets[1:]]
    content = bytearray(math.prod(sizes) * shard_file.BYTES_OF[piece.dtype])
    with files.open_regular(folder / piece.file, buffering=0) as file:
        file.seek(begin)
        view, done = memoryview(content), 0
        while done < len(content):
            count = file.readinto(view[done:])  # type: ignore[attr-defined] # it has no buffer
            if not count:
                raise OSError(0, "the file ends too early", str(folder / piece.file))
            done += count
    tensor = torch.frombuffer(content, dtype=DTYPES[piece.dtype]).reshape(sizes)
    for dimension, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dimension, offset, length)
    return tensor


def _is_dtensor(value: object) -> bool:
    return any(kind.__name__ == "DTensor" for kind in type(value).__mro__)


def _is_divided_as(value: Any, weight: Any) -> bool:
    return _is_dtensor(weight) and (value.shape, value.placements) == (weight.shape, weight.placements)


def _is_mine(name: str, value: Any, here: Ranks) -> bool:
    """Whether this rank writes its piece: of equal ones, the ranks that have them do it in turn."""
    if not _is_dtensor(value):
        return here.rank == 0
    mesh, turn, replicas = value.device_mesh, 0, 1
    for dimension, placement in enumerate(value.placements):
        if placement.is_replicate():
            turn, replicas = (
                turn * mesh.size(dimension) + mesh.get_coordinate()[dimension],
                replicas * mesh.size(dimension),
            )
    return zlib.crc32(name.encode()) % replicas == turn


def _whole(value: Any) -> Whole:
    places = (
        " ".join("R" if one.is_replicate() else f"S{one.dim}" for one in value.placements)
        if _is_dtensor(value)
        else ""
    )
    return Whole(dtype=DTYPE_NAMES[value.dtype], shape=list(value.shape), placements=places)


def _empty(whole: Whole, param: Any) -> Tensor:
    """Make a tensor of an optimizer's state, divided as its parameter is."""
    if whole.placements:
        return torch.empty_like(param, dtype=DTYPES[whole.dtype], requires_grad=False)
    return torch.empty(tuple(whole.shape), dtype=DTYPES[whole.dtype])


def _bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, without a copy."""
    count = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * count).from_address(tensor.data_ptr()))


def _refuse_other(name: str, saved: Mapping[str, Whole], live: Mapping[str, Whole], where: str) -> None:
    if why := _named([*saved], [*live]):
        raise other(name, why, where)
    for key, one in live.items():
        if (saved[key].dtype, saved[key].shape) != (one.dtype, one.shape):
            both = [f"{each.dtype} {tuple(each.shape)}" for each in (saved[key], one)]
            raise other(name, f"{key} is {both[0]} in the checkpoint and {both[1]} in the program", where)


def _named(saved: Sequence[str], live: Sequence[str]) -> str:
    """The names that one of them lacks; empty: none."""
    sides = (("the checkpoint", sorted({*saved} - {*live})), ("the program", sorted({*live} - {*saved})))
    return "; ".join(f"only {side} has {some(names)}" for side, names in sides if names)


def other(name: str, why: str, where: str) -> UsageError:
    """The error for a checkpoint of another object, before anything is loaded."""
    return UsageError(
        f"the checkpoint contains a different {name}: {why}",
        where=where,
        hint="build the same objects, or start a new run in another folder; nothing was loaded",
    )

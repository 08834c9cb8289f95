"""The objects whose state a run saves and restores."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.run import state_tree
from imgkit_entrypoints.run.checkpoint import INDEX, Checkpoint
from imgkit_entrypoints.run.ranks import Ranks, first_names, ranks_by_value
from imgkit_entrypoints.run.state_tree import is_dtensor

RESERVED = (INDEX, "rank")
"""Names of a checkpoint's own keys."""
SHARDED_BY_OTHERS = ("FullyShardedDataParallel", "DeepSpeedEngine", "ZeroRedundancyOptimizer")
"""Classes that share a model or an optimizer among the ranks; their state_dict may be a collective call."""
WRAPPERS = {"DistributedDataParallel": "module", "OptimizedModule": "_orig_mod"}
"""Classes around a model, of DDP and of torch.compile, and the attribute that holds the model."""
OLDEST_TORCH = (2, 6)
"""The first one whose `fully_shard` and DTensor are public."""
MAX_COMPARED, MAX_ELEMENTS = 2048, 8192
"""Values of one object, and elements of one tensor, up to which ranks compare them one by one."""
MAX_DIGESTED_BYTES = 1 << 20
"""Size of the tensors of one object up to which a digest of its state has their values."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types of whole numbers by their bytes."""


@dataclass(slots=True)
class Snapshot:
    """What a checkpoint keeps of the tracked objects: trees and tensors by key, and states of this rank."""

    trees: dict[str, bytes] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    rank_values: dict[str, bytes] = field(default_factory=dict)


class Tracked:
    """Objects by name. Rank 0's state counts for all, or there is one for each rank."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self._per_rank: set[str] = set()
        self._first_values: dict[str, dict[str, str]] = {}
        """Values that must not differ between ranks, when the run began."""

    @property
    def optimizers(self) -> list[Optimizer]:
        """The tracked optimizers."""
        return [value for value in self.objects.values() if isinstance(value, Optimizer)]

    @property
    def has_shards(self) -> bool:
        """Whether a model or an optimizer is divided among the ranks."""
        return any(map(is_sharded, self.objects.values()))

    def add(self, name: str, value: Any, *, per_rank: bool) -> None:
        """Add an object; a loader has a state for each rank anyway.

        Raises
        ------
        UsageError : it has no state that a checkpoint can keep.
        """
        if name in RESERVED or name in self.objects or "/" in name:
            reason = "already tracked" if name in self.objects else "reserved"
            raise _unfit(f"the name {name} is {reason}", "choose another name")
        if not has_state(value):
            problem = f"{name} is a {type(value).__name__} without a state"
            raise _unfit(problem, "track objects with state_dict and load_state_dict")
        for part in value.modules() if isinstance(value, nn.Module) else (value,):
            if _is_instance(part, SHARDED_BY_OTHERS):
                raise _unfit(
                    f"{name} is a {type(part).__name__}, whose state no rank has as a whole",
                    "shard models by fully_shard (FSDP2); or let its library save to the next_path() of a "
                    "LibraryCheckpoint(run): docs/guides/resume.md",
                )
        if is_sharded(value):
            _refuse_unfit_shards(name, value)
        state = state_of(name, value)
        if problem := state_tree.unpicklable(name, state):
            raise _unloadable(problem)
        self.objects[name] = value
        if per_rank or _is_loader(value):
            self._per_rank.add(name)
        else:
            self._first_values[name] = _compared(value, state)

    def digests(self) -> dict[str, str]:
        """Return a digest of the state of each object but loaders, to find changes in this process."""
        return {
            name: _digest_of_state(state_of(name, value))
            for name, value in self.objects.items()
            if not _is_loader(value)
        }

    def snapshot(self, ranks: Ranks, call: str) -> Snapshot:
        """Return the states as a checkpoint has them; a collective call.

        Raises
        ------
        UsageError : on every rank, if a rank cannot keep a state, or if rank 0's cannot count for all.
        """
        snapshot, digests, failure = Snapshot(), {}, None
        try:
            for name, value in sorted(self.objects.items()):  # all ranks give the same keys to shards
                state = state_of(name, value)
                self._add_state(snapshot, name, state)
                # Before the run begins, DDP may not have made the weights equal yet.
                is_early = isinstance(value, nn.Module | Optimizer) and call != "run.save"
                if name not in self._per_rank and ranks.world_size > 1 and not is_early:
                    digests[name] = _digest(repr(_compared(value, state)))
        except UsageError as error:
            failure = error.what, error.hint
        rows = ranks.gather((failure, ", ".join(sorted(self.objects)) or "nothing", digests), call=call)
        for rank, (failure, _, _) in enumerate(rows):
            if failure:
                raise UsageError(f"rank {rank}: {failure[0]}", where=call, hint=failure[1])
        names = [row[1] for row in rows]
        if len(set(names)) > 1:
            raise UsageError(
                f"the ranks track different objects: {ranks_by_value(names)}",
                where=call,
                hint="all ranks must track the same names",
            )
        for name in sorted(digests):
            if len({row[2][name] for row in rows}) > 1:
                self._refuse_difference(name, ranks, call)
        return snapshot

    def _add_state(self, snapshot: Snapshot, name: str, state: Any) -> None:
        try:
            if name in self._per_rank:
                snapshot.rank_values[name] = pickle.dumps(state_tree.on_host(state))
                return
            tree, tensors = state_tree.split(name, state, snapshot.tensors)
            snapshot.trees[name] = pickle.dumps(tree)
            snapshot.tensors.update(tensors)
        except Exception as error:  # pickle and the classes of a program raise many kinds
            raise _unloadable(state_tree.unpicklable(name, state) or f"{name}: {error}") from error

    def _refuse_difference(self, name: str, ranks: Ranks, call: str) -> None:
        """Raise UsageError, on every rank, for a value that ranks other than rank 0 have set."""
        value = self.objects[name]
        rows = ranks.gather((self._first_values[name], _compared(value, state_of(name, value))), call=call)
        is_large = isinstance(value, nn.Module | Optimizer)
        for path in sorted({path for row in rows for part in row for path in part}):
            first, latest = zip(*((row[0].get(path, ""), row[1].get(path, "")) for row in rows), strict=True)
            is_rank_0_alone = latest[1:] == first[1:] and (is_large or len(set(first)) == 1)
            if len(set(latest)) == 1 or is_rank_0_alone:  # as the best loss that only rank 0 sees
                continue
            raise UsageError(
                f"{name}{path} differs between the ranks, and a resume would give that of rank 0 to all: "
                f"{ranks_by_value(latest)}",
                where=call,
                hint=("wrap the model in DDP; or " if is_large else "")
                + f"run.track_per_rank({name}={name}) in place of run.track: one for each rank",
            )

    def load(self, checkpoint: Checkpoint, rank_values: Mapping[str, bytes]) -> None:
        """Give every object its state from a checkpoint, one after the other; a collective call.

        Raises
        ------
        UsageError : it holds other objects or another model, and nothing is loaded; or a state does not fit.
        """
        where = str(checkpoint.folder)
        shared = self.objects.keys() - self._per_rank
        if set(checkpoint.names) != shared or rank_values.keys() != self._per_rank:
            saved = [*checkpoint.names, *(f"{name} of each rank" for name in rank_values)]
            live = [*shared, *(f"{name} of each rank" for name in self._per_rank)]
            raise UsageError(
                f"the checkpoint contains {', '.join(sorted(saved)) or 'nothing'}, and this program tracks "
                f"{', '.join(sorted(live)) or 'nothing'}",
                where=where,
                hint="track the same objects under the same names, or start a new run in another folder",
            )
        trees = {name: checkpoint.tree(name) for name in checkpoint.names}
        for name, tree in trees.items():
            if problem := self._difference(name, tree, checkpoint):
                raise UsageError(
                    f"the checkpoint contains a different {name}: {problem}",
                    where=where,
                    hint="build the same objects, or start a new run in another folder; nothing was loaded",
                )
        for name, tree in trees.items():
            self._load(name, checkpoint.state(name, self._shards_of(name, tree, checkpoint)), where)
        for name, data in rank_values.items():
            self._load(name, pickle.loads(data), where)  # noqa: S301 - SECURITY.md: it is trusted like code

    def _difference(self, name: str, tree: Any, checkpoint: Checkpoint) -> str:
        """Return how a saved model or optimizer differs from the tracked one; empty: not at all."""
        value = self.objects[name]
        if isinstance(value, Optimizer):
            saved_sizes = [len(group["params"]) for group in tree["param_groups"]]
            sizes = [len(group["params"]) for group in value.param_groups]
            problem = f"groups of {saved_sizes} weights in the checkpoint, and of {sizes} now"
            return problem if saved_sizes != sizes else ""
        if not isinstance(value, nn.Module):
            return ""
        live = state_of(name, value)
        lost, new = [key for key in tree if key not in live], [key for key in live if key not in tree]
        if lost or new:
            return (
                f"{first_names(lost) or 'nothing'} only in the checkpoint, "
                f"{first_names(new) or 'nothing'} only in the model"
            )
        for key, leaf in tree.items():
            saved_shape, saved_dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
            if _is_ref(leaf):
                saved_shape, saved_dtype = checkpoint.tensors[leaf.key]
            shape, dtype = getattr(live[key], "shape", None), getattr(live[key], "dtype", None)
            if saved_shape != shape:
                return f"{key} is {_text(saved_shape)} in the checkpoint and {_text(shape)} in the model"
            if saved_dtype != dtype:
                return f"{key} is {saved_dtype} in the checkpoint and {dtype} in the model"
        return ""

    def _shards_of(self, name: str, tree: Any, checkpoint: Checkpoint) -> dict[str, Tensor]:
        """Return the DTensors, by key, into which each rank reads its part of a sharded object."""
        value = self.objects[name]
        if not is_sharded(value):
            return {}
        if isinstance(value, nn.Module):
            live = state_of(name, value)
            return {tree[key].key: tensor for key, tensor in live.items() if is_dtensor(tensor)}
        shards = {}  # a fresh optimizer has no state to read into
        params = [param for group in value.param_groups for param in group["params"]]
        for (number, *_), leaf in state_tree.leaves(tree["state"]):
            shape, dtype = checkpoint.tensors[leaf.key] if _is_ref(leaf) else (None, None)
            if is_dtensor(params[number]) and shape == params[number].shape:
                shards[leaf.key] = torch.empty_like(params[number], dtype=dtype, requires_grad=False)
        return shards

    def _load(self, name: str, state: Any, where: str) -> None:
        value = self.objects[name]
        try:
            if isinstance(value, nn.Module):
                keys = _plain_keys(value, value.state_dict())
                value.load_state_dict({key: state[plain] for key, plain in keys.items()})
            else:
                value.load_state_dict(state)
        except (ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
            raise UsageError(
                f"the state of {name} does not fit: {str(error).partition(chr(10))[0]}",
                where=where,
                hint="build the same objects, or start a new run in another folder",
            ) from error
        if name in self._first_values:
            self._first_values[name] = _compared(value, state_of(name, value))


def has_state(value: object) -> bool:
    """Return whether `value` can save and load its state by itself."""
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def _is_loader(value: object) -> bool:
    return hasattr(value, "__iter__") and not isinstance(value, nn.Module | Optimizer)


def is_sharded(value: Any) -> bool:
    """Return whether parameters of a model or an optimizer are DTensors."""
    if isinstance(value, nn.Module):
        return any(map(is_dtensor, value.parameters()))
    return isinstance(value, Optimizer) and any(
        is_dtensor(param) for group in value.param_groups for param in group["params"]
    )


def _is_instance(value: object, names: Collection[str]) -> bool:
    """Return whether the class of `value` has one of these names; their modules need not be imported."""
    return any(kind.__name__ in names for kind in type(value).__mro__)


def _unfit(problem: str, hint: str) -> UsageError:
    return UsageError(problem, where="run.track", hint=hint)


def _unloadable(problem: str) -> UsageError:
    hint = "keep only numbers, texts, lists, dicts and tensors in the state"
    return _unfit(f"{problem}, and no resume could load it again", hint)


def _refuse_unfit_shards(name: str, value: Any) -> None:
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
        raise _unfit(
            f"{name} is sharded, and this is torch {torch.__version__}",
            "use an image with torch 2.6 or newer (NGC 25.01), or wrap the model in DDP",
        )
    world_size = torch.distributed.get_world_size()
    for key, parameter in value.named_parameters() if isinstance(value, nn.Module) else ():
        size = parameter.device_mesh.size() if is_dtensor(parameter) else world_size
        if parameter.is_meta:
            raise _unfit(f"{name}.{key} is on the meta device", "call run.track after model.to_empty()")
        if size != world_size:
            hint = "use a mesh of all ranks, init_device_mesh(device, (REPLICAS, SHARDS))"
            raise _unfit(f"{name}.{key} is sharded over {size} of {world_size} ranks", hint)


def state_of(name: str, value: Any) -> Any:
    """Return the state of an object; that of a model has the same keys whatever is wrapped around which part.

    Raises
    ------
    UsageError : it cannot be read.
    """
    try:
        state = value.state_dict()
    except Exception as error:  # the object is not ours
        raise _unfit(
            f"the state of {name}, a {type(value).__name__}, cannot be read: {error}",
            "docs/guides/resume.md shows how accelerate's own save_state is used",
        ) from error
    if not isinstance(value, nn.Module):
        return state
    keys = _plain_keys(value, state)
    # torch makes new tensors for the state, also of a parameter that two modules share.
    parameters = dict(value.named_parameters(remove_duplicate=False))
    tied: dict[int, Any] = {}
    return {
        keys[key]: tied.setdefault(id(parameters[key]), leaf) if key in parameters else leaf
        for key, leaf in state.items()
    }


def _plain_keys(model: nn.Module, state: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys of a model's state, and what they would be without wrappers."""
    wrapped = [
        (f"{name}." if name else "", f"{attribute}.")
        for name, module in model.named_modules(remove_duplicate=False)
        for kind, attribute in WRAPPERS.items()
        if _is_instance(module, (kind,))
    ]

    def plain(key: str) -> str:
        for prefix, attribute in reversed(wrapped):  # the innermost comes last
            if key.startswith(prefix + attribute):
                key = prefix + key.removeprefix(prefix + attribute)
        return key

    return {key: plain(key) for key in state}


def _is_ref(value: object) -> bool:
    return isinstance(value, state_tree.TensorRef)


def _text(shape: torch.Size | None) -> str:
    return "no tensor" if shape is None else str(tuple(shape))


def _compared(value: Any, state: Any) -> dict[str, str]:
    """Return what of an object must not differ between ranks, as short texts by path.

    Of a model the bits of its parameters, since buffers may differ; of an optimizer all; of others all but
    tensors of fractions and large ones. Shards differ by their nature.
    """
    if isinstance(value, nn.Module):
        items = [(f".{name}", parameter) for name, parameter in value.named_parameters()]
    else:
        items = [(state_tree.path_text("", path), leaf) for path, leaf in state_tree.leaves(state)]
    texts: dict[str, str] = {}
    bits: dict[torch.device, dict[str, Tensor]] = {}
    for path, leaf in items:
        if not isinstance(leaf, Tensor):
            # Sets have another order in each process.
            texts[path] = _short(repr(sorted(leaf, key=repr) if isinstance(leaf, set) else leaf))
        elif is_dtensor(leaf):
            texts[path] = f"{tuple(leaf.shape)} {leaf.placements}"
        elif isinstance(value, nn.Module | Optimizer) and leaf.layout == torch.strided and not leaf.is_meta:
            bits.setdefault(leaf.device, {})[path] = _sum_of_bits(leaf)
        elif not (leaf.is_floating_point() or leaf.is_complex()) and leaf.numel() <= MAX_ELEMENTS:
            texts[path] = _short(repr(leaf.tolist()))
    for sums in bits.values():
        numbers = torch.stack([*sums.values()]).tolist()
        texts.update({path: f"bits {number:x}" for path, number in zip(sums, numbers, strict=True)})
    return texts if len(texts) <= MAX_COMPARED else {"": _digest(repr(texts))}


def _digest_of_state(state: Any) -> str:
    leaves = state_tree.leaves(state)
    size_bytes = sum(leaf.nbytes for _, leaf in leaves if isinstance(leaf, Tensor))
    digest = hashlib.sha256()
    for path, leaf in leaves:
        if not isinstance(leaf, Tensor):
            content = pickle.dumps(sorted(leaf, key=repr) if isinstance(leaf, set) else leaf)
        elif size_bytes > MAX_DIGESTED_BYTES or type(leaf) not in (Tensor, nn.Parameter) or leaf.is_meta:
            content = f"{leaf.shape} {leaf.dtype}".encode()
        else:
            content = f"{leaf.dtype} {leaf.tolist()}".encode()
        digest.update(repr(path).encode() + content)
    return digest.hexdigest()


def _sum_of_bits(value: Tensor) -> Tensor:
    """Return the sum over the bits of a tensor as whole numbers, on its device."""
    flat = torch.view_as_real(value.detach()) if value.is_complex() else value.detach()
    bits = flat.view(_INTEGERS[flat.element_size()])
    if not bits.is_contiguous():
        return bits.sum(dtype=torch.int64)
    bits = bits.reshape(-1)
    aligned = bits.numel() * bits.element_size() // 8 * 8 // bits.element_size()
    if bits.data_ptr() % 8 or not aligned:
        return bits.sum(dtype=torch.int64)
    # Measured on a CPU: 25 times as fast as the sum of 32-bit integers, which torch widens one by one.
    return bits[:aligned].view(torch.int64).sum() + bits[aligned:].sum(dtype=torch.int64)


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:20]}… {_digest(text)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]

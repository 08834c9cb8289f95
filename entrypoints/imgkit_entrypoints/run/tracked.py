"""The objects whose state a run saves and restores."""

from __future__ import annotations

import dataclasses
import hashlib
import io
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.run import checkpoints, resumable, shard_file, shard_index, sharded
from imgkit_entrypoints.run.checkpoints import FoundCheckpoint, differences, each_leaf, each_tensor, on_host
from imgkit_entrypoints.run.ranks import Ranks, told
from imgkit_entrypoints.run.readable import refuse_unreadable, unfit
from imgkit_entrypoints.run.sharded import ShardedObjects, Staged, other

SHARDS_OF = "sharded"
RESERVED = ("random", "pass", SHARDS_OF)
"""Names of a checkpoint's own parts."""
OF_RANKS, SHARDED = ".ranks", ".sharded"
"""Ends of names: of a part with one state for each rank, and of an object that is divided among them."""
OWN_PARTS = ("random.ranks.pt", "pass.ranks.pt")
"""Parts of every checkpoint: the random states of all ranks, now and at the start of the pass."""
SHARDING = ("FullyShardedDataParallel", "DeepSpeedEngine", "ZeroRedundancyOptimizer")
"""Classes that share a model or an optimizer among the ranks; their state_dict may be a collective call."""
SHARDS = ("DTensor", "ShardedTensor")
"""Classes of tensors that are divided among the ranks."""
WRAPPERS = {"DistributedDataParallel": "module", "OptimizedModule": "_orig_mod"}
"""Classes around a model, of DDP and of torch.compile, and the attribute that holds the model."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types of whole numbers by their bytes."""
MOST_COMPARED, MOST_ELEMENTS = 2048, 8192
"""Values of one object, and elements of one tensor, up to which ranks compare them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """What a rank sends of its states before any rank keeps one."""

    what: str = ""
    """Why one of them cannot be kept; empty: all can."""
    hint: str = ""
    names: str = ""
    digests: Mapping[str, str] = field(default_factory=dict)
    """Digests of the values that must not differ between ranks, by the name of the object."""


class Tracked:
    """Objects by name. Rank 0's state counts for all, or there is one for each rank."""

    def __init__(self) -> None:
        self._parts: dict[str, Any] = {}
        self._by_rank: set[str] = set()
        self._sharded: set[str] = set()
        self._before: dict[str, dict[str, str]] = {}
        """Values that must not differ between ranks, when the run began."""

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._parts.values())

    def names(self) -> list[str]:
        """The names, sorted."""
        return sorted(self._parts)

    @property
    def only_checkpoints(self) -> bool:
        """Whether another library keeps all of the state."""
        return all(is_a(one, ("LibraryCheckpoint",)) for one in self._parts.values())

    def add(self, name: str, value: Any, *, by_rank: bool = False) -> None:
        """Add an object; `by_rank`: each rank has a state of its own, as it always has of a loader.

        Raises
        ------
        UsageError : it has no state that a checkpoint can keep.
        """
        if name in RESERVED or name in self._parts:
            why = "a part of every checkpoint" if name in RESERVED else "tracked already"
            raise unfit(f"the name {name} is {why}", "choose another name")
        if not resumable.has_state(value):
            if hasattr(value, "__iter__"):
                resumable.refuse_without_position(value)
                return  # `steps` counts its batches
            what = f"{name} is a {type(value).__name__} without a state"
            raise unfit(what, "track objects with state_dict and load_state_dict")
        if sharded.is_sharded(value) and not by_rank:
            sharded.refuse_unfit(name, value, dist.get_world_size())
            self._parts[name] = value
            self._sharded.add(name)
            return
        state = _state(name, value)
        refuse_unreadable(name, state)
        if by_rank or _is_loader(value):
            self._by_rank.add(name)
        self._parts[name] = value
        self._note(name, state)

    def _note(self, name: str, state: Any) -> None:
        if name not in self._by_rank:
            self._before[name] = _compared_of(self._parts[name], state)

    def kept(self, here: Ranks) -> tuple[dict[str, Any], dict[str, bytes]]:
        """What a checkpoint keeps of this rank, by part: its states, and its rows; a collective call.

        Raises
        ------
        UsageError : as `agreed`.
        """
        states = self.agreed(here, "run.save")
        parts = {f"{part}.pt": name for part, name in self._own().items() if name in states}
        rows = {part: states[name] for part, name in parts.items() if name in self._by_rank}
        return {part: states[name] for part, name in parts.items() if part not in rows}, rows

    @property
    def has_shards(self) -> bool:
        """Whether an object is sharded."""
        return bool(self._sharded)

    def staged(self, here: Ranks) -> Staged:
        """This rank's pieces of the sharded objects, in host memory."""
        return self._shards().staged(here, on_host)

    def _shards(self) -> ShardedObjects:
        return ShardedObjects({name: self._parts[name] for name in sorted(self._sharded)}, _plain_keys)

    def agreed(self, here: Ranks, call: str) -> dict[str, Any]:
        """Return this rank's states, as bytes where each rank has its own; a collective call.

        Raises
        ------
        UsageError : on every rank, if one cannot keep its states, or if rank 0's state cannot count for all.
        """
        states, now, saves = {}, {}, call == "run.save"
        look = _Look(names=_listed(self._own()))
        try:
            if self.has_shards:
                now[SHARDS_OF] = self._shards().compared()
            for name, one in self._parts.items():
                if name in self._sharded:
                    continue
                states[name] = _state(name, one)
                refuse_unreadable(name, states[name])
                if name in self._before:
                    # Before the run begins, DDP may not have made the weights equal yet.
                    if not _is_large(one) or (saves and here.world_size > 1):
                        now[name] = _compared_of(one, states[name])
                elif name in self._by_rank:
                    states[name] = _written(states[name])
            digests = {name: _digest(repr(values)) for name, values in now.items()}
            look = dataclasses.replace(look, digests=digests)
        except UsageError as error:
            look = dataclasses.replace(look, what=error.what, hint=error.hint or "")
        every = here.gather(look, _Look, call=call)
        for rank, one in enumerate(every):
            if one.what:
                raise UsageError(f"rank {rank}: {one.what}", where=call, hint=one.hint)
        if len({one.names for one in every}) > 1:
            raise UsageError(
                f"the ranks track different objects: {told([one.names for one in every])}",
                where=call,
                hint="all ranks must track the same names",
            )
        differing = [name for name in now if len({one.digests[name] for one in every}) > 1]
        if differing:
            self._refuse_differing({name: now[name] for name in sorted(differing)}, here, call)
        return states

    def _refuse_differing(self, now: Mapping[str, Mapping[str, str]], here: Ranks, call: str) -> None:
        """Raise UsageError, on every rank, for a value that ranks other than rank 0 have set."""
        for name, values in now.items():
            if name == SHARDS_OF:
                raise UsageError(
                    "the sharded objects differ between the ranks",
                    where=call,
                    hint="build the same model, optimizer and parameter groups on all ranks",
                )
            before = self._before[name]
            mine = {path: [before.get(path, ""), values.get(path, "")] for path in {**before, **values}}
            every = here.gather(mine, Mapping[str, list[str]], call=call)
            for path in sorted({path for one in every for path in one}):
                begun, ended = zip(*(one.get(path, ["", ""]) for one in every), strict=True)
                begun_alike = len(set(begun)) == 1 or _is_large(self._parts[name])
                only_rank_0 = begun_alike and ended[1:] == begun[1:]
                if len(set(ended)) > 1 and not only_rank_0:
                    ddp = "wrap the model in DDP; or " if _is_large(self._parts[name]) else ""
                    own = f"run.track_per_rank({name}={name})"
                    raise UsageError(
                        f"{name}{path} differs between the ranks, and a resume would give that of rank 0 to "
                        f"all: {told(ended)}",
                        where=call,
                        hint=f"{ddp}{own} in place of run.track: one for each rank",
                    )

    def _own(self) -> dict[str, str]:
        """The names of the objects, by those of their parts."""
        ends = {**dict.fromkeys(self._by_rank, OF_RANKS), **dict.fromkeys(self._sharded, SHARDED)}
        return {f"{name}{ends.get(name, '')}": name for name in self._parts}

    def restore(self, found: FoundCheckpoint, here: Ranks) -> None:
        """Give every object its state from a checkpoint, one after the other; a collective call.

        Raises
        ------
        UsageError : it holds other objects or another model, and nothing is loaded; or states of another
            number of ranks, or of another object.
        """
        own_parts = {*OWN_PARTS, checkpoints.STATE, shard_index.INDEX}
        shards = {part for part in found.parts if part.endswith(shard_file.SUFFIX)}
        kept = {part.removesuffix(".pt") for part in found.parts if part not in own_parts | shards}
        own = self._own()
        if found.shards is not None:
            kept |= {f"{name}{SHARDED}" for name in found.shards.index.objects()}
        if kept != own.keys():
            raise UsageError(
                f"the checkpoint contains {_listed(kept)}, and this program tracks {_listed(own)}",
                where=str(found.where),
                hint="track the same objects under the same names, or start a new run in another folder",
            )
        parts = {name: f"{part}.pt" for part, name in sorted(own.items()) if name not in self._sharded}
        load_shards = self._shards().loading(found.shards) if found.shards is not None else lambda: None
        for name in parts:
            if name not in self._by_rank and _is_large(self._parts[name]):
                self._refuse_other(name, found.mapped(parts[name]), str(found.where))
        load_shards()
        for name in parts:
            self._load(name, self._in_part(name, found, here), str(found.where))

    def _in_part(self, name: str, found: FoundCheckpoint, here: Ranks) -> Any:
        """This rank's state of an object in a checkpoint."""
        if name not in self._by_rank:
            return found.mapped(f"{name}.pt")
        rows = found.rows(f"{name}{OF_RANKS}.pt")
        if len(rows) == here.world_size:
            return rows[here.rank]
        regroup = getattr(self._parts[name], "regroup_state_dicts", None)
        if regroup is None:
            raise UsageError(
                f"{name} has a state for each of {len(rows)} ranks, but there are {here.world_size}",
                where=str(found.where),
                hint="start as many ranks; or give the object a method regroup_state_dicts(states, rank, "
                "world_size), which returns the state of a rank from those of all ranks before",
            )
        return regroup([rows[rank] for rank in range(len(rows))], here.rank, here.world_size)

    def _refuse_other(self, name: str, state: Any, where: str) -> None:
        """Raise UsageError if the state of a model or an optimizer is that of a different one."""
        value = self._parts[name]
        if isinstance(value, nn.Module):
            live = value.state_dict()
            names = _plain_keys(value, live)
            why = differences(state, {names[key]: one for key, one in live.items()})
        else:
            saved, now = (
                [len(group["params"]) for group in groups]
                for groups in (state["param_groups"], value.param_groups)
            )
            why = f"groups of {saved} weights in the checkpoint, and of {now} now" if saved != now else None
        if why:
            raise other(name, why, where)

    def _load(self, name: str, state: Any, where: str) -> None:
        """Give an object its state, whose tensors may lie in a file: it keeps none of them.

        Raises
        ------
        UsageError : the state is that of another object.
        """
        value = self._parts[name]
        try:
            if isinstance(value, nn.Module):
                plain = _plain_keys(value, value.state_dict())
                own = {key: state[one] for key, one in plain.items()}
                value.load_state_dict(own)
                if _memory(value.state_dict()) & _memory(own):  # a module with its own way to load
                    value.load_state_dict(on_host(own))
            elif isinstance(value, torch.optim.Optimizer):
                value.load_state_dict(_in_place(state, value))
            else:
                value.load_state_dict(on_host(state))
        except (ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
            raise UsageError(
                f"the state of {name} does not fit: {str(error).partition(chr(10))[0]}",
                where=where,
                hint="build the same objects, or start a new run in another folder",
            ) from error
        self._note(name, _state(name, value))

    def noted(self, loader: Any, found: FoundCheckpoint) -> Callable[[], None]:
        """Note the states of this rank, and return what brings them back; both are collective calls.

        Not those of loaders, which belong to their iterators, nor of `loader`. Of what is in the checkpoint
        bit by bit, as almost all is after a restore, there is no copy.
        """
        if self.has_shards:
            raise UsageError(
                f"{_listed(self._sharded)} is sharded, and the program has a DDP model, too",
                where="run.steps",
                hint="use DistributedDataParallel(..., find_unused_parameters=True), or shard all models",
            )

        def saved(name: str) -> Any:
            return None if name in self._by_rank else found.mapped(f"{name}.pt")

        noted = {
            name: each_tensor(_state(name, one), _unlike(saved(name)))
            for name, one in self._parts.items()
            if one is not loader and (not _is_loader(one) or hasattr(one, "__next__"))
        }

        def bring_back() -> None:
            for name, state in noted.items():
                self._load(name, _with_saved(state, saved(name)), "the state before the first step")

        return bring_back


def _listed(parts: Collection[str]) -> str:
    ends = {OF_RANKS: " of each rank", SHARDED: " (sharded)"}
    shown = (
        next((one.removesuffix(end) + words for end, words in ends.items() if one.endswith(end)), one)
        for one in parts
    )
    return ", ".join(sorted(shown)) or "nothing"


def _is_large(value: object) -> bool:
    return isinstance(value, nn.Module | torch.optim.Optimizer)


def _is_loader(value: object) -> bool:
    return hasattr(value, "__iter__") and not _is_large(value)


def is_a(value: object, names: Collection[str]) -> bool:
    """Whether the class of `value` is one of these; their modules need not be imported for it."""
    return any(kind.__name__ in names for kind in type(value).__mro__)


def _state(name: str, value: Any) -> Any:
    """The state of an object; that of a model has the same keys whatever is wrapped around which part."""
    parts = value.modules() if isinstance(value, nn.Module) else (value,)
    if any(is_a(part, SHARDING) for part in parts):
        raise _sharded(name)
    for where, one in _parameters(value):
        if is_a(one, SHARDS) or getattr(one, "_fsdp_flattened", False):  # FSDP1 marks its parameters by this
            raise _sharded(name + where)
    try:
        state = value.state_dict()
    except Exception as error:  # the object is not ours
        raise unfit(
            f"the state of {name}, a {type(value).__name__}, cannot be read: {error}",
            "a loader of accelerate has a state only with use_stateful_dataloader=True",
        ) from error
    for where, one in _leaves(state):
        if is_a(one, SHARDS):
            raise _sharded(name + where)
    if not isinstance(value, nn.Module):
        return state
    names = _plain_keys(value, state)
    return {names[key]: one for key, one in state.items()}


def _parameters(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, nn.Module):
        yield from ((f".{name}", one) for name, one in value.named_parameters())
    elif isinstance(value, torch.optim.Optimizer):
        for number, group in enumerate(value.param_groups):
            yield from ((f".param_groups[{number}]", one) for one in group["params"])


def _leaves(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """The values within dicts, lists and tuples, and where they are."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _leaves(one, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            yield from _leaves(one, f"{where}[{number}]")
    else:
        yield where, value


def _sharded(what: str) -> UsageError:
    return unfit(
        f"{what} is sharded over the ranks, and no rank has all of it",
        "shard models by fully_shard (FSDP2); or let its library save to the next_path() of a "
        "LibraryCheckpoint(run) where run.due() says so: docs/howto/own-loop.md",
    )


def _plain_keys(model: nn.Module, state: Mapping[str, Any]) -> dict[str, str]:
    """The keys of a model's state, and what they would be without wrappers."""
    inner = [
        (f"{name}." if name else "", f"{attribute}.")
        for name, one in model.named_modules(remove_duplicate=False)
        for kind, attribute in WRAPPERS.items()
        if is_a(one, (kind,))
    ]

    def plain(key: str) -> str:
        for outer, attribute in reversed(inner):  # the innermost comes last
            if key.startswith(outer + attribute):
                key = outer + key.removeprefix(outer + attribute)
        return key

    return {key: plain(key) for key in state}


def _compared_of(value: Any, state: Any) -> dict[str, str]:
    """What of an object must not differ between ranks, as short texts; of a model, its parameters alone."""
    if isinstance(value, nn.Module):
        return _sums({f".{name}": one for name, one in value.named_parameters()})
    return _sums(dict(_leaves(state))) if _is_large(value) else _compared(state)


def _sums(values: Mapping[str, Any]) -> dict[str, str]:
    """Sums over the bits of each tensor, which are made on its device, and other values as short texts."""
    found = {path: _short(repr(one)) for path, one in values.items() if not isinstance(one, Tensor)}
    by_device: dict[torch.device, dict[str, Tensor]] = {}
    for path, one in values.items():
        if isinstance(one, Tensor) and one.layout == torch.strided and not one.is_meta:
            by_device.setdefault(one.device, {})[path] = _sum_of_bits(one)
    for sums_of in by_device.values():
        every = torch.stack([*sums_of.values()]).tolist()
        found.update(
            {path: f"bits {one & (1 << 64) - 1:x}" for path, one in zip(sums_of, every, strict=True)}
        )
    return found if len(found) <= MOST_COMPARED else {"": _digest(repr(found))}


def _sum_of_bits(value: Tensor) -> Tensor:
    bits = _bits(value)
    words = bits.reshape(-1) if bits.is_contiguous() else bits
    whole = words.numel() * words.element_size() // 8 * 8 // words.element_size()
    if not bits.is_contiguous() or words.data_ptr() % 8 or not whole:
        return bits.sum(dtype=torch.int64)
    # Measured on a CPU: 25 times as fast as the sum of 32-bit words, which torch widens one by one.
    return words[:whole].view(torch.int64).sum() + words[whole:].sum(dtype=torch.int64)


def _bits(value: Tensor) -> Tensor:
    flat = torch.view_as_real(value.detach()) if value.is_complex() else value.detach()
    return flat.view(_BITS[flat.element_size()])


_SAVED = object()
"""Stands for a tensor that is in the checkpoint."""


def _unlike(saved: Any) -> Callable[[Tensor, tuple[object, ...]], Any]:
    """Return what copies tensors to the host but for those that `saved` has."""

    def noted(value: Tensor, where: tuple[object, ...]) -> Any:
        kept = _at(saved, where)
        fits = isinstance(kept, Tensor) and (kept.dtype, kept.shape) == (value.dtype, value.shape)
        are_plain = fits and value.layout == kept.layout == torch.strided
        if are_plain and torch.equal(_bits(value), _bits(kept).to(value.device)):
            return _SAVED
        return on_host(value)

    return noted


def _with_saved(noted: Any, saved: Any) -> Any:
    """Put the tensors of `saved` where `_unlike` has left them out."""
    return each_leaf(noted, lambda one, where: _at(saved, where) if one is _SAVED else one)


def _at(value: Any, where: tuple[Any, ...]) -> Any:
    """What is at a path in dicts, lists and tuples; None: nothing."""
    for key in where:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def _memory(values: Any) -> set[int]:
    """Where in memory the tensors within `values` lie."""
    tensors = [one for _, one in _leaves(values) if isinstance(one, Tensor) and one.layout == torch.strided]
    return {one.untyped_storage().data_ptr() for one in tensors if one.numel()}


def _in_place(saved: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Copy a saved state into the tensors that the optimizer has; of others, return copies.

    torch would make a second state while the first is still there, and keep the memory of `saved`.
    """
    live = optimizer.state_dict()

    def copied(value: Tensor, where: tuple[object, ...]) -> Any:
        own = _at(live, where) if where[0] == "state" else None
        if isinstance(own, Tensor) and (own.dtype, own.shape) == (value.dtype, value.shape):
            return own.copy_(value)
        return on_host(value)

    with torch.no_grad():
        return each_tensor(saved, copied)


def _compared(state: Any, where: str = "") -> dict[str, str]:
    """What must not differ between ranks, as short texts: all but tensors of fractions and large ones."""
    if isinstance(state, Mapping):
        inner = [_compared(one, f"{where}[{key!r}]") for key, one in state.items()]
        found = {path: text for one in inner for path, text in one.items()}
        return found if len(found) <= MOST_COMPARED else {where: _digest(repr(found))}
    tensors = [one for _, one in _leaves(state) if isinstance(one, Tensor)]
    if not tensors:  # sets have another order in each process
        return {where: _short(repr(sorted(state, key=repr) if isinstance(state, set) else state))}
    whole = [one for one in tensors if not (one.is_floating_point() or one.is_complex())]
    texts = [repr(one.tolist()) for one in whole if one.numel() <= MOST_ELEMENTS]
    return {where: _short(", ".join(texts))} if texts else {}


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:20]}… {_digest(text)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _written(state: Any) -> bytes:
    content = io.BytesIO()
    torch.save(each_leaf(state, lambda one, _: one), content)
    return content.getvalue()

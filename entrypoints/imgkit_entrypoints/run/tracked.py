"""Track the objects whose state a run saves and restores, and compare their states between ranks."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from imgkit_entrypoints.errors import UsageError, join_names
from imgkit_entrypoints.run import state_tree
from imgkit_entrypoints.run.checkpoint import INDEX, Checkpoint
from imgkit_entrypoints.run.ranks import MAX_NAMES, Ranks, ranks_by_value
from imgkit_entrypoints.run.state_tree import TensorRef, is_dtensor, list_leaves
from imgkit_entrypoints.run.state_values import describe_values, digest_state, digest_text, has_weights

# Names that a checkpoint uses for its own keys.
RESERVED = (INDEX, "rank")
# Classes that divide a model or an optimizer among the ranks. Their state_dict may be a collective call.
SHARDED_BY_OTHERS = ("FullyShardedDataParallel", "DeepSpeedEngine", "ZeroRedundancyOptimizer")
# Wrapper classes of DDP and torch.compile, with the attribute that contains the model.
WRAPPERS = {"DistributedDataParallel": "module", "OptimizedModule": "_orig_mod"}
# The first release of torch in which `fully_shard` and DTensor are public.
OLDEST_TORCH = (2, 6)


@dataclass(slots=True)
class Snapshot:
    """The states of the tracked objects in the form for a checkpoint, by the names of the objects."""

    trees: dict[str, bytes] = field(default_factory=dict)
    """Pickled states with a `TensorRef` in place of each tensor."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """The tensors of all states, by the keys in the references."""
    rank_values: dict[str, bytes] = field(default_factory=dict)
    """Pickled states of the objects that were tracked per rank."""
    digests: dict[str, str] = field(default_factory=dict)
    """Digests of the values that must not differ between ranks."""


class _RankReport(NamedTuple):
    """Values that the ranks compare before a checkpoint is taken."""

    names: str
    """The names of the tracked objects: ``model, optimizer``."""
    digests: dict[str, str]
    """The digests in this rank's `Snapshot`."""
    error: UsageError | None
    """Why this rank cannot save a state, or None if it can."""


class TrackedObjects:
    """The tracked objects by name. A checkpoint stores rank 0's state of an object, or one per rank."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        # Names of the objects with one state for each rank.
        self._per_rank_names: set[str] = set()
        # For each object, the values that must not differ between ranks, as they were when it was added or
        # loaded. The keys are the name of the object and the path of the value.
        self._loaded_values: dict[str, dict[str, str]] = {}

    @property
    def optimizers(self) -> list[Optimizer]:
        """The tracked optimizers."""
        return [stateful for stateful in self.objects.values() if isinstance(stateful, Optimizer)]

    @property
    def has_shards(self) -> bool:
        """Whether a model or an optimizer is divided among the ranks."""
        return any(map(is_sharded, self.objects.values()))

    def add(self, name: str, stateful: Any, *, per_rank: bool) -> None:
        """Add an object with `state_dict` and `load_state_dict`.

        Parameters
        ----------
        per_rank : whether a checkpoint stores one state for each rank. This is always so for a loader.

        Raises
        ------
        UsageError : the name is in use, or the object has no state, has a state that pickle cannot write, or
            is sharded in another way than by FSDP2.
        """
        if name in self.objects:
            raise _track_error(f"the name {name} is already tracked", "choose another name")
        if name in RESERVED or "/" in name:
            raise _track_error(f"the name {name} is reserved", "choose another name")
        if not has_state(stateful):
            problem = f"{name} is a {type(stateful).__name__} without a state"
            raise _track_error(problem, "track objects with state_dict and load_state_dict")
        _refuse_unsupported_shards(name, stateful)
        state = state_of(name, stateful)
        # Test this now, and not hours later at the first save.
        problem = state_tree.find_unpicklable(name, state)
        if problem:
            raise _unloadable_error(problem)
        self.objects[name] = stateful
        if per_rank or _is_loader(stateful):
            self._per_rank_names.add(name)
        else:
            # A checkpoint stores only rank 0's state. `_refuse_difference` compares later values with these.
            self._loaded_values[name] = describe_values(stateful, state)

    def digests(self) -> dict[str, str]:
        """Return a digest of the state of each object except loaders, to find changes in this process."""
        digests = {}
        for name, stateful in self.objects.items():
            if not _is_loader(stateful):
                digests[name] = digest_state(state_of(name, stateful))
        return digests

    def snapshot(self, ranks: Ranks, call: str) -> Snapshot:
        """Compare the states between the ranks, and return them in the form for a checkpoint.

        This is a collective call: all ranks must make it.

        Parameters
        ----------
        call : the call of the program, such as ``run.save``, for messages.

        Raises
        ------
        UsageError : (on every rank) a rank has a state that cannot be saved. Or the ranks have different
            states of an object of which a checkpoint stores only rank 0's state.
        """
        own_names = sorted(self.objects)  # in the same order on all ranks, so that shards get equal keys
        own_state = Snapshot()
        own_error: UsageError | None = None
        try:
            for name in own_names:
                is_compared = ranks.world_size > 1 and self._must_be_equal(name, call)
                self._add_state(own_state, name, is_compared=is_compared)
        except UsageError as error:  # raised below, because the other ranks wait for this rank's report
            own_error = error
        own_report = _RankReport(", ".join(own_names) or "nothing", own_state.digests, own_error)
        reports = ranks.gather(own_report, call=call)
        _refuse_bad_reports(reports, call)
        # All ranks have the same reports, so they all call `_refuse_difference`, a collective call, or none.
        for name in own_state.digests:  # only the names of compared objects
            if len({report.digests[name] for report in reports}) > 1:
                self._refuse_difference(name, ranks, call)
        return own_state

    def _must_be_equal(self, name: str, call: str) -> bool:
        """Return whether an object must have the same values on all ranks in this call of the program."""
        if name in self._per_rank_names:
            return False
        # Before the first step, weights may differ, because DDP may not have made them equal yet.
        return call == "run.save" or not has_weights(self.objects[name])

    def _add_state(self, snapshot: Snapshot, name: str, *, is_compared: bool) -> None:
        """Add the state of the object `name` to `snapshot`.

        Parameters
        ----------
        is_compared : whether to add a digest, by which the ranks compare their states.

        Raises
        ------
        UsageError : pickle cannot write the state.
        """
        state = state_of(name, self.objects[name])
        try:
            if name in self._per_rank_names:
                snapshot.rank_values[name] = pickle.dumps(state_tree.copy_to_host(state))
            else:
                used_keys = snapshot.tensors.keys()  # must not be given to tensors of this object again
                tree, tensors = state_tree.split_tensors(name, state, used_keys)
                # The tree is pickled now, because training goes on while a thread writes the checkpoint.
                snapshot.trees[name] = pickle.dumps(tree)
                snapshot.tensors.update(tensors)
        except Exception as error:  # pickle and the classes of a program raise many types of errors
            problem = state_tree.find_unpicklable(name, state) or f"{name}: {error}"
            raise _unloadable_error(problem) from error
        if is_compared:
            values = describe_values(self.objects[name], state)
            snapshot.digests[name] = digest_text(repr(values))

    def _refuse_difference(self, name: str, ranks: Ranks, call: str) -> None:
        """Raise UsageError on every rank if a resume would overwrite values that differ between the ranks.

        A checkpoint stores only rank 0's state of the object, and a resume loads it on all ranks. This is a
        collective call: all ranks must make it, after they have seen that the digests of their states differ.
        """
        stateful = self.objects[name]
        own_values = describe_values(stateful, state_of(name, stateful))
        # The first values are those from `run.track` or from the last restore.
        values_of_ranks = ranks.gather((self._loaded_values[name], own_values), call=call)
        first_values, latest_values = zip(*values_of_ranks, strict=True)
        paths = set[str]().union(*first_values, *latest_values)
        # DDP makes the weights of a model equal only after they were tracked.
        may_begin_different = has_weights(stateful)
        # One path, such as "['last_epoch']", with the values of all ranks at a time.
        for path in sorted(paths):
            first = [rank_values.get(path, "") for rank_values in first_values]
            latest = [rank_values.get(path, "") for rank_values in latest_values]
            if not _may_share_rank_0_value(first, latest, may_begin_different=may_begin_different):
                raise _difference_error(stateful, name, path, latest, call)

    def load(self, checkpoint: Checkpoint, rank_values: Mapping[str, bytes]) -> None:
        """Load the state of every object from a checkpoint, one after the other.

        This is a collective call: all ranks must make it.

        Parameters
        ----------
        rank_values : pickled states of the objects that were tracked per rank.

        Raises
        ------
        UsageError : the checkpoint contains other objects or another model. Then nothing is loaded. Or an
            object refuses its state. Then others may already be loaded.
        """
        self._refuse_other_names(checkpoint, rank_values.keys())
        trees = {name: checkpoint.unpickle_tree(name) for name in checkpoint.names}
        # Compare all objects first, so that nothing is loaded if one of them differs.
        for name, tree in trees.items():
            self._refuse_other_object(name, tree, checkpoint)
        for name, tree in trees.items():
            shards = _make_shards(self.objects[name], name, tree, checkpoint)
            self._load_object(name, checkpoint.state(name, shards), checkpoint)
        # The states of this rank only. No other rank waits for them.
        for name, data in rank_values.items():
            state = pickle.loads(data)  # noqa: S301 - SECURITY.md: it is trusted like code
            self._load_object(name, state, checkpoint)

    def _refuse_other_names(self, checkpoint: Checkpoint, saved_per_rank: Collection[str]) -> None:
        """Raise UsageError if the names in the checkpoint differ from those of the tracked objects."""
        shared_names = self.objects.keys() - self._per_rank_names
        if set(checkpoint.names) == shared_names and set(saved_per_rank) == self._per_rank_names:
            return
        saved = _list_names(checkpoint.names, saved_per_rank)
        tracked = _list_names(shared_names, self._per_rank_names)
        raise UsageError(
            f"the checkpoint contains {saved}, and this program tracks {tracked}",
            where=str(checkpoint.folder),
            hint="track the same objects under the same names, or start a new run in another folder",
        )

    def _refuse_other_object(self, name: str, tree: Any, checkpoint: Checkpoint) -> None:
        """Raise UsageError if the weights of a saved model or optimizer do not match the tracked object.

        `tree` is the saved state, with a `TensorRef` in place of each tensor.
        """
        stateful = self.objects[name]
        difference = ""
        if isinstance(stateful, Optimizer):
            difference = _find_group_difference(tree, stateful)
        elif isinstance(stateful, nn.Module):
            difference = _find_model_difference(tree, state_of(name, stateful), checkpoint)
        if difference:
            raise UsageError(
                f"the checkpoint contains a different {name}: {difference}",
                where=str(checkpoint.folder),
                hint="build the same objects, or start a new run in another folder; nothing was loaded",
            )

    def _load_object(self, name: str, state: Any, checkpoint: Checkpoint) -> None:
        """Load `state` into the object `name`.

        Raises
        ------
        UsageError : the object refuses the state.
        """
        stateful = self.objects[name]
        try:
            # A model is saved with keys without wrappers: "weight" for "module.weight" in DDP.
            if isinstance(stateful, nn.Module):
                plain_keys = _map_to_plain_keys(stateful, stateful.state_dict())
                state = {key: state[plain_key] for key, plain_key in plain_keys.items()}
            stateful.load_state_dict(state)
        except (ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
            first_line, _, _ = str(error).partition("\n")
            raise UsageError(
                f"the state of {name} does not fit: {first_line}",
                where=str(checkpoint.folder),
                hint="build the same objects, or start a new run in another folder",
            ) from error
        # The loaded values are the new basis for comparisons between the ranks. Objects with one state for
        # each rank are not compared.
        if name in self._loaded_values:
            self._loaded_values[name] = describe_values(stateful, state_of(name, stateful))


def has_state(value: object) -> bool:
    """Return whether `value` has the methods ``state_dict`` and ``load_state_dict``."""
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def _is_loader(value: object) -> bool:
    """Return whether `value` is a loader. Some models, such as nn.Sequential, are iterable, too."""
    return hasattr(value, "__iter__") and not has_weights(value)


def iterate_parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the parameters in all groups of an optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]


def is_sharded(stateful: Any) -> bool:
    """Return whether an object is a model or an optimizer with parameters that are DTensors."""
    if isinstance(stateful, nn.Module):
        return any(map(is_dtensor, stateful.parameters()))
    return isinstance(stateful, Optimizer) and any(map(is_dtensor, iterate_parameters(stateful)))


def _has_class(value: object, names: Collection[str]) -> bool:
    """Return whether the class of `value` or one of its base classes has one of these names.

    Comparing names instead of classes avoids importing the modules of the classes.
    """
    return any(kind.__name__ in names for kind in type(value).__mro__)


def _track_error(problem: str, hint: str) -> UsageError:
    return UsageError(problem, where="run.track", hint=hint)


def _unloadable_error(problem: str) -> UsageError:
    hint = "keep only numbers, texts, lists, dicts and tensors in the state"
    return _track_error(f"{problem}, and no resume could load it again", hint)


def _refuse_unsupported_shards(name: str, stateful: Any) -> None:
    """Raise UsageError if an object is sharded (divided among the ranks) in a way that cannot be saved.

    Only objects that FSDP2 shards over all ranks can be saved, with torch 2.6 or newer. `SHARDED_BY_OTHERS`
    are classes of other libraries, which shard in their own way. `name` is only used in messages.
    """
    modules = stateful.modules() if isinstance(stateful, nn.Module) else [stateful]
    for module in modules:
        if _has_class(module, SHARDED_BY_OTHERS):
            raise _track_error(
                f"{name} is a {type(module).__name__}, whose state no rank has as a whole",
                "shard models by fully_shard (FSDP2); or let its library save to the next_path() of a "
                "LibraryCheckpoint(run): docs/guides/resume.md",
            )
    if not is_sharded(stateful):
        return
    major, minor, *_ = torch.__version__.split(".")
    if (int(major), int(minor)) < OLDEST_TORCH:
        raise _track_error(
            f"{name} is sharded, and this is torch {torch.__version__}",
            "use an image with torch 2.6 or newer (NGC 25.01), or wrap the model in DDP",
        )
    if isinstance(stateful, nn.Module):  # the parameters of an optimizer are those of a model
        for key, parameter in stateful.named_parameters():
            _refuse_parameter(f"{name}.{key}", parameter)


def _refuse_parameter(name: str, parameter: Any) -> None:
    """Raise UsageError if a parameter of a sharded model has no values yet, or is not on all ranks."""
    if parameter.is_meta:
        raise _track_error(f"{name} is on the meta device", "call run.track after model.to_empty()")
    if not is_dtensor(parameter):
        return
    world_size = torch.distributed.get_world_size()
    mesh_size = parameter.device_mesh.size()
    if mesh_size != world_size:
        hint = "use a mesh of all ranks, init_device_mesh(device, (REPLICAS, SHARDS))"
        raise _track_error(f"{name} is sharded over {mesh_size} of {world_size} ranks", hint)


def _refuse_bad_reports(reports: Sequence[_RankReport], call: str) -> None:
    """Raise UsageError if a rank cannot save a state, or if the ranks track different objects.

    Every rank has the reports of all ranks. So all ranks raise the same error, and none waits for another.
    """
    for rank, report in enumerate(reports):
        if report.error is not None:
            raise UsageError(f"rank {rank}: {report.error.what}", where=call, hint=report.error.hint)
    names_of_ranks = [report.names for report in reports]
    if len(set(names_of_ranks)) > 1:
        raise UsageError(
            f"the ranks track different objects: {ranks_by_value(names_of_ranks)}",
            where=call,
            hint="all ranks must track the same names",
        )


def _may_share_rank_0_value(
    first: Sequence[str], latest: Sequence[str], *, may_begin_different: bool
) -> bool:
    """Return whether a resume may load rank 0's value on all ranks.

    It may if the ranks have the same value now, or if only rank 0 has changed it, such as the best loss.

    Parameters
    ----------
    first : the value on each rank when the object was tracked.
    latest : the value on each rank now.
    may_begin_different : whether the first values may differ. This is so for the weights of a model, which
        DDP makes equal after they were tracked.
    """
    if len(set(latest)) == 1:
        return True
    began_equal = may_begin_different or len(set(first)) == 1
    is_set_by_rank_0 = latest[1:] == first[1:]
    return began_equal and is_set_by_rank_0


def _difference_error(stateful: Any, name: str, path: str, values: Sequence[str], call: str) -> UsageError:
    """Return the error for an object whose value at `path` differs between the ranks."""
    hint = f"run.track_per_rank({name}={name}) in place of run.track: one for each rank"
    if has_weights(stateful):
        hint = f"wrap the model in DDP; or {hint}"
    return UsageError(
        f"{name}{path} differs between the ranks, and a resume would give that of rank 0 to all: "
        f"{ranks_by_value(values)}",
        where=call,
        hint=hint,
    )


def _list_names(shared: Collection[str], per_rank: Collection[str]) -> str:
    """Return the names of objects for a message: ``loader of each rank, model``."""
    names = [*shared, *(f"{name} of each rank" for name in per_rank)]
    return ", ".join(sorted(names)) or "nothing"


def _find_group_difference(tree: Any, optimizer: Optimizer) -> str:
    """Return how the parameter groups of a saved optimizer differ from those of `optimizer`, or ``""``."""
    saved_sizes = [len(group["params"]) for group in tree["param_groups"]]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if saved_sizes == sizes:
        return ""
    return f"groups of {saved_sizes} weights in the checkpoint, and of {sizes} now"


def _find_model_difference(saved: Any, live: Mapping[str, Any], checkpoint: Checkpoint) -> str:
    """Return how the saved state of a model differs from its current state `live`, or ``""`` if it does not.

    Names, shapes and types are compared, but no values, because a resume replaces them. An example of a
    result is ``out.weight is (10, 20) in the checkpoint and (10, 30) in the model``.
    """
    saved_only = join_names([key for key in saved if key not in live], MAX_NAMES)
    live_only = join_names([key for key in live if key not in saved], MAX_NAMES)
    if saved_only or live_only:
        return f"{saved_only or 'nothing'} only in the checkpoint, {live_only or 'nothing'} only in the model"
    for key, leaf in saved.items():
        saved_value = leaf
        if isinstance(leaf, TensorRef):  # stands for a tensor that has not been read
            saved_value = checkpoint.tensors[leaf.key]  # has a shape and a dtype, like a tensor
        for describe in (_describe_shape, _describe_dtype):
            saved_description = describe(saved_value)
            live_description = describe(live[key])
            if saved_description != live_description:
                return f"{key} is {saved_description} in the checkpoint and {live_description} in the model"
    return ""


def _describe_shape(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return "no tensor" if shape is None else str(tuple(shape))


def _describe_dtype(value: Any) -> str:
    return str(getattr(value, "dtype", None))


def _make_shards(stateful: Any, name: str, tree: Any, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return DTensors into which each rank can read its part of a sharded model or optimizer.

    The keys are those of the tensors in the checkpoint. `_refuse_other_object` has compared the names and
    shapes before.

    Parameters
    ----------
    tree : the saved state, with a `TensorRef` in place of each tensor.
    """
    if not is_sharded(stateful):
        return {}
    if not isinstance(stateful, nn.Module):
        return _make_optimizer_shards(stateful, tree, checkpoint)
    shards = {}
    for parameter_name, tensor in state_of(name, stateful).items():
        if is_dtensor(tensor):
            reference = tree[parameter_name]
            shards[reference.key] = tensor
    return shards


def _make_optimizer_shards(optimizer: Optimizer, tree: Any, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return an empty DTensor, by key, for each sharded tensor in the saved state of an optimizer.

    A DTensor is a tensor of which each rank has a part. A new optimizer does not have these tensors yet, so
    the parts in the checkpoint are read into the result. Each DTensor is sharded like its parameter.
    """
    shards = {}
    # The keys of the state are indices of parameters. Adam has for the first parameter
    # {0: {"step": ..., "exp_avg": ..., "exp_avg_sq": ...}}.
    for index, parameter in enumerate(iterate_parameters(optimizer)):
        if not is_dtensor(parameter):
            continue
        for _, leaf in list_leaves(tree["state"].get(index)):
            if not isinstance(leaf, TensorRef):  # a number, which is stored in the tree itself
                continue
            saved = checkpoint.tensors[leaf.key]
            if saved.shape == parameter.shape:  # a tensor of another shape, such as "step", is not sharded
                shards[leaf.key] = torch.empty_like(parameter, dtype=saved.dtype, requires_grad=False)
    return shards


def state_of(name: str, stateful: Any) -> Any:
    """Return the state of an object. For a model, the keys do not contain wrappers such as DDP.

    Parameters
    ----------
    name : name of the object, for the message of an error.

    Raises
    ------
    UsageError : the object's ``state_dict`` raises an error.
    """
    try:
        state = stateful.state_dict()
    except Exception as error:  # the object belongs to the program and may raise anything
        raise _track_error(
            f"the state of {name}, a {type(stateful).__name__}, cannot be read: {error}",
            "docs/guides/resume.md shows how accelerate's own save_state is used",
        ) from error
    if isinstance(stateful, nn.Module):
        return _unwrap_state(stateful, state)
    return state


def _unwrap_state(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a model with keys without wrappers, and with one tensor for tied parameters.

    Tied parameters are a single parameter with several names, such as an embedding and an output layer.
    """
    # `state_dict` creates a new tensor for each name, so tied parameters must be found by the parameters.
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tied_tensors: dict[int, Any] = {}
    plain_state = {}
    for key, plain_key in _map_to_plain_keys(model, state).items():
        tensor = state[key]
        if key in parameters:
            tensor = tied_tensors.setdefault(id(parameters[key]), tensor)
        plain_state[plain_key] = tensor
    return plain_state


def _map_to_plain_keys(model: nn.Module, state: Mapping[str, Any]) -> dict[str, str]:
    """Return a dict from each key of a model's state to the key that it would have without wrappers.

    For a model in DDP, ``module.weight`` is mapped to ``weight``.
    """
    prefixes = _find_wrapper_prefixes(model)
    plain_keys = {}
    for key in state:
        plain_key = key
        # Several wrappers may be nested. Each turn removes one of them, the innermost first.
        for prefix, plain_prefix in prefixes:
            if plain_key.startswith(prefix):
                plain_key = plain_prefix + plain_key.removeprefix(prefix)
        plain_keys[key] = plain_key
    return plain_keys


def _find_wrapper_prefixes(model: nn.Module) -> list[tuple[str, str]]:
    """Return the prefixes of keys inside wrappers, innermost first, with the prefixes without the wrapper.

    A compiled layer of a model gives ``("layer._orig_mod.", "layer.")``.
    """
    prefixes = []
    for name, module in model.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        for kind, attribute in WRAPPERS.items():
            if _has_class(module, (kind,)):
                prefixes.append((f"{prefix}{attribute}.", prefix))
    prefixes.reverse()  # `named_modules` yields outer modules first
    return prefixes

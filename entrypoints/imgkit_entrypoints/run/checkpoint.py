"""Checkpoints by torch.distributed.checkpoint (DCP): written in the background, checked before they are read.

Rank 0 alone hands over what is equal on all ranks, with the bytes of each rank, and every rank its shards of
DTensors. Without shards rank 0 saves alone: else planning for 512 ranks of DDP would cost it 15 s of CPU.
`async_save` stalls training by 25 to 158 ms for 100 MB, so the tensors are copied to memory that stays, and
`dcp.save` runs in one thread, on a gloo group of its own.
"""

from __future__ import annotations

import dataclasses
import pickle
import secrets
import socket
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.run import disk
from imgkit_entrypoints.run.ranks import Ranks, with_new_group
from imgkit_entrypoints.run.state_tree import HostCopies, TensorRef, is_dtensor, join, leaves

Say = Callable[[str], None]
INDEX = "imgkit"
"""Key of the run's own values, such as its position, and of the trees of all objects."""
RANK = "rank/{}"
"""Key of what each rank keeps for itself: random states, and objects of `track_per_rank`."""

for text in ("torch.distributed is disabled, unavailable or uninitialized", "TypedStorage is deprecated"):
    warnings.filterwarnings("ignore", message=text)


class Groups:
    """The process groups of checkpoints: rank 0 alone, and all ranks for the threads that write shards."""

    def __init__(self, ranks: Ranks) -> None:
        """Open the group of rank 0; a collective call."""
        self._ranks = ranks
        self.rank_0 = dist.new_group([0], backend="gloo") if dist.is_initialized() else None
        self._all: Ranks | None = None

    def all_ranks(self) -> Ranks:
        """Return the ranks with a group that only one thread of each uses; the first call is collective."""
        if self._all is None:
            self._all = with_new_group(self._ranks)
        return self._all

    def close(self) -> None:
        """Free the groups."""
        for group in (self.rank_0, self._all and self._all.group):
            if group is not None and group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)


class _CopiesPlanner(DefaultSavePlanner):  # type: ignore[misc]
    """Plans by the live tensors, and writes the copies of their local parts."""

    def __init__(self, copies: Mapping[str, Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._copies = copies

    def resolve_data(self, write_item: Any) -> Any:
        copy = self._copies.get(write_item.index.fqn)
        return super().resolve_data(write_item) if copy is None else copy


class _Writer(FileSystemWriter):  # type: ignore[misc]
    """Raises an OSError where torch's serializer hides that of its file."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise _os_error(error) from error


def _os_error(error: BaseException) -> OSError:
    """Return the OSError behind an error of torch, which may have come from another rank."""
    for rank, (failure, _) in getattr(error, "failures", {}).items():
        reason = _os_error(failure)
        return OSError(reason.errno, f"rank {rank}: {reason.strerror}")
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause or OSError(0, f"{type(error).__name__}: {error}".partition("\n")[0])


class CheckpointWriter:
    """Takes checkpoints of a run, and writes them in the background while training goes on."""

    def __init__(self, run_folder: Path, keep: int, ranks: Ranks, groups: Groups, say: Say) -> None:
        self._folder, self._keep, self._say = run_folder / disk.FOLDER, keep, say
        self._ranks, self._groups = ranks, groups
        self._copies = HostCopies()
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None
        self._has_warned = False
        self.saved_step = -1
        """Step of the newest checkpoint that is safely written, or -1; `close` gives it to all ranks."""
        self.stalled_s = self.longest_stall_s = 0.0
        """Seconds in which training waited for this: of all calls, and of the longest `save`."""

    def save(self, step: int, index: bytes, tensors: Mapping[str, Tensor], rank_value: bytes) -> None:
        """Copy the state to host memory and write it in the background; a collective call.

        Parameters
        ----------
        index : the run's own values, and the trees of all objects.
        tensors : what is equal on all ranks, and DTensors; the same keys on all ranks.
        rank_value : what this rank keeps for itself.
        """
        start = time.perf_counter()
        rows = self._ranks.collect(rank_value)
        self._finish_writing()
        is_sharded = any(map(is_dtensor, tensors.values()))
        state: dict[str, Any] = {key: tensor for key, tensor in tensors.items() if is_dtensor(tensor)}
        if self._ranks.rank == 0:
            state = {**tensors, INDEX: index, **{RANK.format(rank): row for rank, row in enumerate(rows)}}
        if self._ranks.rank == 0 or is_sharded:
            local = {
                key: tensor.to_local() if is_dtensor(tensor) else tensor
                for key, tensor in state.items()
                if isinstance(tensor, Tensor)
            }
            group = self._groups.all_ranks() if is_sharded else None
            args = step, state, self._copies.take(local), group
            self._thread = threading.Thread(target=self._write, args=args)
            self._thread.start()
        stall_s = time.perf_counter() - start
        self.stalled_s, self.longest_stall_s = self.stalled_s + stall_s, max(self.longest_stall_s, stall_s)

    def _write(
        self, step: int, state: dict[str, Any], copies: Mapping[str, Tensor], ranks: Ranks | None
    ) -> None:
        """Write a checkpoint; of a sharded one, `ranks` has the group of these threads."""
        try:
            self._copies.wait()
            if self._ranks.rank == 0:
                self._lead(step, state, copies, ranks)
                self.saved_step = step
            elif ranks is not None and (folder := ranks.broadcast(None)):
                _write_files(folder, state, copies, ranks)
        except OSError as error:
            self._error = error
        except RuntimeError as error:  # another rank has ended
            self._error = _os_error(error)

    def _lead(
        self, step: int, state: dict[str, Any], copies: Mapping[str, Tensor], ranks: Ranks | None
    ) -> None:
        is_announced = False

        def fill(folder: Path) -> dict[str, disk.Row]:
            nonlocal is_announced
            is_announced = True
            if ranks is not None:
                ranks.broadcast(folder)
                return _write_files(folder, state, copies, ranks)
            alone = dataclasses.replace(self._ranks, world_size=1, group=self._groups.rank_0)
            return _write_files(folder, state, copies, alone)

        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            disk.write_checkpoint(self._folder, step, fill, keep=self._keep, warn=self._warn)
        finally:
            if ranks is not None and not is_announced:
                ranks.broadcast(None)

    def _warn(self, problem: str) -> None:
        if not self._has_warned:
            self._say(f"warning: {problem}; checkpoints are saved all the same")
        self._has_warned = True

    def _finish_writing(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None and self._ranks.rank == 0:
            newest = (
                "there is no older one" if self.saved_step < 0 else f"the newest is of step {self.saved_step}"
            )
            self._say(f"cannot write a checkpoint to {self._folder}: {self._error.strerror}; {newest}")
        self._error = None

    def close(self) -> None:
        """Wait for the last checkpoint; a collective call."""
        start = time.perf_counter()
        self._finish_writing()
        self.saved_step = self._ranks.broadcast(self.saved_step)
        self.stalled_s += time.perf_counter() - start


def _write_files(
    folder: Path, state: dict[str, Any], copies: Mapping[str, Tensor], ranks: Ranks
) -> dict[str, disk.Row]:
    """Write this rank's files, and return the rows of those of all `ranks`; a collective call of these.

    Raises
    ------
    OSError : a rank could not write its file.
    """
    try:
        dcp.save(
            state,
            storage_writer=_Writer(folder),
            planner=_CopiesPlanner(copies),
            process_group=ranks.group,
        )
    except (Exception, CheckpointException) as error:  # torch wraps those of all ranks in a BaseException
        raise _os_error(error) from error
    rows, failure = {}, None
    try:
        paths = [*folder.glob(f"__{ranks.rank}_*"), *([folder / ".metadata"] if ranks.rank == 0 else [])]
        rows = {path.name: disk.file_row(path) for path in paths}
    except OSError as error:
        failure = error
    for rank, (part, problem) in enumerate(ranks.gather((rows, failure))):
        if problem is not None:
            raise OSError(problem.errno, f"rank {rank}: {problem.strerror}")
        rows.update(part)
    return rows


class Checkpoint:
    """A valid checkpoint. Its methods are collective calls, and what they return is the same on all ranks.

    Rank 0 reads what is equal on all ranks, and the others get it: its node may be the only one that has it.
    """

    def __init__(self, folder: Path, step: int, ranks: Ranks) -> None:
        """Read its index.

        Raises
        ------
        UsageError : another program or another release of torch has written it.
        """
        self.folder, self.step = folder, step
        self._ranks = ranks
        tensors: dict[str, tuple[torch.Size, torch.dtype]] = {}
        index, world_size, problem = b"", 0, ""
        if ranks.rank == 0:
            try:
                items = FileSystemReader(folder).read_metadata().state_dict_metadata
                for key, item in items.items():
                    if isinstance(item, TensorStorageMetadata):
                        tensors[key] = item.size, item.properties.dtype
                world_size = sum(key.startswith(RANK.format("")) for key in items)
                index = self._load({INDEX: b""})[INDEX]
            except Exception as error:  # pickle raises many kinds for classes of another release
                problem = f"{type(error).__name__}: {error}".partition("\n")[0]
        problem, index, self.tensors, self.world_size = ranks.broadcast((problem, index, tensors, world_size))
        """Shape and type of each tensor by its key, and the number of ranks that have saved."""
        if problem:
            raise UsageError(
                f"torch {torch.__version__} cannot read this checkpoint: {problem}",
                where=str(folder),
                hint="use the torch that has written it, or a newer one; or name another folder",
            )
        self.run, self._trees = pickle.loads(index)  # noqa: S301 - SECURITY.md: it is trusted like code
        """The run's own values, and the pickled tree of each object."""

    @property
    def names(self) -> list[str]:
        """The names of the objects whose state counts for all ranks."""
        return sorted(self._trees)

    def tree(self, name: str) -> Any:
        """Return the state of an object with a `TensorRef` for each tensor; no collective call."""
        return pickle.loads(self._trees[name])  # noqa: S301 - SECURITY.md: it is trusted like code

    def state(self, name: str, shards: Mapping[str, Tensor] = MappingProxyType({})) -> Any:
        """Return the state of an object.

        Parameters
        ----------
        shards : DTensors by key, into which each rank reads its own part.
        """
        values: dict[str, Any] = dict(shards)
        if values:
            self._load(values)
        tree = self.tree(name)
        keys = {leaf.key for _, leaf in leaves(tree) if isinstance(leaf, TensorRef)}
        values.update(self.read(sorted(keys - values.keys())))
        return join(tree, values)

    def read(self, keys: Sequence[str]) -> dict[str, Tensor]:
        """Return whole tensors, in host memory."""
        tensors = {key: torch.empty(self.tensors[key][0], dtype=self.tensors[key][1]) for key in keys}
        if self._ranks.rank == 0 and tensors:
            self._load(tensors)
        for tensor in tensors.values():
            self._ranks.broadcast_tensor(tensor)
        return tensors

    def rank_value(self) -> Any:
        """Return what this rank kept for itself; what rank 0 kept if there were more or fewer ranks."""
        keys = [RANK.format(rank) for rank in range(self.world_size)]
        values = self._load(dict.fromkeys(keys, b"")) if self._ranks.rank == 0 else {}
        if self.world_size == self._ranks.world_size:
            data = self._ranks.scatter([values.get(key) for key in keys])
        else:
            data = self._ranks.broadcast(values.get(keys[0]))
        return pickle.loads(data)  # noqa: S301 - SECURITY.md: it is trusted like code

    def _load(self, values: dict[str, Any]) -> dict[str, Any]:
        """Read into the tensors of `values`, of DTensors this rank's part, and replace its bytes.

        `dcp.load` would do it with collectives: torch 2.3's also with ranks outside of the group, and all of
        them only to sort the keys.
        """
        reader = FileSystemReader(self.folder)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        metadata = reader.read_metadata()
        planner.set_up_planner(values, metadata, is_coordinator=True)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        reader.read_data(planner.finish_plan(plan), planner).wait()
        return values


def find_newest(path: Path, ranks: Ranks, say: Say) -> Checkpoint | None:
    """Find the newest valid checkpoint at `path`; None: there is none. A collective call.

    Rank 0 looks for it. All ranks together compare the files of a sharded one with its manifest.

    Raises
    ------
    UsageError : on every rank, if another node has a newer one than that of rank 0.
    """
    newest = next((checkpoint.name for checkpoint in disk.checkpoints_at(path)), "")
    nodes = ranks.gather((newest, socket.gethostname()), call="run.restore")
    if (last := max(nodes))[0] > nodes[0][0]:
        raise UsageError(
            f"{last[1]} has {last[0]}, and the newest checkpoint of rank 0 on {nodes[0][1]} is "
            f"{nodes[0][0] or 'none'}",
            where=str(path),
            hint="start the head on that node, or put the folder on a file system that all nodes share",
        )
    candidates = disk.candidates(path, say) if ranks.rank == 0 else iter(())
    while True:
        folder, step, rows = ranks.broadcast(next(candidates, (None, -1, {})))
        if folder is None:
            return None
        is_sharded = any(name.startswith("__1_") for name in rows)
        names = sorted(rows)[ranks.rank :: ranks.world_size] if is_sharded else sorted(rows)
        problem = disk.damage(folder, rows, names) if is_sharded or ranks.rank == 0 else ""
        problems = [text for text in ranks.gather(problem, call="run.restore") if text]
        if not problems:
            return Checkpoint(folder, step, ranks)
        if ranks.rank == 0:
            say(f"checkpoint skipped: {problems[0]}")


PATIENCE_S = 10.0
"""Time in which a file of another node appears; NFS remembers for some seconds that a name was absent."""


def refuse_unshared_folder(folder: Path, ranks: Ranks) -> None:
    """Raise UsageError, on every rank, if one does not see the same folder; names the hosts."""
    probe = folder / ranks.broadcast(f"{disk.WRITING}{secrets.token_hex(8)}")
    if ranks.rank == 0:
        probe.mkdir(parents=True)
    ranks.gather(None, call="run.restore")
    deadline = time.monotonic() + PATIENCE_S
    while not (is_seen := probe.exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    rows = ranks.gather((socket.gethostname(), is_seen), call="run.restore")
    if ranks.rank == 0:
        probe.rmdir()
    if hosts := sorted({host for host, is_seen in rows if not is_seen}):
        raise UsageError(
            f"sharded state needs a folder that all ranks see, and rank 0 on {rows[0][0]} does not share "
            f"this one with {', '.join(hosts)}",
            where=str(folder),
            hint="name a folder on a file system that all nodes share: Run.start(FOLDER), --run-dir or "
            "IMGKIT_RUN_DIR",
        )

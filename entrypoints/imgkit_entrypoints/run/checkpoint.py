"""Write checkpoints in the background with torch.distributed.checkpoint (DCP), and check and read them.

Rank 0 alone saves the values that are equal on all ranks, and the pickled values of each rank. Every rank
saves its own shards of DTensors. If there are no shards, only rank 0 takes part in the save: planning for 512
ranks of DDP would cost rank 0 15 s of CPU time. `async_save` of torch stalls training by 25 to 158 ms for 100
MB. So this module copies the tensors to host memory that is reused, and runs `dcp.save` in one thread, with a
gloo group of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import secrets
import socket
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.run import disk
from imgkit_entrypoints.run.ranks import Ranks, with_new_group
from imgkit_entrypoints.run.state_tree import (
    HostCopies,
    TensorRef,
    is_dtensor,
    join_tensors,
    list_leaves,
)

Say = Callable[[str], None]
# Key under which a checkpoint stores the position in the data and the trees of all objects.
INDEX = "imgkit"
# The keys ``rank/0``, ``rank/1``, ... store the values of each rank: random states, and the states of objects
# from `track_per_rank`.
RANK_PREFIX = "rank/"

# torch warns about `dcp.save` without a process group, which is intended, and about its own use of
# TypedStorage.
for text in ("torch.distributed is disabled, unavailable or uninitialized", "TypedStorage is deprecated"):
    warnings.filterwarnings("ignore", message=text)


class _CopiesPlanner(dcp.DefaultSavePlanner):  # type: ignore[misc]
    """Plans a checkpoint with the tensors of the model, but writes the copies of these tensors.

    The plan needs the original tensors, because a copy of a DTensor is only this rank's part of it.
    """

    def __init__(self, copies: Mapping[str, Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._copies = copies

    def resolve_data(self, write_item: Any) -> Any:
        """Return the data to write for an item of the plan: the copy, if there is one."""
        copy = self._copies.get(write_item.index.fqn)
        return super().resolve_data(write_item) if copy is None else copy


class _FileWriter(dcp.FileSystemWriter):  # type: ignore[misc]
    """A writer that raises the OSError of a file that cannot be written. torch's serializer hides it."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise _find_os_error(error) from error


def _find_os_error(error: BaseException) -> OSError:
    """Return the OSError that has caused an error of torch, possibly on another rank.

    If there is no such OSError, the result is a new OSError with the class and first line of `error`. So the
    callers have to handle only OSError. If several ranks have failed, the lowest rank is reported.
    """
    # torch's CheckpointException contains the error and the traceback of each rank that failed.
    failures = getattr(error, "failures", {})
    if failures:
        rank = min(failures)
        failure, _ = failures[rank]
        rank_error = _find_os_error(failure)
        return OSError(rank_error.errno, f"rank {rank}: {rank_error.strerror}")
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return OSError(0, _describe_error(error))


def _describe_error(error: BaseException) -> str:
    """Return a text with the class and the first line of `error`."""
    first_line, _, _ = str(error).partition("\n")
    return f"{type(error).__name__}: {first_line}"


class CheckpointWriter:
    """Takes checkpoints of a run, and writes them in the background while training goes on."""

    def __init__(
        self, run_folder: Path, keep: int, ranks: Ranks, say: Say, skipped: Collection[Path]
    ) -> None:
        """Open a process group that contains only rank 0. This is a collective call: all ranks must make it.

        Parameters
        ----------
        keep : number of checkpoints to keep.
        skipped : checkpoints in the run's folder that could not be read. They are renamed when the first new
            checkpoint is written.
        """
        self._folder = run_folder / disk.FOLDER
        self._keep = keep
        self._say = say
        self._ranks = ranks
        self._skipped = skipped
        group = dist.new_group([0], backend="gloo") if dist.is_initialized() else None
        self._rank_0 = dataclasses.replace(ranks, world_size=1, group=group)
        # The ranks with a process group for the threads that write shards.
        self._all_ranks: Ranks | None = None
        self._host_copies = HostCopies()
        self._thread: threading.Thread | None = None
        # Why the latest checkpoint could not be written.
        self._error: OSError | None = None
        self._has_warned = False
        self.saved_step = -1
        """Step of the newest complete checkpoint, or -1. All ranks have the same value after `close`."""
        self.stalled_s = 0.0
        """Total seconds for which training has waited for checkpoints."""
        self.longest_stall_s = 0.0
        """Seconds of the longest `save`."""

    def save(self, step: int, index: bytes, tensors: Mapping[str, Tensor], rank_value: bytes) -> None:
        """Copy the state to host memory, and write it in the background.

        This is a collective call: all ranks must make it.

        Rank 0 writes everything, except that each rank writes its own parts of DTensors (sharded tensors).
        An error of the writing thread is reported by the next `save` or by `close`.

        Parameters
        ----------
        index : the pickled position in the data and states of all objects, without their tensors. Rank 0
            saves it.
        tensors : DTensors, and tensors that are equal on all ranks. The keys are the same on all ranks.
        rank_value : the pickled values of this rank.
        """
        start_s = time.perf_counter()
        rank_values = self._ranks.gather_on_rank_0(rank_value)
        # The memory for the copies is reused, so the thread of the previous save must have written them.
        self._finish_writing()
        shards = {key: tensor for key, tensor in tensors.items() if is_dtensor(tensor)}
        # All ranks have the same keys, so they all make the collective call or none.
        writers = self._rank_0
        if shards:
            writers = self._connect_all_ranks()
        if self._ranks.rank == 0:
            values = {INDEX: index}
            for rank, value in enumerate(rank_values):
                values[f"{RANK_PREFIX}{rank}"] = value
            self._start_writing(step, tensors, values, writers)
        elif shards:
            self._start_writing(step, shards, {}, writers)
        # Only the copy and the wait for the previous save have delayed the training.
        stall_s = time.perf_counter() - start_s
        self.stalled_s += stall_s
        self.longest_stall_s = max(self.longest_stall_s, stall_s)

    def _connect_all_ranks(self) -> Ranks:
        """Return all ranks with a process group for their threads. The first call is a collective call."""
        if self._all_ranks is None:
            self._all_ranks = with_new_group(self._ranks)
        return self._all_ranks

    def _start_writing(
        self, step: int, tensors: Mapping[str, Tensor], values: Mapping[str, bytes], writers: Ranks
    ) -> None:
        """Start to copy `tensors` to host memory, and start a thread that writes the copies and `values`.

        `writers` are the ranks that write this checkpoint together.
        """
        # Of a DTensor, only the part of this rank is copied.
        local_tensors = dict(tensors)
        for key, tensor in tensors.items():
            if is_dtensor(tensor):
                local_tensors[key] = tensor.to_local()
        copies = self._host_copies.start_copy(local_tensors)
        # The original tensors give the whole shape and its division among the ranks. The copies under the
        # same keys give the bytes.
        state = {**tensors, **values}
        self._thread = threading.Thread(target=self._write, args=(step, state, copies, writers))
        self._thread.start()

    def _write(self, step: int, state: dict[str, Any], copies: Mapping[str, Tensor], writers: Ranks) -> None:
        """Write a checkpoint together with the threads of the other `writers`. This runs in a thread.

        An error is stored, and `_finish_writing` reports it in the main thread. The folder has a temporary
        name until it is complete, so that a killed run leaves no checkpoint that looks valid.

        Parameters
        ----------
        state : what to write: tensors and bytes by key.
        copies : by key, the tensors to write instead of those in `state`, which training changes in the
            meantime.
        """
        folder: Path | None = None
        try:
            self._host_copies.wait()  # the copies from the GPU may still be under way
            folder = self._make_folder(step, writers)
            if folder is None:  # rank 0 could not create it, and reports the error
                return
            _save_state(folder, state, copies, writers)
            # This also waits until all writers have written their files. Only then is the folder renamed.
            entries = _describe_files(folder, writers)
            if writers.rank == 0:
                self._commit(folder, step, entries)
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError if another rank has ended
            self._error = _find_os_error(error)
            if folder and writers.rank == 0:
                with contextlib.suppress(OSError):  # the next save tries again to remove it
                    disk.remove_checkpoint(folder)

    def _make_folder(self, step: int, writers: Ranks) -> Path | None:
        """Create the folder of a checkpoint on rank 0, and return its path on all `writers`.

        On other ranks, the result is None if rank 0 could not create the folder.

        Raises
        ------
        OSError : (only on rank 0) the folder cannot be created.
        """
        folder: Path | None = None
        try:
            if writers.rank == 0:
                folder = disk.make_temporary_folder(self._folder, step)
        finally:  # broadcast even after an error, because the other writers wait for it
            folder = writers.broadcast(folder)
        return folder

    def _commit(self, folder: Path, step: int, entries: Mapping[str, disk.FileEntry]) -> None:
        """Rename a complete folder, which makes it the newest checkpoint.

        Unreadable checkpoints in the run's folder are renamed to ``skipped-...`` before.
        """
        disk.set_aside(self._skipped)
        self._skipped = ()
        disk.commit(folder, step, entries, keep=self._keep, warn=self._warn_once)
        self.saved_step = step

    def _warn_once(self, problem: str) -> None:
        """Report a problem that does not prevent the save, but only the first time."""
        if not self._has_warned:
            self._say(f"warning: {problem}; checkpoints are saved all the same")
        self._has_warned = True

    def _finish_writing(self) -> None:
        """Wait until the thread has written its checkpoint. If it failed, report the error on rank 0.

        A failed checkpoint does not end the run. The next save tries again.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None and self._ranks.rank == 0:
            newest = "there is no older one"
            if self.saved_step >= 0:
                newest = f"the newest is of step {self.saved_step}"
            self._say(f"cannot write a checkpoint to {self._folder}: {self._error.strerror}; {newest}")
        self._error = None

    def close(self) -> None:
        """Wait until the last checkpoint is written. This is a collective call: all ranks must make it."""
        start_s = time.perf_counter()
        self._finish_writing()
        self.saved_step = self._ranks.broadcast(self.saved_step)
        self.stalled_s += time.perf_counter() - start_s

    def close_groups(self) -> None:
        """Destroy the process groups that the writer has opened."""
        # On other ranks, `new_group` has returned a marker and not a group for rank 0's group.
        for ranks in (self._rank_0, self._all_ranks):
            if ranks and ranks.group not in (None, dist.GroupMember.NON_GROUP_MEMBER):
                dist.destroy_process_group(ranks.group)


def _save_state(folder: Path, state: dict[str, Any], copies: Mapping[str, Tensor], writers: Ranks) -> None:
    """Write this rank's part of a state. This is a collective call of all `writers`.

    Raises
    ------
    OSError : a rank could not write its file.
    """
    try:
        storage = _FileWriter(folder)
        planner = _CopiesPlanner(copies)
        dcp.save(state, storage_writer=storage, planner=planner, process_group=writers.group)
    # torch puts the errors of all ranks into a CheckpointException, which is not a subclass of Exception.
    except (Exception, CheckpointException) as error:
        raise _find_os_error(error) from error


def _describe_files(folder: Path, writers: Ranks) -> dict[str, disk.FileEntry]:
    """Return the size and sha256 of each file of all `writers`, for the manifest.

    This is a collective call. Each rank reads only the files that it has written.

    Raises
    ------
    OSError : a rank could not read its files.
    """
    paths = list(folder.glob(f"{_file_prefix(writers.rank)}*"))
    if writers.rank == 0:
        paths.append(folder / ".metadata")
    own_entries: dict[str, disk.FileEntry] = {}
    own_error: OSError | None = None
    try:
        for path in paths:
            own_entries[path.name] = disk.describe_file(path)
    except OSError as error:  # raised below: the other writers wait for the entries of this rank
        own_error = error
    entries: dict[str, disk.FileEntry] = {}
    for rank, (rank_entries, rank_error) in enumerate(writers.gather((own_entries, own_error))):
        if rank_error is not None:
            raise OSError(rank_error.errno, f"rank {rank}: {rank_error.strerror}")
        entries.update(rank_entries)
    return entries


def _file_prefix(rank: int) -> str:
    """Return the beginning of the names that torch gives to the files of a rank: ``__3_`` in __3_0.distcp."""
    return f"__{rank}_"


class TensorInfo(NamedTuple):
    """Shape and type of a tensor in a checkpoint."""

    shape: torch.Size
    dtype: torch.dtype


class _Contents(NamedTuple):
    """The values that rank 0 reads from a checkpoint and sends to all ranks."""

    tensors: dict[str, TensorInfo]
    world_size: int
    pickled_index: bytes
    problem: str = ""
    """Why the checkpoint cannot be read, or ``""``."""


class Checkpoint:
    """A valid checkpoint. Its methods are collective calls that return the same values on all ranks.

    Rank 0 reads the values that are equal on all ranks and sends them to the others. So the checkpoint may be
    on a disk of rank 0's node.
    """

    def __init__(self, folder: Path, step: int, ranks: Ranks) -> None:
        """Read the index of the checkpoint.

        Raises
        ------
        InvalidCheckpoint : another program or another release of torch has written the checkpoint.
        """
        self.folder = folder
        self.step = step
        self._ranks = ranks
        self._metadata: Any = None
        own_contents = None
        if ranks.rank == 0:
            own_contents = self._read_contents()
        contents: _Contents = ranks.broadcast(own_contents)
        if contents.problem:
            raise disk.InvalidCheckpoint(
                f"torch {torch.__version__} cannot read {folder}: {contents.problem}"
            )
        self.tensors = contents.tensors
        """The shape and type of each tensor by its key."""
        self.world_size = contents.world_size
        """The number of ranks that have taken the checkpoint."""
        index = pickle.loads(contents.pickled_index)  # noqa: S301 - SECURITY.md: it is trusted like code
        self.position, self._trees = index
        """The position in the data (`DataPosition.values`), and the pickled tree of each object."""

    def _read_contents(self) -> _Contents:
        """Read the shapes and types of the tensors, the number of ranks, and the index on rank 0.

        No error is raised, because the other ranks wait for the result. It contains the problem instead.
        """
        tensors = {}
        world_size = 0
        try:
            self._metadata = dcp.FileSystemReader(self.folder).read_metadata()
            for key, item in self._metadata.state_dict_metadata.items():
                if isinstance(item, TensorStorageMetadata):
                    tensors[key] = TensorInfo(item.size, item.properties.dtype)
                elif key.startswith(RANK_PREFIX):
                    world_size += 1
            values: dict[str, Any] = {INDEX: b""}
            self._read_into(values)
        except Exception as error:  # pickle raises many types of errors for classes of another release
            return _Contents({}, 0, b"", problem=_describe_error(error))
        return _Contents(tensors, world_size, pickled_index=values[INDEX])

    @property
    def names(self) -> list[str]:
        """The names of the objects that have one state for all ranks."""
        return sorted(self._trees)

    def unpickle_tree(self, name: str) -> Any:
        """Return the state of an object, with a `TensorRef` in place of each tensor.

        This is not a collective call.
        """
        return pickle.loads(self._trees[name])  # noqa: S301 - SECURITY.md: it is trusted like code

    def state(self, name: str, shards: Mapping[str, Tensor] | None = None) -> Any:
        """Return the state of an object, including its tensors.

        This is a collective call: all ranks must make it.

        Parameters
        ----------
        shards : DTensors, by the keys of tensors in the checkpoint. Each rank reads its own part into them.
        """
        tensors: dict[str, Any] = dict(shards or {})
        if tensors:
            self._read_into(tensors)  # overwrites the given DTensors in place, on every rank
        tree = self.unpickle_tree(name)  # has a TensorRef, with the key, in place of each tensor
        keys = {leaf.key for _, leaf in list_leaves(tree) if isinstance(leaf, TensorRef)}
        # Sorted, because rank 0 sends these tensors to the others, and all must use the same order.
        unread_keys = sorted(keys - tensors.keys())
        tensors.update(self.read_tensors(unread_keys))
        return join_tensors(tree, tensors)

    def read_tensors(self, keys: Sequence[str]) -> dict[str, Tensor]:
        """Return complete tensors in host memory. Rank 0 reads them for all ranks in a collective call."""
        tensor_by_key = {}
        for key in keys:
            info = self.tensors[key]
            tensor_by_key[key] = torch.empty(info.shape, dtype=info.dtype)
        # The folder may be on a disk of rank 0's node, so only rank 0 reads it and sends the result.
        if self._ranks.rank == 0 and tensor_by_key:
            self._read_into(tensor_by_key)
        for tensor in tensor_by_key.values():
            self._ranks.broadcast_tensor(tensor)
        return tensor_by_key

    def read_rank_value(self) -> Any:
        """Return the value that this rank has saved for itself.

        This is a collective call: all ranks must make it.

        If the checkpoint was taken with another number of ranks, every rank gets the value of rank 0. Callers
        must then refuse states of objects in it, and give each rank other random numbers.
        """
        keys = [f"{RANK_PREFIX}{rank}" for rank in range(self.world_size)]
        if self.world_size != self._ranks.world_size:
            keys = [f"{RANK_PREFIX}0"] * self._ranks.world_size
        values_by_key: dict[str, Any] = dict.fromkeys(keys, b"")
        if self._ranks.rank == 0:  # only its values are sent below
            self._read_into(values_by_key)
        own_value = self._ranks.scatter([values_by_key[key] for key in keys])
        return pickle.loads(own_value)  # noqa: S301 - SECURITY.md: it is trusted like code

    def _read_into(self, values: dict[str, Any]) -> None:
        """Replace the value of each key in `values` by the value in the checkpoint.

        Tensors are overwritten in place. For a DTensor, only this rank's part is read. Bytes are replaced.

        This is not a collective call. `dcp.load` of torch is one, only to sort the keys, and in torch 2.3, it
        also waits for ranks outside of the group. So this method takes the steps of `dcp.load` itself, as if
        this rank were alone and so the coordinator.
        """
        reader = dcp.FileSystemReader(self.folder)
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._metadata = self._metadata or reader.read_metadata()
        planner.set_up_planner(values, self._metadata, is_coordinator=True)
        reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        # The plan lists which bytes of which files belong to each value.
        plan = reader.prepare_local_plan(planner.create_local_plan())
        reader.read_data(planner.finish_plan(plan), planner).wait()


def find_newest(
    path: Path, ranks: Ranks, *, trusts_folder: bool = True
) -> tuple[Checkpoint | None, dict[Path, str]]:
    """Find the newest valid checkpoint at `path`, and return it or None.

    This is a collective call: all ranks must make it.

    The second value says, equally on all ranks, why each newer checkpoint cannot be used.

    Parameters
    ----------
    path : a checkpoint, a folder of checkpoints, or a run folder.
    trusts_folder : whether to accept checkpoints of the folder's owner, who may be another user.

    Raises
    ------
    UsageError : (on every rank) another node has a newer checkpoint than rank 0, or a node cannot list the
        folder.
    """
    _refuse_newer_elsewhere(path, ranks)
    problems: dict[Path, str] = {}
    newest = None
    # On rank 0, the iterator also adds to `problems`, for each checkpoint that it passes over.
    for candidate in _iterate_candidates(path, problems, ranks, trusts_folder=trusts_folder):
        try:
            _refuse_damaged(candidate, ranks)
            newest = Checkpoint(candidate.folder, candidate.step, ranks)
            break
        except disk.InvalidCheckpoint as error:
            problems[candidate.folder] = str(error)
    return newest, ranks.broadcast(problems)


def _iterate_candidates(
    path: Path, problems: dict[Path, str], ranks: Ranks, *, trusts_folder: bool
) -> Iterator[disk.StoredCheckpoint]:
    """Yield the checkpoints that rank 0 finds, newest first, on all ranks. Each step is a collective call.

    Parameters
    ----------
    problems : receives, on rank 0, the paths of unusable checkpoints with the reasons.
    """
    candidates: Iterator[disk.StoredCheckpoint] = iter(())
    if ranks.rank == 0:
        candidates = disk.iterate_valid(path, problems, trusts_folder=trusts_folder)
    while True:
        candidate = ranks.broadcast(next(candidates, None))
        if candidate is None:  # rank 0 has found no more checkpoints
            return
        yield candidate


class _NodeReport(NamedTuple):
    """What a rank finds at the path of the checkpoints, which may be a disk of its own node."""

    newest_name: str
    """Name of the newest checkpoint, valid or not, or ``""`` if there is none."""
    host: str
    problem: str
    """Why the path cannot be listed, or ``""``."""


def _report_newest(path: Path) -> _NodeReport:
    """Return the newest checkpoint that this rank sees at `path`, which may be a disk of its own node.

    No error is raised, because the other ranks wait for the report. It contains the problem instead.
    """
    host = socket.gethostname()
    try:
        checkpoints = disk.checkpoints_at(path)
    except OSError as error:
        return _NodeReport("", host, f"{error.filename} cannot be listed: {error.strerror}")
    if not checkpoints:
        return _NodeReport("", host, "")
    return _NodeReport(checkpoints[0].name, host, "")


def _refuse_newer_elsewhere(path: Path, ranks: Ranks) -> None:
    """Raise UsageError if a node cannot list `path`, or has a newer checkpoint than rank 0.

    Rank 0 reads the checkpoint for all ranks. Without this check, the run would silently continue from an
    older state. This is a collective call: all ranks must make it.
    """
    reports = ranks.gather(_report_newest(path), call="run.restore")
    for report in reports:
        if report.problem:
            raise UsageError(report.problem, where=report.host, hint="name a folder that you can read")
    rank_0 = reports[0]
    newest = max(reports)  # the first field decides: names such as "step-0000000500" sort like their steps
    if newest.newest_name > rank_0.newest_name:
        raise UsageError(
            f"{newest.host} has {newest.newest_name}, and the newest checkpoint of rank 0 on {rank_0.host} "
            f"is {rank_0.newest_name or 'none'}",
            where=str(path),
            hint="start the head on that node, or put the folder on a file system that all nodes share",
        )


def _refuse_damaged(candidate: disk.StoredCheckpoint, ranks: Ranks) -> None:
    """Raise InvalidCheckpoint on every rank if a file differs from its manifest.

    This is a collective call: all ranks must make it.

    In a sharded checkpoint, each rank checks a part of the files. In any other checkpoint, rank 0 checks all.
    """
    names: Sequence[str] = sorted(candidate.files)
    # In a sharded checkpoint of several ranks, rank 1 has written files, too.
    is_sharded = any(name.startswith(_file_prefix(1)) for name in names)
    if is_sharded:
        names = names[ranks.rank :: ranks.world_size]
    elif ranks.rank != 0:  # the folder may be on a disk of rank 0's node
        names = ()
    # Every rank must take part in `gather`, so `find_damage` returns its problem and does not raise it.
    own_problem = disk.find_damage(candidate.folder, candidate.files, names)
    for problem in ranks.gather(own_problem, call="run.restore"):
        if problem:
            raise disk.InvalidCheckpoint(problem)


# Longest time until a new file of another node becomes visible. NFS caches for some seconds that a name is
# absent.
PATIENCE_S = 10.0


def refuse_unshared_folder(folder: Path, ranks: Ranks) -> None:
    """Raise UsageError on every rank if the ranks do not all see the same folder.

    This is a collective call: all ranks must make it.

    Each rank writes its part of a sharded state, and a checkpoint needs all parts in one folder.
    """
    # Rank 0 creates a folder with a random name, and the other ranks look for it. The first call of `gather`
    # waits until it exists. The second waits until all ranks have looked for it.
    probe = folder / ranks.broadcast(f"{disk.WRITING}{secrets.token_hex(8)}")
    if ranks.rank == 0:
        probe.mkdir(parents=True)
    ranks.gather(None, call="run.restore")
    # A network file system may show a new folder on other nodes only after some seconds.
    is_seen = disk.wait_until(probe.exists, PATIENCE_S)
    sightings = ranks.gather((socket.gethostname(), is_seen), call="run.restore")
    if ranks.rank == 0:
        probe.rmdir()
    missing_hosts = sorted({host for host, is_seen_there in sightings if not is_seen_there})
    if missing_hosts:
        first_host, _ = sightings[0]
        raise UsageError(
            f"sharded state needs a folder that all ranks see, and rank 0 on {first_host} does not share "
            f"this one with {', '.join(missing_hosts)}",
            where=str(folder),
            hint="name a folder on a file system that all nodes share: Run.start(FOLDER), --run-dir or "
            "IMGKIT_RUN_DIR",
        )

"""Checkpoints by torch.distributed.checkpoint (DCP): written in the background, checked before they are read.

Rank 0 alone hands over what is equal on all ranks, with the bytes of each rank, and every rank its shards of
DTensors. Without shards rank 0 saves alone: else planning for 512 ranks of DDP would cost it 15 s of CPU.
`async_save` stalls training by 25 to 158 ms for 100 MB, so the tensors are copied to memory that stays, and
`dcp.save` runs in one thread, on a gloo group of its own.
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
# Key of the position in the data and of the trees of all objects.
INDEX = "imgkit"
# Keys ``rank/0``, ``rank/1`` of what each rank keeps for itself: random states, and objects of
# `track_per_rank`.
RANK_PREFIX = "rank/"

# torch warns of `dcp.save` without a process group, which is meant, and of its own use of TypedStorage.
for text in ("torch.distributed is disabled, unavailable or uninitialized", "TypedStorage is deprecated"):
    warnings.filterwarnings("ignore", message=text)


class _CopiesPlanner(dcp.DefaultSavePlanner):  # type: ignore[misc]
    """Plans a checkpoint by the tensors that train, and writes the copies of this rank's parts of them."""

    def __init__(self, copies: Mapping[str, Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._copies = copies

    def resolve_data(self, write_item: Any) -> Any:
        copy = self._copies.get(write_item.index.fqn)
        return super().resolve_data(write_item) if copy is None else copy


class _FileWriter(dcp.FileSystemWriter):  # type: ignore[misc]
    """Raises the OSError of a file that cannot be written, which torch's serializer hides."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise _find_os_error(error) from error


def _find_os_error(error: BaseException) -> OSError:
    """Return the OSError behind an error of torch, which may have come from another rank.

    If there is none, the result is an OSError with the class and the first line of the error.
    """
    failures = getattr(error, "failures", {})
    if failures:  # torch's CheckpointException has the error and the traceback of each rank that failed
        rank = min(failures)
        failure, _ = failures[rank]
        reason = _find_os_error(failure)
        return OSError(reason.errno, f"rank {rank}: {reason.strerror}")
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return OSError(0, _describe_error(error))


def _describe_error(error: BaseException) -> str:
    """Return the class and the first line of an error."""
    first_line, _, _ = str(error).partition("\n")
    return f"{type(error).__name__}: {first_line}"


class CheckpointWriter:
    """Takes checkpoints of a run, and writes them in the background while training goes on."""

    def __init__(
        self, run_folder: Path, keep: int, ranks: Ranks, say: Say, skipped: Collection[Path]
    ) -> None:
        """Open a process group for rank 0 alone; a collective call.

        Parameters
        ----------
        skipped : checkpoints in the run's folder that could not be read. The first new one sets them aside.
        """
        self._folder = run_folder / disk.FOLDER
        self._keep = keep
        self._say = say
        self._ranks = ranks
        self._skipped = skipped
        group = dist.new_group([0], backend="gloo") if dist.is_initialized() else None
        self._rank_0 = dataclasses.replace(ranks, world_size=1, group=group)
        # The ranks with a group for the threads that write shards.
        self._all_ranks: Ranks | None = None
        self._copies = HostCopies()
        self._thread: threading.Thread | None = None
        # Why the latest checkpoint could not be written.
        self._error: OSError | None = None
        self._has_warned = False
        self.saved_step = -1
        """Step of the newest checkpoint that is safely written, or -1; `close` gives it to all ranks."""
        self.stalled_s = 0.0
        """Seconds in which training waited for this, in all calls."""
        self.longest_stall_s = 0.0
        """Seconds of the longest `save`."""

    def save(self, step: int, index: bytes, tensors: Mapping[str, Tensor], rank_value: bytes) -> None:
        """Copy the state to host memory and write it in the background; a collective call.

        Parameters
        ----------
        index : the pickled position in the data, and the states of all objects without their tensors. Rank 0
            saves it.
        tensors : tensors that are equal on all ranks, and DTensors; the same keys on all ranks.
        rank_value : the pickled values that each rank saves for itself.
        """
        start_s = time.perf_counter()
        rank_values = self._ranks.gather_on_rank_0(rank_value)
        self._finish_writing()  # the thread still reads the copies of the last save, which are reused below
        shards = {key: tensor for key, tensor in tensors.items() if is_dtensor(tensor)}
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
        stall_s = time.perf_counter() - start_s
        self.stalled_s += stall_s
        self.longest_stall_s = max(self.longest_stall_s, stall_s)

    def _connect_all_ranks(self) -> Ranks:
        """Return all ranks with a group for their threads; the first call is a collective one."""
        if self._all_ranks is None:
            self._all_ranks = with_new_group(self._ranks)
        return self._all_ranks

    def _start_writing(
        self, step: int, tensors: Mapping[str, Tensor], values: Mapping[str, bytes], writers: Ranks
    ) -> None:
        """Start to copy tensors to host memory, and the thread that writes them and `values`."""
        local_tensors = dict(tensors)
        for key, tensor in tensors.items():
            if is_dtensor(tensor):
                local_tensors[key] = tensor.to_local()
        copies = self._copies.start_copy(local_tensors)
        state = {**tensors, **values}
        self._thread = threading.Thread(target=self._write, args=(step, state, copies, writers))
        self._thread.start()

    def _write(self, step: int, state: dict[str, Any], copies: Mapping[str, Tensor], writers: Ranks) -> None:
        """Write a checkpoint together with the threads of the other `writers`.

        An error is kept until `_finish_writing` reports it in the thread that trains.
        """
        folder: Path | None = None
        try:
            self._copies.wait()
            folder = self._make_folder(step, writers)
            if folder is None:
                return
            _save_state(folder, state, copies, writers)
            entries = _describe_files(folder, writers)
            if self._ranks.rank == 0:
                self._commit(folder, step, entries)
        except (OSError, RuntimeError) as error:  # RuntimeError: another rank has ended
            self._error = _find_os_error(error)
            if folder and self._ranks.rank == 0:
                with contextlib.suppress(OSError):  # the next writer removes it
                    disk.remove_checkpoint(folder)

    def _make_folder(self, step: int, writers: Ranks) -> Path | None:
        """Make the folder of a checkpoint on rank 0, and return it to all `writers`.

        On other ranks, None means that rank 0 could not make it.

        Raises
        ------
        OSError : this is rank 0, and cannot make it.
        """
        folder: Path | None = None
        try:
            if self._ranks.rank == 0:
                folder = disk.make_temporary_folder(self._folder, step)
        finally:  # also after an error, since the other writers wait for an answer
            folder = writers.broadcast(folder)
        return folder

    def _commit(self, folder: Path, step: int, entries: Mapping[str, disk.FileEntry]) -> None:
        """Make a complete folder the newest checkpoint, and rename unreadable ones to ``skipped-...``."""
        disk.set_aside(self._skipped)
        self._skipped = ()
        disk.commit(folder, step, entries, keep=self._keep, warn=self._warn_once)
        self.saved_step = step

    def _warn_once(self, problem: str) -> None:
        if not self._has_warned:
            self._say(f"warning: {problem}; checkpoints are saved all the same")
        self._has_warned = True

    def _finish_writing(self) -> None:
        """Wait for the thread that writes, and report its error on rank 0."""
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
        """Wait for the last checkpoint; a collective call."""
        start_s = time.perf_counter()
        self._finish_writing()
        self.saved_step = self._ranks.broadcast(self.saved_step)
        self.stalled_s += time.perf_counter() - start_s

    def close_groups(self) -> None:
        """Free the process groups."""
        for ranks in (self._rank_0, self._all_ranks):
            if ranks and ranks.group not in (None, dist.GroupMember.NON_GROUP_MEMBER):
                dist.destroy_process_group(ranks.group)


def _save_state(folder: Path, state: dict[str, Any], copies: Mapping[str, Tensor], writers: Ranks) -> None:
    """Write this rank's part of a state; a collective call of all `writers`.

    Raises
    ------
    OSError : a rank could not write its file.
    """
    try:
        storage = _FileWriter(folder)
        planner = _CopiesPlanner(copies)
        dcp.save(state, storage_writer=storage, planner=planner, process_group=writers.group)
    except (Exception, CheckpointException) as error:  # torch wraps those of all ranks in a BaseException
        raise _find_os_error(error) from error


def _describe_files(folder: Path, writers: Ranks) -> dict[str, disk.FileEntry]:
    """Return the size and sha256 of each file of all `writers`, for the manifest; a collective call.

    Raises
    ------
    OSError : a rank could not read its files.
    """
    paths = list(folder.glob(f"__{writers.rank}_*"))
    if writers.rank == 0:
        paths.append(folder / ".metadata")
    own_entries: dict[str, disk.FileEntry] = {}
    own_error: OSError | None = None
    try:
        for path in paths:
            own_entries[path.name] = disk.describe_file(path)
    except OSError as error:  # not raised here, since the other writers wait for the entries
        own_error = error
    entries: dict[str, disk.FileEntry] = {}
    for rank, (rank_entries, rank_error) in enumerate(writers.gather((own_entries, own_error))):
        if rank_error is not None:
            raise OSError(rank_error.errno, f"rank {rank}: {rank_error.strerror}")
        entries.update(rank_entries)
    return entries


class TensorInfo(NamedTuple):
    """What a checkpoint says about a tensor."""

    shape: torch.Size
    dtype: torch.dtype


class _Contents(NamedTuple):
    """What rank 0 reads of a checkpoint for all ranks."""

    tensors: dict[str, TensorInfo]
    world_size: int
    pickled_index: bytes
    problem: str = ""
    """Why it cannot be read, or ""."""


class Checkpoint:
    """A valid checkpoint. Its methods are collective calls, and what they return is the same on all ranks.

    Rank 0 reads what is equal on all ranks, and the others get it: its node may be the only one that has it.
    """

    def __init__(self, folder: Path, step: int, ranks: Ranks) -> None:
        """Read its index.

        Raises
        ------
        InvalidCheckpoint : another program or another release of torch has written it.
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
        """The number of ranks that have saved."""
        index = pickle.loads(contents.pickled_index)  # noqa: S301 - SECURITY.md: it is trusted like code
        self.position, self._trees = index
        """The position in the data (`DataPosition.values`), and the pickled tree of each object."""

    def _read_contents(self) -> _Contents:
        """Return the shapes and types of the tensors, the number of ranks that have saved, and the index."""
        tensors = {}
        world_size = 0
        try:
            self._metadata = dcp.FileSystemReader(self.folder).read_metadata()
            for key, item in self._metadata.state_dict_metadata.items():
                if isinstance(item, TensorStorageMetadata):
                    tensors[key] = TensorInfo(item.size, item.properties.dtype)
                elif key.startswith(RANK_PREFIX):
                    world_size += 1
            index = self._load({INDEX: b""})[INDEX]
        except Exception as error:  # pickle raises many kinds for classes of another release
            return _Contents({}, 0, b"", problem=_describe_error(error))
        return _Contents(tensors, world_size, index)

    @property
    def names(self) -> list[str]:
        """The names of the objects whose state counts for all ranks."""
        return sorted(self._trees)

    def tree(self, name: str) -> Any:
        """Return the state of an object with a `TensorRef` for each tensor; no collective call."""
        return pickle.loads(self._trees[name])  # noqa: S301 - SECURITY.md: it is trusted like code

    def state(self, name: str, shards: Mapping[str, Tensor] | None = None) -> Any:
        """Return the state of an object, with its tensors; a collective call.

        Parameters
        ----------
        shards : DTensors by key, into which each rank reads its own part.
        """
        tensors: dict[str, Any] = dict(shards or {})
        if tensors:
            self._load(tensors)
        tree = self.tree(name)
        keys = {leaf.key for _, leaf in list_leaves(tree) if isinstance(leaf, TensorRef)}
        missing_keys = sorted(keys - tensors.keys())
        tensors.update(self.read_tensors(missing_keys))
        return join_tensors(tree, tensors)

    def read_tensors(self, keys: Sequence[str]) -> dict[str, Tensor]:
        """Return whole tensors in host memory, which rank 0 reads for all ranks; a collective call."""
        tensors = {}
        for key in keys:
            info = self.tensors[key]
            tensors[key] = torch.empty(info.shape, dtype=info.dtype)
        if self._ranks.rank == 0 and tensors:
            self._load(tensors)
        for tensor in tensors.values():
            self._ranks.broadcast_tensor(tensor)
        return tensors

    def read_rank_value(self) -> Any:
        """Return the value that this rank has saved for itself.

        If more or fewer ranks have saved, every rank gets the value of rank 0.
        """
        keys = [f"{RANK_PREFIX}{rank}" for rank in range(self.world_size)]
        if self.world_size != self._ranks.world_size:
            keys = [f"{RANK_PREFIX}0"] * self._ranks.world_size
        values: dict[str, bytes] = {}
        if self._ranks.rank == 0:
            values = self._load(dict.fromkeys(keys, b""))
        data = self._ranks.scatter([values.get(key) for key in keys])
        return pickle.loads(data)  # noqa: S301 - SECURITY.md: it is trusted like code

    def _load(self, values: dict[str, Any]) -> dict[str, Any]:
        """Read the value of each key of `values` from the folder into `values`, and return it.

        Tensors are overwritten in place, DTensors only in this rank's part, and bytes are replaced. This is
        no collective call. `dcp.load` is one, only to sort the keys; that of torch 2.3 also waits for ranks
        outside of the group.
        """
        reader = dcp.FileSystemReader(self.folder)
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._metadata = self._metadata or reader.read_metadata()
        planner.set_up_planner(values, self._metadata, is_coordinator=True)
        reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        reader.read_data(planner.finish_plan(plan), planner).wait()
        return values


def find_newest(
    path: Path, ranks: Ranks, *, trusts_folder: bool = True
) -> tuple[Checkpoint | None, dict[Path, str]]:
    """Find the newest valid checkpoint at `path`, or None if there is none. A collective call.

    The second value says, equally on all ranks, why each newer checkpoint cannot be used.

    Parameters
    ----------
    path : a checkpoint, a folder of them, or a run folder.
    trusts_folder : whether to take checkpoints of the folder's owner, who may be another user.

    Raises
    ------
    UsageError : on every rank, if another node has a newer checkpoint than rank 0, or a node cannot list the
        folder.
    """
    _refuse_newer_elsewhere(path, ranks)
    problems: dict[Path, str] = {}
    newest = None
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
    """Yield on all ranks the checkpoints that rank 0 finds, newest first. Each step is a collective call.

    Parameters
    ----------
    problems : gets on rank 0 the reason why a checkpoint is left out, by its path.
    """
    candidates: Iterator[disk.StoredCheckpoint] = iter(())
    if ranks.rank == 0:
        candidates = disk.iterate_valid(path, problems, trusts_folder=trusts_folder)
    while True:
        candidate = ranks.broadcast(next(candidates, None))
        if candidate is None:  # rank 0 has no more
            return
        yield candidate


class _NodeReport(NamedTuple):
    """What a rank sees at the path of the checkpoints."""

    newest_name: str
    """Name of the newest checkpoint, valid or not, or "" if there is none."""
    host: str
    problem: str
    """Why the path cannot be listed, or ""."""


def _report_newest(path: Path) -> _NodeReport:
    """Return what this rank sees at the path of the checkpoints, which may be a disk of its node alone."""
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

    Rank 0 reads the checkpoint for all, so the run would go on from an older state without a word.
    """
    reports = ranks.gather(_report_newest(path), call="run.restore")
    for report in reports:
        if report.problem:
            raise UsageError(report.problem, where=report.host, hint="name a folder that you can read")
    rank_0 = reports[0]
    newest = max(reports)  # by their names, such as "step-0000000500", which sort like steps
    if newest.newest_name > rank_0.newest_name:
        raise UsageError(
            f"{newest.host} has {newest.newest_name}, and the newest checkpoint of rank 0 on {rank_0.host} "
            f"is {rank_0.newest_name or 'none'}",
            where=str(path),
            hint="start the head on that node, or put the folder on a file system that all nodes share",
        )


def _refuse_damaged(candidate: disk.StoredCheckpoint, ranks: Ranks) -> None:
    """Raise InvalidCheckpoint, on every rank, if a file differs from its manifest; a collective call.

    The ranks divide the files of a sharded checkpoint. The files of any other checkpoint are read by rank 0.
    """
    names: Sequence[str] = sorted(candidate.files)
    is_sharded = any(name.startswith("__1_") for name in names)  # rank 1 has written files too
    if is_sharded:
        names = names[ranks.rank :: ranks.world_size]
    elif ranks.rank != 0:
        names = ()
    own_problem = disk.find_damage(candidate.folder, candidate.files, names)
    for problem in ranks.gather(own_problem, call="run.restore"):
        if problem:
            raise disk.InvalidCheckpoint(problem)


# Time in which a file of another node appears; NFS remembers for some seconds that a name was absent.
PATIENCE_S = 10.0


def refuse_unshared_folder(folder: Path, ranks: Ranks) -> None:
    """Raise UsageError, on every rank, if the ranks do not all see the same folder; a collective call.

    Each rank writes its part of a sharded state, and a checkpoint needs all parts in one folder.
    """
    # Rank 0 makes a folder, which the other ranks have to see. The first call of `gather` waits until it is
    # there, and the second until all ranks have looked for it.
    probe = folder / ranks.broadcast(f"{disk.WRITING}{secrets.token_hex(8)}")
    if ranks.rank == 0:
        probe.mkdir(parents=True)
    ranks.gather(None, call="run.restore")
    is_seen = disk.wait_until(probe.exists, PATIENCE_S)
    rows = ranks.gather((socket.gethostname(), is_seen), call="run.restore")
    if ranks.rank == 0:
        probe.rmdir()
    missing_hosts = sorted({host for host, is_seen_there in rows if not is_seen_there})
    if missing_hosts:
        first_host, _ = rows[0]
        raise UsageError(
            f"sharded state needs a folder that all ranks see, and rank 0 on {first_host} does not share "
            f"this one with {', '.join(missing_hosts)}",
            where=str(folder),
            hint="name a folder on a file system that all nodes share: Run.start(FOLDER), --run-dir or "
            "IMGKIT_RUN_DIR",
        )

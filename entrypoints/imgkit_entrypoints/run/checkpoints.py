"""Save the state of a run as a checkpoint, and find and read it again.

Rank 0 writes for all. Each node reads for itself, or gets what it does not see from a node that does.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from imgkit_entrypoints import __version__, files, json_text
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.run import disk, shard_file, shard_index, shared_folder
from imgkit_entrypoints.run.ranks import Delivery, Ranks, bytes_of, some
from imgkit_entrypoints.run.sharded import Contents, Staged
from imgkit_entrypoints.run.shared_folder import Writing

Say = Callable[[str], None]
FOLDER = "checkpoints"
"""Name of the folder in a run folder."""
STATE = "state.json"
"""Part with the values that JSON keeps, and the versions that wrote them."""
TOLD_S = 30.0
"""Time after which a run that waits for the program's `checkpoint_done` reports it."""


def each_leaf(value: Any, change: Callable[[Any, tuple[object, ...]], Any], *where: object) -> Any:
    """Copy dicts, lists and tuples, with what `change` returns for each other value and its path in them."""
    if isinstance(value, dict):
        return {key: each_leaf(one, change, *where, key) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(each_leaf(one, change, *where, number) for number, one in enumerate(value))
    return change(value, where)


def each_tensor(value: Any, change: Callable[[Tensor, tuple[object, ...]], Any], *where: object) -> Any:
    """Copy dicts, lists and tuples, with what `change` returns for each tensor and its path in them."""
    return each_leaf(value, lambda one, path: change(one, path) if isinstance(one, Tensor) else one, *where)


def on_host(value: Any) -> Any:
    """Copy `value` with every tensor in host memory of its own; tied ones stay tied."""
    copies: dict[tuple[object, ...], Tensor] = {}

    def copied(tensor: Tensor, _: object) -> Tensor:
        found = copies.get(_view(tensor))
        return (
            copies.setdefault(_view(tensor), tensor.detach().to("cpu", copy=True)) if found is None else found
        )

    return each_tensor(value, copied)


def _view(tensor: Tensor) -> tuple[object, ...]:
    """What two tensors have in common if they are the same values in the same memory."""
    if tensor.layout != torch.strided or not tensor.numel() or type(tensor) not in (Tensor, nn.Parameter):
        return (id(tensor),)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


class HostCopies:
    """Copies of tensors in host memory that stays from one checkpoint to the next; pinned for a GPU.

    From a GPU, the copy is work in its current stream, for which the host does not wait. What comes after it
    in the stream does, as the next optimizer step, so that it changes nothing that is not copied yet.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], Tensor] = {}
        self._copied: list[Any] = []
        """CUDA events after the copies that are under way."""

    def take(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Copy `values`, over the copy before; equal views of one storage have one copy."""
        seen: dict[tuple[object, ...], Tensor] = {}
        used: dict[tuple[object, ...], Tensor] = {}
        devices = set()

        def copied(tensor: Tensor, where: tuple[object, ...]) -> Tensor:
            view = _view(tensor)
            if view in seen:
                return seen[view]
            value = tensor.detach()
            if len(view) == 1:  # a kind of tensor that may have no such memory
                return seen.setdefault(view, value.to("cpu", copy=True))
            on_gpu = value.device.type == "cuda"
            kept = self._kept.get(where)
            if kept is None or (kept.dtype, kept.shape, kept.stride()) != (
                value.dtype,
                value.shape,
                value.stride(),
            ):
                kept = torch.empty_like(value, device="cpu", pin_memory=on_gpu)
            kept.copy_(value, non_blocking=on_gpu)
            if on_gpu:
                devices.add(value.device)
            used[where] = seen[view] = kept
            return kept

        found = {name: each_tensor(part, copied, name) for name, part in values.items()}
        self._kept = used
        self._copied = [torch.cuda.current_stream(device).record_event() for device in devices]
        return found

    def wait(self) -> None:
        """Wait until the copies are whole."""
        for event in self._copied:
            event.synchronize()


class DoneCalls:
    """Calls a function of the program for whole checkpoints, in a thread of its own.

    A checkpoint stays while it waits for the call and during it. Of those that come during a call, the newest
    waits, and takes the place of an older one that waits.
    """

    def __init__(self, call: Callable[[Path, int], object], say: Say) -> None:
        self._call, self._say = call, say
        self._now: tuple[Path, int] | None = None
        self._next: tuple[Path, int] | None = None
        self._changed = threading.Condition()

    def held(self) -> set[Path]:
        """The checkpoints that must stay."""
        with self._changed:
            return {one[0] for one in (self._now, self._next) if one is not None}

    def add(self, path: Path, step: int) -> None:
        """Call the function for this checkpoint soon."""
        with self._changed:
            starts = self._now is None
            if starts:
                self._now = path, step
            else:
                self._next = path, step
        if starts:
            threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while self._now is not None:
            path, step = self._now
            try:
                self._call(path, step)
            except Exception as error:  # it is the program's
                what = f"{type(error).__name__}: {error}".partition("\n")[0]
                self._say(f"warning: checkpoint_done failed for the checkpoint of step {step}: {what}")
            with self._changed:
                self._now, self._next = self._next, None
                self._changed.notify_all()

    def wait(self, path: Path | None = None) -> None:
        """Wait for the calls of `path`, by default for all."""

        def are_done() -> bool:
            held = {one[0] for one in (self._now, self._next) if one is not None}
            return not held if path is None else path not in held

        with self._changed:
            if not self._changed.wait_for(are_done, TOLD_S):
                self._say("waits for the program's checkpoint_done")
                self._changed.wait_for(are_done)


class CheckpointWriter:
    """Takes checkpoints of a run, and writes them in the background while training goes on."""

    def __init__(
        self,
        run_dir: Path,
        keep: int,
        here: Ranks,
        say: Say,
        done: DoneCalls | None = None,
        together: Ranks | None = None,
    ) -> None:
        """Save into `run_dir`; `done` gets each checkpoint once it is safely written.

        `together` has a group for the threads that write shards, and for nothing else.
        """
        self._folder, self._keep, self._here, self._say = run_dir / FOLDER, keep, here, say
        self._done, self._together = done, together
        self._copies = HostCopies()
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None
        self._warned = False
        self.saved_step = -1
        """Step of the newest checkpoint that is safely written, or -1; on rank 0, after `close` on all."""
        self.stalled_s = self.longest_stall_s = 0.0
        """Seconds in which training waited for this: of all calls, and of the longest `save`."""

    def save(
        self,
        step: int,
        *,
        tensors: Callable[[], Mapping[str, Any]],
        rows: Mapping[str, bytes],
        about: Mapping[str, Any],
        shards: Callable[[], Staged] | None = None,
    ) -> None:
        """Copy the state to host memory and write it in the background; a collective call.

        Parameters
        ----------
        tensors : returns part names and what torch saves in each; called on rank 0 alone.
        rows : part names and this rank's state, as torch saves it; each part keeps those of all ranks.
        about : values for `STATE`.
        shards : copies this rank's pieces of sharded state; called on every rank.
        """
        began = time.perf_counter()
        every = self._here.collect(rows, call="run.save")
        writing, index = None, ""
        if shards is not None and self._together is not None:
            self._finish_writing()
            staged = shards()
            writing, index = Writing(self._together, staged), staged.index
            if self._here.rank > 0:
                self._thread = threading.Thread(target=self._follow, args=(step, writing))
                self._thread.start()
        if self._here.rank == 0:
            self._finish_writing()
            values = self._copies.take(tensors())
            versions = {
                "imgkit": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            }
            state = {**about, "ranks": self._here.world_size, "versions": versions}
            parts = {name: _saving(value) for name, value in values.items()}
            parts.update({name: _saving_rows(own) for name, own in every.items()})
            parts[STATE] = _writing(json.dumps(state))
            if writing is not None:
                parts[shard_index.INDEX] = _writing(index)
            self._thread = threading.Thread(target=self._write, args=(step, parts, writing))
            self._thread.start()
        stall_s = time.perf_counter() - began
        self.stalled_s, self.longest_stall_s = self.stalled_s + stall_s, max(self.longest_stall_s, stall_s)

    def _write(self, step: int, parts: Mapping[str, disk.WriteFile], writing: Writing | None) -> None:
        lead = None if writing is None else writing.lead
        held = (lambda: set()) if self._done is None else self._done.held
        try:
            self._copies.wait()
            if self._done is not None:
                self._done.wait(self._folder / disk.checkpoint_name(step))
            self._folder.mkdir(parents=True, exist_ok=True)
            path = disk.write_checkpoint(
                self._folder, step, parts, keep=self._keep, warn=self._warn, held=held, shards=lead
            )
            self.saved_step = step
            if self._done is not None:
                self._done.add(path, step)
        except OSError as error:
            self._error = error
        except RuntimeError as error:  # torch.save turns an OSError of its sink into this
            self._error = _cause(error)
        if writing is not None:
            with contextlib.suppress(RuntimeError):  # the other ranks have ended
                writing.conclude(is_written=self.saved_step == step)

    def _follow(self, step: int, writing: Writing) -> None:
        with contextlib.suppress(OSError, RuntimeError):  # rank 0 reports it
            if writing.follow(self._folder):
                self.saved_step = step

    def _warn(self, problem: str) -> None:
        if not self._warned:
            self._say(f"warning: {problem}; checkpoints are saved all the same")
        self._warned = True

    def _finish_writing(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            newest = (
                "there is no older one" if self.saved_step < 0 else f"the newest is of step {self.saved_step}"
            )
            self._say(f"cannot write a checkpoint to {self._folder}: {self._error.strerror}; {newest}")
            self._error = None

    def close(self) -> None:
        """Wait for the last checkpoint; a collective call."""
        began = time.perf_counter()
        self._finish_writing()
        self.saved_step = int(self._here.broadcast(str(self.saved_step).encode(), 0))
        self.stalled_s += time.perf_counter() - began


def _saving(value: Any) -> disk.WriteFile:
    return lambda sink: torch.save(value, sink)


def _saving_rows(rows: Sequence[Tensor]) -> disk.WriteFile:
    """Save rows one after the other in one storage: a reader maps all and touches its own."""
    return lambda sink: torch.save(list(torch.cat(tuple(rows)).split([len(one) for one in rows])), sink)


def _writing(text: str) -> disk.WriteFile:
    return lambda sink: sink.write(text.encode())


def _cause(error: BaseException) -> OSError:
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError):
            return link
        link = link.__cause__ or link.__context__
    return OSError(0, str(error))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offer:
    """The newest valid checkpoint that the first rank of a node has found."""

    node: str
    step: int = -1
    """-1: none, or this is another rank of the node."""
    manifest: str = ""
    """The sha256 of its manifest, which has those of all parts."""


class FoundCheckpoint:
    """A valid checkpoint. Each node that sees its folder reads it there; the others get it, once each.

    Its methods are collective calls.

    Parameters
    ----------
    mine : its folder, on the rank `source`.
    offers : those of all ranks.
    """

    def __init__(self, mine: Path | None, source: int, offers: Sequence[_Offer], here: Ranks) -> None:
        content = b""
        if mine is not None:
            content = os.fsencode(mine) + b"\0" + files.read_bytes(mine / disk.MANIFEST)
        where, _, manifest = here.broadcast(content, source).partition(b"\0")
        self.where = Path(os.fsdecode(where))
        """Its folder on the nodes that see it."""
        self._files: Mapping[str, Any] = json_text.parse(manifest)["files"]
        self.parts: tuple[str, ...] = tuple(sorted(self._files))
        node, digest = offers[here.rank].node, hashlib.sha256(manifest).hexdigest()
        is_valid_here = any(one.node == node and one.manifest == digest for one in offers)
        sees = is_valid_here and _sha256_of(self.where / disk.MANIFEST) == digest
        blind = here.gather("" if sees else node, str, call="run.restore")
        self._delivery = Delivery(source, blind, here) if any(blind) else None
        self.shards: Contents | None = None
        """Its sharded part, which every rank reads for itself."""

    @property
    def is_sharded(self) -> bool:
        """Whether it has a sharded part."""
        return any(name == shard_index.INDEX or name.endswith(shard_file.SUFFIX) for name in self.parts)

    def _open(self, name: str) -> BinaryIO:
        if name not in self._files:
            raise self._unreadable(name, "it is missing")
        size, path = int(self._files[name]["size_bytes"]), self.where / name
        stream = self._delivery.part(path, size, str(self._files[name]["sha256"])) if self._delivery else None
        try:
            stream = stream or files.open_regular(path)
            found = os.fstat(stream.fileno()).st_size
        except OSError as error:
            raise self._unreadable(name, error.strerror or str(error)) from None
        if found != size:
            raise self._unreadable(name, f"it has {found} bytes, not {size}")
        return stream

    def values(self, name: str) -> Any:
        """The content of a part of JSON.

        Raises
        ------
        UsageError : it is no JSON.
        """
        with self._open(name) as stream:
            try:
                return json_text.parse(stream.read())
            except ValueError as error:
                raise self._unreadable(name, str(error)) from None

    def tensors(self, name: str) -> Any:
        """What torch saved in a part. Only tensors and plain values are read: no code of a pickle runs.

        Raises
        ------
        UsageError : it holds something else.
        """
        return on_host(self.mapped(name))

    def mapped(self, name: str) -> Any:
        """Read the same, but all tensors lie in the file, whose pages the ranks of a node share.

        They are for a copy at once: a change of the file by someone else would end the process.
        """
        with self._open(name) as stream:
            if stream.read(4) != b"PK\x03\x04":
                raise self._unreadable(name, "torch has not saved it")
            return self._loaded(name, f"/proc/self/fd/{stream.fileno()}", mmap=True)

    def rows(self, name: str) -> Rows:
        """The rows of a part with one for each rank.

        Raises
        ------
        UsageError : it holds something else.
        """
        found = self.mapped(name)
        if not isinstance(found, list) or not found:
            raise self._unreadable(name, "it has no rows")
        if any(not isinstance(one, Tensor) or one.dtype != torch.uint8 or one.dim() != 1 for one in found):
            raise self._unreadable(name, "its rows are no bytes")
        return Rows(lambda row: self._loaded(name, io.BytesIO(row), mmap=False), found)

    def _loaded(self, name: str, source: Any, *, mmap: bool) -> Any:
        try:
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
        except Exception as error:  # torch raises many kinds for bytes that it did not write
            raise self._unreadable(name, str(error).strip().partition("\n")[0]) from None

    def _unreadable(self, name: str, why: str) -> UsageError:
        return UsageError(
            f"this part of the checkpoint cannot be read: {why}",
            where=str(self.where / name),
            hint=f"mv {self.where} elsewhere, and the run resumes from an older checkpoint",
        )


class Rows:
    """The states of ranks in a checkpoint; each is read when it is needed."""

    def __init__(self, load: Callable[[bytes], Any], rows: Sequence[Tensor]) -> None:
        self._load, self._rows = load, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, rank: int) -> Any:
        return self._load(bytes_of(self._rows[rank], len(self._rows[rank])))


def newest(path: Path, here: Ranks, say: Say) -> FoundCheckpoint | None:
    """Find the newest valid checkpoint at `path` on any node; None: there is none. A collective call.

    A shared file system is not needed: the first rank of each node searches, and reads all of what it finds
    once, to compare it with its manifest. Shards are read by all ranks.
    """
    every = disk.valid_ones(path, say) if here.local_rank == 0 else iter(())
    mine = next(every, None)
    while True:
        own = _Offer(node=platform.node())
        if mine is not None:
            digest = _sha256_of(mine / disk.MANIFEST)
            own = _Offer(node=own.node, step=disk.step_of(mine), manifest=digest)
        offers = here.gather(own, _Offer, call="run.restore")
        steps = [one.step for one in offers]
        if max(steps) < 0:
            return None
        source = steps.index(max(steps))
        others = {one.manifest for one in offers if one.step == max(steps)} - {offers[source].manifest}
        if others:
            say(
                f"warning: nodes have different checkpoints of step {max(steps)} at {path}; that of "
                f"{offers[source].node} counts"
            )
        found = FoundCheckpoint(mine if here.rank == source else None, source, offers, here)
        if not found.is_sharded:
            return found
        name = os.path.relpath(mine, path).encode() if mine is not None and here.rank == source else b""
        contents = shared_folder.verify(path / os.fsdecode(here.broadcast(name, source)), here, source)
        if isinstance(contents, Contents):
            found.shards = contents
            return found
        say(f"checkpoint skipped: {contents}")
        if own.step == max(steps):
            mine = next(every, None)


def _sha256_of(path: Path) -> str:
    """The sha256 of a small file; empty if it cannot be read."""
    try:
        return hashlib.sha256(files.read_bytes(path)).hexdigest()
    except OSError:
        return ""


def differences(saved: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> str | None:
    """How two models differ: the names that one lacks, or the first other shape; None if they agree."""
    lost, new = [key for key in saved if key not in model], [key for key in model if key not in saved]
    if lost or new:
        return f"{some(lost) or 'nothing'} only in the checkpoint, {some(new) or 'nothing'} only in the model"
    for key in saved:
        if saved[key].shape != model[key].shape:
            shapes = f"{tuple(saved[key].shape)} in the checkpoint and {tuple(model[key].shape)} in the model"
            return f"{key} is {shapes}"
    return None

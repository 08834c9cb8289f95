"""Save the state of a run as a snapshot, and find and load it again: one rank does it for all."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from imgkit_entrypoints import __version__, json_text
from imgkit_entrypoints.apps.ranks import Ranks
from imgkit_entrypoints.apps.train.config import Config
from imgkit_entrypoints.apps.train.data.order import Position
from imgkit_entrypoints.apps.train.state import random_state, snapshot_files
from imgkit_entrypoints.apps.train.state.random_state import SentState
from imgkit_entrypoints.errors import UsageError

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A loaded snapshot, equal on every rank."""

    where: Path
    position: Position
    config: Mapping[str, Any]
    first_loss: float
    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Any]
    """State of the optimizer and the gradient scaler."""
    random: list[Mapping[str, Any]]
    """Random state of each rank that the run had."""


def on_host(value: Any) -> Any:
    """Copy `value` with every tensor in host memory of its own."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: on_host(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(on_host(one) for one in value)
    return value


class SnapshotWriter:
    """Takes snapshots of a run, and writes them in the background while training goes on."""

    def __init__(self, run_dir: Path, keep: int, here: Ranks, say: Say) -> None:
        self._folder, self._keep, self._here, self._say = run_dir / "snapshots", keep, here, say
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None
        self._warned = False
        self.saved_step = -1
        """Step of the newest snapshot that is safely written, on rank 0; -1: none."""
        self.longest_stall_s = 0.0

    def save(
        self, config: Config, position: Position, first_loss: float, state: Callable[[], tuple[Any, Any]]
    ) -> None:
        """Copy the state to host memory and write it in the background; a collective call."""
        began = time.perf_counter()
        sent = self._here.gather(SentState.of(random_state.current()), SentState)
        if self._here.rank == 0:
            every = [one.state() for one in sent]
            self._finish_writing()
            weights, optimizer = (on_host(part) for part in state())
            about = {
                "position": dataclasses.asdict(position),
                "first_loss": first_loss,
                "ranks": self._here.world_size,
                "versions": {
                    "imgkit": __version__,
                    "torch": torch.__version__,
                    "python": platform.python_version(),
                },
            }
            parts: dict[str, snapshot_files.WriteFile] = {
                "weights.pt": lambda sink: torch.save(weights, sink),
                "optimizer.pt": lambda sink: torch.save(optimizer, sink),
                "random.pt": lambda sink: torch.save(every, sink),
                "state.json": lambda sink: sink.write(json.dumps(about).encode()),
                "config.json": lambda sink: sink.write(config.to_json().encode()),
            }
            self._thread = threading.Thread(target=self._write, args=(position.step, parts))
            self._thread.start()
        self.longest_stall_s = max(self.longest_stall_s, time.perf_counter() - began)

    def _write(self, step: int, parts: Mapping[str, snapshot_files.WriteFile]) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            snapshot_files.write(self._folder, step, parts, keep=self._keep, warn=self._warn)
            self.saved_step = step
        except OSError as error:
            self._error = error
        except RuntimeError as error:  # torch.save turns an OSError of its sink into this
            self._error = _cause(error)

    def _warn(self, problem: str) -> None:
        if not self._warned:
            self._say(f"warning: {problem}; snapshots are saved all the same")
        self._warned = True

    def _finish_writing(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            newest = (
                "there is no older one" if self.saved_step < 0 else f"the newest is of step {self.saved_step}"
            )
            self._say(f"cannot write a snapshot to {self._folder}: {self._error.strerror}; {newest}")
            self._error = None

    def close(self) -> int:
        """Wait for the last snapshot; returns the newest safely written step, or -1, on every rank."""
        self._finish_writing()
        saved = torch.tensor([self.saved_step], device=self._here.device)
        dist.broadcast(saved, 0)
        return int(saved.item())


def _cause(error: BaseException) -> OSError:
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError):
            return link
        link = link.__cause__ or link.__context__
    return OSError(0, str(error))


def find(config: Config, here: Ranks, say: Say) -> Snapshot | None:
    """Load the snapshot that ``--resume`` selects, and send it to all ranks; a collective call.

    A shared file system is not needed: the first rank of each node searches, and the one with the newest
    snapshot reads it.

    Raises
    ------
    UsageError : the path of ``--resume`` holds no valid snapshot on any node, or ``--resume never`` would
        replace the snapshots of another run.
    """
    place = config.run_dir if config.resume in ("auto", "never") else Path(config.resume)
    if place is None:
        return None
    if config.resume == "never":
        _refuse_a_used_folder(place / "snapshots", here)
        return None
    mine: Path | None = None
    if here.local_rank == 0:
        mine = next(snapshot_files.valid_ones(place, say), None)
    offers = here.gather(-1 if mine is None else snapshot_files.step_of(mine), int)
    newest = max(offers)
    if newest < 0:
        if config.resume == "auto":
            return None
        raise UsageError(
            "no valid snapshot found", where=str(place), hint="--resume auto, or --resume never to start over"
        )
    return _sent(mine if here.rank == offers.index(newest) else None, offers.index(newest), here)


def _refuse_a_used_folder(folder: Path, here: Ranks) -> None:
    if any(here.gather(bool(snapshot_files.newest_first(folder)), bool)):
        raise UsageError(
            "this run would replace the snapshots of another run",
            where=str(folder),
            hint="give another --run-dir, or --resume auto",
        )


def _sent(mine: Path | None, source: int, here: Ranks) -> Snapshot:
    """Send the snapshot `mine` from rank `source` to all ranks, and load it."""

    def part(name: str) -> bytes:
        return _broadcast((mine / name).read_bytes() if mine is not None else b"", source, here)

    def tensors(name: str) -> Any:
        return torch.load(io.BytesIO(part(name)), map_location="cpu", weights_only=True)

    where = os.fsdecode(_broadcast(os.fsencode(mine) if mine is not None else b"", source, here))
    about = json_text.parse(part("state.json"))
    return Snapshot(
        where=Path(where),
        position=Position(**about["position"]),
        config=json_text.parse(part("config.json")),
        first_loss=about["first_loss"],
        weights=tensors("weights.pt"),
        optimizer=tensors("optimizer.pt"),
        random=tensors("random.pt"),
    )


def _broadcast(data: bytes, source: int, here: Ranks) -> bytes:
    size = torch.tensor([len(data)], device=here.device)
    dist.broadcast(size, source)
    received = bytearray(data) if here.rank == source else bytearray(int(size.item()))
    host = torch.frombuffer(received, dtype=torch.uint8)
    sent = host.to(here.device)
    dist.broadcast(sent, source)
    host.copy_(sent)
    return bytes(received)


def first_difference(saved: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> str | None:
    """The first key at which two models differ, with both shapes; None if they agree."""

    def shown(weights: Mapping[str, Tensor], key: str) -> str:
        return f"{tuple(weights[key].shape)}" if key in weights else "nothing"

    for key in (*saved, *model):
        if key not in saved or key not in model or saved[key].shape != model[key].shape:
            return f"{key} is {shown(saved, key)} in the snapshot and {shown(model, key)} in the model"
    return None

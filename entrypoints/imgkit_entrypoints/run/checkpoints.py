"""Save the state of a run as a checkpoint, and find and load it again: one rank does it for all."""

from __future__ import annotations

import io
import json
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from imgkit_entrypoints import __version__, files, json_text
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.run import disk
from imgkit_entrypoints.run.random_state import SentState
from imgkit_entrypoints.run.ranks import Ranks

Say = Callable[[str], None]
FOLDER = "checkpoints"
"""Name of the folder in a run folder."""
STATE = "state.json"
"""Part with the values that JSON keeps, and the versions that wrote them."""


def on_host(value: Any) -> Any:
    """Copy `value` with every tensor in host memory of its own."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: on_host(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(on_host(one) for one in value)
    return value


class CheckpointWriter:
    """Takes checkpoints of a run, and writes them in the background while training goes on."""

    def __init__(
        self,
        run_dir: Path,
        keep: int,
        here: Ranks,
        say: Say,
        kept: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Save into `run_dir`; `kept` gets the step of each checkpoint once it is safely written."""
        self._folder, self._keep, self._here, self._say = run_dir / FOLDER, keep, here, say
        self._kept = kept
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
        drawn: Mapping[str, SentState],
        about: Mapping[str, Any],
        texts: Mapping[str, str] | None = None,
    ) -> None:
        """Copy the state to host memory and write it in the background; a collective call.

        Parameters
        ----------
        tensors : returns part names and what torch saves in each; called on rank 0 alone.
        drawn : part names and a random state of this rank; each part keeps those of all ranks.
        about : values for `STATE`.
        texts : more part names, and their text.
        """
        began = time.perf_counter()
        sent = {name: self._here.gather(mine, SentState, call="run.save") for name, mine in drawn.items()}
        if self._here.rank == 0:
            self._finish_writing()
            values = {name: on_host(part) for name, part in tensors().items()}
            values.update({name: [one.state() for one in every] for name, every in sent.items()})
            versions = {
                "imgkit": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            }
            state = {**about, "ranks": self._here.world_size, "versions": versions}
            words = {STATE: json.dumps(state), **(texts or {})}
            parts = {
                **{name: _saving(value) for name, value in values.items()},
                **{name: _writing(text) for name, text in words.items()},
            }
            self._thread = threading.Thread(target=self._write, args=(step, parts))
            self._thread.start()
        stall_s = time.perf_counter() - began
        self.stalled_s, self.longest_stall_s = self.stalled_s + stall_s, max(self.longest_stall_s, stall_s)

    def _write(self, step: int, parts: Mapping[str, disk.WriteFile]) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            disk.write_checkpoint(self._folder, step, parts, keep=self._keep, warn=self._warn)
            self.saved_step = step
            self._kept(step)
        except OSError as error:
            self._error = error
        except RuntimeError as error:  # torch.save turns an OSError of its sink into this
            self._error = _cause(error)

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


def _writing(text: str) -> disk.WriteFile:
    return lambda sink: sink.write(text.encode())


def _cause(error: BaseException) -> OSError:
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError):
            return link
        link = link.__cause__ or link.__context__
    return OSError(0, str(error))


class FoundCheckpoint:
    """A valid checkpoint that one rank reads for all. Its methods are collective calls."""

    def __init__(self, mine: Path | None, source: int, here: Ranks) -> None:
        self._mine, self._source, self._here = mine, source, here
        sent = here.broadcast(os.fsencode(mine) if mine is not None else b"", source)
        self.where = Path(os.fsdecode(sent))
        """Its folder on the rank that reads it."""
        names = sorted(path.name for path in mine.iterdir()) if mine is not None else []
        self.parts: tuple[str, ...] = tuple(
            json_text.parse(here.broadcast(json.dumps(names).encode(), source))
        )

    def read(self, name: str) -> bytes:
        """The bytes of a part."""
        data = b""
        if self._mine is not None:
            part = self._mine / name
            data = files.read_bytes(part, most_bytes=part.stat().st_size)
        return self._here.broadcast(data, self._source)

    def values(self, name: str) -> Any:
        """The content of a part of JSON.

        Raises
        ------
        UsageError : it is no JSON.
        """
        try:
            return json_text.parse(self.read(name))
        except ValueError as error:
            raise self._unreadable(name, str(error)) from None

    def tensors(self, name: str) -> Any:
        """What torch saved in a part. Only tensors and plain values are read: no code of a pickle runs.

        Raises
        ------
        UsageError : it holds something else.
        """
        content = io.BytesIO(self.read(name))
        try:
            return torch.load(content, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many kinds for bytes that it did not write
            raise self._unreadable(name, str(error).strip().partition("\n")[0]) from None

    def _unreadable(self, name: str, why: str) -> UsageError:
        return UsageError(
            f"this part of the checkpoint cannot be read: {why}",
            where=str(self.where / name),
            hint=f"mv {self.where} elsewhere, and the run resumes from an older checkpoint",
        )


def newest(path: Path, here: Ranks, say: Say) -> FoundCheckpoint | None:
    """Find the newest valid checkpoint at `path` on any node; None: there is none. A collective call.

    A shared file system is not needed: the first rank of each node searches, and the one with the newest
    checkpoint reads it.
    """
    mine: Path | None = None
    if here.local_rank == 0:
        mine = next(disk.valid_ones(path, say), None)
    offers = here.gather(-1 if mine is None else disk.step_of(mine), int, call="run.restore")
    step = max(offers)
    if step < 0:
        return None
    source = offers.index(step)
    return FoundCheckpoint(mine if here.rank == source else None, source, here)


def first_difference(saved: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> str | None:
    """The first key at which two models differ, with both shapes; None if they agree."""

    def shown(weights: Mapping[str, Tensor], key: str) -> str:
        return f"{tuple(weights[key].shape)}" if key in weights else "nothing"

    for key in (*saved, *model):
        if key not in saved or key not in model or saved[key].shape != model[key].shape:
            return f"{key} is {shown(saved, key)} in the checkpoint and {shown(model, key)} in the model"
    return None

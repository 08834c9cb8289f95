"""Ends a run whose ranks wait in different calls of it, such as a run.pause on one rank alone.

gloo would end it after 30 minutes and NCCL after 10, and name no call. A thread of each rank reads the
stack of the thread that trains. A rank that stays where it is says so in torch's store, and rank 0 compares.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
import torch.distributed as dist

from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import EXIT_NO, CheckFailed
from imgkit_entrypoints.launch import user_program
from imgkit_entrypoints.launch.watchdog import Pulse
from imgkit_entrypoints.run.ranks import Ranks, ranks_by_value

# Time for which the ranks must stay in different calls before the run ends.
LIMIT_S = 600.0
# Time between two readings of the stack.
POLL_S = 10.0
_FOLDER = Path(__file__).parent
# Files whose functions wait for other ranks.
_WAITING_FILES = (str(_FOLDER / "ranks.py"), str(_FOLDER / "agreement.py"))
# Files whose functions a program calls.
_CALL_FILES = (str(_FOLDER / "run.py"), str(_FOLDER / "step_loop.py"))
# Calls of a program by functions of these files. Others are called by their own name, such as run.save.
_CALL_NAMES = {"iterate": "run.steps", "__exit__": "the end of the run"}
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
# How the paths of files begin that do not belong to the program.
_LIBRARIES = (_TORCH, f"{_FOLDER.parent}{os.sep}", contextlib.__file__)
# Key of the store under which rank 0 says which rank waits where. It ends the run on every rank.
_VERDICT = "verdict"


class RankState(NamedTuple):
    """What a rank does."""

    call: str
    """The call of the run in which it waits for other ranks, or empty if it does something else."""
    line: str
    """FILE:LINE of the program."""
    position: int
    """Twice its steps, as `Pulse` counts them."""
    signs: int
    """Its signs of life at this position."""

    def __str__(self) -> str:
        step = (self.position + 1) // 2
        return f"{self.call or 'the program'} at {self.line}, step {step}"


class CallWatch:
    """Watches the thread that makes it, in which the program trains."""

    def __init__(self, ranks: Ranks, pulse: Pulse, say: Callable[[str], None]) -> None:
        self._ranks = ranks
        self._pulse = pulse
        self._say = say
        self._store = dist.PrefixStore("imgkit-calls", dist.distributed_c10d._get_default_store())
        self._thread_id = threading.get_ident()
        # What the store has about this rank; None: nothing yet.
        self._published: str | None = None
        self._is_closed = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def close(self) -> None:
        """End the watch."""
        self._is_closed.set()

    def _watch(self) -> None:
        """Publish where the watched thread is if it stays there for `LIMIT_S`, and then compare the ranks."""
        state = self._read_state()
        start_s = time.monotonic()
        with contextlib.suppress(RuntimeError):  # the process that has the store is gone
            while not self._is_closed.wait(POLL_S):
                latest_state = self._read_state()
                if latest_state != state:
                    state = latest_state
                    start_s = time.monotonic()
                if time.monotonic() - start_s < LIMIT_S:
                    self._publish("")  # this rank has moved
                else:
                    self._publish(json.dumps(state))
                    self._compare_ranks()

    def _publish(self, text: str) -> None:
        """Write a text about this rank to the store, if it has changed."""
        if text != self._published:
            self._store.set(str(self._ranks.rank), text)
            self._published = text

    def _read_state(self) -> RankState:
        """Return the call in which the watched thread waits, its line of the program, and its steps."""
        frames = list(_iterate_frames(self._thread_id))
        library_frames = list(itertools.takewhile(_is_in_library, frames))
        program_frames = frames[len(library_frames) :]
        line = ""
        if program_frames:
            line = format_line(program_frames[0])
        position, signs = self._pulse.progress
        return RankState(_find_call(library_frames), line, position, signs)

    def _compare_ranks(self) -> None:
        """Compare the ranks on rank 0. End this process if rank 0 has found that they are stuck."""
        if self._ranks.rank == 0:
            states = self._published_states()
            if states and are_stuck(states):
                self._store.set(_VERDICT, ranks_by_value([str(state) for state in states]))
        if self._store.check([_VERDICT]):
            self._end_process(self._store.get(_VERDICT).decode())

    def _published_states(self) -> list[RankState]:
        """Return what all ranks do, or [] if a rank has moved within the last `LIMIT_S`."""
        keys = [str(rank) for rank in range(self._ranks.world_size)]
        if not self._store.check(keys):  # to get one that is missing would block the store
            return []
        texts = [self._store.get(key) for key in keys]
        if not all(texts):
            return []
        return [RankState(*json_text.parse(text)) for text in texts]

    def _end_process(self, verdict: str) -> None:
        """Report that the ranks wait in different calls, and end this process.

        Parameters
        ----------
        verdict : where each rank waits: ``rank 1: run.pause at t.py:9, step 4, rank 0: ...``.
        """
        error = CheckFailed(
            f"the ranks have waited in different calls for {LIMIT_S / 60:g} minutes: {verdict}",
            hint="call run.pause, run.save and the like on all ranks; let no rank leave a loop alone",
        )
        if not user_program.record_error(f"error: {error}"):
            for line in f"error: {error}".split("\n"):
                self._say(line)
        sys.stdout.flush()
        os._exit(EXIT_NO)  # the thread that trains waits in C, where no exception reaches it


def _iterate_frames(thread_id: int) -> Iterator[FrameType]:
    """Yield the stack of a thread, innermost frame first, without torch's frames at the inner end."""
    frame: FrameType | None = sys._current_frames().get(thread_id)
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_in_library(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_LIBRARIES)


def _find_call(library_frames: Sequence[FrameType]) -> str:
    """Return the call of the run in which a thread waits for other ranks, such as ``run.pause``, or "".

    Parameters
    ----------
    library_frames : the frames of the thread within the program's own, innermost first.
    """
    if not library_frames or library_frames[0].f_code.co_filename not in _WAITING_FILES:
        return ""
    codes = [frame.f_code for frame in library_frames]
    functions = [code.co_name for code in codes if code.co_filename in _CALL_FILES]
    if not functions:
        return ""
    called_function = functions[-1]  # the outermost one
    return _CALL_NAMES.get(called_function, f"run.{called_function}")


def format_line(frame: FrameType) -> str:
    """Return the position of a frame as FILE:LINE."""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def are_stuck(states: Sequence[RankState]) -> bool:
    """Return whether ranks wait for each other in different calls, so that none of them can go on.

    For example rank 0 waits in ``run.save`` and rank 1 in ``run.pause``. A rank that waits in no call is
    busy. It may only be late, unless it has already passed the step in which another rank waits for it.
    """
    waiting = [state for state in states if state.call]
    busy = [state for state in states if not state.call]
    if not waiting:
        return False
    first_waiting_position = min(state.position for state in waiting)
    for state in busy:
        if state.position <= first_waiting_position:  # it may still come to the call
            return False
    calls = {(state.call, state.position) for state in waiting}
    # All ranks may wait in a single call for a slow network. A busy rank has passed that call.
    return len(calls) > 1 or bool(busy)

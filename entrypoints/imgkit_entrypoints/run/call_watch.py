"""End a run whose ranks wait for each other in different calls, for example if only one rank calls run.pause.

Without this module, gloo would end the run after 30 minutes and NCCL after 10, and the message would not name
the calls. In each rank, a thread reads the stack of the thread that trains. If a rank does not move for some
time, its thread writes the position into torch's store (a small database that all ranks share). Rank 0
compares the positions.
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

# The run ends after the ranks have waited in different calls for this time.
LIMIT_S = 600.0
# Time between two readings of the stack.
POLL_S = 10.0
_FOLDER = Path(__file__).parent
# Files with the functions that wait for other ranks.
_WAITING_FILES = (str(_FOLDER / "ranks.py"), str(_FOLDER / "agreement.py"))
# Files with the functions that a program calls.
_CALL_FILES = (str(_FOLDER / "run.py"), str(_FOLDER / "step_loop.py"))
# Names of calls in messages, by functions in these files. Other functions have their own name, such as
# run.save.
_CALL_NAMES = {"iterate": "run.steps", "__exit__": "the end of the run"}
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
# Prefixes of the paths of files that do not belong to the program.
_LIBRARIES = (_TORCH, f"{_FOLDER.parent}{os.sep}", contextlib.__file__)
# Rank 0 writes this key into the store if the ranks are stuck. Its value says where each rank waits. When a
# rank finds the key, it ends its process.
_VERDICT = "verdict"


class RankState(NamedTuple):
    """What a rank is doing."""

    call: str
    """The call of the run in which the rank waits for others. Empty if it does something else."""
    line: str
    """The current line of the program, as FILE:LINE."""
    position: int
    """Twice the number of steps, as `Pulse` counts them. It grows at the beginning and the end of a step."""
    signs: int
    """Number of signs of life at this position."""

    def __str__(self) -> str:
        step = (self.position + 1) // 2
        return f"{self.call or 'the program'} at {self.line}, step {step}"


class CallWatch:
    """Watches the thread that creates this object. It must be the thread in which the program trains."""

    def __init__(self, ranks: Ranks, pulse: Pulse, say: Callable[[str], None]) -> None:
        self._ranks = ranks
        self._pulse = pulse
        self._say = say
        self._store = dist.PrefixStore("imgkit-calls", dist.distributed_c10d._get_default_store())
        self._thread_id = threading.get_ident()
        # The text about this rank in the store, or None if there is none yet.
        self._published: str | None = None
        self._is_closed = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def close(self) -> None:
        """Stop the thread that watches."""
        self._is_closed.set()

    def _watch(self) -> None:
        """Publish the state of the watched thread if it has not changed for `LIMIT_S`, and compare the ranks.

        To publish means to write it into torch's store, which the other ranks can read. This function runs in
        a thread of its own.
        """
        state = self._read_state()
        start_s = time.monotonic()
        with contextlib.suppress(RuntimeError):  # raised when the process with the store has ended
            while not self._is_closed.wait(POLL_S):
                latest_state = self._read_state()
                if latest_state != state:
                    state = latest_state
                    start_s = time.monotonic()
                if time.monotonic() - start_s < LIMIT_S:
                    self._publish("")  # this rank has moved recently, so it is not stuck
                else:
                    self._publish(json.dumps(state))
                    self._compare_ranks()

    def _publish(self, text: str) -> None:
        """Write a text about this rank to the store, unless the store already has it."""
        if text != self._published:
            self._store.set(str(self._ranks.rank), text)
            self._published = text

    def _read_state(self) -> RankState:
        """Return the state of the thread that trains: its call, its line in the program, and its progress.

        The progress, which `Pulse` counts, consists of the position and the number of signs of life there.
        """
        # The innermost frames come first: those of torch and imgkit, then that of the program.
        frames = list(_iterate_frames(self._thread_id))
        library_frames = list(itertools.takewhile(_is_in_library, frames))
        program_frames = frames[len(library_frames) :]
        line = ""
        if program_frames:
            line = format_line(program_frames[0])
        position, signs = self._pulse.progress
        return RankState(_find_call(library_frames), line, position, signs)

    def _compare_ranks(self) -> None:
        """On rank 0, compare the ranks. On every rank, end the process if rank 0 has found them stuck."""
        # Only rank 0 decides, so that all ranks end with the same message. The others look for its verdict.
        if self._ranks.rank == 0:
            states = self._read_published_states()
            if states and are_stuck(states):
                self._store.set(_VERDICT, ranks_by_value([str(state) for state in states]))
        if self._store.check([_VERDICT]):
            self._end_process(self._store.get(_VERDICT).decode())

    def _read_published_states(self) -> list[RankState]:
        """Return the states of all ranks, or ``[]`` if a rank has moved within the last `LIMIT_S`.

        The store is a dict that all ranks share. `_watch` writes the state of a rank into it when the rank
        has not moved for `LIMIT_S`, and replaces it by an empty text when the rank moves again.
        """
        keys = [str(rank) for rank in range(self._ranks.world_size)]
        if not self._store.check(keys):  # reading a missing key would block the store
            return []
        published_texts = [self._store.get(key) for key in keys]
        if not all(published_texts):  # a text is empty, so its rank has moved
            return []
        return [RankState(*json_text.parse(text)) for text in published_texts]

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
        os._exit(EXIT_NO)  # an exception cannot reach the thread that trains, which waits in C code


def _iterate_frames(thread_id: int) -> Iterator[FrameType]:
    """Yield the frames of a thread's stack, innermost first, without the innermost frames of torch."""
    frame: FrameType | None = sys._current_frames().get(thread_id)
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_in_library(frame: FrameType) -> bool:
    """Return whether a frame belongs to torch or imgkit, and not to the program."""
    return frame.f_code.co_filename.startswith(_LIBRARIES)


def _find_call(library_frames: Sequence[FrameType]) -> str:
    """Return the call of the run in which a thread waits for other ranks, such as ``run.pause``, or ``""``.

    Parameters
    ----------
    library_frames : the innermost frames of the thread, up to the first frame of the program, innermost
        first.
    """
    # A thread that waits for other ranks is in one of `_WAITING_FILES` with its innermost frame.
    if not library_frames or library_frames[0].f_code.co_filename not in _WAITING_FILES:
        return ""
    codes = [frame.f_code for frame in library_frames]
    functions = [code.co_name for code in codes if code.co_filename in _CALL_FILES]
    if not functions:
        return ""
    called_function = functions[-1]  # the outermost function, which the program has called
    return _CALL_NAMES.get(called_function, f"run.{called_function}")


def format_line(frame: FrameType) -> str:
    """Return the current line of a frame as FILE:LINE."""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def are_stuck(states: Sequence[RankState]) -> bool:
    """Return whether ranks wait for each other in different calls, so that none of them can continue.

    For example, rank 0 waits in ``run.save`` and rank 1 in ``run.pause``, or both wait in ``run.save`` but at
    different steps. A rank that does not wait is busy. It may only be late. But if it has already passed the
    step in which another rank waits for it, it will never come.

    Parameters
    ----------
    states : what each rank is doing. The position of a rank grows with each of its steps.
    """
    waiting = [state for state in states if state.call]
    busy = [state for state in states if not state.call]
    if not waiting:
        return False
    first_waiting_position = min(state.position for state in waiting)
    for state in busy:
        if state.position <= first_waiting_position:  # it may still come to the call
            return False
    if busy:  # all of them have passed the first rank that waits
        return True
    # All ranks wait. If they wait in the same call at the same step, only the network is slow.
    calls = {(state.call, state.position) for state in waiting}
    return len(calls) > 1

"""Ends a run whose ranks wait in different calls of it, such as a run.pause on one rank alone.

gloo would end it after 30 minutes and NCCL after 10, and name no call. A thread of each rank looks at the
stack of the thread that trains. A rank that stays where it is says so in torch's store, and rank 0 compares.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
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

LIMIT_S = 600.0
"""Time for which the ranks must stay in different calls."""
LOOK_S = 10.0
"""Time between two looks."""
_FOLDER = Path(__file__).parent
_WAITING = (str(_FOLDER / "ranks.py"), str(_FOLDER / "agreement.py"))
"""Files whose functions wait for other ranks."""
_CALLS = {"_steps": "run.steps", "__exit__": "the end of the run"}
"""Calls of a program by functions of run.py; the others have the same name."""
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_LIBRARIES = (_TORCH, f"{_FOLDER.parent}{os.sep}", contextlib.__file__)
"""Where files begin that are not the program's."""
_VERDICT = "verdict"


class RankState(NamedTuple):
    """What a rank does."""

    call: str
    """The call of the run in which it waits for other ranks; empty: it does something else."""
    line: str
    """FILE:LINE of the program."""
    position: int
    """Its position and its signs of life, as the watchdog has them."""
    signs: int

    def __str__(self) -> str:
        step = (self.position + 1) // 2
        return f"{self.call or 'the program'} at {self.line}, step {step}"


class CallWatch:
    """Watches the thread of a rank that makes it."""

    def __init__(self, ranks: Ranks, pulse: Pulse, say: Callable[[str], None]) -> None:
        self._ranks, self._pulse, self._say = ranks, pulse, say
        self._store = dist.PrefixStore("imgkit-calls", dist.distributed_c10d._get_default_store())
        self._thread_id = threading.get_ident()
        self._closed = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def close(self) -> None:
        """End the watch."""
        self._closed.set()

    def _watch(self) -> None:
        state, since, published = self._look(), time.monotonic(), None
        with contextlib.suppress(RuntimeError):  # the process that has the store is gone
            while not self._closed.wait(LOOK_S):
                latest = self._look()
                if latest != state:
                    state, since = latest, time.monotonic()
                text = json.dumps(state) if time.monotonic() - since >= LIMIT_S else ""
                if text != published:
                    self._store.set(str(self._ranks.rank), text)
                    published = text
                if text:
                    self._end_if_stuck()

    def _look(self) -> RankState:
        frame: FrameType | None = sys._current_frames().get(self._thread_id)
        while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
            frame = frame.f_back
        is_waiting = frame is not None and frame.f_code.co_filename in _WAITING
        call = ""
        while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
            name = frame.f_code.co_name
            if is_waiting and frame.f_code.co_filename == str(_FOLDER / "run.py"):
                call = _CALLS.get(name, f"run.{name}")
            frame = frame.f_back
        return RankState(call, line_of(frame) if frame else "", *self._pulse.progress)

    def _end_if_stuck(self) -> None:
        if self._ranks.rank == 0:
            keys = [str(rank) for rank in range(self._ranks.world_size)]
            if not self._store.check(keys):  # to get one that is missing would block the store
                return
            rows = [self._store.get(key) for key in keys]
            states = [RankState(*json_text.parse(row)) for row in rows if row]
            if len(states) == len(rows) and are_stuck(states):
                self._store.set(_VERDICT, ranks_by_value(list(map(str, states))))
        if not self._store.check([_VERDICT]):
            return
        error = CheckFailed(
            f"the ranks have waited in different calls for {LIMIT_S / 60:g} minutes: "
            + self._store.get(_VERDICT).decode(),
            hint="call run.pause, run.save and the like on all ranks; let no rank leave a loop alone",
        )
        if not user_program.report(f"error: {error}"):
            for line in f"error: {error}".split("\n"):
                self._say(line)
        sys.stdout.flush()
        os._exit(EXIT_NO)


def line_of(frame: FrameType) -> str:
    """Return where a frame is, as FILE:LINE."""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def are_stuck(states: Sequence[RankState]) -> bool:
    """Return whether ranks wait for each other in different calls, and none of them is only late."""
    calls = {(state.call, state.position) for state in states if state.call}
    if not calls:
        return False
    first = min(position for _, position in calls)
    busy = [state.position for state in states if not state.call]
    # A rank in a later step has passed the call in which another one waits, and will never come to it.
    return all(position > first for position in busy) and len(calls) + len(busy) > 1

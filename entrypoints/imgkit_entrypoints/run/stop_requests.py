"""Requests to stop, as one rank sees them, and the report of a saved state."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from imgkit_entrypoints import fence, files
from imgkit_entrypoints.errors import EXIT_SAVED
from imgkit_entrypoints.launch import stop_protocol
from imgkit_entrypoints.launch.stop_protocol import REPEAT_S, RunFolder
from imgkit_entrypoints.launch.user_program import STOP_SIGNALS
from imgkit_entrypoints.run.ranks import Ranks

FOR_GOOD = "the stop file"
"""A person's request: the run is not requeued, and does not start while the file exists."""
REASONS = (FOR_GOOD, "a stop request from the node agent", "--stop-after", "a signal")


def reason_of(answers: Sequence[bool]) -> str:
    """Return the first of `REASONS` to which a rank has answered yes; empty if there is none."""
    return next((reason for reason, answer in zip(REASONS, answers, strict=True) if answer), "")


def folder_to_watch(
    run_dir: Path | None, env: Mapping[str, str], say: Callable[[str], None]
) -> RunFolder | None:
    """Return the run's folder, unless the node agent looks after it, which knows IMGKIT_RUN_DIR alone."""
    shared = env.get("IMGKIT_RUN_DIR") if env.get("IMGKIT_STOP_DIR") else None
    if run_dir is None or (shared and run_dir.resolve() == Path(shared).resolve()):
        return None
    return RunFolder(path=run_dir, say=say)


class StopRequests:
    """The requests that this rank can see: files, the node agent's flag, a time and signals.

    Parameters
    ----------
    folder : the run's folder, on the one rank that looks into it; None elsewhere.
    until : time of the monotonic clock at which the run is to stop.
    """

    def __init__(self, env: Mapping[str, str], folder: RunFolder | None, until: float = math.inf) -> None:
        self._flag = Path(env["IMGKIT_STOP_DIR"]) / stop_protocol.STOP if env.get("IMGKIT_STOP_DIR") else None
        self._folder, self._until = folder, until
        self._signalled: dict[int, float] = {}
        self._handlers: dict[int, Any] = {}
        """Those of before `listen`, by signal."""

    def answers(self) -> tuple[bool, ...]:
        """Return the answer to each of `REASONS`."""
        request = self._folder.request() if self._folder else None
        return (
            request is not None and not request.requeue,
            (request is not None and request.requeue) or (self._flag is not None and self._flag.exists()),
            time.monotonic() >= self._until,
            bool(self._signalled),
        )

    def listen(self) -> None:
        """Note the signals that request a stop, until `stop_listening` puts back the handlers of before.

        Under dist-run they do nothing without this. A second Ctrl-C ends the process at once.
        """
        if threading.current_thread() is not threading.main_thread():
            return  # Python allows no handlers here
        for number in STOP_SIGNALS:
            self._handlers[number] = signal.signal(number, self._note)
        os.register_at_fork(after_in_child=self._let_parents_end_it)

    def _let_parents_end_it(self) -> None:
        # Else multiprocessing's Process.terminate() would have no effect.
        if self._handlers:
            signal.signal(signal.SIGTERM, self._handlers[signal.SIGTERM])

    def stop_listening(self) -> None:
        """Put back the handlers of before `listen`."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def _note(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        first = self._signalled.setdefault(number, now)
        if number == signal.SIGINT and now - first > REPEAT_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def report_saved(
    reason: str, step: int, ranks: Ranks, folder: Path, env: Mapping[str, str], say: Callable[[str], None]
) -> int:
    """Report a saved state to whoever decides about a requeue, and return the exit code that fits.

    Under dist-run the node agent reads a mark, decides, and exits with 85. Plain torchrun turns every code
    but 0 into 1, so rank 0 decides, and leaves the code in the run's `folder` for the job script. Elsewhere
    the code 85 says that the state is saved.

    Raises
    ------
    OSError : the attempt of this worker is over, or a file cannot be written.
    """
    agent_folder = env.get("IMGKIT_STOP_DIR")
    if reason == FOR_GOOD:
        return 0
    if not agent_folder and "TORCHELASTIC_RUN_ID" not in env:
        return EXIT_SAVED
    if (ranks.local_rank if agent_folder else ranks.rank) != 0:
        return 0
    fence.check(env)
    job = env.get("IMGKIT_JOB_ID", stop_protocol.LOCAL_JOB)
    if agent_folder:
        files.put(Path(agent_folder) / stop_protocol.SAVED, f"{job} {step}\n")
        return 0
    run_folder = RunFolder(path=folder, say=say)
    code = run_folder.request_requeue(f"{job} {step}")
    run_folder.write(stop_protocol.RESULT, f"{job} {code}\n")
    return 0

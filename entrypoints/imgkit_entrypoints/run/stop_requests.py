"""Find requests to stop on one rank, and report a saved state to the program that started this process."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from imgkit_entrypoints import fence, files
from imgkit_entrypoints.errors import EXIT_SAVED
from imgkit_entrypoints.launch import stop_protocol
from imgkit_entrypoints.launch.stop_protocol import REPEAT_S, RunFolder
from imgkit_entrypoints.launch.user_program import STOP_SIGNALS
from imgkit_entrypoints.run.ranks import Ranks

# A request of a person. The run is not requeued, and does not start as long as the file exists.
STOP_FILE = "the stop file"
AGENT_REQUEST = "a stop request from the node agent"
STOP_AFTER = "--stop-after"
SIGNAL = "a signal"
# Reasons for a stop. If several apply, the first one is used.
REASONS = (STOP_FILE, AGENT_REQUEST, STOP_AFTER, SIGNAL)


def folder_to_watch(
    run_dir: Path | None, env: Mapping[str, str], say: Callable[[str], None]
) -> RunFolder | None:
    """Return the run's folder if this process must look for a stop file in it, else None.

    The node agent (the process that starts the workers on a node) watches only the folder IMGKIT_RUN_DIR. The
    program may use another folder.
    """
    if run_dir is None:
        return None
    agent_run_dir = env.get("IMGKIT_RUN_DIR")
    has_agent = bool(env.get("IMGKIT_STOP_DIR"))
    if has_agent and agent_run_dir and run_dir.resolve() == Path(agent_run_dir).resolve():
        return None
    return RunFolder(path=run_dir, log=say)


class StopRequests:
    """Collects the requests to stop that this rank can see: files, the node agent's flag, a time, signals.

    Parameters
    ----------
    folder : the run's folder on the rank that looks into it, and None on other ranks.
    until : time of the monotonic clock at which the run must stop.
    """

    def __init__(self, env: Mapping[str, str], folder: RunFolder | None, until: float = math.inf) -> None:
        # The node agent creates this file to request a stop. None means that there is no node agent.
        self._agent_flag: Path | None = None
        if env.get("IMGKIT_STOP_DIR"):
            self._agent_flag = Path(env["IMGKIT_STOP_DIR"]) / stop_protocol.STOP
        self._folder = folder
        self._until = until
        # The time at which each signal was received first.
        self._signal_times: dict[int, float] = {}
        # The handlers that `listen` has replaced, by signal.
        self._previous_handlers: dict[int, Any] = {}

    def find_reasons(self) -> set[str]:
        """Return those of `REASONS` for which this rank has seen a request to stop.

        The ranks exchange their results, so that all of them stop if one has a reason.
        """
        reasons = set()
        # The node agent (the process that starts the workers on a node) creates this file.
        if self._agent_flag is not None and self._agent_flag.exists():
            reasons.add(AGENT_REQUEST)
        request = self._folder.stop_request() if self._folder else None
        # A stop file from a job script requests a requeue, so it is treated like a request of the node agent.
        # A stop file from a person does not request a requeue.
        if request is not None:
            reasons.add(AGENT_REQUEST if request.requeue else STOP_FILE)
        if time.monotonic() >= self._until:
            reasons.add(STOP_AFTER)
        if self._signal_times:
            reasons.add(SIGNAL)
        return reasons

    def listen(self) -> None:
        """Record signals that request a stop, until `stop_listening` restores the previous handlers.

        Under dist-run, these signals have no effect until this method is called. A second Ctrl-C ends the
        process immediately.
        """
        if threading.current_thread() is not threading.main_thread():  # only this thread may set handlers
            return
        for signal_number in STOP_SIGNALS:
            self._previous_handlers[signal_number] = signal.signal(signal_number, self._on_signal)
        # Children ask no rank to stop, and Process.terminate() must end them. They keep the other handlers: a
        # Ctrl-C also reaches them, and the program needs them until it has saved.
        os.register_at_fork(after_in_child=self._restore_sigterm)

    def _restore_sigterm(self) -> None:
        """Restore the previous handler of SIGTERM in a forked child.

        Otherwise, Process.terminate() of multiprocessing would have no effect on the child.
        """
        if self._previous_handlers:
            signal.signal(signal.SIGTERM, self._previous_handlers[signal.SIGTERM])

    def stop_listening(self) -> None:
        """Restore the handlers that `listen` has replaced."""
        for signal_number, handler in self._previous_handlers.items():
            signal.signal(signal_number, handler)
        self._previous_handlers = {}

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Record a request to stop. After a second Ctrl-C, end the process."""
        now = time.monotonic()
        first_time = self._signal_times.setdefault(number, now)
        # A repetition within REPEAT_S is the same Ctrl-C: the terminal sends it to all processes, and
        # launchers forward it again.
        if number == signal.SIGINT and now - first_time > REPEAT_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def report_saved(
    reason: str, step: int, ranks: Ranks, folder: Path, env: Mapping[str, str], say: Callable[[str], None]
) -> int:
    """Report a saved state to the process that decides about a requeue, and return this process's exit code.

    There are four cases:

    * After a stop file, all processes exit with 0, because a person wants the run to remain stopped.
    * Under dist-run, the node agent reads a file, decides about the requeue, and exits with 85.
    * Under plain torchrun, which turns every exit code except 0 into 1, rank 0 decides. It writes the code
      into the run's folder for the job script.
    * Otherwise, this process itself exits with 85, which means that the state is saved.

    Parameters
    ----------
    reason : why the run stops, one of `REASONS`.
    step : the step of the saved state.
    folder : the run's folder.

    Raises
    ------
    OSError : the attempt of this worker is over, or a file cannot be written.
    """
    if reason == STOP_FILE:
        return 0
    job_id = env.get("IMGKIT_JOB_ID", stop_protocol.LOCAL_JOB)
    saved_state = f"{job_id} {step}"
    agent_folder = env.get("IMGKIT_STOP_DIR")
    if agent_folder:
        if ranks.local_rank == 0:  # one file per node, since each node has an agent
            fence.check_fence(env)
            files.write_file(Path(agent_folder) / stop_protocol.SAVED, f"{saved_state}\n")
        return 0
    if "TORCHELASTIC_RUN_ID" not in env:  # neither dist-run nor torchrun has started this process
        return EXIT_SAVED
    if ranks.rank == 0:
        fence.check_fence(env)
        run_folder = RunFolder(path=folder, log=say)
        code = run_folder.request_requeue(saved_state)
        run_folder.write(stop_protocol.RESULT, f"{job_id} {code}\n")
    return 0

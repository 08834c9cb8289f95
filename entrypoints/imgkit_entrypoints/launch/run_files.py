"""Write the head's files in the run's folder, for the job script and for people.

Other nodes write none of these files, and neither does a run without a folder. A file that cannot be written
never ends the run: most methods then print a warning.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import time
from collections.abc import Callable

from imgkit_entrypoints import fence
from imgkit_entrypoints.errors import EXIT_SAVED
from imgkit_entrypoints.launch import gpu_use, stop_protocol
from imgkit_entrypoints.launch.stop_protocol import RESULT, RunFolder, StopRequest
from imgkit_entrypoints.rollcall.messages import GpuUse
from imgkit_entrypoints.rollcall.session import HeadSession

PLAN_FILE = "launch.txt"
"""File in the run's folder with every setting and its reason."""


class RunFiles:
    """The head's files in the run's folder.

    Parameters
    ----------
    folder : the run's folder. None on nodes other than the head, and for a run without a folder.
    job_id : the job's id, which the job script compares with its own.
    log : prints one message.
    """

    def __init__(self, folder: RunFolder | None, job_id: str, log: Callable[..., None]) -> None:
        self.folder = folder
        self.run_id = secrets.token_hex(4)
        """Random name of this start of the run. Workers compare it before they write (fence.py)."""
        self._job_id, self._log = job_id, log
        self._next_gpu_write_s = 0.0

    def prepare(self, plan_text: str) -> None:
        """Remove the files of an earlier start from the run's folder, and write the new plan.

        Raises
        ------
        UsageError : the run cannot use the folder.
        """
        if self.folder is None:
            return
        self.folder.refuse_if_unusable()
        self.folder.clear()
        if plan_text:
            self._write(PLAN_FILE, plan_text, "the reasons of the settings are not there")

    def write_result(self, code: int) -> None:
        """Write the exit code of the run. When this file exists, the job script considers the run ended."""
        loss = "the job script and imgkit status will not see how the run has ended"
        self._write(RESULT, f"{self._job_id} {code}\n", loss)

    def write_gpu_use(self, session: HeadSession) -> GpuUse | None:
        """Write the GPU use of all nodes so far into the run's folder, and return it.

        Return None and write nothing if no node has reported its GPU use yet.
        """
        use = gpu_use.combine_uses(session.gpu_uses.values())
        if use:
            document = json.dumps(dataclasses.asdict(use)) + "\n"
            self._write(stop_protocol.GPU_USE, document, "imgkit will not see how much its GPUs are used")
        return use

    def write_gpu_use_when_due(self, session: HeadSession) -> None:
        """Write the GPU use of all nodes, unless it was written less than a minute ago."""
        if time.monotonic() >= self._next_gpu_write_s:
            self._next_gpu_write_s = time.monotonic() + gpu_use.WRITE_EVERY_S
            self.write_gpu_use(session)

    def admit_attempt(self, attempt: int) -> None:
        """Allow only workers of this attempt to write into the run's folder.

        Workers of an earlier attempt may still be running on a lost node, and would overwrite newer files.
        """
        if self.folder is None:
            return
        problem = fence.admit_attempt(self.folder.path, self._job_id, attempt, self.run_id)
        if problem:
            self._log(f"warning: {problem}")

    def stop_request(self) -> StopRequest | None:
        """Return the request to stop that a person or the job script has left in the folder, or None."""
        if self.folder is None:
            return None
        return self.folder.stop_request()

    def request_requeue(self, saved_state: str) -> int:
        """Ask the job script to requeue a run that has saved its state, and return the exit code of the run.

        The request is a file, because the exit code that a scheduler passes on is unreliable: if Slurm has
        killed a task, it reports the code of that task.
        """
        if self.folder is None or not saved_state:
            return EXIT_SAVED
        try:
            return self.folder.request_requeue(saved_state)
        except OSError as error:
            self._warn_of_lost_file(error, "no script requeues the job")
        return EXIT_SAVED

    def _write(self, name: str, text: str, loss: str) -> None:
        """Write a file. If that fails, print a warning that ends with `loss`, which says what is lost."""
        if self.folder is None:
            return
        try:
            self.folder.write(name, text)
        except OSError as error:
            self._warn_of_lost_file(error, loss)

    def _warn_of_lost_file(self, error: OSError, loss: str) -> None:
        assert self.folder is not None  # noqa: S101 - the callers return early without a folder
        self._log(f"warning: {self.folder.path}: {error.strerror}; {loss}")

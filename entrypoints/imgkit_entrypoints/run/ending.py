"""The end of a program that was asked to stop: its exit code, and an interpreter that ends in order."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from imgkit_entrypoints.errors import EXIT_NO, EXIT_SAVED, CheckFailed
from imgkit_entrypoints.run import stop_requests
from imgkit_entrypoints.run.ranks import Ranks

_CODES: list[int] = []
"""Exit codes of runs that were stopped."""


class NotSaved(CheckFailed):
    """The last state of a run that is done could not be written; all ranks raise it."""


def code_of(step: int, saved: int, why: str, folder: Path, here: Ranks, env: Mapping[str, str]) -> int:
    """Leave the mark of a saved state where somebody reads it, and return the exit code that fits.

    Under dist-run the launcher reads the mark, and exits with 85. torchrun turns every code but 0 into 1, so
    its mark lies in the run folder. Elsewhere the code 85 says that the state is saved.
    """
    if saved != step:
        return EXIT_NO
    if why == stop_requests.FOR_GOOD or stop_requests.tell_saved(step, here.local_rank, env):
        return 0
    if "TORCHELASTIC_RUN_ID" not in env:
        return EXIT_SAVED
    if here.rank == 0:
        stop_requests.mark_saved(folder, step, env)
    return 0


def leave(code: int) -> None:
    """Raise SystemExit. Whatever the destructors do then, the process ends with `code`."""
    _CODES.append(code)
    raise SystemExit(code)


def _end_in_order() -> None:
    """Free the process group before the interpreter is finalized.

    gloo's threads release their last works late. A thread that asks a finalizing interpreter for its lock
    ends the process by SIGABRT, also after a correct run of a bare DDP loop.
    """
    gc.collect()
    if _CODES:  # a model in a global variable still keeps its group
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_CODES[-1])


atexit.register(_end_in_order)

"""The end of a program that was asked to stop: its exit code, and an interpreter that ends in order."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch.distributed as dist

from imgkit_entrypoints.errors import EXIT_NO, EXIT_SAVED, CheckFailed
from imgkit_entrypoints.run import stop_requests
from imgkit_entrypoints.run.kept_state import KeptState
from imgkit_entrypoints.run.ranks import Ranks
from imgkit_entrypoints.run.stepping import Stepping

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


def leave(
    state: KeptState, stepping: Stepping, here: Ranks, env: Mapping[str, str], tell: Callable[[str], None]
) -> None:
    """Raise SystemExit once the saved state is whole. Whatever destructors do then, its code stays."""
    stepping.end()
    step, why = state.place.step, stepping.agreement.stop
    saved = state.wait(here).saved_step
    if state.folder is None:
        tell(f"stopped after step {step}: {why}")
        code = EXIT_NO
    else:
        kept = f"the state of step {saved} is saved" if saved >= 0 else "this start saved no state"
        tell(f"stopped after step {step}: {why}; {kept}")
        code = code_of(step, saved, why, state.folder, here, env)
    _CODES.append(code)
    raise SystemExit(code)


def finish(state: KeptState, stepping: Stepping, here: Ranks, tell: Callable[[str], None]) -> None:
    """Save the last state of a run that is done.

    Raises
    ------
    NotSaved : it could not be written.
    """
    if here.world_size > 1 and not dist.is_initialized():
        if state.has_moved:
            tell("warning: the last state is not saved: there is no process group at the end of `with`")
        return
    stepping.end()
    here.gather("", str, call="the end of the run")
    stepping.agreement.stop = ""  # all is done
    if state.has_moved:
        state.save(here)
    if state.has_written and state.wait(here).saved_step != state.place.step:
        raise NotSaved(f"the state of step {state.place.step} is not saved", where=str(state.folder))


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

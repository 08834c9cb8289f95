"""Connect a run to its other ranks, and end the process in a way that does not crash."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import torch.distributed as dist

from imgkit_entrypoints.launch.watchdog import Pulse
from imgkit_entrypoints.run.agreement import Agreement, NumberLog
from imgkit_entrypoints.run.call_watch import CallWatch
from imgkit_entrypoints.run.ranks import Ranks, connect_ranks, with_new_group
from imgkit_entrypoints.run.stop_requests import StopRequests


class _ConnectedRanks(NamedTuple):
    """The ranks after they have been connected, and the agreement between them."""

    ranks: Ranks
    """The ranks, with a process group for values in host memory."""
    agreement: Agreement


class RunConnection:
    """The connection between the ranks of a run.

    The ranks are connected when `ranks` or `agreement` is read for the first time. Earlier is not possible,
    because the program may not have opened its process group yet.
    """

    def __init__(
        self,
        env: Mapping[str, str],
        requests: StopRequests,
        log: NumberLog,
        pulse: Pulse,
        say: Callable[[str], None],
    ) -> None:
        self.env = env
        self.log = log
        self._rank = int(env.get("RANK", "0"))
        self._requests = requests
        self._pulse = pulse
        self._say = say
        self._connected: _ConnectedRanks | None = None
        self._call_watch: CallWatch | None = None
        # The process group that this object has opened and must close.
        self._own_group: Any = None

    @property
    def is_open(self) -> bool:
        """Whether the ranks are connected."""
        return self._connected is not None

    @property
    def ranks(self) -> Ranks:
        """The ranks, with a process group for values in host memory."""
        return self._connect().ranks

    @property
    def agreement(self) -> Agreement:
        """The exchange of numbers and requests to stop between the ranks."""
        return self._connect().agreement

    @property
    def stop(self) -> str:
        """Why all ranks stop at the next save. Empty if they do not stop."""
        return self._connected.agreement.stop if self._connected else ""

    def _connect(self) -> _ConnectedRanks:
        """Connect the ranks by a new gloo group, unless they are already connected."""
        if self._connected is None:
            ranks = connect_ranks(self.env, self._rank)
            self._own_group = ranks.group
            return self.use_ranks(ranks)
        return self._connected

    def use_ranks(self, ranks: Ranks) -> _ConnectedRanks:
        """Use `ranks` and their process group in all calls of the run."""
        # For checkpoints, the ranks exchange values in host memory, which needs a group without a GPU.
        host_ranks = ranks if ranks.device.type == "cpu" else with_new_group(ranks)
        agreement = Agreement(ranks, self._requests.find_reasons, self.log)
        self._connected = _ConnectedRanks(host_ranks, agreement)
        if ranks.world_size > 1:  # a single rank cannot wait for another
            self._call_watch = CallWatch(ranks, self._pulse, self.report)
        return self._connected

    def report(self, text: str) -> None:
        """Report a line to the user on rank 0. Other ranks do nothing."""
        if self._rank == 0:
            self._say(text)

    def wait_for_last_numbers(self, step: int) -> None:
        """Wait for the last numbers of all ranks, and write the last line of the log.

        Raises
        ------
        CheckFailed : (on every rank) the ranks have taken different numbers of steps.
        """
        self.agreement.exchange_and_wait(step, "the end of the run")
        self.log.write_line(step)

    def stop_watching(self) -> None:
        """Stop the thread that checks for ranks in different calls."""
        if self._call_watch is not None:
            self._call_watch.close()

    def close_group(self) -> None:
        """Destroy the process group that the run has opened."""
        if self._own_group is not None:
            dist.destroy_process_group(self._own_group)


# Exit codes of runs that were stopped. The process ends with the last code, see `_free_groups_at_exit`.
_EXIT_CODES: list[int] = []


def end_program(code: int) -> NoReturn:
    """Raise SystemExit, and make sure that the process ends with this exit code."""
    _EXIT_CODES.append(code)
    raise SystemExit(code)


def _free_groups_at_exit() -> None:
    """Free process groups before the interpreter shuts down. After a stopped run, end the process here.

    Python calls this when the program has ended. gloo's threads release their last work objects late. If a
    thread then requests the lock of an interpreter that is shutting down, the process ends with SIGABRT. This
    happens even after a correct run of a simple DDP loop.
    """
    gc.collect()  # frees the groups of models that are no longer used, which form reference cycles
    # A model in a global variable still has its group. So a stopped run skips the rest of the shutdown, which
    # would crash and replace its exit code. `end_program` stores the code.
    if _EXIT_CODES:
        exit_code = _EXIT_CODES[-1]
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


atexit.register(_free_groups_at_exit)

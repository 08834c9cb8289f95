"""The other ranks of a run: when it meets them, what they agree on, and how it leaves them."""

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
    ranks: Ranks
    """With a group for values in host memory."""
    agreement: Agreement


class RunConnection:
    """The ranks of a run. They meet when `ranks` or `agreement` is read for the first time.

    Until then the program may not have opened its process group yet.
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
        # The process group that this object has opened, and closes.
        self._own_group: Any = None

    @property
    def is_open(self) -> bool:
        """Whether the run has met the other ranks."""
        return self._connected is not None

    @property
    def ranks(self) -> Ranks:
        """The ranks, with a group for values in host memory."""
        return self._connect().ranks

    @property
    def agreement(self) -> Agreement:
        """What the ranks agree on at the ends of steps."""
        return self._connect().agreement

    @property
    def stop(self) -> str:
        """Why all ranks stop at the next save, or empty while they go on."""
        return self._connected.agreement.stop if self._connected else ""

    def _connect(self) -> _ConnectedRanks:
        """Meet the other ranks in a new gloo group, if the run has not met them yet."""
        if self._connected is None:
            ranks = connect_ranks(self.env, self._rank)
            self._own_group = ranks.group
            return self.use_ranks(ranks)
        return self._connected

    def use_ranks(self, ranks: Ranks) -> _ConnectedRanks:
        """Use these ranks and their process group in all calls of the run."""
        # What the ranks exchange for checkpoints lies in host memory.
        host_ranks = ranks if ranks.device.type == "cpu" else with_new_group(ranks)
        agreement = Agreement(ranks, self._requests.find_reasons, self.log)
        self._connected = _ConnectedRanks(host_ranks, agreement)
        if ranks.world_size > 1:
            self._call_watch = CallWatch(ranks, self._pulse, self.report)
        return self._connected

    def report(self, text: str) -> None:
        """Report a line on rank 0."""
        if self._rank == 0:
            self._say(text)

    def wait_for_last_numbers(self, step: int) -> None:
        """Wait for the last numbers of ranks that may have taken different numbers of steps."""
        self.agreement.wait_for_ranks(step, "the end of the run")
        self.log.write_line(step)

    def stop_watching(self) -> None:
        """End the watch over the calls of the ranks."""
        if self._call_watch is not None:
            self._call_watch.close()

    def close_group(self) -> None:
        """Free the process group of the run."""
        if self._own_group is not None:
            dist.destroy_process_group(self._own_group)


# Exit codes of runs that were stopped. The last one counts, whatever destructors do then.
_EXIT_CODES: list[int] = []


def end_program(code: int) -> NoReturn:
    """Raise SystemExit, and see to it that the process ends with this code."""
    _EXIT_CODES.append(code)
    raise SystemExit(code)


def _end_in_order() -> None:
    """Free the process group before the interpreter is finalized.

    gloo's threads release their last works late. A thread that asks a finalizing interpreter for its lock
    ends the process by SIGABRT, also after a correct run of a bare DDP loop.
    """
    gc.collect()
    if _EXIT_CODES:  # a model in a global variable still keeps its group
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_EXIT_CODES[-1])


atexit.register(_end_in_order)

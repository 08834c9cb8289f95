"""Agreement of all ranks without a wait in any step: they add up a few numbers, and read the sum later.

Every few steps the ranks send their numbers, and read the sums at the next look. So all ranks learn of a
request to stop at the same step, and no step waits for another rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from imgkit_entrypoints.errors import CheckFailed
from imgkit_entrypoints.run.ranks import Ranks, told
from imgkit_entrypoints.run.stop_requests import reason_of

LATENCY_S = 0.5
"""Approximate time between two looks if steps are slow; with fast steps, a look comes every `most` steps."""
_CYCLE = 4096
"""Steps are compared modulo this, so that the sum of their squares over a million ranks is exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """The sums that arrived at a look."""

    step: int
    steps: int
    """Steps since the look before."""
    seconds: float
    """Their duration on this rank's clock."""
    sums: tuple[float, ...]
    """The numbers of all ranks, added up."""


class AddedNumbers(Protocol):
    """What the ranks add up at each look, beside their answers."""

    def take(self, *, everything: bool) -> Tensor:
        """This rank's numbers since the last call: float64, equally many on all ranks.

        `everything` asks for those up to now, even if it has to wait for a device.
        """

    def arrived(self, agreed: Agreed) -> None:
        """Take the sums of all ranks. Every rank gets the same; what this raises, it raises on all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnderWay:
    step: int
    steps: int
    seconds: float
    work: Any
    numbers: Tensor
    count: int
    """How many of them are not this module's own."""
    copied: Any
    """CUDA event after the copy to the host; None on CPU."""


class Agreement:
    """Sends this rank's numbers and answers every few steps, and receives the sums of all ranks.

    Parameters
    ----------
    here : ranks and the device of the numbers.
    asked : returns this rank's answer to each of `stop_requests.REASONS`.
    """

    def __init__(self, here: Ranks, asked: Callable[[], Sequence[bool]], numbers: AddedNumbers) -> None:
        self._here, self._asked, self.numbers = here, asked, numbers
        self._under_way: _UnderWay | None = None
        self._interval = self._most = 1
        self._sent_step, self._last_time = 0, time.perf_counter()
        """Step of the last look, or of `begin`."""
        self.stop = ""
        """Reason why all ranks stop after this step; empty: go on."""

    def begin(self, step: int, most: int) -> None:
        """Start the clock after `step` steps; at most `most` steps lie between two looks."""
        self._most = most
        self.restart(step)

    def restart(self, step: int) -> None:
        """Do so with the same limit."""
        self._sent_step, self._last_time = step, time.perf_counter()

    def looks(self, step: int) -> bool:
        """Whether a look is due after `step`."""
        return step // self._interval > self._sent_step // self._interval

    def after(self, step: int) -> None:
        """Look, if it is time: take the sums of the last look, and send what has come since.

        Raises
        ------
        CheckFailed : on every rank, if the ranks have taken different numbers of steps; names them.
        """
        if self.looks(step):
            self._exchange(step, everything=False)
            if self.stop:  # the ranks will save, and all numbers belong to that
                self._receive()

    def settle(self, step: int) -> None:
        """Wait for the numbers of all steps up to `step`; a collective call, as are `after` and `meet`."""
        if step > self._sent_step:
            self._exchange(step, everything=True)
        self._receive()

    def meet(self, step: int) -> None:
        """Do the same where the ranks may have taken different numbers of steps: at the end of a loop."""
        self._exchange(step, everything=True)
        self._receive()

    def _exchange(self, step: int, *, everything: bool) -> None:
        self._receive()
        self._send(step, self.numbers.take(everything=everything).to(self._here.device))

    def _send(self, step: int, numbers: Tensor) -> None:
        now = time.perf_counter()
        seconds, steps = now - self._last_time, step - self._sent_step
        self._last_time, self._sent_step = now, step
        turn = step % _CYCLE
        own = [seconds / max(1, steps), turn, turn * turn, *map(float, self._asked())]
        answers = torch.tensor(own, dtype=numbers.dtype).to(numbers.device, non_blocking=True)
        sent = torch.cat([answers, numbers])
        work = copied = None
        if self._here.world_size > 1:
            work = dist.all_reduce(sent, async_op=True, group=self._here.group)
        if numbers.device.type == "cuda":
            if work is not None:
                work.wait()  # the stream waits, the host does not
            sent, copied = sent.to("cpu", non_blocking=True), torch.cuda.Event()
            copied.record()
        self._under_way = _UnderWay(
            step=step,
            steps=steps,
            seconds=seconds,
            work=work,
            numbers=sent,
            count=len(numbers),
            copied=copied,
        )

    def _receive(self) -> None:
        """Wait for the sums that are under way, if there are any."""
        arrived, self._under_way = self._under_way, None
        if arrived is None:
            return
        if arrived.copied is not None:
            arrived.copied.synchronize()
        elif arrived.work is not None:
            arrived.work.wait()
        seconds_a_step, total, squares, *rest = arrived.numbers.tolist()
        ranks = self._here.world_size
        if int(squares) * ranks != int(total) ** 2:
            raise self._unequal(arrived.step)
        if arrived.steps:
            self._interval = interval(seconds_a_step / ranks, self._most)
        answers = len(rest) - arrived.count
        self.stop = self.stop or reason_of([some > 0 for some in rest[:answers]])
        self.numbers.arrived(
            Agreed(
                step=arrived.step,
                steps=arrived.steps,
                seconds=arrived.seconds,
                sums=tuple(rest[answers:]),
            )
        )

    def _unequal(self, step: int) -> CheckFailed:
        every = self._here.gather(step, int, call="a loop")
        return CheckFailed(
            f"the ranks have taken different numbers of steps: {told(every)}",
            hint="give every rank equally many batches, for example by DistributedSampler",
        )


def interval(seconds_a_step: float, most: int) -> int:
    """Steps between two looks: a divisor of `most`, so that looks coincide with lines of the log."""
    wanted = most if seconds_a_step <= 0 else LATENCY_S / seconds_a_step
    return max(size for size in range(1, most + 1) if most % size == 0 and (size == 1 or size <= wanted))

"""Agreement of all ranks without a wait in any step: they add up a few numbers, and read the sum later.

Every few steps the ranks send their numbers, and read the sums at the next look. So all ranks learn of a
request to stop at the same step, and no step waits for another rank. `NumberLog` has the numbers that a loop
logs: added up on their device, averaged over steps and ranks.
"""

from __future__ import annotations

import dataclasses
import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from imgkit_entrypoints import terminal
from imgkit_entrypoints.errors import CheckFailed, UsageError
from imgkit_entrypoints.run.metrics import MetricsFile, now
from imgkit_entrypoints.run.ranks import Ranks, ranks_by_value, refuse_different_calls
from imgkit_entrypoints.run.stop_requests import REASONS, reason_of

LATENCY_S = 0.5
"""Approximate time between two looks if steps are slow; with fast steps, a look comes every `most` steps."""
STEP_END, PASS_END = "the end of a step", "the end of a pass"
"""Calls at which ranks differ if they have taken different numbers of steps."""
_CYCLE = 4096
"""Steps and calls are compared modulo this, so that the sum of the squares over a million ranks is exact."""


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

    def take(self) -> Tensor:
        """Return this rank's numbers since the last call: float64, equally many on all ranks."""

    def arrived(self, look: Agreed, /) -> None:
        """Take the sums of all ranks. Every rank gets the same; what this raises, it raises on all."""


class Agreement:
    """Sends this rank's numbers and answers every few steps, and receives the sums of all ranks.

    Parameters
    ----------
    ranks : the ranks, and the device of the numbers.
    answers : returns this rank's answer to each of `stop_requests.REASONS`.
    """

    def __init__(self, ranks: Ranks, answers: Callable[[], Sequence[bool]], numbers: AddedNumbers) -> None:
        self._ranks, self._answers, self.numbers = ranks, answers, numbers
        self._sent: tuple[Agreed, str, Any, Tensor] | None = None
        """What is under way: the look without its sums, the program's call, torch's call, and the numbers."""
        self._interval = self._most = 1
        self._sent_step, self._sent_time = 0, time.perf_counter()
        """Step and time of the last look, or of `start`."""
        self.stop = ""
        """Reason why all ranks stop after this step; empty: go on."""

    def start(self, step: int, most: int | None = None) -> None:
        """Start the clock after `step` steps; at most `most` steps lie between two looks."""
        self._most = most or self._most
        self._sent_step, self._sent_time = step, time.perf_counter()

    def looks(self, step: int) -> bool:
        """Return whether a look is due after `step`."""
        return step // self._interval > self._sent_step // self._interval

    def after(self, step: int) -> None:
        """Look, if it is time: take the sums of the last look, and send what has come since.

        Raises
        ------
        CheckFailed : on every rank, if the ranks have taken different numbers of steps; names them.
        """
        if self.looks(step):
            self._exchange(step, STEP_END)
            if self.stop:  # the ranks will save, and all numbers belong to that
                self._receive()

    def meet(self, step: int, call: str) -> None:
        """Wait for the numbers of all steps up to `step`, in the program's `call`; a collective call.

        Raises
        ------
        CheckFailed : on every rank, if they have taken different numbers of steps, or are at different calls.
        """
        self._exchange(step, call)
        self._receive()

    def _exchange(self, step: int, call: str) -> None:
        self._receive()
        numbers = self.numbers.take().to(self._ranks.device)
        seconds, steps = time.perf_counter() - self._sent_time, step - self._sent_step
        self.start(step)
        turn = (step + zlib.crc32(call.encode())) % _CYCLE
        values = [seconds / max(1, steps), turn, turn * turn, *map(float, self._answers())]
        answers = torch.tensor(values, dtype=numbers.dtype).to(numbers.device, non_blocking=True)
        sent, work = torch.cat([answers, numbers]), None
        if self._ranks.world_size > 1:
            work = dist.all_reduce(sent, async_op=True, group=self._ranks.group)
        self._sent = Agreed(step=step, steps=steps, seconds=seconds, sums=()), call, work, sent

    def _receive(self) -> None:
        """Wait for the sums that are under way, if there are any."""
        if self._sent is None:
            return
        (look, call, work, numbers), self._sent = self._sent, None
        if work is not None:
            work.wait()
        seconds_a_step, total, squares, *sums = numbers.tolist()
        world_size = self._ranks.world_size
        if int(squares) * world_size != int(total) ** 2:
            name = "a loop" if call in (STEP_END, PASS_END) else call
            steps, calls = zip(*self._ranks.gather((look.step, call), call=name), strict=True)
            if len(set(steps)) == 1:
                refuse_different_calls(calls)
            raise CheckFailed(
                f"the ranks have taken different numbers of steps: {ranks_by_value(steps)}",
                hint="give every rank the same number of batches, for example by DistributedSampler",
            )
        if look.steps:
            self._interval = interval(seconds_a_step / world_size, self._most)
        answers, sums = sums[: len(REASONS)], sums[len(REASONS) :]
        self.stop = self.stop or reason_of([count > 0 for count in answers])
        self.numbers.arrived(dataclasses.replace(look, sums=tuple(sums)))


def interval(seconds_a_step: float, most: int) -> int:
    """Return the steps between two looks: a divisor of `most`, so that looks come at lines of the log."""
    limit = most if seconds_a_step <= 0 else LATENCY_S / seconds_a_step
    return max(size for size in range(1, most + 1) if most % size == 0 and (size == 1 or size <= limit))


MOST_NAMES = 16
"""Most names. All ranks send as many numbers, also those that log nothing."""
RESERVED_NAMES = ("time", "step", "epoch", "steps_per_s")
"""Names of a line's own values."""
LINE_S = 5.0
"""Time between two lines."""


class NumberLog:
    """Adds up logged numbers, and writes a line of their means over steps and ranks every few seconds.

    Parameters
    ----------
    metrics : gets the lines; None: another rank writes them.
    passes : returns the epochs so far, for a line.
    """

    def __init__(self, metrics: MetricsFile | None, passes: Callable[[], float]) -> None:
        self._metrics, self._passes = metrics, passes
        self._names: tuple[str, ...] = ()
        """Names of the first call."""
        self._sums: dict[str, Any] = {}
        self._count = 0
        self._last_line = -math.inf
        self._start_line()

    def _start_line(self) -> None:
        self._totals = [0.0] * (1 + MOST_NAMES)
        """Sums of all ranks since the last line: how often they logged, and the numbers."""
        self._steps, self._seconds = 0, 0.0

    def add(self, numbers: Mapping[str, Any]) -> None:
        """Add the numbers of one step: tensors with one number, or plain ones.

        Raises
        ------
        UsageError : there are other names than at first, too many, or something else than a number.
        """
        if tuple(numbers) != self._names:
            self._take_names(numbers)
        for name, value in numbers.items():
            number = value.detach().double() if isinstance(value, Tensor) else float(value)
            self._sums[name] = self._sums[name] + number if self._count else number
        self._count += 1

    def _take_names(self, numbers: Mapping[str, Any]) -> None:
        if self._names or len(numbers) > MOST_NAMES or set(numbers) & set(RESERVED_NAMES):
            first = f"; the first call gave {', '.join(self._names)}" if self._names else ""
            raise UsageError(
                f"run.log got the numbers {', '.join(numbers) or 'none'}{first}",
                hint=f"give the same names at every call, at most {MOST_NAMES}, and none of "
                f"{', '.join(RESERVED_NAMES)}",
            )
        for name, value in numbers.items():
            shape = tuple(value.shape) if isinstance(value, Tensor) else None
            if shape or not isinstance(value, (Tensor, int, float)):
                kind = f"a tensor of shape {shape}" if shape else f"a {type(value).__name__}"
                hint = "give one number, for example loss.mean()"
                raise UsageError(f"run.log got {kind} as {name}", hint=hint)
        self._names = tuple(numbers)

    def take(self) -> Tensor:
        """Return this rank's sums since the last call, in host memory, after a digest of their names."""
        sums = torch.zeros(4 + MOST_NAMES, dtype=torch.float64)
        mark = zlib.crc32("\0".join(self._names).encode()) & 0xFFFF
        if self._names:
            sums[:3] = torch.tensor([1, mark, mark * mark])
        sums[3] = self._count
        for number, value in enumerate(self._sums.values(), start=4):
            sums[number] = float(value)
        self._sums, self._count = {}, 0
        return sums

    def arrived(self, look: Agreed) -> None:
        """Add the sums of all ranks to the next line, and write it when it is time.

        Raises
        ------
        CheckFailed : the ranks log different names.
        """
        ranks, marks, squares = map(int, look.sums[:3])
        if ranks * squares != marks**2:
            raise CheckFailed(
                f"the ranks log different numbers; this one logs {', '.join(self._names) or 'none'}",
                hint="give run.log the same names in the same order on every rank, or call it on one rank",
            )
        self._totals = [total + value for total, value in zip(self._totals, look.sums[3:], strict=True)]
        self._steps, self._seconds = self._steps + look.steps, self._seconds + look.seconds
        if time.monotonic() - self._last_line >= LINE_S:
            self.write(look.step)

    def write(self, step: int) -> None:
        """Write the line of what was logged since the last one, if anything was."""
        count, *sums = self._totals
        if self._metrics is None or not self._names or not count:
            return
        averages = {name: total / count for name, total in zip(self._names, sums, strict=False)}
        rate = self._steps / self._seconds if self._seconds else 0.0
        text = "".join(f"  {name} {value:.6g}" for name, value in averages.items())
        terminal.out(f"step {step}{text}  {rate:.1f} steps/s")
        values = {name: value if math.isfinite(value) else None for name, value in averages.items()}
        self._metrics.add(
            {"time": now(), "step": step, "epoch": self._passes(), "steps_per_s": rate, **values}
        )
        self._last_line = time.monotonic()
        self._start_line()

"""Agreement of all ranks without a wait in any step: they add up a few numbers, and read the sum later.

Every few steps the ranks send their numbers, and read the sums at the next look. So all ranks learn of a
request to stop at the same step, and no step waits for another rank. `NumberLog` has the numbers that a loop
logs: added up on their device, averaged over steps and ranks.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from imgkit_entrypoints import terminal
from imgkit_entrypoints.errors import CheckFailed, UsageError
from imgkit_entrypoints.run.metrics import MetricsFile, utc_timestamp
from imgkit_entrypoints.run.ranks import Ranks, ranks_by_value, refuse_different_calls
from imgkit_entrypoints.run.stop_requests import REASONS, first_reason

# Approximate time between two looks if steps are slow. With fast steps, the log's interval limits it.
LATENCY_S = 0.5
# Calls at which ranks differ if they have taken different numbers of steps.
STEP_END, PASS_END = "the end of a step", "the end of a pass"
# Steps and calls are compared modulo this, so that the sum of the squares over a million ranks is exact.
_MARKS = 4096


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
        """Use the sums of all ranks. Every rank gets the same sums, so that all raise the same error."""


class _SentNumbers(NamedTuple):
    """Numbers that are under way to all ranks."""

    look: Agreed
    """What `AddedNumbers.arrived` gets, still without the sums."""
    call: str
    """The call of the program in which they were sent."""
    work: Any
    """torch's handle of the all-reduce. None means that this is the only rank."""
    values: Tensor
    """This rank's numbers, and once the work is done, the sums of all ranks."""


def _are_equal_marks(ranks: float, mark_sum: float, square_sum: float) -> bool:
    """Return whether all ranks have sent the same mark, by the sums of their marks and of the squares.

    The ranks have the same mark exactly where ``ranks * sum(m * m) == sum(m) ** 2`` (Cauchy-Schwarz).
    """
    # The sums are exact as floats, but their products would not be.
    return int(ranks) * int(square_sum) == int(mark_sum) ** 2


class Agreement:
    """Sends this rank's numbers and answers every few steps, and receives the sums of all ranks.

    Parameters
    ----------
    ranks : the ranks, and the device of the numbers.
    answers : returns this rank's answer to each of `stop_requests.REASONS`.
    """

    def __init__(self, ranks: Ranks, answers: Callable[[], Sequence[bool]], numbers: AddedNumbers) -> None:
        self._ranks = ranks
        self._answers = answers
        self.numbers = numbers
        self._sent: _SentNumbers | None = None
        # Steps between two looks.
        self._interval = 1
        self._max_interval = 1
        # Step and time of the last look, or of `start_clock`.
        self._clock_step = 0
        self._clock_start = time.perf_counter()
        self.stop = ""
        """Reason why all ranks stop after this step, or empty while they go on."""

    def start_clock(self, step: int, max_interval: int | None = None) -> None:
        """Start the clock after `step` steps, and set the most steps between two looks."""
        if max_interval is not None:
            self._max_interval = max_interval
        self._clock_step = step
        self._clock_start = time.perf_counter()

    def is_look_due(self, step: int) -> bool:
        """Return whether the ranks exchange their numbers after `step`."""
        return step // self._interval > self._clock_step // self._interval

    def look_if_due(self, step: int) -> None:
        """Receive the sums of the last look and send the numbers since then, if it is time.

        Raises
        ------
        CheckFailed : on every rank, if the ranks have taken different numbers of steps.
        """
        if self.is_look_due(step):
            self._exchange(step, STEP_END)
            if self.stop:  # the ranks will save, and all numbers belong to that
                self._receive()

    def wait_for_ranks(self, step: int, call: str) -> None:
        """Wait for the numbers of all steps up to `step`, in the program's `call`; a collective call.

        Raises
        ------
        CheckFailed : on every rank, if they have taken different numbers of steps, or are at different calls.
        """
        self._exchange(step, call)
        self._receive()

    def _exchange(self, step: int, call: str) -> None:
        """Receive the sums that are under way, and send this rank's numbers since then."""
        self._receive()
        numbers = self.numbers.take().to(self._ranks.device)
        seconds = time.perf_counter() - self._clock_start
        look = Agreed(step=step, steps=step - self._clock_step, seconds=seconds, sums=())
        self.start_clock(step)
        mark = (step + zlib.crc32(call.encode())) % _MARKS
        answers = [float(answer) for answer in self._answers()]
        # `_receive` reads these in the same order.
        own_values = [seconds / max(1, look.steps), mark, mark * mark, *answers]
        own_numbers = torch.tensor(own_values, dtype=numbers.dtype).to(numbers.device, non_blocking=True)
        values = torch.cat([own_numbers, numbers])
        work = None
        if self._ranks.world_size > 1:
            work = dist.all_reduce(values, async_op=True, group=self._ranks.group)
        self._sent = _SentNumbers(look, call, work, values)

    def _receive(self) -> None:
        """Wait for the sums that are under way, if there are any."""
        if self._sent is None:
            return
        sent = self._sent
        self._sent = None
        if sent.work is not None:
            sent.work.wait()
        # The work has replaced each value of this rank by the sum of those of all ranks.
        step_seconds, mark_sum, square_sum, *sums = sent.values.tolist()
        world_size = self._ranks.world_size
        if not _are_equal_marks(world_size, mark_sum, square_sum):
            self._refuse_difference(sent)
        if sent.look.steps:
            self._interval = look_interval(step_seconds / world_size, self._max_interval)
        yes_counts = sums[: len(REASONS)]
        if not self.stop:
            self.stop = first_reason([count > 0 for count in yes_counts])
        program_sums = tuple(sums[len(REASONS) :])
        self.numbers.arrived(replace(sent.look, sums=program_sums))

    def _refuse_difference(self, sent: _SentNumbers) -> None:
        """Raise CheckFailed, on every rank, for different calls or different numbers of steps."""
        call = "a loop" if sent.call in (STEP_END, PASS_END) else sent.call
        rows = self._ranks.gather((sent.look.step, sent.call), call=call)
        steps = [step for step, _ in rows]
        if len(set(steps)) == 1:
            refuse_different_calls([call for _, call in rows])
        raise CheckFailed(
            f"the ranks have taken different numbers of steps: {ranks_by_value(steps)}",
            hint="give every rank the same number of batches, for example by DistributedSampler",
        )


def look_interval(seconds_per_step: float, max_interval: int) -> int:
    """Return the steps between two looks.

    It is a divisor of `max_interval`, so that looks come at lines of the log.
    """
    limit: float = max_interval
    if seconds_per_step > 0:
        limit = LATENCY_S / seconds_per_step
    interval = 1
    for size in range(2, max_interval + 1):
        if size <= limit and max_interval % size == 0:
            interval = size
    return interval


# Most names. All ranks send as many numbers, also those that log nothing.
MAX_NAMES = 16
# Names of a line's own values.
RESERVED_NAMES = ("time", "step", "epoch", "steps_per_s")
# Time between two lines.
LINE_S = 5.0


class NumberLog:
    """Adds up logged numbers, and writes a line of their means over steps and ranks every few seconds.

    Parameters
    ----------
    metrics : gets the lines; None: another rank writes them.
    epochs : returns the epochs so far, for a line.
    """

    def __init__(self, metrics: MetricsFile | None, epochs: Callable[[], float]) -> None:
        self._metrics = metrics
        self._epochs = epochs
        # Names of the first call.
        self._names: tuple[str, ...] = ()
        # Sums of this rank by name, since they were last sent.
        self._sums: dict[str, Any] = {}
        # Steps in these sums.
        self._count = 0
        self._last_line_s = -math.inf
        self._start_line()

    def _start_line(self) -> None:
        # Sums of all ranks since the last line: how often they logged, and the numbers.
        self._totals = [0.0] * (1 + MAX_NAMES)
        self._steps = 0
        self._seconds = 0.0

    def add(self, numbers: Mapping[str, Any]) -> None:
        """Add the numbers of one step: tensors with one number, or plain ones.

        Raises
        ------
        UsageError : there are other names than at first, too many, or something else than a number.
        """
        if tuple(numbers) != self._names:
            self._set_names(numbers)
        for name, value in numbers.items():
            number: Any = value.detach().double() if isinstance(value, Tensor) else float(value)
            if self._count:
                number = self._sums[name] + number
            self._sums[name] = number
        self._count += 1

    def _set_names(self, numbers: Mapping[str, Any]) -> None:
        """Set the names of the log at the first call of `add`; raise UsageError at another one."""
        problem = f"run.log got the numbers {', '.join(numbers) or 'none'}"
        if self._names:
            problem += f"; the first call gave {', '.join(self._names)}"
        is_reserved = any(name in RESERVED_NAMES for name in numbers)
        if self._names or len(numbers) > MAX_NAMES or is_reserved:
            raise UsageError(
                problem,
                hint=f"give the same names at every call, at most {MAX_NAMES}, and none of "
                f"{', '.join(RESERVED_NAMES)}",
            )
        for name, value in numbers.items():
            if isinstance(value, Tensor) and value.shape:
                kind = f"a tensor of shape {tuple(value.shape)}"
            elif not isinstance(value, (Tensor, int, float)):
                kind = f"a {type(value).__name__}"
            else:
                continue
            hint = "give one number, for example loss.mean()"
            raise UsageError(f"run.log got {kind} as {name}", hint=hint)
        self._names = tuple(numbers)

    def take(self) -> Tensor:
        """Return this rank's sums since the last call in host memory, after a mark of their names."""
        # A rank that logs nothing does not count among those whose marks are compared.
        marks = [0, 0, 0]
        if self._names:
            # 16 bits, so that the sum of the squares over a million ranks is exact.
            mark = zlib.crc32("\0".join(self._names).encode()) & 0xFFFF
            marks = [1, mark, mark * mark]
        sums = [float(value) for value in self._sums.values()]
        padding = [0.0] * (MAX_NAMES - len(sums))
        numbers = torch.tensor([*marks, self._count, *sums, *padding], dtype=torch.float64)
        self._sums = {}
        self._count = 0
        return numbers

    def arrived(self, look: Agreed) -> None:
        """Add the sums of all ranks to the next line, and write it when it is time.

        Raises
        ------
        CheckFailed : the ranks log different names.
        """
        ranks, mark_sum, square_sum, *sums = look.sums
        if not _are_equal_marks(ranks, mark_sum, square_sum):
            raise CheckFailed(
                f"the ranks log different numbers; this one logs {', '.join(self._names) or 'none'}",
                hint="give run.log the same names in the same order on every rank, or call it on one rank",
            )
        for index, value in enumerate(sums):  # how often they logged, and the numbers
            self._totals[index] += value
        self._steps += look.steps
        self._seconds += look.seconds
        if time.monotonic() - self._last_line_s >= LINE_S:
            self.write_line(look.step)

    def write_line(self, step: int) -> None:
        """Write the line of what was logged since the last one, if anything was."""
        count, *sums = self._totals
        if self._metrics is None or not self._names or not count:
            return
        rate = self._steps / self._seconds if self._seconds else 0.0
        text = f"step {step}"
        values: dict[str, Any] = {
            "time": utc_timestamp(),
            "step": step,
            "epoch": self._epochs(),
            "steps_per_s": rate,
        }
        for name, total in zip(self._names, sums, strict=False):
            mean = total / count
            text += f"  {name} {mean:.6g}"
            values[name] = mean if math.isfinite(mean) else None  # JSON has no NaN
        terminal.print_results(f"{text}  {rate:.1f} steps/s")
        self._metrics.add(values)
        self._last_line_s = time.monotonic()
        self._start_line()

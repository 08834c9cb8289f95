"""Agreement of all ranks without a wait in any step: they add up a few numbers, and read the sum later.

Every few steps the ranks send their numbers, and read the sums at the next such exchange. So all ranks learn
of a request to stop at the same step, and no step waits for another rank. `NumberLog` has the numbers that a
loop logs: added up on their device, averaged over steps and ranks.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from imgkit_entrypoints import terminal
from imgkit_entrypoints.errors import CheckFailed, UsageError
from imgkit_entrypoints.run.metrics import MetricsFile, utc_timestamp
from imgkit_entrypoints.run.ranks import Ranks, ranks_by_value, refuse_different_calls
from imgkit_entrypoints.run.stop_requests import REASONS

# Approximate time between two exchanges if steps are slow. With fast steps, the log's interval limits it.
LATENCY_S = 0.5
# Calls at which ranks differ if they have taken different numbers of steps.
STEP_END, PASS_END = "the end of a step", "the end of a pass"
# Hashes are compared between ranks. They are below these numbers, so that the sum of their squares over a
# million ranks is exact as a float.
_STEP_HASH_LIMIT = 1 << 12
_NAME_HASH_LIMIT = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """An exchange of numbers between the ranks, with the sums that arrived."""

    step: int
    steps: int
    """Steps since the exchange before."""
    seconds: float
    """Their duration on this rank's clock."""
    sums: tuple[float, ...]
    """The numbers of all ranks, added up."""


class AddedNumbers(Protocol):
    """What the ranks add up at each exchange, beside their answers."""

    def take(self) -> Tensor:
        """Return this rank's numbers since the last call: float64, equally many on all ranks."""

    def arrived(self, exchange: Agreed, /) -> None:
        """Use the sums of all ranks. Every rank gets the same sums, so that all raise the same error."""


class _SentNumbers(NamedTuple):
    """Numbers that are under way to all ranks. The first fields are those of `Agreed`."""

    step: int
    steps: int
    seconds: float
    call: str
    """The call of the program in which they were sent."""
    work: Any
    """torch's handle of the all-reduce. None means that this is the only rank."""
    values: Tensor
    """This rank's numbers, and once the work is done, the sums of all ranks."""


def _hash_text(text: str, limit: int) -> int:
    """Return a hash of a text below `limit`, by which the ranks compare the text in a sum of numbers."""
    return zlib.crc32(text.encode()) % limit


def _are_hashes_equal(rank_count: float, hash_sum: float, square_sum: float) -> bool:
    """Return whether all ranks have sent the same hash, a small number for what must not differ between them.

    The hashes h of all ranks are equal exactly if ``rank_count * sum(h * h) == sum(h) ** 2``
    (Cauchy-Schwarz). So two sums are enough to compare all ranks.

    Parameters
    ----------
    hash_sum, square_sum : the sums, over all ranks, of their hashes and of the squares of these.
    """
    # The sums are exact as floats, but their products would not be.
    return int(rank_count) * int(square_sum) == int(hash_sum) ** 2


class Agreement:
    """Sends this rank's numbers and answers every few steps, and receives the sums of all ranks.

    Parameters
    ----------
    ranks : the ranks, and the device of the numbers.
    find_reasons : returns for which of `stop_requests.REASONS` this rank has to stop.
    """

    def __init__(
        self, ranks: Ranks, find_reasons: Callable[[], Collection[str]], numbers: AddedNumbers
    ) -> None:
        self._ranks = ranks
        self._find_reasons = find_reasons
        self.numbers = numbers
        self._sent: _SentNumbers | None = None
        # Steps between two exchanges.
        self._interval = 1
        self._max_interval = 1
        # Step and time of the last exchange, or of `start_clock`.
        self._clock_step = 0
        self._clock_start = time.perf_counter()
        self.stop = ""
        """Reason why all ranks stop after this step, or empty while they go on."""

    def start_clock(self, step: int, max_interval: int | None = None) -> None:
        """Start to measure the duration of steps anew, after `step` steps.

        Parameters
        ----------
        max_interval : most steps between two exchanges of numbers from now on; None: as before.
        """
        if max_interval is not None:
            self._max_interval = max_interval
        self._clock_step = step
        self._clock_start = time.perf_counter()

    def is_exchange_due(self, step: int) -> bool:
        """Return whether the ranks exchange their numbers after `step`.

        They do so where a multiple of the interval lies between the last exchange and this step.
        """
        return step // self._interval > self._clock_step // self._interval

    def exchange_if_due(self, step: int) -> None:
        """If it is time, read the sums of the last exchange, and begin the next one.

        In an exchange, the ranks add up their numbers in the background, and their answers to requests to
        stop. So all ranks learn of such a request at the same step.

        Raises
        ------
        CheckFailed : on every rank, if the ranks have taken different numbers of steps.
        """
        if self.is_exchange_due(step):
            self._exchange(step, STEP_END)
            if self.stop:  # the ranks save now, and the log has to have the numbers of all steps before
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
        """Receive the sums that are under way, and start to add up the numbers since then over all ranks.

        The values are the seconds per step, the hash of the step and the call, the square of this hash, the
        answers to requests to stop, and the numbers of `AddedNumbers`.
        """
        self._receive()
        numbers = self.numbers.take().to(self._ranks.device)
        seconds = time.perf_counter() - self._clock_start
        steps = step - self._clock_step
        self.start_clock(step)
        # Ranks at different steps, or in different calls of the program, have different hashes.
        step_hash = (step + _hash_text(call, _STEP_HASH_LIMIT)) % _STEP_HASH_LIMIT
        own_reasons = self._find_reasons()
        answers = [reason in own_reasons for reason in REASONS]
        # `_receive` reads these in the same order.
        own_values = [seconds / max(1, steps), step_hash, step_hash * step_hash, *answers]
        own_numbers = torch.tensor(own_values, dtype=numbers.dtype)
        own_numbers_on_device = own_numbers.to(numbers.device, non_blocking=True)
        values = torch.cat([own_numbers_on_device, numbers])
        work = None
        if self._ranks.world_size > 1:
            work = dist.all_reduce(values, async_op=True, group=self._ranks.group)
        self._sent = _SentNumbers(step, steps, seconds, call, work, values)

    def _receive(self) -> None:
        """Wait for the sums of the exchange that is under way, if there is one.

        The answers among them decide about a stop, and the other sums go to `AddedNumbers.arrived`.
        """
        if self._sent is None:
            return
        sent = self._sent
        self._sent = None
        if sent.work is not None:
            sent.work.wait()
        # The work has replaced each value of this rank by the sum over all ranks.
        step_seconds, hash_sum, square_sum, *sums = sent.values.tolist()
        world_size = self._ranks.world_size
        if not _are_hashes_equal(world_size, hash_sum, square_sum):
            self._refuse_difference(sent)
        if sent.steps:  # without a step, there is no duration of a step
            self._interval = choose_interval(step_seconds / world_size, self._max_interval)
        yes_counts = sums[: len(REASONS)]
        program_sums = sums[len(REASONS) :]
        for reason, yes_count in zip(REASONS, yes_counts, strict=True):
            if yes_count and not self.stop:
                self.stop = reason
        exchange = Agreed(step=sent.step, steps=sent.steps, seconds=sent.seconds, sums=tuple(program_sums))
        self.numbers.arrived(exchange)

    def _refuse_difference(self, sent: _SentNumbers) -> None:
        """Raise CheckFailed, on every rank, since their hashes differ: name the calls or the steps."""
        call = "a loop" if sent.call in (STEP_END, PASS_END) else sent.call
        rows = self._ranks.gather((sent.step, sent.call), call=call)
        steps, calls = zip(*rows, strict=True)
        if len(set(steps)) == 1:
            refuse_different_calls(calls)
        raise CheckFailed(
            f"the ranks have taken different numbers of steps: {ranks_by_value(steps)}",
            hint="give every rank the same number of batches, for example by DistributedSampler",
        )


def choose_interval(seconds_per_step: float, max_interval: int) -> int:
    """Return the steps between two exchanges, so that they come about every `LATENCY_S` seconds.

    The result divides `max_interval`, at whose multiples the program saves or logs its numbers. For example
    0.1 s per step and at most 100 steps give 5.
    """
    if seconds_per_step <= 0:
        return max_interval
    steps_in_time = LATENCY_S / seconds_per_step
    interval = 1
    for candidate in range(2, max_interval + 1):
        if candidate <= steps_in_time and max_interval % candidate == 0:
            interval = candidate
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
        # Since the last line, over all ranks: how often they logged, and the sum of each number.
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
            self._refuse_names(numbers)
            for name, value in numbers.items():
                _refuse_no_number(name, value)
            self._names = tuple(numbers)
        for name, value in numbers.items():
            number: Any = value.detach().double() if isinstance(value, Tensor) else float(value)
            # Not in place: a number may share the memory of the program's tensor.
            self._sums[name] = self._sums.get(name, 0.0) + number
        self._count += 1

    def _refuse_names(self, names: Collection[str]) -> None:
        """Raise UsageError if these names are not those of the first call, are too many, or are reserved."""
        is_first_call = not self._names
        has_reserved_name = not set(RESERVED_NAMES).isdisjoint(names)
        if is_first_call and len(names) <= MAX_NAMES and not has_reserved_name:
            return
        problem = f"run.log got the numbers {', '.join(names) or 'none'}"
        if not is_first_call:
            problem += f"; the first call gave {', '.join(self._names)}"
        reserved = ", ".join(RESERVED_NAMES)
        hint = f"give the same names at every call, at most {MAX_NAMES}, and none of {reserved}"
        raise UsageError(problem, hint=hint)

    def take(self) -> Tensor:
        """Return this rank's sums since the last call, as one tensor in host memory.

        The values are 1 (0 if this rank logs nothing), the hash of the names and its square, the number of
        calls of `add`, the sums, and zeros up to `MAX_NAMES`.
        """
        # A rank that logs nothing does not count among those whose hashes are compared.
        rank_count = 0
        name_hash = 0
        if self._names:
            rank_count = 1
            name_hash = _hash_text("\0".join(self._names), _NAME_HASH_LIMIT)
        sums = [float(value) for value in self._sums.values()]
        padding = [0.0] * (MAX_NAMES - len(sums))
        values = [rank_count, name_hash, name_hash * name_hash, self._count, *sums, *padding]
        numbers = torch.tensor(values, dtype=torch.float64)
        self._sums = {}
        self._count = 0
        return numbers

    def arrived(self, exchange: Agreed) -> None:
        """Add the sums of all ranks to the next line, and write it when it is time.

        Raises
        ------
        CheckFailed : the ranks log different names.
        """
        rank_count, hash_sum, square_sum, *sums = exchange.sums
        if not _are_hashes_equal(rank_count, hash_sum, square_sum):
            raise CheckFailed(
                f"the ranks log different numbers; this one logs {', '.join(self._names) or 'none'}",
                hint="give run.log the same names in the same order on every rank, or call it on one rank",
            )
        for index, value in enumerate(sums):
            self._totals[index] += value
        self._steps += exchange.steps
        self._seconds += exchange.seconds
        if time.monotonic() - self._last_line_s >= LINE_S:
            self.write_line(exchange.step)

    def write_line(self, step: int) -> None:
        """Write a line with the means of what all ranks have logged since the last line.

        Nothing is written if nothing was logged, or if another rank writes the lines.
        """
        count, *sums = self._totals
        if self._metrics is None or not self._names or not count:
            return
        steps_per_s = self._steps / self._seconds if self._seconds else 0.0
        values: dict[str, Any] = {"time": utc_timestamp(), "step": step}
        values["epoch"] = self._epochs()
        values["steps_per_s"] = steps_per_s
        text = f"step {step}"
        for name, total in zip(self._names, sums, strict=False):  # the sums after those of the names are 0
            mean = total / count
            text += f"  {name} {mean:.6g}"
            values[name] = mean if math.isfinite(mean) else None  # JSON has no NaN
        terminal.print_results(f"{text}  {steps_per_s:.1f} steps/s")
        self._metrics.add(values)
        self._last_line_s = time.monotonic()
        self._start_line()


def _refuse_no_number(name: str, value: object) -> None:
    """Raise UsageError if a value cannot be logged as a number."""
    if isinstance(value, Tensor):
        if value.dim() > 0:
            raise _number_error(name, f"a tensor of shape {tuple(value.shape)}")
    elif not isinstance(value, int | float):
        raise _number_error(name, f"a {type(value).__name__}")


def _number_error(name: str, kind: str) -> UsageError:
    return UsageError(f"run.log got {kind} as {name}", hint="give one number, for example loss.mean()")

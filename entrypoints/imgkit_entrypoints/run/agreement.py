"""Let all ranks agree on a stop and add up logged numbers, without waiting for each other in a step.

Every few steps, the ranks start an all-reduce of a few numbers. They read the sums only at the next exchange.
So all ranks learn about a request to stop at the same step, and no step waits for another rank. `NumberLog`
collects the numbers that a loop logs. It adds them up on their device, and averages them over steps and
ranks.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
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

# Approximate time between two exchanges. If steps are fast, the maximum interval limits it.
LATENCY_S = 0.5
# Names of two calls. If the ranks have taken different numbers of steps, some may be in one and some in the
# other.
STEP_END, PASS_END = "the end of a step", "the end of a pass"
# Hashes are smaller than these limits. So the sum of their squares over a million ranks is exact as a float.
_STEP_HASH_LIMIT = 1 << 12
_NAME_HASH_LIMIT = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """The result of one exchange of numbers between the ranks."""

    step: int
    steps: int
    """Number of steps since the previous exchange."""
    seconds: float
    """Duration of these steps on this rank's clock."""
    sums: tuple[float, ...]
    """The sum of each number over all ranks."""


class AddedNumbers(Protocol):
    """The numbers that the ranks add up at each exchange, in addition to their answers about a stop."""

    def take(self) -> Tensor:
        """Return this rank's numbers since the last call as float64, the same count on all ranks."""

    def arrived(self, exchange: Agreed, /) -> None:
        """Use the sums over all ranks, which are in the order of `take`.

        All ranks get the same sums, so an error is raised on all ranks.
        """


class _SentNumbers(NamedTuple):
    """An exchange whose sums have not been read yet. The first fields are those of `Agreed`."""

    step: int
    steps: int
    seconds: float
    call: str
    """The call of the program, such as ``run.save``, in which the exchange began."""
    work: Any
    """torch's handle of the all-reduce, or None if there is only one rank."""
    values: Tensor
    """This rank's numbers. When `work` is done, they have been replaced by the sums over all ranks."""


def _hash_text(text: str, limit: int) -> int:
    """Return a hash of `text` that is smaller than `limit`, so that ranks can compare texts as numbers."""
    # Not hash(): Python gives a text another hash in each process.
    return zlib.crc32(text.encode()) % limit


def _are_hashes_equal(rank_count: float, hash_sum: float, square_sum: float) -> bool:
    """Return whether all ranks have sent the same hash.

    An all-reduce only gives sums. But two sums are enough to compare all ranks: their hashes h are equal
    exactly if ``rank_count * sum(h * h) == sum(h) ** 2`` (Cauchy-Schwarz).

    Parameters
    ----------
    hash_sum, square_sum : the sums over all ranks of the hashes, and of the squares of the hashes.
    """
    # The sums are exact as floats, but their products may not be. So they are multiplied as integers.
    return int(rank_count) * int(square_sum) == int(hash_sum) ** 2


class Agreement:
    """Exchanges numbers between the ranks every few steps: this rank's numbers, and whether it must stop.

    Parameters
    ----------
    ranks : the ranks, and the device for the all-reduce.
    find_reasons : a function that returns those of `stop_requests.REASONS` for which this rank must stop.
    numbers : the numbers of the program that are added up.
    """

    def __init__(
        self, ranks: Ranks, find_reasons: Callable[[], Collection[str]], numbers: AddedNumbers
    ) -> None:
        self._ranks = ranks
        self._find_reasons = find_reasons
        self.numbers = numbers
        self._sent: _SentNumbers | None = None
        # Number of steps between two exchanges.
        self._interval = 1
        self._max_interval = 1
        # Step and time of the last exchange, or of the last call of `start_clock`.
        self._clock_step = 0
        self._clock_start = time.perf_counter()
        self.stop = ""
        """Reason why all ranks stop after this step. Empty if they do not stop."""

    def start_clock(self, step: int, max_interval: int | None = None) -> None:
        """Start to measure the duration of steps from now on. `step` steps are done.

        Parameters
        ----------
        max_interval : the largest number of steps between two exchanges from now on. None means no change.
        """
        if max_interval is not None:
            self._max_interval = max_interval
        self._clock_step = step
        self._clock_start = time.perf_counter()

    def is_exchange_due(self, step: int) -> bool:
        """Return whether the ranks exchange their numbers after `step`.

        An exchange is due when a step reaches or passes a multiple of the interval since the last exchange.
        """
        # All ranks use the same interval and steps, so they agree without communication.
        return step // self._interval > self._clock_step // self._interval

    def exchange_if_due(self, step: int) -> None:
        """If an exchange is due, read the sums of the last exchange, and start the next one.

        In an exchange, the ranks add up their numbers and their answers about a stop in the background. So
        all ranks learn about a request to stop at the same step.

        Raises
        ------
        CheckFailed : (on every rank) the ranks have taken different numbers of steps.
        """
        if self.is_exchange_due(step):
            self._start_exchange(step, STEP_END)
            if self.stop:  # the ranks save next, and the log must contain the numbers of all steps before
                self._finish_exchange()

    def exchange_and_wait(self, step: int, call: str) -> None:
        """Add up the numbers of all steps up to `step` now, and wait for the sums and so for all ranks.

        This is a collective call: all ranks must make it.

        `call` names the call of the program, such as ``run.pause``. It must be the same on all ranks.

        Raises
        ------
        CheckFailed : (on every rank) the ranks have taken different numbers of steps or are in different
            calls.
        """
        self._start_exchange(step, call)
        self._finish_exchange()

    def _start_exchange(self, step: int, call: str) -> None:
        """Read the sums of the last exchange, and start to add up the numbers since then over all ranks.

        The ranks add up a header (see `_make_header`), followed by the numbers of `AddedNumbers`.
        """
        # Only one exchange is under way at a time, so finish the last one first.
        self._finish_exchange()
        numbers = self.numbers.take().to(self._ranks.device)
        seconds = time.perf_counter() - self._clock_start
        steps = step - self._clock_step
        self.start_clock(step)  # after the two lines above, which use the old start
        header = torch.tensor(self._make_header(step, call, seconds / max(1, steps)), dtype=numbers.dtype)
        header_on_device = header.to(numbers.device, non_blocking=True)
        values = torch.cat([header_on_device, numbers])
        # The all-reduce goes on in the background while the program takes its next steps.
        work = None
        if self._ranks.world_size > 1:
            work = dist.all_reduce(values, async_op=True, group=self._ranks.group)
        self._sent = _SentNumbers(step, steps, seconds, call, work, values)

    def _make_header(self, step: int, call: str, seconds_per_step: float) -> list[float]:
        """Return the first values that this rank sends. `_finish_exchange` reads their sums in this order.

        They are: the seconds per step, a hash of step and call, the square of the hash, and 1 or 0 for each
        of `REASONS` to stop. The sums of hashes and squares show whether all ranks are at the same step and
        in the same call (`_are_hashes_equal`).
        """
        step_hash = (step + _hash_text(call, _STEP_HASH_LIMIT)) % _STEP_HASH_LIMIT
        own_reasons = self._find_reasons()
        reason_flags = [reason in own_reasons for reason in REASONS]
        return [seconds_per_step, step_hash, step_hash * step_hash, *reason_flags]

    def _finish_exchange(self) -> None:
        """Wait for the sums of the last exchange, and use them. Do nothing if they have already been used.

        The answers about a stop decide whether all ranks stop: they set `stop`. The duration of a step sets
        the interval until the next exchange. The sums of the program's numbers are passed to
        `AddedNumbers.arrived`.

        Raises
        ------
        CheckFailed : (on every rank) the ranks have taken different numbers of steps or are in different
            calls.
        """
        if self._sent is None:
            return
        sent = self._sent
        self._sent = None  # now, so that the sums are not used twice if an error is raised below
        if sent.work is not None:
            sent.work.wait()
        # The all-reduce has replaced each value of this rank by the sum over all ranks. The first values are
        # in the order of `_make_header`.
        step_seconds, hash_sum, square_sum, *sums = sent.values.tolist()
        world_size = self._ranks.world_size
        if not _are_hashes_equal(world_size, hash_sum, square_sum):
            self._refuse_difference(sent)
        # All ranks have the same sum, so they all choose the same interval. Without a step, there is no
        # duration of a step.
        if sent.steps:
            self._interval = choose_interval(step_seconds / world_size, self._max_interval)
        yes_counts = sums[: len(REASONS)]
        program_sums = sums[len(REASONS) :]
        if not self.stop:
            self.stop = _find_stop_reason(yes_counts)
        exchange = Agreed(step=sent.step, steps=sent.steps, seconds=sent.seconds, sums=tuple(program_sums))
        self.numbers.arrived(exchange)

    def _refuse_difference(self, sent: _SentNumbers) -> None:
        """Raise CheckFailed on every rank, because the ranks are in different calls or at different steps."""
        # A rank at the end of a step and one at the end of a pass are both in a loop. Then the message about
        # different numbers of steps explains more.
        call = "a loop" if sent.call in (STEP_END, PASS_END) else sent.call
        # The hashes only show that ranks differ. Gather the values themselves for the message.
        steps_and_calls = self._ranks.gather((sent.step, sent.call), call=call)
        steps, calls = zip(*steps_and_calls, strict=True)
        if len(set(steps)) == 1:
            refuse_different_calls(calls)
        raise CheckFailed(
            f"the ranks have taken different numbers of steps: {ranks_by_value(steps)}",
            hint="give every rank the same number of batches, for example by DistributedSampler",
        )


def _find_stop_reason(yes_counts: Sequence[float]) -> str:
    """Return the first of `REASONS` for which at least one rank must stop, or ``""`` if there is none.

    `yes_counts` are the numbers of ranks with each reason.
    """
    for reason, yes_count in zip(REASONS, yes_counts, strict=True):
        if yes_count:
            return reason
    return ""


def choose_interval(seconds_per_step: float, max_interval: int) -> int:
    """Return the number of steps between two exchanges, so that an exchange takes place every `LATENCY_S`.

    The program saves or logs at multiples of `max_interval`, so the result divides `max_interval`. For
    example, 0.1 s per step and a maximum of 100 steps give 5.
    """
    if seconds_per_step <= 0:
        return max_interval
    steps_in_time = LATENCY_S / seconds_per_step
    interval = 1
    for candidate in range(2, max_interval + 1):
        if candidate <= steps_in_time and max_interval % candidate == 0:
            interval = candidate
    return interval


# The largest number of logged names. All ranks always send this many numbers, even if they log fewer or none.
MAX_NAMES = 16
# Names that each line of the log uses itself.
RESERVED_NAMES = ("time", "step", "epoch", "steps_per_s")
# Time between two lines of the log.
LINE_S = 5.0


class NumberLog:
    """Adds up logged numbers. Every few seconds, it writes a line with their means over steps and ranks.

    Parameters
    ----------
    metrics : the file for the lines, or None if another rank writes them.
    epochs : a function that returns the number of epochs so far, for the lines.
    """

    def __init__(self, metrics: MetricsFile | None, epochs: Callable[[], float]) -> None:
        self._metrics = metrics
        self._epochs = epochs
        # Names of the numbers in the first call of `add`.
        self._names: tuple[str, ...] = ()
        # Sums of this rank by name since the last exchange.
        self._sums: dict[str, Any] = {}
        # Number of steps in these sums.
        self._count = 0
        self._last_line_s = -math.inf
        self._reset_line()

    def _reset_line(self) -> None:
        """Reset the sums of the next line."""
        # Over all ranks since the last line: the number of calls of `add`, and the sum of each number.
        self._totals = [0.0] * (1 + MAX_NAMES)
        self._steps = 0
        self._seconds = 0.0

    def add(self, numbers: Mapping[str, Any]) -> None:
        """Add the numbers of one step. A number is an int, a float, or a tensor with one element.

        Raises
        ------
        UsageError : the names or their order differ from those of the first call, there are too many names,
            a name is reserved, or a value of the first call is not a number.
        """
        names = tuple(numbers)
        if not self._names:  # the first call
            has_reserved_name = not set(RESERVED_NAMES).isdisjoint(names)
            if len(names) > MAX_NAMES or has_reserved_name:
                raise _names_error(names, first_names=())
            for name, value in numbers.items():
                _refuse_no_number(name, value)
            self._names = names
        elif names != self._names:
            raise _names_error(names, self._names)
        for name, value in numbers.items():
            number: Any = value.detach().double() if isinstance(value, Tensor) else float(value)
            # Do not use `+=`: it would change the sum in place, and the sum may share memory with a tensor of
            # the program.
            self._sums[name] = self._sums.get(name, 0.0) + number
        self._count += 1

    def take(self) -> Tensor:
        """Return this rank's sums since the last call, as one tensor in host memory.

        The values are, in this order: 1 (or 0 if this rank logs nothing), a hash of the names, the square of
        the hash, the number of calls of `add`, the sums, and zeros for unused names up to `MAX_NAMES`.
        """
        # A rank that logs nothing sends zeros, so that its hash is not compared with the others.
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
        """Add the sums over all ranks to the next line of the log. If a line is due, write it.

        The sums are in the order of `take`. `Agreement` calls this at the end of each exchange.

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
        """Write a line with the means of the numbers that all ranks have logged since the last line.

        If nothing was logged, or if another rank writes the lines, nothing is written. The line goes to the
        terminal and to the file of metrics. Afterwards, the sums of the next line begin at 0.
        """
        # The number of calls of `add` on all ranks, and the sum of each number.
        count, *sums = self._totals
        if self._metrics is None or not self._names or not count:
            return
        steps_per_s = self._steps / self._seconds if self._seconds else 0.0
        line_values: dict[str, Any] = {"time": utc_timestamp(), "step": step}
        line_values["epoch"] = self._epochs()
        line_values["steps_per_s"] = steps_per_s
        line = f"step {step}"
        # `sums` has `MAX_NAMES` items. Those after the last name are unused.
        for name, total in zip(self._names, sums, strict=False):
            mean = total / count
            line += f"  {name} {mean:.6g}"
            line_values[name] = mean if math.isfinite(mean) else None  # JSON has no NaN
        terminal.print_results(f"{line}  {steps_per_s:.1f} steps/s")
        self._metrics.add(line_values)
        self._last_line_s = time.monotonic()
        self._reset_line()


def _names_error(names: Sequence[str], first_names: Sequence[str]) -> UsageError:
    """Return the error for names of logged numbers that are too many or reserved, or have changed.

    `first_names` are those of the first call, or empty if `names` are those of the first call.
    """
    problem = f"run.log got the numbers {', '.join(names) or 'none'}"
    if first_names:
        problem += f"; the first call gave {', '.join(first_names)}"
    reserved = ", ".join(RESERVED_NAMES)
    hint = f"give the same names at every call, at most {MAX_NAMES}, and none of {reserved}"
    return UsageError(problem, hint=hint)


def _refuse_no_number(name: str, value: object) -> None:
    """Raise UsageError if `value` is not a single number."""
    if isinstance(value, Tensor):
        if value.dim() > 0:
            raise _number_error(name, f"a tensor of shape {tuple(value.shape)}")
    elif not isinstance(value, int | float):
        raise _number_error(name, f"a {type(value).__name__}")


def _number_error(name: str, kind: str) -> UsageError:
    return UsageError(f"run.log got {kind} as {name}", hint="give one number, for example loss.mean()")

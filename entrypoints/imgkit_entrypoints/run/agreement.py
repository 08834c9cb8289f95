"""Agreement of all ranks without a wait in any step: they add up a few numbers, and read the sum later.

Every few steps the ranks send their numbers, and read the sums at the next look. So all ranks learn of a
request to stop at the same step, and no step waits for another rank. `NumberLog` has the numbers that a loop
logs: added up on their device, averaged over steps and ranks at the next look.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from imgkit_entrypoints.errors import CheckFailed, UsageError
from imgkit_entrypoints.run.ranks import Ranks, ranks_by_value
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
    ranks : the ranks, and the device of the numbers.
    answers : returns this rank's answer to each of `stop_requests.REASONS`.
    """

    def __init__(self, ranks: Ranks, answers: Callable[[], Sequence[bool]], numbers: AddedNumbers) -> None:
        self._ranks, self._answers, self.numbers = ranks, answers, numbers
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
        self._send(step, self.numbers.take(everything=everything).to(self._ranks.device))

    def _send(self, step: int, numbers: Tensor) -> None:
        now = time.perf_counter()
        seconds, steps = now - self._last_time, step - self._sent_step
        self._last_time, self._sent_step = now, step
        turn = step % _CYCLE
        values = [seconds / max(1, steps), turn, turn * turn, *map(float, self._answers())]
        answers = torch.tensor(values, dtype=numbers.dtype).to(numbers.device, non_blocking=True)
        sent = torch.cat([answers, numbers])
        work = copied = None
        if self._ranks.world_size > 1:
            work = dist.all_reduce(sent, async_op=True, group=self._ranks.group)
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
        ranks = self._ranks.world_size
        if int(squares) * ranks != int(total) ** 2:
            raise self._unequal(arrived.step)
        if arrived.steps:
            self._interval = interval(seconds_a_step / ranks, self._most)
        answers = len(rest) - arrived.count
        self.stop = self.stop or reason_of([count > 0 for count in rest[:answers]])
        self.numbers.arrived(
            Agreed(
                step=arrived.step,
                steps=arrived.steps,
                seconds=arrived.seconds,
                sums=tuple(rest[answers:]),
            )
        )

    def _unequal(self, step: int) -> CheckFailed:
        steps = self._ranks.gather(step, call="a loop")
        return CheckFailed(
            f"the ranks have taken different numbers of steps: {ranks_by_value(steps)}",
            hint="give every rank the same number of batches, for example by DistributedSampler",
        )


def interval(seconds_a_step: float, most: int) -> int:
    """Steps between two looks: a divisor of `most`, so that looks coincide with lines of the log."""
    limit = most if seconds_a_step <= 0 else LATENCY_S / seconds_a_step
    return max(size for size in range(1, most + 1) if most % size == 0 and (size == 1 or size <= limit))


MOST_NAMES = 16
"""Most names. All ranks send as many numbers, also those that log nothing."""
RESERVED_NAMES = ("time", "step", "epoch", "steps_per_s")
"""Names of a line's own values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """The sums of the steps between two looks."""

    count: int
    sums: Tensor
    """They lie in host memory, or are on the way there."""
    copied: Any = None
    """CUDA event after the copy; None on CPU."""


class NumberLog:
    """Sums of logged numbers since the last look. No call waits for a device.

    Parameters
    ----------
    note : gets the means of all ranks by name, each time that they arrive.
    """

    def __init__(self, note: Callable[[Agreed, Mapping[str, float]], None] = lambda *_: None) -> None:
        self._note = note
        self.names: tuple[str, ...] = ()
        """Names of the first call."""
        self._sums: dict[str, Any] = {}
        self._count = 0
        self._copying: list[_Window] = []

    def add(self, numbers: Mapping[str, Any]) -> None:
        """Add the numbers of one step: tensors with one number, or plain ones.

        Raises
        ------
        UsageError : there are other names than at first, too many, or something else than a number.
        """
        if tuple(numbers) != self.names:
            self._take_names(numbers)
        for name, value in numbers.items():
            number = value.detach().double() if isinstance(value, Tensor) else float(value)
            self._sums[name] = self._sums[name] + number if self._count else number
        self._count += 1

    def _take_names(self, numbers: Mapping[str, Any]) -> None:
        if self.names or len(numbers) > MOST_NAMES or set(numbers) & set(RESERVED_NAMES):
            first = f"; the first call gave {', '.join(self.names)}" if self.names else ""
            raise UsageError(
                f"run.log got the numbers {', '.join(numbers) or 'none'}{first}",
                hint=f"give the same names at every call, at most {MOST_NAMES}, and none of "
                f"{', '.join(RESERVED_NAMES)}",
            )
        for name, value in numbers.items():
            shape = tuple(value.shape) if isinstance(value, Tensor) else None
            if shape or not isinstance(value, (Tensor, int, float)):
                kind = f"a tensor of shape {shape}" if shape else f"a {type(value).__name__}"
                raise UsageError(
                    f"run.log got {kind} as {name}", hint="give one number, for example loss.mean()"
                )
        self.names = tuple(numbers)

    def take(self, *, everything: bool = False) -> Tensor:
        """Return this rank's sums for an agreement, in host memory, and begin new ones.

        From a GPU come those of the look before, whose copy is complete by now. With `everything`, wait for
        those up to now.
        """
        self._copying.append(self._window())
        ready = len(self._copying) - (self._copying[-1].copied is not None and not everything)
        windows, self._copying = self._copying[:ready], self._copying[ready:]
        mark = zlib.crc32("\0".join(self.names).encode()) & 0xFFFF
        sums = torch.zeros(4 + MOST_NAMES, dtype=torch.float64)
        if self.names:
            sums[:3] = torch.tensor([1, mark, mark * mark])
        for window in windows:
            if window.copied is not None:
                window.copied.synchronize()
            sums[3] += window.count
            sums[4 : 4 + len(window.sums)] += window.sums
        return sums

    def _window(self) -> _Window:
        sums, count = self._sums, self._count
        self._sums, self._count = {}, 0
        device = next(
            (value.device for value in sums.values() if isinstance(value, Tensor)), torch.device("cpu")
        )
        values = [torch.as_tensor(value, dtype=torch.float64, device=device) for value in sums.values()]
        stacked = torch.stack(values) if values else torch.zeros(0, dtype=torch.float64)
        if device.type != "cuda":
            return _Window(count=count, sums=stacked)
        host, copied = stacked.to("cpu", non_blocking=True), torch.cuda.Event()
        copied.record()
        return _Window(count=count, sums=host, copied=copied)

    def arrived(self, agreed: Agreed) -> None:
        """Average the sums of all ranks over steps and ranks that logged.

        Raises
        ------
        CheckFailed : the ranks log different names.
        """
        self._note(agreed, self._means(agreed.sums))

    def _means(self, sums: Sequence[float]) -> dict[str, float]:
        ranks, marks, squares, count = map(int, sums[:4])
        if ranks * squares != marks**2:
            raise CheckFailed(
                f"the ranks log different numbers; this one logs {', '.join(self.names) or 'none'}",
                hint="give run.log the same names in the same order on every rank, or call it on one rank",
            )
        if not count:
            return {}
        return {name: value / count for name, value in zip(self.names, sums[4:], strict=False)}

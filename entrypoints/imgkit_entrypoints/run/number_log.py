"""The numbers that a loop logs: added up on their device, averaged over steps and ranks at the next look."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from imgkit_entrypoints.errors import CheckFailed, UsageError
from imgkit_entrypoints.run.agreement import Agreed

MOST = 16
"""Most names. All ranks send as many numbers, also those that log nothing."""
RESERVED = ("time", "step", "epoch", "steps_per_s")
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
            self._first(numbers)
        for name, value in numbers.items():
            one = value.detach().double() if isinstance(value, Tensor) else float(value)
            self._sums[name] = self._sums[name] + one if self._count else one
        self._count += 1

    def _first(self, numbers: Mapping[str, Any]) -> None:
        if self.names or len(numbers) > MOST or set(numbers) & set(RESERVED):
            first = f"; the first call gave {', '.join(self.names)}" if self.names else ""
            raise UsageError(
                f"run.log got the numbers {', '.join(numbers) or 'none'}{first}",
                hint=f"give the same names at every call, at most {MOST}, and none of {', '.join(RESERVED)}",
            )
        for name, value in numbers.items():
            shape = tuple(value.shape) if isinstance(value, Tensor) else None
            if shape or not isinstance(value, (Tensor, int, float)):
                found = f"a tensor of shape {shape}" if shape else f"a {type(value).__name__}"
                raise UsageError(
                    f"run.log got {found} as {name}", hint="give one number, for example loss.mean()"
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
        sums = torch.zeros(4 + MOST, dtype=torch.float64)
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
        device = next((one.device for one in sums.values() if isinstance(one, Tensor)), torch.device("cpu"))
        values = [torch.as_tensor(one, dtype=torch.float64, device=device) for one in sums.values()]
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

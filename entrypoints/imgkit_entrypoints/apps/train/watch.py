"""Agreement of all ranks on two questions, without a wait in any step: stop now? Is the loss a number?

Every few steps the ranks add up a few numbers on the device, and read the sum at the next look. So all ranks
stop at the same step, and no step waits for another rank. With the sum comes the own work of each rank: each
adds its seconds to a place of its own, where all others add 0.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from imgkit_entrypoints import fence, files
from imgkit_entrypoints.apps.train.config import Config
from imgkit_entrypoints.apps.train.report.metrics import Seen
from imgkit_entrypoints.apps.train.work_clock import WorkClock
from imgkit_entrypoints.launch import run_folder, stop_protocol
from imgkit_entrypoints.launch.hang_watch import Pulse
from imgkit_entrypoints.launch.progress import ProgressNotes
from imgkit_entrypoints.launch.run_folder import RunFolder
from imgkit_entrypoints.launch.signals import STOP_SIGNALS
from imgkit_entrypoints.run.ranks import Ranks

LATENCY_S = 0.5
"""Approximate time between two looks if steps are slow; with fast steps, a look comes every `log_every`."""
FOR_GOOD = "the stop file"
"""A person's request: the run is not requeued, and does not start while the file exists."""
REASONS = (FOR_GOOD, "the launcher asked for it", "--stop-after", "a signal")
_HOST = 2 + len(REASONS)
"""Numbers that come from the host: the seconds of a step, the reasons to stop, the wait for the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    step: int
    steps: int
    seconds: float
    work: Any
    numbers: Tensor
    copied: Any
    """CUDA event after the copy to the host; None on CPU."""


class Watch:
    """Watches for stop requests and for losses that are not numbers, on all ranks alike."""

    def __init__(
        self, config: Config, here: Ranks, env: Mapping[str, str], began: float, work: WorkClock
    ) -> None:
        self._here, self._work = here, work
        self._flag = Path(env["IMGKIT_STOP_DIR"]) / stop_protocol.STOP if env.get("IMGKIT_STOP_DIR") else None
        self._folder = _own_folder(config, env) if here.rank == 0 else None
        self._until = math.inf if config.stop_after_s is None else began + config.stop_after_s
        self._signalled = self._warned = False
        self._pulse = Pulse(env.get("IMGKIT_STOP_DIR"), here.rank)
        self.progress = ProgressNotes(env.get("IMGKIT_STOP_DIR"), here.rank)
        self._pending: _Pending | None = None
        self._interval = self._most = 1
        self._last_step, self._last_time = 0, time.perf_counter()
        self.stop = ""
        """Reason why all ranks stop after this step; empty: go on."""
        self.broken = False
        """True once a loss was not a number."""

    def begin(self, step: int, most: int) -> None:
        """Start the clock of training after `step` steps; at most `most` steps lie between two looks."""
        self._most = most
        self._pulse.done(step)
        self._last_step, self._last_time = step, time.perf_counter()

    def enters(self, step: int) -> None:
        """Note that this rank has its samples of `step`, for the hang watch."""
        self._pulse.begins(step)

    def lives(self) -> None:
        """Tell the hang watch that this rank is alive, outside a training step."""
        self._pulse.lives()

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Note the signals that request a stop, and nothing else.

        Under torchrun they are blocked. They arrive if an MPI launcher starts every rank.
        """
        before = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._signalled = True

    def looks(self, step: int) -> bool:
        """Whether the ranks add up their numbers after `step`, whatever else happens."""
        return step % self._interval == 0

    def after(self, step: int, window: Tensor, *, everything: bool = False) -> list[Seen]:
        """Return the sums that arrived after `step`, usually none; with `everything`, wait for all of them.

        All ranks call this after every step with the same arguments.
        """
        self._pulse.done(step)
        self.progress.moved()
        if not everything and not self.looks(step):
            return []
        found = [self._receive()]
        if step > self._last_step:
            self._send(step, window)
        if everything:
            found.append(self._receive())
        return [seen for seen in found if seen is not None]

    def _send(self, step: int, window: Tensor) -> None:
        now = time.perf_counter()
        seconds, steps = now - self._last_time, step - self._last_step
        self._last_time, self._last_step = now, step
        asked = (
            self._folder is not None and self._asked_by_file(self._folder),
            self._flag is not None and self._flag.exists(),
            time.monotonic() >= self._until,
            self._signalled,
        )
        ranks, count = self._places(), len(window) + _HOST
        numbers = torch.zeros(count + ranks, dtype=window.dtype, device=window.device)
        spent = self._work.take()
        mine = torch.tensor(
            [seconds / steps, *map(float, asked), spent.wait_s, spent.own_s], dtype=window.dtype
        )
        mine = mine.to(window.device, non_blocking=True)
        numbers[: len(window)] = window
        numbers[len(window) : count] = mine[:_HOST]
        if ranks:
            numbers[count + self._here.rank] = mine[_HOST]
        window.zero_()
        window[1] = math.nan  # no norm of the gradient until one is measured
        work, copied = dist.all_reduce(numbers, async_op=True), None
        if window.device.type == "cuda":
            work.wait()  # the stream waits, the host does not
            numbers, copied = numbers.to("cpu", non_blocking=True), torch.cuda.Event()
            copied.record()
        self._pending = _Pending(
            step=step, steps=steps, seconds=seconds, work=work, numbers=numbers, copied=copied
        )

    def _asked_by_file(self, folder: RunFolder) -> bool:
        file = folder.stop_file()
        if file and not self._warned and (text := run_folder.warning(str(file))):
            _say(text)
            self._warned = True
        return file is not None

    def _receive(self) -> Seen | None:
        """Wait for the sums that are under way."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        if pending.copied is not None:
            pending.copied.synchronize()
        else:
            pending.work.wait()
        sums: list[float] = pending.numbers.tolist()
        count = len(sums) - self._places()
        means, own_s = [one / self._here.world_size for one in sums[:count]], sums[count:]
        skipped, norm, loss, *numbers = means[:-_HOST]
        seconds_a_step, *asked, wait_s = means[-_HOST:]
        self._interval = interval(seconds_a_step, self._most)
        self.stop = self.stop or next(
            (reason for reason, some in zip(REASONS, asked, strict=True) if some), ""
        )
        self.broken = self.broken or not math.isfinite(loss)
        skips = round(skipped)
        counted = pending.steps - skips
        return Seen(
            step=pending.step,
            steps=pending.steps,
            loss=loss / counted if counted else math.nan,
            numbers=tuple(one / counted if counted else math.nan for one in numbers),
            grad_norm=norm,
            skipped=skips,
            seconds=pending.seconds,
            own_s=tuple(own_s),
            wait_s=wait_s,
        )

    def _places(self) -> int:
        """Numbers that hold the own work of one rank each; a single rank has nobody to compare with."""
        return self._here.world_size if self._here.world_size > 1 else 0


def refuse_stopped(config: Config, env: Mapping[str, str]) -> None:
    """Raise UsageError if the run's folder holds the file that stops it: nobody wants it started."""
    if folder := _own_folder(config, env):
        folder.refuse_stopped()


def _own_folder(config: Config, env: Mapping[str, str]) -> RunFolder | None:
    """The run's folder, unless the launcher looks after it, which knows IMGKIT_RUN_DIR alone."""
    shared = env.get("IMGKIT_RUN_DIR") if env.get("IMGKIT_STOP_DIR") else None
    if config.run_dir is None or (shared and config.run_dir.resolve() == Path(shared).resolve()):
        return None
    return RunFolder(path=config.run_dir, say=_say)


def _say(text: str) -> None:
    print(f"dist-train: {text}", file=sys.stderr, flush=True)


def interval(seconds_a_step: float, most: int) -> int:
    """Steps between two looks: a divisor of `most`, so that looks coincide with lines of the log."""
    wanted = most if seconds_a_step <= 0 else LATENCY_S / seconds_a_step
    return max(size for size in range(1, most + 1) if most % size == 0 and (size == 1 or size <= wanted))


def tell_counts(global_batch: int, here: Ranks, env: Mapping[str, str]) -> None:
    """Tell this node's launcher which numbers of nodes can share the global batch equally."""
    if env.get("IMGKIT_STOP_DIR") and here.local_rank == 0:
        nproc = int(env.get("LOCAL_WORLD_SIZE", "1"))
        nodes = range(1, here.world_size // nproc + 1)
        counts = (str(count) for count in nodes if global_batch % (count * nproc) == 0)
        files.put(Path(env["IMGKIT_STOP_DIR"]) / stop_protocol.COUNTS, f"{' '.join(counts)}\n")


def tell_saved(step: int, here: Ranks, env: Mapping[str, str]) -> bool:
    """Tell this node's launcher that the state is saved; False if there is no launcher."""
    if not env.get("IMGKIT_STOP_DIR"):
        return False
    if here.local_rank == 0:
        fence.check(env)
        job = env.get("IMGKIT_JOB_ID", stop_protocol.LOCAL_JOB)
        files.put(Path(env["IMGKIT_STOP_DIR"]) / stop_protocol.SAVED, f"{job} {step}\n")
    return True

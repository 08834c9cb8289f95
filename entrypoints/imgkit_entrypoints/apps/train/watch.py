"""Agreement of all ranks on two questions, without a wait in any step: stop now? Is the loss a number?

Every few steps the ranks add up a few numbers on the device, and read the sum at the next look. So all ranks
stop at the same step, and no step waits for another rank. With the sum comes the own work of each rank: each
adds its seconds to a place of its own, where all others add 0.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from imgkit_entrypoints import files
from imgkit_entrypoints.apps.train.config import Config
from imgkit_entrypoints.apps.train.report.metrics import Seen
from imgkit_entrypoints.apps.train.work_clock import WorkClock
from imgkit_entrypoints.launch import stop_protocol
from imgkit_entrypoints.launch.hang_watch import Pulse
from imgkit_entrypoints.launch.progress import ProgressNotes
from imgkit_entrypoints.run.agreement import Agreement
from imgkit_entrypoints.run.ranks import Ranks
from imgkit_entrypoints.run.stop_requests import StopRequests, own_folder, reason_of


class Watch:
    """Watches for stop requests and for losses that are not numbers, on all ranks alike."""

    def __init__(
        self, config: Config, here: Ranks, env: Mapping[str, str], began: float, work: WorkClock
    ) -> None:
        self._here, self._work = here, work
        folder = own_folder(config.run_dir, env, _say) if here.rank == 0 else None
        if folder:
            folder.clear()
        until = math.inf if config.stop_after_s is None else began + config.stop_after_s
        self._requests = StopRequests(env, folder, _say, until)
        self._agreement = Agreement(here, self._requests.asked)
        self._pulse = Pulse(env.get("IMGKIT_STOP_DIR"), here.rank)
        self.progress = ProgressNotes(env.get("IMGKIT_STOP_DIR"), here.rank)
        self.stop = ""
        """Reason why all ranks stop after this step; empty: go on."""
        self.broken = False
        """True once a loss was not a number."""

    def begin(self, step: int, most: int) -> None:
        """Start the clock of training after `step` steps; at most `most` steps lie between two looks."""
        self._pulse.done(step)
        self._agreement.begin(step, most)

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
        self._requests.listen()
        try:
            yield
        finally:
            self._requests.deaf()

    def looks(self, step: int) -> bool:
        """Whether the ranks add up their numbers after `step`, whatever else happens."""
        return self._agreement.looks(step)

    def after(self, step: int, window: Tensor, *, everything: bool = False) -> list[Seen]:
        """Return the sums that arrived after `step`, usually none; with `everything`, wait for all of them.

        All ranks call this after every step with the same arguments.
        """
        self._pulse.done(step)
        self.progress.moved()
        if not everything and not self.looks(step):
            return []
        found = [self._receive()]
        if step > self._agreement.sent_step:
            self._send(step, window)
        if everything:
            found.append(self._receive())
        return [seen for seen in found if seen is not None]

    def _send(self, step: int, window: Tensor) -> None:
        ranks, count = self._places(), len(window) + 1
        numbers = torch.zeros(count + ranks, dtype=window.dtype, device=window.device)
        spent = self._work.take()
        mine = torch.tensor([spent.wait_s, spent.own_s], dtype=window.dtype)
        mine = mine.to(window.device, non_blocking=True)
        numbers[: len(window)] = window
        numbers[len(window)] = mine[0]
        if ranks:
            numbers[count + self._here.rank] = mine[1]
        window.zero_()
        window[1] = math.nan  # no norm of the gradient until one is measured
        self._agreement.send(step, numbers)

    def _receive(self) -> Seen | None:
        """Wait for the sums that are under way."""
        agreed = self._agreement.receive()
        if agreed is None:
            return None
        count = len(agreed.sums) - self._places()
        skipped, norm, loss, *numbers, wait_s = (one / self._here.world_size for one in agreed.sums[:count])
        self.stop = self.stop or reason_of(agreed.asked)
        self.broken = self.broken or not math.isfinite(loss)
        skips = round(skipped)
        counted = agreed.steps - skips
        return Seen(
            step=agreed.step,
            steps=agreed.steps,
            loss=loss / counted if counted else math.nan,
            numbers=tuple(one / counted if counted else math.nan for one in numbers),
            grad_norm=norm,
            skipped=skips,
            seconds=agreed.seconds,
            own_s=agreed.sums[count:],
            wait_s=wait_s,
        )

    def _places(self) -> int:
        """Numbers that hold the own work of one rank each; a single rank has nobody to compare with."""
        return self._here.world_size if self._here.world_size > 1 else 0


def refuse_stopped(config: Config, env: Mapping[str, str]) -> None:
    """Raise UsageError if the run's folder holds the file that stops it: nobody wants it started."""
    if folder := own_folder(config.run_dir, env, _say):
        folder.refuse_stopped()


def _say(text: str) -> None:
    print(f"dist-train: {text}", file=sys.stderr, flush=True)


def tell_counts(global_batch: int, here: Ranks, env: Mapping[str, str]) -> None:
    """Tell this node's launcher which numbers of nodes can share the global batch equally."""
    if env.get("IMGKIT_STOP_DIR") and here.local_rank == 0:
        nproc = int(env.get("LOCAL_WORLD_SIZE", "1"))
        nodes = range(1, here.world_size // nproc + 1)
        counts = (str(count) for count in nodes if global_batch % (count * nproc) == 0)
        files.put(Path(env["IMGKIT_STOP_DIR"]) / stop_protocol.COUNTS, f"{' '.join(counts)}\n")

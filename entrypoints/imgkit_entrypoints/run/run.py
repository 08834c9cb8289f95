"""The run of a training loop, as programs use it: when it stops, what it saves, and where it goes on."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from imgkit_entrypoints import files, terminal
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.launch.progress import ProgressNotes
from imgkit_entrypoints.launch.start_up import first_attempt_s
from imgkit_entrypoints.launch.watchdog import Pulse
from imgkit_entrypoints.run import disk, random_state, stop_requests
from imgkit_entrypoints.run.agreement import AddedNumbers, NumberLog
from imgkit_entrypoints.run.call_watch import format_line
from imgkit_entrypoints.run.checkpoint import Checkpoint, CheckpointWriter
from imgkit_entrypoints.run.connection import RunConnection
from imgkit_entrypoints.run.loaders import refuse_without_position
from imgkit_entrypoints.run.metrics import MetricsFile
from imgkit_entrypoints.run.position import DataPosition
from imgkit_entrypoints.run.ranks import Ranks
from imgkit_entrypoints.run.run_checkpoints import RunCheckpoints
from imgkit_entrypoints.run.step_loop import StepLoop
from imgkit_entrypoints.run.stop_requests import StopRequests
from imgkit_entrypoints.run.tracked import has_state


def _say(text: str) -> None:
    terminal.print_messages(f"run: {text}")


class Run:
    """A run: it stops on request, saves its state, and goes on from it. `start` makes one.

    All ranks have to call `restore`, `steps`, `due`, `save` and every other collective call equally often.
    Call `track` before them.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        env: Mapping[str, str],
        until: float,
        say: Callable[[str], None],
        *,
        ignore_checkpoints: bool = False,
    ) -> None:
        self.folder = folder
        """The run's folder."""
        rank = int(env.get("RANK", "0"))
        run_folder = folder if keep else None
        self._lock: BinaryIO | None = None
        watched_folder = stop_requests.folder_to_watch(run_folder, env, say)
        if watched_folder is not None:
            watched_folder.refuse_if_stopped()
        metrics = None
        if rank == 0:
            if run_folder is not None:
                self._lock = disk.lock_folder(run_folder, say, env)
            if watched_folder is not None:
                watched_folder.clear()
            metrics = MetricsFile(run_folder, say)
        self._requests = StopRequests(env, watched_folder if rank == 0 else None, until)
        agent_folder = env.get("IMGKIT_STOP_DIR")
        progress = ProgressNotes(agent_folder, rank)
        self._pulse = Pulse(agent_folder, rank)
        self._position = DataPosition()
        self._log = NumberLog(metrics, lambda: self._position.epoch_progress)
        self._connection = RunConnection(env, self._requests, self._log, self._pulse, say)
        self._checkpoints = RunCheckpoints(
            folder, keep, self._connection, self._position, progress, ignore_unreadable=ignore_checkpoints
        )
        self._loop = StepLoop(self._checkpoints, self._connection, self._pulse, progress)
        self._requests.listen()

    @classmethod
    def start(
        cls,
        folder: str | Path | None = None,
        *,
        keep: int = 2,
        stop_after_s: float = math.inf,
        ignore_checkpoints: bool = False,
        say: Callable[[str], None] = _say,
    ) -> Run:
        """Look out for requests to stop, and open the run's folder. This needs no process group.

        Parameters
        ----------
        folder : the run's folder; by default IMGKIT_RUN_DIR, else ``runs/NAME-OF-THE-PROGRAM``. A new run
            needs a folder of its own. A relative path starts at the job's folder, also where the program
            starts elsewhere (``--workdir``).
        keep : number of checkpoints that stay; 0: the run needs no folder and saves nothing.
        stop_after_s : seconds after which the run saves and stops by itself. Under dist-run they count from
            the first attempt, also after a failure; a job that was requeued counts anew.
        ignore_checkpoints : start anew if the folder has checkpoints and none of them can be read; such a run
            is refused otherwise. They stay there, renamed to ``skipped-...``.
        say : gets the run's messages; by default they go to stderr.

        Raises
        ------
        UsageError : a person's file `stop` is in the folder, or another run writes into it.
        """
        program = Path(sys.argv[0]).stem or "program"
        path = Path(folder or os.environ.get("IMGKIT_RUN_DIR") or Path("runs") / program)
        until = first_attempt_s(os.environ) + stop_after_s
        folder = files.in_job_folder(path, os.environ)
        return cls(folder, keep, os.environ, until, say, ignore_checkpoints=ignore_checkpoints)

    @property
    def step(self) -> int:
        """Steps done."""
        return self._loop.read_step()

    @property
    def epoch(self) -> int:
        """Epochs that are done: one pass of each loop over `steps`."""
        return self._loop.read_epoch()

    @property
    def stopping(self) -> str:
        """Why the run stops at the next `save`, or empty while it goes on. All ranks see the same."""
        return self._connection.stop

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._connection.is_open:
                self._loop.end_open_step()
                self._checkpoints.finish()
        finally:
            self._requests.stop_listening()
            self._loop.close()
            self._connection.stop_watching()
            if kind is None or self.stopping:  # after an error, other ranks may still use the groups
                self._checkpoints.close_groups()
            if self._lock is not None:
                self._lock.close()

    def track(self, **objects: Any) -> None:
        """Name the objects whose state belongs to the run: model, optimizer, scheduler, scaler, loader.

        A checkpoint keeps rank 0's state of each, and a resume gives it to all ranks, also where buffers of a
        model differ between the ranks. Of a loader it keeps one state for each rank. Of models and optimizers
        that FSDP2 shards it keeps the shards of all ranks. Random states of torch, Python and NumPy always
        belong to it. A model is saved without the wrappers of DDP and torch.compile. A DataLoader over a
        map-style dataset needs no state: `steps` counts its batches.

        Raises
        ------
        UsageError : an object has no state that a resume could load, or is sharded otherwise than by FSDP2.
        """
        self._track(objects, per_rank=False)

    def track_per_rank(self, **objects: Any) -> None:
        """Name objects whose state each rank keeps for itself, such as its position in the data.

        Only as many ranks can resume.

        Raises
        ------
        UsageError : as `track`.
        """
        self._track(objects, per_rank=True)

    def _track(self, objects: Mapping[str, Any], *, per_rank: bool) -> None:
        """Track all objects but loaders whose batches `steps` counts."""
        if self._checkpoints.may_write or self._loop.is_started:
            raise UsageError("run.track comes too late", hint="call it before run.restore and run.steps")
        for name, value in objects.items():
            if not has_state(value) and hasattr(value, "__iter__"):
                refuse_without_position(value)
            else:
                self._checkpoints.tracked.add(name, value, per_rank=per_rank)

    def connect(self, ranks: Ranks) -> None:
        """Use a process group of the program. Otherwise the run opens a gloo group, with more connections.

        The calls of the run and of the program must then come in the same order on all ranks.
        """
        self._connection.use_ranks(ranks)

    def find(self, path: str | Path | None = None) -> Checkpoint | None:
        """Find the newest whole checkpoint, for a program that needs it before its objects exist.

        A collective call.

        Parameters
        ----------
        path : the folder of another run, or one checkpoint; by default this run's folder.

        Raises
        ------
        UsageError : there are checkpoints, and none of them can be read.
        """
        return self._checkpoints.find(None if path is None else Path(path))

    def restore(self, source: Checkpoint | None = None) -> bool:
        """Load `source`, or the newest whole checkpoint. Returns False if there is none. A collective call.

        Raises
        ------
        UsageError : the checkpoint holds other objects, or cannot be read; the ranks differ in a state that
            is saved only of rank 0; or a scheduler is not tracked, which `steps` and `save` refuse too.
        """
        is_restored = self._checkpoints.restore(source)
        if is_restored:
            self._loop.require_position()
        return is_restored

    def steps(self, loader: Any, *, name: str = "", save_every: int = 0) -> Steps:
        """Iterate once over `loader` (one pass). Yields the number of each step, from 1, and its batch.

        After a restore, the first call goes on where the checkpoint was taken. After the body of each step,
        the ranks save if it is time, and stop if any of them was asked to. A stop saves the state and raises
        SystemExit, so that no code after the loop runs except ``finally``. While gradients wait for a tracked
        optimizer, saves and stops wait too. ``len()`` of the result is the number of steps that are left.

        Parameters
        ----------
        name : name of this loop, if an epoch has several loops. Each epoch has the same loops in the same
            order, and a resume skips the loops that were done.
        save_every : steps between two checkpoints; 0: save only at a stop and at the end of the run.

        Raises
        ------
        UsageError : the loader cannot resume, the ranks have loaders of different lengths, another loop has
            to come now, or a ``break`` has left a pass.
        CheckFailed : the ranks have taken different numbers of steps.
        """
        refuse_without_position(loader)
        is_tracked = any(loader is value for value in self._checkpoints.tracked.objects.values())
        if has_state(loader) and not is_tracked:
            raise UsageError(
                f"the state of this {type(loader).__name__} is not tracked",
                where="run.steps",
                hint="run.track(loader=loader, ...)",
            )
        program_frame = sys._getframe(1)
        # Loops without a name are told apart by the lines at which the program calls this.
        line = format_line(program_frame)
        return Steps(self._loop, self._position, loader, name, save_every, line)

    def log(self, **numbers: Any) -> None:
        """Note numbers of this step, such as the loss; no call waits for a device or another rank.

        Their means over steps and ranks go to the terminal and to ``metrics.jsonl`` in the run's folder.
        Every rank logs the same names, or one rank alone logs.
        """
        self._log.add(numbers)

    def add_up(self, numbers: AddedNumbers, *, every: int) -> None:
        """Add up `numbers` over all ranks in place of what `log` gets; a collective call.

        An error that `numbers.arrived` raises ends the run on all ranks alike, and nothing is saved.

        Parameters
        ----------
        every : most steps between two additions. They come after multiples of this number of steps; if steps
            are slow, they come more often, after multiples of one of its divisors.
        """
        self._connection.agreement.numbers = numbers
        self._loop.max_interval = every

    def lives(self) -> None:
        """Tell the watchdog that this rank is busy between two steps, for example in an evaluation."""
        self._pulse.count_sign_of_life()

    def begins(self) -> None:
        """Tell the watchdog that this rank has the next batch; optional in a loop with `due`."""
        if not self._loop.is_started:
            self._loop.start(0)
        self._loop.begin_step()

    def looks(self) -> bool:
        """Return whether the ranks add up their numbers at the end of the step that begins.

        Compute numbers that are costly only in such steps.
        """
        return self._connection.agreement.is_exchange_due(self._position.step + 1)

    def due(self, *, save_every: int = 0) -> bool:
        """End a step of a loop that is not over `steps`, such as one of a library; a collective call.

        Returns True if the loop has to call `save` now.
        """
        return self._loop.end_step(save_every)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Do something between two steps that is no training, such as an evaluation; a collective call.

        Before it, the ranks wait until all numbers of the earlier steps have been added up. The time that it
        takes counts for no step, and the random numbers that it draws do not change those of the training.
        """
        self._connection.agreement.wait_for_ranks(self._position.step, "run.pause")
        state = random_state.capture()
        yield
        random_state.restore(state)
        # The time of the pause belongs to no step.
        self._loop.start_clock()

    def save(self) -> None:
        """Save the state; a collective call. After a request to stop this does not return.

        The checkpoint is written in the background. At a stop, the run waits until it is whole, and raises
        SystemExit. In the body of a loop over `steps`, and while gradients wait for their optimizer, the
        checkpoint is taken at the end of the first step where it can be. After such a loop it is taken where
        the next pass or the end of the run comes, with what the program changes until then.

        Raises
        ------
        UsageError : nothing is tracked, or the folder holds checkpoints that nobody has restored; or weights
            were updated in a step that no call of `due` has ended.
        """
        self._loop.request_save()

    def refuse_older(self) -> None:
        """Insist on a new run, in place of `restore`; a collective call.

        Raises
        ------
        UsageError : the folder holds checkpoints.
        """
        self._checkpoints.refuse_older()

    def wait(self) -> CheckpointWriter:
        """Wait until the last checkpoint is whole; the result has its step. A collective call."""
        return self._checkpoints.wait()


@dataclass(frozen=True, slots=True)
class Steps:
    """One pass over a loader, as `Run.steps` returns it."""

    _loop: StepLoop
    _position: DataPosition
    _loader: Any
    _name: str
    _save_every: int
    _line: str

    def __len__(self) -> int:
        return self._position.remaining_steps(self._name, len(self._loader))

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return self._loop.iterate(self._loader, self._name, self._save_every, self._line)

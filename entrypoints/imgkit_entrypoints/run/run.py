"""The class `Run`, with which a training program stops on request, saves its state, and resumes."""

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
    """Print a message of the run to stderr."""
    terminal.print_messages(f"run: {text}")


class Run:
    """A training run that stops on request, saves its state, and resumes from it. `start` creates a run.

    All ranks must make the same number of calls of `restore`, `steps`, `due`, `save` and every other
    collective call. Call `track` before these.
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
        # The order matters: a stop file must be refused before it is cleared, and the folder must be locked
        # before anything in it is changed.
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
        """Create a run: open its folder, and begin to listen for requests to stop.

        This does not need a process group.

        Parameters
        ----------
        folder : the run's folder. The default is IMGKIT_RUN_DIR, or else ``runs/NAME-OF-THE-PROGRAM``. A new
            run needs a folder of its own. A relative path is relative to the job's folder, even if the
            program starts in another folder (``--workdir``).
        keep : number of checkpoints to keep. If 0, the run needs no folder and saves nothing.
        stop_after_s : seconds after which the run saves and stops by itself. Under dist-run, the time begins
            with the first attempt, even after a failure. It begins again if the job is requeued.
        ignore_checkpoints : whether to start from the beginning if the folder has checkpoints but none of
            them can be read. By default, such a run is refused. The checkpoints remain in the folder, renamed
            to ``skipped-...``.
        say : a function that receives the run's messages. By default, they are printed to stderr.

        Raises
        ------
        UsageError : the folder contains a file `stop` of a person, or another run writes into the folder.
        """
        program = Path(sys.argv[0]).stem or "program"
        path = Path(folder or os.environ.get("IMGKIT_RUN_DIR") or Path("runs") / program)
        until = first_attempt_s(os.environ) + stop_after_s
        folder = files.in_job_folder(path, os.environ)
        return cls(folder, keep, os.environ, until, say, ignore_checkpoints=ignore_checkpoints)

    @property
    def step(self) -> int:
        """Number of steps that are done."""
        return self._loop.read_step()

    @property
    def epoch(self) -> int:
        """Number of epochs that are done. An epoch is one pass of each loop over `steps`."""
        return self._loop.read_epoch()

    @property
    def stopping(self) -> str:
        """Why the run stops at the next `save`, the same text on all ranks. Empty if it does not stop."""
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

        A checkpoint stores rank 0's state of each object, and a resume loads it on all ranks, even if buffers
        of a model differ between the ranks. There are three exceptions:

        * A loader has one state for each rank.
        * Models and optimizers that FSDP2 shards are saved with the shards of all ranks.
        * A DataLoader over a map-style dataset needs no state, because `steps` counts its batches.

        A model is saved without the wrappers of DDP and torch.compile. The random states of torch, Python and
        NumPy are always saved.

        Raises
        ------
        UsageError : an object has no state that a resume could load, or is sharded in another way than by
            FSDP2.
        """
        self._track(objects, per_rank=False)

    def track_per_rank(self, **objects: Any) -> None:
        """Name objects that have a different state on each rank, such as a position in the data.

        Such a run can be resumed only with the same number of ranks.

        Raises
        ------
        UsageError : an object has no state that a resume could load, or is sharded in another way than by
            FSDP2.
        """
        self._track(objects, per_rank=True)

    def _track(self, objects: Mapping[str, Any], *, per_rank: bool) -> None:
        """Track all objects except loaders without a state, whose batches `steps` counts."""
        # After a restore, the object would not have been loaded. After a save, a checkpoint would lack it.
        if self._checkpoints.has_checked_folder or self._loop.is_started:
            raise UsageError("run.track comes too late", hint="call it before run.restore and run.steps")
        for name, value in objects.items():
            if not has_state(value) and hasattr(value, "__iter__"):  # a loader without a state
                refuse_without_position(value)
            else:  # `add` refuses any other object without a state
                self._checkpoints.tracked.add(name, value, per_rank=per_rank)

    def connect(self, ranks: Ranks) -> None:
        """Use a process group of the program instead of a new gloo group, to save connections.

        Then all ranks must make the calls of the run and of the program in the same order.
        """
        self._connection.use_ranks(ranks)

    def find(self, path: str | Path | None = None) -> Checkpoint | None:
        """Find the newest complete checkpoint, for a program that needs it before its objects exist.

        This is a collective call.

        Parameters
        ----------
        path : the folder of another run, or a checkpoint. The default is this run's folder.

        Raises
        ------
        UsageError : there are checkpoints, but none of them can be read.
        """
        return self._checkpoints.find(None if path is None else Path(path))

    def restore(self, source: Checkpoint | None = None) -> bool:
        """Load `source` or the newest complete checkpoint. Return False if there is no checkpoint.

        This is a collective call.

        Raises
        ------
        UsageError : the checkpoint contains other objects or cannot be read. Or the ranks differ in a state
            that is saved only on rank 0. Or a scheduler is not tracked, which `steps` and `save` refuse, too.
        """
        is_restored = self._checkpoints.restore(source)
        if is_restored:
            self._loop.note_restore()
        return is_restored

    def steps(self, loader: Any, *, name: str = "", save_every: int = 0) -> Steps:
        """Iterate once over `loader` (one pass). Yield the number of each step, from 1, and its batch.

        After a restore, the first call continues where the checkpoint was taken. After the body of each step,
        the ranks save if a save is due, and stop if one of them was requested to stop. A stop saves the state
        and raises SystemExit, so no code after the loop runs except ``finally``. While gradients wait for a
        tracked optimizer, saves and stops are delayed. ``len()`` of the result is the number of remaining
        steps.

        Parameters
        ----------
        name : name of this loop, if an epoch has several loops. Each epoch must have the same loops in the
            same order. A resume skips the loops that were done.
        save_every : number of steps between two checkpoints. If 0, the run saves only at a stop and at its
            end.

        Raises
        ------
        UsageError : the loader cannot be resumed, the ranks have loaders of different lengths, the epoch must
            continue with another loop, or a pass was left with ``break``.
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
        # Loops without a name are distinguished by the line of the program that calls this method.
        line = format_line(program_frame)
        return Steps(self._loop, self._position, loader, name, save_every, line)

    def log(self, **numbers: Any) -> None:
        """Log numbers of this step, such as the loss. A call does not wait for a device or another rank.

        The means over steps and ranks are printed, and written to ``metrics.jsonl`` in the run's folder.
        Either all ranks log the same names, or only one rank logs.
        """
        self._log.add(numbers)

    def add_up(self, numbers: AddedNumbers, *, every: int) -> None:
        """Let the following steps add up `numbers` over all ranks, instead of the numbers of `log`.

        This is a collective call. It adds up nothing yet. If `numbers.arrived` raises an error, the run ends
        on all ranks, and nothing is saved.

        Parameters
        ----------
        every : largest number of steps between two additions. The ranks add up after multiples of this
            number. If steps are slow, they add up more often, after multiples of one of its divisors.
        """
        self._connection.agreement.numbers = numbers
        self._loop.max_interval = every

    def lives(self) -> None:
        """Tell the watchdog that this rank is busy between two steps, for example in an evaluation."""
        self._pulse.count_sign_of_life()

    def begins(self) -> None:
        """Tell the watchdog that this rank has the next batch. This is optional in a loop with `due`."""
        if not self._loop.is_started:
            self._loop.start(0)
        self._loop.begin_step()

    def looks(self) -> bool:
        """Return whether the ranks will add up their numbers at the end of the step that begins now.

        Compute expensive numbers only in such steps.
        """
        return self._connection.agreement.is_exchange_due(self._position.step + 1)

    def due(self, *, save_every: int = 0) -> bool:
        """End a step of a loop that does not use `steps`, such as the loop of a library.

        Return True if the loop must call `save` now. This is a collective call.
        """
        return self._loop.end_step(save_every)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Run a block between two steps that is not training, such as an evaluation.

        This is a collective call. Before the block, the ranks wait until all numbers of earlier steps have
        been added up. The time of the block does not count for any step. The random numbers that the block
        draws do not change those of the training.
        """
        self._connection.agreement.exchange_and_wait(self._position.step, "run.pause")
        random_before = random_state.capture()
        yield  # an error in the block normally ends the program, so the rest is not in a `finally`
        random_state.restore(random_before)
        # Otherwise the time of the pause would count for the next step.
        self._loop.start_clock()

    def save(self) -> None:
        """Save the state. After a request to stop, this call does not return. It is a collective call.

        The checkpoint is written in the background. At a stop, the run waits until the checkpoint is
        complete, and raises SystemExit.

        The checkpoint is not always taken immediately. In the body of a loop over `steps`, and while
        gradients wait for their optimizer, it is taken at the end of the first step in which that is
        possible. After such a loop, it is taken when the next pass begins or the run ends, and includes what
        the program changes until then.

        Raises
        ------
        UsageError : nothing is tracked, or the folder contains checkpoints that were not restored, or weights
            were updated in a step that no call of `due` has ended.
        """
        self._loop.request_save()

    def refuse_older(self) -> None:
        """Make sure that this is a new run. Call this instead of `restore`. It is a collective call.

        Raises
        ------
        UsageError : the folder contains checkpoints.
        """
        self._checkpoints.refuse_older()

    def wait(self) -> CheckpointWriter:
        """Wait until the last checkpoint is complete. The result has its step. This is a collective call."""
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
        return self._position.count_remaining_steps(self._name, len(self._loader))

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return self._loop.iterate(self._loader, self._name, self._save_every, self._line)

"""The run of a training loop: when it stops, what it saves, and where it goes on."""

from __future__ import annotations

import atexit
import contextlib
import gc
import math
import os
import pickle
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from imgkit_entrypoints import files, terminal
from imgkit_entrypoints.errors import EXIT_NO, CheckFailed, UsageError
from imgkit_entrypoints.launch.progress import ProgressNotes
from imgkit_entrypoints.launch.start_up import first_attempt_s
from imgkit_entrypoints.launch.watchdog import Pulse
from imgkit_entrypoints.run import checkpoint, disk, random_state, stop_requests
from imgkit_entrypoints.run.agreement import PASS_END, STEP_END, AddedNumbers, Agreement, NumberLog
from imgkit_entrypoints.run.call_watch import CallWatch, line_of
from imgkit_entrypoints.run.checkpoint import Checkpoint, CheckpointWriter
from imgkit_entrypoints.run.gradients import PendingGradients
from imgkit_entrypoints.run.lr_schedulers import refuse_untracked_schedulers
from imgkit_entrypoints.run.metrics import MetricsFile
from imgkit_entrypoints.run.position import DataPosition, lazy_sampler, loader_length, refuse_without_position
from imgkit_entrypoints.run.ranks import Ranks, connect, first_names, ranks_by_value, with_new_group
from imgkit_entrypoints.run.stateful_loaders import has_unclear_state
from imgkit_entrypoints.run.stop_requests import StopRequests
from imgkit_entrypoints.run.tracked import Tracked, has_state

MAX_INTERVAL = 1000
"""Most steps between two looks."""


class ConnectedRanks(NamedTuple):
    """What a run has once it has met the other ranks."""

    ranks: Ranks
    """With a group for values in host memory."""
    agreement: Agreement


class NotSaved(CheckFailed):
    """The last state of a run that is done could not be written; all ranks raise it."""


def _say(text: str) -> None:
    terminal.err(f"run: {text}")


class Run:
    """A run: it stops on request, saves its state, and goes on from it. `start` makes one.

    All ranks call `restore`, `steps`, `due`, `save` and what else is a collective call equally often; `track`
    comes first.
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
        self._env, self._keep, self._say, self._rank = env, keep, say, int(env.get("RANK", "0"))
        self._ignore_checkpoints = ignore_checkpoints
        self._lock: BinaryIO | None = None
        watched = stop_requests.folder_to_watch(folder if keep else None, env, say)
        if watched:
            watched.refuse_stopped()
        if self._rank == 0:
            self._lock = disk.lock(folder, say, env) if keep else None
            if watched:
                watched.clear()
        self._requests = StopRequests(env, watched if self._rank == 0 else None, until)
        agent_folder = env.get("IMGKIT_STOP_DIR")
        self._progress, self._pulse = ProgressNotes(agent_folder, self._rank), Pulse(agent_folder, self._rank)
        self._tracked, self._position = Tracked(), DataPosition()
        self._gradients = PendingGradients(self._tracked, self._report)
        metrics = MetricsFile(folder if keep else None, say) if self._rank == 0 else None
        self._log = NumberLog(metrics, lambda: self._position.passes)
        self._max_interval = 0
        """Most steps between two looks at the program's own numbers; 0: it has none."""
        self._connection: ConnectedRanks | None = None
        self._call_watch: CallWatch | None = None
        self._own_group: Any = None
        """The process group that the run has opened, and closes."""
        self._writer: CheckpointWriter | None = None
        self._restored: Checkpoint | None = None
        """The checkpoint from which the run goes on, until its first step."""
        self._restored_digests: dict[str, str] = {}
        """Digests of the tracked objects after a restore within a pass, until that pass begins."""
        self._saved_values: dict[str, Any] = self._position.values()
        self._saved_step = 0
        """Step of the last save, or of the checkpoint from which the run goes on."""
        self._skipped: Collection[Path] = ()
        """Checkpoints in the run's folder that could not be read."""
        self._is_new = False
        """Whether `find` has seen that the folder has no checkpoint to go on from."""
        self._may_write = self._is_started = self._is_in_step = self._should_save = False
        self._has_read_position, self._has_read_step = True, False
        self._has_read_epoch = False
        """Whether the program has read the epoch since the latest pass began."""
        self._has_warned_of_sampler = False
        self._loader: Any = None
        """The loader of the latest pass, if it has a state."""
        self._loader_start: bytes | None = None
        """Its state when the pass began; None: it was compared."""
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
        """Look out for requests to stop, and open the run's folder. Needs no process group.

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
        self._has_read_position = self._has_read_step = True
        return self._position.step

    @property
    def epoch(self) -> int:
        """Epochs that are done: one pass of each loop over `steps`."""
        self._has_read_position = self._has_read_epoch = True
        return self._position.epoch

    @property
    def stopping(self) -> str:
        """Why the run stops at the next `save`; empty: it goes on. All ranks see the same."""
        return self._connection.agreement.stop if self._connection else ""

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._connection is not None:
                self._end_step()
                self._finish(self._connection.ranks)
        finally:
            self._requests.stop_listening()
            self._gradients.close()
            if self._call_watch is not None:
                self._call_watch.close()
            if kind is None or self.stopping:  # after an error, other ranks may still use the groups
                self._close_groups()
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
        if self._may_write or self._is_started:
            raise UsageError("run.track comes too late", hint="call it before run.restore and run.steps")
        for name, value in objects.items():
            if not has_state(value) and hasattr(value, "__iter__"):
                refuse_without_position(value)  # `steps` counts its batches
            else:
                self._tracked.add(name, value, per_rank=per_rank)

    def connect(self, ranks: Ranks) -> None:
        """Use a process group of the program, not a gloo group of the run's own: fewer connections.

        Its calls and the program's must then come in the same order on all ranks.
        """
        # What the ranks exchange for checkpoints lies in host memory.
        host_ranks = ranks if ranks.device.type == "cpu" else with_new_group(ranks)
        agreement = Agreement(ranks, self._requests.answers, self._log)
        self._connection = ConnectedRanks(host_ranks, agreement)
        if ranks.world_size > 1:
            self._call_watch = CallWatch(ranks, self._pulse, self._report)

    def _connect(self) -> ConnectedRanks:
        """Meet the other ranks, once the program has opened its process group."""
        if self._connection is None:
            ranks = connect(self._env, self._rank)
            self.connect(ranks)
            self._own_group = ranks.group
        assert self._connection is not None  # noqa: S101 - for mypy
        return self._connection

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
        if path is None and not self._keep:
            return None
        ranks, folder = self._connect().ranks, Path(path or self.folder)
        newest, problems = checkpoint.find_newest(folder, ranks, trusts_folder=path is not None)
        own = [skipped for skipped in problems if not files.foreign_owner(skipped, folder)]
        if newest is None and problems:
            # Those of another user would be in the way of later ones, and cannot be set aside.
            may_start_anew = ranks.broadcast(path is None and len(own) == len(problems))
            self._refuse_unreadable(folder, problems, may_start_anew=may_start_anew)
        for problem in problems.values():
            self._report(f"checkpoint skipped: {problem}")
        if path is None:
            self._skipped, self._is_new = own, newest is None
        return newest

    def _refuse_unreadable(self, folder: Path, problems: Mapping[Path, str], *, may_start_anew: bool) -> None:
        """Raise UsageError, on every rank, unless rank 0 starts anew beside unreadable checkpoints."""
        if may_start_anew and self._connect().ranks.broadcast(self._ignore_checkpoints):
            return
        hint = "name another folder"
        if may_start_anew:
            hint += ", or start anew: Run.start(ignore_checkpoints=True), dist-train --ignore-checkpoints"
        raise UsageError(
            f"none of the checkpoints can be read: {first_names([*problems.values()])}",
            where=str(folder),
            hint=hint,
        )

    def restore(self, source: Checkpoint | None = None) -> bool:
        """Take over `source`, or the newest whole checkpoint; False if there is none. A collective call.

        Raises
        ------
        UsageError : the checkpoint holds other objects, or cannot be read; rank 0's state of an object cannot
            count for all; or a scheduler is not tracked, which `steps` and `save` refuse too.
        """
        refuse_untracked_schedulers(self._tracked.objects)
        ranks, _ = self._connect()
        self._warn_of_ddp(ranks)
        self._refuse_unshared_folder(ranks)
        newest = source or self.find()
        self._may_write = True
        if newest is None:
            if self._keep:
                self._tracked.snapshot(ranks, "run.restore")
            return False
        self._load(newest, ranks)
        self._saved_values, self._restored = self._position.values(), newest
        self._restored_digests = self._tracked.digests() if self._position.batch else {}
        self._has_read_position = self._position.epoch == 0
        self._saved_step = self._position.step
        if source is None:
            self._report(f"resumes after step {self._position.step}: {newest.folder}")
        return True

    def _load(self, newest: Checkpoint, ranks: Ranks) -> None:
        values = newest.rank_value()
        if values["objects"] and newest.world_size != ranks.world_size:
            raise UsageError(
                f"{', '.join(sorted(values['objects']))} has a state for each of {newest.world_size} ranks, "
                f"but there are {ranks.world_size}",
                where=str(newest.folder),
                hint=f"start {newest.world_size} ranks, or a new run in another folder",
            )
        self._tracked.load(newest, values["objects"])
        if warning := self._position.take_over(newest.run, values["random"], newest.world_size, ranks):
            self._report(warning)

    def _warn_of_ddp(self, ranks: Ranks) -> None:
        """Warn if a DDP model is visible whose order of sums will change after its first backward pass."""
        modules = [
            module
            for value in self._tracked.objects.values()
            if isinstance(value, nn.Module) and ranks.world_size > 2 and self._keep
            for module in value.modules()
            if isinstance(module, DistributedDataParallel) and not module.find_unused_parameters
        ]
        if any(not any(module.reducer.get_backward_stats()) for module in modules):
            self._report(
                "warning: a DDP model has had no backward pass: on 3 ranks or more, the first step after a "
                "resume then adds up gradients in another order. Before run.restore(): "
                "loss_of(batch).backward(); optimizer.zero_grad()"
            )

    def _refuse_unshared_folder(self, ranks: Ranks) -> None:
        """Raise UsageError if ranks with sharded state do not see the same folder."""
        if self._keep and any(ranks.gather(self._tracked.has_shards, call="run.restore")):
            checkpoint.refuse_unshared_folder(self.folder, ranks)

    def steps(self, loader: Any, *, name: str = "", save_every: int = 0) -> Steps:
        """Iterate once over `loader`; yields the number of each step, from 1, and its batch.

        After a restore, the first call goes on where the checkpoint was taken. After the body of a step, the
        ranks save if it is time, and stop if any of them was asked to: then the state is saved and the
        program ends, with nothing behind the loop but ``finally``. While gradients wait for an optimizer
        that is tracked, both wait for it. ``len()`` of the result is the number of steps that are left.

        Parameters
        ----------
        name : of this loop, where an epoch has several; each epoch has the same ones, in the same order.
            A resume passes over those that were done.
        save_every : steps between two checkpoints; 0: save only at a stop and at the end of the run.

        Raises
        ------
        UsageError : the loader cannot resume, the ranks have loaders of different lengths, another loop comes
            now, or a pass was left by a ``break``.
        CheckFailed : the ranks have taken different numbers of steps.
        """
        refuse_without_position(loader)
        if has_state(loader) and not any(value is loader for value in self._tracked.objects.values()):
            raise UsageError(
                f"the state of this {type(loader).__name__} is not tracked",
                where="run.steps",
                hint="run.track(loader=loader, ...)",
            )
        return Steps(self, loader, name, save_every, line=line_of(sys._getframe(1)))

    def _steps(self, loader: Any, name: str, save_every: int, line: str) -> Iterator[tuple[int, Any]]:
        ranks, agreement = self._connect()
        position = self._position
        if self._is_started:  # as at the end of the run, where another rank may be
            agreement.meet(position.step, "run.steps")
        self._refuse_unlike_passes(loader, name, save_every, ranks)
        if not position.should_begin(name):
            return
        if not any(position.loops):
            position.refuse_second_loop(loader, line, is_next_epoch=self._has_read_epoch)
        self._has_read_epoch = False
        self._warn_of_lazy_sampler(loader)
        if self._should_save and self._is_due(save_every):
            self._save(at_start=True)
        if self._restored is not None and position.repeats:
            # What the program has done in this epoch was done before the checkpoint already.
            self._tracked.load(self._restored, self._restored.rank_value()["objects"])
        elif self._restored_digests:
            self._refuse_changes(ranks)
        self._restored_digests = {}
        try:
            batches = position.open(loader, name)
            self._loader = loader if has_state(loader) else None
            if self._loader is not None:
                self._loader_start = pickle.dumps(loader.state_dict())
            self._start_stepping(save_every)
            for batch in batches:
                self._refuse_step_after_break()
                self._restored, self._is_in_step = None, True
                self._begin_step()
                self._gradients.begin_step()
                yield position.step + 1, batch
                self._end_step()
                if self._is_due(save_every):
                    self._save()
            agreement.meet(position.step, PASS_END)
            if self.stopping and not has_state(loader) and not self._must_wait():
                self._save()  # else in the next pass: the state of a loader could not end this one again
            position.close()
        except GeneratorExit:
            self._end_step()
            position.was_left = True
            raise
        finally:
            position.is_open = False

    def _warn_of_lazy_sampler(self, loader: Any) -> None:
        sampler = lazy_sampler(loader)
        if sampler and not self._has_warned_of_sampler:
            self._has_warned_of_sampler = True
            self._report(
                f"warning: the sampler {sampler} has neither set_epoch nor a torch.Generator: if it draws "
                "random numbers while a pass goes on, a resumed pass gets other samples"
            )

    def _refuse_unlike_passes(self, loader: Any, name: str, save_every: int, ranks: Ranks) -> None:
        """Raise UsageError, on every rank, if the ranks begin different passes."""
        loop = f"loop {name}, " if name else ""
        passes = ranks.gather(
            f"{loop}{loader_length(loader)} batches after step {self._position.step}, "
            f"save_every={save_every}, tracking {', '.join(sorted(self._tracked.objects))}",
            call="run.steps",
        )
        if len(set(passes)) > 1:
            raise UsageError(
                f"the ranks begin different passes: {ranks_by_value(passes)}",
                where="run.steps",
                hint="all ranks must do the same; DistributedSampler gives them equal loaders",
            )

    def _refuse_changes(self, ranks: Ranks) -> None:
        """Raise UsageError, on every rank, if tracked state has changed since a restore within this pass.

        To load it again would not be enough: the program may have put it into variables of its own.
        """
        digests, restored = self._tracked.digests(), self._restored_digests
        changes = [name for name, digest in digests.items() if digest != restored[name]]
        names = sorted({name for row in ranks.gather(changes, call="run.steps") for name in row})
        if names:
            raise UsageError(
                f"{first_names(names)} changed between run.restore and run.steps, where a pass goes on after "
                f"{self._position.batch} batches: without a stop, this change comes only before the pass",
                where="run.steps",
                hint="make the change before run.restore, or inside the loop, in the first step of a pass",
            )

    def _start_stepping(self, save_every: int) -> None:
        if self._keep and not self._is_started:
            refuse_untracked_schedulers(self._tracked.objects)
        if not self._has_read_position:
            raise UsageError(
                f"the checkpoint has {self._position.epoch} finished epochs, and the program never read "
                "run.epoch: it would begin another one",
                where="run.steps",
                hint="for epoch in range(run.epoch, EPOCHS), also where there is one epoch",
            )
        self._is_started = True
        self._start_clock(self._max_interval or save_every or MAX_INTERVAL)

    def _refuse_step_after_break(self) -> None:
        """Raise UsageError for the first step after a run that ended by a ``break``, unless it was asked for.

        A program that compares the number of steps only at the end of its body would train one more.
        """
        if self._restored is None or self._has_read_step or not self._restored.run.get("was_left"):
            return
        raise UsageError(
            f"this run ended by a break after step {self._position.step}, and the program never read "
            "run.step: it would train one more",
            where="run.steps",
            hint="while run.step < STEPS: around the loop, or if run.step >= STEPS: before it",
        )

    def _start_clock(self, max_interval: int | None = None) -> None:
        """Start the clock before the first step of a loop, or again after a save or a pause."""
        self._connect().agreement.start(self._position.step, max_interval)
        self._pulse.done(self._position.step)

    def _begin_step(self) -> None:
        """Note that this rank has its batch of the next step."""
        self._pulse.begins(self._position.step + 1)
        self._progress.trains()

    def _end_step(self) -> None:
        if self._is_in_step:
            self._is_in_step = False
            self._count()

    def _count(self) -> None:
        """Note that this rank is done with its step."""
        self._position.count()
        self._pulse.done(self._position.step)
        self._progress.moved()

    def _is_due(self, save_every: int) -> bool:
        """Look if it is time; return whether all ranks save now, with all numbers of the steps before."""
        step, agreement = self._position.step, self._connect().agreement
        agreement.after(step)
        is_due = self._keep and save_every and step // save_every > self._saved_step // save_every
        if not (is_due or agreement.stop or self._should_save) or self._must_wait():
            return False
        agreement.meet(step, "run.save")
        self._saved_step = step
        return True

    def _must_wait(self) -> bool:
        """Return whether no checkpoint can be taken now on a rank; a collective call.

        Gradients wait for their optimizer, or a pass is at the end of a loader that could not go on from it.
        """
        waits = self._gradients.are_pending()
        if self._position.is_open and self._loader is not None:
            waits = waits or has_unclear_state(self._loader)
        return any(self._connect().ranks.gather(waits, call=STEP_END))

    def log(self, **numbers: Any) -> None:
        """Note numbers of this step, such as the loss; no call waits for a device or another rank.

        Their means over steps and ranks go to the terminal and to ``metrics.jsonl`` in the run's folder.
        Every rank logs the same names, or one rank alone logs.
        """
        self._log.add(numbers)

    def add_up(self, numbers: AddedNumbers, *, every: int) -> None:
        """Add up `numbers` over all ranks in place of what `log` gets; a collective call.

        What their `arrived` raises ends the run on all ranks alike, and nothing is saved.

        Parameters
        ----------
        every : most steps between two exchanges, which come at its multiples and at those of a divisor.
        """
        self._connect().agreement.numbers, self._max_interval = numbers, every

    def lives(self) -> None:
        """Tell the watchdog that this rank is busy between two steps, for example in an evaluation."""
        self._pulse.lives()

    def begins(self) -> None:
        """Tell the watchdog that this rank has the next batch; optional in a loop with `due`."""
        if not self._is_started:
            self._start_stepping(0)
        self._begin_step()

    def looks(self) -> bool:
        """Return whether the numbers of the step that begins are sent at its end: costly ones pay off."""
        return self._connect().agreement.looks(self._position.step + 1)

    def due(self, *, save_every: int = 0) -> bool:
        """End a step of a loop that is not over `steps`, such as one of a library; a collective call.

        Returns True if the loop has to call `save` now.
        """
        if not self._is_started:
            self._start_stepping(save_every)
        self._count()
        self._restored = None
        is_due = self._is_due(save_every)
        self._gradients.begin_step()
        return is_due

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Do something between two steps that is no training, such as an evaluation; a collective call.

        All numbers of the steps before have arrived, the time in it counts for no step, and the training
        does not see the random numbers that it draws.
        """
        self._connect().agreement.meet(self._position.step, "run.pause")
        state = random_state.capture()
        yield
        random_state.restore(state)
        self._start_clock()

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
        if self._gradients.has_stepped and not self._position.loops:
            raise UsageError(
                "run.save comes after an optimizer.step() that the run has not counted",
                where="run.save",
                hint="call run.due() at the end of each step and run.save() after it, or loop over run.steps",
            )
        if self._position.repeats:  # the checkpoint holds this already
            return
        if self._is_in_step or self._position.loops or self._must_wait():
            self._should_save = True
        else:
            self._save()

    def _save(self, *, at_start: bool = False) -> None:
        self._write(at_start=at_start)
        if self.stopping:
            self._leave()
        self._saved_step, self._should_save = self._position.step, False
        self._start_clock()

    def _write(self, *, at_start: bool = False) -> None:
        """Write a checkpoint in the background; `at_start`: a pass of `steps` begins now."""
        if not self._keep:
            return
        if not self._tracked.objects:
            raise UsageError("nothing is tracked", hint="run.track(model=model, optimizer=optimizer)")
        ranks = self._connect().ranks
        if not self._may_write:
            self.refuse_older()
            self._refuse_unshared_folder(ranks)
            self._may_write = True
        self._refuse_static_loader()
        refuse_untracked_schedulers(self._tracked.objects)
        with self._progress.saving():
            snapshot = self._tracked.snapshot(ranks, "run.save")
            self._saved_values = self._position.values(at_start=at_start)
            index = pickle.dumps((self._saved_values, snapshot.trees))
            rank_value = {"random": self._position.rank_values(), "objects": snapshot.rank_values}
            writer, step = self._open_writer(), self._position.step
            writer.save(step, index, snapshot.tensors, pickle.dumps(rank_value))

    def _refuse_static_loader(self) -> None:
        """Raise UsageError if the state of a loader has not changed in its pass: it has no position."""
        if self._loader is None or self._loader_start is None or not self._position.is_open:
            return
        start, self._loader_start = self._loader_start, None
        if pickle.dumps(self._loader.state_dict()) == start:
            raise UsageError(
                f"the state of this {type(self._loader).__name__} is the same as at the start of the pass: a "
                "resume would start it over",
                where="run.steps",
                hint="give a loader whose state_dict has its position, as torchdata's StatefulDataLoader",
            )

    def _open_writer(self) -> CheckpointWriter:
        if self._writer is None:
            ranks = self._connect().ranks
            self._writer = CheckpointWriter(self.folder, self._keep, ranks, self._say, self._skipped)
        return self._writer

    def refuse_older(self) -> None:
        """Insist on a new run, in place of `restore`; a collective call.

        Raises
        ------
        UsageError : the folder holds checkpoints.
        """
        ranks, _ = self._connect()
        has_older = bool(self._keep and not self._is_new and disk.checkpoints_at(self.folder))
        if any(ranks.gather(has_older, call="run.save")):
            raise UsageError(
                "this run would replace the checkpoints of another run",
                where=str(self.folder),
                hint="resume it (run.restore(), --resume auto), or name another folder",
            )

    def wait(self) -> CheckpointWriter:
        """Wait until the last checkpoint is whole; the result has its step. A collective call."""
        writer = self._open_writer()
        with self._progress.saving():
            writer.close()
        return writer

    def _end(self) -> None:
        """Wait for the last numbers of ranks that may have taken different numbers of steps."""
        self._connect().agreement.meet(self._position.step, "the end of the run")
        self._log.write(self._position.step)

    def _leave(self) -> None:
        """Raise SystemExit once the saved state is whole. Whatever destructors do then, its code stays."""
        self._end()
        step, saved_step = self._position.step, self.wait().saved_step
        state = f"the state of step {saved_step} is saved" if saved_step >= 0 else "this start saved no state"
        self._report(f"stopped after step {step}: {self.stopping}{f'; {state}' if self._keep else ''}")
        code = EXIT_NO
        if self._keep and saved_step == step:
            ranks = self._connect().ranks
            code = stop_requests.report_saved(
                self.stopping, step, ranks, self.folder, self._env, self._report
            )
        _EXIT_CODES.append(code)
        raise SystemExit(code)

    def _finish(self, ranks: Ranks) -> None:
        """Save the last state of a run that is done.

        Raises
        ------
        NotSaved : it could not be written.
        """
        has_moved = bool(self._saved_values != self._position.values() and self._tracked.objects)
        if ranks.world_size > 1 and not dist.is_initialized():
            if has_moved:
                self._report(
                    "warning: the last state is not saved: there is no process group at the end of `with`"
                )
            return
        self._end()
        ranks.gather(None, call="the end of the run")
        self._connect().agreement.stop = ""  # all is done
        if has_moved:
            self._write()
        if self._writer is not None and self.wait().saved_step != self._position.step:
            raise NotSaved(f"the state of step {self._position.step} is not saved", where=str(self.folder))

    def _close_groups(self) -> None:
        with contextlib.suppress(ValueError, AssertionError):  # the program has destroyed all groups
            if self._writer is not None:
                self._writer.close_groups()
            if self._own_group is not None:
                dist.destroy_process_group(self._own_group)

    def _report(self, text: str) -> None:
        if self._rank == 0:
            self._say(text)


class Steps:
    """One pass over a loader, as `Run.steps` returns it."""

    def __init__(self, run: Run, loader: Any, name: str, save_every: int, *, line: str) -> None:
        self._run, self._loader, self._name = run, loader, name
        self._save_every, self._line = save_every, line

    def __len__(self) -> int:
        return self._run._position.remaining(self._name, len(self._loader))

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return self._run._steps(self._loader, self._name, self._save_every, self._line)


_EXIT_CODES: list[int] = []
"""Exit codes of runs that were stopped."""


def _end_in_order() -> None:
    """Free the process group before the interpreter is finalized.

    gloo's threads release their last works late. A thread that asks a finalizing interpreter for its lock
    ends the process by SIGABRT, also after a correct run of a bare DDP loop.
    """
    gc.collect()
    if _EXIT_CODES:  # a model in a global variable still keeps its group
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_EXIT_CODES[-1])


atexit.register(_end_in_order)

"""The checkpoints of a run: which one it resumes from, when it writes them, and how it ends."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from imgkit_entrypoints import files
from imgkit_entrypoints.errors import EXIT_NO, CheckFailed, UsageError
from imgkit_entrypoints.launch.progress import ProgressNotes
from imgkit_entrypoints.run import checkpoint, disk, stop_requests
from imgkit_entrypoints.run.checkpoint import Checkpoint, CheckpointWriter
from imgkit_entrypoints.run.connection import RunConnection, end_program
from imgkit_entrypoints.run.lr_schedulers import SchedulerSearch
from imgkit_entrypoints.run.position import DataPosition
from imgkit_entrypoints.run.ranks import list_first_names
from imgkit_entrypoints.run.tracked import TrackedObjects


class NotSaved(CheckFailed):
    """The last state of a run that is done could not be written; all ranks raise it."""


class RunCheckpoints:
    """The state of a run, and its checkpoints in the run's folder.

    Parameters
    ----------
    keep : number of checkpoints that stay; 0: none is written or found.
    ignore_unreadable : whether the run starts anew if no checkpoint in its folder can be read.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        connection: RunConnection,
        position: DataPosition,
        progress: ProgressNotes,
        *,
        ignore_unreadable: bool,
    ) -> None:
        self._folder = folder
        self.keep = keep
        self._connection = connection
        self.position = position
        self.tracked = TrackedObjects()
        self.scheduler_search = SchedulerSearch()
        self._progress = progress
        self._ignore_unreadable = ignore_unreadable
        self._writer: CheckpointWriter | None = None
        self.restored: Checkpoint | None = None
        """The checkpoint from which the run goes on, until its first step."""
        # Digests of the tracked objects after a restore within a pass, until that pass begins.
        self._restored_digests: dict[str, str] = {}
        # The position in the last checkpoint.
        self._saved_values = self.position.values()
        self.saved_step = 0
        """Step of the last save, or of the checkpoint from which the run goes on."""
        # Checkpoints in the run's folder that could not be read.
        self._skipped: Collection[Path] = ()
        # Whether `find` has seen that the folder has no checkpoint to go on from.
        self._is_new = False
        self.may_write = False
        """Whether the program has restored a checkpoint, or the folder has none."""

    def find(self, path: Path | None) -> Checkpoint | None:
        """Find the newest valid checkpoint at `path`, or in the run's folder; a collective call.

        Newer ones that cannot be used are reported and skipped. None means that there is no checkpoint.

        Raises
        ------
        UsageError : there are checkpoints, and none of them can be read.
        """
        if path is None and not self.keep:
            return None
        is_own_folder = path is None
        folder = path or self._folder
        newest, problems = checkpoint.find_newest(
            folder, self._connection.ranks, trusts_folder=not is_own_folder
        )
        own_checkpoints = [skipped for skipped in problems if not files.foreign_owner(skipped, folder)]
        if newest is None and problems:
            # A run that starts anew renames unreadable checkpoints, which fails for those of another user.
            can_set_aside = is_own_folder and len(own_checkpoints) == len(problems)
            self._refuse_unreadable(folder, problems, can_set_aside=can_set_aside)
        for problem in problems.values():
            self._connection.report(f"checkpoint skipped: {problem}")
        if is_own_folder:
            self._skipped = own_checkpoints
            self._is_new = newest is None
        return newest

    def _refuse_unreadable(self, folder: Path, problems: Mapping[Path, str], *, can_set_aside: bool) -> None:
        """Raise UsageError, on every rank, for checkpoints none of which can be read.

        Without it, a long run could start over without notice. It is not raised if the user has asked for
        that (`ignore_unreadable`) and the checkpoints can be renamed.

        Parameters
        ----------
        problems : why each checkpoint cannot be read.
        can_set_aside : whether all of them can be renamed, as a new start has to do. Rank 0 decides.
        """
        options = can_set_aside, self._ignore_unreadable
        may_start_anew, starts_anew = self._connection.ranks.broadcast(options)
        if may_start_anew and starts_anew:
            return
        hint = "name another folder"
        if may_start_anew:
            hint += ", or start anew: Run.start(ignore_checkpoints=True), dist-train --ignore-checkpoints"
        raise UsageError(
            f"none of the checkpoints can be read: {list_first_names([*problems.values()])}",
            where=str(folder),
            hint=hint,
        )

    def restore(self, source: Checkpoint | None) -> bool:
        """Load `source`, or the newest valid checkpoint; return False if there is none. A collective call.

        Raises
        ------
        UsageError : the checkpoint holds other objects, or cannot be read; a scheduler is not tracked; or the
            tracked objects could not be saved later.
        """
        self.scheduler_search.refuse_untracked(self.tracked.objects)
        self._warn_of_fresh_ddp()
        self._refuse_unshared_folder()
        newest = source or self.find(None)
        self.may_write = True
        if newest is None:
            if self.keep:  # a state that cannot be saved is refused now, and not at the first save
                self.tracked.snapshot(self._connection.ranks, "run.restore")
            return False
        self._load(newest)
        self.restored = newest
        self._saved_values = self.position.values()
        self.saved_step = self.position.step
        self._restored_digests = {}
        if self.position.batch:
            self._restored_digests = self.tracked.digests()
        if source is None:
            self._connection.report(f"resumes after step {self.position.step}: {newest.folder}")
        return True

    def _load(self, newest: Checkpoint) -> None:
        """Load the tracked objects, the position and the random numbers; a collective call.

        Raises
        ------
        UsageError : a tracked object cannot get its state.
        """
        ranks = self._connection.ranks
        rank_values = newest.read_rank_value()
        per_rank_states = rank_values["objects"]
        if per_rank_states and newest.world_size != ranks.world_size:
            raise UsageError(
                f"{', '.join(sorted(per_rank_states))} has a state for each of {newest.world_size} ranks, "
                f"but there are {ranks.world_size}",
                where=str(newest.folder),
                hint=f"start {newest.world_size} ranks, or a new run in another folder",
            )
        self.tracked.load(newest, per_rank_states)
        warning = self.position.restore(newest.position, rank_values["random"], newest.world_size, ranks)
        if warning:
            self._connection.report(warning)

    def prepare_pass(self) -> None:
        """Make sure that the first pass after a restore has the checkpoint's state; a collective call.

        Raises
        ------
        UsageError : on every rank, if tracked state has changed since a restore within this pass.
        """
        restored_digests = self._restored_digests
        self._restored_digests = {}  # only the first pass after a restore is compared
        if self.restored is not None and self.position.repeats_epoch:
            # The program has repeated work of this epoch, whose effect is in the checkpoint already.
            self.tracked.load(self.restored, self.restored.read_rank_value()["objects"])
        elif restored_digests:
            self._refuse_changes(restored_digests)

    def _warn_of_fresh_ddp(self) -> None:
        """Warn if a DDP model has had no backward pass yet, so that a resume would change its rounding.

        After its first backward pass, DDP regroups the gradients, and so adds them up in another order.
        """
        if not self.keep or self._connection.ranks.world_size <= 2:  # the sum of two has one order
            return
        if any(map(_contains_fresh_ddp, self.tracked.objects.values())):
            self._connection.report(
                "warning: a DDP model has had no backward pass: on 3 ranks or more, the first step after "
                "a resume then adds up gradients in another order. Before run.restore(): "
                "loss_of(batch).backward(); optimizer.zero_grad()"
            )

    def _refuse_unshared_folder(self) -> None:
        """Raise UsageError if ranks with sharded state do not see the same folder."""
        ranks = self._connection.ranks
        if self.keep and any(ranks.gather(self.tracked.has_shards, call="run.restore")):
            checkpoint.refuse_unshared_folder(self._folder, ranks)

    def _refuse_changes(self, restored_digests: Mapping[str, str]) -> None:
        """Raise UsageError, on every rank, if the program has changed tracked state since the restore.

        A run without a stop makes such a change before the pass, and not in the middle of it. To load the
        state again would not be enough, since the program may have copied the change elsewhere.
        """
        digests = self.tracked.digests()
        changes = [name for name, digest in digests.items() if digest != restored_digests[name]]
        changes_of_ranks = self._connection.ranks.gather(changes, call="run.steps")
        names = set[str]().union(*changes_of_ranks)
        if names:
            raise UsageError(
                f"{list_first_names(sorted(names))} changed between run.restore and run.steps, where a pass "
                f"goes on after {self.position.batch} batches: without a stop, this change comes only before "
                "the pass",
                where="run.steps",
                hint="make the change before run.restore, or inside the loop, in the first step of a pass",
            )

    def refuse_older(self) -> None:
        """Raise UsageError, on every rank, if the folder holds checkpoints; a collective call."""
        has_older = bool(self.keep and not self._is_new and disk.checkpoints_at(self._folder))
        if any(self._connection.ranks.gather(has_older, call="run.save")):
            raise UsageError(
                "this run would replace the checkpoints of another run",
                where=str(self._folder),
                hint="resume it (run.restore(), --resume auto), or name another folder",
            )

    def write(self, *, at_start: bool = False) -> None:
        """Write a checkpoint in the background; a collective call.

        Parameters
        ----------
        at_start : whether the checkpoint is taken directly before a pass of `Run.steps`.
        """
        if not self.keep:
            return
        if not self.tracked.objects:
            raise UsageError("nothing is tracked", hint="run.track(model=model, optimizer=optimizer)")
        if not self.may_write:
            self.refuse_older()
            self._refuse_unshared_folder()
            self.may_write = True
        self.position.refuse_unchanged_loader_state()
        self.scheduler_search.refuse_untracked(self.tracked.objects)
        with self._progress.time_save():
            snapshot = self.tracked.snapshot(self._connection.ranks, "run.save")
            self._saved_values = self.position.values(at_start=at_start)
            index = pickle.dumps((self._saved_values, snapshot.trees))
            rank_value = {"random": self.position.rank_values(), "objects": snapshot.rank_values}
            writer = self._open_writer()
            writer.save(self.position.step, index, snapshot.tensors, pickle.dumps(rank_value))

    def _open_writer(self) -> CheckpointWriter:
        """Return the writer of checkpoints; the first call is a collective one."""
        if self._writer is None:
            connection = self._connection
            self._writer = CheckpointWriter(
                self._folder, self.keep, connection.ranks, connection.report, self._skipped
            )
        return self._writer

    def wait(self) -> CheckpointWriter:
        """Wait until the last checkpoint is whole; a collective call."""
        writer = self._open_writer()
        with self._progress.time_save():
            writer.close()
        return writer

    def leave(self) -> NoReturn:
        """End the program after a request to stop, once the last checkpoint is completely written.

        This raises SystemExit. Its code is `EXIT_NO` unless the state of the present step is saved.
        """
        connection = self._connection
        step = self.position.step
        reason = connection.stop
        connection.wait_for_last_numbers(step)
        saved_step = self.wait().saved_step
        message = f"stopped after step {step}: {reason}"
        if self.keep and saved_step >= 0:
            message += f"; the state of step {saved_step} is saved"
        elif self.keep:
            message += "; this start saved no state"
        connection.report(message)
        code = EXIT_NO
        if self.keep and saved_step == step:
            code = stop_requests.report_saved(
                reason, step, connection.ranks, self._folder, connection.env, connection.report
            )
        end_program(code)

    def finish(self) -> None:
        """Save the last state of a run that is done, unless a checkpoint has it; a collective call.

        Raises
        ------
        NotSaved : it could not be written.
        """
        connection = self._connection
        step = self.position.step
        has_moved = bool(self.tracked.objects) and self._saved_values != self.position.values()
        if connection.ranks.world_size > 1 and not dist.is_initialized():
            if has_moved:
                connection.report(
                    "warning: the last state is not saved: there is no process group at the end of `with`"
                )
            return
        connection.wait_for_last_numbers(step)
        connection.ranks.gather(None, call="the end of the run")
        connection.agreement.stop = ""  # the run is done, so a request to stop has no effect any more
        if has_moved:
            self.write()
        if self._writer is not None and self.wait().saved_step != step:
            raise NotSaved(f"the state of step {step} is not saved", where=str(self._folder))

    def close_groups(self) -> None:
        """Free the process groups of the run."""
        with contextlib.suppress(ValueError, AssertionError):  # the program has destroyed all groups
            if self._writer is not None:
                self._writer.close_groups()
            self._connection.close_group()


def _contains_fresh_ddp(stateful: object) -> bool:
    """Return whether a tracked object is or contains a DDP model that has had no backward pass."""
    return isinstance(stateful, nn.Module) and any(map(_is_fresh_ddp, stateful.modules()))


def _is_fresh_ddp(module: nn.Module) -> bool:
    """Return whether a module is a DDP model that has had no backward pass."""
    if not isinstance(module, DistributedDataParallel) or module.find_unused_parameters:
        return False
    return not any(module.reducer.get_backward_stats())

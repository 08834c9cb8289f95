"""Restore a run from its newest checkpoint, write its checkpoints, and save the last state at its end."""

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
from imgkit_entrypoints.errors import EXIT_NO, CheckFailed, UsageError, join_names
from imgkit_entrypoints.launch.progress import ProgressNotes
from imgkit_entrypoints.run import checkpoint, disk, stop_requests
from imgkit_entrypoints.run.checkpoint import Checkpoint, CheckpointWriter
from imgkit_entrypoints.run.connection import RunConnection, end_program
from imgkit_entrypoints.run.lr_schedulers import SchedulerSearch
from imgkit_entrypoints.run.position import DataPosition
from imgkit_entrypoints.run.ranks import MAX_NAMES
from imgkit_entrypoints.run.tracked import TrackedObjects


class NotSaved(CheckFailed):
    """The last state of a finished run could not be written. All ranks raise this error."""


class RunCheckpoints:
    """The tracked state of a run, and its checkpoints in the run's folder.

    Parameters
    ----------
    keep : number of checkpoints to keep. If 0, no checkpoint is written or read.
    ignore_unreadable : whether the run starts from the beginning if none of its checkpoints can be read.
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
        self._has_written = False
        self.restored: Checkpoint | None = None
        """The checkpoint from which the run was resumed, until its first step."""
        # Digests of the tracked objects after a restore inside a pass, until that pass begins.
        self._restored_digests: dict[str, str] = {}
        # The position in the last checkpoint.
        self._saved_values = self.position.make_values()
        # Checkpoints in the run's folder that could not be read.
        self._skipped: Collection[Path] = ()
        # Whether `find` has found no usable checkpoint in the run's folder.
        self._is_new = False
        self.has_checked_folder = False
        """Whether the program has called `restore`, or the folder has no checkpoints that could be lost."""

    def find(self, path: Path | None) -> Checkpoint | None:
        """Return the newest valid checkpoint at `path` or in the run's folder, or None if there is none.

        Newer checkpoints that cannot be used are reported and skipped. This is a collective call.

        Parameters
        ----------
        path : a checkpoint, a folder of checkpoints or another run's folder. None means this run's folder.

        Raises
        ------
        UsageError : there are checkpoints, but none of them can be read.
        """
        if path is None and not self.keep:  # such a run saves nothing in its folder
            return None
        is_own_folder = path is None
        folder = path or self._folder
        # Loading a checkpoint can run code. In the run's own folder, only this user is trusted. By naming
        # another folder, the user trusts its owner, too.
        newest, problems = checkpoint.find_newest(
            folder, self._connection.ranks, trusts_folder=not is_own_folder
        )
        own_checkpoints = [skipped for skipped in problems if not files.foreign_owner(skipped, folder)]
        if newest is None and problems:
            # A run that starts from the beginning renames unreadable checkpoints. It cannot rename
            # checkpoints of another user.
            can_set_aside = is_own_folder and len(own_checkpoints) == len(problems)
            self._refuse_unreadable(folder, problems, can_set_aside=can_set_aside)
        for problem in problems.values():
            self._connection.report(f"checkpoint skipped: {problem}")
        if is_own_folder:
            # The first save renames the skipped checkpoints. Otherwise a resume would look at them first.
            self._skipped = own_checkpoints
            # `refuse_older` lets a new run write, although the folder has checkpoints.
            self._is_new = newest is None
        return newest

    def _refuse_unreadable(self, folder: Path, problems: Mapping[Path, str], *, can_set_aside: bool) -> None:
        """Raise UsageError on every rank because none of the checkpoints can be read.

        Without this error, a long run could start over unnoticed. The error is not raised if the user has
        requested a new start (`ignore_unreadable`) and the checkpoints can be renamed.

        Parameters
        ----------
        problems : why each checkpoint cannot be read.
        can_set_aside : whether all checkpoints can be renamed, which a new start requires. The value of rank
            0 decides.
        """
        # Rank 0 answers for all ranks, so that all of them raise the error or none.
        own_answers = can_set_aside, self._ignore_unreadable
        can_start_anew, is_new_start_requested = self._connection.ranks.broadcast(own_answers)
        if can_start_anew and is_new_start_requested:
            return
        hint = "name another folder"
        if can_start_anew:
            hint += ", or start anew: Run.start(ignore_checkpoints=True), dist-train --ignore-checkpoints"
        raise UsageError(
            f"none of the checkpoints can be read: {join_names([*problems.values()], MAX_NAMES)}",
            where=str(folder),
            hint=hint,
        )

    def restore(self, source: Checkpoint | None) -> bool:
        """Load `source` or the newest valid checkpoint. Return False if there is no checkpoint.

        This is a collective call: all ranks must make it.

        Raises
        ------
        UsageError : the checkpoint contains other objects or cannot be read, a scheduler is not tracked, or
            the tracked objects could not be saved later.
        """
        self.scheduler_search.refuse_untracked(self.tracked.objects)
        self._warn_of_fresh_ddp()
        self._refuse_unshared_folder()
        loaded = source or self.find(None)
        self.has_checked_folder = True  # the program knows its checkpoints, so none is lost by mistake
        if loaded is None:
            if self.keep:  # refuse a state that cannot be saved now, and not hours later at the first save
                self.tracked.snapshot(self._connection.ranks, "run.restore")
            return False
        self._load(loaded)
        self.restored = loaded
        self._saved_values = self.position.make_values()
        # Inside a pass, `undo_or_refuse_changes` checks that the program has not changed the state.
        self._restored_digests = {}
        if self.position.batches_done > 0:
            self._restored_digests = self.tracked.digests()
        if source is None:
            self._connection.report(f"resumes after step {self.position.step}: {loaded.folder}")
        return True

    def _load(self, source: Checkpoint) -> None:
        """Load the tracked objects, the position and the random states from a checkpoint.

        This is a collective call: all ranks must make it.

        Raises
        ------
        UsageError : the state of a tracked object cannot be loaded.
        """
        ranks = self._connection.ranks
        rank_values = source.read_rank_value()
        per_rank_states = rank_values["objects"]
        if per_rank_states and source.world_size != ranks.world_size:
            raise UsageError(
                f"{', '.join(sorted(per_rank_states))} has a state for each of {source.world_size} ranks, "
                f"but there are {ranks.world_size}",
                where=str(source.folder),
                hint=f"start {source.world_size} ranks, or a new run in another folder",
            )
        # Load the objects first: if one of them refuses its state, the position remains unchanged.
        self.tracked.load(source, per_rank_states)
        warning = self.position.restore(source.position, rank_values["random"], source.world_size, ranks)
        if warning:
            self._connection.report(warning)

    def undo_or_refuse_changes(self) -> None:
        """Make sure that the first pass after a restore begins with the state of the checkpoint.

        This is a collective call: all ranks must make it.

        Raises
        ------
        UsageError : (on every rank) the restored checkpoint was taken inside this pass, and the program has
            changed the tracked state since the restore.
        """
        restored_digests = self._restored_digests
        self._restored_digests = {}  # only the first pass after a restore is compared
        if self.restored is not None and self.position.repeats_epoch:
            # The checkpoint is from between two passes. Since the restore, the program has repeated work of
            # this epoch, such as a step of a scheduler. The checkpoint contains the effect, so load it again.
            rank_values = self.restored.read_rank_value()
            self.tracked.load(self.restored, rank_values["objects"])  # the states that differ between ranks
        elif restored_digests:
            # The checkpoint is from the middle of a pass, where the program makes no changes of this kind.
            self._refuse_changes(restored_digests)

    def _warn_of_fresh_ddp(self) -> None:
        """Warn if a DDP model has had no backward pass yet, because a resume would then round differently.

        After its first backward pass, DDP groups the gradients in another way, and so adds them up in another
        order.
        """
        # With two ranks, the order does not matter, because the sum of two numbers has only one order.
        if not self.keep or self._connection.ranks.world_size <= 2:
            return
        if any(map(_contains_fresh_ddp, self.tracked.objects.values())):
            self._connection.report(
                "warning: a DDP model has had no backward pass: on 3 ranks or more, the first step after "
                "a resume then adds up gradients in another order. Before run.restore(): "
                "loss_of(batch).backward(); optimizer.zero_grad()"
            )

    def _refuse_unshared_folder(self) -> None:
        """Raise UsageError if a state is sharded and the ranks do not see the same folder."""
        ranks = self._connection.ranks
        if self.keep and any(ranks.gather(self.tracked.has_shards, call="run.restore")):
            checkpoint.refuse_unshared_folder(self._folder, ranks)

    def _refuse_changes(self, restored_digests: Mapping[str, str]) -> None:
        """Raise UsageError on every rank if the program has changed the tracked state since the restore.

        The run resumes in the middle of a pass. In an uninterrupted run, the program makes such a change only
        before the pass. Loading the state again is not enough, because the program may have copied the change
        elsewhere.

        Parameters
        ----------
        restored_digests : digests of the tracked objects directly after the restore.
        """
        digests = self.tracked.digests()
        changes = [name for name, digest in digests.items() if digest != restored_digests[name]]
        # Every rank gets the changes of all ranks, so that all raise the same error.
        changes_of_ranks = self._connection.ranks.gather(changes, call="run.steps")
        names = set[str]().union(*changes_of_ranks)
        if names:
            raise UsageError(
                f"{join_names(sorted(names), MAX_NAMES)} changed between run.restore and run.steps, where a "
                f"pass goes on after {self.position.batches_done} batches: without a stop, this change comes "
                "only before the pass",
                where="run.steps",
                hint="make the change before run.restore, or inside the loop, in the first step of a pass",
            )

    def refuse_older(self) -> None:
        """Raise UsageError on every rank if the run's folder contains checkpoints. A collective call."""
        has_older = bool(self.keep and not self._is_new and disk.checkpoints_at(self._folder))
        if any(self._connection.ranks.gather(has_older, call="run.save")):
            raise UsageError(
                "this run would replace the checkpoints of another run",
                where=str(self._folder),
                hint="resume it (run.restore(), --resume auto), or name another folder",
            )

    def write(self, *, at_start: bool = False) -> None:
        """Write a checkpoint in the background. This is a collective call: all ranks must make it.

        Parameters
        ----------
        at_start : whether the checkpoint is taken directly before a pass of `Run.steps`, and so contains what
            the program does before that pass.

        Raises
        ------
        UsageError : nothing is tracked, the state cannot be saved, or the folder contains checkpoints of
            another run.
        """
        if not self.keep:
            return
        if not self.tracked.objects:
            raise UsageError("nothing is tracked", hint="run.track(model=model, optimizer=optimizer)")
        if not self.has_checked_folder:  # the program has not called `restore`, which checks it
            self.refuse_older()
            self._refuse_unshared_folder()
            self.has_checked_folder = True
        # Refuse a state that a resume could not continue, before anything is written.
        self.position.refuse_unchanged_loader_state()
        self.scheduler_search.refuse_untracked(self.tracked.objects)
        with self._progress.time_save():
            snapshot = self.tracked.snapshot(self._connection.ranks, "run.save")
            self._saved_values = self.position.make_values(at_start=at_start)
            index = pickle.dumps((self._saved_values, snapshot.trees))
            rank_value = {"random": self.position.make_rank_values(), "objects": snapshot.rank_values}
            writer = self._open_writer()
            writer.save(self.position.step, index, snapshot.tensors, pickle.dumps(rank_value))
        self._has_written = True

    def _open_writer(self) -> CheckpointWriter:
        """Return the writer of checkpoints. The first call is a collective call."""
        # Not in `__init__`, because the writer needs the ranks, which are connected later.
        if self._writer is None:
            connection = self._connection
            self._writer = CheckpointWriter(
                self._folder, self.keep, connection.ranks, connection.report, self._skipped
            )
        return self._writer

    def wait(self) -> CheckpointWriter:
        """Wait until the last checkpoint is completely written.

        This is a collective call: all ranks must make it.
        """
        writer = self._open_writer()
        with self._progress.time_save():
            writer.close()
        return writer

    def leave(self) -> NoReturn:
        """End the program after a request to stop, when the last checkpoint is completely written.

        This raises SystemExit. If the state of the current step is not saved, the exit code is that of a
        failure.
        """
        connection = self._connection
        step = self.position.step
        reason = connection.stop
        connection.wait_for_last_numbers(step)  # the logged numbers of the last steps
        saved_step = self.wait().saved_step  # -1: none
        connection.report(f"stopped after step {step}: {reason}{self._describe_saved_state(saved_step)}")
        exit_code = EXIT_NO
        if self.keep and saved_step == step:
            exit_code = stop_requests.report_saved(
                reason, step, connection.ranks, self._folder, connection.env, connection.report
            )
        end_program(exit_code)

    def _describe_saved_state(self, saved_step: int) -> str:
        """Return the end of the message about a stop, which names the step of the newest checkpoint.

        `saved_step` is -1 if this start has saved no state. If the run saves nothing, the text is empty.
        """
        if not self.keep:
            return ""
        if saved_step < 0:
            return "; this start saved no state"
        return f"; the state of step {saved_step} is saved"

    def finish(self) -> None:
        """Save the last state of a finished run, unless a checkpoint contains it.

        This is a collective call: all ranks must make it.

        If the program has already closed its process group, nothing is saved. A warning tells the user if a
        state is lost.

        Raises
        ------
        NotSaved : the state could not be written.
        """
        connection = self._connection
        step = self.position.step
        # The last checkpoint has another position than the run has now.
        has_unsaved_state = bool(self.tracked.objects) and self._saved_values != self.position.make_values()
        if connection.ranks.world_size > 1 and not dist.is_initialized():
            if has_unsaved_state:
                connection.report(
                    "warning: the last state is not saved: there is no process group at the end of `with`"
                )
            return
        connection.wait_for_last_numbers(step)
        # Wait for all ranks. A rank in another call, such as `run.steps`, gets an error.
        connection.ranks.gather(None, call="the end of the run")
        connection.agreement.stop = ""  # the run is finished, so a request to stop no longer has an effect
        if has_unsaved_state:
            self.write()
        # If this start has written checkpoints, the last one is of this step. It may have failed, because the
        # thread that writes it reports its errors only to `wait`.
        if self._has_written and self.wait().saved_step != step:
            raise NotSaved(f"the state of step {step} is not saved", where=str(self._folder))

    def close_groups(self) -> None:
        """Destroy the process groups that the run has opened."""
        # torch raises these errors if the program has already destroyed all groups.
        with contextlib.suppress(ValueError, AssertionError):
            if self._writer is not None:
                self._writer.close_groups()
            self._connection.close_group()


def _contains_fresh_ddp(stateful: object) -> bool:
    """Return whether a tracked object is or contains a DDP model that has had no backward pass."""
    return isinstance(stateful, nn.Module) and any(map(_is_fresh_ddp, stateful.modules()))


def _is_fresh_ddp(module: nn.Module) -> bool:
    """Return whether a module is a DDP model that has had no backward pass."""
    # With `find_unused_parameters`, DDP does not regroup the gradients.
    if not isinstance(module, DistributedDataParallel) or module.find_unused_parameters:
        return False
    return not any(module.reducer.get_backward_stats())

"""What a run keeps in snapshots: the state of its objects, its place and its random numbers."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.launch.progress import ProgressNotes
from imgkit_entrypoints.run import place, resumable, snapshot_files, snapshots
from imgkit_entrypoints.run.place import LivePlace, PassOptions, RunPosition
from imgkit_entrypoints.run.ranks import Ranks
from imgkit_entrypoints.run.snapshots import FoundSnapshot, SnapshotWriter
from imgkit_entrypoints.run.tracked import Tracked


class KeptState:
    """The state of a run, and its snapshots. Collective calls take the ranks.

    Parameters
    ----------
    folder : the run's folder; None: nothing is written.
    keep : number of snapshots that stay.
    notes : get the time that saving takes.
    """

    def __init__(
        self, folder: Path | None, keep: int, notes: ProgressNotes, say: Callable[[str], None]
    ) -> None:
        self.folder, self._keep, self.notes, self._say = folder, keep, notes, say
        self.tracked, self.place = Tracked(), LivePlace()
        self.may_write = self.has_written = False
        self._saved = RunPosition()
        self._restored: FoundSnapshot | None = None
        self._warned: set[str] = set()
        self._loader: Callable[[], Any] = lambda: None
        """Returns the loader of the latest pass, if the program still has it."""
        self._writer: SnapshotWriter | None = None

    @property
    def has_moved(self) -> bool:
        """Whether there is a state that no snapshot has."""
        return self._saved != self.place.position() and len(self.tracked) > 0

    def find(self, folder: Path, here: Ranks) -> FoundSnapshot | None:
        """Find the newest whole snapshot in `folder`, which may also be a snapshot."""
        return snapshots.newest(folder, here, self._say if here.rank == 0 else lambda _: None)

    def restore(self, found: FoundSnapshot, here: Ranks) -> None:
        """Take over a snapshot.

        Raises
        ------
        UsageError : it holds other objects, or cannot be read.
        """
        position = place.position_in(found)
        self.tracked.load(self.tracked.read(found, here), str(found.where))
        self.place.take_over(position, found, here, self._say)
        self._saved, self._restored = self.place.position(), found

    def next_pass(
        self, loader: Any, name: str, save_every: int, accumulate: int, here: Ranks
    ) -> PassOptions | None:
        """Compare the options of a pass, and return those of rank 0; None: it was done before the snapshot.

        Raises
        ------
        UsageError : the loader cannot resume, the ranks have different loaders or options, or another loop
            comes now.
        """
        resumable.refuse_without_position(loader)
        if resumable.has_state(loader) and not self.tracked.has(loader):
            raise UsageError(
                f"run.steps: the state of this {type(loader).__name__} is not tracked",
                hint="run.track(loader=loader, ...)",
            )
        own = PassOptions(
            name=name,
            batches=resumable.length(loader),
            samples=resumable.samples(loader),
            save_every=save_every,
            accumulate=accumulate,
            step=self.place.step,
            tracked=", ".join(self.tracked.names()),
        )
        every = here.gather(own, PassOptions, call="run.steps")
        place.refuse_different(every)
        return every[0] if self.place.is_next(name) else None

    def open_pass(self, loader: Any, options: PassOptions, here: Ranks) -> Iterator[Any]:
        """Iterate over `loader` from its beginning, or from where the snapshot was taken.

        Raises
        ------
        UsageError : the snapshot was taken in a pass over another loader.
        """
        if self._restored and self.place.repeats:
            # What the program has done in this epoch was done before the snapshot already.
            self.tracked.load(self.tracked.read(self._restored, here), str(self._restored.where))
        self._restored = None
        if here.rank == 0:
            self._warn(loader, options.name)
        return self.place.open(loader, options)

    def _warn(self, loader: Any, name: str) -> None:
        """Warn, once each, of what may differ after a resume."""
        warnings = [
            f"the loader's {one} draws random numbers that no snapshot keeps: after a resume within a pass "
            "they are others; docs/howto/own-loop.md names what else the run cannot see"
            for one in resumable.unseen_generators(loader)
        ]
        if self.place.is_between_passes and resumable.is_stateful_loader(loader):
            warnings.append(
                f"after a snapshot between two passes, {type(loader).__name__} draws other random numbers "
                "than without the stop"
            )
        before = self._loader()
        if not name and before is not None and before is not loader:
            warnings.append(
                "a pass over another loader than the one before: where an epoch has both, name each, "
                "run.steps(loader, name=...); where one takes the place of the other, by the same name"
            )
        with contextlib.suppress(TypeError):  # a list has no weak references
            self._loader = weakref.ref(loader)
        for text in warnings:
            if text not in self._warned:
                self._say(f"warning: {text}")
        self._warned.update(warnings)

    def refuse_older(self, here: Ranks) -> None:
        """Raise UsageError, on every rank, if the folder holds snapshots on any node."""
        older = self.folder and snapshot_files.newest_first(self.folder / snapshots.FOLDER)
        if any(here.gather(bool(older), bool, call="run.save")):
            raise UsageError(
                "this run would replace the snapshots of another run",
                where=str(self.folder),
                hint="call run.restore() after run.track(), or name another folder",
            )

    def save(self, here: Ranks, *, at_start: bool = False) -> None:
        """Write a snapshot in the background; `at_start`: a pass of `Run.steps` begins now.

        Raises
        ------
        UsageError : nothing is tracked, or the folder holds snapshots that nobody has restored.
        """
        if self.folder is None:
            return
        if not len(self.tracked):
            raise UsageError("nothing is tracked", hint="run.track(model=model, optimizer=optimizer)")
        if not self.may_write:
            self.refuse_older(here)
            self.may_write = True
        step = self.place.step
        with self.notes.saving(step):
            parts = self.tracked.kept(here)
            self._saved, self.has_written = self.place.position(at_start=at_start), True
            self.writer(here).save(
                step,
                tensors=lambda: parts,
                drawn=self.place.drawn(),
                about={"run": dataclasses.asdict(self._saved)},
            )

    def writer(self, here: Ranks) -> SnapshotWriter:
        """What writes the snapshots; made at the first call, which may come before any `save`."""
        if self._writer is None:
            self._writer = SnapshotWriter(
                self.folder or Path(), self._keep, here, self._say, self.notes.keeps
            )
        return self._writer

    def wait(self, here: Ranks) -> SnapshotWriter:
        """Wait until the last snapshot is whole."""
        writer = self.writer(here)
        with self.notes.saving():
            writer.close()
        return writer

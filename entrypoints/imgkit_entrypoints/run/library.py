"""Checkpoints of another library, such as accelerate, which the run's own checkpoints name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from imgkit_entrypoints.run.run import Run

# Folders in turn: for the newest checkpoint, for the one before, which the run may still name, and for the
# one that is being written.
_SLOTS = 3


class LibraryCheckpoint:
    """The newest checkpoint of another library that all ranks have finished.

    The library saves to `next_path()`, and `run.save()` after it makes this checkpoint count. If the program
    is killed before, the next start resumes from the one that counted until then. `run.restore` sets `path`.
    """

    def __init__(self, run: Run) -> None:
        self.path: Path | None = None
        """Its path in the run's folder, or None if there is no checkpoint."""
        self.step = 0
        """The run's steps when it was taken."""
        self._run = run
        self._count = 0
        run.track(library_checkpoint=self)

    def next_path(self, path: str | Path | None = None) -> Path:
        """Return the path for a checkpoint of this step, the same on all ranks.

        Three folders take turns, so that a save that is interrupted leaves the one before it complete.

        Parameters
        ----------
        path : in the run's folder, for a library that names and removes its checkpoints itself.
        """
        self._count += 1
        self.step = self._run.step
        self.path = Path(path or self._run.folder / f"library-checkpoint-{self._count % _SLOTS}")
        return self.path

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the run saves."""
        path = self.path and os.path.relpath(self.path, self._run.folder)
        return {"path": path, "step": self.step, "count": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned.

        Raises
        ------
        ValueError : the checkpoint is no longer there, or lies outside of the run's folder.
        """
        self.path = None
        self.step = int(state["step"])
        self._count = int(state["count"])
        path = state["path"]
        if path is None:
            return
        self.path = self._run.folder / path
        # A checkpoint is only as trustworthy as the run's folder.
        if not self.path.resolve().is_relative_to(self._run.folder.resolve()):
            raise ValueError(f"{path} is outside of {self._run.folder}")
        if not self.path.exists():
            raise ValueError(f"there is no {self.path}")

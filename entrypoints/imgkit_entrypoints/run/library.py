"""Use checkpoints of another library, such as accelerate. The run's own checkpoints store their paths."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from imgkit_entrypoints.run.run import Run

# Number of folders for checkpoints: one for the newest checkpoint, one for the previous checkpoint, to which
# the run may still refer, and one for the checkpoint that is being written.
_FOLDER_COUNT = 3


class LibraryCheckpoint:
    """The newest checkpoint of another library that all ranks have finished.

    First, the library saves to `next_path()`. Then `run.save()` makes this checkpoint valid. If the program
    is killed in between, the next start resumes from the previous valid checkpoint. `run.restore` sets
    `path`.
    """

    def __init__(self, run: Run) -> None:
        self.path: Path | None = None
        """Path of the checkpoint in the run's folder, or None if there is no checkpoint."""
        self.step = 0
        """Number of steps that the run had done when the checkpoint was taken."""
        self._run = run
        self._count = 0
        run.track(library_checkpoint=self)

    def next_path(self, path: str | Path | None = None) -> Path:
        """Begin a new checkpoint of this step, and return its path, which is the same on all ranks.

        The path and the step are stored, and become part of the run's state at the next `run.save()`. Three
        folders are used in turn. So an interrupted save does not damage the previous checkpoint.

        Parameters
        ----------
        path : a path in the run's folder, for a library that names and removes its checkpoints itself.
        """
        self._count += 1  # also with `path`, although only the folders below need it
        default_path = self._run.folder / f"library-checkpoint-{self._count % _FOLDER_COUNT}"
        self.step = self._run.step
        self.path = Path(path or default_path)
        return self.path

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the run saves."""
        # The path is relative, so that the run's folder can be moved.
        path = self.path and os.path.relpath(self.path, self._run.folder)
        return {"path": path, "step": self.step, "count": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned.

        Raises
        ------
        ValueError : the checkpoint no longer exists, or its path is outside of the run's folder.
        """
        self.path = None
        self.step = int(state["step"])
        self._count = int(state["count"])
        path = state["path"]
        if path is None:
            return
        self.path = self._run.folder / path
        # The user trusts the run's folder. A path out of it could lead to files of another user.
        if not self.path.resolve().is_relative_to(self._run.folder.resolve()):
            raise ValueError(f"{path} is outside of {self._run.folder}")
        if not self.path.exists():
            raise ValueError(f"there is no {self.path}")

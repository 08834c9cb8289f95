"""Checkpoints that another library writes and reads, as a state of the run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from imgkit_entrypoints.run.run import Run

_PLACES = 3
"""One is the newest, one the one before, which a snapshot may still name, and one is being written."""


class Checkpoint:
    """The newest checkpoint of another library that all ranks have finished; the run's snapshots name it.

    The library saves to `place()`, and `run.save()` behind it makes this checkpoint count. If the program is
    killed before, the next start goes on from the one that counted until then. `run.restore` sets `path`.
    """

    def __init__(self, run: Run) -> None:
        self.path: Path | None = None
        """Where it lies, in the run's folder; None: there is none."""
        self.step = 0
        """The run's steps when it was taken."""
        self._run, self._count = run, 0
        run.track(checkpoint=self)

    def place(self, path: str | Path | None = None) -> Path:
        """The path for a checkpoint of this step, the same on all ranks: one of three in turn.

        Parameters
        ----------
        path : in the run's folder, for a library that names and removes its checkpoints itself.
        """
        self._count, self.step = self._count + 1, self._run.step
        self.path = Path(path or self._run.folder / f"checkpoint-{self._count % _PLACES}")
        return self.path

    def state_dict(self) -> dict[str, Any]:
        """The state that a snapshot keeps."""
        path = self.path and os.path.relpath(self.path, self._run.folder)
        return {"path": path, "step": self.step, "count": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state that `state_dict` returned.

        Raises
        ------
        ValueError : the checkpoint is no longer there, or lies outside of the run's folder.
        """
        path, self.step, self._count = state["path"], int(state["step"]), int(state["count"])
        self.path = None if path is None else self._run.folder / path
        if self.path is None:
            return
        if not self.path.resolve().is_relative_to(self._run.folder.resolve()):
            raise ValueError(f"{path} is outside of {self._run.folder}")
        if not self.path.exists():
            raise ValueError(f"there is no {self.path}")

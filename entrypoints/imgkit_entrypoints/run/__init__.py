"""The run as a library: stop, save, resume and the watchdog for a custom training loop.

    from imgkit_entrypoints.run import Run

torch is imported at the first use of `Run`, so that this package costs nothing where nobody trains.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from imgkit_entrypoints.run.run import Run

__all__ = ["LibraryCheckpoint", "Run"]

_PATHS = 3
"""One is the newest, one the one before, which the run may still name, and one is being written."""


def __getattr__(name: str) -> Any:
    if name == "Run":
        from imgkit_entrypoints.run.run import Run

        return Run
    raise AttributeError(f"module {__name__} has no attribute {name}")


class LibraryCheckpoint:
    """The newest checkpoint of another library that all ranks have finished; the run's own ones name it.

    The library saves to `next_path()`, and `run.save()` after it makes this checkpoint count. If the program
    is killed before, the next start resumes from the one that counted until then. `run.restore` sets `path`.
    """

    def __init__(self, run: Run) -> None:
        self.path: Path | None = None
        """Its path, in the run's folder; None: there is none."""
        self.step = 0
        """The run's steps when it was taken."""
        self._run, self._count = run, 0
        run.track(library_checkpoint=self)

    def next_path(self, path: str | Path | None = None) -> Path:
        """The path for a checkpoint of this step, the same on all ranks: one of three in turn.

        Parameters
        ----------
        path : in the run's folder, for a library that names and removes its checkpoints itself.
        """
        self._count, self.step = self._count + 1, self._run.step
        self.path = Path(path or self._run.folder / f"library-checkpoint-{self._count % _PATHS}")
        return self.path

    def state_dict(self) -> dict[str, Any]:
        """The state that the run keeps."""
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

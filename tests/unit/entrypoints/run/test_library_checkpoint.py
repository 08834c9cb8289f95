"""`LibraryCheckpoint`: paths for checkpoints of other libraries, and which of them counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from imgkit_entrypoints.run import LibraryCheckpoint


class FakeRun:
    """The part of a run that `LibraryCheckpoint` uses; the real one needs torch."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.step = folder, 0
        self.tracked: dict[str, Any] = {}

    def track(self, **parts: Any) -> None:
        self.tracked.update(parts)


def checkpoint(folder: Path, step: int = 0) -> LibraryCheckpoint:
    run = FakeRun(folder)
    run.step = step
    library_checkpoint = LibraryCheckpoint(cast("Any", run))
    assert run.tracked == {"library_checkpoint": library_checkpoint}
    return library_checkpoint


def restored(folder: Path, state: dict[str, Any]) -> LibraryCheckpoint:
    library_checkpoint = checkpoint(folder)
    library_checkpoint.load_state_dict(state)
    return library_checkpoint


def test_newest_and_the_one_before_stay_while_another_is_written(tmp_path):
    library_checkpoint = checkpoint(tmp_path)
    paths = [library_checkpoint.next_path() for _ in range(7)]
    for number in range(2, 7):
        assert len(set(paths[number - 2 : number + 1])) == 3
    assert len(set(paths)) == 3


def test_next_start_finds_path_and_step_also_in_a_moved_folder(tmp_path):
    before, after = tmp_path / "before", tmp_path / "after"
    saved = checkpoint(before, step=40)
    saved.next_path().mkdir(parents=True)
    before.rename(after)
    loaded = restored(after, saved.state_dict())
    assert loaded.path == after / "library-checkpoint-1"
    assert loaded.step == 40
    assert loaded.next_path() == after / "library-checkpoint-2"


def test_library_may_name_its_checkpoints_itself(tmp_path):
    saved = checkpoint(tmp_path)
    (tmp_path / "trainer/checkpoint-20").mkdir(parents=True)
    saved.next_path(f"{tmp_path}/trainer/checkpoint-20")
    assert restored(tmp_path, saved.state_dict()).path == tmp_path / "trainer/checkpoint-20"


def test_run_without_a_checkpoint_restores_none(tmp_path):
    assert restored(tmp_path, checkpoint(tmp_path).state_dict()).path is None


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("library-checkpoint-1", r"there is no .*/library-checkpoint-1"),
        # Libraries unpickle what they find there.
        ("../elsewhere", "is outside of"),
        ("/etc", "is outside of"),
        ("link/inner", "is outside of"),
    ],
)
def test_checkpoint_that_is_gone_or_outside_of_the_folder_is_refused(tmp_path, path, problem):
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "elsewhere/inner").mkdir(parents=True)
    (run / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=problem):
        restored(run, {"path": path, "step": 1, "count": 1})

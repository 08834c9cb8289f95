"""The fence around a run's folder: workers of an attempt that is over write nothing there."""

from __future__ import annotations

from pathlib import Path

import pytest

from imgkit_entrypoints import fence
from imgkit_entrypoints.run import disk


def env(folder: Path, attempt: int, job: str = "4711") -> dict[str, str]:
    return {"IMGKIT_RUN_DIR": str(folder), "IMGKIT_JOB_ID": job, "IMGKIT_ATTEMPT": str(attempt)}


def test_current_attempt_writes(tmp_path):
    assert fence.admit_attempt(tmp_path, "4711", 2, "a1") == ""
    fence.check_fence(env(tmp_path, 2))


@pytest.mark.parametrize(("attempt", "job"), [(1, "4711"), (3, "4711"), (2, "4712")])
def test_other_attempt_is_kept_out(tmp_path, attempt, job):
    fence.admit_attempt(tmp_path, "4711", 2, "a1")
    with pytest.raises(OSError, match=f"attempt {attempt} of the run is over, .*attempt says '4711 2 a1'"):
        fence.check_fence(env(tmp_path, attempt, job))


def test_same_attempt_of_an_earlier_start_is_kept_out(tmp_path):
    fence.admit_attempt(tmp_path, "4711", 1, "b2")  # a requeued job keeps its id
    fence.check_fence({**env(tmp_path, 1), fence.RUN_ID_VARIABLE: "b2"})
    fence.check_fence(env(tmp_path, 1))  # another node, which does not know the word
    with pytest.raises(OSError, match="attempt 1 of the run is over"):
        fence.check_fence({**env(tmp_path, 1), fence.RUN_ID_VARIABLE: "a1"})


def test_nobody_is_kept_out_where_no_launcher_says_the_attempt(tmp_path):
    fence.check_fence(env(tmp_path, 1))
    fence.admit_attempt(tmp_path, "4711", 2, "a1")
    fence.check_fence({"IMGKIT_RUN_DIR": str(tmp_path)})
    fence.check_fence({"IMGKIT_ATTEMPT": "1"})


def test_fence_that_cannot_move_is_taken_down(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    fence.admit_attempt(tmp_path, "4711", 1, "a1")
    monkeypatch.setattr(fence.files, "write_file", full)
    assert "No space left on device; workers of an earlier attempt" in fence.admit_attempt(
        tmp_path, "4711", 2, "a1"
    )
    fence.check_fence(env(tmp_path, 2))


def test_late_checkpoint_changes_nothing(tmp_path, monkeypatch):
    def save(step: int, attempt: int, late: bool = False) -> None:
        for name, value in env(tmp_path, attempt).items():
            monkeypatch.setenv(name, value)
        temporary = disk.make_temporary_folder(tmp_path, step)
        if late:
            fence.admit_attempt(tmp_path, "4711", attempt + 1, "a1")
            (tmp_path / ".writing-of-the-next-attempt").mkdir()
        disk.commit(temporary, step, {}, keep=2)

    fence.admit_attempt(tmp_path, "4711", 1, "a1")
    save(5, 1)
    with pytest.raises(OSError, match="attempt 1 of the run is over"):
        save(10, 1, late=True)
    names = sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(disk.WRITING))
    assert names == [".writing-of-the-next-attempt", "attempt", "step-0000000005"]
    save(8, 2)
    with pytest.raises(OSError, match="attempt 1 of the run is over"):
        save(5, 1)
    assert (tmp_path / "step-0000000008").exists()

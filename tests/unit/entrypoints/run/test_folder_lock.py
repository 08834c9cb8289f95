"""The lock on a run folder: refused to another run, not to a later attempt of the same job."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.run import disk

HOLD = """
import os, sys
from pathlib import Path
from imgkit_entrypoints.run import disk
lock = disk.lock_folder(Path(sys.argv[1]), print, os.environ)
print("held", flush=True)
sys.stdin.read()
"""
FIRST = {"IMGKIT_JOB_ID": "4711", "IMGKIT_ATTEMPT": "1"}
LOCAL = {"IMGKIT_JOB_ID": "local", "IMGKIT_ATTEMPT": "1", "IMGKIT_FENCE": "word"}


@pytest.fixture(params=[FIRST, LOCAL, {}], ids=["job", "start", "nobody"])
def holder_env(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Locks tmp_path as a worker with these variables does, and gives them."""
    env = {**os.environ, **request.param}
    argv = (sys.executable, "-c", HOLD, tmp_path)
    with subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        yield request.param
        holder.communicate("")


def test_second_lock_of_one_process_is_refused(tmp_path: Path) -> None:
    folder, link = tmp_path / "run", tmp_path / "link"
    link.symlink_to(folder)
    with disk.lock_folder(folder, print, {}):
        with pytest.raises(UsageError) as caught:
            disk.lock_folder(link, print, {})
        assert str(caught.value) == (
            f"{link}: another run of this process writes into this folder\n  -> end it first (with "
            "Run.start(...)), or name another folder: Run.start(FOLDER), --run-dir or IMGKIT_RUN_DIR"
        )
        # The first one still counts for other processes, such as a child that has its streams.
        child = os.fork()
        if child == 0:
            try:
                disk.lock_folder(folder, print, {})
            except UsageError as error:
                os._exit(0 if error.what.startswith("another run writes into this folder") else 2)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
    disk.lock_folder(folder, print, {}).close()


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "PATIENCE_S", 0.0)


@pytest.mark.parametrize("holder_env", [FIRST, LOCAL], ids=["job", "start"], indirect=True)
def test_later_attempt_goes_on_and_says_who_has_the_lock(holder_env: dict[str, str], tmp_path: Path) -> None:
    messages: list[str] = []
    disk.lock_folder(tmp_path, messages.append, {**holder_env, "IMGKIT_ATTEMPT": "2"}).close()
    assert len(messages) == 1
    assert "an earlier attempt still has the lock (process " in messages[0]


@pytest.mark.parametrize(
    "env", [{}, {**FIRST, "IMGKIT_JOB_ID": "711"}, {**LOCAL, "IMGKIT_FENCE": "other"}], ids=str
)
def test_other_run_is_refused(holder_env: dict[str, str], env: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="another run writes into this folder") as caught:
        disk.lock_folder(tmp_path, print, env)
    assert caught.value.where == str(tmp_path)

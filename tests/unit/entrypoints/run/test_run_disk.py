"""A run's folder: checkpoints interrupted at every system call, damaged, kept and skipped; and its lock."""

from __future__ import annotations

import errno
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.run import disk

EFFECTS = ("mkdir", "open", "fsync", "close", "rename", "replace", "unlink", "rmdir", "listdir", "scandir")
DIES = 77


def write(folder: Path, step: int, keep: int = 2, warn: Callable[[str], None] = print) -> Path:
    temporary = disk.make_temporary_folder(folder, step)
    content = {"__0_0.distcp": b"w" * 100 + bytes([step] * 50), ".metadata": str(step).encode()}
    for name, data in content.items():
        (temporary / name).write_bytes(data)
    rows = {name: disk.describe_file(temporary / name) for name in content}
    return disk.commit(temporary, step, rows, keep=keep, warn=warn)


def read(folder: Path) -> tuple[list[int], list[str]]:
    """Return the steps of the valid checkpoints, newest first, and why others are not valid."""
    problems: dict[Path, str] = {}
    steps = []
    for path, step, rows in disk.iterate_valid(folder, problems):
        if problem := disk.find_damage(path, rows, sorted(rows)):
            problems[path] = problem
        else:
            steps.append(step)
    return steps, [*problems.values()]


def valid_steps(folder: Path) -> list[int]:
    return read(folder)[0]


def inject(
    patch: pytest.MonkeyPatch, at: int, fault: Callable[[], None], *, after: bool = False
) -> list[str]:
    """Put a fault before or after the writer's system call number `at`; the result grows with each call."""
    calls: list[str] = []

    def faulty(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            calls.append(name)
            is_due = len(calls) == at
            if is_due and not after:
                fault()
            try:
                return real(*arguments, **named)
            finally:
                if is_due and after:
                    fault()

        return call

    for name in EFFECTS:
        patch.setattr(os, name, faulty(name, getattr(os, name)))
    return calls


def killed_at(folder: Path, step: int, call: int, *, after: bool) -> bool:
    """Write in a process that dies at system call number `call`; False if it makes fewer calls."""
    pid = os.fork()
    if pid == 0:
        inject(pytest.MonkeyPatch(), call, lambda: os._exit(DIES), after=after)
        write(folder, step)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == DIES


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("again", [False, True], ids=["new", "replaced"])
def test_killed_writer_leaves_old_or_new(tmp_path, *, after, again):
    outcomes = []
    for call in itertools.count(1):
        folder = tmp_path / str(call)
        folder.mkdir()
        write(folder, 1)
        write(folder, 2)
        step = 2 if again else 3
        killed = killed_at(folder, step, call, after=after)
        steps, problems = read(folder)
        assert problems == []  # a half-written checkpoint does not look like one
        assert steps[0] in (1, 2, 3)
        assert again or steps[0] >= 2
        outcomes.append(steps)
        write(folder, 4)  # the next writer copes with the leftovers
        assert valid_steps(folder)[0] == 4
        assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
        if not killed:
            break
    assert len(outcomes) > 15
    assert outcomes[-1] == ([2, 1] if again else [3, 2])


def full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_failed_call_keeps_the_older_ones(tmp_path, monkeypatch):
    failures = []
    for call in itertools.count(1):
        folder = tmp_path / str(call)
        folder.mkdir()
        write(folder, 1)
        expected = [[2, 1]]
        with monkeypatch.context() as patch:
            calls = inject(patch, call, full)
            try:
                write(folder, 2)
            except OSError as error:
                failures.append(error.errno)
                expected.append([1])  # if only the folder's sync failed, the new one exists too
        assert valid_steps(folder) in expected
        if len(calls) < call:
            break
    assert failures == [errno.ENOSPC] * len(failures)
    assert len(failures) > 10


@pytest.mark.parametrize(
    ("steps", "remaining"),
    [((5, 10, 15, 20), [20, 15, 10]), ((5, 10, 15, 7), [7, 5])],
    ids=["oldest go", "course that was given up goes"],
)
def test_newest_are_kept(tmp_path, steps, remaining):
    for step in steps:
        write(tmp_path, step, keep=3)
    assert valid_steps(tmp_path) == remaining


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    # What a file becomes: bytes, changed values of the JSON, whose own digest stays, or nothing.
    [
        ("__0_0.distcp", b"v" * 150, "its sha256 differs"),
        ("__0_0.distcp", b"w" * 10, "has 10 bytes, not 150"),
        (".metadata", None, ".metadata is missing"),
        ("more.pt", b"", "more.pt is in the folder, but not in"),
        ("manifest.json", b'{"schema": 2, "step": 2, "files": {}}', "is not a"),
        ("manifest.json", {"step": 7}, "is not a manifest, or damaged"),
        ("manifest.json", {"more": 7}, "is not a manifest, or damaged"),
        ("manifest.json", None, "No such file"),
        ("manifest.json", b"{}", "is not a manifest"),
        ("manifest.json", b'{"schema": 9}', "schema 9"),
    ],
)
def test_damaged_checkpoint_is_named_and_skipped(tmp_path, name, content, reason):
    write(tmp_path, 1)
    path = write(tmp_path, 2) / name
    if content is None:
        path.unlink()
    elif isinstance(content, dict):
        path.write_text(json.dumps(json.loads(path.read_text()) | content))
    else:
        path.write_bytes(content)
    steps, (problem,) = read(tmp_path)
    assert steps == [1]
    assert reason in problem
    assert "step-0000000002" in problem


def test_run_and_checkpoint_are_places_too(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    checkpoint = write(tmp_path / "checkpoints", 1)
    assert valid_steps(tmp_path) == valid_steps(checkpoint) == [1]
    assert valid_steps(tmp_path / "nowhere") == []


def test_checkpoint_under_the_name_of_another_step_is_skipped(tmp_path):
    write(tmp_path, 1)
    renamed = write(tmp_path, 2).rename(tmp_path / "step-0000000020")
    problem = f"{renamed} contains the checkpoint of step 2"
    assert read(tmp_path) == ([1], [problem])
    assert read(renamed) == ([], [problem])
    assert valid_steps(renamed.rename(tmp_path / "best")) == [2]  # a name that promises no step


def test_file_that_cannot_be_removed_fails_no_save(tmp_path, monkeypatch):
    write(tmp_path, 1)
    (tmp_path / "step-0000000001" / ".nfs0000001").touch()  # another process holds it open
    unlink = os.unlink

    def busy(path: Any, **named: Any) -> None:
        if ".nfs" in str(path):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        unlink(path, **named)

    monkeypatch.setattr(os, "unlink", busy)
    messages: list[str] = []
    for step in (2, 3, 4, 2, 3):
        write(tmp_path, step, keep=1, warn=messages.append)
        assert valid_steps(tmp_path) == [step]
    assert len(messages) == 5
    assert ".nfs0000001 cannot be removed: Device or resource busy" in messages[-1]


def test_planted_links_cost_nobody_a_file(tmp_path):
    folder, victim = tmp_path / "checkpoints", tmp_path / ".ssh"
    folder.mkdir()
    victim.mkdir()
    (victim / "id_ed25519").write_text("mine")
    for name in (f"{disk.LEAVING}x", f"{disk.WRITING}step-0000000001"):
        (folder / name).symlink_to(victim)
    write(folder, 1)
    assert [path.name for path in folder.iterdir()] == ["step-0000000001"]
    assert (victim / "id_ed25519").read_text() == "mine"


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as a second user")


@needs_root
def test_checkpoint_that_a_stranger_planted_is_skipped(tmp_path):
    write(tmp_path, 1)
    planted = write(tmp_path, 2)
    os.chown(planted, 12345, 12345)
    link = tmp_path / "step-0000000003"
    link.symlink_to(planted)
    assert read(tmp_path) == ([1], [f"{link} is a link", f"{planted} belongs to user 12345"])
    os.chown(tmp_path, 12345, 12345)  # the person's own run, where root is the program in a container
    assert valid_steps(tmp_path) == [2, 1]


@needs_root
def test_checkpoint_of_another_user_outlives_all_saves(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for step in (2, 9):
        os.chown(write(folder, step, keep=9), 12345, 12345)
    for step in (3, 4, 5):
        write(folder, step)
    with pytest.raises(OSError, match="step-0000000009 belongs to user 12345"):
        write(folder, 9)
    assert sorted(int(path.name[-2:]) for path in disk.newest_first(folder)) == [2, 4, 5, 9]


def test_checkpoint_that_was_set_aside_stays(tmp_path):
    for turn in range(2):
        unreadable = write(tmp_path, 2)
        disk.set_aside([unreadable, tmp_path / "step-0000000001"])
        for step in (2, 3, 4):
            write(tmp_path, step)
        assert len([*tmp_path.glob("skipped-step-0000000002.*")]) == turn + 1
        assert valid_steps(tmp_path) == [4, 3]


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


def test_second_lock_of_one_process_is_refused(tmp_path):
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
def test_later_attempt_goes_on_and_says_who_has_the_lock(holder_env, tmp_path):
    messages: list[str] = []
    disk.lock_folder(tmp_path, messages.append, {**holder_env, "IMGKIT_ATTEMPT": "2"}).close()
    assert len(messages) == 1
    assert "an earlier attempt still has the lock (process " in messages[0]


@pytest.mark.parametrize(
    "env", [{}, {**FIRST, "IMGKIT_JOB_ID": "711"}, {**LOCAL, "IMGKIT_FENCE": "other"}], ids=str
)
def test_other_run_is_refused(holder_env, env, tmp_path):
    with pytest.raises(UsageError, match="another run writes into this folder") as caught:
        disk.lock_folder(tmp_path, print, env)
    assert caught.value.where == str(tmp_path)

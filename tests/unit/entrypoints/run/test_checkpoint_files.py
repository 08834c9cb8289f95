"""Checkpoints on disk: interrupted at every system call, damaged, kept and skipped."""

from __future__ import annotations

import errno
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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


def rewrite(checkpoint: Path, **changed: object) -> None:
    """Change values of the manifest, whose own digest stays."""
    path = checkpoint / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


def valid_steps(folder: Path, messages: list[str] | None = None, *, trusts_folder: bool = False) -> list[int]:
    problems: dict[Path, str] = {}
    steps = []
    for path, step, rows in disk.iterate_valid(folder, problems, trusts_folder=trusts_folder):
        if problem := disk.find_damage(path, rows, sorted(rows)):
            problems[path] = problem
        else:
            steps.append(step)
    if messages is not None:
        messages += problems.values()
    return steps


class Faulty:
    """System calls with a fault before or after call number `at` of the writer."""

    def __init__(self, at: int, happens: Callable[[str], None], *, after: bool = False) -> None:
        self.at, self.happens, self.after, self.calls = at, happens, after, 0

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in EFFECTS:
            patch.setattr(os, name, self._faulty(name, getattr(os, name)))

    def _faulty(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self.calls += 1
            is_due = self.calls == self.at
            if is_due and not self.after:
                self.happens(name)
            try:
                return real(*arguments, **named)
            finally:
                if is_due and self.after:
                    self.happens(name)

        return call


def killed_at(folder: Path, step: int, call: int, *, after: bool) -> bool:
    """Write in a process that dies at system call number `call`; False if it makes fewer calls."""
    pid = os.fork()
    if pid == 0:
        Faulty(call, lambda _: os._exit(DIES), after=after).install(pytest.MonkeyPatch())
        write(folder, step)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == DIES


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("again", [False, True], ids=["new", "replaced"])
def test_killed_writer_leaves_old_or_new(tmp_path: Path, *, after: bool, again: bool) -> None:
    outcomes = []
    for call in itertools.count(1):
        folder = tmp_path / str(call)
        folder.mkdir()
        write(folder, 1)
        write(folder, 2)
        step = 2 if again else 3
        killed = killed_at(folder, step, call, after=after)
        messages: list[str] = []
        steps = valid_steps(folder, messages)
        assert messages == []  # a half-written checkpoint does not look like one
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


def full(name: str) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_failed_call_keeps_the_older_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = 0
    for call in itertools.count(1):
        folder = tmp_path / str(call)
        folder.mkdir()
        write(folder, 1)
        faulty = Faulty(call, full)
        with monkeypatch.context() as patch:
            faulty.install(patch)
            try:
                write(folder, 2)
            except OSError as error:
                failure = error
            else:
                failure = None
        if failure is None:
            assert valid_steps(folder)[0] == 2
        else:
            failures += 1
            assert failure.errno == errno.ENOSPC
            # Written and renamed, only the folder's sync failed: it exists, and the failure is reported.
            assert valid_steps(folder) in ([1], [2, 1])
        if faulty.calls < call:
            break
    assert failures > 10


def test_newest_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 15, 20):
        write(tmp_path, step, keep=3)
    assert valid_steps(tmp_path) == [20, 15, 10]


def test_course_that_was_given_up_goes(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        write(tmp_path, step, keep=3)
    write(tmp_path, 7, keep=3)
    assert valid_steps(tmp_path) == [7, 5]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda path: (path / "__0_0.distcp").write_bytes(b"v" * 150), "its sha256 differs"),
        (lambda path: (path / "__0_0.distcp").write_bytes(b"w" * 10), "has 10 bytes, not 150"),
        (lambda path: (path / ".metadata").unlink(), ".metadata is missing"),
        (lambda path: (path / "more.pt").write_bytes(b""), "more.pt is in the folder, but not in"),
        (
            lambda path: (path / "manifest.json").write_text('{"schema": 2, "step": 2, "files": {}}'),
            "is not a",
        ),
        (lambda path: rewrite(path, step=7), "is not a manifest, or damaged"),
        (lambda path: rewrite(path, more=7), "is not a manifest, or damaged"),
        (lambda path: (path / "manifest.json").unlink(), "No such file"),
        (lambda path: (path / "manifest.json").write_text("{}"), "is not a manifest"),
        (lambda path: (path / "manifest.json").write_text('{"schema": 9}'), "schema 9"),
    ],
)
def test_damaged_checkpoint_is_named_and_skipped(
    tmp_path: Path, spoil: Callable[[Path], None], reason: str
) -> None:
    write(tmp_path, 1)
    spoil(write(tmp_path, 2))
    messages: list[str] = []
    assert valid_steps(tmp_path, messages) == [1]
    assert len(messages) == 1
    assert reason in messages[0]
    assert "step-0000000002" in messages[0]


def test_run_and_checkpoint_are_places_too(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    checkpoint = write(tmp_path / "checkpoints", 1)
    assert valid_steps(tmp_path) == valid_steps(checkpoint) == [1]
    assert valid_steps(tmp_path / "nowhere") == []


def test_checkpoint_under_the_name_of_another_step_is_skipped(tmp_path: Path) -> None:
    write(tmp_path, 1)
    renamed = write(tmp_path, 2).rename(tmp_path / "step-0000000020")
    messages: list[str] = []
    assert valid_steps(tmp_path, messages) == [1]
    assert valid_steps(renamed, messages) == []
    assert messages == [f"{renamed} contains the checkpoint of step 2"] * 2
    assert valid_steps(renamed.rename(tmp_path / "best")) == [2]  # a name that promises no step


def test_file_that_cannot_be_removed_fails_no_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_planted_links_cost_nobody_a_file(tmp_path: Path) -> None:
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
def test_checkpoint_that_a_stranger_planted_is_skipped(tmp_path: Path) -> None:
    write(tmp_path, 1)
    planted = write(tmp_path, 2)
    os.chown(planted, 12345, 12345)
    link = tmp_path / "step-0000000003"
    link.symlink_to(planted)
    messages: list[str] = []
    assert valid_steps(tmp_path, messages) == [1]
    assert messages == [f"{link} is a link", f"{planted} belongs to user 12345"]
    os.chown(tmp_path, 12345, 12345)  # the person's own run, where root is the program in a container
    assert valid_steps(tmp_path) == [2, 1]


@needs_root
def test_checkpoint_of_another_user_outlives_all_saves(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for step in (2, 9):
        os.chown(write(folder, step, keep=9), 12345, 12345)
    for step in (3, 4, 5):
        write(folder, step)
    with pytest.raises(OSError, match="step-0000000009 belongs to user 12345"):
        write(folder, 9)
    assert sorted(int(path.name[-2:]) for path in disk.newest_first(folder)) == [2, 4, 5, 9]


def test_checkpoint_that_was_set_aside_stays(tmp_path: Path) -> None:
    for turn in range(2):
        unreadable = write(tmp_path, 2)
        disk.set_aside([unreadable, tmp_path / "step-0000000001"])
        for step in (2, 3, 4):
            write(tmp_path, step)
        assert len([*tmp_path.glob("skipped-step-0000000002.*")]) == turn + 1
        assert valid_steps(tmp_path) == [4, 3]

"""Temporary files: where they go, that they go away, and whose may be removed."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from refusals import refused

from imgkit_builder.base import files
from imgkit_builder.sif.workspace import remove_tree, tmp_base, workspace
from imgkit_entrypoints.errors import ToolFailed, UsageError

VARIABLES = ("IMGKIT_TMPDIR", "APPTAINER_TMPDIR", "SINGULARITY_TMPDIR", "TMPDIR")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_order_of_places(tmp_path, monkeypatch):
    target = tmp_path / "x.sif"
    assert tmp_base(target, None) == tmp_path
    for name in reversed(VARIABLES):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.setenv(name, str(folder))
        assert tmp_base(target, None) == folder
    assert tmp_base(target, tmp_path) == tmp_path


def test_missing_tmpdir_refused(tmp_path):
    with refused(UsageError, "no such folder", where="--tmpdir"):
        tmp_base(tmp_path / "x.sif", tmp_path / "none")


def test_nothing_stays_after_failure(tmp_path):
    def fail() -> None:
        with workspace(tmp_path / "x.sif", tmp_path) as work:
            work.new_file.write_text("half")
            locked = work.folder / "a/locked"
            locked.mkdir(parents=True)
            (locked / "file").touch()
            locked.chmod(0)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_the_same_target_go(tmp_path):
    target, target_beside = tmp_path / "x.sif", tmp_path / "y.sif"
    with workspace(target, tmp_path) as work:
        folder, part = work.folder, work.new_file
    folder.mkdir()
    part.touch()
    of_others = [tmp_path / ".imgkit-01234567.y.sif.part", tmp_path / ".imgkit-mine.x.sif.part"]
    for path in of_others:
        path.touch()
    (tmp_path / ".imgkit-lock.x.sif").write_text(json.dumps({"pid": 1, "folder": str(folder)}))
    with workspace(target, tmp_path):
        assert not folder.exists()
        assert not part.exists()
    assert sorted(tmp_path.iterdir()) == sorted(of_others)
    with workspace(target_beside, tmp_path):
        assert not of_others[0].exists()


@pytest.mark.parametrize(
    "text", ["{}", "[]", "", "x", '{"folder": 7}', '{"folder": "/"}', '{"folder": "VICTIM"}']
)
def test_lock_text_cannot_delete_others(tmp_path, text):
    victim = tmp_path / "home"
    victim.mkdir()
    (tmp_path / ".imgkit-lock.x.sif").write_text(text.replace("VICTIM", str(victim)))
    with workspace(tmp_path / "x.sif", tmp_path):
        pass
    assert victim.is_dir()


def test_lock_cannot_be_a_link(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("keep")
    (tmp_path / ".imgkit-lock.x.sif").symlink_to(victim)
    with pytest.raises(UsageError, match="cannot write into"), workspace(tmp_path / "x.sif", tmp_path):
        pass
    assert victim.read_text() == "keep"


def test_two_at_once_refused(tmp_path):
    target = tmp_path / "x.sif"
    with (
        workspace(target, tmp_path),
        pytest.raises(UsageError, match=rf"another imgkit process is writing this file .pid {os.getpid()} "),
        workspace(target, tmp_path),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_removing_spares_what_links_point_to(tmp_path):
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "file").touch()
    gone = tmp_path / "gone"
    gone.mkdir()
    (gone / "link").symlink_to(linked)
    remove_tree(gone)
    assert not gone.exists()
    assert (linked / "file").exists()


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/data/base.sif")


@pytest.mark.parametrize(
    "error",
    [
        FULL,
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
        ToolFailed("mksquashfs failed", hint="Write failed because No space left on device"),
    ],
)
@pytest.mark.parametrize("folder", [".", "temporary"])
def test_full_disk_names_the_target_and_the_options(tmp_path, error, folder):
    target = tmp_path / "x.sif"
    base = tmp_path / folder
    base.mkdir(exist_ok=True)
    with (
        refused(
            ToolFailed,
            f"the disk of {tmp_path}(/temporary)? is full: ",
            where=str(target),
        ) as caught,
        workspace(target, base),
    ):
        raise error
    details = [error.hint] if isinstance(error, ToolFailed) else []
    assert caught.value.hint == "\n".join(["-o FILE, and --tmpdir DIR, on a larger disk", *details])
    assert not [path for path in tmp_path.iterdir() if path != base]


@pytest.mark.parametrize("error", [OSError(errno.EACCES, "denied"), ToolFailed("mksquashfs failed")])
def test_other_failures_pass_unchanged(tmp_path, error):
    with pytest.raises(type(error)) as caught, workspace(tmp_path / "x.sif", tmp_path):
        raise error
    assert caught.value is error


def test_lock_that_does_not_fit_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwrite", MagicMock(side_effect=FULL))
    with pytest.raises(ToolFailed), workspace(tmp_path / "x.sif", tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_full_disk_of_any_file_is_named(tmp_path):
    with pytest.raises(OSError, match="No space") as caught, files.replace_file(tmp_path / "x"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "source", None, "other")
    assert files.find_full_disk_path(caught.value) == str(tmp_path / "x")
    assert Path(files.find_full_disk_path(OSError(errno.ENOSPC, "full"))).is_dir()


def test_planted_name_of_another_file_is_no_lock(tmp_path):
    victim = tmp_path / ".bashrc"
    victim.write_text("mine")
    os.link(victim, tmp_path / ".imgkit-lock.x.sif")
    with pytest.raises(UsageError, match="hard link"), workspace(tmp_path / "x.sif", tmp_path):
        pass
    assert victim.read_text() == "mine"

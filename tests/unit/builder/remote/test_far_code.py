"""The least that brings edited code to a remote, and that it shows the folder over any image."""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from imgkit_builder.base.progress import Silent
from imgkit_builder.delta import tree
from imgkit_builder.delta.layers import Tar
from imgkit_builder.delta.read_squashfs import SquashfsLayer
from imgkit_builder.job import code
from imgkit_builder.job.request import Request
from imgkit_builder.remote import code as far_code
from imgkit_builder.remote.store import Store
from imgkit_builder.sif.conversion import Options

pytestmark = pytest.mark.programs("mksquashfs")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = tmp_path / "code"
    (made / "pkg").mkdir(parents=True)
    (made / "pkg/model.py").write_text("1\n")
    (made / "old.py").write_text("old\n")
    (made / "table").write_bytes(os.urandom(200_000))
    yield made
    shutil.rmtree(tmp_path / "far", ignore_errors=True)


def sent(folder: Path, far: Path, *, replaces: bool = False) -> tuple[tuple[str, ...], int]:
    """Bring the code to the folder `far`, which stands for a store; the result has the bytes that went."""
    far.mkdir(exist_ok=True)
    store = Store(
        home="/s",
        free_bytes=None,
        has_program=True,
        images=(),
        deltas=(),
        names=(),
        codes=tuple(path.name for path in far.iterdir()),
    )
    read = code.read(Request(code=folder, code_replace=replaces), large=False, report=Silent())
    with far_code.plan(read, store, Options(), Silent()) as plan:
        if plan.file is None:
            return plan.targets, 0
        shutil.copy(plan.file, far / plan.targets[-1].removeprefix("deltas/"))
        return plan.targets, plan.file.stat().st_size


def shown(image: Path, far: Path, targets: tuple[str, ...]) -> dict[str, tuple[str, int, bytes]]:
    """What a job sees of the code over the image's folder."""
    layers = [SquashfsLayer(far / target.removeprefix("deltas/")) for target in reversed(targets)]
    with tarfile.open(image.with_suffix(".tar"), "w") as tar:
        tar.add(image, arcname="")
    stack = (*layers, Tar(image.with_suffix(".tar")))
    return {
        path: (entry.kind, entry.mtime_s, tree.digest(entry) if entry.kind == "file" else b"")
        for path, entry in tree.everything(stack)
    }


def image(folder: Path) -> Path:
    """An image that has other files of the same names."""
    made = folder / "image"
    for name in ("old.py", "table", "own.py", "later.py", "pkg/model.py", "plain/x"):
        (made / "workspace" / name).parent.mkdir(parents=True, exist_ok=True)
        (made / "workspace" / name).write_text(f"{name} of the image")
    return made


def test_edit_of_large_code_sends_kilobytes(folder: Path, tmp_path: Path) -> None:
    far = tmp_path / "far"
    first, whole_bytes = sent(folder, far)
    assert whole_bytes > 200_000
    (folder / "pkg/model.py").write_text("2\n")
    (folder / "later.py").write_text("new\n")
    targets, size = sent(folder, far)
    assert size < 10_000
    assert targets[0] == first[0]
    assert sent(folder, far) == (targets, 0)
    other = tmp_path / "other"
    assert shown(image(tmp_path), far, targets) == shown(tmp_path / "image", other, sent(folder, other)[0])


@pytest.mark.parametrize("change", ["removed", "folder became a file", "file became a folder"])
def test_change_that_must_show_the_image_again_sends_all(folder: Path, tmp_path: Path, change: str) -> None:
    (folder / "plain").mkdir()
    (folder / "plain/y").touch()
    far = tmp_path / "far"
    first, whole_bytes = sent(folder, far)
    if change == "removed":
        (folder / "old.py").unlink()
    elif change == "folder became a file":
        shutil.rmtree(folder / "plain")
        (folder / "plain").write_text("x")
    else:
        (folder / "old.py").unlink()
        (folder / "old.py").mkdir()
        (folder / "old.py/x").touch()
    targets, size = sent(folder, far)
    assert len(targets) == 1
    assert size > whole_bytes / 2
    assert targets != first
    names = shown(image(tmp_path), far, targets)
    assert (names["workspace/old.py"] == shown(tmp_path / "image", far, ())["workspace/old.py"]) == (
        change == "removed"
    )


def test_hidden_rest_needs_one_file(folder: Path, tmp_path: Path) -> None:
    far = tmp_path / "far"
    sent(folder, far)
    (folder / "pkg/model.py").write_text("2\n")
    targets, size = sent(folder, far, replaces=True)
    assert len(targets) == 1
    assert size > 200_000


@pytest.mark.parametrize("lost", ["here", "there"])
def test_lost_base_sends_the_whole_folder(folder: Path, tmp_path: Path, lost: str) -> None:
    far = tmp_path / "far"
    sent(folder, far)
    shutil.rmtree(tmp_path / "cache" if lost == "here" else far)
    (folder / "pkg/model.py").write_text("2\n")
    targets, size = sent(folder, far)
    assert len(targets) == 1
    assert size > 200_000


def test_cache_that_is_a_file_costs_bytes_alone(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    assert len(sent(folder, tmp_path / "far")[0]) == 1
    (folder / "pkg/model.py").write_text("2\n")
    assert len(sent(folder, tmp_path / "far")[0]) == 1


def test_cache_keeps_few_folders(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(far_code, "_KEPT", 2)
    for number in range(4):
        (folder / "old.py").write_text(f"{number}")
        shutil.rmtree(tmp_path / "far", ignore_errors=True)
        sent(folder, tmp_path / "far")
    assert len(list((tmp_path / "cache/imgkit/code").iterdir())) == 2


def test_edit_of_small_code_sends_one_file(folder: Path, tmp_path: Path) -> None:
    (folder / "table").unlink()
    sent(folder, tmp_path / "far")
    (folder / "pkg/model.py").write_text("2\n")
    assert len(sent(folder, tmp_path / "far")[0]) == 1

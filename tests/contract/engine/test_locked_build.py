"""A build that gives the image of the one before, and builds that a lock forbids."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sample_answers import answer_line
from typer.testing import CliRunner

from imgkit_builder.cli.app import build_app
from imgkit_builder.recipe import lock_file
from imgkit_builder.recipe.load import load
from imgkit_builder.recipe.model import Lock, LockedBase, LockedPlatform

BASE = "registry.test/base:1"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a recipe with requirements."""
    path = tmp_path / "work"
    path.mkdir()
    (path / "needs.txt").write_text("einops==0.8.0\n")
    (path / "small.yaml").write_text(f"image:\n  base: {BASE}\n  pip: [{{requirements: needs.txt}}]\n")
    monkeypatch.chdir(path)
    return path


@pytest.fixture
def engine(fake: Any, folder: Path, container_says: Callable[[str, int], None]) -> Any:
    """An engine that has the base, builds at once, and keeps the result."""
    container_says(answer_line(), 0)
    fake.on_image(BASE, fake.image(identifier="sha256:" + "b" * 64, tags=[BASE]))
    fake.on_build(image=fake.image_id)
    fake.on_image(fake.image_id, fake.image())
    fake.has("small:latest")
    return fake


def build(*args: str) -> Any:
    result = CliRunner().invoke(build_app(), ["build", "./small.yaml", "--no-test", *args])
    assert result.exit_code == 0, result.output
    return result


def test_build_of_the_same_image_says_so(engine):
    again = build("--json")
    assert json.loads(again.stdout)["up_to_date"] is True
    assert "small:latest is up to date" in again.stderr
    engine.on_image("small:latest", engine.image(identifier="sha256:" + "c" * 64, tags=["small:latest"]))
    changed = build("--json")
    assert json.loads(changed.stdout)["up_to_date"] is False
    assert "is up to date" not in changed.stderr


def lock(folder: Path) -> Path:
    """A lock of the recipe that installs nothing."""
    recipe = load(folder / "small.yaml")
    part = LockedPlatform(
        platform="linux/amd64",
        source_date_epoch=1700000000,
        request=lock_file.make_request(recipe),
        base=LockedBase(name=BASE, id=f"sha256:{'b' * 64}"),
    )
    file = folder / "small.lock"
    file.write_text(lock_file.render_lock(Lock(recipe="small", imgkit="0.3.0", platforms=(part,))))
    return file


def test_build_names_its_lock(engine, folder):
    lock(folder)
    for args in (("--locked",), ()):
        assert "imgkit: locked: small.lock, 0 apt and 0 pip packages" in build(*args).stderr


def test_lock_is_ignored_on_request(engine, folder):
    lock(folder).write_text("no lock at all")
    assert "locked" not in build("--no-lock").stderr


@pytest.mark.parametrize(
    ("option", "change", "message"),
    [
        ("--locked", lambda folder: None, "small has no lock"),
        ("--locked", lambda folder: _stale(folder), "small.lock is stale"),
        ("", lambda folder: _stale(folder), "--no-lock"),
        ("--no-lock", lambda folder: None, "cannot be combined with --no-lock"),
    ],
)
def test_build_that_its_lock_forbids_reaches_no_engine(engine, folder, option, change, message):
    change(folder)
    args = ["--locked", option] if option == "--no-lock" else [option] if option else []
    result = CliRunner().invoke(build_app(), ["build", "./small.yaml", "--no-test", *args])
    assert message in str(result.exception)
    assert not engine.requests("POST /build")


def test_other_base_than_the_locked_one_is_refused(engine, folder):
    file = lock(folder)
    file.write_text(file.read_text().replace("b" * 64, "c" * 64))
    result = CliRunner().invoke(build_app(), ["build", "./small.yaml", "--no-test"])
    assert f"and the lock has sha256:{'c' * 64}" in str(result.exception)
    assert not engine.requests("POST /build")


def _stale(folder: Path) -> None:
    lock(folder)
    (folder / "needs.txt").write_text("einops==0.8.1\n")

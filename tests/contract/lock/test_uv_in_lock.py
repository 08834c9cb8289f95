"""The wheels of a uv project in a lock: how they get there, what a locked build does, and a stale lock."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from imgkit_builder.image import install, render, uv_inside
from imgkit_builder.lock import answers
from imgkit_builder.recipe import lock_file, uv_lock
from imgkit_builder.recipe.load import load
from imgkit_builder.recipe.model import UV_STEP, Lock, LockedBase, LockedPlatform, Recipe
from imgkit_entrypoints.errors import ToolFailed, UsageError

RECORDED = Path(__file__).parents[1] / "recipe" / "my-project"
TEXT = "image:\n  base: python:3\n  uv: {project: my-project}\n"
BASE = {"torch": "2.14.1", "numpy": "2.2.6", "antlr4-python3-runtime": "4.9.3"}


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    shutil.copytree(RECORDED, tmp_path / "my-project")
    (tmp_path / "mine.yaml").write_text(TEXT)
    return load(tmp_path / "mine.yaml")


def locked(recipe: Recipe, tmp_path: Path) -> Recipe:
    """The recipe with a lock beside it, made of what the program in a base writes."""
    assert recipe.image.uv is not None
    (tmp_path / "uv.json").write_text(install.as_json(recipe, uv_lock.read(recipe.image.uv.project)))
    choice = uv_inside.UvChoice(json.loads((tmp_path / "uv.json").read_text()), BASE, {})
    choice.walk()
    part = LockedPlatform(
        platform="linux/amd64",
        source_date_epoch=1_700_000_000,
        request=lock_file.request_of(recipe),
        base=LockedBase(name="python:3", digest=f"sha256:{'b' * 64}"),
        pip=answers.uv_wheels(json.dumps(choice.wheels)),
    )
    file = lock_file.beside(recipe)
    file.write_text(lock_file.text(Lock(recipe="mine", imgkit="0.3.0", platforms=(part,))))
    return lock_file.follow(recipe, platform="linux/amd64")


def test_locked_step_needs_the_lock_alone(recipe: Recipe, tmp_path: Path) -> None:
    found = locked(recipe, tmp_path)
    shutil.rmtree(tmp_path / "my-project")
    files = dict(install.uv_files(found))
    assert files.keys() == {"imgkit/uv.txt", "imgkit/uv.html"}
    assert files["imgkit/uv.txt"].startswith(b"certifi==2026.10.18 --hash=sha256:73191c47")
    assert files["imgkit/uv.html"].count(b"<a href=") == len(install.locked_wheels(found, UV_STEP)) > 5
    text = render.dockerfile(found)
    assert 'COPY ["imgkit/uv.txt", "imgkit/uv.html", "/opt/imgkit/"]' in text
    assert "uv-inside" not in text


def test_kept_wheels_ask_no_server(recipe: Recipe, tmp_path: Path) -> None:
    first = locked(recipe, tmp_path)
    folder = tmp_path / "mine.lock.files"
    folder.mkdir()
    names = [one.file for one in install.locked_wheels(first, UV_STEP)]
    for name in names:
        (folder / name).touch()
    found = lock_file.follow(recipe, platform="linux/amd64")
    assert dict(install.uv_files(found)).keys() == {"imgkit/uv.txt"}
    assert render.dockerfile(found).count("locked-uv") == 4
    assert "/opt/imgkit/locked-uv" in render.definition(found)
    # One missing file: pip takes all of them from where uv.lock has them.
    (folder / names[0]).unlink()
    found = lock_file.follow(recipe, platform="linux/amd64")
    assert "imgkit/uv.html" in dict(install.uv_files(found))


@pytest.mark.parametrize("change", ["lock", "extras", "none"])
def test_other_uv_project_makes_the_lock_stale(recipe: Recipe, tmp_path: Path, change: str) -> None:
    locked(recipe, tmp_path)
    file = tmp_path / "mine.yaml"
    if change == "lock":
        lock = tmp_path / "my-project" / "uv.lock"
        lock.write_text(lock.read_text() + "\n")
    else:
        file.write_text(TEXT.replace("my-project}", "my-project, extras: [plots]}"))
    if change == "none":
        file.write_text(TEXT.partition("  uv:")[0])
    with pytest.raises(UsageError) as caught:
        lock_file.follow(load(file), platform="linux/amd64")
    said = (
        "there is no uv project"
        if change == "none"
        else "uv.lock, or the chosen extras and groups, have changed"
    )
    assert caught.value.what == f"the lock mine.lock is stale: {said}"
    assert caught.value.where == ("mine.yaml:2" if change == "none" else "mine.yaml:3")


def test_locked_recipe_needs_no_uv_lock(recipe: Recipe, tmp_path: Path) -> None:
    found = locked(recipe, tmp_path)
    (tmp_path / "my-project" / "uv.lock").unlink()
    assert lock_file.follow(recipe, platform="linux/amd64").lock == found.lock


def test_wheels_of_no_uv_project_are_refused(recipe: Recipe, tmp_path: Path) -> None:
    found = locked(recipe, tmp_path)
    assert found.lock is not None
    part = dataclasses.replace(found.lock, request=dataclasses.replace(found.lock.request, uv=""))
    text = lock_file.text(Lock(recipe="mine", imgkit="0.3.0", platforms=(part,)))
    with pytest.raises(UsageError, match="there is no pip step -1 in the request"):
        lock_file.parse(text, tmp_path / "mine.lock")


@pytest.mark.parametrize("text", ["[1]", '[{"name": "x"}]', '[{"name": 1}]', "["])
def test_answer_of_another_program_is_refused(text: str) -> None:
    with pytest.raises(ToolFailed, match="an answer of the base cannot be read"):
        answers.uv_wheels(text)

"""The wheels of a uv project in a lock: how they get there, what a locked build does, and a stale lock."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from imgkit_builder.image import context, install, render
from imgkit_builder.lock import answers
from imgkit_builder.recipe import lock_file
from imgkit_builder.recipe.load import load
from imgkit_builder.recipe.model import UV_STEP, Lock, LockedBase, LockedPlatform, Recipe
from imgkit_entrypoints.errors import UsageError

RECORDED = Path(__file__).parents[1] / "image" / "my-project"
TEXT = "image:\n  base: python:3\n  uv: {project: my-project}\n"


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    shutil.copytree(RECORDED, tmp_path / "my-project")
    (tmp_path / "mine.yaml").write_text(TEXT)
    return load(tmp_path / "mine.yaml")


def locked(recipe: Recipe, tmp_path: Path) -> Recipe:
    """Return the recipe with a lock beside it, made of what the program in a base writes."""
    report = json.dumps([wheel("certifi", "2026.10.18"), wheel("einops", "0.8.0")])
    part = LockedPlatform(
        platform="linux/amd64",
        source_date_epoch=1_700_000_000,
        request=lock_file.make_request(recipe),
        base=LockedBase(name="python:3", digest=f"sha256:{'b' * 64}"),
        pip=answers.read_wheels(report, UV_STEP, {}),
    )
    file = lock_file.lock_path(recipe)
    file.write_text(lock_file.render_lock(Lock(recipe="mine", imgkit="0.3.0", platforms=(part,))))
    return lock_file.attach_lock(recipe, platform="linux/amd64")


def wheel(name: str, version: str) -> dict[str, object]:
    url = f"https://files.example.org/{name}-{version}-py3-none-any.whl"
    return {"name": name, "version": version, "url": url, "sha256": "a" * 64, "direct": False}


def context_files(recipe: Recipe) -> dict[str, bytes]:
    return {member.name: member.data for member in context.list_package_files(recipe)}


def test_locked_step_needs_the_lock_alone(recipe: Recipe, tmp_path: Path) -> None:
    recipe = locked(recipe, tmp_path)
    shutil.rmtree(tmp_path / "my-project")
    files = context_files(recipe)
    digest = "a" * 64
    assert files["imgkit/requirements-uv.txt"].splitlines() == [
        f"certifi==2026.10.18 --hash=sha256:{digest}".encode(),
        f"einops==0.8.0 --hash=sha256:{digest}".encode(),
    ]
    link = f'<a href="https://files.example.org/einops-0.8.0-py3-none-any.whl#sha256={digest}">einops-0.8.0-'
    assert link.encode() in files["imgkit/uv.html"]
    text = render.render_dockerfile(recipe)
    assert 'COPY ["imgkit/uv.html", "/opt/imgkit/uv.html"]' in text
    assert "--no-index \\\n        --find-links /opt/imgkit/uv.html" in text
    assert "inside_uv" not in text


def test_kept_wheels_ask_no_server(recipe: Recipe, tmp_path: Path) -> None:
    first = locked(recipe, tmp_path)
    folder = tmp_path / "mine.lock.files"
    folder.mkdir()
    names = [wheel.file for wheel in install.locked_wheels(first, UV_STEP)]
    (folder / names[0]).touch()
    half = lock_file.attach_lock(recipe, platform="linux/amd64")
    assert "/opt/imgkit/locked-pip-uv" in render.render_definition(half)
    assert names[0] not in install.render_uv_links(half)
    assert names[1] in install.render_uv_links(half)
    (folder / names[1]).touch()
    complete = lock_file.attach_lock(recipe, platform="linux/amd64")
    assert "<a " not in install.render_uv_links(complete)


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
        lock_file.attach_lock(load(file), platform="linux/amd64")
    reason = (
        "there is no uv project"
        if change == "none"
        else "uv.lock, or the chosen extras and groups, have changed"
    )
    assert caught.value.what == f"the lock mine.lock is stale: {reason}"
    assert caught.value.where == ("mine.yaml:2" if change == "none" else "mine.yaml:3")


def test_wheels_of_no_uv_project_are_refused(recipe: Recipe, tmp_path: Path) -> None:
    lock = locked(recipe, tmp_path).lock
    assert lock is not None
    part = dataclasses.replace(lock, request=dataclasses.replace(lock.request, uv=""))
    text = lock_file.render_lock(Lock(recipe="mine", imgkit="0.3.0", platforms=(part,)))
    with pytest.raises(UsageError, match="there is no pip step -1 in the request"):
        lock_file.parse_lock(text, tmp_path / "mine.lock")

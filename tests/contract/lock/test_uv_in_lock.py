"""The wheels of a uv project in a lock: how they get there, what a locked build does, and a stale lock."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
from sample_lock import locked_platform, locked_wheel

from imgkit_builder.image import context, install, render
from imgkit_builder.recipe import lock_file
from imgkit_builder.recipe.load import load
from imgkit_builder.recipe.model import UV_STEP, Lock, LockedBase, Recipe
from imgkit_entrypoints.errors import UsageError

RECORDED = Path(__file__).parents[1] / "image" / "my-project"
TEXT = "image:\n  base: python:3\n  uv: {project: my-project}\n"


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    shutil.copytree(RECORDED, tmp_path / "my-project")
    (tmp_path / "mine.yaml").write_text(TEXT)
    return load(tmp_path / "mine.yaml")


def locked(recipe: Recipe) -> Recipe:
    """Return the recipe with a lock beside it."""
    platform = locked_platform(
        request=lock_file.make_request(recipe),
        base=LockedBase(name="python:3", digest=f"sha256:{'b' * 64}"),
        pip=(
            locked_wheel("certifi", "2026.10.18", step=UV_STEP),
            locked_wheel("einops", "0.8.0", step=UV_STEP),
        ),
    )
    file = lock_file.lock_path(recipe)
    file.write_text(lock_file.render_lock(Lock(recipe="mine", imgkit="0.3.0", platforms=(platform,))))
    return lock_file.attach_lock(recipe, platform="linux/amd64")


def test_changed_lock_of_uv_changes_the_recipe(recipe, tmp_path):
    lock = tmp_path / "my-project/uv.lock"
    lock.write_text(lock.read_text() + "\n")
    assert load(recipe.file).sha256 != recipe.sha256
    assert {path.name for path in recipe.sources} >= {"uv.lock", "pyproject.toml"}


def context_files(recipe: Recipe) -> dict[str, bytes]:
    return {member.name: member.data for member in context.list_package_files(recipe)}


def test_locked_step_needs_the_lock_alone(recipe, tmp_path):
    recipe = locked(recipe)
    shutil.rmtree(tmp_path / "my-project")
    files = context_files(recipe)
    digest = "b" * 64
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


def test_kept_wheels_ask_no_server(recipe, tmp_path):
    first = locked(recipe)
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


@pytest.mark.parametrize(
    ("text", "lock_end", "line", "reason"),
    [
        (TEXT, "\n", 3, "uv.lock, or the chosen extras and groups, have changed"),
        (
            TEXT.replace("my-project}", "my-project, extras: [plots]}"),
            "",
            3,
            "uv.lock, or the chosen extras and groups, have changed",
        ),
        ("image: {base: 'python:3'}", "", 1, "there is no uv project"),
    ],
    ids=["lock", "extras", "none"],
)
def test_other_uv_project_makes_the_lock_stale(recipe, tmp_path, text, lock_end, line, reason):
    locked(recipe)
    recipe.file.write_text(text)
    with (tmp_path / "my-project/uv.lock").open("a") as lock:
        lock.write(lock_end)
    with pytest.raises(UsageError) as caught:
        lock_file.attach_lock(load(recipe.file), platform="linux/amd64")
    assert caught.value.what == f"the lock mine.lock is stale: {reason}"
    assert caught.value.where == f"mine.yaml:{line}"


def test_wheels_of_no_uv_project_are_refused(recipe, tmp_path):
    lock = locked(recipe).lock
    assert lock is not None
    platform = dataclasses.replace(lock, request=dataclasses.replace(lock.request, uv=""))
    text = lock_file.render_lock(Lock(recipe="mine", imgkit="0.3.0", platforms=(platform,)))
    with pytest.raises(UsageError, match="there is no pip step -1 in the request"):
        lock_file.parse_lock(text, tmp_path / "mine.lock")

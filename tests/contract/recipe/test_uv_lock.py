"""A lock that uv 0.13.9 wrote: how a recipe's check reads it, and what it refuses."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from imgkit_builder.recipe.load import load
from imgkit_builder.recipe.problems import RecipeErrors

RECORDED = Path(__file__).parents[1] / "image/my-project"
UV = "image:\n  base: python:3\n  uv: {project: my-project%s}\n"

Edit = Callable[..., Path]


@pytest.fixture
def edited(tmp_path: Path) -> Edit:
    """``edited("uv.lock", old, new)``: a recipe for the recorded project, whose file has the new text."""

    def make(name: str = "uv.lock", old: str = "", new: str = "", more: str = "") -> Path:
        shutil.copytree(RECORDED, tmp_path / "my-project")
        file = tmp_path / "my-project" / name
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new, 1))
        (tmp_path / "mine.yaml").write_text(UV % more)
        return tmp_path / "mine.yaml"

    return make


def refusal(file: Path) -> str:
    with pytest.raises(RecipeErrors) as caught:
        load(file)
    return re.sub(r"\S*mine.yaml", "mine.yaml", str(caught.value))


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("version = 1\n", "version = 2\n", "uv.lock has version 2; this imgkit reads version 1"),
        ("revision = 5\n", 'conflicts = [[{ package = "x" }]]\n', "has conflicting extras or groups"),
        ('name = "my-project"', 'name = "other"', "does not know the project my-project"),
        ("[[package]]", "[[package", "uv.lock:16: it is not TOML"),
    ],
)
def test_unusable_lock_is_refused_at_its_line(edited: Edit, old: str, new: str, what: str) -> None:
    problem = refusal(edited(old=old, new=new))
    assert problem.startswith("mine.yaml:3:17: image.uv.project: its uv.lock cannot be used: ")
    assert what in problem


@pytest.mark.parametrize(
    ("old", "new", "line", "name"),
    [
        ("einops==0.8.0", "einops>=0.8.0", 6, "einops"),
        ("requests[socks]", "requests", 8, "requests"),
        ("< '3.11'", "< '3.12'", 7, "tomli"),
        ('    "torchmetrics",\n', "", 0, "torchmetrics"),
        ('    "torchmetrics",\n', '    "torchmetrics",\n    "mine_too",\n', 10, "mine-too"),
    ],
)
def test_stale_lock_names_the_line(edited: Edit, old: str, new: str, line: int, name: str) -> None:
    problem = refusal(edited("pyproject.toml", old, new))
    place = f"pyproject.toml:{line}" if line else "pyproject.toml"
    assert f"image.uv.project: uv.lock is not up to date: {place} and the lock differ about {name}" in problem


@pytest.mark.parametrize("marker", ["python_full_version < '3.11'", "python_version <= '3.10'"])
def test_marker_in_other_words_is_not_stale(edited: Edit, marker: str) -> None:
    load(edited("pyproject.toml", "python_version < '3.11'", marker))


def test_unknown_extra_and_missing_lock(edited: Edit) -> None:
    file = edited(more=", extras: [plot]")
    assert "pyproject.toml has no extra 'plot'; it has plots" in refusal(file)
    (file.parent / "my-project" / "uv.lock").unlink()
    assert "my-project has no uv.lock; write it: uv lock" in refusal(file)


def test_changed_lock_changes_the_recipe(edited: Edit) -> None:
    file = edited()
    first = load(file)
    lock = file.parent / "my-project" / "uv.lock"
    lock.write_text(lock.read_text() + "\n")
    assert load(file).sha256 != first.sha256
    assert {path.name for path in first.sources} >= {"uv.lock", "pyproject.toml"}

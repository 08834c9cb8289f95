"""The project of `image.uv` as a recipe's check sees it: uv itself reads its lock."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from imgkit_builder.recipe.load import load
from imgkit_builder.recipe.problems import RecipeErrors

RECORDED = Path(__file__).parents[1] / "image/my-project"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe for a copy of the recorded project."""
    shutil.copytree(RECORDED, tmp_path / "my-project")
    (tmp_path / "mine.yaml").write_text("image:\n  base: python:3\n  uv: {project: my-project}\n")
    return tmp_path / "mine.yaml"


@pytest.mark.parametrize(
    ("name", "hint"), [("uv.lock", "write it: uv lock"), ("pyproject.toml", "name the folder of one")]
)
def test_project_without_a_file_is_refused_at_its_line(recipe: Path, name: str, hint: str) -> None:
    (recipe.parent / "my-project" / name).unlink()
    with pytest.raises(RecipeErrors) as caught:
        load(recipe)
    assert f"mine.yaml:3:17: image.uv.project: my-project has no {name}; {hint}" in str(caught.value)


def test_changed_lock_changes_the_recipe(recipe: Path) -> None:
    first = load(recipe)
    lock = recipe.parent / "my-project" / "uv.lock"
    lock.write_text(lock.read_text() + "\n")
    assert load(recipe).sha256 != first.sha256
    assert {path.name for path in first.sources} >= {"uv.lock", "pyproject.toml"}

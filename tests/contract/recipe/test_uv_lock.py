"""The project of `image.uv` as a recipe's check sees it: uv itself reads its lock."""

from __future__ import annotations

import shutil
from pathlib import Path

from imgkit_builder.recipe.load import load

RECORDED = Path(__file__).parents[1] / "image/my-project"


def test_changed_lock_changes_the_recipe(tmp_path: Path) -> None:
    shutil.copytree(RECORDED, tmp_path / "my-project")
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("image:\n  base: python:3\n  uv: {project: my-project}\n")
    first = load(recipe)
    lock = tmp_path / "my-project/uv.lock"
    lock.write_text(lock.read_text() + "\n")
    assert load(recipe).sha256 != first.sha256
    assert {path.name for path in first.sources} >= {"uv.lock", "pyproject.toml"}

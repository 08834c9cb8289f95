"""Recipes made by hand, so that these tests need no YAML, and the command line in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from imgkit_builder.recipe.model import Image, Position, Recipe, RunCommand
from imgkit_entrypoints.system import SystemFacts

MakeRecipe = Callable[..., Recipe]


@pytest.fixture
def make_recipe() -> MakeRecipe:
    """``make_recipe(apt=("git",), lines={("image", "apt", 0): 7})``: image fields, and where they stand."""

    def make(*, lines: dict[tuple[str | int, ...], int] | None = None, **image: Any) -> Recipe:
        file = Path("/recipes/mine.yaml")
        commands = image.pop("run", ())
        image["run"] = tuple(RunCommand(command=one) if isinstance(one, str) else one for one in commands)
        return Recipe(
            name="mine",
            image=Image(**{"base": "example.org/base:1", **image}),
            system=SystemFacts(),
            file=file,
            sha256="0" * 64,
            positions={
                path: Position(file=file, line=line, column=3)
                for path, line in {("image",): 2, ("image", "base"): 3, **(lines or {})}.items()
            },
        )

    return make

"""The shipped recipes, systems and templates, as data; this module only has their paths."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
SYSTEMS = FOLDER / "systems"
"""One file for each system that recipes can name."""


def recipe_names() -> tuple[str, ...]:
    """Names of the shipped recipes, sorted: ``imgkit build NAME``."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def recipe_path(name: str) -> Path:
    """Path of the shipped recipe `name`, whether it exists or not."""
    return FOLDER / f"{name}.yaml"

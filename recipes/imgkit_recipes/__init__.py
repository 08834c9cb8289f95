"""The shipped recipes and templates, as data: this module only says where they are."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent


def recipe_names() -> tuple[str, ...]:
    """Names that ``imgkit build NAME`` takes without a path, sorted."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def recipe_path(name: str) -> Path:
    """Path of the shipped recipe `name`; it may not exist."""
    return FOLDER / f"{name}.yaml"

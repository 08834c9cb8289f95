"""Recipes: ``load.load`` turns YAML into checked, frozen values."""

from imgkit_builder.recipe.model import (
    BuildSecret,
    Constraints,
    CopyStep,
    Image,
    PipStep,
    Platform,
    Recipe,
    RunCommand,
)
from imgkit_builder.recipe.problems import Position, Problem, RecipeErrors

__all__ = [
    "BuildSecret",
    "Constraints",
    "CopyStep",
    "Image",
    "PipStep",
    "Platform",
    "Position",
    "Problem",
    "Recipe",
    "RecipeErrors",
    "RunCommand",
]

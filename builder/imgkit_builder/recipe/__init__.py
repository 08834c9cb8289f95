"""Recipes: YAML in, checked frozen values out (``load``)."""

from imgkit_builder.recipe.model import Constraints, CopyStep, Image, PipStep, Platform, Position, Recipe

__all__ = ["Constraints", "CopyStep", "Image", "PipStep", "Platform", "Position", "Recipe"]

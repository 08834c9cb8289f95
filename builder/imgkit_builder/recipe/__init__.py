"""Recipes: ``load.load`` turns YAML into checked, frozen values."""

from imgkit_builder.recipe.model import Image, Recipe

__all__ = ["Image", "Recipe"]

"""Recipes: ``load.load`` converts YAML to the checked and immutable values of ``model``."""

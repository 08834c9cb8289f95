"""Recipes: ``load.load`` turns YAML into the checked, frozen values of ``model``."""

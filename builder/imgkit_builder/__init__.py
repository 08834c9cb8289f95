"""The host half of imgkit: from a recipe to a checked .sif. Needs no torch."""

from imgkit_entrypoints import __version__

__all__ = ["__version__"]

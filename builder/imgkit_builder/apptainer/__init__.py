"""Builds a recipe without an engine: the runtime runs the rendered definition, and the result is a .sif."""

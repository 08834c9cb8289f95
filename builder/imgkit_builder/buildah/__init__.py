"""Builds a recipe without an engine by the program buildah: the Dockerfile of every build, and no root."""

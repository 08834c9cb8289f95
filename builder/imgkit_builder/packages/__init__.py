"""Packages for an image that exists: pip runs in it, and a squashfs beside it holds what it lacks."""

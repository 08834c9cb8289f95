"""Add packages to an image that exists: pip runs in it, and a squashfs beside it holds the result."""

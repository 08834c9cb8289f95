"""Add Python packages to an existing image.

pip runs in the image, and its result is stored in a squashfs file beside the image.
"""

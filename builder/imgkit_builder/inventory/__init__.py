"""List what an image contains: its packages, their digests, and an SPDX document about them.

These modules read and write no files. Their callers pass the contents of files in. Read them in this order:
``packages``, ``collector``, ``spdx``.
"""

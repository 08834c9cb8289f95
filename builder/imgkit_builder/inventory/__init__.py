"""List what an image holds: its packages, their digests, and the SPDX document about them.

These modules read and write no files; their callers pass in the content. Read them in this order:
``packages``, ``collector``, ``spdx``.
"""

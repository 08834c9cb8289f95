"""What an image holds: packages, their digests, and the document that lists them. Pure.

Read in this order: ``packages``, ``collector``, ``spdx``.
"""

"""What an image holds: packages, their licences and digests, and the document that lists them. Pure.

Read in this order: ``packages``, ``paragraphs``, ``licences``, ``debian``, ``python``,
``lock_entries``, ``collector``, ``purl``, ``spdx``.
"""

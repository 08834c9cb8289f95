"""What an image holds: packages, their licences and digests, and the document that lists them. Pure.

Read in this order: ``packages``, ``licences``, ``collector``, ``spdx``.
"""

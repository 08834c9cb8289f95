"""Resolves what a recipe asks for into a lock, inside the base and by the base's own pip and apt.

Read in this order: ``resolve`` (the one effect: what the base receives, and the lock that is written),
``inside_apt`` and ``inside_pip`` (which run there), ``answers`` (what comes back) and ``changes``.
"""

"""Resolves what a recipe asks for into a lock, inside the base and by the base's own pip and apt.

Read in this order: ``order`` (what the base receives), ``inside_apt`` and ``inside_pip`` (which run there),
``answers`` (what comes back), ``resolve`` (the one effect), ``changes`` and ``place``.
"""

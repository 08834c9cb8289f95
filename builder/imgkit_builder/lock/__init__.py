"""Resolves a recipe into a lock, inside the base and by the base's own pip and apt.

Read in this order: ``resolve`` (the context with the request, the build, and the lock that is written),
``inside`` (which runs in the base), ``answers`` (what comes back) and ``changes``.
"""

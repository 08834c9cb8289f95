"""dist-bench: time and verify collectives, with the sizes and bus bandwidths of nccl-tests.

A run, from the top down: ``sweep`` (all collectives and sizes in order) on what ``setup`` prepares;
``measurement`` (one collective at one size), ``collectives`` (the record of each collective) and ``verify``
(its expected values); ``table``, ``record`` and ``chart`` (what is printed and saved), ``verdict`` (the
comparison with the expected busbw). ``exchange`` is a measurement of the preflight.
"""

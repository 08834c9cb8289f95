"""dist-bench: measure, verify and judge collectives. The command line, saved files and reports need no torch.

A run, from the top down: ``sweep`` (all collectives and sizes in order) with ``setup`` and ``outcome``;
``measurement`` (one collective at one size, timed twice), ``collectives`` (the record of each collective) and
``verify`` (its expected values); ``record`` (the saved file) and ``verdict`` (the figures in sentences).

Other modes: ``soak`` (``--duration``), ``compute`` (``--compute``, ``--overlap``), ``matrix`` (``--matrix``),
``baseline`` (``--baseline``) and ``report`` (saved
runs as a page; it uses ``record`` only).
"""

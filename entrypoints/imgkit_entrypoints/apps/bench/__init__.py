"""dist-bench: time and verify collectives, with the sizes and bus bandwidths of nccl-tests.

The modules, from the top down:

* ``sweep`` runs all collectives and sizes in order, with the objects that ``setup`` prepares.
* ``measurement`` measures one collective at one size. ``collectives`` describes each collective, and
  ``verify`` has the expected values of its result.
* ``table``, ``record`` and ``chart`` format the results that are printed and saved.
* ``verdict`` compares the results with the bus bandwidth (busbw) that the network should reach.
* ``exchange`` measures the bandwidth between two nodes for the preflight, the checks before a run.
"""

"""Run, time and verify collectives; read the node's port counters and GPUs, and NCCL's log.

From the top down: ``measurement``, ``matrix`` and ``overlap`` use ``one_size``, ``operations``
and ``timing``, those use ``counts``, ``groups``, ``verify``, ``collectives`` and ``dtypes``.
Nothing here imports another sub-room of dist-bench.
"""

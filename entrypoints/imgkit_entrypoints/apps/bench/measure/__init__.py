"""Run, time and verify collectives; read the node's port counters and GPUs, and NCCL's log.

From the top down: ``measurement`` and ``matrix`` use ``operations`` and ``timing``, those use ``groups``,
``verify``, ``collectives`` and ``dtypes``. Nothing here imports another sub-room of dist-bench.
"""

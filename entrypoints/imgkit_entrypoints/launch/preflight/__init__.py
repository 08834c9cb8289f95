"""``--preflight``: the nodes are measured between the roll call and the start of torchrun.

`stages` orders the measurements, `judge` turns their figures into a verdict, `report` prints it. `run` leads
a node through the stages, and `worker` is its measuring process (apps/preflight).
"""

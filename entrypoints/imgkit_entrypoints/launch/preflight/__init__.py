"""``--preflight``: measure all nodes between the roll call and the start of torchrun.

The module `run` leads a node through the stages of the measurement. The process that measures a node
(apps/preflight) uses the code of dist-doctor and dist-bench. The module `verdict` decides which nodes and
which links between nodes are slow.
"""

"""``--preflight``: the nodes are measured between the roll call and the start of torchrun.

`run` leads a node through the stages; its measuring process (apps/preflight) uses the code of dist-doctor and
dist-bench. `verdict` says which nodes are slow, and which links.
"""

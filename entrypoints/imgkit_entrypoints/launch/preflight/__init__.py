"""``--preflight``: the nodes are measured between the roll call and the start of torchrun.

`run` leads a node through the stages; its measuring process (apps/preflight) measures by dist-bench's code.
`verdict` has the order of the stages, the verdict on the figures, and its report.
"""

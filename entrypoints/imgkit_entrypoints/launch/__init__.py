"""The launcher of one node: plan, start, watch and end torchrun."""

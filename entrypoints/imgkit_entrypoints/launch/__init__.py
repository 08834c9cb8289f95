"""The node agent: it plans, starts, watches and ends torchrun on its node."""

"""The process that measures a node before a run starts (preflight).

The node agent, which is imgkit's process on each node, starts it and sends it requests (launch/preflight).
"""

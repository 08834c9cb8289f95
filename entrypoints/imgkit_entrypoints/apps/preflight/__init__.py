"""The measuring process of a preflight, one on each node; the node agent (launch/preflight) leads it."""

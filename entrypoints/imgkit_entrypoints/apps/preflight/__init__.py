"""The process that measures a node in a preflight. The node agent (launch/preflight) starts and leads it."""

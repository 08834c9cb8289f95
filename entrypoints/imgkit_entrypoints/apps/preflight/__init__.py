"""The measuring process of a preflight, one on each node; the launcher (launch/preflight) leads it."""

"""One module per launcher: how to start a process on each node, and how it finds its node rank."""

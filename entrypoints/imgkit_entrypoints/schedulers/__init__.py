"""One module per launcher: its argv for one process per node, and how that process finds its node rank."""

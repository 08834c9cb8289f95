"""dist-doctor: what this node has, and what is wrong with it."""

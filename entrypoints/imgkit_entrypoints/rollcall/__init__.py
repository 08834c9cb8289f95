"""The roll call: the node agents of all nodes meet before the start, and stay connected until the end."""

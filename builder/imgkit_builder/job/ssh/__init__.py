"""Jobs without a scheduler: a list of hosts, and one ssh connection per host."""

"""Jobs without a scheduler: a list of hosts, one ssh connection per host."""

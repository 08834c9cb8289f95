"""dist-doctor on one node: `node` checks it, `bundle` saves it for a replay, `checks` holds the rules."""

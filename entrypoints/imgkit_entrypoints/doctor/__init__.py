"""dist-doctor on one node: `node` checks it by the rules in `checks`."""

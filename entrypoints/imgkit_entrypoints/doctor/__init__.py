"""dist-doctor on one node: `node` checks it by the rules in `checks`, `bundle` saves it for a replay.

`saved_environment` chooses the variables in a bundle and reads them for a replay.
"""
